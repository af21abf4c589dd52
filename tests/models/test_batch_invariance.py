"""With the compiled CPU kernels a request's log-probabilities are the same bit for bit, however it was computed: by
batches, chunks, the prefix cache, preemption, guesses at coming tokens, or threads. And a seeded answer is the same
in every process.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.text_engine.core.batch import Logprobs
from services.text_engine.core.sequence import ImageSpan, PromptLogprob
from services.text_engine.runner.loading import choose_parts
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ["llama", "llama_biased", "qwen2_tied", "qwen3", "gemma3_text", "mistral", "qwen2_moe"]
NUM_PROMPT_TOKENS = 101
Told = tuple[list[Logprobs], list[PromptLogprob] | None]


def tokens(length: int, seed: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


PROMPT = tokens(NUM_PROMPT_TOKENS)


def new_driver(folder: Path, **settings: Any) -> EngineDriver:
    options = {"attention_backend": "cpu", "batch_invariant": True, "max_num_seqs": 40, "max_num_batched_tokens": 512}
    return EngineDriver(folder, **(options | settings))


def told(driver: EngineDriver, **options: Any) -> Told:
    """What the request "r" is told of its own tokens and of its prompt's."""
    driver.add("r", PROMPT, **{"max_tokens": 12, "logprobs": 3} | options)
    answer = driver.run()["r"]
    logprobs = [each for _, each in answer.logprobs]
    assert len(logprobs) == 12
    assert torch.isfinite(torch.tensor([each.logprob for each in logprobs])).all()
    return logprobs, answer.prompt_logprobs


def alone(folder: Path, **settings: Any) -> EngineDriver:
    return new_driver(folder, **settings)


def chunked(folder: Path, **settings: Any) -> EngineDriver:
    return new_driver(folder, max_num_batched_tokens=17, max_num_seqs=16, **settings)


def among_many(folder: Path, **settings: Any) -> EngineDriver:
    driver = new_driver(folder, max_num_batched_tokens=64, **settings)
    for i in range(33):
        driver.add(f"other-{i}", tokens(3 + 5 * i, seed=i), max_tokens=9 + i % 13)
    return driver


def beside_one(folder: Path, **settings: Any) -> EngineDriver:
    driver = new_driver(folder, max_prefill_tokens_while_decoding=13, **settings)
    driver.add("other", tokens(31, seed=9), max_tokens=50)
    for _ in range(3):
        driver.step()
    return driver


def after_itself(folder: Path, **settings: Any) -> EngineDriver:
    driver = new_driver(folder, **settings)
    driver.generate(PROMPT, max_tokens=4)
    return driver


def after_half_of_itself(folder: Path, **settings: Any) -> EngineDriver:
    driver = new_driver(folder, **settings)
    driver.generate([*PROMPT[:53], 7], max_tokens=4)
    return driver


def without_cache(folder: Path, **settings: Any) -> EngineDriver:
    return new_driver(folder, enable_prefix_caching=False, **settings)


def preempted(folder: Path, **settings: Any) -> EngineDriver:
    driver = new_driver(folder, **settings)
    scheduler = driver.engine.scheduler
    schedule = scheduler.schedule
    num_steps = 0

    def now_and_then() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 5 == 0 and scheduler.running:
            scheduler._set_aside(scheduler.running[-1])
        return schedule()

    scheduler.schedule = now_and_then  # type: ignore[method-assign]
    return driver


def with_two_threads(folder: Path, **settings: Any) -> EngineDriver:
    return new_driver(folder, num_threads=2, **settings)


WAYS: list[Callable[..., EngineDriver]] = [
    chunked,
    among_many,
    beside_one,
    after_itself,
    after_half_of_itself,
    without_cache,
    preempted,
    with_two_threads,
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_equal_bit_for_bit_whatever_happens_around_them(
    checkpoint: CheckpointFactory, family: str, dtype: str
):
    folder = checkpoint(family)
    expected = told(alone(folder, dtype=dtype))
    for way in WAYS:
        assert told(way(folder, dtype=dtype)) == expected, way.__name__


@pytest.mark.parametrize("way", WAYS)
def test_those_of_the_prompt_are_too(checkpoint: CheckpointFactory, way: Callable[..., EngineDriver]):
    folder = checkpoint("llama")
    expected = told(alone(folder, dtype="bfloat16"), prompt_logprobs=2)
    assert told(way(folder, dtype="bfloat16"), prompt_logprobs=2) == expected
    assert expected[1] is not None
    assert len(expected[1]) == NUM_PROMPT_TOKENS - 1


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("bfloat16", "int8"), ("float32", "int8"), ("float32", "bfloat16")]
)
@pytest.mark.parametrize("way", WAYS)
def test_so_they_are_with_a_cache_of_fewer_bits(
    checkpoint: CheckpointFactory, way: Callable[..., EngineDriver], dtype: str, kv_cache_dtype: str
):
    folder = checkpoint("gemma3_text")
    settings = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    assert told(way(folder, **settings), prompt_logprobs=2) == told(alone(folder, **settings), prompt_logprobs=2)


