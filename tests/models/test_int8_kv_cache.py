"""An engine on a CPU with `--kv-cache-dtype int8`: more tokens in the same memory, answers as from the plain twin, and
the same whatever else the engine does. (Bit for bit: test_batch_invariance.)
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from services.text_engine.config import TextEngineSettings
from services.text_engine.core.sequence import ImageSpan
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.weights import load_decoder
from services.text_engine.runner.loading import choose_parts
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.models.paged import PagedDecoder

BACKENDS = ["reference", "cpu"]
CPU = torch.device("cpu")


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def new_driver(folder: Path, backend: str = "cpu", **settings: Any) -> EngineDriver:
    return EngineDriver(folder, **({"attention_backend": backend, "kv_cache_dtype": "int8"} | settings))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "times"), [("float32", 3.4), ("bfloat16", 1.7)])
def test_the_same_memory_holds_more_blocks(checkpoint: CheckpointFactory, backend: str, dtype: str, times: float):
    folder = checkpoint("qwen3")
    plain, int8 = (
        new_driver(folder, backend, dtype=dtype, kv_cache_memory="200KB", kv_cache_dtype=kv_cache_dtype)
        for kv_cache_dtype in ("auto", "int8")
    )
    assert int8.info.num_kv_blocks > times * plain.info.num_kv_blocks
    assert int8.engine.runner.kv_cache_bytes <= 200_000


@torch.inference_mode()
def logits(folder: Path, backend: Literal["reference", "cpu"], kv_cache_dtype: Literal["auto", "int8"]) -> torch.Tensor:
    """[100, vocab_size] of one prompt, in fp32."""
    settings = TextEngineSettings(
        model=folder, dtype="float32", attention_backend=backend, kv_cache_dtype=kv_cache_dtype
    )
    parts = choose_parts(settings, CPU, torch.float32)
    decoder = load_decoder(
        folder, load_model_config(folder), parts.attention, parts.kernels, dtype=torch.float32, device=CPU
    )
    return PagedDecoder(decoder, parts.attention).logits(torch.tensor(tokens(100)))


@pytest.mark.parametrize("family", ["llama", "llama_padded", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_logits_are_near_those_of_the_plain_twin_and_of_a_cache_in_fp32(checkpoint: CheckpointFactory, family: str):
    folder = checkpoint(family)
    exact, twin, native = (
        logits(folder, "cpu", "auto"),
        logits(folder, "reference", "int8"),
        logits(folder, "cpu", "int8"),
    )
    # What bytes cost is the scheme's, three to four per cent with such random weights; the kernels add next to nothing.
    for expected, tolerance in ((twin, 0.01), (exact, 0.05)):
        assert (native - expected).square().mean().sqrt() < tolerance * expected.std()
    assert not torch.equal(native, exact)


@pytest.mark.parametrize("budget", [16, 17, 512])
def test_an_answer_depends_on_neither_batch_nor_chunks_nor_the_prefix_cache(checkpoint: CheckpointFactory, budget: int):
    folder = checkpoint("llama")
    alone = new_driver(folder, enable_prefix_caching=False).generate(tokens(70), max_tokens=16).token_ids
    driver = new_driver(folder, max_num_batched_tokens=budget, max_num_seqs=16)
    for i in range(7):
        driver.add(f"other-{i}", tokens(5 + 7 * i, seed=i), max_tokens=3 + i)
    assert driver.generate(tokens(70), max_tokens=16).token_ids == alone
    again = driver.generate(tokens(70), max_tokens=16)
    assert again.finished is not None
    assert again.finished.num_cached_tokens == 64
    assert again.token_ids == alone


def test_pictures_that_see_themselves_whole_are_computed_alike_in_pieces(checkpoint: CheckpointFactory):
    images = [ImageSpan("ca7" + 61 * "0", start=2, num_tokens=16, attention="bidirectional")]
    answers = []
    for budget in (20, 512):
        driver = new_driver(checkpoint("gemma3"), max_num_batched_tokens=budget, max_num_seqs=4)
        driver.pictures = {images[0].image_key: torch.randn(16, 64, generator=torch.Generator().manual_seed(3))}
        answers.append(driver.generate(tokens(40), images=images, max_tokens=12).token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_sleep_it_answers_as_before(checkpoint: CheckpointFactory, backend: str):
    driver = new_driver(checkpoint("llama"), backend, enable_prefix_caching=False)
    before = driver.generate(tokens(40)).token_ids
    size_bytes = driver.engine.runner.kv_cache_bytes
    driver.engine.runner.release_kv_cache()
    assert driver.engine.runner.kv_cache_bytes == 0
    driver.engine.runner.restore_kv_cache()
    assert driver.engine.runner.kv_cache_bytes == size_bytes
    assert driver.generate(tokens(40)).token_ids == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_is_refused_and_the_message_says_what_to_take(checkpoint: CheckpointFactory, backend: str):
    with pytest.raises(ValueError, match=r"kv_cache_dtype=fp8 needs .* a GPU; use int8"):
        new_driver(checkpoint("llama"), backend, kv_cache_dtype="fp8")
