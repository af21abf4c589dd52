"""Guesses out of a sequence's own text, against a search that simply tries everything."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.core.sequence import Sequence
from services.text_engine.core.speculation.prompt_lookup import (
    MAX_MATCH,
    MAX_OCCURRENCES,
    MAX_TOKENS_AT_ONCE,
    MIN_MATCH,
    NEW_OUTCOME_WEIGHT,
    PRIOR_HIT_RATES,
    PromptLookup,
)
from services.text_engine.core.speculation.prompt_lookup_drafter import PromptLookupDrafter
from services.text_engine.core.speculation.step_costs import StepCosts
from shared.sampling import SamplingParams


def lookup_of(token_ids: list[int], num_prompt_tokens: int | None = None) -> PromptLookup:
    lookup = PromptLookup(token_ids, len(token_ids) if num_prompt_tokens is None else num_prompt_tokens)
    assert lookup.catch_up()
    return lookup


def propose(token_ids: list[int], max_tokens: int) -> list[int]:
    return lookup_of(token_ids).propose(max_tokens)


def best_source(token_ids: list[int]) -> tuple[int, int]:
    """Position behind the longest earlier occurrence of the end, and its length, among the latest few; 0, 0: none."""
    end = len(token_ids)
    if end < MIN_MATCH:
        return 0, 0
    places = [
        position
        for position in range(end - 1, MIN_MATCH - 1, -1)
        if token_ids[position - MIN_MATCH : position] == token_ids[end - MIN_MATCH :]
    ][:MAX_OCCURRENCES]
    best = (0, 0)
    for place in places:
        length = max(
            n for n in range(MIN_MATCH, MAX_MATCH + 1) if n <= place and token_ids[place - n : place] == token_ids[-n:]
        )
        if length > best[1]:
            best = (place, length)
    return best


def continuation(token_ids: list[int], source: int, max_tokens: int) -> list[int]:
    """Copied one by one, so that a copy may run into itself."""
    grown = list(token_ids)
    for position in range(source, source + max_tokens):
        grown.append(grown[position])
    return grown[len(token_ids) :]


def test_what_followed_the_last_tokens_before_is_proposed():
    assert propose([1, 2, 3, 4, 5, 9, 2, 3], 3) == [4, 5, 9]


def test_of_several_occurrences_the_longest_match_wins():
    assert propose([8, 1, 2, 50, 9, 1, 2, 60, 7, 1, 2, 70, 8, 1, 2], 1) == [50]


def test_of_equally_long_matches_the_latest_wins():
    assert propose([1, 2, 50, 1, 2, 60, 1, 2], 1) == [60]


def test_a_single_shared_token_is_no_match():
    assert propose([1, 2, 3, 9, 3], 4) == []


@pytest.mark.parametrize("token_ids", [[], [5], [5, 6], [5, 6, 7]])
def test_a_text_that_repeats_nothing_gets_no_guess(token_ids: list[int]):
    assert propose(token_ids, 4) == []


def test_a_loop_goes_on_for_as_long_as_is_asked():
    assert propose([7, 1, 2, 3, 1, 2, 3, 1, 2], 8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert propose([4, 4, 4], 5) == [4] * 5


@given(
    st.lists(st.integers(0, 3), max_size=120),
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(1, 9),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_however_a_sequence_grew_its_guess_is_that_of_a_search_through_everything(
    token_ids: list[int], pieces: list[int], max_tokens: int
):
    growing: list[int] = []
    lookup = PromptLookup(growing, num_prompt_tokens=len(token_ids) // 3)
    ends = itertools.accumulate(itertools.cycle(pieces))
    while len(growing) < len(token_ids):
        growing += token_ids[len(growing) : next(ends)]
        assert lookup.catch_up()
        if len(growing) >= len(token_ids) // 3:
            source, length = best_source(growing)
            assert lookup.propose(max_tokens) == (continuation(growing, source, max_tokens) if length else [])


def test_a_long_text_is_taken_in_over_several_calls():
    rng = random.Random(0)
    token_ids = [rng.randrange(50) for _ in range(2 * MAX_TOKENS_AT_ONCE + 7)]
    lookup = PromptLookup(token_ids, len(token_ids))
    assert [lookup.catch_up() for _ in range(3)] == [False, False, True]
    source, length = best_source(token_ids)
    assert length >= MIN_MATCH
    assert lookup.propose(3) == token_ids[source : source + 3]


def test_a_step_reads_so_much_of_all_long_prompts_together_and_holds_up_no_short_one():
    def sequence(name: str, num_tokens: int) -> Sequence:
        return Sequence(name, [5, 6, 7] * num_tokens, 3 * num_tokens, SamplingParams(), 6 * num_tokens)

    long = [sequence(f"long {i}", MAX_TOKENS_AT_ONCE // 2) for i in range(3)]
    short = sequence("short", 20)
    everybody = [*long, short]
    drafter = PromptLookupDrafter(StepCosts([(1, 1.0), (64, 1.0)]), num_speculative_tokens=3, never_sampled=frozenset())
    num_known, num_steps = 0, 0
    while num_known < sum(each.num_tokens for each in everybody):
        drafts = drafter.propose(everybody, num_step_tokens=4, max_draft_tokens=60)
        assert drafts[short].token_ids == [5, 6, 7]
        lookups = [each.lookup for each in everybody if each.lookup is not None]
        before, num_known = num_known, sum(lookup.num_known for lookup in lookups)
        assert 0 < num_known - before <= MAX_TOKENS_AT_ONCE
        num_steps += 1
    assert set(drafts) == set(everybody)
    assert num_steps == 5


def test_one_pair_again_and_again_costs_no_more_looks_than_are_allowed():
    """A search looks at a fixed number of occurrences: an older, better one is not found."""
    between = [[1, 2, 100 + i] for i in range(MAX_OCCURRENCES)]
    assert propose([9, 1, 2, 50, *itertools.chain(*between[:-1]), 9, 1, 2], 1) == [50]
    assert propose([9, 1, 2, 50, *itertools.chain(*between), 9, 1, 2], 1) == [100 + MAX_OCCURRENCES - 1]


# --- how good guesses are -------------------------------------------------------------------------------------------


def test_before_anything_is_known_long_matches_are_trusted_more():
    rates = [PRIOR_HIT_RATES[length] for length in range(MIN_MATCH, MAX_MATCH + 1)]
    assert rates == sorted(rates)
    assert lookup_of([1, 2, 3, 1, 2]).chances(1) == [PRIOR_HIT_RATES[2]]


def test_the_chance_of_a_token_is_that_of_all_before_it_holding_too():
    chances = lookup_of([1, 2, 3, 4, 5, 6, 7, 8, 1, 2]).chances(6)
    expected = itertools.accumulate((PRIOR_HIT_RATES[min(n, MAX_MATCH)] for n in range(2, 8)), lambda a, b: a * b)
    assert chances == pytest.approx(list(expected))


def test_answers_that_repeat_the_prompt_raise_the_chances_without_a_single_draft():
    rng = random.Random(1)
    prompt = [rng.randrange(10_000) for _ in range(50)]
    lookup = lookup_of(token_ids := [*prompt, *prompt[:3]], num_prompt_tokens=50)
    before = lookup.chances(1)[0]
    for position in range(3, 30):
        token_ids.append(prompt[position])
    lookup.catch_up()
    assert before < 0.5
    assert lookup.chances(1)[0] > 0.95


def test_wrong_guesses_lower_the_chances_and_prompts_count_for_nothing():
    rng = random.Random(2)
    text = [token for _ in range(40) for token in (1, 2, rng.randrange(10, 10_000))]
    as_prompt = lookup_of([*text, 1, 2])
    as_answer = lookup_of([*text, 1, 2], num_prompt_tokens=0)
    assert as_prompt.chances(1) == [PRIOR_HIT_RATES[2]]
    assert as_answer.chances(1)[0] < PRIOR_HIT_RATES[2] * (1 - NEW_OUTCOME_WEIGHT) ** 10
