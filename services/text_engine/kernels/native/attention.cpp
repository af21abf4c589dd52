// Causal attention over a paged KV cache, for a ragged mix of decode rows and prefill chunks.
//
// The cache, per block of 16 slots and KV head, in lanes (see simd.h):
//     keys    [head_dim / PER_LANE][16 slots]      one load holds the same dimension(s) of 16 keys
//     values  [16 / PER_LANE slots][head_dim]      one load holds 16 dimensions of the same slot(s)
// so both products are the same register-blocked loop, a broadcast query or weight lane times loaded vectors, with no
// horizontal sums, no transposition and no copy out of the cache.
//
// Each (token, query head) is one *vector*. Positions are cut into tiles of 256, counted from position 0. A tile's
// weights are taken against the tile's own maximum and its output is merged into the running result in tile order.
// Therefore a vector's result does not depend on the batch, the chunking, the threads or the way tiles were shared
// among them: every path performs the same operations in the same order, up to adding exact zeros.

#include <algorithm>
#include <memory>
#include <vector>

#include "attention_tile.h"

namespace diptych {

// Mirrored field by field in attention/cpu_backend.py. Strides are in elements; a head's elements are contiguous.
struct AttentionCall {
    const void* query;  // [num_tokens, num_heads, head_dim]
    const void* key;    // [num_tokens, num_kv_heads, head_dim]
    const void* value;
    void* kv_cache;  // [num_blocks, num_kv_heads, 2, 16 * head_dim], keys then values, each laid out as above
    void* output;    // [num_tokens, num_heads * head_dim], contiguous
    const int32_t* cu_seqlens_q;
    const int32_t* seq_lens;
    const int32_t* block_tables;
    const int64_t* slot_mapping;
    int64_t query_token_stride, query_head_stride;
    int64_t key_token_stride, key_head_stride;
    int64_t value_token_stride, value_head_stride;
    int64_t block_table_stride;
    int32_t num_tokens, num_seqs;
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t sliding_window;  // 0: none
    int32_t num_threads;
    float scale;
};

namespace {

// ---- work -------------------------------------------------------------------------------------------------------

// Some vectors of one sequence and KV head, over some tiles. Vector v is token v / group of the sequence's new tokens
// and the (v % group)-th query head of the KV head.
struct Item {
    int seq, kv_head;
    int first_vector, num_vectors;
    int first_tile, last_tile;
    int64_t cost;
    int64_t partials = -1;  // offset of one Partial per tile where several items share these vectors; -1: sole owner
};

template <class Element>
class Attention {
    using Scalar = typename Element::Scalar;

   public:
    explicit Attention(const AttentionCall& call)
        : call_(call), head_dim_(call.head_dim), group_(call.num_heads / call.num_kv_heads) {}

