// Causal attention (images may see themselves whole) over a paged KV cache, for a ragged mix of decode rows and prefill chunks.
//
// The cache is in the model's type or in bf16 (plain_cache.h), or in bytes (int8_cache.h), which say how it lies in memory
// and multiply it.
//
// Each (token, query head) is one *vector*. Positions are cut into tiles of 256, counted from position 0. A tile's
// weights are taken against the tile's own maximum and its output is merged into the running result in tile order.
// Therefore a vector's result does not depend on the batch, the chunking, the threads or the way tiles were shared
// among them: every path performs the same operations in the same order, up to adding exact zeros.

#include <algorithm>
#include <memory>
#include <vector>

#include "int8_cache.h"
#include "plain_cache.h"

namespace diptych {

// Mirrored field by field in attention/cpu_backend.py. Strides are in elements; a head's elements are contiguous.
struct AttentionCall {
    const void* query;  // [num_tokens, num_heads, head_dim]
    const void* key;    // [num_tokens, num_kv_heads, head_dim]
    const void* value;
    void* kv_cache;  // [num_blocks, num_kv_heads, block_words]: see plain_cache.h and int8_cache.h
    void* output;    // [num_tokens, num_heads * head_dim], contiguous
    const int32_t* cu_seqlens_q;
    const int32_t* seq_lens;
    const int32_t* block_tables;
    const int64_t* slot_mapping;
    const int32_t* image_spans;  // [num_tokens, 2] positions start : end that a token sees whole, or null
    int64_t query_token_stride, query_head_stride;
    int64_t key_token_stride, key_head_stride;
    int64_t value_token_stride, value_head_stride;
    int64_t block_table_stride;
    int32_t num_tokens, num_seqs;
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t sliding_window;  // 0: none
    int32_t num_threads;
    float scale;
    float soft_cap;  // 0: none
};

namespace {

// ---- work -------------------------------------------------------------------------------------------------------

// Costs are in blocks of 64 dimensions met by one vector, about 10 ns. A parallel region takes a few microseconds; below
// this cost it takes longer than it saves.
constexpr int64_t PARALLEL_COST = 2000;
// A block's trip from memory is worth the arithmetic of this many vectors.
constexpr int64_t BLOCK_COST = 8;

// Some vectors of one sequence and KV head, over some tiles. Vector v is token v / group of the sequence's new tokens
// and the (v % group)-th query head of the KV head.
struct Item {
    int seq, kv_head;
    int first_vector, num_vectors;
    int first_tile, last_tile;
    int64_t cost;
    int64_t partials = -1;  // offset of one Partial per tile where several items share these vectors; -1: sole owner
};

template <class Element, class Cache>
class Attention {
    using Scalar = typename Element::Scalar;

   public:
    explicit Attention(const AttentionCall& call)
        : call_(call), head_dim_(call.head_dim), group_(call.num_heads / call.num_kv_heads) {}

    void run() {
        plan();
        const int num_threads = total_cost_ < PARALLEL_COST ? 1 : call_.num_threads;
        if (num_threads > 1) split_large_items(num_threads);
        std::unique_ptr<float[]> partials(new float[partials_size_]);
        const int num_items = (int)items_.size(), num_shared = (int)shared_.size();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
#pragma omp for schedule(static)
            for (int token = 0; token < call_.num_tokens; ++token) store_token(token);
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < num_items; ++i) {
                attend(items_[i], items_[std::min(i + num_threads, num_items - 1)], partials.get());
            }
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
                const int first_block = first_visible(seq, first) / BLOCK;
                const int last_block = last_visible(seq, first + count - 1) / BLOCK + 1;
                const int64_t cost = (last_block - first_block) * (BLOCK_COST + count) * head_dim_ / 64;
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

    // A vector sees an interval of positions, whose ends never fall from one vector of a sequence to the next.
    int first_visible(int seq, int vector) const {
        if (!call_.sliding_window) return 0;
        const int first = std::max(0, position(seq, vector) + 1 - call_.sliding_window);
        const int32_t* span = image_span(seq, vector);
        return span ? std::min(first, span[0]) : first;
    }
    int last_visible(int seq, int vector) const {
        const int32_t* span = image_span(seq, vector);
        return span ? span[1] - 1 : position(seq, vector);
    }
    const int32_t* image_span(int seq, int vector) const {
        if (!call_.image_spans) return nullptr;
        const int32_t* span = call_.image_spans + 2 * (call_.cu_seqlens_q[seq] + vector / group_);
        return span[1] ? span : nullptr;
    }
    int first_visible(const Item& item, int vector) const { return first_visible(item.seq, item.first_vector + vector); }
    int last_visible(const Item& item, int vector) const { return last_visible(item.seq, item.first_vector + vector); }

