"""Speculative decoding through the engine: whatever is guessed, an answer is what it would have been without.

The guesses come from each answer itself, known from a run without guesses, with mistakes put in; and, at the end, from
the drafter that the engine really has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as AbstractSequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.text_engine.core.batch import Draft, DraftMethod, SampledToken, ScheduledSequence
from services.text_engine.core.sequence import ImageSpan, Sequence
from services.text_engine.core.speculation.interface import DraftCounts, Drafter
from services.text_engine.core.speculation.prompt_lookup_drafter import PromptLookupDrafter
from services.text_engine.core.speculation.step_costs import StepCosts
from services.text_engine.metrics import EngineMetrics
from services.text_engine.runner.acceptance import sample_and_accept
from services.text_engine.runner.sampler import Sampler
from services.text_engine.runner.step_costs import measure_step_costs
from shared.sampling import Constraint, SamplingParams
from tests.conftest import CheckpointFactory
from tests.engines import Answer, EngineDriver
from tests.models.test_cuda_graphs import Rerun

FREE = StepCosts([(1, 1.0), (64, 1.0)])
FAMILIES = ["llama", "llama_biased", "qwen2_tied", "qwen3", "gemma3_text", "mistral"]


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


class Recital:
    """Recites known answers, with a mistake in each draft at a random place or at none.

    answers   (request id, choice) -> its tokens
    """

    def __init__(self, answers: dict[tuple[str, int], list[int]], num_guesses: int, seed: int = 0) -> None:
        self._answers = answers
        self._num_guesses = num_guesses
        self._rng = random.Random(seed)

    def propose(
        self, sequences: AbstractSequence[Sequence], *, num_step_tokens: int, max_draft_tokens: int
    ) -> dict[Sequence, Draft]:
        drafts = {}
        for sequence in sequences:
            start = sequence.num_generated_tokens
            length = min(self._num_guesses, sequence.max_draft_tokens, max_draft_tokens)
            draft = self._answers[sequence.request_id, sequence.index][start : start + length]
            if draft:
                mistake = self._rng.randrange(2 * len(draft))
                if mistake < len(draft):
                    draft[mistake] = draft[mistake] % 290 + 5
                drafts[sequence] = Draft(draft, "ngram")
                max_draft_tokens -= len(draft)
        return drafts


class Recorder(EngineDriver):
    """Keeps the tokens of every choice apart, and what its log-probabilities were."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.choices: dict[tuple[str, int], list[int]] = {}
        self.texts: dict[tuple[str, int], str] = {}
        self.logprobs: dict[tuple[str, int], list[float]] = {}

    def _take(self, outputs: list[Any]) -> None:
        super()._take(outputs)
        for output in outputs:
            if hasattr(output, "token_ids"):
                key = (output.request_id, output.index)
                self.choices.setdefault(key, []).extend(output.token_ids)
                self.texts[key] = self.texts.get(key, "") + output.text
                self.logprobs.setdefault(key, []).extend(logprobs.logprob for _, logprobs in output.logprobs)


def run(folder: Path, requests: list[dict[str, Any]], drafter: Drafter | None = None, **settings: Any) -> Recorder:
    """All requests together; what images they have are put on the shelf first."""
    driver = Recorder(folder, **settings)
    driver.engine.scheduler.drafter = drafter
    for i, request in enumerate(requests):
        for span in request.get("images", ()):
            generator = torch.Generator().manual_seed(ord(span.image_key[0]))
            driver.pictures[span.image_key] = torch.randn(span.num_tokens, driver.row_size, generator=generator)
        driver.add(f"r{i}", **request)
    driver.run()
    return driver


def check_same(plain: Recorder, guessed: Recorder) -> None:
    assert guessed.choices == plain.choices
    assert guessed.texts == plain.texts
    for name, answer in plain.answers.items():
        other = guessed.answers[name]
        assert _ending(other) == _ending(answer)
    for key, logprobs in plain.logprobs.items():
        assert guessed.logprobs[key] == pytest.approx(logprobs, abs=1e-4)