    void run() {
        plan();
        // A parallel region costs a few microseconds; below this much work it costs more than it saves.
        const int num_threads = total_cost_ < 2000 ? 1 : call_.num_threads;
        if (num_threads > 1) split_large_items(num_threads);
        std::unique_ptr<float[]> partials(new float[partials_size_]);
        const int num_items = (int)items_.size(), num_shared = (int)shared_.size();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
#pragma omp for schedule(static)
            for (int token = 0; token < call_.num_tokens; ++token) store_token(token);
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < num_items; ++i) attend(items_[i], partials.get());
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < num_shared; ++i) combine(shared_[i], partials.get());
        }
    }

   private:
    // One item per (sequence, KV head, group of vectors), the most expensive first so that the threads end together.
    void plan() {
        for (int seq = 0; seq < call_.num_seqs; ++seq) {
            const int num_vectors = num_new_tokens(seq) * group_;
            for (int first = 0; first < num_vectors; first += MAX_VECTORS) {
                const int count = std::min(MAX_VECTORS, num_vectors - first);
                const int first_block = first_visible(position(seq, first)) / BLOCK;
                const int last_block = position(seq, first + count - 1) / BLOCK + 1;
                // A block costs its trip from memory, worth about 8 vectors of arithmetic, and its vectors.
                const int64_t cost = (int64_t)(last_block - first_block) * (8 + count) * head_dim_ / 64;
                const int first_tile = first_block / TILE_BLOCKS, last_tile = (last_block - 1) / TILE_BLOCKS + 1;
                for (int kv_head = 0; kv_head < call_.num_kv_heads; ++kv_head) {
                    items_.push_back({seq, kv_head, first, count, first_tile, last_tile, cost});
                    total_cost_ += cost;
                }
            }
        }
        std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    }

    // Few long sequences would leave threads idle: share such an item's tiles among several, merged afterwards.
    void split_large_items(int num_threads) {
        const int64_t limit = total_cost_ / (4 * num_threads);
        std::vector<Item> pieces;
        for (const Item& item : items_) {
            const int num_tiles = item.last_tile - item.first_tile;
            const int num_pieces = (int)std::min<int64_t>(num_tiles, item.cost / (limit + 1) + 1);
            if (num_pieces == 1) {
                pieces.push_back(item);
                continue;
            }
            Item whole = item;
            whole.partials = partials_size_;
            partials_size_ += num_tiles * Partial::size(item.num_vectors, head_dim_);
            shared_.push_back(whole);
            for (int i = 0; i < num_pieces; ++i) {
                Item piece = whole;
                piece.first_tile = item.first_tile + num_tiles * i / num_pieces;
                piece.last_tile = item.first_tile + num_tiles * (i + 1) / num_pieces;
                piece.partials += (piece.first_tile - item.first_tile) * Partial::size(item.num_vectors, head_dim_);
                pieces.push_back(piece);
            }
        }
        items_ = std::move(pieces);
    }

    int num_new_tokens(int seq) const { return call_.cu_seqlens_q[seq + 1] - call_.cu_seqlens_q[seq]; }
    int position(int seq, int vector) const { return call_.seq_lens[seq] - num_new_tokens(seq) + vector / group_; }
    int first_visible(int position) const {
        return call_.sliding_window ? std::max(0, position + 1 - call_.sliding_window) : 0;
    }

    Scalar* cached_keys(int64_t block, int kv_head) const {
        return (Scalar*)call_.kv_cache + (block * call_.num_kv_heads + kv_head) * 2 * BLOCK * head_dim_;
    }
    Scalar* cached_values(int64_t block, int kv_head) const { return cached_keys(block, kv_head) + BLOCK * head_dim_; }

    void store_token(int token) const {
        constexpr int PER_LANE = Element::PER_LANE;
        const int64_t slot = call_.slot_mapping[token];
        if (slot < 0) return;
        const int64_t block = slot / BLOCK;
        const int offset = (int)(slot % BLOCK);
        for (int kv_head = 0; kv_head < call_.num_kv_heads; ++kv_head) {
            auto* key = (const int32_t*)((const Scalar*)call_.key + token * call_.key_token_stride +
                                         kv_head * call_.key_head_stride);
            auto* keys = (int32_t*)cached_keys(block, kv_head) + offset;
            for (int lane = 0; lane < head_dim_ / PER_LANE; ++lane) keys[lane * BLOCK] = key[lane];
            // Element by element: the other half of a lane is another token's, perhaps being stored by another thread.
            auto* value = (const Scalar*)call_.value + token * call_.value_token_stride +
                          kv_head * call_.value_head_stride;
            auto* values = cached_values(block, kv_head) + offset / PER_LANE * PER_LANE * head_dim_ + offset % PER_LANE;
            for (int d = 0; d < head_dim_; ++d) values[d * PER_LANE] = value[d];
        }
    }

    void attend(const Item& item, float* partials) const {
        alignas(64) float total_memory[MAX_VECTORS * (MAX_HEAD_DIM + 2)];
        alignas(64) float tile_memory[MAX_VECTORS * (MAX_HEAD_DIM + 2)];
        Partial total(total_memory, item.num_vectors);
        if (item.partials < 0) clear(total, item.num_vectors, head_dim_);
        for (int tile = item.first_tile; tile < item.last_tile; ++tile) {
            if (item.partials < 0) {
                Partial partial(tile_memory, item.num_vectors);
                attend_tile(item, tile, partial);
                merge(total, partial, item.num_vectors, head_dim_);
            } else {
                Partial partial(partials + partial_offset(item, tile), item.num_vectors);
                attend_tile(item, tile, partial);
            }
        }
        if (item.partials < 0) write_output(item, total);
    }

    void combine(const Item& item, float* partials) const {
        alignas(64) float total_memory[MAX_VECTORS * (MAX_HEAD_DIM + 2)];
        Partial total(total_memory, item.num_vectors);
        clear(total, item.num_vectors, head_dim_);
        for (int tile = item.first_tile; tile < item.last_tile; ++tile) {
            merge(total, Partial(partials + partial_offset(item, tile), item.num_vectors), item.num_vectors, head_dim_);
        }
        write_output(item, total);
    }

    int64_t partial_offset(const Item& item, int tile) const {
        return item.partials + (tile - item.first_tile) * Partial::size(item.num_vectors, head_dim_);
    }

    void attend_tile(const Item& item, int tile, Partial& result) const {
        constexpr int COLUMNS_PER_BLOCK = BLOCK / WIDTH;
        const int count = item.num_vectors;
        const int last_position = position(item.seq, item.first_vector + count - 1);
        const int first_block = std::max(tile * TILE_BLOCKS, first_visible(position(item.seq, item.first_vector)) / BLOCK);
        const int last_block = std::min((tile + 1) * TILE_BLOCKS, last_position / BLOCK + 1);
        const int num_blocks = last_block - first_block, num_columns = num_blocks * COLUMNS_PER_BLOCK;

        const int32_t* queries[MAX_VECTORS];
        for (int v = 0; v < count; ++v) queries[v] = query(item, v);
        const int32_t* keys[TILE_BLOCKS * COLUMNS_PER_BLOCK + COLUMNS];
        const int32_t* values[TILE_BLOCKS + COLUMNS];
        const int32_t* table = call_.block_tables + item.seq * call_.block_table_stride;
        for (int b = 0; b < num_blocks; ++b) {
            const int32_t block = table[first_block + b];
            for (int c = 0; c < COLUMNS_PER_BLOCK; ++c) {
                keys[b * COLUMNS_PER_BLOCK + c] = (const int32_t*)cached_keys(block, item.kv_head) + c * WIDTH;
            }
            values[b] = (const int32_t*)cached_values(block, item.kv_head);
        }
        // What follows the keys is the values, what follows those the next tile's keys.
        for (int i = 0; i < COLUMNS; ++i) {
            const int32_t next_block = table[std::min(last_block + i, last_position / BLOCK)];
            keys[num_columns + i] = values[std::min(i, num_blocks - 1)];
            values[num_blocks + i] = (const int32_t*)cached_keys(next_block, item.kv_head);
        }
        alignas(64) int32_t tail[BLOCK * MAX_HEAD_DIM];
        const int seq_len = call_.seq_lens[item.seq];
        if (last_block * BLOCK > seq_len) {
            copy_used(tail, values[num_blocks - 1], seq_len % BLOCK);
            values[num_blocks - 1] = tail;
        }

        alignas(64) float scores[MAX_VECTORS * TILE];
        for (int column = 0; column < num_columns; column += COLUMNS) {
            with_constant<COLUMNS>(std::min(COLUMNS, num_columns - column), [&](auto n) {
                for (int v = 0; v < count; v += ROWS) {
                    with_constant<ROWS>(std::min(ROWS, count - v), [&](auto r) {
                        score<Element, r(), n()>(queries + v, keys + column, head_dim_ / Element::PER_LANE,
                                                 scores + v * TILE + column * WIDTH);
                    });
                }
            });
        }
        const float scale_log2 = call_.scale * 1.44269504f;
        for (int v = 0; v < count; ++v) {
            const int at = position(item.seq, item.first_vector + v) - first_block * BLOCK;
            const int first = call_.sliding_window ? at + 1 - call_.sliding_window : 0;
            weights_from_scores<Element>(scores + v * TILE, num_blocks * BLOCK, first, at + 1, scale_log2,
                                         result.max[v], result.sum[v]);
        }
        for (int dim = 0; dim < head_dim_; dim += COLUMNS * WIDTH) {
            with_constant<COLUMNS>(std::min(COLUMNS, (head_dim_ - dim) / WIDTH), [&](auto n) {
                const int32_t* chunk[TILE_BLOCKS + COLUMNS];
                for (int b = 0; b < num_blocks + COLUMNS; ++b) chunk[b] = values[b] + dim;
                for (int v = 0; v < count; v += ROWS) {
                    with_constant<ROWS>(std::min(ROWS, count - v), [&](auto r) {
                        weigh<Element, r(), n()>(scores + v * TILE, chunk, num_blocks, head_dim_,
                                                 result.output + v * head_dim_ + dim);
                    });
                }
            });
        }
    }

    // A block's values with its unused slots zeroed: they may hold anything, and 0 * NaN is NaN.
    void copy_used(int32_t* target, const int32_t* values, int num_used) const {
        const int full = num_used / Element::PER_LANE * head_dim_;
        const int partial = num_used % Element::PER_LANE * head_dim_;
        std::fill_n(std::copy_n(values, full, target), BLOCK / Element::PER_LANE * head_dim_ - full, 0);
        for (int i = full; i < full + partial; ++i) target[i] = values[i] & 0xffff;
    }

    int64_t row(const Item& item, int vector) const {
        return call_.cu_seqlens_q[item.seq] + (item.first_vector + vector) / group_;
    }
    int64_t head(const Item& item, int vector) const {
        return item.kv_head * group_ + (item.first_vector + vector) % group_;
    }
    const int32_t* query(const Item& item, int vector) const {
        return (const int32_t*)((const Scalar*)call_.query + row(item, vector) * call_.query_token_stride +
                                head(item, vector) * call_.query_head_stride);
    }

    void write_output(const Item& item, const Partial& total) const {
        for (int v = 0; v < item.num_vectors; ++v) {
            auto* output = (Scalar*)call_.output + (row(item, v) * call_.num_heads + head(item, v)) * head_dim_;
            const F32 inverse = splat(1.0f / total.sum[v]);
            for (int d = 0; d < head_dim_; d += WIDTH) {
                Element::narrow(output + d, load<F32>(total.output + v * head_dim_ + d) * inverse);
            }
        }
    }

    const AttentionCall& call_;
    const int head_dim_, group_;
    std::vector<Item> items_;
    std::vector<Item> shared_;
    int64_t total_cost_ = 0;
    int64_t partials_size_ = 0;
};

}  // namespace
}  // namespace diptych

DIPTYCH_EXPORT void diptych_attend(int32_t element_type, const diptych::AttentionCall* call) {
    diptych::with_element(element_type, [&](auto element) { diptych::Attention<decltype(element)>(*call).run(); });
}
