"""The Triton attention backend, in the interpreter, against softmax(QK^T)V in fp64 over holed and shuffled caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.attention.interface import AttentionMetadata, AttentionShape
from services.text_engine.kernels import reference
from services.text_engine.kernels.kv_layout import KVFormat, KVLayout
from services.text_engine.kernels.launch_plan import LaunchPlan, plan_launch
from tests.kernels.stored_kv import poison, stored_keys_and_values
from tests.kernels.test_cpu_attention import BLOCK_SIZE, Kind, Sequences, chunked, no_rotation, shape_of, whole

pytest.importorskip("triton")

import triton
import triton.language as tl

from services.text_engine.attention.triton_backend import TritonAttention
from services.text_engine.kernels.paged_attention import allocate_workspace, paged_attention
from services.text_engine.kernels.paged_attention_kernel import _find_work
from services.text_engine.kernels.store_kv import store_kv

CPU = torch.device("cpu")
# Largest difference from the fp64 oracle, for values of unit variance: the rounding of weights and of the output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# On top, what the cache's rounding does to keys and values: half a step of 2/254 and of an eighth.
CACHE_TOLERANCE = {"auto": 0.0, "int8": 0.05, "fp8": 0.25}

few = settings(max_examples=8, deadline=None)
lengths_lists = st.lists(st.sampled_from([1, 2, 15, 16, 17, 31, 61, 127, 131]), min_size=1, max_size=3)
seeds = st.integers(0, 1000)


def of_dtype(dtype: torch.dtype) -> Kind:
    """Tokens of this type; what the kernels' own cache makes of them is `run`'s to say."""
    return Kind(str(dtype), dtype, "auto", TOLERANCE[dtype])


def attention_for(sequences: Sequences, kv_format: KVFormat = "auto") -> TritonAttention:
    return TritonAttention(sequences.kind.dtype, CPU, max_num_seqs=4, kv_cache_format=kv_format)


def run(sequences: Sequences, steps: list[list[tuple[int, int]]], kv_format: KVFormat = "auto") -> list[torch.Tensor]:
    """Each sequence's outputs, put together from the steps that computed them."""
    attention = attention_for(sequences, kv_format)
    cache = attention.allocate_kv_cache(sequences.num_blocks, BLOCK_SIZE, sequences.shape)
    poison(cache, layout_for(sequences, kv_format))
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences.lengths]
    for spans in steps:
        qkv, metadata = sequences.step(spans)
        output = attention.attend(*qkv, no_rotation(qkv[0]), cache, metadata, sequences.shape)
        for parts, part in zip(outputs, output.split([stop - start for start, stop in spans]), strict=True):
            parts.append(part)
    return [torch.cat(parts) for parts in outputs]


def layout_for(sequences: Sequences, kv_format: KVFormat = "auto") -> KVLayout:
    shape = sequences.shape
    return KVLayout(shape.num_kv_heads, shape.head_dim, BLOCK_SIZE, sequences.kind.dtype, kv_format)


def assert_close(
    output: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, kv_format: KVFormat = "auto"
) -> None:
    atol = TOLERANCE[dtype] + CACHE_TOLERANCE[kv_format]
    torch.testing.assert_close(output.double(), expected.double(), rtol=0, atol=atol)


def assert_all_close(outputs: list[torch.Tensor], sequences: Sequences, kv_format: KVFormat = "auto") -> None:
    for row, output in enumerate(outputs):
        assert_close(output, sequences.expected(row), sequences.kind.dtype, kv_format)


