"""A draft model in the scheduler: its cache is right whatever happens to blocks, and it is asked where that pays.

The apprentice complains of every key in its cache that is wrong. Any traffic with it: test_scheduler_properties.py.
"""

from __future__ import annotations

import pytest

from services.text_engine.core.sequence import ImageSpan, Sequence
from services.text_engine.core.speculation.draft_choice import Guess, UndraftedStep
from services.text_engine.core.speculation.draft_model import MAX_CATCH_UP_TOKENS, Candidate, plan_drafting
from services.text_engine.core.speculation.draft_progress import (
    PRIOR_HIT_RATE,
    RETRY_AFTER_STEPS,
    DraftProgress,
    HitRate,
)
from services.text_engine.core.speculation.step_costs import StepCosts
from tests.unit.apprentice import CHEAP, FREE, Apprentice
from tests.unit.test_scheduler import CAT, Driver, Images, answer_alone, make_sequence

# As measured for a model and one of a tenth of its size on two cores.
STEPS = StepCosts([(1, 0.020), (4, 0.021), (8, 0.024), (16, 0.040), (32, 0.080)])
DRAFTS = StepCosts([(1, 0.002), (8, 0.003), (128, 0.040)])


def candidate(hit_rate: float, name: str = "a", *, max_guesses: int = 8, catch_up_s: float = 0.0) -> Candidate:
    progress = DraftProgress(HitRate(hit_rate, outcome_weight=0.1))
    return Candidate(make_sequence(name, 9), progress, max_guesses, catch_up_s)


def plan(*candidates: Candidate, guesses: dict[Sequence, Guess] | None = None, costs: StepCosts = STEPS):
    step = UndraftedStep(len(candidates), len(candidates), 99)
    return plan_drafting(list(candidates), guesses or {}, costs, DRAFTS, step)


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_right", [0, 1, 3, 99])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_answers_are_the_same_with_a_draft_model_of_any_quality(num_right: int, block_size: int):
    driver = Driver(block_size=block_size, num_blocks=256 // block_size)
    apprentice = Apprentice(num_right)
    apprentice.joins(driver)
    driver.add(a := make_sequence("a", 11, max_tokens=37), b := make_sequence("b", 16, max_tokens=23))
    driver.run()
    assert a.generated_token_ids == answer_alone(a)
    assert b.generated_token_ids == answer_alone(b)
    assert apprentice.calls


def test_guesses_of_a_model_that_is_always_right_save_a_step_each():
    driver = Driver()
    apprentice = Apprentice()
    apprentice.joins(driver)
    driver.add(a := make_sequence("a", 10, max_tokens=16))
    assert [driver.step() for _ in range(4)] == [{"a": 10}, {"a": 5}, {"a": 5}, {"a": 5}]
    assert a.generated_token_ids == answer_alone(a)
    counts = driver.scheduler.draft_counts["draft_model"]
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 12, 12)


def test_it_takes_in_each_token_once_but_for_the_last_guess_which_it_never_computed():
    driver = Driver()
    apprentice = Apprentice()
    apprentice.joins(driver)
    driver.add(make_sequence("a", 10, max_tokens=16))
    driver.run()
    assert [(row.start, row.end) for rows in apprentice.calls for row in rows] == [(0, 11), (14, 16), (19, 21)]


def test_after_a_mistake_it_goes_on_from_what_held():
    driver = Driver()
    apprentice = Apprentice(num_right=2)
    apprentice.joins(driver)
    driver.add(a := make_sequence("a", 10, max_tokens=30))
    driver.run()
    assert [(row.start, row.end) for rows in apprentice.calls[:3] for row in rows] == [(0, 11), (13, 14), (16, 17)]
    assert a.generated_token_ids == answer_alone(a)


# --- its cache ------------------------------------------------------------------------------------------------------


def test_what_it_computed_for_one_sequence_it_knows_of_another_with_the_same_beginning():
    driver = Driver()
    apprentice = Apprentice()
    apprentice.joins(driver)
    driver.add(a := make_sequence("a", 30, max_tokens=12))
    driver.run()
    apprentice.num_computed = 0
    driver.add(b := make_sequence("b", [*a.token_ids[:37], 5, 6, 7], max_tokens=12))
    driver.run()
    assert b.generated_token_ids == answer_alone(b)
    assert apprentice.calls[-1][0].sequence is b
    assert apprentice.num_computed <= 40 - 36 + 12


