// A KV cache of bytes: how it is stored, and the two products over it, which are sums of whole numbers.
//
// A byte e of a key or value stands for step * (e - 128). The step is that of one token and KV head, its largest magnitude
// over 127, so what is stored of a token depends on that token alone. Per block of 16 slots and KV head, in 32-bit words:
//     keys         [head_dim / 4][16 slots]      four dimensions of a key
//     key steps    [16 slots] fp32
//     value steps  [16 slots] fp32
//     values       [16 / 4 slots][head_dim]      one dimension of four slots
// A word's bytes 0 and 2 are its first two elements, 1 and 3 the others: two masks make pairs of 16-bit numbers of them.
//
// What they are multiplied by, queries and softmax weights, become 16-bit whole numbers with a step for each vector (and
// tile), 256 times as fine as the cache's. The products are exact, whatever the instruction set and the order.
#pragma once

#include "attention_tile.h"
#include "quantize.h"

namespace diptych {

constexpr int BYTE_ZERO = 128;
constexpr float LARGEST_BYTE = 127.0f, LARGEST_SHORT = 32767.0f;
static_assert((int64_t)BYTE_ZERO * 32767 * std::max(MAX_HEAD_DIM, TILE) < INT32_MAX, "a product's sum must fit");

// sum + the products of the two 16-bit numbers of each lane
inline I32 dot_shorts(I32 sum, I32 a, I32 b) {
#if defined(__AVX512VNNI__)
    return (I32)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (I32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Where the element of this number among four is in their word.
inline int byte_of(int element) { return element / 2 + element % 2 * 2; }

// The first two elements of each word, or the other two.
inline I32 unpack(I32 word, int half) {
    typedef uint16_t Shorts __attribute__((vector_size(4 * WIDTH)));
    return half ? (I32)((Shorts)word >> 8) : word & 0x00ff00ff;
}

// sums[r][n] += the four elements of each word of column(n) times the four 16-bit numbers at row(r).
template <int R, int N, class Row, class Column>
inline void accumulate_bytes(I32 (&sums)[R][N], Row row, Column column) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        I32 columns[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) columns[n] = unpack(column(n), half);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const I32 pair = splat(row(r)[half]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[r][n] = dot_shorts(sums[r][n], columns[n], pair);
        }
    }
}

// The 16-bit form of each vector's query or weights: step * whole. A product starts from what the bytes' zero is to add.
struct Shorts {
    float steps[MAX_VECTORS];
    int32_t starts[MAX_VECTORS];

    void set(int v, float magnitude, I32 sum) {
        steps[v] = magnitude / LARGEST_SHORT;
        starts[v] = -BYTE_ZERO * reduce_sum(sum);
    }

    template <int R, int N>
    void start(I32 (&sums)[R][N], int v) const {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[r][n] = splat(starts[v + r]);
        }
    }
};

template <class Element>
struct Int8Cache {
    using Scalar = typename Element::Scalar;
    using Word = int32_t;  // a key's or value's four bytes
    static constexpr bool NEEDS_ZEROS = false;  // whatever a byte is, it is a number

    // 32-bit words of a block of one KV head, and those before its values.
    static int64_t block_words(int head_dim) { return values_offset(head_dim) + BLOCK / 4 * head_dim; }
    static int64_t values_offset(int head_dim) { return BLOCK * (head_dim / 4 + 2); }

    static void store_token(int32_t* block, int offset, const Scalar* key, const Scalar* value, int head_dim) {
        uint8_t bytes[MAX_HEAD_DIM];
        float* steps = (float*)block + BLOCK * (head_dim / 4) + offset;
        steps[0] = quantize(bytes, key, head_dim);
        auto* keys = (uint8_t*)(block + offset);
        for (int d = 0; d < head_dim; ++d) keys[d / 4 * 4 * BLOCK + byte_of(d % 4)] = bytes[d];
        steps[BLOCK] = quantize(bytes, value, head_dim);
        auto* values = (uint8_t*)(block + values_offset(head_dim) + offset / 4 * head_dim) + byte_of(offset % 4);
        for (int d = 0; d < head_dim; ++d) values[d * 4] = bytes[d];
    }

    // Returns the step.
    static float quantize(uint8_t* bytes, const Scalar* x, int head_dim) {
        const float magnitude = magnitude_of<Element>(x, head_dim);
        const F32 inverse = splat(inverse_step(magnitude, LARGEST_BYTE));
        for (int d = 0; d < head_dim; d += WIDTH) {
            const I32 whole = round_to_whole(Element::widen(x + d) * inverse) + BYTE_ZERO;
            store(bytes + d, __builtin_convertvector(whole, I8));
        }
        return magnitude / LARGEST_BYTE;
    }