def _ending(answer: Answer) -> tuple[Any, ...]:
    num_generated = answer.finished.num_generated_tokens if answer.finished else None
    return answer.finish_reason, num_generated, str(answer.error)


def accepted(driver: EngineDriver, method: DraftMethod = "ngram") -> int:
    return driver.engine.scheduler.draft_counts[method].num_accepted_tokens


# --- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_the_same_for_every_family(checkpoint: CheckpointFactory, family: str, backend: str):
    folder = checkpoint(family)
    requests = [{"token_ids": tokens(3 + 11 * i, seed=i), "max_tokens": 40 - 5 * i} for i in range(5)]
    plain = run(folder, requests, attention_backend=backend)
    guessed = run(folder, requests, Recital(plain.choices, num_guesses=5), attention_backend=backend)
    check_same(plain, guessed)
    assert accepted(guessed) > 20
    assert len(guessed.batches) < len(plain.batches)


@pytest.mark.parametrize("num_guesses", [1, 2, 3, 7, 13])
def test_drafts_of_any_length_cross_the_borders_of_blocks(checkpoint: CheckpointFactory, num_guesses: int):
    folder = checkpoint("llama")
    requests = [{"token_ids": tokens(length), "max_tokens": 37} for length in (15, 16, 17, 31)]
    plain = run(folder, requests)
    check_same(plain, run(folder, requests, Recital(plain.choices, num_guesses)))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 6},
        {"max_num_batched_tokens": 23, "max_num_seqs": 3, "enable_prefix_caching": False},
        {"kv_cache_memory": "96KiB", "max_num_seqs": 6, "max_num_batched_tokens": 48},
    ],
)
def test_chunks_preemptions_and_small_steps_change_nothing(checkpoint: CheckpointFactory, settings: dict[str, Any]):
    folder = checkpoint("llama")
    requests = [{"token_ids": tokens(5 + 6 * i, seed=i % 3), "max_tokens": 18 + i} for i in range(6)]
    plain = run(folder, requests)
    check_same(plain, run(folder, requests, Recital(plain.choices, 5), **settings))


@pytest.mark.parametrize(
    ("family", "span"),
    [
        ("llava_clip_llama", {}),
        ("qwen2_5_vl", {"grid": (1, 4, 6)}),
        ("qwen3_vl", {"grid": (1, 2, 3)}),
        ("gemma3", {"attention": "bidirectional"}),
    ],
)
def test_answers_about_pictures_are_the_same(checkpoint: CheckpointFactory, family: str, span: dict[str, Any]):
    folder = checkpoint(family)
    image_token = EngineDriver(folder).prompts._image_token_id
    assert image_token is not None
    num_rows = 6
    requests = [
        {
            "token_ids": [*tokens(9, seed=i), *[image_token] * num_rows, *tokens(5, seed=i + 1)],
            "images": [ImageSpan(key * 64, 9, num_rows, **span)],
            "max_tokens": 21,
        }
        for i, key in enumerate("abc")
    ]
    plain = run(folder, requests)
    guessed = run(folder, requests, Recital(plain.choices, 4))
    check_same(plain, guessed)
    assert accepted(guessed) > 10


# Rows of no sequence hold whatever was in memory, which the interpreter's numpy finds worth a warning.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_with_drafts_run_in_the_graphs_of_decode_steps(checkpoint: CheckpointFactory, backend: str):
    folder = checkpoint("llama")
    requests = [{"token_ids": tokens(5 + 3 * i, seed=i), "max_tokens": 9} for i in range(2)]
    plain = run(folder, requests)
    driver = Recorder(folder, attention_backend=backend, max_num_seqs=12, max_num_batched_tokens=32)
    capture = Rerun()
    driver.engine.runner._forward_pass.capture(capture, [4, 12], max_blocks=32)
    driver.engine.scheduler.drafter = Recital(plain.choices, 4)
    for i, request in enumerate(requests):
        driver.add(f"r{i}", **request)
    driver.run()
    check_same(plain, driver)
    assert accepted(driver) > 4
    assert capture.num_replays == sum(len(batch.scheduled) > 0 for batch in driver.batches) - 1  # but for the prompts