def test_what_the_prefix_cache_has_and_it_has_not_it_takes_in():
    driver = Driver()
    driver.add(a := make_sequence("a", 30, max_tokens=12))
    driver.run()
    apprentice = Apprentice()
    apprentice.joins(driver)
    driver.add(b := make_sequence("b", [*a.token_ids[:37], 5, 6, 7], max_tokens=12))
    driver.run()
    assert b.num_cached_tokens == 36
    assert apprentice.calls[0][0].start == 0
    assert b.generated_token_ids == answer_alone(b)


def test_blocks_that_were_reused_meanwhile_are_computed_anew():
    driver = Driver(num_blocks=12, block_size=4)
    apprentice = Apprentice()
    drafter = apprentice.joins(driver)
    driver.add(a := make_sequence("a", 20, max_tokens=9))
    driver.run()
    driver.scheduler.drafter = (
        None  # the target alone fills the same blocks with something else, and then with the same
    )
    driver.add(make_sequence("b", 40, max_tokens=4))
    driver.run()
    driver.add(make_sequence("c", a.token_ids[:20], max_tokens=2))
    driver.run()
    driver.scheduler.drafter = drafter
    driver.add(d := make_sequence("d", a.token_ids[:20], max_tokens=9))
    driver.run()
    assert d.generated_token_ids == answer_alone(d)


def test_a_sequence_that_was_preempted_is_taken_in_again():
    driver = Driver(num_blocks=8, block_size=4)
    Apprentice(num_right=1).joins(driver)
    sequences = [make_sequence(name, 7, max_tokens=24) for name in "abc"]
    driver.add(*sequences)
    driver.run()
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    assert [s.generated_token_ids for s in sequences] == [answer_alone(s) for s in sequences]


def test_without_a_free_block_there_is_no_guess_and_nobody_is_preempted():
    driver = Driver(num_blocks=6, block_size=4, caching=False)
    apprentice = Apprentice()
    apprentice.joins(driver)
    driver.add(a := make_sequence("a", 11, max_tokens=5), b := make_sequence("b", 11, max_tokens=1))
    driver.run()
    assert a.num_preemptions == b.num_preemptions == 0
    assert [s.generated_token_ids for s in (a, b)] == [answer_alone(s) for s in (a, b)]


def test_a_long_prompt_is_taken_in_over_several_steps_and_holds_up_no_short_one():
    driver = Driver(num_blocks=600, max_num_batched_tokens=2000)
    apprentice = Apprentice()
    apprentice.joins(driver)
    long = make_sequence("long", 2 * MAX_CATCH_UP_TOKENS + 9, max_tokens=40)
    driver.add(long, short := make_sequence("short", 20, max_tokens=40))
    driver.step()
    while not any(row.sequence is long and row.num_guesses for rows in apprentice.calls for row in rows):
        driver.step()
    assert len(apprentice.calls) == 3
    for rows in apprentice.calls:
        assert sum(row.end - row.start for row in rows) <= MAX_CATCH_UP_TOKENS
        assert rows[0].sequence is short
        assert rows[0].num_guesses
    driver.run()
    assert long.generated_token_ids == answer_alone(long)


# --- who is asked ---------------------------------------------------------------------------------------------------


def test_it_is_not_asked_about_pictures():
    driver = Driver(images=Images(CAT))
    apprentice = Apprentice()
    apprentice.joins(driver)
    driver.add(a := make_sequence("a", 30, max_tokens=17, images=(ImageSpan(CAT, 12, 15),)))
    driver.run()
    assert not apprentice.calls
    assert a.generated_token_ids == answer_alone(a)


def test_it_is_not_asked_about_a_text_with_a_token_that_it_does_not_know():
    driver = Driver()
    apprentice = Apprentice(vocab_size=2000)
    apprentice.joins(driver)
    driver.add(make_sequence("a", [5, 6, 3000, 7], max_tokens=9))
    driver.run()
    assert not apprentice.calls
    driver.add(make_sequence("b", [5, 6, 7], max_tokens=9))
    driver.run()
    assert apprentice.calls


