"""Sampling on the device: logits to token ids, with nothing for the host to wait for and without sorting.

The same draw as `runner.sampler`. A row's tokens have weights exp((logit - best) / temperature); min_p zeroes the
light ones. In order of falling logits (equal ones: of rising ids) top_k and then top_p keep a prefix of the tokens,
and a uniform number, a hash of (seed, index, position), picks the first token whose running sum of weights exceeds
it. Without top_k and top_p the order is that of the ids.

A prefix that reaches an amount is found by its last logit: the greatest threshold above or at which the weights
(top_p, the draw) or the tokens (top_k) add up to the amount. The thresholds are searched by bisection, several at a
time, over the logits' bits as ordered integers; once the best few thousand tokens have been gathered, mostly over
those alone.

Weights are whole numbers of 2^-44 of the best token's. Their sums are exact, so a row's outcome depends on neither
the order of addition nor the batch. Against the CPU's double precision a draw moves by about 1e-7 of the total
weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.text_engine.kernels.compile_check import CompileCase
from services.text_engine.kernels.sampling_tensors import SamplingTensors

BLOCK = 1024
MAX_CANDIDATES = 2048
NUM_WARPS = 8
MAX_REGISTERS = 168  # enough; left alone, ptxas of some versions aims for 128 and spills a few
# Loads that run ahead of a pass's arithmetic: one block's latency is many times its transfer.
NUM_STAGES = tl.constexpr(5)
WEIGHT_OF_BEST = tl.constexpr(float(2**44))
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST_KEY = tl.constexpr(-(2**31))


@triton.jit
def _splitmix64(value):
    """As `runner.sampler._splitmix64`. value uint64"""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _part_of(total, seed, index, position):
    """floor(u * total) for the uniform u in [0, 1) of 53 bits that decides this token."""
    state = _splitmix64(seed.to(tl.uint64, bitcast=True) ^ _splitmix64(index.to(tl.uint64, bitcast=True)))
    bits = _splitmix64(state ^ _splitmix64(position.to(tl.uint64, bitcast=True))) >> 11
    return tl.umulhi(bits << 11, total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)


@triton.jit
def _load_row(row_ptr, columns, size):
    """Logits; past the end -inf, which weighs nothing and is counted only where the amount of a top_k has long been
    reached by weightless tokens. + 0.0 makes one zero of the two."""
    return tl.load(row_ptr + columns, mask=columns < size, other=float("-inf")) + 0.0


@triton.jit
def _keys(logits):
    """fp32 to int32 in the same order."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(logits, best, inverse_temperature, min_weight):
    """int64; zero below min_weight, which is at least 1. Never more than WEIGHT_OF_BEST."""
    weights = (tl.exp2((logits - best) * inverse_temperature) * WEIGHT_OF_BEST).to(tl.int64)
    return tl.where(weights >= min_weight, weights, 0)


@triton.jit
def _sum_from(
    row_ptr, size, best, inverse_temperature, min_weight, first_key, OF_COUNTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The weights, or the number, of the tokens with keys from first_key on."""
    sums = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in tl.range(0, size, BLOCK, num_stages=NUM_STAGES):
        columns = start + tl.arange(0, BLOCK)
        logits = _load_row(row_ptr, columns, size)
        measure = tl.full((BLOCK,), 1, dtype=tl.int64)
        if not OF_COUNTS:
            measure = _weights(logits, best, inverse_temperature, min_weight)
        sums += tl.where(_keys(logits) >= first_key, measure, 0)
    return tl.sum(sums, 0)


@triton.jit
def _sums_from(
    row_ptr,
    size,
    best,
    inverse_temperature,
    min_weight,
    first_key,
    second_key,
    third_key,
    fourth_key,
    OF_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_sum_from` for four keys in one pass over the row. One by one: as a second axis they would not stay in place."""
    first = tl.zeros((BLOCK,), dtype=tl.int64)
    second = tl.zeros((BLOCK,), dtype=tl.int64)
    third = tl.zeros((BLOCK,), dtype=tl.int64)
    fourth = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in tl.range(0, size, BLOCK, num_stages=NUM_STAGES):
        columns = start + tl.arange(0, BLOCK)
        logits = _load_row(row_ptr, columns, size)
        keys = _keys(logits)
        measure = tl.full((BLOCK,), 1, dtype=tl.int64)
        if not OF_COUNTS:
            measure = _weights(logits, best, inverse_temperature, min_weight)
        first += tl.where(keys >= first_key, measure, 0)
        second += tl.where(keys >= second_key, measure, 0)
        third += tl.where(keys >= third_key, measure, 0)
        fourth += tl.where(keys >= fourth_key, measure, 0)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0), tl.sum(fourth, 0)