@few
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2), (4, 1), (7, 1), (8, 1), (2, 2)]),
    head_dim=st.sampled_from([16, 20, 64, 80, 96]),
    window=st.sampled_from([None, None, 1, 16, 37]),
    soft_cap=st.sampled_from([None, None, 0.5, 30.0]),
    lengths=lengths_lists,
    chunk=st.sampled_from([64, 1000]),
    seed=seeds,
)
def test_it_equals_the_formula_and_never_reads_an_unused_slot(heads, head_dim, window, soft_cap, lengths, chunk, seed):
    sequences = Sequences(shape_of(*heads, head_dim, window, soft_cap), lengths, of_dtype(torch.float32), seed)
    assert_all_close(run(sequences, chunked(lengths, chunk)), sequences)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_decode_rows_and_prompts_share_a_batch(dtype, head_dim):
    sequences = Sequences(shape_of(4, 1, head_dim), [35, 17, 40], of_dtype(dtype))
    assert_all_close(run(sequences, [[(0, 34), (0, 16), (0, 0)], [(34, 35), (16, 17), (0, 40)]]), sequences)


@pytest.mark.parametrize("head_dim", [72, 96, 112])
def test_heads_of_any_size_read_no_memory_but_their_own_and_give_the_same_bits_again(head_dim):
    """Case D27: memory behind what was written is NaN."""
    sequences = Sequences(shape_of(2, 1, head_dim), [17, 5], of_dtype(torch.float16))
    steps = [[(0, 16), (0, 0)], [(16, 17), (0, 5)]]
    first = run(sequences, steps)
    for row, output in enumerate(first):
        torch.testing.assert_close(output.double(), sequences.expected(row).double(), rtol=0, atol=2e-3)
    for output, again in zip(first, run(sequences, steps), strict=True):
        assert torch.equal(output, again)


@settings(max_examples=5, deadline=None)
@given(
    window=st.sampled_from([None, 5, 40]),
    start=st.integers(0, 100),
    num_positions=st.integers(1, 90),
    kv_format=st.sampled_from(["auto", "int8"]),
    seed=seeds,
)
def test_an_image_sees_all_of_itself_and_text_sees_only_what_came_before(window, start, num_positions, kv_format, seed):
    stop = start + num_positions
    shape = shape_of(2, 1, 32, window)
    sequences = Sequences(shape, [stop + 9, stop + 1], of_dtype(torch.float32), seed, images=((start, stop),))
    steps = [[(0, start), (0, start)], [(start, stop), (start, stop + 1)], [(stop, stop + 9), (stop + 1, stop + 1)]]
    assert_all_close(run(sequences, steps, kv_format), sequences, kv_format)


@pytest.mark.parametrize(("window", "chunk"), [(None, 6), (20, 13)])
def test_a_chunked_prompt_equals_a_whole_one(window, chunk):
    sequences = Sequences(shape_of(4, 1, 16, window), [35, 17], of_dtype(torch.float32))
    expected = run(sequences, whole(sequences.lengths))
    for output, other in zip(run(sequences, chunked(sequences.lengths, chunk)), expected, strict=True):
        assert_close(output, other, torch.float32)


def test_queries_and_keys_are_rotated_before_they_meet():
    sequences = Sequences(shape_of(6, 2, 32), [45], of_dtype(torch.float32))
    [(query, key, value), metadata] = sequences.step([(0, 45)])
    cos_sin = torch.randn(45, 32, generator=torch.Generator().manual_seed(1))
    attention = attention_for(sequences)
    cache = attention.allocate_kv_cache(sequences.num_blocks, BLOCK_SIZE, sequences.shape)
    rotated = (*reference.rotary(query, key, cos_sin), value)
    expected = attention.attend(*rotated, no_rotation(query), cache, metadata, sequences.shape)
    actual = attention.attend(query, key, value, cos_sin, cache, metadata, sequences.shape)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_cache_of_bytes_costs_only_the_rounding_of_keys_and_values(kv_format, dtype):
    sequences = Sequences(shape_of(4, 2, 80, 50), [61, 17], of_dtype(dtype))
    step = stored(sequences, [(0, 61), (0, 17)], kv_format)
    [qkv, metadata] = sequences.step([(60, 61), (16, 17)])
    output = step.attend(qkv[0], metadata)[0]
    assert_close(output, sequences.expected(0)[60], dtype, kv_format)
    # Over what the cache holds the formula gives the same, but for fp16's rounding of queries and weights.
    keys, values = stored_keys_and_values(step.cache, step.layout)
    blocks = torch.tensor(sequences.tables[0])
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:61]
    sequences.keys[0], sequences.values[0] = keys[slots], values[slots]
    difference = (output.double() - sequences.expected(0)[60]).abs().max()
    assert difference < max(TOLERANCE[dtype], TOLERANCE[torch.float16])