def test_it_guesses_no_further_than_its_positions_go():
    driver = Driver()
    apprentice = Apprentice(max_model_len=20)
    apprentice.joins(driver)
    driver.add(a := make_sequence("a", 10, max_tokens=30))
    driver.run()
    assert max(row.end + row.num_guesses for rows in apprentice.calls for row in rows) == 20
    assert a.generated_token_ids == answer_alone(a)


@pytest.mark.parametrize(("hit_rate", "method"), [(0.1, "ngram"), (0.9, "draft_model")])
def test_of_the_text_and_the_model_whoever_is_likelier_to_be_right_guesses(hit_rate: float, method: str):
    apprentice = Apprentice()
    drafter = apprentice.joins(Driver())
    a = make_sequence("a", [*range(100, 120), *range(100, 110)], max_tokens=9)
    a.block_table = list(range(9))
    a.draft_progress = DraftProgress(HitRate(hit_rate, outcome_weight=0.1))
    assert drafter.propose([a], num_step_tokens=1, max_draft_tokens=9)[a].method == method
    assert bool(apprentice.calls) is (method == "draft_model")


def test_a_model_that_is_always_wrong_is_soon_left_alone():
    driver = Driver(num_blocks=256)
    apprentice = Apprentice(num_right=0)
    drafter = apprentice.joins(driver, STEPS, DRAFTS)
    driver.add(a := make_sequence("a", 10, max_tokens=300))
    driver.run()
    assert a.generated_token_ids == answer_alone(a)
    assert len(apprentice.calls) < 40
    num_calls = len(apprentice.calls)
    for i in range(4):
        driver.add(make_sequence(f"b{i}", 10, max_tokens=40))
        driver.run()
    assert len(apprentice.calls) - num_calls < 30
    assert drafter.hit_rate.value < 0.3


def test_what_was_given_up_is_tried_again_some_time():
    rate = HitRate(0.0, outcome_weight=0.1)
    for _ in range(RETRY_AFTER_STEPS):
        rate.forget_a_little()
    assert 0.5 * PRIOR_HIT_RATE < rate.value < PRIOR_HIT_RATE
    good = HitRate(0.9, outcome_weight=0.1)
    good.forget_a_little()
    assert good.value == 0.9


def test_a_model_that_fails_is_not_asked_again_and_answers_go_on():
    driver = Driver()
    apprentice = Apprentice()
    apprentice.joins(driver)
    driver.add(a := make_sequence("a", 10, max_tokens=30))
    for _ in range(3):
        driver.step()
    apprentice.is_broken = True
    driver.step()
    apprentice.is_broken = False
    num_calls = len(apprentice.calls)
    driver.run()
    assert len(apprentice.calls) == num_calls
    assert a.generated_token_ids == answer_alone(a)


# --- how long drafts are --------------------------------------------------------------------------------------------


def test_good_guesses_make_long_drafts_and_bad_ones_none():
    lengths = [plan(candidate(rate))[1] for rate in (0.02, 0.5, 0.8, 0.98)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[3] == 8


def test_drafts_that_cost_as_much_as_the_step_they_save_are_not_made():
    dear = StepCosts([(1, 0.02), (8, 0.02)])
    assert plan_drafting([candidate(0.9)], {}, STEPS, dear, UndraftedStep(1, 1, 99)) == (0, 0)
    assert plan_drafting([candidate(0.9)], {}, STEPS, DRAFTS, UndraftedStep(1, 1, 99))[0] == 1


def test_only_those_are_asked_for_whose_guesses_are_good_enough():
    best = [candidate(0.9, "a"), candidate(0.85, "b"), candidate(0.01, "c")]
    assert plan(*best)[0] == 2


def test_an_answer_that_is_nearly_over_does_not_pay_for_its_long_prompt():
    assert plan(candidate(0.8))[0] == 1
    assert plan(candidate(0.8, catch_up_s=0.100))[0] == 0


def test_no_more_is_drafted_than_the_step_has_room_for():
    rows = [candidate(0.95, name) for name in "abc"]
    num_asked, length = plan_drafting(rows, {}, FREE, CHEAP, UndraftedStep(3, 3, 7))
    assert num_asked * length <= 7


def test_the_model_is_not_asked_where_guesses_from_the_text_make_as_many_tokens_for_nothing():
    row = candidate(0.5)
    certain = {row.sequence: Guess([1, 2, 3, 4], [0.49, 0.48, 0.47, 0.46], "ngram")}
    assert plan(row, guesses=certain) == (0, 0)
