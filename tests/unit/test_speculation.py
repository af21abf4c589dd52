"""Which guesses are verified: as many as make most tokens a second, by what steps cost and how often guesses held."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.core.batch import Draft
from services.text_engine.core.speculation.draft_choice import (
    CAUTION,
    MAX_GUESSING_ROWS,
    UndraftedStep,
    choose,
    could_pay,
)
from services.text_engine.core.speculation.interface import DraftCounts
from services.text_engine.core.speculation.prompt_lookup_drafter import PromptLookupDrafter
from services.text_engine.core.speculation.step_costs import StepCosts
from tests.unit.test_scheduler import make_sequence

FREE = StepCosts([(1, 1.0), (64, 1.0)])
BY_THE_TOKEN = StepCosts([(1, 1.0), (2, 2.0)])
# As measured for a small model on two cores: eight rows for the price of one, then each costs the same.
SMALL_CPU = StepCosts([(1, 0.024), (2, 0.024), (4, 0.025), (8, 0.027), (16, 0.052), (32, 0.104), (64, 0.208)])


def test_costs_are_straight_lines_between_what_was_measured_and_beyond():
    costs = StepCosts([(4, 2.0), (1, 1.0), (8, 6.0)])
    assert [costs.seconds(n) for n in (1, 2, 4, 6, 8, 12)] == pytest.approx([1.0, 4 / 3, 2.0, 4.0, 6.0, 10.0])


def test_a_longer_step_never_counts_as_cheaper_than_a_shorter_one():
    costs = StepCosts([(1, 1.0), (2, 0.7), (4, 0.9), (8, 2.0)])
    assert [costs.seconds(n) for n in (1, 2, 3, 4, 8)] == [1.0, 1.0, 1.0, 1.0, 2.0]


def test_where_nothing_is_known_of_longer_steps_nothing_is_tried():
    assert not could_pay(StepCosts([(1, 3.0)]), UndraftedStep(1, 1, 9))


def test_free_tokens_are_all_verified_and_dear_ones_never():
    sure = [[0.9, 0.8], [0.5]]
    assert choose(sure, FREE, UndraftedStep(2, 2, 9)).lengths == [2, 1]
    assert choose(sure, BY_THE_TOKEN, UndraftedStep(2, 2, 9)).lengths == [0, 0]


def test_a_lonely_answer_verifies_many_guesses_and_a_full_batch_none():
    good = [0.9**n for n in range(1, 9)]
    assert choose([good], SMALL_CPU, UndraftedStep(1, 1, 99)).lengths[0] >= 7
    assert not could_pay(SMALL_CPU, UndraftedStep(32, 32, 99))
    assert sum(choose([good] * 32, SMALL_CPU, UndraftedStep(32, 32, 99)).lengths) == 0


def test_what_is_left_of_a_step_goes_to_the_likeliest_guesses():
    choice = choose([[0.5, 0.3], [0.9, 0.7, 0.4]], FREE, UndraftedStep(2, 2, 3))
    assert choice.lengths == [1, 2]
    assert choice.num_tokens == 5
    assert choice.num_expected == pytest.approx(2 + CAUTION * (0.5 + 0.9 + 0.7))


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=4), max_size=4),
    st.lists(st.floats(0.01, 1), min_size=2, max_size=6),
    st.integers(0, 9),
    st.integers(0, 12),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_other_choice_would_make_more_tokens_a_second(
    rates: list[list[float]], increments: list[float], num_prompt_tokens: int, max_draft_tokens: int
):
    chances = [list(itertools.accumulate(draft, lambda a, b: a * b)) for draft in rates]
    costs = StepCosts(zip([1, 2, 4, 8, 16, 32], itertools.accumulate(increments), strict=False))
    num_decodes = len(chances) + 1

    def tokens_a_second(lengths: tuple[int, ...]) -> float:
        expected = sum(sum(draft[:length]) for draft, length in zip(chances, lengths, strict=True))
        num_tokens = num_decodes + num_prompt_tokens + sum(lengths)
        return (num_decodes + CAUTION * expected) / costs.seconds(num_tokens)

    choice = choose(chances, costs, UndraftedStep(num_decodes, num_decodes + num_prompt_tokens, max_draft_tokens))
    choices = itertools.product(*(range(len(draft) + 1) for draft in chances))
    best = max(tokens_a_second(lengths) for lengths in choices if sum(lengths) <= max_draft_tokens)
    assert sum(choice.lengths) <= max_draft_tokens
    assert tokens_a_second(tuple(choice.lengths)) == pytest.approx(best)
    assert choice.tokens_per_s == pytest.approx(best)


def test_a_draft_ends_before_what_can_never_be_sampled():
    drafter = PromptLookupDrafter(FREE, num_speculative_tokens=5, never_sampled=frozenset({7}))
    sequence = make_sequence("a", [1, 2, 3, 7, 7, 7, 1, 2], max_tokens=20)
    image_next = make_sequence("b", [3, 7, 7, 7, 4, 4, 9, 3, 7], max_tokens=20)
    drafts = drafter.propose([sequence, image_next], num_step_tokens=2, max_draft_tokens=50)
    assert drafts == {sequence: Draft([3], "ngram")}


@pytest.mark.parametrize(("max_tokens", "longest"), [(1, 0), (2, 1), (4, 3), (9, 5)])
def test_a_draft_never_goes_beyond_what_the_answer_may_still_grow(max_tokens: int, longest: int):
    drafter = PromptLookupDrafter(FREE, num_speculative_tokens=5, never_sampled=frozenset())
    sequence = make_sequence("a", [1, 2, 3, 1, 2, 3, 1, 2], max_tokens=max_tokens)
    drafts = drafter.propose([sequence], num_step_tokens=1, max_draft_tokens=50)
    assert len(drafts[sequence].token_ids if longest else drafts) == longest


def test_a_full_batch_costs_no_look_at_any_text():
    drafter = PromptLookupDrafter(SMALL_CPU, num_speculative_tokens=5, never_sampled=frozenset())
    sequences = [make_sequence(f"r{i}", [1, 2, 1, 2]) for i in range(32)]
    assert drafter.propose(sequences, num_step_tokens=32, max_draft_tokens=100) == {}
    assert all(sequence.lookup is None for sequence in sequences)


def test_more_rows_than_were_measured_to_pay_take_no_guesses_however_cheap_steps_seem():
    drafter = PromptLookupDrafter(FREE, num_speculative_tokens=5, never_sampled=frozenset())
    sequences = [make_sequence(f"r{i}", [1, 2, 3, 1, 2, 3, 1, 2]) for i in range(MAX_GUESSING_ROWS + 1)]
    step = {"num_step_tokens": len(sequences), "max_draft_tokens": 100}
    assert drafter.propose(sequences, **step) == {}
    assert drafter.propose(sequences[1:], **step)


def test_counts_say_at_which_position_guesses_held():
    counts = DraftCounts()
    for num_draft_tokens, num_accepted in ((3, 2), (3, 0), (5, 3), (1, 1)):
        counts.note(num_draft_tokens, num_accepted)
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (4, 12, 6)
    assert counts.num_accepted_per_position == [3, 2, 1]
