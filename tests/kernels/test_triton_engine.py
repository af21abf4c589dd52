"""The whole engine with the GPU's kernels, in Triton's interpreter on tiny models: the tokens of the reference backend.

So that the first run on a GPU is not the first run.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.text_engine.core.sequence import ImageSpan
from services.text_engine.runner.cuda_graphs import graph_sizes
from tests.conftest import CheckpointFactory
from tests.engines import Answer, EngineDriver
from tests.models.test_cuda_graphs import Rerun

pytest.importorskip("triton")

CAT = "ca7" + 61 * "0"
DOG = "d09" + 61 * "0"


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def engine(folder: Path, backend: str, **settings: Any) -> EngineDriver:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory": "2MiB"}
    driver = EngineDriver(folder, attention_backend=backend, **defaults | settings)
    generator = torch.Generator().manual_seed(3)
    driver.pictures = {key: torch.randn(16, driver.row_size, generator=generator) for key in (CAT, DOG)}
    return driver


def batch(driver: EngineDriver, lengths: list[int], *, images: list[ImageSpan] | None = None) -> list[Answer]:
    for i, length in enumerate(lengths):
        driver.add(f"r{i}", tokens(length, seed=i), images=images or (), max_tokens=2 + i)
    return list(driver.run().values())


def token_ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(
    "family",
    ["llama_padded", "mistral"],
    ids=["every head its own", "grouped heads, window"],
)
def test_a_mixed_batch_gets_the_tokens_of_the_reference(checkpoint: CheckpointFactory, family: str):
    """Decode rows beside prompts and their chunks."""
    answers = [batch(engine(checkpoint(family), backend), [5, 38, 17]) for backend in ("reference", "triton")]
    assert token_ids(answers[0]) == token_ids(answers[1])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of a gate that closes
@pytest.mark.parametrize(
    ("family", "step", "image"),
    [
        ("llava_clip_llama", 12, {}),
        ("gemma3", 20, {"attention": "bidirectional"}),
        ("qwen2_5_vl", 20, {"grid": (1, 4, 4)}),
        ("qwen3_vl", 20, {"grid": (1, 4, 4)}),
    ],
    ids=["cut by chunks", "seeing themselves, windows", "positions of three coordinates", "rows for several layers"],
)
def test_images_get_the_tokens_of_the_reference(
    checkpoint: CheckpointFactory, family: str, step: int, image: dict[str, Any]
):
    images = [ImageSpan(CAT, start=2, num_tokens=16, **image), ImageSpan(DOG, start=21, num_tokens=16, **image)]
    answers = [
        batch(engine(checkpoint(family), backend, max_num_batched_tokens=step), [40], images=images)
        for backend in ("reference", "triton")
    ]
    assert token_ids(answers[0]) == token_ids(answers[1])


def test_a_cached_prefix_gives_the_tokens_of_a_cold_one(checkpoint: CheckpointFactory):
    driver = engine(checkpoint("llama"), "triton")
    cold = driver.generate(tokens(40), max_tokens=5)
    cached = driver.generate(tokens(40), max_tokens=5)
    assert cached.finished is not None
    assert cached.finished.num_cached_tokens == 32
    assert cached.token_ids == cold.token_ids


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows hold what the memory held
def test_decode_steps_padded_as_for_graphs_give_the_tokens_of_the_reference(checkpoint: CheckpointFactory):
    answers = []
    for backend in ("reference", "triton"):
        driver = engine(checkpoint("llama"), backend)
        if backend == "triton":
            driver.engine.runner._forward_pass.capture(Rerun(), graph_sizes(4), max_blocks=32)
        answers.append(batch(driver, [5, 30, 17]))
    assert token_ids(answers[0]) == token_ids(answers[1])


@pytest.mark.filterwarnings("ignore:overflow encountered in scalar:RuntimeWarning")  # a hash modulo 2^64
def test_tokens_drawn_on_the_device_are_those_drawn_on_the_host(checkpoint: CheckpointFactory):
    """Penalties, a bias and forbidden ends are applied before, and a row that wants the likeliest token gets it."""
    answers = []
    for backend in ("reference", "triton"):
        driver = engine(checkpoint("llama"), backend)
        driver.add("drawn", tokens(5), max_tokens=6, temperature=1.2, top_p=0.9, top_k=40, seed=7)
        driver.add("greedy", tokens(4), max_tokens=6)
        penalised = {"repetition_penalty": 1.3, "logit_bias": {7: 3.0}, "min_tokens": 4, "stop_token_ids": (9,)}
        driver.add("penalised", tokens(6), max_tokens=6, temperature=0.8, min_p=0.02, seed=8, logprobs=2, **penalised)
        answers.append([(answer.token_ids, answer.text) for answer in driver.run().values()])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_a_cache_of_bytes_holds_more_and_the_answer_begins_alike(checkpoint: CheckpointFactory, kv_cache_dtype: str):
    folder = checkpoint("qwen3")
    full = engine(folder, "triton", kv_cache_memory="200KB")
    small = engine(folder, "triton", kv_cache_memory="200KB", kv_cache_dtype=kv_cache_dtype)
    assert small.info.num_kv_blocks > 2.5 * full.info.num_kv_blocks  # a byte for fp32's four, and a scale for each row
    assert small.generate(tokens(20), max_tokens=2).token_ids[0] == full.generate(tokens(20), max_tokens=2).token_ids[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "triton"}, "needs a GPU"),
        ({"attention_backend": "cpu", "kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str
):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=message):
        EngineDriver(checkpoint("llama"), **settings)