def test_fp8_without_the_hardwares_conversion_gives_the_same():
    sequences = Sequences(shape_of(4, 2, 32), [45, 17], of_dtype(torch.float16))
    step = stored(sequences, [(0, 45), (0, 17)], "fp8")
    [qkv, metadata] = sequences.step([(40, 45), (16, 17)])
    software = step.attend(qkv[0], metadata, fp8_in_software=True)
    assert_close(software, step.attend(qkv[0], metadata), torch.float16)


def test_a_query_too_large_for_fp16_is_clamped_with_a_cache_of_bytes():
    sequences = Sequences(AttentionShape(1, 1, 16, scale=1e-5), [20], of_dtype(torch.bfloat16))
    sequences.queries[0] *= 1e5
    [output] = run(sequences, whole([20]), "int8")
    assert output.isfinite().all()


@dataclass
class Stored:
    """A cache that holds some sequences' first tokens, and a plan to attend over it with."""

    sequences: Sequences
    cache: torch.Tensor
    layout: KVLayout
    plan: LaunchPlan

    def __post_init__(self) -> None:
        self.workspace = allocate_workspace([self.plan], CPU)

    def attend(
        self, query: torch.Tensor, metadata: AttentionMetadata, *, fp8_in_software: bool = False
    ) -> torch.Tensor:
        self.workspace.partials.fill_(torch.nan)
        shape = self.sequences.shape
        output = paged_attention(
            query,
            self.cache,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.image_spans,
            scale=shape.scale,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
            layout=self.layout,
            plan=self.plan,
            max_num_seqs=4,
            fp8_in_software=fp8_in_software,
            workspace=self.workspace,
        )
        assert not self.workspace.arrivals.any(), "the next launch counts from 0"
        return output

    @property
    def num_partial_results(self) -> int:
        slots = self.workspace.partials.view(-1, self.plan.partial_floats)
        return int((~slots.isnan()).any(1).sum())


def stored(
    sequences: Sequences,
    spans: list[tuple[int, int]],
    kv_format: KVFormat = "auto",
    *,
    is_decode: bool = False,
    **changes: int,
) -> Stored:
    attention, layout = attention_for(sequences, kv_format), layout_for(sequences, kv_format)
    shape = sequences.shape
    cache = poison(attention.allocate_kv_cache(sequences.num_blocks, BLOCK_SIZE, shape), layout)
    (query, key, value), metadata = sequences.step(spans)
    store_kv(query, key, value, no_rotation(query), cache, metadata.slot_mapping, layout)
    plan = plan_for(
        shape,
        element_bytes=sequences.kind.dtype.itemsize,
        is_quantized=layout.is_quantized,
        is_decode=is_decode,
        num_multiprocessors=1,
    )
    return Stored(sequences, cache, layout, replace(plan, **changes))


def plan_for(shape: AttentionShape, **changes: Any) -> LaunchPlan:
    arguments = {"element_bytes": 2, "is_quantized": False, "is_decode": True, "num_multiprocessors": 132}
    return plan_launch(
        group=shape.num_heads // shape.num_kv_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        **arguments | {"capability": 90} | changes,
    )


@pytest.mark.parametrize("wanted_splits", range(1, 9))
def test_any_number_of_splits_gives_the_same(wanted_splits):
    sequences = Sequences(shape_of(8, 2, 32), [127], of_dtype(torch.float32))
    step = stored(
        sequences, [(0, 127)], is_decode=True, block_n=16, min_tiles_per_split=1, target_programs=2 * wanted_splits
    )
    [qkv, metadata] = sequences.step([(126, 127)])
    assert_close(step.attend(qkv[0], metadata)[0], sequences.expected(0)[126], torch.float32)
    num_splits = 8 // -(-8 // wanted_splits)  # of 8 tiles, in equal shares of whole tiles
    assert step.num_partial_results == (2 * num_splits if num_splits > 1 else 0)