# --- everything that shapes an answer -------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9, "seed": 5},
    "top_k": {"temperature": 1.2, "top_k": 7, "seed": 6},
    "top_p and min_p": {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02, "seed": 7},
    "several choices": {"temperature": 1.0, "seed": 8, "n": 3},
    "penalties, greedy": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "penalties, sampled": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.3, "seed": 9},
    "bias": {"logit_bias": {17: 3.0, 40: -100.0, 41: 2.0}},
    "log-probabilities": {"logprobs": 3},
    "log-probabilities, sampled": {"temperature": 0.9, "seed": 10, "logprobs": 0},
    "no end before": {"min_tokens": 13, "ignore_eos": False, "logit_bias": {2: 8.0}},
    "an end at some point": {"ignore_eos": False, "logit_bias": {2: 2.5}, "temperature": 1.0, "seed": 12},
    "a pattern": {"constraint": Constraint(kind="regex", value="[a-f]{9}(x|yy)[0-9]{12}"), "ignore_eos": False},
    "a pattern, sampled": {
        "constraint": Constraint(kind="regex", value="[a-f]{9}(x|yy)[0-9]{12}"),
        "ignore_eos": False,
        "temperature": 1.0,
        "seed": 13,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_shapes_an_answer_it_is_the_same_token_by_token(checkpoint: CheckpointFactory, shape: str):
    folder = checkpoint("llama")
    requests = [
        {"token_ids": tokens(14, seed=3), "max_tokens": 30, **SHAPES[shape]},
        {"token_ids": tokens(9, seed=4), "max_tokens": 33},
        {"token_ids": tokens(21, seed=5), "max_tokens": 25, **SHAPES[shape]},
    ]
    plain = run(folder, requests)
    guessed = run(folder, requests, Recital(plain.choices, 5))
    check_same(plain, guessed)
    assert accepted(guessed) > 20


@pytest.mark.parametrize("num_before", [0, 1, 2, 3, 4, 5, 6, 7])
def test_a_stop_token_or_string_in_the_middle_of_a_draft_ends_the_answer_there(
    checkpoint: CheckpointFactory, num_before: int
):
    folder = checkpoint("llama")
    plain = run(folder, [{"token_ids": tokens(14), "max_tokens": 20}])
    answer = plain.choices["r0", 0]
    text = plain.engine.tokenizer.token_bytes(answer[num_before]).decode("utf-8", "ignore") or "?"
    for stop in ({"stop_token_ids": (answer[num_before],)}, {"stop": (text,)}, {"stop": (text,), "min_tokens": 6}):
        request = [{"token_ids": tokens(14), "max_tokens": 20, **stop}]
        check_same(run(folder, request), run(folder, request, Recital({("r0", 0): answer}, 5)))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6, 7, 8])
def test_no_answer_grows_beyond_its_limit_or_the_context(checkpoint: CheckpointFactory, max_tokens: int):
    folder = checkpoint("llama")
    requests = [{"token_ids": tokens(14), "max_tokens": max_tokens}, {"token_ids": tokens(51), "max_tokens": None}]
    plain = run(folder, requests, max_model_len=64)
    guessed = run(folder, requests, Recital(plain.choices, 6), max_model_len=64)
    check_same(plain, guessed)
    assert len(guessed.choices["r0", 0]) == max_tokens
    assert len(guessed.choices["r1", 0]) == 13


# --- chances --------------------------------------------------------------------------------------------------------

