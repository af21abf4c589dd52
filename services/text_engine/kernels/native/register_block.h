// The innermost step of every product here: ROWS x COLUMNS accumulators held in registers, each step multiplying one
// broadcast lane per row with one loaded vector per column.
#pragma once

#include <type_traits>

#include "simd.h"

namespace diptych {

// As many accumulators as leave room for one vector per column and a broadcast; enough of them that the multiply-adds
// do not wait for one another.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int ROWS = 4, COLUMNS = 2;
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
inline void store_block(const F32 (&sums)[R][N], float* target, int64_t row_stride) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(target + r * row_stride + n * WIDTH, sums[r][n]);
    }
}

template <int N>
inline void prefetch(const int32_t* address) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) __builtin_prefetch(address + n * WIDTH);
}

}  // namespace diptych
