// How rows of lanes are stored, some vectors of them at a time: as they are multiplied, or as 16 bits each, which are
// widened in registers; that is exact.
//
// `column(words, n)` is the n-th vector of WIDTH lanes, `place(i)` where lane i stands. Vectors of one GRANULE cannot be
// taken apart: n and the vectors that are read are counted from where one begins.
#pragma once

#include "simd.h"

namespace diptych {

struct WholeLanes {
    using Word = int32_t;
    static constexpr int GRANULE = 1;
    static int place(int lane) { return lane; }
    static I32 column(const Word* words, int n) { return load<I32>(words + n * WIDTH); }
};

// Two vectors interleaved: one load, a shift for the one and a mask for the other.
struct Bf16Pairs {
    using Word = uint16_t;
    static constexpr int GRANULE = 2;
    static int place(int lane) {
        const int column = lane / WIDTH;
        return column / 2 * 2 * WIDTH + lane % WIDTH * 2 + column % 2;
    }
    static I32 column(const Word* words, int n) {
        const I32 both = load<I32>(words + n / 2 * 2 * WIDTH);
        return n % 2 ? both & splat((int32_t)0xffff0000) : both << 16;
    }
};

struct Bf16Lanes {
    using Word = uint16_t;
    static constexpr int GRANULE = 1;
    static int place(int lane) { return lane; }
    static I32 column(const Word* words, int n) { return (I32)widen_bf16(load<U16>(words + n * WIDTH)); }
};

struct Fp16Lanes {
    using Word = uint16_t;
    static constexpr int GRANULE = 1;
    static int place(int lane) { return lane; }
    static I32 column(const Word* words, int n) { return (I32)widen_fp16(load<U16>(words + n * WIDTH)); }
};

}  // namespace diptych