@pytest.mark.parametrize("window", [None, 20])
def test_the_tiles_of_a_prompt_are_split_too(window):
    sequences = Sequences(
        shape_of(4, 1, 32, window, 5.0), [131, 20], of_dtype(torch.float32), images=((3, 19), (95, 105))
    )
    step = stored(sequences, [(0, 131), (0, 20)], block_n=16, large_m=64, min_tiles_per_split=1, target_programs=30)
    [qkv, metadata] = sequences.step([(90, 131), (19, 20)])
    output = step.attend(qkv[0], metadata)
    assert_close(output[:41], sequences.expected(0)[90:], torch.float32)
    assert_close(output[41:], sequences.expected(1)[19:], torch.float32)
    assert step.num_partial_results > 0


@pytest.mark.parametrize("num_heads", [24, 71])
def test_many_query_heads_may_share_one_key_head(num_heads):
    sequences = Sequences(shape_of(num_heads, 1, 16), [35], of_dtype(torch.float32))
    assert_all_close(run(sequences, [[(0, 34)], [(34, 35)]]), sequences)


def test_rows_of_no_sequence_and_sequences_of_no_rows_harm_nobody():
    sequences = Sequences(shape_of(4, 2, 16), [33, 20], of_dtype(torch.float32))
    attention = attention_for(sequences)
    cache = attention.allocate_kv_cache(sequences.num_blocks, BLOCK_SIZE, sequences.shape)
    (query, key, value), metadata = sequences.step([(0, 33), (0, 20)])
    padding = torch.zeros(3, dtype=torch.int32)
    padded = AttentionMetadata(
        cu_seqlens_q=torch.cat((metadata.cu_seqlens_q, padding[:2] + 53)),
        seq_lens=torch.cat((metadata.seq_lens, padding[:2])),
        block_tables=torch.cat((metadata.block_tables, torch.zeros_like(metadata.block_tables))),
        slot_mapping=torch.cat((metadata.slot_mapping, padding - 1)),
    )
    query, key, value = (torch.cat((part, part[:3])) for part in (query, key, value))
    output = attention.attend(query, key, value, no_rotation(query), cache, padded, sequences.shape)
    assert_all_close(list(output[:53].split([33, 20])), sequences)


def test_large_scores_do_not_overflow():
    sequences = Sequences(AttentionShape(2, 1, 32, scale=50.0), [40], of_dtype(torch.float32))
    [output] = run(sequences, whole([40]))
    torch.testing.assert_close(output.double(), sequences.expected(0), rtol=0, atol=1e-2)