    const int32_t* block_table(const Item& item) const {
        return call_.block_tables + item.seq * call_.block_table_stride;
    }
    int32_t* cached_keys(int64_t block, int kv_head) const {
        return (int32_t*)call_.kv_cache + (block * call_.num_kv_heads + kv_head) * Cache::block_words(head_dim_);
    }
    int32_t* cached_values(int64_t block, int kv_head) const {
        return cached_keys(block, kv_head) + Cache::values_offset(head_dim_);
    }

    void store_token(int token) const {
        const int64_t slot = call_.slot_mapping[token];
        if (slot < 0) return;
        for (int kv_head = 0; kv_head < call_.num_kv_heads; ++kv_head) {
            auto* key = (const Scalar*)call_.key + token * call_.key_token_stride + kv_head * call_.key_head_stride;
            auto* value =
                (const Scalar*)call_.value + token * call_.value_token_stride + kv_head * call_.value_head_stride;
            Cache::store_token(cached_keys(slot / BLOCK, kv_head), (int)(slot % BLOCK), key, value, head_dim_);
        }
    }

    // `next_item` is the one this thread will probably take next.
    void attend(const Item& item, const Item& next_item, float* partials) const {
        typename Cache::Queries queries;
        for (int v = 0; v < item.num_vectors; ++v) queries.set(v, query(item, v), head_dim_);
        if (item.partials >= 0) {
            for (int tile = item.first_tile; tile < item.last_tile; ++tile) {
                Partial partial(partials + partial_offset(item, tile), item.num_vectors);
                attend_tile(item, tile, next_item, queries, partial);
            }
            return;
        }
        alignas(64) float total_memory[MAX_VECTORS * (MAX_HEAD_DIM + 2)];
        alignas(64) float tile_memory[MAX_VECTORS * (MAX_HEAD_DIM + 2)];
        Partial total(total_memory, item.num_vectors), partial(tile_memory, item.num_vectors);
        clear(total, item.num_vectors, head_dim_);
        for (int tile = item.first_tile; tile < item.last_tile; ++tile) {
            attend_tile(item, tile, next_item, queries, partial);
            merge(total, partial, item.num_vectors, head_dim_);
        }
        write_output(item, total);
    }

    // Merges the tiles that several items computed.
    void combine(const Item& item, float* partials) const {
        alignas(64) float total_memory[MAX_VECTORS * (MAX_HEAD_DIM + 2)];
        Partial total(total_memory, item.num_vectors);
        clear(total, item.num_vectors, head_dim_);
        for (int tile = item.first_tile; tile < item.last_tile; ++tile) {
            const Partial partial(partials + partial_offset(item, tile), item.num_vectors);
            merge(total, partial, item.num_vectors, head_dim_);
        }
        write_output(item, total);
    }

    int64_t partial_offset(const Item& item, int tile) const {
        return item.partials + (tile - item.first_tile) * Partial::size(item.num_vectors, head_dim_);
    }

    // Where the keys and values of one tile are. Each product fetches, step by step, what lies BLOCKS_AHEAD further on,
    // so the pointers end with what will be read next.
    struct Operands {
        int first_block, num_blocks;
        const int32_t* keys[(TILE_BLOCKS + BLOCKS_AHEAD) * COLUMNS_PER_BLOCK];
        const int32_t* values[TILE_BLOCKS + BLOCKS_AHEAD];
        alignas(64) int32_t tail[BLOCK * MAX_HEAD_DIM];
    };

