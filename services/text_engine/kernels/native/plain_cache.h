// A KV cache in the model's own type, or in bf16 where that is fp32: how it is stored, and the two products over it.
//
// Per block of 16 slots and KV head, in lanes (see simd.h and stored_lanes.h):
//     keys    [head_dim / PER_LANE][16 slots]      one load holds the same dimension(s) of 16 keys
//     values  [16 / PER_LANE slots][head_dim]      one load holds 16 dimensions of the same slot(s)
// so both products are the same register-blocked loop, a broadcast query or weight lane times loaded vectors, with no
// horizontal sums, no transposition and no copy out of the cache.
#pragma once

#include "attention_tile.h"
#include "stored_lanes.h"

namespace diptych {

// Of the two ways to lay out bf16 the quicker one; a block has as many slots as one vector of the widest kind has lanes.
using Bf16Slots = std::conditional_t<COLUMNS_PER_BLOCK % 2 == 0, Bf16Pairs, Bf16Lanes>;

template <class Element, class Stored = WholeLanes>
struct PlainCache {
    using Scalar = typename Element::Scalar;
    using Word = typename Stored::Word;
    static constexpr int PER_LANE = Element::PER_LANE;
    static constexpr int GRANULE = Stored::GRANULE;
    static constexpr bool IS_NARROWER = sizeof(Word) < sizeof(int32_t);
    static_assert(!IS_NARROWER || PER_LANE == 1, "only whole lanes can be widened");
    // Unused slots may hold anything, and a weight of zero times NaN is NaN.
    static constexpr bool NEEDS_ZEROS = true;

    // 32-bit words of a block of one KV head, and those before its values.
    static int64_t block_words(int head_dim) { return 2 * values_offset(head_dim); }
    static int64_t values_offset(int head_dim) { return BLOCK / PER_LANE * head_dim * sizeof(Word) / sizeof(int32_t); }

    static void store_token(int32_t* block, int offset, const Scalar* key, const Scalar* value, int head_dim) {
        if constexpr (IS_NARROWER) {
            uint16_t narrowed[2][MAX_HEAD_DIM];
            for (int d = 0; d < head_dim; d += WIDTH) {
                store(narrowed[0] + d, round_bf16(Element::widen(key + d)));
                store(narrowed[1] + d, round_bf16(Element::widen(value + d)));
            }
            auto* keys = (Word*)block + Stored::place(offset);
            for (int d = 0; d < head_dim; ++d) keys[d * BLOCK] = narrowed[0][d];
            auto* values = (Word*)(block + values_offset(head_dim)) + offset * head_dim;
            for (int d = 0; d < head_dim; ++d) values[Stored::place(d)] = narrowed[1][d];
        } else {
            int32_t* keys = block + offset;
            for (int lane = 0; lane < head_dim / PER_LANE; ++lane) keys[lane * BLOCK] = ((const int32_t*)key)[lane];
            // Element by element: the other half of a lane is another token's, perhaps being stored by another thread.
            auto* values = (Scalar*)(block + values_offset(head_dim) + offset / PER_LANE * head_dim) + offset % PER_LANE;
            for (int d = 0; d < head_dim; ++d) values[d * PER_LANE] = value[d];
        }
    }

    // A block's values with its unused slots zeroed.
    static void copy_used(int32_t* target, const int32_t* values, int num_used, int head_dim) {
        const int full = num_used / PER_LANE * head_dim;
        const int partial = num_used % PER_LANE * head_dim;
        auto* words = (Word*)target;
        std::fill_n(std::copy_n((const Word*)values, full, words), BLOCK / PER_LANE * head_dim - full, 0);
        for (int i = full; i < full + partial; ++i) words[i] = ((const Word*)values)[i] & 0xffff;
    }

    struct Queries {
        const int32_t* lanes[MAX_VECTORS];

        void set(int v, const Scalar* query, int) { lanes[v] = (const int32_t*)query; }
    };

    // scores[r][n * WIDTH + i] = queries[v + r] . key i of column n; a column is WIDTH slots of one block.
    template <int R, int N>
    static void score(const Queries& queries, int v, const int32_t* const* columns, int head_dim, float* scores) {
        F32 sums[R][N] = {};
        for (int lane = 0; lane < head_dim / PER_LANE; ++lane) {
            if (v == 0) fetch_ahead<N>(columns, lane * BLOCK * (int)sizeof(Word));
            accumulate<Element>(
                sums, [&](int r) { return queries.lanes[v + r][lane]; },
                [&](int n) {
                    return Stored::column((const Word*)columns[n / GRANULE * GRANULE] + lane * BLOCK, n % GRANULE);
                });
        }
        store_block(sums, scores, TILE);
    }

    // The scores of a tile as weights, in their place and in the cache's type.
    struct Weights {
        // Turns the scores of vector v into 2^(score * scale - max_score) and returns their sum.
        float set(int, float* scores, int num_slots, float scale, float max_score, const int32_t* const*) {
            const F32 minus_max = splat(max_score == NOTHING ? 0.0f : -max_score);
            auto* weights = (Scalar*)scores;
            F32 sums = {};
            for (int slot = 0; slot < num_slots; slot += WIDTH) {
                const F32 weight = exp2(fma(load<F32>(scores + slot), splat(scale), minus_max));
                Element::narrow(weights + slot, weight);
                sums += weight;
            }
            return reduce_sum(sums);
        }
    };

    // output[r][0 : N * WIDTH] = weights of vector v + r . values[dim : dim + N * WIDTH], over the slots of some blocks.
    template <int R, int N>
    static void weigh(const Weights&, const float* scores, int v, const int32_t* const* values, int num_blocks,
                      int head_dim, int dim, float* output) {
        constexpr int LANES = BLOCK / PER_LANE;
        F32 sums[R][N] = {};
        for (int block = 0; block < num_blocks; ++block) {
            const int32_t* block_weights = (const int32_t*)(scores + v * TILE) + block * LANES;
            const Word* block_values = (const Word*)values[block] + dim;
            const Word* later_values = (const Word*)values[block + BLOCKS_AHEAD] + dim;
            for (int lane = 0; lane < LANES; ++lane) {
                if (v == 0) prefetch<N * WIDTH * sizeof(Word)>(later_values + lane * head_dim);
                accumulate<Element>(
                    sums, [&](int r) { return block_weights[r * TILE + lane]; },
                    [&](int n) { return Stored::column(block_values + lane * head_dim, n); });
            }
        }
        store_block(sums, output, head_dim);
    }
};

}  // namespace diptych
