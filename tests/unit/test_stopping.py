"""When a sequence ends because of its tokens."""

from __future__ import annotations

import pytest

from services.text_engine.core.sequence import Sequence
from services.text_engine.core.stopping import Finish, check_stop
from shared.sampling import SamplingParams

EOS, OTHER_EOS = 2, 3
EOS_IDS = {EOS, OTHER_EOS}
PROMPT = [10, 11, 12]


def check(generated: list[int], *, max_total_tokens: int = 100, **sampling: object) -> Finish | None:
    sequence = Sequence("r", PROMPT + generated, len(PROMPT), SamplingParams(**sampling), max_total_tokens)
    return check_stop(sequence, EOS_IDS)


def first_finish(tokens: list[int], *, max_total_tokens: int = 100, **sampling: object) -> tuple[int, Finish]:
    """How many of `tokens` are generated until the sequence ends, and why it ends."""
    for count in range(1, len(tokens) + 1):
        finish = check(tokens[:count], max_total_tokens=max_total_tokens, **sampling)
        if finish is not None:
            return count, finish
    raise AssertionError("the sequence never ends")


def test_an_ordinary_token_goes_on():
    assert check([50]) is None


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_every_end_of_sequence_id_stops_and_is_no_part_of_the_text(eos: int):
    assert check([50, eos]) == Finish("stop", stop_reason=None, text_excludes_last=True)


def test_end_of_sequence_inside_the_prompt_or_earlier_in_the_answer_is_not_looked_at():
    assert check([EOS, 50]) is None


def test_a_stop_token_names_itself_as_the_reason():
    assert check([50, 60], stop_token_ids=(60,)) == Finish("stop", stop_reason=60, text_excludes_last=True)


def test_ignore_eos_runs_on_to_the_last_allowed_token():
    count, finish = first_finish([EOS] * 20, ignore_eos=True, max_total_tokens=len(PROMPT) + 9)
    assert (count, finish) == (9, Finish("length"))


def test_an_explicit_stop_token_stops_even_if_eos_is_ignored():
    assert check([EOS], ignore_eos=True, stop_token_ids=(EOS,)) == Finish(
        "stop", stop_reason=EOS, text_excludes_last=True
    )


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_min_tokens_other_tokens_come_before_the_end_token(min_tokens: int, eos: int):
    """Case D21: m other tokens, then end-of-sequence as token m + 1."""
    count, finish = first_finish([eos] * 20, min_tokens=min_tokens)
    assert count == min_tokens + 1
    assert finish.reason == "stop"


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_min_tokens_holds_for_stop_tokens_as_well(min_tokens: int):
    count, finish = first_finish([60] * 20, min_tokens=min_tokens, stop_token_ids=(60,))
    assert count == min_tokens + 1
    assert finish.stop_reason == 60


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_the_length_limit_is_exact(max_tokens: int):
    count, finish = first_finish([50] * 20, max_total_tokens=len(PROMPT) + max_tokens)
    assert (count, finish) == (max_tokens, Finish("length", stop_reason=None, text_excludes_last=False))


def test_an_end_token_in_the_last_allowed_place_is_a_stop():
    limit = len(PROMPT) + 2
    assert check([50, EOS], max_total_tokens=limit) == Finish("stop", text_excludes_last=True)
    assert check([50, 60], max_total_tokens=limit, stop_token_ids=(60,)).stop_reason == 60


def test_the_length_limit_wins_over_min_tokens():
    """The context can be shorter than min_tokens asks for."""
    count, finish = first_finish([EOS] * 20, min_tokens=10, max_total_tokens=len(PROMPT) + 4)
    assert (count, finish.reason) == (4, "length")


def test_a_prompt_that_fills_the_context_still_ends():
    assert check([50], max_total_tokens=len(PROMPT)) == Finish("length")
