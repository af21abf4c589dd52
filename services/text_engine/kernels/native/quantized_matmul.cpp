// y = x W^T + bias with W of 4 or 8 bits, which is never unpacked in memory; x is rounded to int8 on the way.
//
//   W[n, k] = output_scale[n] * (scale[g, n] * q[n, k] + minimum[g, n])      g = k / group_size, q unsigned
//
// Without minimums q has its zero at 2^(BITS - 1). x is cut into blocks of 16 or 32 inputs, each with one scale: its
// largest magnitude over 127. Within a block the products are summed as whole numbers, exactly; the blocks' sums are
// scaled and added in fp32, in order, whatever the number of rows and threads: a row's result does not depend on the
// batch it is in.
//
// Weights lie in panels of PANEL outputs, each [lanes][PANEL] in 32-bit words: four inputs of 8 bits, or eight of 4,
// the low nibbles being one lane of four and the high ones the next. Scales and minimums are fp16,
// [panels][groups][PANEL].

#include <algorithm>
#include <vector>

#include "quantize.h"
#include "register_block.h"

namespace diptych {
namespace {

// Each output of a register block has a sum of whole numbers and one in fp32.
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6, BLOCK_COLUMNS = 2;
#else
constexpr int BLOCK_ROWS = 4, BLOCK_COLUMNS = 2;
#endif
constexpr int PANEL = BLOCK_COLUMNS * WIDTH;
// As in matmul.cpp.
constexpr int64_t PARALLEL_WORK = 1 << 18;

// sum + the products of the four unsigned bytes of each lane of a with the four signed ones of b
inline I32 dot_bytes(I32 sum, I32 a, I32 b) {
#if defined(__AVX512VNNI__)
    return (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // Even and odd bytes as 16-bit numbers: their products in pairs cannot overflow.
    const __m256i even = _mm256_and_si256((__m256i)a, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16((__m256i)a, 8);
    const __m256i even_b = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)b, 8), 8);
    const __m256i odd_b = _mm256_srai_epi16((__m256i)b, 8);
    return sum + (I32)_mm256_madd_epi16(even, even_b) + (I32)_mm256_madd_epi16(odd, odd_b);
#else
    for (int byte = 0; byte < 4; ++byte) sum += ((a >> (8 * byte)) & 0xff) * ((b << (24 - 8 * byte)) >> 24);
    return sum;
#endif
}

// The sum of a block's products: `add` for each lane, `total` at its end.
template <int BITS>
struct BlockSum {
    static I32 add(I32 sum, I32 a, I32 b) { return dot_bytes(sum, a, b); }
    static I32 total(I32 sum) { return sum; }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// Each half of a lane sums half of a block's products in 16 bits: 16 of at most 15 * 127.
template <>
struct BlockSum<4> {
    static I32 add(I32 sum, I32 a, I32 b) {
        return (I32)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)a, (__m256i)b));
    }
    static I32 total(I32 sum) { return (I32)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
};
#endif

// Rows of x as the products want them.
struct QuantizedRows {
    int64_t num_blocks, block_size;
    std::vector<int32_t> lanes;  // [num_rows][num_blocks * block_size / 4], four int8 each
    std::vector<float> scales;   // [num_rows][num_blocks]
    // [num_rows][num_blocks], what a block adds for its weights' offset: with minimums an fp32, the sum of the block's
    // inputs; without, a whole number, their rounded sum times the weights' zero, negated.
    std::vector<int32_t> offsets;

    void resize(int64_t num_rows, int64_t blocks, int64_t size) {
        num_blocks = blocks, block_size = size;
        lanes.resize(num_rows * blocks * size / 4);
        scales.resize(num_rows * blocks);
        offsets.resize(num_rows * blocks);
    }

    template <class Element, int ZERO>
    void quantize(int64_t row, const typename Element::Scalar* x, int64_t depth) {
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t start = block * block_size;
            typename Element::Scalar padded[32] = {};
            const bool is_whole = depth - start >= block_size;
            if (!is_whole) std::copy_n(x + start, depth - start, padded);
            quantize_block<Element, ZERO>(row * num_blocks + block, is_whole ? x + start : padded);
        }
    }

    template <class Element, int ZERO>
    void quantize_block(int64_t block, const typename Element::Scalar* x) {
        const float magnitude = magnitude_of<Element>(x, (int)block_size);
        const F32 inverse = splat(inverse_step(magnitude, 127.0f));
        int8_t* target = (int8_t*)lanes.data() + block * block_size;
        I32 sums = {};
        for (int i = 0; i < block_size; i += WIDTH) {
            const I32 rounded = round_to_whole(Element::widen(x + i) * inverse);
            sums += rounded;
            store(target + i, __builtin_convertvector(rounded, I8));
        }
        const int32_t sum = reduce_sum(sums);
        const float scale = magnitude / 127.0f, weighted = (float)sum * scale;
        scales[block] = scale;
        if (ZERO) {
            offsets[block] = -ZERO * sum;
        } else {
            std::memcpy(&offsets[block], &weighted, sizeof weighted);
        }
    }
};

