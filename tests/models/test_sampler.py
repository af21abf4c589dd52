"""The sampler: each row on its own, reproducible, and true to the distribution it is asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from services.text_engine.core.sequence import Sequence
from services.text_engine.runner.sampler import Sampler
from shared.sampling import SamplingParams

VOCAB = 50
EOS = frozenset({3, 7})


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any) -> Sequence:
    prompt = [1, 2] if prompt is None else prompt
    return Sequence(
        request_id="r",
        token_ids=prompt + (output or []),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(**sampling),
        max_total_tokens=10_000,
    )


def sampler(vocab_size: int = VOCAB, banned: tuple[int, ...] = ()) -> Sampler:
    return Sampler(vocab_size, banned, EOS)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, **sampling: Any) -> int:
    [token] = sampler().sample(logits.clone()[None], [sequence(**sampling)])
    return token.token_id


def frequencies(logits: torch.Tensor, num_draws: int = 4000, **sampling: Any) -> torch.Tensor:
    counts = torch.zeros(logits.numel())
    for seed in range(num_draws):
        counts[draw(logits, seed=seed, **sampling)] += 1
    return counts / num_draws


def test_greedy_takes_the_best_and_the_lowest_id_among_equals():
    logits = torch.zeros(VOCAB)
    logits[[9, 20, 30]] = 5.0
    for greedy in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}):
        assert draw(logits, **greedy) == 9


def test_padded_ids_and_the_placeholder_are_never_sampled():
    """Case D31."""
    logits = random_logits(1, VOCAB + 14)
    logits[0, VOCAB:] = 100.0
    logits[0, 49] = 99.0
    [token] = sampler(banned=(49,)).sample(logits, [sequence(temperature=0.0)])
    assert token.token_id < 49


def test_a_seeded_row_is_the_same_in_any_company():
    """Case D23."""
    logits = random_logits(1)[0]
    alone = [draw(logits, seed=42, temperature=0.8)]
    for slot in range(3):
        rows = random_logits(3, seed=slot + 1)
        rows[slot] = logits
        company = [sequence(temperature=1.0), sequence(temperature=0.0), sequence(seed=5)]
        company[slot] = sequence(seed=42, temperature=0.8)
        alone.append(sampler().sample(rows, company)[slot].token_id)
    assert len(set(alone)) == 1


def test_the_next_position_draws_another_number():
    logits = torch.zeros(VOCAB)
    drawn = {
        sampler().sample(logits.clone()[None], [sequence(output=[0] * length, seed=1)])[0].token_id
        for length in range(40)
    }
    assert len(drawn) > 10


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.8}]
)
def test_draws_follow_the_filtered_distribution(sampling: dict[str, Any]):
    """Chi-square against the distribution worked out by hand; 99.9 % quantile."""
    logits = random_logits(1, 12, seed=3)[0]
    padded = torch.full((VOCAB,), float("-inf"))
    padded[:12] = logits
    expected = _filtered(logits, **sampling)
    observed = frequencies(padded, **sampling)[:12] * 4000
    kept = expected > 0
    assert observed[~kept].sum() == 0
    chi_square = float(((observed[kept] - 4000 * expected[kept]) ** 2 / (4000 * expected[kept])).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 3.1 * math.sqrt(2 * freedom) + 8


def _filtered(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    probabilities[probabilities < min_p * probabilities.max()] = 0
    order = probabilities.argsort(descending=True)
    if top_k:
        probabilities[order[top_k:]] = 0
    mass = 0.0
    total = float(probabilities.sum())
    for token_id in order.tolist():
        if mass >= top_p * total:
            probabilities[token_id] = 0
        mass += float(probabilities[token_id])
    return probabilities / probabilities.sum()


def test_top_k_beyond_the_vocabulary_is_no_filter():
    """Case D15."""
    logits = random_logits(1)[0]
    assert [draw(logits, seed=s, top_k=9_999_999) for s in range(50)] == [draw(logits, seed=s) for s in range(50)]
    assert [draw(logits, seed=s, top_k=-1) for s in range(50)] == [draw(logits, seed=s, top_k=0) for s in range(50)]


def test_logit_bias_forces_and_forbids():
    """Case D16."""
    logits = random_logits(1)[0]
    best = int(logits.argmax())
    assert draw(logits, temperature=0.0, logit_bias={42: 100.0}) == 42
    assert draw(logits, temperature=0.0, logit_bias={best: -100.0}) != best


def test_end_tokens_are_held_back_below_min_tokens():
    """Case D21: every end-of-sequence id and every stop id."""
    logits = torch.zeros(VOCAB)
    logits[[3, 7, 11]] = 50.0
    for length in range(3):
        [token] = sampler().sample(
            logits.clone()[None],
            [sequence(output=[5] * length, temperature=0.0, min_tokens=3, stop_token_ids=(11,))],
        )
        assert token.token_id not in {3, 7, 11}
    [token] = sampler().sample(logits.clone()[None], [sequence(output=[5] * 3, temperature=0.0, min_tokens=3)])
    assert token.token_id == 3


def test_penalties_look_at_the_output_and_repetition_at_the_prompt_too():
    logits = torch.zeros(VOCAB)
    logits[4], logits[6] = 2.0, 1.9
    greedy = {"temperature": 0.0}
    row = logits[None]
    seen = sequence(output=[4], presence_penalty=0.5, **greedy)
    assert sampler().sample(row.clone(), [seen])[0].token_id == 6
    in_prompt_only = sequence(prompt=[4], presence_penalty=0.5, **greedy)
    assert sampler().sample(row.clone(), [in_prompt_only])[0].token_id == 4
    repeated = sequence(prompt=[4], repetition_penalty=1.5, **greedy)
    assert sampler().sample(row.clone(), [repeated])[0].token_id == 6


def test_placeholders_neither_trip_nor_distort_penalties():
    """Case C20: the placeholder's id lies beyond the sampled vocabulary."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 1.0
    with_image = sequence(prompt=[VOCAB + 5] * 9 + [1], repetition_penalty=1.05, temperature=0.0)
    assert sampler().sample(logits, [with_image])[0].token_id == 4


def test_a_row_that_is_not_finite_fails_alone():
    """Case D26."""
    logits = random_logits(3)
    expected = sampler().sample(logits.clone(), [sequence(temperature=0.0)] * 3)
    broken = logits.clone()
    broken[1, 17] = float("nan")
    first, middle, last = sampler().sample(broken, [sequence(temperature=0.0)] * 3)
    assert middle.error is not None
    assert (first.token_id, last.token_id) == (expected[0].token_id, expected[2].token_id)


def test_logprobs_are_the_models_own_before_any_transform():
    logits = random_logits(1)[0]
    [token] = sampler().sample(
        logits.clone()[None], [sequence(temperature=0.3, seed=1, logprobs=4, logit_bias={5: 10.0})]
    )
    expected = torch.log_softmax(logits, dim=-1)
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]))
    assert token.logprobs.top_token_ids == expected.topk(4).indices.tolist()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_temperature_next_to_zero_is_greedy(filters: dict[str, Any]):
    """Dividing by it makes fp32 logits infinite, and an infinite logit must not open the way to banned tokens."""
    logits = random_logits(1)[0]
    assert draw(logits, temperature=1e-40, seed=1, **filters) == int(logits.argmax())
