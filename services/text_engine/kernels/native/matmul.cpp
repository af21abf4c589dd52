// y = x W^T + bias for any number of rows, W packed once.
//
// W [num_outputs, depth] is packed into panels of COLUMNS * WIDTH outputs, each [depth / PER_LANE][outputs of the
// panel] in lanes (see simd.h): a row block walks a panel from start to end, in one sequential stream. Outputs beyond
// the last are zeros. Where x is fp32, W may stay in the 16 bits a number that its checkpoint has: it is widened in
// registers, which is exact, and takes half the memory and half the reading.
//
// An output is a sum of pieces of MAX_LANES lanes, each one chain of multiply-adds, in order, whatever the number of rows
// and threads: a row's result does not depend on the batch it is in. (Libraries choose another blocking for another
// number of rows.)

#include <algorithm>
#include <vector>

#include "register_block.h"
#include "stored_lanes.h"

namespace diptych {
namespace {

constexpr int PANEL = COLUMNS * WIDTH;
// A piece of a panel that stays in a cache while many rows pass over it: with AVX-512 in the second level, 1024 x 64
// lanes being 256 KiB; narrower panels of 512 x 16 lanes, 32 KiB, nearly in the first.
constexpr int64_t MAX_LANES = PANEL > 16 ? 1024 : 512;
// Rows that pass over it; their running sums wait in at most 48 KiB.
constexpr int64_t MAX_ROWS = 192;
// Waking the other threads costs microseconds: below this many multiply-adds one thread is faster.
constexpr int64_t PARALLEL_WORK = 1 << 18;
// Rows of x that lie a multiple of this many bytes apart meet in the same few lines of every cache, and throw each other
// out of it: they are copied, a line further apart.
constexpr int64_t COLLIDING_BYTES = 4096;
constexpr int64_t LINE_BYTES = 64;
// As many rows are copied at a time: a multiple of MAX_ROWS, so that nothing is multiplied in smaller pieces for it.
constexpr int64_t COPIED_ROWS = 3 * MAX_ROWS;

int64_t padded_outputs(int64_t num_outputs) { return (num_outputs + PANEL - 1) / PANEL * PANEL; }

// The columns [first, last) of one panel, in lanes relative to it, over all rows.
template <class Element, class Stored>
struct PanelProduct {
    using Scalar = typename Element::Scalar;
    using Word = typename Stored::Word;

    const Scalar* x;
    const Word* panel;
    const float* bias;  // of the panel's first output, or null
    Scalar* y;          // of the panel's first output
    int64_t num_rows, num_lanes, x_stride, y_stride;
    int first, last;  // multiples of WIDTH times the GRANULE of what is stored
    int num_valid;    // outputs of the panel that exist

    void run() const {
        alignas(64) float sums[MAX_ROWS * PANEL];
        for (int64_t first_row = 0; first_row < num_rows; first_row += MAX_ROWS) {
            const int64_t rows = std::min(MAX_ROWS, num_rows - first_row);
            for (int64_t lane = 0; lane < num_lanes; lane += MAX_LANES) {
                multiply(first_row, rows, lane, std::min(lane + MAX_LANES, num_lanes), sums);
            }
            for (int64_t row = 0; row < rows; ++row) write(sums + row * PANEL, y + (first_row + row) * y_stride);
        }
    }

    // Adds lanes [first_lane, last_lane) of `rows` rows to their running sums.
    void multiply(int64_t first_row, int64_t rows, int64_t first_lane, int64_t last_lane, float* sums) const {
        // Row blocks of nearly equal size: a last one of a single row would wait for each of its multiply-adds.
        const int64_t num_blocks = (rows + ROWS - 1) / ROWS;
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t row = rows * block / num_blocks, next = rows * (block + 1) / num_blocks;
            // A single block has no time to spare, and reads a stream that the hardware foresees.
            const Ahead ahead = num_blocks == 1 ? Ahead::NOTHING : block < COLUMNS ? Ahead::WEIGHTS : Ahead::ROWS;
            with_constant<ROWS>((int)(next - row), [&](auto r) {
                with_constant<COLUMNS>((last - first) / WIDTH, [&](auto n) {
                    multiply_block<r(), n()>(first_row + row, first_lane, last_lane, ahead,
                                             panel + last_lane * PANEL + block * (last_lane - first_lane) * WIDTH,
                                             sums + row * PANEL + first);
                });
            });
        }
    }

