"""The CPU attention backend against softmax(QK^T)V in fp64, over ragged batches in a holed and shuffled cache, of the
model's own type, of bf16 and of bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.attention.cpu_backend import BLOCK_SIZE, CpuAttention
from services.text_engine.attention.interface import AttentionMetadata, AttentionShape
from services.text_engine.kernels import reference
from services.text_engine.kernels.kv_layout import KVFormat
from tests.kernels.native_libraries import INSTRUCTION_SETS, native_library


@dataclass(frozen=True)
class Kind:
    """Of tensors and their cache.

    tolerance  largest difference from the fp64 oracle, for values of unit variance. bf16: the output's own rounding,
               2^-9 relative, and that of the softmax weights. int8, over what the cache's bytes stand for: the weights'
               rounding to 16 bits.
    """

    name: str
    dtype: torch.dtype
    kv_cache_format: KVFormat
    tolerance: float

    def attention(self, instruction_set: str) -> CpuAttention:
        return CpuAttention(native_library(instruction_set), self.dtype, kv_cache_format=self.kv_cache_format)

    def cached(self, heads: torch.Tensor) -> torch.Tensor:
        """Keys or values as they are read back, in fp64."""
        if self.kv_cache_format == "auto":
            return heads.double()
        if self.kv_cache_format == "bfloat16":
            return heads.bfloat16().double()
        quants, steps = reference.quantize_heads(heads)
        return (quants.double() - 128) * steps.double()


FP32 = Kind("fp32", torch.float32, "auto", 2e-5)
KINDS = [
    FP32,
    Kind("bf16", torch.bfloat16, "auto", 2e-2),
    Kind("fp32, bf16 cache", torch.float32, "bfloat16", 2e-5),
    Kind("fp32, int8 cache", torch.float32, "int8", 1e-3),
    Kind("bf16, int8 cache", torch.bfloat16, "int8", 2e-2),
]


@dataclass
class Sequences:
    """Random tokens of several sequences, each with its own scattered blocks of one cache whose every slot is NaN."""

    shape: AttentionShape
    lengths: list[int]
    kind: Kind
    seed: int = 0
    images: tuple[tuple[int, int], ...] = ()  # spans of positions that see all of themselves, in every sequence

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def tokens(length: int, num_heads: int) -> torch.Tensor:
            return torch.randn(length, num_heads, self.shape.head_dim, generator=generator).to(self.kind.dtype)

        self.queries = [tokens(length, self.shape.num_heads) for length in self.lengths]
        self.keys = [tokens(length, self.shape.num_kv_heads) for length in self.lengths]
        self.values = [tokens(length, self.shape.num_kv_heads) for length in self.lengths]
        blocks = list(range(1, self.num_blocks))
        random.Random(self.seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in self.lengths]

    @property
    def num_blocks(self) -> int:
        """A few more than the sequences need, so that some are used by none."""
        return sum(-(-length // BLOCK_SIZE) for length in self.lengths) + 3

    def step(self, spans: list[tuple[int, int]]) -> tuple[tuple[torch.Tensor, ...], AttentionMetadata]:
        """The (query, key, value) and metadata of one step in which sequence i computes positions spans[i]."""
        tables = torch.zeros(len(spans), max(map(len, self.tables)), dtype=torch.int32)
        slots = []
        for row, (table, (start, stop)) in enumerate(zip(self.tables, spans, strict=True)):
            used = table[: -(-stop // BLOCK_SIZE)]
            tables[row, : len(used)] = torch.tensor(used, dtype=torch.int32)
            slots += [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(start, stop)]
        counts = torch.tensor([0] + [stop - start for start, stop in spans])
        metadata = AttentionMetadata(
            cu_seqlens_q=counts.cumsum(0).int(),
            seq_lens=torch.tensor([stop for _, stop in spans], dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            image_spans=self.image_spans(spans) if self.images else None,
        )
        # Views into one buffer, as the decoder's fused qkv projection gives them.
        fused = torch.cat(
            [
                torch.cat([tensors[row][start:stop] for row, (start, stop) in enumerate(spans)])
                for tensors in (self.queries, self.keys, self.values)
            ],
            dim=1,
        )
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        return fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1), metadata

    def image_spans(self, steps: list[tuple[int, int]]) -> torch.Tensor:
        positions = (at for start, stop in steps for at in range(start, stop))
        spans = [next(((a, b) for a, b in self.images if a <= at < b), (0, 0)) for at in positions]
        return torch.tensor(spans, dtype=torch.int32).view(-1, 2)

    def expected(self, row: int) -> torch.Tensor:
        """[length, num_heads * head_dim] fp64"""
        group = self.shape.num_heads // self.shape.num_kv_heads
        length = self.lengths[row]
        query = self.queries[row].double().transpose(0, 1)
        key, value = (
            self.kind.cached(tensor[row]).repeat_interleave(group, dim=1).transpose(0, 1)
            for tensor in (self.keys, self.values)
        )
        distance = torch.arange(length)[:, None] - torch.arange(length)
        window = self.shape.sliding_window or length
        visible = (distance >= 0) & (distance < window)
        for start, stop in self.images:
            visible[start:stop, start:stop] = True
        scores = query @ key.transpose(1, 2) * self.shape.scale
        if self.shape.soft_cap is not None:
            scores = self.shape.soft_cap * torch.tanh(scores / self.shape.soft_cap)
        scores = scores.masked_fill(~visible, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)


def run(sequences: Sequences, instruction_set: str, steps: list[list[tuple[int, int]]]) -> list[torch.Tensor]:
    """Each sequence's outputs, put together from the steps that computed them."""
    attention = sequences.kind.attention(instruction_set)
    cache = attention.allocate_kv_cache(sequences.num_blocks, BLOCK_SIZE, sequences.shape)
    cache.view(torch.uint8).fill_(0xFF)  # NaN in every type, and as a step of bytes
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences.lengths]
    for spans in steps:
        qkv, metadata = sequences.step(spans)
        output = attention.attend(*qkv, no_rotation(qkv[0]), cache, metadata, sequences.shape)
        for parts, part in zip(outputs, output.split([stop - start for start, stop in spans]), strict=True):
            parts.append(part)
    return [torch.cat(parts) for parts in outputs]