@triton.jit
def _find_key(
    row_ptr, size, best, inverse_temperature, min_weight, amount, OF_COUNTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The greatest key such that the tokens from it on add up to the amount, which all of them together do."""
    low = tl.full((), LOWEST_KEY, dtype=tl.int64)
    high = _keys(best).to(tl.int64) + 1
    while high - low > 1:
        # Four pivots, from low itself, where the amount is reached, to just before high, where it is not.
        width = high - low
        key_1, key_2, key_3, key_4 = low + width // 5, low + width * 2 // 5, low + width * 3 // 5, low + width * 4 // 5
        sum_1, sum_2, sum_3, sum_4 = _sums_from(
            row_ptr,
            size,
            best,
            inverse_temperature,
            min_weight,
            key_1.to(tl.int32),
            key_2.to(tl.int32),
            key_3.to(tl.int32),
            key_4.to(tl.int32),
            OF_COUNTS,
            BLOCK,
        )
        # The sums fall as the keys rise: the last key with enough, and the first with too little.
        low = tl.where(sum_1 >= amount, key_1, low)
        low = tl.where(sum_2 >= amount, key_2, low)
        low = tl.where(sum_3 >= amount, key_3, low)
        low = tl.where(sum_4 >= amount, key_4, low)
        high = tl.where(sum_4 < amount, key_4, high)
        high = tl.where(sum_3 < amount, key_3, high)
        high = tl.where(sum_2 < amount, key_2, high)
        high = tl.where(sum_1 < amount, key_1, high)
    return low.to(tl.int32)


@triton.jit
def _prefix_weight(
    row_ptr, size, best, inverse_temperature, min_weight, amount, OF_COUNTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The weight of the shortest prefix of the sorted row that adds up to the amount."""
    key = _find_key(row_ptr, size, best, inverse_temperature, min_weight, amount, OF_COUNTS, BLOCK)
    # The tokens of that key all weigh the same; as many belong to the prefix as the amount still needs.
    above = _sum_from(row_ptr, size, best, inverse_temperature, min_weight, key + 1, False, BLOCK)
    reached = above
    if OF_COUNTS:
        reached = _sum_from(row_ptr, size, best, inverse_temperature, min_weight, key + 1, True, BLOCK)
    weight = _weights(_logit_of(key), best, inverse_temperature, min_weight)
    if OF_COUNTS:
        return above + (amount - reached) * weight
    return above + (amount - reached + weight - 1) // weight * weight


@triton.jit
def _nth(
    row_ptr, size, best, inverse_temperature, min_weight, key, amount, OF_EQUALS: tl.constexpr, BLOCK: tl.constexpr
):
    """The first column at which the running sum, of weights or of tokens with just this key, reaches the amount."""
    found = tl.full((), -1, dtype=tl.int32)
    passed = tl.full((), 0, dtype=tl.int64)
    start = tl.full((), 0, dtype=tl.int32)
    while (found < 0) & (start < size):
        columns = start + tl.arange(0, BLOCK)
        logits = _load_row(row_ptr, columns, size)
        if OF_EQUALS:
            measure = (_keys(logits) == key).to(tl.int64)
        else:
            measure = _weights(logits, best, inverse_temperature, min_weight)
        in_block = tl.sum(measure, 0)
        if passed + in_block >= amount:
            running = passed + tl.cumsum(measure, 0)
            found = tl.min(tl.where(running >= amount, columns, size), 0)
        passed += in_block
        start += BLOCK
    return tl.maximum(found, 0)


@triton.jit
def _nth_sorted(row_ptr, size, best, inverse_temperature, min_weight, amount, BLOCK: tl.constexpr):
    """The first column, in order of falling logits, at which the running sum of weights reaches the amount."""
    key = _find_key(row_ptr, size, best, inverse_temperature, min_weight, amount, False, BLOCK)
    above = _sum_from(row_ptr, size, best, inverse_temperature, min_weight, key + 1, False, BLOCK)
    weight = _weights(_logit_of(key), best, inverse_temperature, min_weight)
    nth = (amount - above + weight - 1) // weight
    return _nth(row_ptr, size, best, inverse_temperature, min_weight, key, nth, True, BLOCK)


@triton.jit
def _gather_candidates(
    row_ptr, size, best, temperature, logits_ptr, ids_ptr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the best tokens, in the order of their ids; returns how many, 0 to CAPACITY.

    They are the tokens within a distance of the best, the greatest of four for which they fit.
    """
    unit = tl.maximum(temperature, 1.0)
    key_1, key_2, key_3, key_4 = (
        _keys(best - 12.0 * unit),
        _keys(best - 6.0 * unit),
        _keys(best - 3.0 * unit),
        _keys(best - 1.5 * unit),
    )
    count_1, count_2, count_3, count_4 = _sums_from(
        row_ptr, size, best, 0.0, 1, key_1, key_2, key_3, key_4, True, BLOCK
    )
    first_key = tl.where(count_3 <= CAPACITY, key_3, key_4)
    first_key = tl.where(count_2 <= CAPACITY, key_2, first_key)
    first_key = tl.where(count_1 <= CAPACITY, key_1, first_key)
    num_candidates = tl.where(count_4 <= CAPACITY, count_4, 0)
    num_candidates = tl.where(count_3 <= CAPACITY, count_3, num_candidates)
    num_candidates = tl.where(count_2 <= CAPACITY, count_2, num_candidates)
    num_candidates = tl.where(count_1 <= CAPACITY, count_1, num_candidates)
    written = tl.full((), 0, dtype=tl.int32)
    start = tl.full((), 0, dtype=tl.int32)
    while written < num_candidates:
        columns = start + tl.arange(0, BLOCK)
        logits = _load_row(row_ptr, columns, size)
        wanted = _keys(logits) >= first_key
        slots = written + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(logits_ptr + slots, logits, mask=wanted)
        tl.store(ids_ptr + slots, columns, mask=wanted)
        written += tl.sum(wanted.to(tl.int32), 0)
        start += BLOCK
    tl.debug_barrier()  # what one thread has written, others will read
    return num_candidates.to(tl.int32)


@triton.jit
def _sample(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    index_ptr,
    position_ptr,
    candidate_logits_ptr,
    candidate_ids_ptr,
    token_ids_ptr,
    is_finite_ptr,
    row_stride,
    vocab_size,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row. The logits are read from memory once; later passes, about three and sometimes thirty, find
    them in L2."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride

    best_values = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    best_columns = tl.zeros((BLOCK,), dtype=tl.int32)
    num_strange = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        columns = start + tl.arange(0, BLOCK)
        logits = _load_row(row_ptr, columns, vocab_size)
        num_strange += ((logits != logits) | (logits == float("inf"))).to(tl.int32)
        best_columns = tl.where(logits > best_values, columns, best_columns)
        best_values = tl.where(logits > best_values, logits, best_values)
    best = tl.max(best_values, 0)
    token_id = tl.min(tl.where(best_values == best, best_columns, vocab_size), 0)
    is_finite = (tl.sum(num_strange, 0) == 0) & (best > float("-inf"))

    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if is_finite & (temperature > 0.0) & (top_k != 1) & (top_p > 0.0):
        temperature = tl.maximum(temperature, 1e-30)  # so that the best token's own exponent is 0, not 0 * inf
        inverse_temperature = LOG2_E / temperature
        min_weight = tl.maximum((tl.load(min_p_ptr + row) * WEIGHT_OF_BEST).to(tl.int64), 1)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        seed = tl.load(seed_ptr + row)
        index = tl.load(index_ptr + row)
        position = tl.load(position_ptr + row)
        lowest = tl.full((), LOWEST_KEY, dtype=tl.int32)
        total = _sum_from(row_ptr, vocab_size, best, inverse_temperature, min_weight, lowest, False, BLOCK)
        if has_top_k | (top_p < 1.0):
            few_ptr = candidate_logits_ptr + row.to(tl.int64) * CAPACITY
            few_ids_ptr = candidate_ids_ptr + row.to(tl.int64) * CAPACITY
            num_few = _gather_candidates(row_ptr, vocab_size, best, temperature, few_ptr, few_ids_ptr, CAPACITY, BLOCK)
            few_weight = _sum_from(few_ptr, num_few, best, inverse_temperature, min_weight, lowest, False, BLOCK)
            if has_top_k:
                is_few = top_k <= num_few
                tokens_ptr = tl.where(is_few, few_ptr, row_ptr)
                size = tl.where(is_few, num_few, vocab_size)
                total = _prefix_weight(
                    tokens_ptr, size, best, inverse_temperature, min_weight, top_k.to(tl.int64), True, BLOCK
                )
            if top_p < 1.0:
                amount = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
                is_few = amount <= few_weight
                tokens_ptr = tl.where(is_few, few_ptr, row_ptr)
                size = tl.where(is_few, num_few, vocab_size)
                total = _prefix_weight(tokens_ptr, size, best, inverse_temperature, min_weight, amount, False, BLOCK)
            amount = _part_of(total, seed, index, position) + 1
            is_few = amount <= few_weight
            tokens_ptr = tl.where(is_few, few_ptr, row_ptr)
            size = tl.where(is_few, num_few, vocab_size)
            token_id = _nth_sorted(tokens_ptr, size, best, inverse_temperature, min_weight, amount, BLOCK)
            token_id = tl.load(few_ids_ptr + token_id, mask=is_few, other=0) + tl.where(is_few, 0, token_id)
        else:
            amount = _part_of(total, seed, index, position) + 1
            token_id = _nth(row_ptr, vocab_size, best, inverse_temperature, min_weight, lowest, amount, False, BLOCK)
    # A row without an answer gets token 0, which the next step may look up unharmed.
    tl.store(token_ids_ptr + row, tl.where(is_finite, token_id, 0).to(tl.int64))
    tl.store(is_finite_ptr + row, is_finite)


def sample(logits: torch.Tensor, vocab_size: int, sampling: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, without waiting for the device.

    logits   [num_rows, at least vocab_size] fp32, biased, penalised and with -inf where a token is forbidden
    returns  token_ids [num_rows] int64, and is_finite [num_rows] bool: False, and token 0, where a logit is NaN or
             +inf, or all of them are -inf
    """
    num_rows = logits.shape[0]
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert 0 < vocab_size <= min(logits.shape[1], 2**18), "more weights of 2^44 would overflow their sum"
    columns = (
        (sampling.temperatures, torch.float32),
        (sampling.top_ks, torch.int32),
        (sampling.top_ps, torch.float32),
        (sampling.min_ps, torch.float32),
        (sampling.seeds, torch.int64),
        (sampling.indices, torch.int64),
        (sampling.positions, torch.int64),
    )
    for column, dtype in columns:
        assert column.shape == (num_rows,)
        assert column.dtype == dtype
        assert column.is_contiguous()
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    candidate_logits = torch.empty((num_rows, MAX_CANDIDATES), dtype=torch.float32, device=logits.device)
    candidate_ids = torch.empty((num_rows, MAX_CANDIDATES), dtype=torch.int32, device=logits.device)
    if num_rows > 0:
        _sample[(num_rows,)](
            logits,
            *(column for column, _ in columns),
            candidate_logits,
            candidate_ids,
            token_ids,
            is_finite,
            logits.stride(0),
            vocab_size,
            CAPACITY=MAX_CANDIDATES,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            maxnreg=MAX_REGISTERS,
        )
    return token_ids, is_finite


def compile_cases() -> list[CompileCase]:
    pointers = {
        "logits_ptr": "*fp32",
        "temperature_ptr": "*fp32",
        "top_k_ptr": "*i32",
        "top_p_ptr": "*fp32",
        "min_p_ptr": "*fp32",
        **dict.fromkeys(("seed_ptr", "index_ptr", "position_ptr"), "*i64"),
        "candidate_logits_ptr": "*fp32",
        "candidate_ids_ptr": "*i32",
        "token_ids_ptr": "*i64",
        "is_finite_ptr": "*i1",
    }
    constexprs = {"CAPACITY": MAX_CANDIDATES, "BLOCK": BLOCK}
    return [
        CompileCase(
            name="sample",
            kernel=_sample,
            signature={
                **pointers,
                **dict.fromkeys(("row_stride", "vocab_size"), "i32"),
                **dict.fromkeys(constexprs, "constexpr"),
            },
            constexprs=constexprs,
            num_warps=NUM_WARPS,
            max_registers=MAX_REGISTERS,
            ptx_contains=("ld.global.v4.b32", "cp.async"),
            divisible_by_16=frozenset((*pointers, "row_stride", "vocab_size")),
        )
    ]