VOCAB_SIZE = 5
CHI_SQUARE_1_PERCENT = {4: 13.28, 24: 42.98}  # by degrees of freedom; with fewer of them it is exceeded more seldom


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """counts and probabilities of the same shape; what is impossible must not have happened."""
    assert counts[probabilities == 0].sum() == 0
    expected = counts.sum() * probabilities[probabilities > 0]
    counts = counts[probabilities > 0]
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("draft", [(2, 2), (4, 0, 1)])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.7, "min_p": 0.05}, {"temperature": 1.3, "top_p": 0.99}]
)
def test_tokens_are_drawn_from_the_models_distribution_whatever_was_guessed(
    draft: tuple[int, ...], sampling: dict[str, Any]
):
    """A model of five tokens whose next one depends on the last: pairs of tokens against their exact probabilities."""
    after = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(VOCAB_SIZE, [], frozenset())
    pairs = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for seed in range(2500):
        sequence = Sequence("a", [3], 1, SamplingParams(seed=seed, **sampling), 20)
        generated: list[int] = []
        while len(generated) < 2:
            item = ScheduledSequence(sequence, sequence.num_tokens - 1, 1 + len(draft), draft)
            last_tokens = [sequence.token_ids[-1], *draft]
            [answer] = sample_and_accept(sampler, after[last_tokens].clone(), [item])
            sequence.token_ids += [token.token_id for token in (*answer.accepted, answer)]
            generated = sequence.generated_token_ids
        pairs[generated[0], generated[1]] += 1
    probabilities = torch.softmax(after / sampling["temperature"], dim=-1)
    if "min_p" in sampling:
        probabilities *= probabilities >= 0.05 * probabilities.max(dim=-1, keepdim=True).values
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    of_pairs = probabilities[3][:, None] * probabilities
    assert chi_square(pairs.sum(dim=1), probabilities[3]) < CHI_SQUARE_1_PERCENT[4]
    assert chi_square(pairs, of_pairs) < CHI_SQUARE_1_PERCENT[24]


def test_rows_with_and_without_drafts_are_verified_independently_of_each_other():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(1 + 4 + 1 + 3, 11, generator=generator)
    best = logits.argmax(dim=-1).tolist()
    sampler = Sampler(11, [], frozenset())
    drafts: list[tuple[int, ...]] = [(), (best[1], best[2], (best[3] + 1) % 11), (), (best[6], best[7])]
    items = []
    for i, draft in enumerate(drafts):
        sequence = Sequence(f"r{i}", tokens(4 + i), 4 + i, SamplingParams(temperature=0.0), 40)
        items.append(ScheduledSequence(sequence, 3 + i, 1 + len(draft), draft))
    answers = sample_and_accept(sampler, logits, items)
    assert [_token_ids(answer) for answer in answers] == [[best[0]], best[1:4], [best[5]], best[6:9]]


class UnreadPrompt(list[int]):
    """Token ids of which the prompt's may be counted, but not copied."""

    num_prompt_tokens = 1000

    def __getitem__(self, place: Any) -> Any:
        assert isinstance(place, slice)
        assert place.start is not None
        assert place.start >= self.num_prompt_tokens
        return super().__getitem__(place)

    def __iter__(self) -> Any:
        raise AssertionError("all of it is read")


@pytest.mark.parametrize("shape", [{"temperature": 0.0}, {}, {"frequency_penalty": 0.5}, {"min_tokens": 9}])
def test_a_draft_is_verified_without_a_look_at_the_prompt(shape: dict[str, Any]):
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(3))
    answers = []
    for kind in (UnreadPrompt, list):
        sequence = Sequence("a", kind([*tokens(1000), 3, 9]), 1000, SamplingParams(**{"seed": 5} | shape), 2000)
        sampler = Sampler(11, [], frozenset({2}))
        [alone] = sampler.sample(logits[:1].clone(), [sequence])
        draft = (alone.token_id, 4, 5)
        [answer] = sample_and_accept(sampler, logits.clone(), [ScheduledSequence(sequence, 1001, 4, draft)])
        assert len(answer.accepted) >= 1
        answers.append(_token_ids(answer))
    assert answers[0] == answers[1]