    // What a row block fetches while it computes: its share of the weights that follow in memory, which are needed
    // next, or the rows of the block after it.
    enum class Ahead { NOTHING, WEIGHTS, ROWS };

    template <int R, int N>
    void multiply_block(int64_t row, int64_t first_lane, int64_t last_lane, Ahead ahead, const Word* next_weights,
                        float* running) const {
        F32 sums[R][N] = {};
        const int64_t row_lanes = x_stride / Element::PER_LANE;
        const int32_t* rows[R];
        for (int r = 0; r < R; ++r) rows[r] = (const int32_t*)x + (row + r) * row_lanes;
        const int32_t* next_rows = rows[0] + R * row_lanes;
        const Word* columns = panel + first;
        for (int64_t lane = first_lane; lane < last_lane; ++lane) {
            if (ahead == Ahead::WEIGHTS) __builtin_prefetch(next_weights + (lane - first_lane) * WIDTH, 0, 2);
            // Of 16 lanes in a line, each of 8 rows gets two.
            if (ahead == Ahead::ROWS) __builtin_prefetch(next_rows + lane % 8 * row_lanes + lane);
            accumulate<Element>(
                sums, [&](int r) { return rows[r][lane]; },
                [&](int n) { return Stored::column(columns + lane * PANEL, n); });
        }
        if (first_lane > 0) add_block(sums, running, PANEL);
        store_block(sums, running, PANEL);
    }

    void write(const float* sums, Scalar* row) const {
        for (int column = first; column < last; column += WIDTH) {
            F32 result = load<F32>(sums + column);
            if (num_valid - column >= WIDTH) {
                if (bias) result += load<F32>(bias + column);
                Element::narrow(row + column, result);
                continue;
            }
            Scalar narrowed[WIDTH];
            for (int i = 0; i < num_valid - column; ++i) result[i] += bias ? bias[column + i] : 0.0f;
            Element::narrow(narrowed, result);
            std::copy_n(narrowed, std::max(0, num_valid - column), row + column);
        }
    }
};

// packed [padded_outputs / PANEL][num_lanes][PANEL] <- weight [num_outputs, num_lanes]
template <class Stored>
void pack(const void* weight, void* packed, int64_t num_outputs, int64_t num_lanes, int num_threads) {
    using Word = typename Stored::Word;
    const int64_t num_panels = padded_outputs(num_outputs) / PANEL;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t p = 0; p < num_panels; ++p) {
        for (int i = 0; i < PANEL; ++i) {
            const int64_t output = p * PANEL + i;
            const Word* source = (const Word*)weight + output * num_lanes;
            Word* target = (Word*)packed + p * num_lanes * PANEL + Stored::place(i);
            for (int64_t lane = 0; lane < num_lanes; ++lane) {
                target[lane * PANEL] = output < num_outputs ? source[lane] : 0;
            }
        }
    }
}

struct Product {
    const void *x, *packed;
    const float* bias;
    void* y;
    int64_t num_rows, num_outputs, depth, x_stride;
    int num_threads;