// The columns [first, last) of one panel over all rows. ZERO: of the stored weights; 0: there are minimums.
template <class Element, int BITS, int ZERO>
struct QuantizedPanel {
    const QuantizedRows& x;
    const int32_t* panel;
    const uint16_t* scales;        // [groups][PANEL]
    const uint16_t* minimums;      // alike, or null
    const float* output_scales;    // of the panel's first output, padded to PANEL
    const float* bias;             // of the panel's first output, or null
    typename Element::Scalar* y;   // of the panel's first output
    int64_t num_rows, y_stride, blocks_per_group;
    int first, last;               // multiples of WIDTH
    int num_valid;                 // outputs of the panel that exist

    void run() const {
        const int64_t num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t row = num_rows * block / num_blocks, next = num_rows * (block + 1) / num_blocks;
            with_constant<BLOCK_ROWS>((int)(next - row), [&](auto r) {
                with_constant<BLOCK_COLUMNS>((last - first) / WIDTH, [&](auto n) { multiply<r(), n()>(row); });
            });
        }
    }

    template <int R, int N>
    void multiply(int64_t first_row) const {
        F32 sums[R][N] = {};
        const int64_t block_lanes = x.block_size / 4, row_lanes = x.num_blocks * block_lanes;
        const int32_t* lanes = x.lanes.data() + first_row * row_lanes;
        const int32_t* weights = panel + first;
        for (int64_t block = 0; block < x.num_blocks; ++block) {
            const int64_t of_row = first_row * x.num_blocks + block;
            I32 whole[R][N] = {};
            // Four lanes, 16 inputs, at a time: all that a block surely has.
            for (const int32_t* end = lanes + block_lanes; lanes != end; lanes += 4, weights += PANEL * BITS / 2) {
                multiply_lanes(whole, weights, lanes, row_lanes);
                multiply_lanes(whole, weights + PANEL * BITS / 4, lanes + 2, row_lanes);
            }
            const int64_t group = block / blocks_per_group * PANEL + first;
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                const F32 scale = widen_fp16(load<U16>(scales + group + n * WIDTH));
                const F32 minimum = ZERO ? F32{} : widen_fp16(load<U16>(minimums + group + n * WIDTH));
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const int64_t at = of_row + r * x.num_blocks;
                    const I32 total = BlockSum<BITS>::total(whole[r][n]) + (ZERO ? splat(x.offsets[at]) : I32{});
                    const F32 scaled = __builtin_convertvector(total, F32) * splat(x.scales[at]);
                    sums[r][n] = fma(scaled, scale, sums[r][n]);
                    if (!ZERO) sums[r][n] = fma((F32)splat(x.offsets[at]), minimum, sums[r][n]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) write(sums[r][n], first + n * WIDTH, y + (first_row + r) * y_stride);
        }
    }

    // Adds two lanes of each row times their weights.
    template <int R, int N>
    static void multiply_lanes(I32 (&whole)[R][N], const int32_t* weights, const int32_t* lanes, int64_t row_lanes) {
        I32 even[N], odd[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            even[n] = load<I32>(weights + n * WIDTH);
            if constexpr (BITS == 4) {
                odd[n] = (even[n] >> 4) & 0x0f0f0f0f;
                even[n] &= 0x0f0f0f0f;
            } else {
                odd[n] = load<I32>(weights + PANEL + n * WIDTH);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const I32 even_x = splat(lanes[r * row_lanes]), odd_x = splat(lanes[r * row_lanes + 1]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                whole[r][n] = BlockSum<BITS>::add(BlockSum<BITS>::add(whole[r][n], even[n], even_x), odd[n], odd_x);
            }
        }
    }

    void write(F32 sum, int column, typename Element::Scalar* row) const {
        F32 result = sum * load<F32>(output_scales + column);
        if (num_valid - column >= WIDTH) {
            if (bias) result += load<F32>(bias + column);
            Element::narrow(row + column, result);
            return;
        }
        typename Element::Scalar narrowed[WIDTH];
        for (int i = 0; i < num_valid - column; ++i) result[i] += bias ? bias[column + i] : 0.0f;
        Element::narrow(narrowed, result);
        std::copy_n(narrowed, std::max(0, num_valid - column), row + column);
    }
};