@pytest.mark.parametrize("way", WAYS)
def test_seeded_answers_are_too(checkpoint: CheckpointFactory, way: Callable[..., EngineDriver]):
    folder = checkpoint("qwen3")
    options = {"temperature": 1.3, "top_p": 0.9, "seed": 11, "frequency_penalty": 0.4}
    assert told(way(folder, dtype="bfloat16"), **options) == told(alone(folder, dtype="bfloat16"), **options)


def test_guesses_at_coming_tokens_change_no_bit(checkpoint: CheckpointFactory):
    folder = checkpoint("llama")
    repeated = tokens(6) * 12
    found = []
    for speculative in ("off", "ngram"):
        driver = new_driver(folder, dtype="bfloat16", speculative=speculative)
        driver.engine.scheduler.max_prefill_tokens_while_decoding = None
        answer = driver.generate(repeated, max_tokens=40)
        found.append(answer.token_ids)
    assert found[0] == found[1]


def test_text_after_a_picture_is_the_same_with_the_picture_cached(checkpoint: CheckpointFactory):
    folder = checkpoint("llava_clip_llama")
    found = []
    for warm, budget in ((False, 512), (True, 512), (False, 19)):
        driver = new_driver(folder, dtype="bfloat16", max_num_batched_tokens=budget, max_num_seqs=16)
        placeholder = driver.info.vocab_size - 1
        prompt = [*PROMPT[:9], *[placeholder] * 16, *PROMPT[9:50]]
        options = {"images": [ImageSpan("a" * 64, 9, 16)], "max_tokens": 12}
        rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
        driver.pictures["a" * 64] = rows
        if warm:
            driver.generate(prompt, **options)
        logprobs = driver.generate(prompt, logprobs=2, **options).logprobs
        assert len(logprobs) == 12
        found.append([each.top_logprobs for _, each in logprobs])
    assert found[0] == found[1] == found[2]


SEEDED = """
import json, sys
from diptych import LLM, SamplingParams
llm = LLM(sys.argv[1], num_threads=1, kv_cache_memory="8MiB")
sampling = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=24, ignore_eos=True)
prompts = json.loads(sys.argv[2])
print(json.dumps([[c.token_ids for c in output.choices] for output in llm.generate(prompts, sampling)]))
"""


def test_a_seeded_answer_is_the_same_in_another_process_and_in_another_batch(checkpoint: CheckpointFactory):
    def answers(prompts: list[list[int]]) -> list[list[list[int]]]:
        words = [sys.executable, "-c", SEEDED, str(checkpoint("llama")), json.dumps(prompts)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
        found: list[list[list[int]]] = json.loads(done.stdout)
        return found

    [first] = answers([PROMPT])
    *_, again = answers([tokens(40, seed=1), tokens(9, seed=2), PROMPT])
    assert again == first
    assert first[0] != first[1], "each choice has numbers of its own"


@pytest.mark.parametrize("settings", [{"attention_backend": "reference"}, {"enforce_eager": True}])
def test_where_it_cannot_be_promised_the_engine_does_not_start(checkpoint: CheckpointFactory, settings: dict[str, Any]):
    with pytest.raises(ValueError, match="batch_invariant=True needs the compiled CPU kernels"):
        new_driver(checkpoint("llama"), **settings)


def test_it_takes_our_own_products_even_where_others_are_faster(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
):
    from services.text_engine.config import TextEngineSettings
    from services.text_engine.kernels.native_matmul import PackedLinear
    from services.text_engine.models.layers import Linear
    from services.text_engine.runner import loading

    monkeypatch.setattr(loading, "packing_pays", lambda library, dtype: False)
    for is_invariant, expected in ((False, Linear), (True, PackedLinear)):
        settings = TextEngineSettings(model=checkpoint("llama"), batch_invariant=is_invariant)
        parts = choose_parts(settings, torch.device("cpu"), torch.float32)
        assert isinstance(parts.make_product(torch.ones(4, 8), None), expected)
