"""Two processes that share a model against one that holds it all: the same tokens, and a clean end when one is gone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.core.sequence import ImageSpan
from services.text_engine.kernels import reference
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.sharding import Shard, head_rows_of_a_rank
from services.text_engine.models.weights import load_decoder, parameter_shapes
from services.text_engine.runner.tensor_parallel import RankFailed
from shared.settings import SettingRefused
from tests.conftest import CheckpointFactory
from tests.engines import Answer, EngineDriver

CPU = torch.device("cpu")
CAT = "ca7" + 61 * "0"


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


@contextmanager
def driver(folder: Path, size: int, **settings: Any) -> Iterator[EngineDriver]:
    opened = EngineDriver(folder, tensor_parallel_size=size, **settings)
    try:
        yield opened
    finally:
        opened.engine.close()


def conversation(engine: EngineDriver, image: dict[str, Any] | None) -> list[Answer]:
    """Prompts longer than a step, batched, one of them twice so that the second finds its prefix cached.

    image  how the spans of images are; None: text alone
    """
    images = []
    if image is not None:
        engine.pictures[CAT] = torch.randn(16, engine.row_size, generator=torch.Generator().manual_seed(3))
        images = [ImageSpan(CAT, start=start, num_tokens=16, **image) for start in (9, 60)]
    for i in range(4):
        engine.add(f"batched-{i}", tokens(13 + 9 * i, seed=i), max_tokens=8 + i)
    engine.add("long", tokens(97, seed=7), images=images, max_tokens=16)
    engine.run()
    engine.add("again", [*tokens(97, seed=7), 5, 6], images=images, max_tokens=8)
    engine.add("choices", tokens(21, seed=8), n=3, temperature=1.0, seed=5, max_tokens=8)
    return list(engine.run().values())


# --- two ranks against one --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "backend", "image"),
    [
        ("llama_biased", "cpu", None),
        ("qwen2_tied", "reference", None),
        ("llava_clip_mistral", "cpu", {}),
        ("llava_siglip_qwen3", "reference", {}),
        ("gemma3", "cpu", {"attention": "bidirectional"}),
        ("qwen2_5_vl", "cpu", {"grid": (1, 4, 4)}),
        ("qwen3_vl", "cpu", {"grid": (1, 4, 4)}),
        ("qwen3_vl_moe", "reference", {"grid": (1, 4, 4)}),
    ],
)
def test_two_ranks_give_the_tokens_of_one(
    checkpoint: CheckpointFactory, family: str, backend: str, image: dict[str, Any] | None
):
    """Batched, chunked, from the prefix cache, with images that a chunk cuts where it may."""
    folder = checkpoint(family)
    settings: dict[str, Any] = {"attention_backend": backend, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    with driver(folder, 1, **settings) as alone:
        expected = conversation(alone, image)
    with driver(folder, 2, **settings) as shared:
        answers = conversation(shared, image)
        assert shared.info == alone.info.model_copy(
            update={"created": shared.info.created, "num_kv_blocks": shared.info.num_kv_blocks}
        )
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    again = answers[-2].finished
    assert again is not None
    assert again.num_cached_tokens == 96


def test_more_ranks_than_kv_heads_hold_each_kv_head_several_times(checkpoint: CheckpointFactory):
    folder = checkpoint("llama")
    with driver(folder, 1) as alone, driver(folder, 4) as shared:
        assert shared.generate(tokens(40)).token_ids == alone.generate(tokens(40)).token_ids


def test_the_cache_is_shared_out_over_the_ranks(checkpoint: CheckpointFactory):
    """Each rank has the same memory for half the heads: twice the blocks."""
    folder = checkpoint("llama")
    with driver(folder, 1, kv_cache_memory="1MB") as alone:
        blocks = alone.info.num_kv_blocks
    with driver(folder, 2, kv_cache_memory="1MB") as shared:
        assert shared.info.num_kv_blocks // 2 == blocks


# --- what a rank reads ------------------------------------------------------------------------------------------------


class StandIn:
    """A rank that is never asked to compute."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    def share(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    sum = gather = share


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_parts_make_up_the_checkpoint_and_no_rank_reads_more(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, size: int
):
    from shared import torch_io

    folder = checkpoint("llama_padded")
    config = load_model_config(folder)
    shapes = parameter_shapes(config)
    attention = TorchReferenceAttention(torch.float32, CPU)
    num_read = [0] * size
    whole, part = torch_io.Checkpoint.tensor, torch_io.Checkpoint.part
    for index in range(size):

        def count(tensor: torch.Tensor, index: int = index) -> torch.Tensor:
            num_read[index] += tensor.numel()
            return tensor

        monkeypatch.setattr(torch_io.Checkpoint, "tensor", lambda *args, count=count: count(whole(*args)))
        monkeypatch.setattr(torch_io.Checkpoint, "part", lambda *args, count=count: count(part(*args)))
        load_decoder(folder, config, attention, reference, dtype=torch.float32, device=CPU, ranks=StandIn(index, size))
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    embedding = sizes["embed_tokens.weight"]
    norms = sum(count for name, count in sizes.items() if "norm" in name)
    assert sum(num_read) == sum(sizes.values()) + (size - 1) * norms
    assert num_read[0] - embedding == pytest.approx((sum(sizes.values()) - embedding) / size, rel=0.02)


