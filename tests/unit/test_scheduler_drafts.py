"""Guesses in the scheduler: right ones save steps, wrong ones leave no trace, and nobody gives anything up for them.

The runner keeps a real, small KV cache (test_scheduler.py): a key written by a guess that did not hold would change the
answer if anything ever read it. Any traffic with guesses: test_scheduler_properties.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.text_engine.core.batch import SampledToken
from services.text_engine.core.sequence import ImageSpan, Sequence
from services.text_engine.core.stopping import Finish
from tests.unit.guesser import Guesser
from tests.unit.test_scheduler import CAT, EOS, Driver, Images, answer_alone, check_at_rest, make_sequence


@pytest.mark.parametrize("num_right", [0, 1, 2, 4, 99])
@pytest.mark.parametrize("num_guesses", [1, 3, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_an_answer_is_the_same_with_guesses_of_any_quality(num_right: int, num_guesses: int, block_size: int):
    driver = Driver(block_size=block_size, num_blocks=256 // block_size, drafter=Guesser(num_right, num_guesses))
    driver.add(a := make_sequence("a", 11, max_tokens=37), b := make_sequence("b", 16, max_tokens=23))
    driver.run()
    assert a.generated_token_ids == answer_alone(a)
    assert b.generated_token_ids == answer_alone(b)


def test_guesses_that_hold_save_a_step_each():
    driver = Driver(drafter=Guesser(99, num_guesses=3))
    driver.add(a := make_sequence("a", 10, max_tokens=14))
    assert [driver.step() for _ in range(5)] == [{"a": 10}, {"a": 4}, {"a": 4}, {"a": 4}, {"a": 1}]
    assert a.generated_token_ids == answer_alone(a)
    counts = driver.scheduler.draft_counts["ngram"]
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 9, 9)
    assert counts.num_accepted_per_position == [3, 3, 3]


def test_of_a_draft_the_part_before_the_mistake_is_kept_and_the_model_goes_on_from_there():
    driver = Driver(drafter=Guesser(2, num_guesses=5))
    driver.add(a := make_sequence("a", 10, max_tokens=30))
    driver.step()
    driver.step()
    assert a.num_generated_tokens == 1 + 2 + 1
    assert a.num_computed_tokens == a.num_tokens - 1
    assert driver.scheduler.draft_counts["ngram"].num_accepted_per_position == [1, 1]


def test_each_token_of_a_step_is_an_output_of_its_own_in_order():
    driver = Driver(drafter=Guesser(99, num_guesses=3))
    driver.add(a := make_sequence("a", 10, max_tokens=5))
    driver.step()
    outputs = driver.update(driver.schedule())
    assert [output.sampled.token_id for output in outputs] == answer_alone(a)[1:]
    assert [output.num_generated_tokens for output in outputs] == [2, 3, 4, 5]
    assert [output.finish for output in outputs] == [None, None, None, Finish("length")]


@pytest.mark.parametrize("position", [1, 2, 3, 4, 5])
def test_an_end_token_among_guesses_ends_the_answer_there(position: int):
    driver = Driver(drafter=Guesser(99, num_guesses=5))

    def with_end(sequence: Sequence, sampled: SampledToken) -> SampledToken:
        tokens = [*sampled.accepted, replace(sampled, accepted=())]
        index = position - sequence.num_generated_tokens
        if 0 <= index < len(tokens):
            tokens[index] = SampledToken(EOS)
        return replace(tokens[-1], accepted=tuple(tokens[:-1]))

    driver.rewrite = with_end
    driver.add(a := make_sequence("a", 10, max_tokens=20))
    driver.run()
    assert a.generated_token_ids == [*answer_alone(a)[:position], EOS]
    assert driver.finished["a"] == Finish("stop", text_excludes_last=True)
    assert driver.pool.num_referenced == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7])
def test_no_guess_goes_beyond_the_last_token_allowed(max_tokens: int):
    driver = Driver(num_blocks=4, block_size=4, drafter=Guesser(99))
    driver.add(a := make_sequence("a", 9, max_tokens=max_tokens))
    driver.run()
    assert a.generated_token_ids == answer_alone(a)
    assert a.num_preemptions == 0


def test_an_error_after_guesses_that_held_ends_the_sequence_and_unpublishes_what_it_wrote():
    driver = Driver(drafter=Guesser(99, num_guesses=5))
    driver.rewrite = lambda sequence, sampled: (
        replace(sampled, token_id=-1, error="logits are not finite") if sampled.accepted else sampled
    )
    driver.add(a := make_sequence("a", 10, max_tokens=20))
    driver.run()
    assert driver.finished["a"] == Finish("abort")
    assert a.generated_token_ids == answer_alone(a)[:6]
    assert driver.pool.num_cached == 0
    assert driver.pool.num_free == driver.pool.num_blocks


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_blocks_that_only_wrong_guesses_reached_are_given_back_at_once():
    driver = Driver(block_size=4, drafter=Guesser(0, num_guesses=9))
    driver.add(a := make_sequence("a", 7, max_tokens=30))
    driver.step()
    batch = driver.schedule()
    assert len(a.block_table) == 5
    driver.update(batch)
    assert len(a.block_table) == 2
    assert driver.pool.num_referenced == 2


def test_only_tokens_that_held_are_found_by_later_prompts():
    driver = Driver(block_size=4, drafter=Guesser(2, num_guesses=9))
    driver.add(a := make_sequence("a", 8, max_tokens=20))
    driver.run()
    driver.add(b := make_sequence("b", [*a.token_ids, 5, 6], max_tokens=3))
    driver.run()
    assert b.num_cached_tokens == (a.num_tokens - 1) // 4 * 4
    assert b.generated_token_ids == answer_alone(b)


def test_nobody_is_preempted_for_a_guess():
    driver = Driver(num_blocks=7, block_size=4, caching=False, drafter=Guesser(0, num_guesses=9))
    driver.add(a := make_sequence("a", 11, max_tokens=5), b := make_sequence("b", 11, max_tokens=5))
    driver.run()
    assert a.num_preemptions == b.num_preemptions == 0
    assert [s.generated_token_ids for s in (a, b)] == [answer_alone(s) for s in (a, b)]


def test_a_sequence_that_was_preempted_with_guesses_goes_on_as_if_nothing_had_been():
    driver = Driver(num_blocks=8, block_size=4, drafter=Guesser(1, num_guesses=5))
    sequences = [make_sequence(name, 7, max_tokens=24) for name in "abc"]
    driver.add(*sequences)
    driver.run()
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    assert [s.generated_token_ids for s in sequences] == [answer_alone(s) for s in sequences]


def test_a_client_that_goes_away_while_its_guesses_are_verified_leaves_nothing_behind():
    driver = Driver(block_size=4, drafter=Guesser(99, num_guesses=9))
    driver.add(a := make_sequence("a", 7, max_tokens=30))
    driver.step()
    batch = driver.schedule()
    sampled = driver.runner.execute_model(batch)
    driver.scheduler.finish(a)
    assert driver.scheduler.update(batch, sampled) == []
    check_at_rest(driver)
    assert driver.pool.num_referenced == 0


# --- the step's budget ----------------------------------------------------------------------------------------------


def test_guesses_get_what_prompts_and_decodes_leave_of_a_step():
    driver = Driver(max_num_batched_tokens=16, drafter=Guesser(99, num_guesses=9))
    driver.add(make_sequence("a", 4, max_tokens=30))
    driver.step()
    driver.add(make_sequence("b", 25, max_tokens=30))
    assert driver.step() == {"a": 1, "b": 15}
    assert driver.step() == {"a": 1 + 5, "b": 10}
    assert driver.step() == {"a": 10, "b": 1 + 5}


def test_a_limit_on_prompts_leaves_guesses_their_room():
    driver = Driver(max_num_batched_tokens=16, max_prefill_tokens_while_decoding=8, drafter=Guesser(99, num_guesses=9))
    driver.add(make_sequence("a", 4, max_tokens=30))
    driver.step()
    driver.add(make_sequence("b", 25, max_tokens=30))
    assert driver.step() == {"a": 1 + 7, "b": 8}


def test_prompts_carry_no_guesses_and_images_before_them_stay_what_they_are():
    driver = Driver(images=Images(CAT), drafter=Guesser(1, num_guesses=4))
    driver.add(a := make_sequence("a", 30, max_tokens=17, images=(ImageSpan(CAT, 12, 15),)))
    assert driver.step() == {"a": 30}
    driver.run()
    assert a.generated_token_ids == answer_alone(a)
