// The innermost step of every product here: ROWS x COLUMNS accumulators held in registers, each step multiplying one
// broadcast lane per row with one loaded vector per column.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace diptych {

// As many accumulators as leave room for one vector per column and a broadcast; enough of them that the multiply-adds
// do not wait for one another.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int ROWS = 6, COLUMNS = 2;
#else
constexpr int ROWS = 6, COLUMNS = 4;
#endif

// Calls `body` with std::integral_constant<int, n>, so that n unrolls loops. 1 <= n <= MAX.
template <int MAX, class Body>
inline void with_constant(int n, Body body) {
    if constexpr (MAX > 1) {
        if (n < MAX) return with_constant<MAX - 1>(n, body);
    }
    body(std::integral_constant<int, MAX>{});
}

// Covers num_rows x num_vectors with register blocks: body(row, vector, r, n) for each, r and n being constants.
template <class Body>
inline void for_each_register_block(int num_rows, int num_vectors, Body body) {
    for (int vector = 0; vector < num_vectors; vector += COLUMNS) {
        with_constant<COLUMNS>(std::min(COLUMNS, num_vectors - vector), [&](auto n) {
            for (int row = 0; row < num_rows; row += ROWS) {
                with_constant<ROWS>(std::min(ROWS, num_rows - row), [&](auto r) { body(row, vector, r, n); });
            }
        });
    }
}

// sums[r][n] += row(r) * column(n).   row gives a lane, column a vector of lanes
template <class Element, int R, int N, class Row, class Column>
inline void accumulate(F32 (&sums)[R][N], Row row, Column column) {
    I32 columns[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) columns[n] = column(n);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const I32 lane = splat(row(r));
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[r][n] = Element::dot(sums[r][n], lane, columns[n]);
    }
}

template <int R, int N>
inline void add_block(F32 (&sums)[R][N], const float* source, int64_t row_stride) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[r][n] += load<F32>(source + r * row_stride + n * WIDTH);
    }
}

template <int R, int N>
inline void store_block(const F32 (&sums)[R][N], float* target, int64_t row_stride) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(target + r * row_stride + n * WIDTH, sums[r][n]);
    }
}

template <int BYTES>
inline void prefetch(const void* address) {
#pragma GCC unroll 8
    for (int offset = 0; offset < BYTES; offset += 64) __builtin_prefetch((const char*)address + offset);
}

}  // namespace diptych