def test_the_slices_of_all_ranks_cover_each_tensor_once(checkpoint: CheckpointFactory):
    config = load_model_config(checkpoint("llama_biased"))
    shards = [Shard(index, 2) for index in range(2)]
    for name, shape in parameter_shapes(config).items():
        parts = [shard.part(name, config) for shard in shards]
        if None in parts:
            assert parts == [None, None]
            assert name.endswith(("norm.weight", "_proj.bias")) or name == "embed_tokens.weight"
            continue
        seen = torch.zeros(shape)
        for part in parts:
            seen[part] += 1
        assert bool((seen == 1).all()), name


@pytest.mark.parametrize(("vocab_size", "size"), [(316, 2), (317, 3), (32000, 8), (151936, 4), (9, 2)])
def test_the_vocabulary_is_split_into_aligned_parts(vocab_size: int, size: int):
    rows = [Shard(index, size).head_rows(vocab_size) for index in range(size)]
    assert [row for part in rows for row in range(part.start, part.stop)] == list(range(vocab_size))
    assert head_rows_of_a_rank(vocab_size, size) % 8 == 0
    assert all(part.stop - part.start == head_rows_of_a_rank(vocab_size, size) for part in rows[:-1])


@pytest.mark.parametrize(("size", "message"), [(3, "num_attention_heads = 4"), (64, "num_attention_heads = 4")])
def test_a_size_that_does_not_divide_the_model_is_refused(checkpoint: CheckpointFactory, size: int, message: str):
    with pytest.raises(SettingRefused, match=message):
        Shard(0, size).config(load_model_config(checkpoint("llama")))


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_ends_the_engine_within_seconds(checkpoint: CheckpointFactory):
    with driver(checkpoint("llama"), 2) as engine:
        workers = engine.engine.runner._workers
        assert workers is not None
        engine.add("running", tokens(20), max_tokens=400)
        engine.step()
        [pid] = workers.pids
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RankFailed, match=r"rank 1|a step failed"):
            engine.run()
        with pytest.raises(RankFailed):
            engine.engine.step()
        assert time.monotonic() - started < 10


def test_a_rank_that_hangs_is_noticed(checkpoint: CheckpointFactory):
    with driver(checkpoint("llama"), 2, step_timeout_s=1.5) as engine:
        workers = engine.engine.runner._workers
        assert workers is not None
        engine.add("running", tokens(20), max_tokens=400)
        engine.step()
        [pid] = workers.pids
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RankFailed, match="a rank hangs"):
            engine.run()
        assert 1.5 < time.monotonic() - started < 10


def test_a_closed_engine_leaves_no_process(checkpoint: CheckpointFactory):
    with driver(checkpoint("llama"), 2) as engine:
        workers = engine.engine.runner._workers
        assert workers is not None
        store = workers.store
    assert all(process.returncode == 0 for process in workers._processes)
    assert not store.exists()
