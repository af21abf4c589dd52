// The elementwise operations of a decoder layer: RMS norm, rotary embedding, gated SiLU.
//
// All arithmetic is fp32. Where kernels/reference.py rounds an intermediate to the element type, so do these kernels:
// results differ from its by the order of a sum and the last bit of an exponential, nothing else.
//
// Rows are independent, each computed by one thread in one fixed order. Matrices are row-major with a row stride in
// elements; the elements of a row are contiguous.

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace diptych {
namespace {

// Waking the other threads costs microseconds: below this many elements one thread is faster.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;

template <class Body>
void for_each_row(int64_t num_rows, int64_t row_elements, int num_threads, Body body) {
    const bool parallel = num_threads > 1 && num_rows > 1 && num_rows * row_elements >= PARALLEL_ELEMENTS;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (parallel)
    for (int64_t row = 0; row < num_rows; ++row) body(row);
}

// WIDTH or, at the end of a row, fewer elements of one row.
template <class Element>
struct Span {
    int64_t offset;
    int count;

    F32 load(const typename Element::Scalar* row) const {
        if (count == WIDTH) return Element::widen(row + offset);
        typename Element::Scalar padded[WIDTH] = {};
        std::copy_n(row + offset, count, padded);
        return Element::widen(padded);
    }
    void store(typename Element::Scalar* row, F32 x) const {
        if (count == WIDTH) return Element::narrow(row + offset, x);
        typename Element::Scalar padded[WIDTH];
        Element::narrow(padded, x);
        std::copy_n(padded, count, row + offset);
    }
};

template <class Element, class Body>
inline void for_each_span(int64_t num_elements, Body body) {
    int64_t offset = 0;
    for (; offset + WIDTH <= num_elements; offset += WIDTH) body(Span<Element>{offset, WIDTH});
    if (offset < num_elements) body(Span<Element>{offset, (int)(num_elements - offset)});
}

template <class Element>
void normalize_row(const typename Element::Scalar* x, const typename Element::Scalar* weight,
                   typename Element::Scalar* out, F32 sum_of_squares, int64_t dim, float eps) {
    const F32 scale = splat(1.0f / std::sqrt(reduce_sum(sum_of_squares) / (float)dim + eps));
    for_each_span<Element>(dim, [&](auto span) {
        span.store(out, Element::rounded(span.load(x) * scale) * span.load(weight));
    });
}

template <class Element>
void rotate_heads(typename Element::Scalar* heads, int num_heads, int64_t head_stride, const float* cos,
                  const float* sin, int64_t half) {
    for (int head = 0; head < num_heads; ++head) {
        auto* first = heads + head * head_stride;
        auto* second = first + half;
        for_each_span<Element>(half, [&](auto span) {
            const Span<Fp32> angles{span.offset, span.count};
            const F32 c = angles.load(cos), s = angles.load(sin);
            const F32 x = span.load(first), y = span.load(second);
            span.store(first, x * c - y * s);
            span.store(second, y * c + x * s);
        });
    }
}

// out = activation(gate) * up, the activation rounded to Element before the product
template <class Element, class Activation>
void gated_product(const void* gate_up, void* out, int64_t num_rows, int64_t intermediate, int64_t gate_up_stride,
                   int32_t num_threads, Activation activation) {
    using Scalar = typename Element::Scalar;
    for_each_row(num_rows, intermediate, num_threads, [&](int64_t row) {
        const Scalar* gate = (const Scalar*)gate_up + row * gate_up_stride;
        const Scalar* up = gate + intermediate;
        Scalar* out_row = (Scalar*)out + row * intermediate;
        for_each_span<Element>(intermediate, [&](auto span) {
            span.store(out_row, Element::rounded(activation(span.load(gate))) * span.load(up));
        });
    });
}

}  // namespace
}  // namespace diptych

using namespace diptych;

// out = x * rsqrt(mean(x^2) + eps) * weight.   x [num_rows, dim], out alike and contiguous
DIPTYCH_EXPORT void diptych_rms_norm(int32_t element_type, const void* x, const void* weight, void* out,
                                     int64_t num_rows, int64_t dim, int64_t x_stride, float eps, int32_t num_threads) {
    with_element(element_type, [&](auto element) {
        using Element = decltype(element);
        using Scalar = typename Element::Scalar;
        for_each_row(num_rows, dim, num_threads, [&](int64_t row) {
            const Scalar* x_row = (const Scalar*)x + row * x_stride;
            F32 squares = {};
            for_each_span<Element>(dim, [&](auto span) {
                const F32 value = span.load(x_row);
                squares = fma(value, value, squares);
            });
            normalize_row<Element>(x_row, (const Scalar*)weight, (Scalar*)out + row * dim, squares, dim, eps);
        });
    });
}

