"""Attention of a ragged batch over the paged KV cache, in one launch: decode rows and prefill chunks alike.

    score = cap(scale * q.k)        cap(s) = s, or soft_cap * tanh(s / soft_cap)
    out   = sum_p exp(score_p - max) v_p / sum_p exp(score_p - max)     over the positions p that a token sees

One tile of queries is BLOCK_M rows: a few tokens times the query heads that share one key head. It walks the positions
it sees in tiles of BLOCK_N, gathered through the block table, with a running maximum and sum in fp32 and powers of two
instead of e. A long walk is split among several programs; the last of them to finish adds up what all have found.

The device's half: `paged_attention` launches it. The cache's layout is `kv_layout`'s, tile sizes and grid are
`launch_plan`'s, and docs/kernels.md says why they are so.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Less than any score, and finite: exp2(-inf - NO_SCORE) is 0 where exp2(-inf - -inf) would be NaN.
NO_SCORE = tl.constexpr(-1e30)


@triton.jit
def _find_work(
    item,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    num_seqs,
    window,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SMALL_M: tl.constexpr,
    LARGE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SEQS: tl.constexpr,
    TARGET_PROGRAMS: tl.constexpr,
    MIN_TILES_PER_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """The item-th piece of the batch's work, the same for every key head; every program counts through the same list.

    returns  (sequence, query tile in it, split of that tile, number of its splits, partial result's slot of split 0);
             the sequence is num_seqs where the list is shorter
    """
    # Reads all lengths, from L2 after the first program.
    index = tl.arange(0, MAX_SEQS)
    exists = index < num_seqs
    start = tl.load(cu_seqlens_q_ptr + index, mask=exists, other=0)
    num_new = tl.load(cu_seqlens_q_ptr + index + 1, mask=exists, other=0) - start
    num_positions = tl.load(seq_lens_ptr + index, mask=exists, other=0)

    if LARGE_M > SMALL_M:
        tokens_per_tile = tl.where(num_new * GROUP <= SMALL_M, SMALL_M // GROUP, LARGE_M // GROUP)
    else:
        tokens_per_tile = tl.full([MAX_SEQS], SMALL_M // GROUP, tl.int32)
    query_tiles = tl.cdiv(num_new, tokens_per_tile)
    if HAS_WINDOW:
        num_positions = tl.minimum(num_positions, window + tokens_per_tile)
    kv_tiles = tl.cdiv(num_positions, BLOCK_N)
    # Splits as long as keep TARGET_PROGRAMS programs busy, and no more of them than that.
    total = tl.sum(query_tiles * kv_tiles, axis=0) * NUM_KV_HEADS
    tiles_per_split = tl.maximum(tl.cdiv(total, TARGET_PROGRAMS), MIN_TILES_PER_SPLIT)
    splits = tl.minimum(tl.maximum(kv_tiles // tiles_per_split, 1), MAX_SPLITS)
    items = query_tiles * splits

    # The last sequences come first: they are the prompts, whose tiles take longest.
    total_items = tl.sum(items, axis=0)
    from_start = total_items - 1 - item
    ends = tl.cumsum(items, axis=0)
    sequence = tl.where(from_start >= 0, tl.sum((ends <= from_start).to(tl.int32), axis=0), num_seqs)
    # Three sums in one, as each costs two barriers: items before the sequence, partial results before it (24 bits: no
    # more than TARGET_PROGRAMS), and its own splits (8 bits).
    slots = tl.where(splits > 1, items, 0)
    before = tl.where(index < sequence, (items.to(tl.int64) << 32) + (slots.to(tl.int64) << 8), 0)
    packed = tl.sum(before + tl.where(index == sequence, splits, 0), axis=0)
    inside = from_start - (packed >> 32).to(tl.int32)
    slots_before = ((packed >> 8) & 0xFFFFFF).to(tl.int32)
    num_splits = tl.maximum((packed & 0xFF).to(tl.int32), 1)
    tile = inside // num_splits
    return sequence, tile, inside % num_splits, num_splits, slots_before + tile * num_splits


@triton.jit
def _dequantize(stored, DTYPE: tl.constexpr, IS_FP8: tl.constexpr, FP8_IN_SOFTWARE: tl.constexpr):
    """Bytes of a quantized cache as DTYPE; e4m3 without the hardware's conversion comes out divided by 256."""
    if not IS_FP8:
        # 0x6400 is fp16's 1024, whose last bit counts 1: exact, and cheaper than a conversion of integers.
        exact = (stored.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    elif FP8_IN_SOFTWARE:
        # e4m3's fields moved to fp16's places: the exponent's bias differs by 8, subnormals included.
        bits = stored.to(tl.uint16)
        exact = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        exact = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return exact.to(DTYPE)


@triton.jit
def _block_ids(block_table_ptr, tile, is_wanted, num_positions, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """[BLOCK_N] int64: the block of each position of a tile, any where the sequence has none."""
    # Reads a few ids, each for all positions of its block.
    block = tl.arange(0, BLOCK_N) // BLOCK_SIZE
    exists = is_wanted & (tile * BLOCK_N + block * BLOCK_SIZE < num_positions)
    ids = tl.load(block_table_ptr + tile * (BLOCK_N // BLOCK_SIZE) + block, mask=exists, other=0)
    return tl.max_constancy(ids, [BLOCK_SIZE]).to(tl.int64)


@triton.jit
def _walk(
    row_max,
    row_sum,
    total,
    query,
    low,
    high,
    first_tile,
    num_tiles,
    jump_at,
    jump_by,
    kv_ptr,
    scales_ptr,
    block_table_ptr,
    num_positions,
    score_scale,
    soft_cap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_FP8: tl.constexpr,
    FP8_IN_SOFTWARE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    LATE_SUM: tl.constexpr,
):
    """Add num_tiles tiles of keys and values to the running (row_max, row_sum, total).

    first_tile, jump_at, jump_by  the i-th tile is first_tile + i, and jump_by more from i = jump_at on
    MASKED    some rows do not see all of the tiles
    LATE_SUM  row_sum [BLOCK_M, BLOCK_N] still has to be added up along the rows, else it is [BLOCK_M]
    """
    offset = tl.arange(0, BLOCK_N)  # of a position in its tile
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM if HEAD_DIM < BLOCK_D else tl.full([BLOCK_D], True, tl.int1)
    slot = offset % BLOCK_SIZE
    tile = first_tile + tl.where(jump_at == 0, jump_by, 0)
    block = _block_ids(block_table_ptr, tile, num_tiles > 0, num_positions, BLOCK_N, BLOCK_SIZE)
    for i in range(num_tiles):
        tile_start = tile * BLOCK_N
        position = tile_start + offset
        # What lies behind a sequence's end is unwritten memory, perhaps NaN, and 0 * NaN would spoil the sums.
        exists = position < num_positions if MASKED else tl.full([BLOCK_N], True, tl.int1)
        block_starts = block * BLOCK_STRIDE
        elements = (block_starts + slot * ROW_STRIDE)[:, None] + dim[None, :]
        mask = exists[:, None] & in_head[None, :]
        scale_rows = block * (BLOCK_STRIDE // 4) + SCALES_OFFSET + slot

        # The block ids are fetched one tile ahead by hand: the compiler pipelines loads, but not what they depend on.
        tile += tl.where(i + 1 == jump_at, jump_by + 1, 1)
        block = _block_ids(block_table_ptr, tile, i + 1 < num_tiles, num_positions, BLOCK_N, BLOCK_SIZE)

        # Reads the keys: a block's are one contiguous run of BLOCK_SIZE * ROW_STRIDE elements.
        keys = tl.load(kv_ptr + elements, mask=mask, other=0.0)
        if IS_QUANTIZED:
            keys = _dequantize(keys, query.dtype, IS_FP8, FP8_IN_SOFTWARE)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if IS_QUANTIZED:
            # Reads the rows' scales, 4 bytes each.
            key_scale = tl.load(scales_ptr + scale_rows, mask=exists, other=0.0)
            value_scale = tl.load(scales_ptr + BLOCK_SIZE + scale_rows, mask=exists, other=0.0)
            scores *= key_scale[None, :]
        if HAS_SOFT_CAP:
            # tanh(x) = 1 - 2 / (e^2x + 1); score_scale holds x's factors, 2 and log2(e) among them.
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * score_scale) + 1.0))
        else:
            scores *= score_scale
        if MASKED:
            visible = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_max = new_max
        if LATE_SUM:  # noqa: SIM108
            row_sum = row_sum * shrink[:, None] + weights
        else:
            row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        if IS_QUANTIZED:
            weights *= value_scale[None, :]

        # Reads the values, which follow the keys of their block. Bytes lie transposed there, and whole blocks of them
        # are read: no byte that was ever stored is a NaN.
        if IS_QUANTIZED:
            columns = (block_starts + slot)[None, :] + (dim * BLOCK_SIZE)[:, None]
            mask = tl.broadcast_to(in_head[:, None], [BLOCK_D, BLOCK_N])
            if MASKED:
                mask = mask & (tile_start + offset // BLOCK_SIZE * BLOCK_SIZE < num_positions)[None, :]
            values = tl.load(kv_ptr + BLOCK_SIZE * ROW_STRIDE + columns, mask=mask, other=0)
            values = tl.trans(_dequantize(values, query.dtype, IS_FP8, FP8_IN_SOFTWARE))
        else:
            values = tl.load(kv_ptr + BLOCK_SIZE * ROW_STRIDE + elements, mask=mask, other=0.0)
        total = tl.dot(weights.to(query.dtype), values, total * shrink[:, None], input_precision="ieee")
    return row_max, row_sum, total


@triton.jit
def _attend_tile(
    output_ptr,
    query_ptr,
    kv_ptr,
    scales_ptr,
    block_table_ptr,
    image_spans_ptr,
    partials_ptr,
    arrivals_ptr,
    first_token,
    num_new,
    num_positions,
    tile,
    split,
    num_splits,
    slot,
    kv_head,
    query_token_stride,
    query_head_stride,
    score_scale,
    soft_cap,
    unit,
    window,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PARTIAL_STRIDE: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_FP8: tl.constexpr,
    FP8_IN_SOFTWARE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    IS_SMALL: tl.constexpr,
):
    """One split of one tile of queries: walk its keys and values, and write the output or a partial result."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    token = tile * TOKENS + row // GROUP  # of the sequence's new ones
    is_row = (row < TOKENS * GROUP) & (token < num_new)
    head = kv_head * GROUP + row % GROUP

    # Reads the queries once.
    query_rows = (first_token + token).to(tl.int64) * query_token_stride + head * query_head_stride
    query = tl.load(query_ptr + query_rows[:, None] + dim[None, :], mask=is_row[:, None] & in_head[None, :], other=0.0)
    if IS_QUANTIZED and query.dtype == tl.bfloat16:
        # Bytes become fp16, exactly and with fewer instructions than bf16.
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0).to(tl.float16)

    # What each row sees, [low, high), and what some and all rows of the tile see.
    position = num_positions - num_new + token
    high = position + 1
    low = tl.maximum(position - window + 1, 0) if HAS_WINDOW else tl.zeros([BLOCK_M], tl.int32)
    if HAS_SPANS:
        # Reads each row's span; a token's own position lies in it, so that both parts make one interval.
        span_ptr = image_spans_ptr + (first_token + token).to(tl.int64) * 2
        span_start = tl.load(span_ptr, mask=is_row, other=0)
        span_end = tl.load(span_ptr + 1, mask=is_row, other=0)
        low = tl.where(span_end > span_start, tl.minimum(low, span_start), low)
        high = tl.maximum(high, span_end)
    low = tl.where(is_row, low, 0)
    high = tl.where(is_row, high, 0)
    last_row = tl.minimum(num_new - tile * TOKENS, TOKENS) * GROUP - 1
    if HAS_SPANS:
        highest = tl.max(high, axis=0)
        lowest = tl.min(tl.where(is_row, low, highest), axis=0)
        all_from = tl.max(low, axis=0)
        all_to = tl.min(tl.where(is_row, high, highest), axis=0)
    else:
        first_position = num_positions - num_new + tile * TOKENS
        last_position = first_position + last_row // GROUP
        highest = last_position + 1
        all_to = first_position + 1
        lowest = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else 0
        all_from = tl.maximum(last_position - window + 1, 0) if HAS_WINDOW else 0

    # This split's tiles of keys, and those of them that all rows see wholly.
    first = lowest // BLOCK_N
    end = tl.cdiv(highest, BLOCK_N)
    per_split = tl.cdiv(end - first, num_splits)
    first = tl.minimum(first + split * per_split, end)
    end = tl.minimum(first + per_split, end)

    row_max = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if IS_SMALL:
        # Few rows: masking costs little beside the memory, and one loop keeps the pipeline full. The warps share the
        # columns: sums are left until the end, as each costs a trip through shared memory.
        late_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        row_max, late_sum, total = _walk(
            row_max, late_sum, total, query, low, high, first, end - first, end, 0,
            kv_ptr, scales_ptr, block_table_ptr, num_positions, score_scale, soft_cap,
            HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, ROW_STRIDE, BLOCK_STRIDE, SCALES_OFFSET, IS_QUANTIZED,
            IS_FP8, FP8_IN_SOFTWARE, HAS_SOFT_CAP, True, True,
        )  # fmt: skip
        row_sum = tl.sum(late_sum, axis=1)
    else:
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        full_first = tl.minimum(tl.maximum(tl.cdiv(all_from, BLOCK_N), first), end)
        full_end = tl.minimum(tl.maximum(all_to // BLOCK_N, full_first), end)
        row_max, row_sum, total = _walk(
            row_max, row_sum, total, query, low, high, full_first, full_end - full_first, 0, 0,
            kv_ptr, scales_ptr, block_table_ptr, num_positions, score_scale, soft_cap,
            HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, ROW_STRIDE, BLOCK_STRIDE, SCALES_OFFSET, IS_QUANTIZED,
            IS_FP8, FP8_IN_SOFTWARE, HAS_SOFT_CAP, False, False,
        )  # fmt: skip
        num_full = full_end - full_first
        row_max, row_sum, total = _walk(
            row_max, row_sum, total, query, low, high, first, end - first - num_full, full_first - first, num_full,
            kv_ptr, scales_ptr, block_table_ptr, num_positions, score_scale, soft_cap,
            HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, ROW_STRIDE, BLOCK_STRIDE, SCALES_OFFSET, IS_QUANTIZED,
            IS_FP8, FP8_IN_SOFTWARE, HAS_SOFT_CAP, True, False,
        )  # fmt: skip
    if IS_QUANTIZED:
        total *= unit

    out_rows = ((first_token + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    out_mask = is_row[:, None] & in_head[None, :]
    if num_splits == 1:
        # Writes the output.
        out = total / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        tl.store(output_ptr + out_rows[:, None] + dim[None, :], out.to(output_ptr.dtype.element_ty), mask=out_mask)
    else:
        # Writes the partial result: [BLOCK_M, BLOCK_D] weighted sums, then each row's maximum and sum.
        tile_ptr = partials_ptr + (slot * NUM_KV_HEADS + kv_head * num_splits).to(tl.int64) * PARTIAL_STRIDE
        partial_ptr = tile_ptr + split * PARTIAL_STRIDE
        tl.store(partial_ptr + row[:, None] * BLOCK_D + dim[None, :], total, mask=is_row[:, None])
        tl.store(partial_ptr + BLOCK_M * BLOCK_D + row, row_max)
        tl.store(partial_ptr + BLOCK_M * BLOCK_D + BLOCK_M + row, row_sum)
        # All threads have written before one of them counts; who counts last sees what all programs wrote.
        tl.debug_barrier()
        arrival_ptr = arrivals_ptr + slot * NUM_KV_HEADS + kv_head
        if tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == num_splits - 1:
            tl.store(arrival_ptr, 0)  # for the next launch
            if IS_SMALL:
                _combine_rows(
                    output_ptr, tile_ptr, num_splits, last_row + 1, first_token + tile * TOKENS, kv_head,
                    GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_D, MAX_SPLITS, PARTIAL_STRIDE,
                )  # fmt: skip
            else:
                _combine_splits(
                    output_ptr + out_rows[:, None] + dim[None, :], out_mask, tile_ptr, num_splits,
                    BLOCK_M, BLOCK_D, PARTIAL_STRIDE,
                )  # fmt: skip


@triton.jit
def _combine_rows(
    output_ptr,
    tile_ptr,
    num_splits,
    num_rows,
    first_token,
    kv_head,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PARTIAL_STRIDE: tl.constexpr,
):
    """Few rows of many splits: all splits of a row at once, the next rows' loads in flight meanwhile."""
    split = tl.arange(0, MAX_SPLITS)
    dim = tl.arange(0, BLOCK_D)
    exists = split < num_splits
    for row in tl.range(0, num_rows, num_stages=3):
        # Reads the partial results, past L1: other multiprocessors wrote them.
        partial_ptr = tile_ptr + split * PARTIAL_STRIDE
        totals = tl.load(
            partial_ptr[:, None] + row * BLOCK_D + dim[None, :], mask=exists[:, None], other=0.0, cache_modifier=".cg"
        )
        maxima_ptr = partial_ptr + BLOCK_M * BLOCK_D + row
        maxima = tl.load(maxima_ptr, mask=exists, other=NO_SCORE, cache_modifier=".cg")
        sums = tl.load(maxima_ptr + BLOCK_M, mask=exists, other=0.0, cache_modifier=".cg")
        weights = tl.exp2(maxima - tl.max(maxima, axis=0))
        row_sum = tl.sum(sums * weights, axis=0)
        out = tl.sum(totals * weights[:, None], axis=0) / tl.where(row_sum > 0, row_sum, 1.0)
        # Writes one row of the output.
        head = kv_head * GROUP + row % GROUP
        out_row = ((first_token + row // GROUP).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
        tl.store(output_ptr + out_row + dim, out.to(output_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit
def _combine_splits(
    output_ptrs,
    out_mask,
    tile_ptr,
    num_splits,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTIAL_STRIDE: tl.constexpr,
):
    """Many rows of few splits: all rows of one split at a time."""
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    row_max = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in tl.range(0, num_splits):
        # Reads the partial results, past L1: other multiprocessors wrote them.
        partial_ptr = tile_ptr + split * PARTIAL_STRIDE
        maxima = tl.load(partial_ptr + BLOCK_M * BLOCK_D + row, cache_modifier=".cg")
        sums = tl.load(partial_ptr + BLOCK_M * BLOCK_D + BLOCK_M + row, cache_modifier=".cg")
        found = tl.load(
            partial_ptr + row[:, None] * BLOCK_D + dim[None, :], mask=out_mask, other=0.0, cache_modifier=".cg"
        )
        new_max = tl.maximum(row_max, maxima)
        shrink, grow = tl.exp2(row_max - new_max), tl.exp2(maxima - new_max)
        row_sum = row_sum * shrink + sums * grow
        total = total * shrink[:, None] + found * grow[:, None]
        row_max = new_max
    # Writes the output.
    out = total / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    tl.store(output_ptrs, out.to(output_ptrs.dtype.element_ty), mask=out_mask)


# What differs from batch to batch must not compile anew: neither whole numbers nor the alignment of tensors in a shared
# buffer.
@triton.jit(
    do_not_specialize=["num_seqs", "block_table_stride", "window"],
    do_not_specialize_on_alignment=["cu_seqlens_q_ptr", "seq_lens_ptr", "block_tables_ptr", "image_spans_ptr"],
)
def paged_attention_kernel(
    output_ptr,
    query_ptr,
    kv_ptr,
    scales_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    image_spans_ptr,
    partials_ptr,
    arrivals_ptr,
    num_seqs,
    query_token_stride,
    query_head_stride,
    block_table_stride,
    score_scale,
    soft_cap,
    unit,
    window,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SMALL_M: tl.constexpr,
    LARGE_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    MAX_SEQS: tl.constexpr,
    TARGET_PROGRAMS: tl.constexpr,
    MIN_TILES_PER_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PARTIAL_STRIDE: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_FP8: tl.constexpr,
    FP8_IN_SOFTWARE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):
    """Program (h, i): the i-th piece of work for key head h, or nothing."""
    kv_head = tl.program_id(0)
    sequence, tile, split, num_splits, slot = _find_work(
        tl.program_id(1), cu_seqlens_q_ptr, seq_lens_ptr, num_seqs, window,
        GROUP, NUM_KV_HEADS, SMALL_M, LARGE_M, BLOCK_N, MAX_SEQS, TARGET_PROGRAMS, MIN_TILES_PER_SPLIT, MAX_SPLITS,
        HAS_WINDOW,
    )  # fmt: skip
    if sequence < num_seqs:
        first_token = tl.load(cu_seqlens_q_ptr + sequence)
        num_new = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_token
        num_positions = tl.load(seq_lens_ptr + sequence)
        block_table_ptr = block_tables_ptr + sequence.to(tl.int64) * block_table_stride
        kv_ptr += kv_head * HEAD_STRIDE
        scales_ptr += kv_head * (HEAD_STRIDE // 4)
        if LARGE_M > SMALL_M and num_new * GROUP > SMALL_M:
            _attend_tile(
                output_ptr, query_ptr, kv_ptr, scales_ptr, block_table_ptr, image_spans_ptr, partials_ptr,
                arrivals_ptr, first_token, num_new, num_positions, tile, split, num_splits, slot, kv_head,
                query_token_stride, query_head_stride, score_scale, soft_cap, unit, window,
                GROUP, NUM_KV_HEADS, HEAD_DIM, LARGE_M, BLOCK_D, BLOCK_N, BLOCK_SIZE, ROW_STRIDE,
                NUM_KV_HEADS * HEAD_STRIDE, SCALES_OFFSET, MAX_SPLITS, PARTIAL_STRIDE, IS_QUANTIZED, IS_FP8,
                FP8_IN_SOFTWARE, HAS_WINDOW, HAS_SOFT_CAP, HAS_SPANS, False,
            )  # fmt: skip
        else:
            _attend_tile(
                output_ptr, query_ptr, kv_ptr, scales_ptr, block_table_ptr, image_spans_ptr, partials_ptr,
                arrivals_ptr, first_token, num_new, num_positions, tile, split, num_splits, slot, kv_head,
                query_token_stride, query_head_stride, score_scale, soft_cap, unit, window,
                GROUP, NUM_KV_HEADS, HEAD_DIM, SMALL_M, BLOCK_D, BLOCK_N, BLOCK_SIZE, ROW_STRIDE,
                NUM_KV_HEADS * HEAD_STRIDE, SCALES_OFFSET, MAX_SPLITS, PARTIAL_STRIDE, IS_QUANTIZED, IS_FP8,
                FP8_IN_SOFTWARE, HAS_WINDOW, HAS_SOFT_CAP, HAS_SPANS, SMALL_M <= 16,
            )  # fmt: skip