    static void copy_used(int32_t*, const int32_t*, int, int) {}

    struct Queries {
        Shorts shorts;
        alignas(64) int16_t elements[MAX_VECTORS][MAX_HEAD_DIM];

        void set(int v, const Scalar* query, int head_dim) {
            const float magnitude = magnitude_of<Element>(query, head_dim);
            const F32 inverse = splat(inverse_step(magnitude, LARGEST_SHORT));
            I32 sum = {};
            for (int d = 0; d < head_dim; d += WIDTH) {
                const I32 whole = round_to_whole(Element::widen(query + d) * inverse);
                sum += whole;
                store(elements[v] + d, __builtin_convertvector(whole, I16));
            }
            shorts.set(v, magnitude, sum);
        }
    };

    // scores[r][n * WIDTH + i] = queries[v + r] . key i of column n; a column is WIDTH slots of one block.
    template <int R, int N>
    static void score(const Queries& queries, int v, const int32_t* const* columns, int head_dim, float* scores) {
        const int num_words = head_dim / 4;
        I32 sums[R][N];
        queries.shorts.start(sums, v);
        for (int word = 0; word < num_words; ++word) {
            if (v == 0) fetch_ahead<N>(columns, word * BLOCK * 4);
            accumulate_bytes(
                sums, [&](int r) { return (const int32_t*)queries.elements[v + r] + 2 * word; },
                [&](int n) { return load<I32>(columns[n] + word * BLOCK); });
        }
        if (v == 0) {
            fetch_ahead<N>(columns, num_words * BLOCK * 4);
            fetch_ahead<N>(columns, (num_words + 1) * BLOCK * 4);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            const F32 key_steps = load<F32>(columns[n] + num_words * BLOCK);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F32 sum = __builtin_convertvector(sums[r][n], F32);
                store(scores + r * TILE + n * WIDTH, sum * splat(queries.shorts.steps[v + r]) * key_steps);
            }
        }
    }

    // The scores of a tile as weights, in their place and as 16-bit numbers. A value's step is part of its weight.
    struct Weights {
        Shorts shorts;

        // Turns the scores of vector v into 2^(score * scale - max_score) and returns their sum.
        float set(int v, float* scores, int num_slots, float scale, float max_score, const int32_t* const* values) {
            const F32 minus_max = splat(max_score == NOTHING ? 0.0f : -max_score);
            F32 sums = {};
            Magnitude magnitude;
            for (int slot = 0; slot < num_slots; slot += WIDTH) {
                const F32 weight = exp2(fma(load<F32>(scores + slot), splat(scale), minus_max));
                sums += weight;
                const F32 value_steps = load<F32>(values[slot / BLOCK] - BLOCK + slot % BLOCK);
                // Whoever does not see a slot takes nothing of it, even if its step is NaN.
                const F32 scaled = (F32)((I32)(weight * value_steps) & (weight != F32{}));
                magnitude.add(scaled);
                store(scores + slot, scaled);
            }
            const F32 inverse = splat(inverse_step(magnitude.value(), LARGEST_SHORT));
            I32 sum = {};
            for (int slot = 0; slot < num_slots; slot += WIDTH) {
                const I32 whole = round_to_whole(load<F32>(scores + slot) * inverse);
                sum += whole;
                store((int16_t*)scores + slot, __builtin_convertvector(whole, I16));
            }
            shorts.set(v, magnitude.value(), sum);
            return reduce_sum(sums);
        }
    };

    // output[r][0 : N * WIDTH] = weights of vector v + r . values[dim : dim + N * WIDTH], over the slots of some blocks.
    template <int R, int N>
    static void weigh(const Weights& weights, const float* scores, int v, const int32_t* const* values, int num_blocks,
                      int head_dim, int dim, float* output) {
        I32 sums[R][N];
        weights.shorts.start(sums, v);
        for (int block = 0; block < num_blocks; ++block) {
            const int32_t* block_weights = (const int32_t*)(scores + v * TILE) + block * (BLOCK / 2);
            const int32_t* block_values = values[block] + dim;
            const int32_t* later_values = values[block + BLOCKS_AHEAD] + dim;
            for (int word = 0; word < BLOCK / 4; ++word) {
                if (v == 0) prefetch<N * WIDTH * 4>(later_values + word * head_dim);
                accumulate_bytes(
                    sums, [&](int r) { return block_weights + r * TILE + 2 * word; },
                    [&](int n) { return load<I32>(block_values + word * head_dim + n * WIDTH); });
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F32 step = splat(weights.shorts.steps[v + r]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                store(output + r * head_dim + n * WIDTH, __builtin_convertvector(sums[r][n], F32) * step);
            }
        }
    }
};

}  // namespace diptych