@triton.jit
def list_work(
    found_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    num_seqs,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SMALL_M: tl.constexpr,
    LARGE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TARGET_PROGRAMS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """found_ptr [num_items, 5]: what `_find_work` says of each item."""
    item = tl.program_id(0)
    sequence, tile, split, num_splits, slot = _find_work(
        item, cu_seqlens_q_ptr, seq_lens_ptr, num_seqs, 0, GROUP, NUM_KV_HEADS, SMALL_M, LARGE_M, BLOCK_N, 4,
        TARGET_PROGRAMS, 1, MAX_SPLITS, False,
    )  # fmt: skip
    tl.store(found_ptr + item * 5, sequence)
    tl.store(found_ptr + item * 5 + 1, tile)
    tl.store(found_ptr + item * 5 + 2, split)
    tl.store(found_ptr + item * 5 + 3, num_splits)
    tl.store(found_ptr + item * 5 + 4, slot)


@settings(max_examples=8, deadline=None)
@given(
    sequences=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 1, 2, 9, 40]), st.sampled_from([0, 5, 100, 3000])), min_size=1, max_size=4
    ),
    heads=st.sampled_from([(1, 1), (8, 2), (7, 1)]),
    target_programs=st.sampled_from([2, 7, 12]),
    large_m=st.sampled_from([0, 64]),
)
def test_every_piece_of_work_is_found_once_within_the_grid_and_the_workspace(
    sequences, heads, target_programs, large_m
):
    """sequences: (new tokens, cached ones) of each."""
    num_new = [new for new, _ in sequences]
    seq_lens = torch.tensor([new + cached for new, cached in sequences], dtype=torch.int32)
    num_heads, num_kv_heads = heads
    group = num_heads // num_kv_heads
    plan = replace(plan_for(shape_of(*heads, 64)), large_m=large_m, target_programs=target_programs, max_splits=16)
    num_items = plan.max_items(sum(num_new), len(sequences), group, num_kv_heads)
    found = torch.full((num_items + 1, 5), -1, dtype=torch.int32)  # one more than the grid: no work may be left for it
    list_work[(num_items + 1,)](
        found,
        torch.tensor([0, *num_new]).cumsum(0).int(),
        seq_lens,
        len(sequences),
        group,
        num_kv_heads,
        plan.small_m,
        plan.large_m,
        plan.block_n,
        plan.target_programs,
        plan.max_splits,
    )
    assert found[-1, 0] == len(sequences)
    work = [row for row in found.tolist() if row[0] < len(sequences)]
    tokens_per_tile = [
        (plan.small_m if new * group <= plan.small_m or not large_m else large_m) // group for new in num_new
    ]
    splits_of = {sequence: num_splits for sequence, _, _, num_splits, _ in work}
    assert sorted((sequence, tile, split) for sequence, tile, split, _, _ in work) == [
        (sequence, tile, split)
        for sequence, new in enumerate(num_new)
        for tile in range(-(-new // tokens_per_tile[sequence]))
        for split in range(splits_of[sequence])
    ]
    slots = [slot + split for _, _, split, num_splits, slot in work if num_splits > 1]
    assert len(set(slots)) == len(slots)
    assert not slots or (max(slots) + 1) * num_kv_heads <= target_programs


def test_plans_differ_by_chip_and_batch_and_fit_their_workspace():
    llama = shape_of(32, 8, 128)
    decode, mixed = plan_for(llama), plan_for(llama, is_decode=False)
    assert (decode.small_m, decode.large_m, decode.block_n, decode.num_warps) == (16, 0, 64, 4)
    assert (mixed.small_m, mixed.large_m, mixed.block_n, mixed.num_warps) == (16, 128, 64, 8)
    for capability in (80, 89, 120):  # 99 KiB of shared memory will do
        assert plan_for(llama, is_decode=False, capability=capability).large_m == 64
    assert plan_for(shape_of(16, 8, 256)).block_n == 32
    assert plan_for(shape_of(71, 1, 64)).small_m == 128
    workspace = allocate_workspace([decode, mixed], CPU)
    assert workspace.partials.numel() == max(decode.workspace_floats, mixed.workspace_floats)
    assert workspace.partials.nbytes < 16 << 20
    assert decode.max_items(num_tokens=64, num_seqs=64, group=4, num_kv_heads=8) == 64 + 396 // 8


def test_what_the_kernels_lack_is_refused():
    with pytest.raises(ValueError, match="float64"):
        TritonAttention(torch.float64, CPU, max_num_seqs=1)
    attention = TritonAttention(torch.float16, CPU, max_num_seqs=1)
    with pytest.raises(ValueError, match="not of 24"):
        attention.allocate_kv_cache(1, 24, shape_of(1, 1, 64))
    with pytest.raises(ValueError, match="up to 128 query heads for one key head, not 129"):
        attention.allocate_kv_cache(1, 16, shape_of(129, 1, 64))
    with pytest.raises(ValueError, match="up to 512 dimensions, not 576"):
        attention.allocate_kv_cache(1, 16, shape_of(1, 1, 576))