    // The product of some rows at a time, copied so that they do not collide. The copy is the calling thread's, kept for
    // the next product.
    template <class Element, class Stored>
    void run() const {
        using Scalar = typename Element::Scalar;
        const int64_t stride_bytes = x_stride * (int64_t)sizeof(Scalar);
        const bool collide = x_stride >= depth && stride_bytes % COLLIDING_BYTES == 0;
        if (num_rows <= ROWS || !collide) return multiply<Element, Stored>();
        const int64_t copied_rows = std::min(num_rows, COPIED_ROWS);
        const int64_t stride = x_stride + LINE_BYTES / (int64_t)sizeof(Scalar);
        static thread_local std::vector<Scalar> kept;
        if ((int64_t)kept.size() < copied_rows * stride) kept = std::vector<Scalar>(copied_rows * stride);
        Scalar* copy = kept.data();
        for (int64_t first = 0; first < num_rows; first += copied_rows) {
            const int64_t rows = std::min(copied_rows, num_rows - first);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
            for (int64_t row = 0; row < rows; ++row) {
                std::copy_n((const Scalar*)x + (first + row) * x_stride, depth, copy + row * stride);
            }
            Product{copy, packed, bias, (Scalar*)y + first * num_outputs, rows, num_outputs, depth, stride, num_threads}
                .multiply<Element, Stored>();
        }
    }

    template <class Element, class Stored>
    void multiply() const {
        using Scalar = typename Element::Scalar;
        using Word = typename Stored::Word;
        const int64_t num_lanes = depth / Element::PER_LANE;
        constexpr int SHARED = Stored::GRANULE * WIDTH;
        const int64_t num_shared = (num_outputs + SHARED - 1) / SHARED;
        const int num_parts = num_rows * num_outputs * depth < PARALLEL_WORK ? 1 : num_threads;
#pragma omp parallel for schedule(static) num_threads(num_parts) if (num_parts > 1)
        for (int part = 0; part < num_parts; ++part) {
            // An equal share of the outputs each, in a few vectors: panels are too coarse for narrow matrices.
            int64_t output = num_shared * part / num_parts * SHARED;
            const int64_t end = num_shared * (part + 1) / num_parts * SHARED;
            while (output < end) {
                const int64_t start = output / PANEL * PANEL;
                const int64_t stop = std::min(start + PANEL, end);
                PanelProduct<Element, Stored>{
                    (const Scalar*)x,
                    (const Word*)packed + start * num_lanes,
                    bias ? bias + start : nullptr,
                    (Scalar*)y + start,
                    num_rows,
                    num_lanes,
                    x_stride,
                    num_outputs,
                    (int)(output - start),
                    (int)(stop - start),
                    (int)std::min<int64_t>(PANEL, num_outputs - start),
                }
                    .run();
                output = stop;
            }
        }
    }
};

}  // namespace
}  // namespace diptych

using namespace diptych;

DIPTYCH_EXPORT int64_t diptych_packed_outputs(int64_t num_outputs) { return padded_outputs(num_outputs); }

// packed, for products in element_type, <- weight [num_outputs, depth], contiguous
DIPTYCH_EXPORT void diptych_pack_weight(int32_t element_type, int32_t weight_type, const void* weight, void* packed,
                                        int64_t num_outputs, int64_t depth, int32_t num_threads) {
    const auto call = [&](auto stored) {
        const int64_t num_lanes = element_type == BF16 ? depth / Bf16::PER_LANE : depth;
        pack<decltype(stored)>(weight, packed, num_outputs, num_lanes, num_threads);
    };
    if (element_type == weight_type) {
        call(WholeLanes{});
    } else if (weight_type == BF16) {
        call(Bf16Pairs{});
    } else {
        call(Fp16Lanes{});
    }
}

// y [num_rows, num_outputs], contiguous = x [num_rows, depth] W^T + bias [num_outputs] fp32, or null
// element_type is x's and y's; weight_type is the same, or where that is FP32 any.
DIPTYCH_EXPORT void diptych_matmul(int32_t element_type, int32_t weight_type, const void* x, const void* packed,
                                   const float* bias, void* y, int64_t num_rows, int64_t num_outputs, int64_t depth,
                                   int64_t x_stride, int32_t num_threads) {
    const Product product{x, packed, bias, y, num_rows, num_outputs, depth, x_stride, num_threads};
    if (element_type == BF16) {
        product.run<Bf16, WholeLanes>();
    } else if (weight_type == FP32) {
        product.run<Fp32, WholeLanes>();
    } else if (weight_type == BF16) {
        product.run<Fp32, Bf16Pairs>();
    } else {
        product.run<Fp32, Fp16Lanes>();
    }
}