    void find_operands(const Item& item, int tile, const Item& next_item, Operands& found) const {
        const int last_visible_block = last_visible(item, item.num_vectors - 1) / BLOCK;
        const int last_block = std::min((tile + 1) * TILE_BLOCKS, last_visible_block + 1);
        found.first_block = std::max(tile * TILE_BLOCKS, first_visible(item, 0) / BLOCK);
        found.num_blocks = last_block - found.first_block;
        const int32_t* table = block_table(item);
        for (int b = 0; b < found.num_blocks; ++b) {
            const int32_t block = table[found.first_block + b];
            const auto* keys = (const typename Cache::Word*)cached_keys(block, item.kv_head);
            for (int c = 0; c < COLUMNS_PER_BLOCK; ++c) {
                found.keys[b * COLUMNS_PER_BLOCK + c] = (const int32_t*)(keys + c * WIDTH);
            }
            found.values[b] = cached_values(block, item.kv_head);
        }

        // The keys are followed by the values, those by the keys of the next tile or item.
        const bool ends_item = tile + 1 == item.last_tile;
        const Item& next = ends_item ? next_item : item;
        const int next_block = ends_item ? next.first_tile * TILE_BLOCKS : last_block;
        const int final_block = (call_.seq_lens[next.seq] - 1) / BLOCK;
        for (int i = 0; i < BLOCKS_AHEAD; ++i) {
            const int32_t block = block_table(next)[std::min(next_block + i, final_block)];
            const int32_t* values = found.values[std::min(i, found.num_blocks - 1)];
            std::fill_n(found.keys + (found.num_blocks + i) * COLUMNS_PER_BLOCK, COLUMNS_PER_BLOCK, values);
            found.values[found.num_blocks + i] = cached_keys(block, next.kv_head);
        }

        const int seq_len = call_.seq_lens[item.seq];
        if (Cache::NEEDS_ZEROS && last_block * BLOCK > seq_len) {
            const int32_t*& last_values = found.values[found.num_blocks - 1];
            Cache::copy_used(found.tail, last_values, seq_len % BLOCK, head_dim_);
            last_values = found.tail;
        }
    }

    void attend_tile(const Item& item, int tile, const Item& next_item, const typename Cache::Queries& queries,
                     Partial& result) const {
        Operands operands;
        find_operands(item, tile, next_item, operands);
        const int count = item.num_vectors, num_slots = operands.num_blocks * BLOCK;
        alignas(64) float scores[MAX_VECTORS * TILE];

        for_each_register_block(count, num_slots / WIDTH, [&](int v, int column, auto r, auto n) {
            Cache::template score<r(), n()>(queries, v, operands.keys + column, head_dim_,
                                            scores + v * TILE + column * WIDTH);
        });
        float scale = call_.scale;
        if (call_.soft_cap) {
            for (int v = 0; v < count; ++v) cap(scores + v * TILE, num_slots, scale, call_.soft_cap);
            scale = 1.0f;
        }
        scale *= 1.44269504f;  // weights are powers of 2
        const int start = operands.first_block * BLOCK;
        for (int v = 0; v < count; ++v) {
            const int first = first_visible(item, v) - start, end = last_visible(item, v) + 1 - start;
            result.max[v] = mask_and_max(scores + v * TILE, num_slots, first, end) * scale;
        }
        typename Cache::Weights weights;
        for (int v = 0; v < count; ++v) {
            result.sum[v] = weights.set(v, scores + v * TILE, num_slots, scale, result.max[v], operands.values);
        }
        for_each_register_block(count, head_dim_ / WIDTH, [&](int v, int vector, auto r, auto n) {
            const int dim = vector * WIDTH;
            Cache::template weigh<r(), n()>(weights, scores, v, operands.values, operands.num_blocks, head_dim_, dim,
                                            result.output + v * head_dim_ + dim);
        });
    }

    int64_t row(const Item& item, int vector) const {
        return call_.cu_seqlens_q[item.seq] + (item.first_vector + vector) / group_;
    }
    int64_t head(const Item& item, int vector) const {
        return item.kv_head * group_ + (item.first_vector + vector) % group_;
    }
    const Scalar* query(const Item& item, int vector) const {
        return (const Scalar*)call_.query + row(item, vector) * call_.query_token_stride +
               head(item, vector) * call_.query_head_stride;
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

// cache_type: the element type, INT8, or BF16 where elements are FP32
DIPTYCH_EXPORT void diptych_attend(int32_t element_type, int32_t cache_type, const diptych::AttentionCall* call) {
    using namespace diptych;
    if (element_type == FP32 && cache_type == BF16) return Attention<Fp32, PlainCache<Fp32, Bf16Slots>>(*call).run();
    with_element(element_type, [&](auto element) {
        using Element = decltype(element);
        if (cache_type == INT8) {
            Attention<Element, Int8Cache<Element>>(*call).run();
        } else {
            Attention<Element, PlainCache<Element>>(*call).run();
        }
    });
}