struct Weight {
    const int32_t* packed;
    const uint16_t *scales, *minimums;
    const float *output_scales, *bias;
    int64_t num_outputs, depth, group_size;
};

template <class Element, int BITS, int ZERO>
void multiply(const Weight& w, const void* x, void* y, int64_t num_rows, int64_t x_stride, int64_t block_size,
              int num_threads) {
    using Scalar = typename Element::Scalar;
    // The calling thread's, kept from call to call and read by all of them. It never shrinks: what stays is at most a byte
    // and a half for each input of the widest layer in each row of the longest step.
    static thread_local QuantizedRows kept;
    QuantizedRows& rows = kept;
    rows.resize(num_rows, (w.depth + block_size - 1) / block_size, block_size);
    const int64_t panel_words = rows.num_blocks * block_size * PANEL * BITS / 32;
    const int64_t num_groups = (w.depth + w.group_size - 1) / w.group_size;
    const int64_t num_columns = (w.num_outputs + WIDTH - 1) / WIDTH;
    const int num_parts = num_rows * w.num_outputs * w.depth < PARALLEL_WORK ? 1 : num_threads;
#pragma omp parallel for schedule(static) num_threads(num_parts) if (num_parts > 1 && num_rows >= num_parts)
    for (int64_t row = 0; row < num_rows; ++row) {
        rows.quantize<Element, ZERO>(row, (const Scalar*)x + row * x_stride, w.depth);
    }
#pragma omp parallel for schedule(static) num_threads(num_parts) if (num_parts > 1)
    for (int part = 0; part < num_parts; ++part) {
        int64_t output = num_columns * part / num_parts * WIDTH;
        const int64_t end = num_columns * (part + 1) / num_parts * WIDTH;
        while (output < end) {
            const int64_t index = output / PANEL, start = index * PANEL, stop = std::min(start + PANEL, end);
            QuantizedPanel<Element, BITS, ZERO>{
                rows,
                w.packed + index * panel_words,
                w.scales + index * num_groups * PANEL,
                ZERO ? nullptr : w.minimums + index * num_groups * PANEL,
                w.output_scales + start,
                w.bias ? w.bias + start : nullptr,
                (Scalar*)y + start,
                num_rows,
                w.num_outputs,
                w.group_size / block_size,
                (int)(output - start),
                (int)(stop - start),
                (int)std::min<int64_t>(PANEL, w.num_outputs - start),
            }
                .run();
            output = stop;
        }
    }
}

}  // namespace
}  // namespace diptych

using namespace diptych;

// Outputs in a panel.
DIPTYCH_EXPORT int64_t diptych_quantized_panel() { return PANEL; }

// y [num_rows, num_outputs], contiguous = x [num_rows, depth] W^T + bias [num_outputs] fp32, or null
// block_size 16 or 32, group_size a multiple of it; minimums null: the weights' zero is 2^(bits - 1)
DIPTYCH_EXPORT void diptych_quantized_matmul(int32_t element_type, int32_t bits, const void* x, const void* packed,
                                             const void* scales, const void* minimums, const float* output_scales,
                                             const float* bias, void* y, int64_t num_rows, int64_t num_outputs,
                                             int64_t depth, int64_t x_stride, int64_t block_size, int64_t group_size,
                                             int32_t num_threads) {
    const Weight weight{(const int32_t*)packed, (const uint16_t*)scales, (const uint16_t*)minimums,
                        output_scales, bias, num_outputs, depth, group_size};
    with_element(element_type, [&](auto element) {
        using Element = decltype(element);
        const auto call = [&](auto run) { run(weight, x, y, num_rows, x_stride, block_size, num_threads); };
        if (bits == 4) {
            minimums ? call(multiply<Element, 4, 0>) : call(multiply<Element, 4, 8>);
        } else {
            minimums ? call(multiply<Element, 8, 0>) : call(multiply<Element, 8, 128>);
        }
    });
}
