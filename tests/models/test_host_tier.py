"""A KV cache too small for what is asked, with copies of evicted blocks in a second memory: the same answers, fewer
tokens computed. On a CPU the two memories are one, which is enough to see that the right things are copied.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.text_engine.attention.cpu_backend import CpuAttention
from services.text_engine.attention.interface import AttentionBackend, AttentionShape
from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.attention.triton_backend import TritonAttention
from services.text_engine.core.block_copy import BlockCopy
from services.text_engine.kernels.kv_layout import KVFormat
from services.text_engine.runner import loading
from services.text_engine.runner.block_copies import copy_blocks
from services.text_engine.runner.host_tier import HostTier
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.kernels.native_libraries import INSTRUCTION_SETS, native_library

CPU = torch.device("cpu")


def tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


@pytest.fixture
def folder(checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loading, "check_host_cache", lambda settings, device: None)  # as if it had a GPU
    return checkpoint("llama")


def small_driver(folder: Path, **settings: Any) -> EngineDriver:
    options = {"kv_cache_memory": "144KiB", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return EngineDriver(folder, **(options | settings))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_conversations_in_turns_find_their_beginnings_again(folder: Path, backend: str):
    prompts = [tokens(70, seed) for seed in range(4)]
    plain = small_driver(folder, attention_backend=backend)
    tiered = small_driver(folder, attention_backend=backend, host_cache_memory="1MiB")
    pool = tiered.engine.scheduler.blocks.pool
    assert sum(len(prompt) // 16 for prompt in prompts) > pool.num_blocks, "they must not fit"
    num_cached = {id(driver): 0 for driver in (plain, tiered)}
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            given = []
            for driver in (plain, tiered):
                answer = driver.generate([*prompt, 5 + turn], max_tokens=4)
                assert answer.finished is not None
                num_cached[id(driver)] += answer.finished.num_cached_tokens
                given.append(answer.token_ids)
            assert given[0] == given[1], (turn, number)
    assert tiered.engine.scheduler.blocks.host.num_hits > 0
    assert num_cached[id(tiered)] > num_cached[id(plain)]
    # All but the first turn: every full block of the conversation, wherever it was meanwhile.
    assert num_cached[id(tiered)] == 2 * sum(len(prompt) // 16 * 16 for prompt in prompts)


@pytest.mark.parametrize("kv_cache_format", ["auto", "int8"])
def test_blocks_of_every_layout_come_back_as_they_were(kv_cache_format: KVFormat):
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    backends: list[AttentionBackend] = [
        TorchReferenceAttention(torch.float32, CPU, kv_cache_format=kv_cache_format),
        CpuAttention(native_library(next(iter(INSTRUCTION_SETS))), torch.float32, kv_cache_format=kv_cache_format),
        TritonAttention(torch.float32, CPU, max_num_seqs=2, kv_cache_format=kv_cache_format),
    ]
    for backend in backends:
        caches = [backend.allocate_kv_cache(5, 16, shape) for _ in range(3)]
        for cache in caches:
            cache.view(torch.uint8).copy_(torch.randint(0, 100, cache.view(torch.uint8).shape))
        before = [cache.clone() for cache in caches]
        tier = HostTier(caches, backend.kv_block_dim, num_slots=2)
        dim = backend.kv_block_dim
        copy_blocks([BlockCopy(3, 1, "to_host"), BlockCopy(0, 0, "to_host")], caches, dim, tier.caches)
        for cache in caches:
            cache.select(dim, 3).zero_()
            cache.select(dim, 0).zero_()
        copy_blocks([BlockCopy(1, 3, "from_host"), BlockCopy(0, 0, "from_host")], caches, dim, tier.caches)
        for cache, old in zip(caches, before, strict=True):
            assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))


def test_many_at_once_with_preemption_answer_as_with_room_enough(folder: Path):
    roomy = EngineDriver(folder, attention_backend="cpu", enable_prefix_caching=False)
    tiered = small_driver(folder, attention_backend="cpu", host_cache_memory="256KiB", speculative="off")
    for driver in (roomy, tiered):
        for i in range(12):
            driver.add(f"r{i}", tokens(20 + 9 * (i % 5), seed=i % 5), max_tokens=30 + i)
    expected, found = roomy.run(), tiered.run()
    assert [answer.token_ids for answer in found.values()] == [answer.token_ids for answer in expected.values()]
    assert tiered.engine.scheduler.num_preemptions > 0
    assert tiered.engine.scheduler.blocks.host.num_hits > 0


def test_after_a_reset_nothing_comes_back(folder: Path):
    driver = small_driver(folder, host_cache_memory="1MiB")
    for seed in range(4):
        driver.generate(tokens(70, seed), max_tokens=2)
    driver.engine.reset_cache()
    answer = driver.generate(tokens(70, 0), max_tokens=2)
    assert answer.finished is not None
    assert answer.finished.num_cached_tokens == 0


@pytest.mark.parametrize("size", ["1KiB", "lots"])
def test_a_size_that_holds_nothing_stops_the_start(folder: Path, size: str):
    with pytest.raises(ValueError, match=r"host_cache_memory|not a size"):
        small_driver(folder, host_cache_memory=size)


def test_on_a_cpu_it_is_refused_since_it_would_be_the_same_memory(checkpoint: CheckpointFactory):
    with pytest.raises(ValueError, match="raise kv_cache_memory"):
        EngineDriver(checkpoint("llama"), host_cache_memory="1MiB")
