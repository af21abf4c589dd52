"""Keys and values in bf16 beside a model that computes in fp32: what a CPU without bf16 arithmetic does by itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from services.text_engine.config import TextEngineSettings
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.weights import load_decoder
from services.text_engine.runner.loading import choose_parts
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.models.paged import PagedDecoder

BACKENDS: list[Literal["reference", "cpu"]] = ["reference", "cpu"]
CPU = torch.device("cpu")


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


@torch.inference_mode()
def logits(folder: Path, **settings: Any) -> torch.Tensor:
    """[100, vocab_size] of one prompt, computed in fp32."""
    parts = choose_parts(TextEngineSettings(model=folder, **settings), CPU, torch.float32)
    decoder = load_decoder(
        folder, load_model_config(folder), parts.attention, parts.kernels, dtype=torch.float32, device=CPU
    )
    return PagedDecoder(decoder, parts.attention).logits(torch.tensor(tokens(100)))


@pytest.mark.parametrize("family", ["llama", "llama_padded", "qwen2", "qwen3", "gemma3_text"])
def test_logits_are_those_of_the_plain_twin_and_near_those_of_a_cache_in_fp32(
    checkpoint: CheckpointFactory, family: str
):
    folder = checkpoint(family)
    native, twin = (logits(folder, attention_backend=backend, kv_cache_dtype="bfloat16") for backend in BACKENDS)
    exact = logits(folder, dtype="float32")
    # Where the order of a sum decides how a key is rounded, one key differs in its last bit.
    torch.testing.assert_close(native, twin, rtol=0, atol=0.02 * exact.std().item())
    assert not torch.equal(native, exact)
    # With such random weights; bytes cost three to four per cent.
    assert (native - exact).square().mean().sqrt() < 0.02 * exact.std()


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_chosen_where_fp32_was_not(checkpoint: CheckpointFactory, backend: Literal["reference", "cpu"]):
    folder = checkpoint("llama")
    by_itself = logits(folder, attention_backend=backend)
    assert torch.equal(by_itself, logits(folder, attention_backend=backend, kv_cache_dtype="bfloat16"))
    asked_for = logits(folder, dtype="float32", attention_backend=backend)
    assert not torch.equal(by_itself, asked_for)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_memory_holds_twice_the_blocks(checkpoint: CheckpointFactory, backend: str):
    plain, narrow = (
        EngineDriver(
            checkpoint("qwen3"), attention_backend=backend, kv_cache_memory="200KB", kv_cache_dtype=kv_cache_dtype
        )
        for kv_cache_dtype in ("auto", "bfloat16")
    )
    assert narrow.info.num_kv_blocks == 2 * plain.info.num_kv_blocks


def test_what_is_answered_does_not_depend_on_what_is_cached(checkpoint: CheckpointFactory):
    driver = EngineDriver(checkpoint("llama"), attention_backend="cpu", kv_cache_dtype="bfloat16")
    first = driver.generate(tokens(70), max_tokens=12)
    again = driver.generate(tokens(70), max_tokens=12)
    assert again.finished is not None
    assert again.finished.num_cached_tokens == 64
    assert again.token_ids == first.token_ids
