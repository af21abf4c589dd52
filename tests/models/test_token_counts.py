"""What penalties look at: kept from step to step, it is what counting anew would give."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.runner.token_counts import TokenCounts
from shared.sampling import SamplingParams

VOCAB = 7
TOKENS = st.lists(st.integers(0, VOCAB + 1), max_size=20)  # beyond the vocabulary: rows of images
CPU = torch.device("cpu")
PENALTIES = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25)


def penalized(prompt: list[int], generated: list[int], row: torch.Tensor) -> torch.Tensor:
    """By the formulas of the OpenAI API and of Keskar et al., CTRL (2019)."""
    expected = row.clone()
    for token_id in range(VOCAB):
        if token_id in prompt or token_id in generated:
            expected[token_id] = row[token_id] / 1.3 if row[token_id] > 0 else row[token_id] * 1.3
        count = generated.count(token_id)
        expected[token_id] -= 0.5 * count + 0.25 * (count > 0)
    return expected


@settings(deadline=None)
@given(prompt=TOKENS, steps=st.lists(st.tuples(TOKENS, st.integers(0, 15)), max_size=8), seed=st.integers(0, 99))
def test_an_answer_that_grows_and_guesses_that_fail_are_counted_as_if_anew(
    prompt: list[int], steps: list[tuple[list[int], int]], seed: int
):
    """Every step verifies a draft, position by position, of which only the beginning becomes the answer's own."""
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    counts = TokenCounts(PENALTIES, prompt, VOCAB, CPU)
    answer: list[int] = []
    for draft, num_held in steps:
        for num_guessed in range(min(len(draft), 15) + 1):
            generated = answer + draft[:num_guessed]
            adjusted = row.clone()
            counts.apply(adjusted, generated)
            torch.testing.assert_close(adjusted, penalized(prompt, generated, row))
        answer = [*answer, *draft[:num_held], num_held % VOCAB]


def test_forbidden_tokens_stay_forbidden():
    row = torch.full((VOCAB,), float("-inf"))
    row[2] = 1.0
    TokenCounts(PENALTIES, [0, 1, 2], VOCAB, CPU).apply(row, [0, 0, 3])
    assert row.argmax() == 2
    assert torch.isneginf(row).sum() == VOCAB - 1