def no_rotation(query: torch.Tensor) -> torch.Tensor:
    """cos_sin of angle 0 for every token."""
    num_tokens, _, head_dim = query.shape
    return torch.cat((torch.ones(num_tokens, head_dim // 2), torch.zeros(num_tokens, head_dim // 2)), dim=1)


def whole(lengths: list[int]) -> list[list[tuple[int, int]]]:
    return [[(0, length) for length in lengths]]


def chunked(lengths: list[int], chunk: int) -> list[list[tuple[int, int]]]:
    return [
        [(min(start, length), min(start + chunk, length)) for length in lengths]
        for start in range(0, max(lengths), chunk)
    ]


def shape_of(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None, soft_cap: float | None = None
) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, window, soft_cap)


shapes = st.builds(
    lambda group, num_kv_heads, head_dim, window, soft_cap: shape_of(
        group * num_kv_heads, num_kv_heads, head_dim, window, soft_cap
    ),
    st.sampled_from([1, 2, 3, 4, 7, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([8, 16, 20, 32, 64, 80, 96, 128, 256]),
    st.sampled_from([None, None, 1, 16, 37, 300]),
    st.sampled_from([None, None, 0.5, 30.0]),
)
lengths_lists = st.lists(
    st.sampled_from([1, 2, 15, 16, 17, 31, 48, 61, 127, 255, 256, 257, 401]), min_size=1, max_size=3
)
all_instruction_sets = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
all_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@all_instruction_sets
@all_kinds
@settings(max_examples=25, deadline=None)
@given(shape=shapes, lengths=lengths_lists, chunk=st.sampled_from([7, 16, 64, 1000]), seed=st.integers(0, 1000))
def test_it_equals_the_formula_and_never_reads_an_unused_slot(instruction_set, kind, shape, lengths, chunk, seed):
    sequences = Sequences(shape, lengths, kind, seed)
    for row, output in enumerate(run(sequences, instruction_set, chunked(lengths, chunk))):
        torch.testing.assert_close(output.double(), sequences.expected(row), rtol=0, atol=kind.tolerance)


@all_instruction_sets
@all_kinds
@settings(max_examples=25, deadline=None)
@given(shape=shapes, start=st.integers(0, 300), num_positions=st.integers(1, 290), seed=st.integers(0, 1000))
def test_an_image_sees_all_of_itself_and_text_sees_only_what_came_before(
    instruction_set, kind, shape, start, num_positions, seed
):
    stop = start + num_positions
    sequences = Sequences(shape, [stop + 30, stop + 1], kind, seed, images=((start, stop),))
    steps = [[(0, start), (0, start)], [(start, stop), (start, stop + 1)], [(stop, stop + 30), (stop + 1, stop + 1)]]
    for row, output in enumerate(run(sequences, instruction_set, steps)):
        torch.testing.assert_close(output.double(), sequences.expected(row), rtol=0, atol=kind.tolerance)


@all_instruction_sets
@all_kinds
def test_queries_and_keys_are_rotated_before_they_meet(instruction_set, kind):
    sequences = Sequences(shape_of(6, 2, 32), [45], kind)
    [(query, key, value), metadata] = sequences.step([(0, 45)])
    cos_sin = torch.randn(45, 32, generator=torch.Generator().manual_seed(1))
    attention = kind.attention(instruction_set)
    caches = [attention.allocate_kv_cache(sequences.num_blocks, BLOCK_SIZE, sequences.shape) for _ in range(2)]
    rotated = (*reference.rotary(query, key, cos_sin), value)
    expected = attention.attend(*rotated, no_rotation(query), caches[0], metadata, sequences.shape)
    actual = attention.attend(query, key, value, cos_sin, caches[1], metadata, sequences.shape)
    assert torch.equal(actual, expected)
    assert torch.equal(*caches)


@all_instruction_sets
@all_kinds
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("chunk", [1, 13, 16, 128])
def test_a_chunked_prompt_gives_the_bits_of_a_whole_one(instruction_set, kind, window, chunk):
    sequences = Sequences(shape_of(6, 2, 32, window), [530, 41, 17], kind)
    expected = run(sequences, instruction_set, whole(sequences.lengths))
    for output, wanted in zip(
        run(sequences, instruction_set, chunked(sequences.lengths, chunk)), expected, strict=True
    ):
        assert torch.equal(output, wanted)


@all_instruction_sets
@all_kinds
def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(instruction_set, kind):
    sequences = Sequences(shape_of(6, 2, 32), [300, 41, 270], kind)
    together = run(sequences, instruction_set, whole(sequences.lengths))
    alone = [[(0, length if row == i else 0) for row, length in enumerate(sequences.lengths)] for i in range(3)]
    for output, wanted in zip(run(sequences, instruction_set, alone), together, strict=True):
        assert torch.equal(output, wanted)


@pytest.fixture
def set_num_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@all_instruction_sets
@all_kinds
@pytest.mark.parametrize("window", [None, 700])
def test_the_number_of_threads_does_not_change_a_bit(instruction_set, kind, window, set_num_threads):
    # The last steps are one long sequence's: with several threads its tiles are shared among them and merged.
    sequences = Sequences(shape_of(6, 2, 64, window), [1500, 41], kind)
    steps = [[(0, 1490), (0, 41)], [(1490, 1499), (41, 41)], [(1499, 1500), (41, 41)]]
    outputs = []
    for num_threads in (1, 2, 5):
        set_num_threads(num_threads)
        outputs.append(torch.cat(run(sequences, instruction_set, steps)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@all_instruction_sets
@all_kinds
def test_many_query_heads_may_share_one_key_head(instruction_set, kind):
    sequences = Sequences(shape_of(71, 1, 64), [35], kind)  # more than one work item holds
    [output] = run(sequences, instruction_set, [[(0, 34)], [(34, 35)]])
    torch.testing.assert_close(output.double(), sequences.expected(0), rtol=0, atol=kind.tolerance)


@all_instruction_sets
def test_large_scores_do_not_overflow(instruction_set):
    sequences = Sequences(AttentionShape(2, 1, 32, scale=50.0), [40], FP32)
    [output] = run(sequences, instruction_set, whole([40]))
    torch.testing.assert_close(output.double(), sequences.expected(0), rtol=0, atol=1e-2)


def test_a_block_size_or_a_dtype_that_the_kernels_lack_is_refused():
    library = native_library(next(iter(INSTRUCTION_SETS)))
    with pytest.raises(ValueError, match="blocks of 16 tokens, not 32"):
        CpuAttention(library, torch.bfloat16).allocate_kv_cache(4, 32, shape_of(1, 1, 64))
    with pytest.raises(ValueError, match="float16"):
        CpuAttention(library, torch.float16)