// residual += x; x = rms_norm(residual).   Both [num_rows, dim], contiguous
DIPTYCH_EXPORT void diptych_add_rms_norm(int32_t element_type, void* x, void* residual, const void* weight,
                                         int64_t num_rows, int64_t dim, float eps, int32_t num_threads) {
    with_element(element_type, [&](auto element) {
        using Element = decltype(element);
        using Scalar = typename Element::Scalar;
        for_each_row(num_rows, dim, num_threads, [&](int64_t row) {
            Scalar* x_row = (Scalar*)x + row * dim;
            Scalar* residual_row = (Scalar*)residual + row * dim;
            F32 squares = {};
            for_each_span<Element>(dim, [&](auto span) {
                const F32 sum = Element::rounded(span.load(x_row) + span.load(residual_row));
                span.store(residual_row, sum);
                squares = fma(sum, sum, squares);
            });
            normalize_row<Element>(residual_row, (const Scalar*)weight, x_row, squares, dim, eps);
        });
    });
}

// Rotates the halves of the first `rotary_dim` elements of every head, in place.
// query [num_tokens, num_heads, >= rotary_dim], key [num_tokens, num_kv_heads, alike], cos_sin [num_tokens, rotary_dim]
DIPTYCH_EXPORT void diptych_rotary(int32_t element_type, void* query, void* key, const float* cos_sin,
                                   int64_t num_tokens, int32_t num_heads, int32_t num_kv_heads, int64_t rotary_dim,
                                   int64_t query_token_stride, int64_t query_head_stride, int64_t key_token_stride,
                                   int64_t key_head_stride, int32_t num_threads) {
    with_element(element_type, [&](auto element) {
        using Element = decltype(element);
        using Scalar = typename Element::Scalar;
        const int64_t half = rotary_dim / 2;
        for_each_row(num_tokens, (num_heads + num_kv_heads) * rotary_dim, num_threads, [&](int64_t token) {
            const float* cos = cos_sin + token * rotary_dim;
            const float* sin = cos + half;
            Scalar* query_heads = (Scalar*)query + token * query_token_stride;
            Scalar* key_heads = (Scalar*)key + token * key_token_stride;
            rotate_heads<Element>(query_heads, num_heads, query_head_stride, cos, sin, half);
            rotate_heads<Element>(key_heads, num_kv_heads, key_head_stride, cos, sin, half);
        });
    });
}

// out = silu(gate) * up.   gate_up [num_rows, 2 * intermediate], a row being gate then up; out contiguous
DIPTYCH_EXPORT void diptych_silu_mul(int32_t element_type, const void* gate_up, void* out, int64_t num_rows,
                                     int64_t intermediate, int64_t gate_up_stride, int32_t num_threads) {
    with_element(element_type, [&](auto element) {
        gated_product<decltype(element)>(gate_up, out, num_rows, intermediate, gate_up_stride, num_threads, [](F32 x) {
            // Below -87 silu is 0 in either type; exp(-x) must not overflow. This order of arguments keeps a NaN.
            x = max(splat(-87.0f), x);
            return x / (splat(1.0f) + exp2(x * splat(-1.44269504f)));
        });
    });
}

// out = gelu_tanh(gate) * up, where gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)).   As silu_mul
DIPTYCH_EXPORT void diptych_gelu_tanh_mul(int32_t element_type, const void* gate_up, void* out, int64_t num_rows,
                                          int64_t intermediate, int64_t gate_up_stride, int32_t num_threads) {
    with_element(element_type, [&](auto element) {
        gated_product<decltype(element)>(gate_up, out, num_rows, intermediate, gate_up_stride, num_threads, [](F32 x) {
            // Below -10 gelu is 0 in either type, and the exponential would soon overflow.
            x = max(splat(-10.0f), x);
            const F32 inner = x * fma(splat(0.044715f), x * x, splat(1.0f));
            return x / (splat(1.0f) + exp2(inner * splat(-1.59576912f * 1.44269504f)));
        });
    });
}
