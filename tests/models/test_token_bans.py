"""`allowed_token_ids` and `bad_words`, on a row of logits."""

from __future__ import annotations

import torch

from services.text_engine.core.sequence import Sequence
from services.text_engine.runner.sampler import NON_FINITE, Sampler
from services.text_engine.runner.token_bans import NOTHING_LEFT, TokenBans
from shared.sampling import SamplingParams

NEVER = float("-inf")


def left(bans: TokenBans, generated: list[int]) -> set[int]:
    row = torch.zeros(8)
    bans.apply(row, generated)
    return set(torch.isfinite(row).nonzero().flatten().tolist())


def test_without_words_only_what_is_allowed_is_left():
    assert left(TokenBans([2, 5, 5], [], 8), []) == {2, 5}


def test_the_last_token_of_a_word_is_forbidden_where_the_others_stand_before_it():
    bans = TokenBans([], [(3,), (4, 5), (6, 4, 1)], 8)
    all_but = set(range(8)).difference
    assert left(bans, []) == all_but({3})
    assert left(bans, [4]) == all_but({3, 5})
    assert left(bans, [6, 4]) == all_but({3, 5, 1})
    assert left(bans, [4, 6]) == all_but({3})


def test_words_are_forbidden_among_what_is_allowed():
    assert left(TokenBans([3, 4], [(3,)], 8), [7]) == {4}


def test_a_row_that_the_model_spoilt_is_not_laid_on_the_request():
    def error_of(row: list[float], bans: TokenBans) -> str | None:
        sequence = Sequence("r", [1, 2], 2, SamplingParams(temperature=0.0), 9)
        sequence.bans = bans
        [sampled] = Sampler(4, [], frozenset()).sample(torch.tensor([row]), [sequence])
        return sampled.error

    everything = TokenBans([3], [(3,)], 4)
    assert error_of([1.0, 2.0, 3.0, 4.0], everything) == NOTHING_LEFT
    assert error_of([1.0, float("nan"), 3.0, 4.0], everything) == NON_FINITE
    assert error_of([1.0, 2.0, 3.0, 4.0], TokenBans([3], [], 4)) is None
