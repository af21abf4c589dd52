// Whole numbers for real ones: x = step * whole, with the step that makes the largest magnitude of a row a given whole.
#pragma once

#include "simd.h"

namespace diptych {

typedef int8_t I8 __attribute__((vector_size(WIDTH)));
typedef int16_t I16 __attribute__((vector_size(2 * WIDTH)));

inline int32_t reduce_sum(I32 vector) {
    int32_t result = 0;
    for (int i = 0; i < WIDTH; ++i) result += vector[i];
    return result;
}

// The largest magnitude of some elements, and a NaN where one of them is NaN or infinite: neither can be rounded, and so
// the step carries them on.
class Magnitude {
   public:
    void add(F32 x) {
        largest_ = max(largest_, max(x, -x));
        nothing_ += x - x;
    }
    float value() const { return reduce_max(largest_) + reduce_sum(nothing_); }

   private:
    F32 largest_ = {}, nothing_ = {};
};

template <class Element>
inline float magnitude_of(const typename Element::Scalar* x, int num_elements) {
    Magnitude magnitude;
    for (int i = 0; i < num_elements; i += WIDTH) magnitude.add(Element::widen(x + i));
    return magnitude.value();
}

// 1 / step; 0 where all elements are next to nothing.
inline float inverse_step(float magnitude, float largest_whole) {
    return magnitude > 1e-30f ? largest_whole / magnitude : 0.0f;
}

// To the nearest whole number, ties to even, for magnitudes below 2^22: the low bits of a large sum hold it.
inline I32 round_to_whole(F32 x) {
    const F32 magic = splat(12582912.0f);
    return (I32)(x + magic) - (I32)magic;
}

}  // namespace diptych
