"""A prompt's own log-probabilities equal those of transformers, whatever cache, chunks, preemption and neighbours."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.text_engine.core.sequence import ImageSpan, PromptLogprob
from services.text_engine.engine_io import EngineRequest, TokenOutput
from services.text_engine.events import PROMPT_TOKENS_AT_ONCE, event_of, portions
from services.text_engine.runner import forward_pass
from shared import sampling
from shared.errors import ContextTooLong, InvalidRequest
from shared.sampling import SamplingParams
from shared.wire.engine import PromptToken, Tokens
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.models.oracle import load_oracle, oracle_logits
from tests.models.test_cuda_graphs import Rerun

FAMILIES = ["llama", "llama_padded", "qwen2_tied", "qwen3", "gemma3_text", "mistral"]
TOLERANCE = 2e-4


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


class Scores:
    """What each request of a driver was told of its prompt."""

    def __init__(self, driver: EngineDriver) -> None:
        self.of: dict[str, list[PromptLogprob]] = {}
        publish = driver.engine._token_output

        def record(choice: Any, *rest: Any) -> Any:
            output = publish(choice, *rest)
            if output.prompt_logprobs is not None:
                assert output.request_id not in self.of, "a prompt is told once"
                self.of[output.request_id] = list(output.prompt_logprobs)
            return output

        driver.engine._token_output = record  # type: ignore[method-assign]


def scores_of(driver: EngineDriver, prompt: list[int], **options: Any) -> list[PromptLogprob]:
    scores = Scores(driver)
    driver.add("scored", prompt, **{"max_tokens": 1, "prompt_logprobs": 3} | options)
    driver.run()
    return scores.of["scored"]


def expected(folder: Path, prompt: list[int]) -> torch.Tensor:
    """[len(prompt) - 1, vocab] log-probabilities."""
    return torch.log_softmax(oracle_logits(load_oracle(folder), torch.tensor(prompt)), dim=-1)[:-1]


@pytest.fixture(scope="module")
def llama(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_they_equal_the_log_softmax_of_transformers(checkpoint: CheckpointFactory, family: str):
    folder, prompt = checkpoint(family), tokens(83)
    driver = EngineDriver(folder, max_num_batched_tokens=37, max_num_seqs=4)
    found = scores_of(driver, prompt)
    wanted = expected(folder, prompt)[:, : driver.info.vocab_size]
    # The model's vocabulary may be padded; what no token stands for has no share here.
    wanted = wanted - wanted.logsumexp(dim=-1, keepdim=True)
    assert len(found) == len(prompt) - 1
    for row, token_id, entry in zip(wanted, prompt[1:], found, strict=True):
        best = row.topk(3)
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        assert entry.rank == 1 + int((row > row[token_id]).sum())
        assert entry.top_token_ids == best.indices.tolist()
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=TOLERANCE)


def test_a_prefix_hit_loses_no_row_and_later_requests_still_hit(llama: Path):
    driver, prompt = EngineDriver(llama), tokens(99)
    cold = scores_of(EngineDriver(llama, enable_prefix_caching=False), prompt)
    assert driver.generate(prompt).finished.num_cached_tokens == 0
    scores = Scores(driver)
    scored = driver.generate(prompt, prompt_logprobs=3, max_tokens=1)
    assert scored.finished.num_cached_tokens == 0
    assert list(scores.of.values()) == [cold]
    assert driver.generate(prompt).finished.num_cached_tokens == 96


@pytest.mark.parametrize("attention_backend", ["reference", "cpu"])
@pytest.mark.parametrize("budget", [4, 16, 17, 512])
def test_neither_chunks_nor_portions_of_logits_change_them(
    llama: Path, monkeypatch: pytest.MonkeyPatch, budget: int, attention_backend: str
):
    prompt = tokens(67)
    settings = {"attention_backend": attention_backend, "max_num_seqs": 4}
    whole = scores_of(EngineDriver(llama, **settings), prompt)
    monkeypatch.setattr(forward_pass, "PROMPT_LOGITS_BYTES", 4 * 316 * 5)
    cut = scores_of(EngineDriver(llama, max_num_batched_tokens=budget, **settings), prompt)
    assert [entry.top_token_ids for entry in cut] == [entry.top_token_ids for entry in whole]
    assert [e.logprob for e in cut] == pytest.approx([e.logprob for e in whole], abs=TOLERANCE)
    if attention_backend == "cpu":  # these kernels are the same bit for bit
        assert cut == whole


def test_equal_prompts_at_once_are_told_one_by_one_and_only_the_first_choice_works_for_it(llama: Path):
    driver, prompt = EngineDriver(llama), tokens(61)
    scores = Scores(driver)
    for name, count, choices in (("a", 2, 1), ("b", 0, 3), ("plain", None, 1)):
        driver.add(name, prompt, prompt_logprobs=count, n=choices, max_tokens=3)
    driver.run()
    assert scores.of.keys() == {"a", "b"}
    assert [e.logprob for e in scores.of["a"]] == pytest.approx([e.logprob for e in scores.of["b"]], abs=TOLERANCE)
    assert {len(e.top_token_ids) for e in scores.of["a"]} == {2}
    assert {len(e.top_token_ids) for e in scores.of["b"]} == {0}
    assert driver.answers["a"].token_ids == driver.answers["plain"].token_ids


def test_a_preempted_prompt_gets_every_row_once(llama: Path):
    prompt = tokens(90)
    alone = scores_of(EngineDriver(llama), prompt)
    driver = EngineDriver(llama, max_num_batched_tokens=32, max_num_seqs=4)
    scores = Scores(driver)
    driver.add("scored", prompt, prompt_logprobs=3, max_tokens=20)
    driver.step()
    sequence = driver.engine.scheduler.running[0]
    assert 0 < len(sequence.prompt_logprobs) < len(prompt) - 1
    driver.engine.scheduler._set_aside(sequence)
    driver.run()
    assert driver.answers["scored"].finished.num_preemptions == 1
    assert [e.logprob for e in scores.of["scored"]] == pytest.approx([e.logprob for e in alone], abs=TOLERANCE)


def test_a_prompt_that_is_only_scored_may_fill_the_cache_and_no_other(llama: Path):
    driver = EngineDriver(llama, kv_cache_memory="40KiB", max_num_batched_tokens=32, max_num_seqs=4)
    capacity = driver.engine.scheduler.blocks.max_sequence_tokens
    assert 32 < capacity < 400
    prompt = tokens(capacity)
    for length, only_echoes in ((capacity, False), (capacity + 1, True)):
        with pytest.raises(ContextTooLong):
            driver.add("no", tokens(length), only_echoes=only_echoes, max_tokens=1, prompt_logprobs=3)
    del driver.answers["no"]
    found = scores_of(driver, prompt, only_echoes=True)
    every = expected(llama, prompt)
    assert [e.logprob for e in found] == pytest.approx(
        [float(row[token_id]) for row, token_id in zip(every, prompt[1:], strict=True)], abs=TOLERANCE
    )


def test_a_prompt_of_one_token_has_nothing_to_tell(llama: Path):
    assert scores_of(EngineDriver(llama), [7]) == []


def test_text_around_a_picture_is_told_and_the_picture_is_computed_even_if_cached(checkpoint: CheckpointFactory):
    driver = EngineDriver(checkpoint("llava_clip_llama"))
    placeholder = driver.info.vocab_size - 1
    prompt = [*tokens(9), *[placeholder] * 16, *tokens(30, seed=1)]
    images = [ImageSpan("a" * 64, 9, 16)]
    driver.pictures["a" * 64] = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    scores = Scores(driver)
    driver.generate(prompt, images=images, max_tokens=2)
    first = driver.generate(prompt, images=images, prompt_logprobs=1, max_tokens=1)
    assert first.error is None
    [found] = scores.of.values()
    assert len(found) == len(prompt) - 1
    assert all(torch.isfinite(torch.tensor([e.logprob for e in found[25:]])))
    request = EngineRequest(request_id="r", token_ids=prompt, sampling=SamplingParams(), images=tuple(images))
    event = event_of(TokenOutput("r", 0, "", [5], [], None, found), request, driver.engine.tokenizer)
    assert isinstance(event, Tokens)
    assert event.prompt_tokens is not None
    assert [token.token_id for token in event.prompt_tokens] == prompt
    silent = [i for i, token in enumerate(event.prompt_tokens) if token.logprob is None]
    assert silent == [0, *range(9, 25)], "the first token and the picture's positions"


def test_two_ranks_tell_what_one_tells(llama: Path):
    prompt = tokens(75)
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
    alone = scores_of(EngineDriver(llama, **settings), prompt)
    driver = EngineDriver(llama, tensor_parallel_size=2, **settings)
    try:
        shared = scores_of(driver, prompt)
    finally:
        driver.engine.close()
    assert [entry.top_token_ids for entry in shared] == [entry.top_token_ids for entry in alone]
    assert [entry.logprob for entry in shared] == pytest.approx([entry.logprob for entry in alone], abs=TOLERANCE)


def test_chunks_of_one_token_that_run_as_graphs_tell_them_too(llama: Path):
    prompt = tokens(21)
    alone = scores_of(EngineDriver(llama), prompt)
    driver = EngineDriver(llama, max_num_batched_tokens=1, max_num_seqs=1)
    rerun = Rerun()
    driver.engine.runner._forward_pass.capture(rerun, [1], max_blocks=32)
    found = scores_of(driver, prompt)
    assert rerun.num_replays >= len(prompt)
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in alone], abs=TOLERANCE)


def test_graphs_are_captured_again_after_a_sleep(llama: Path):
    driver = EngineDriver(llama)
    rerun = Rerun()
    driver.engine.runner._forward_pass.capture(rerun, [1, 2], max_blocks=32)
    before = driver.generate(tokens(19)).token_ids
    driver.engine.sleep()
    assert driver.engine.runner.kv_cache_bytes == 0
    driver.engine.wake()
    num_replays = rerun.num_replays
    assert driver.generate(tokens(19)).token_ids == before
    assert rerun.num_replays > num_replays


def test_more_than_an_answer_has_room_for_is_refused_before_anything_is_computed(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sampling, "MAX_PROMPT_LOGPROBS", 4 * 23)
    driver = EngineDriver(llama)
    assert len(scores_of(driver, tokens(23), prompt_logprobs=3)) == 22
    with pytest.raises(InvalidRequest, match="one answer has room for 92"):
        driver.engine.check(
            EngineRequest(request_id="r", token_ids=tokens(24), sampling=SamplingParams(prompt_logprobs=3))
        )
    driver.engine.check(EngineRequest(request_id="r", token_ids=tokens(24), sampling=SamplingParams(prompt_logprobs=2)))


@pytest.mark.parametrize("num_tokens", [1, PROMPT_TOKENS_AT_ONCE, PROMPT_TOKENS_AT_ONCE + 1, 3 * PROMPT_TOKENS_AT_ONCE])
def test_they_are_sent_in_small_events_before_the_first_text(num_tokens: int):
    scored = [PromptToken(token_id=i, token="a", bytes=[97]) for i in range(num_tokens)]
    whole = Tokens(text="b", token_ids=[7], prompt_tokens=scored)
    *told, answer = portions(whole)
    assert answer == Tokens(text="b", token_ids=[7])
    assert all(isinstance(event, Tokens) and not event.text and not event.token_ids for event in told)
    parts = [event.prompt_tokens or [] for event in told if isinstance(event, Tokens)]
    assert [token for part in parts for token in part] == scored
    assert all(0 < len(part) <= PROMPT_TOKENS_AT_ONCE for part in parts)


def test_an_engine_whose_graphs_cannot_be_captured_again_stays_asleep_and_may_wake_later(llama: Path):
    driver = EngineDriver(llama)
    whole = driver.engine.runner.kv_cache_bytes
    rerun = Rerun()
    driver.engine.runner._forward_pass.capture(rerun, [1, 2], max_blocks=32)
    before = driver.generate(tokens(19)).token_ids
    driver.engine.sleep()
    record, rerun.record = rerun.record, None  # type: ignore[method-assign, assignment]
    for _ in range(2):
        with pytest.raises(TypeError):
            driver.engine.wake()
        assert driver.engine.runner.kv_cache_bytes == 0
    rerun.record = record  # type: ignore[method-assign]
    driver.engine.wake()
    assert driver.engine.runner.kv_cache_bytes == whole
    assert driver.generate(tokens(19)).token_ids == before