def _token_ids(answer: SampledToken) -> list[int]:
    return [token.token_id for token in (*answer.accepted, answer)]


def test_logits_that_are_not_finite_after_a_good_guess_keep_the_guess_and_tell():
    logits = torch.zeros(3, 7)
    logits[0, 4] = 1.0
    logits[1] = float("nan")
    sequence = Sequence("a", [1, 2], 2, SamplingParams(temperature=0.0), 20)
    [answer] = sample_and_accept(Sampler(7, [], frozenset()), logits, [ScheduledSequence(sequence, 1, 3, (4, 5))])
    assert [token.token_id for token in answer.accepted] == [4]
    assert answer.error is not None


# --- the engine's own guesses ---------------------------------------------------------------------------------------


def test_an_engine_guesses_from_its_prompts_and_counts_what_held(checkpoint: CheckpointFactory):
    """A biased model that can hardly help repeating itself."""
    folder = checkpoint("llama")
    requests = [
        {"token_ids": tokens(20, seed=i), "max_tokens": 40, "logit_bias": {50 + i: 100.0, 60 + i: 99.0}}
        for i in range(3)
    ]
    plain = run(folder, requests)
    drafter = PromptLookupDrafter(FREE, num_speculative_tokens=5, never_sampled=frozenset())
    guessed = run(folder, requests, drafter)
    check_same(plain, guessed)
    counts = guessed.engine.scheduler.draft_counts["ngram"]
    assert 0 < counts.num_accepted_tokens <= counts.num_draft_tokens
    assert counts.num_accepted_tokens == sum(counts.num_accepted_per_position)
    assert len(guessed.batches) < 0.7 * len(plain.batches)


def test_what_held_of_all_guesses_is_exported_under_vllms_names(checkpoint: CheckpointFactory):
    folder = checkpoint("llama")
    request = [{"token_ids": tokens(14), "max_tokens": 15}]
    driver = Recorder(folder)
    answer = run(folder, request).choices
    driver.engine.scheduler.drafter = Recital(answer, 3)
    metrics = EngineMetrics()
    driver.add("r0", **request[0])
    total = DraftCounts()
    while driver.step():
        counts = driver.engine.scheduler.draft_counts["ngram"]
        total.num_drafts += counts.num_drafts
        total.num_draft_tokens += counts.num_draft_tokens
        total.num_accepted_tokens += counts.num_accepted_tokens
        metrics.observe_step(driver.engine, 0.01)
    assert driver.choices == answer

    def exported(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"diptych:spec_decode_{name}_total", {"method": "ngram"} | labels)

    assert total.num_accepted_tokens > 0
    assert exported("num_drafts") == total.num_drafts
    assert exported("num_draft_tokens") == total.num_draft_tokens
    assert exported("num_accepted_tokens") == total.num_accepted_tokens
    per_position = [exported("num_accepted_tokens_per_pos", position=str(i)) or 0 for i in range(3)]
    assert sum(per_position) == total.num_accepted_tokens


def test_speculation_is_built_from_the_settings(checkpoint: CheckpointFactory):
    drafter = EngineDriver(checkpoint("llama"), speculative="ngram", num_speculative_tokens=3).engine.scheduler.drafter
    assert isinstance(drafter, PromptLookupDrafter)
    assert drafter.num_speculative_tokens == 3
    assert 0 < drafter.costs.seconds(1) <= drafter.costs.seconds(64)
    assert EngineDriver(checkpoint("llama"), speculative="off").engine.scheduler.drafter is None


@pytest.mark.parametrize("recipe", ["llama", "qwen2_5_vl"])
def test_what_steps_cost_is_measured_whatever_positions_a_model_has(checkpoint: CheckpointFactory, recipe: str) -> None:
    driver = EngineDriver(checkpoint(recipe))
    costs = measure_step_costs(driver.engine.runner, block_size=16, max_num_tokens=40)
    assert 0 < costs.seconds(1) <= costs.seconds(32) <= costs.seconds(1000)
