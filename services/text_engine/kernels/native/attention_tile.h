// Softmax over a tile of positions, and the merge of two tiles' results. The products are the cache's: plain_cache.h and
// int8_cache.h. attention.cpp decides which vectors meet which tiles, and where those are.
#pragma once

#include <algorithm>
#include <limits>

#include "register_block.h"

namespace diptych {

constexpr int BLOCK = 16;
constexpr int TILE_BLOCKS = 16;
constexpr int TILE = BLOCK * TILE_BLOCKS;
// Blocks lie anywhere in memory, out of reach of the hardware's own prefetching: they are fetched so many ahead.
constexpr int BLOCKS_AHEAD = 4;
constexpr int COLUMNS_PER_BLOCK = BLOCK / WIDTH;
constexpr int COLUMNS_AHEAD = BLOCKS_AHEAD * COLUMNS_PER_BLOCK;

// The first of the vectors that meet some columns fetches for all of them: a line for each block among N columns.
template <int N>
inline void fetch_ahead(const int32_t* const* columns, int byte) {
#pragma GCC unroll 8
    for (int n = 0; n < N; n += COLUMNS_PER_BLOCK) __builtin_prefetch((const char*)columns[n + COLUMNS_AHEAD] + byte);
}
constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_VECTORS = 48;  // per work item: its scores, 48 x 256 fp32, live in the first- and second-level cache
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// What some positions contribute to each of several vectors: softmax's maximum (base 2) and sum, the unnormalized output.
struct Partial {
    float* max;
    float* sum;
    float* output;  // [num_vectors, head_dim]

    Partial(float* memory, int num_vectors)
        : max(memory), sum(memory + num_vectors), output(memory + 2 * num_vectors) {}

    static int64_t size(int num_vectors, int head_dim) { return (int64_t)num_vectors * (head_dim + 2); }
};

// Softmax in two passes, each over all vectors of a tile: one vector's passes wait for each other, neighbours' do not.

// The largest score among slots [first, last) of [0, num_slots); the others become -inf whatever they hold, NaN included.
inline float mask_and_max(float* scores, int num_slots, int first, int last) {
    I32 index;
    for (int i = 0; i < WIDTH; ++i) index[i] = i;
    F32 highest = splat(NOTHING);
    for (int slot = 0; slot < num_slots; slot += WIDTH) {
        F32 score = load<F32>(scores + slot);
        if (slot < first || slot + WIDTH > last) {
            const I32 visible = (index >= splat(first - slot)) & (index < splat(last - slot));
            score = (F32)(((I32)score & visible) | ((I32)splat(NOTHING) & ~visible));
            store(scores + slot, score);
        }
        highest = max(highest, score);
    }
    return reduce_max(highest);
}

// scores = soft_cap * tanh(scores * scale / soft_cap), in place, by way of exp2; unused slots may hold anything.
inline void cap(float* scores, int num_slots, float scale, float soft_cap) {
    for (int slot = 0; slot < num_slots; slot += WIDTH) {
        // tanh(x) = (1 - e^-2x) / (1 + e^-2x). From -20 down it is -1 to the last bit, and the power must not overflow.
        const F32 x = max(splat(-20.0f), load<F32>(scores + slot) * splat(scale / soft_cap));
        const F32 power = exp2(x * splat(-2 * 1.44269504f));
        store(scores + slot, splat(soft_cap) * ((splat(1.0f) - power) / (splat(1.0f) + power)));
    }
}

inline void merge(Partial& total, const Partial& tile, int num_vectors, int head_dim) {
    for (int v = 0; v < num_vectors; ++v) {
        if (tile.max[v] == NOTHING) continue;
        const float highest = std::max(total.max[v], tile.max[v]);
        const F32 keep = exp2(splat(total.max[v] - highest));
        const F32 add = exp2(splat(tile.max[v] - highest));
        total.max[v] = highest;
        total.sum[v] = total.sum[v] * keep[0] + tile.sum[v] * add[0];
        float* into = total.output + v * head_dim;
        const float* from = tile.output + v * head_dim;
        for (int d = 0; d < head_dim; d += WIDTH) store(into + d, load<F32>(into + d) * keep + load<F32>(from + d) * add);
    }
}

inline void clear(Partial& total, int num_vectors, int head_dim) {
    std::fill_n(total.max, num_vectors, NOTHING);
    std::fill_n(total.sum, num_vectors, 0.0f);
    std::fill_n(total.output, (int64_t)num_vectors * head_dim, 0.0f);
}

}  // namespace diptych
