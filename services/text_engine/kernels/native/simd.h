// Vectors as wide as the instruction set the file is compiled for, and the two element types the engine computes in.
//
// GCC's and Clang's vector extensions carry the arithmetic, so one source serves AVX-512, AVX2 and NEON; intrinsics
// appear only where they buy an instruction the compiler will not choose by itself: fused multiply-add, the bf16 dot
// product, rounding to bf16.
//
// Elements are kept in 32-bit *lanes*: one fp32, or two neighbouring bf16, the shape `vdpbf16ps` multiplies. Code
// written in lanes (`Element::PER_LANE` says how many elements one holds) is the same for both types.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace diptych {

#if defined(DIPTYCH_WIDTH)
constexpr int WIDTH = DIPTYCH_WIDTH;  // of plain code, for tests of what AVX-512 lays out on a CPU that lacks it
#elif defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * WIDTH)));
typedef int32_t I32 __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t U32 __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t U16 __attribute__((vector_size(2 * WIDTH)));

template <class Vector>
inline Vector load(const void* source) {
    Vector vector;
    std::memcpy(&vector, source, sizeof vector);
    return vector;
}

template <class Vector>
inline void store(void* target, Vector vector) {
    std::memcpy(target, &vector, sizeof vector);
}

inline I32 splat(int32_t value) { return I32{} + value; }

inline F32 splat(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (F32)splat(bits);
}

// The result of every kernel is fixed by the order of its operations, so contraction is off (see native_build.py) and
// each fused multiply-add is asked for by name.
inline F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
    return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// b where either is NaN.
inline F32 max(F32 a, F32 b) {
#if defined(__AVX512F__)
    return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (F32)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

inline float reduce_max(F32 vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)vector);
#else
    float result = vector[0];
    for (int i = 1; i < WIDTH; ++i) result = vector[i] > result ? vector[i] : result;
    return result;
#endif
}

inline float reduce_sum(F32 vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)vector);
#else
    float result = 0.0f;
    for (int i = 0; i < WIDTH; ++i) result += vector[i];
    return result;
#endif
}

// 2^x for x <= 126, relative error below 2e-7; 2^-inf is exactly 0, so a masked score weighs nothing.
inline F32 exp2(F32 x) {
#if defined(__AVX512F__)
    const F32 fraction = (F32)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    // Adding 1.5 * 2^23 rounds to an integer and leaves that integer in the low bits, ready to become an exponent.
    const F32 magic = splat(12582912.0f);
    const F32 clamped = max(x, splat(-126.0f));
    const F32 shifted = (clamped - splat(0.5f)) + magic;
    const F32 fraction = clamped - (shifted - magic);
#endif
    F32 power = splat(1.8671300e-3f);  // 2^fraction, fraction in [0, 1]: a minimax polynomial that is exact at 0
    power = fma(power, fraction, splat(9.0170307e-3f));
    power = fma(power, fraction, splat(5.5799913e-2f));
    power = fma(power, fraction, splat(2.4016445e-1f));
    power = fma(power, fraction, splat(6.9315130e-1f));
    power = fma(power, fraction, splat(1.0f));
#if defined(__AVX512F__)
    return (F32)_mm512_scalef_ps((__m512)power, (__m512)x);
#else
    const I32 scaled = (I32)power + ((I32)shifted << 23);
    return (F32)((x >= splat(-126.0f)) & scaled);
#endif
}

inline F32 widen_bf16(U16 bits) { return (F32)(__builtin_convertvector(bits, U32) << 16); }

inline F32 widen_fp16(U16 bits) {
#if defined(__AVX512F__)
    return (F32)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return (F32)_mm256_cvtph_ps((__m128i)bits);
#else
    // The bits moved into place are the number times 2^-112, subnormals included; infinities and NaNs do not occur.
    const U32 wide = __builtin_convertvector(bits, U32);
    const F32 magnitude = (F32)((wide & 0x7fff) << 13) * splat(0x1p112f);
    return (F32)((U32)magnitude | ((wide & 0x8000) << 16));
#endif
}

// To the nearest bf16, ties to even; a NaN stays a NaN.
inline U16 round_bf16(F32 x) {
#if defined(__AVX512BF16__)
    return (U16)_mm512_cvtneps_pbh((__m512)x);
#else
    const U32 bits = (U32)x;
    const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const I32 is_nan = x != x;
    return __builtin_convertvector(((U32)is_nan & 0x7fc0) | (~(U32)is_nan & rounded), U16);
#endif
}

struct Fp32 {
    using Scalar = float;
    static constexpr int PER_LANE = 1;

    static F32 widen(const Scalar* source) { return load<F32>(source); }
    static void narrow(Scalar* target, F32 x) { store(target, x); }
    // x as it reads back after having been stored.
    static F32 rounded(F32 x) { return x; }
    // sum + a * b, over the elements of each lane.
    static F32 dot(F32 sum, I32 a, I32 b) { return fma((F32)a, (F32)b, sum); }
};

struct Bf16 {
    using Scalar = uint16_t;
    static constexpr int PER_LANE = 2;

    static F32 widen(const Scalar* source) { return widen_bf16(load<U16>(source)); }
    static void narrow(Scalar* target, F32 x) { store(target, round_bf16(x)); }
    static F32 rounded(F32 x) { return widen_bf16(round_bf16(x)); }
    static F32 dot(F32 sum, I32 a, I32 b) {
#if defined(__AVX512BF16__)
        return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
        const I32 high = splat((int32_t)0xffff0000);
        sum = fma((F32)(a << 16), (F32)(b << 16), sum);
        return fma((F32)(a & high), (F32)(b & high), sum);
#endif
    }
};

// The types a call may name, as native_library.py numbers them. Nothing is computed in the last two: weights may be stored
// in fp16, keys and values in bytes.
enum ElementType : int32_t { BF16 = 0, FP32 = 1, FP16 = 2, INT8 = 3 };

template <class Body>
inline void with_element(int32_t element_type, Body body) {
    if (element_type == BF16) {
        body(Bf16{});
    } else {
        body(Fp32{});
    }
}

}  // namespace diptych

#define DIPTYCH_EXPORT extern "C" __attribute__((visibility("default")))
