"""SamplingParams: every field has a range, and a value outside it is refused by name."""

from __future__ import annotations

import dataclasses
import math

import pytest

from shared.errors import InvalidRequest
from shared.sampling import (
    MAX_CHOICES,
    MAX_PROMPT_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


def refusal(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    return caught.value


def test_the_defaults_sample_one_plain_choice():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, None)
    assert not params.is_greedy
    assert not params.needs_token_counts


def test_params_cannot_be_changed_after_the_check():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 5.0


@pytest.mark.parametrize("name", RANGES)
def test_both_ends_of_a_range_are_allowed_and_nothing_beyond(name: str):
    low, high = RANGES[name]
    for value in (low, high, (low + high) / 2, int(high)):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf)):
        error = refusal(**{name: value})
        assert error.param == name
        assert f"from {low} to {high}" in error.message
        assert str(value) in error.message


@pytest.mark.parametrize("name", [*RANGES, "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "0.5", None, True, [0.5]])
def test_what_is_not_a_finite_number_is_refused(name: str, value: object):
    """Case D17."""
    error = refusal(**{name: value})
    assert error.param == name
    assert error.status == 400


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_a_number_too_large_for_a_float_is_refused_like_any_other(value: int):
    assert refusal(temperature=value).param == "temperature"


def test_repetition_penalty_stays_positive():
    assert SamplingParams(repetition_penalty=10).repetition_penalty == 10
    assert refusal(repetition_penalty=0).param == "repetition_penalty"
    assert refusal(repetition_penalty=10.5).param == "repetition_penalty"


@pytest.mark.parametrize("value", [0, -1, 1.5, 1.0, "5", True, math.nan])
def test_max_tokens_is_a_whole_number_of_at_least_one(value: object):
    """Case D19."""
    error = refusal(max_tokens=value)
    assert error.param == "max_tokens"
    assert "at least 1" in error.message


@pytest.mark.parametrize("value", [1, 2**31 - 1, 10**18])
def test_a_huge_max_tokens_is_for_the_context_to_clamp(value: int):
    assert SamplingParams(max_tokens=value).max_tokens == value


def test_min_tokens_fits_below_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=5).min_tokens == 5
    assert refusal(min_tokens=-1).param == "min_tokens"
    error = refusal(min_tokens=6, max_tokens=5)
    assert error.param == "min_tokens"
    assert "6" in error.message
    assert "5" in error.message


@pytest.mark.parametrize("value", [0, -1, 1, 50, 9_999_999])
def test_top_k_may_be_off_or_larger_than_any_vocabulary(value: int):
    """Case D15."""
    assert SamplingParams(top_k=value).top_k == value


@pytest.mark.parametrize("value", [-2, -5, 1.5, "5", True])
def test_another_top_k_is_refused(value: object):
    assert refusal(top_k=value).param == "top_k"


@pytest.mark.parametrize("value", [0, -1, MAX_CHOICES + 1, 1.0, True])
def test_the_number_of_choices_is_bounded(value: object):
    assert SamplingParams(n=MAX_CHOICES).n == MAX_CHOICES
    error = refusal(n=value)
    assert error.param == "n"
    assert f"from 1 to {MAX_CHOICES}" in error.message


def test_logit_bias_takes_token_ids_and_biases_up_to_a_hundred():
    assert SamplingParams(logit_bias={42: 100, 43: -100, 0: 0.5}).logit_bias == {42: 100, 43: -100, 0: 0.5}


@pytest.mark.parametrize(
    ("bias", "named"), [({-1: 5}, "-1"), ({"abc": 1}, "abc"), ({5: 1000}, "5"), ({7: math.nan}, "7"), ({8: "1"}, "8")]
)
def test_a_bad_logit_bias_names_its_key(bias: dict[object, object], named: str):
    """Case D16; ids beyond the vocabulary are known to the engine only."""
    error = refusal(logit_bias=bias)
    assert error.param == "logit_bias"
    assert named in error.message


def test_stop_strings_are_few_and_not_empty():
    assert SamplingParams(stop=("a",) * MAX_STOP_STRINGS).stop == ("a",) * MAX_STOP_STRINGS
    assert refusal(stop=("a",) * (MAX_STOP_STRINGS + 1)).param == "stop"
    assert refusal(stop=("a", "")).param == "stop"
    assert refusal(stop=(5,)).param == "stop"


def test_one_stop_string_is_not_taken_for_many():
    try:
        stop = SamplingParams(stop="END").stop
    except InvalidRequest:
        return
    assert stop == ("END",)


@pytest.mark.parametrize("value", [-1, 1.5, "5", True])
def test_a_bad_stop_token_id_is_refused(value: object):
    assert refusal(stop_token_ids=(1, value)).param == "stop_token_ids"


@pytest.mark.parametrize("seed", [None, 0, -7, MAX_SEED, -MAX_SEED])
def test_a_seed_is_any_whole_number_of_64_bits(seed: int | None):
    assert SamplingParams(seed=seed).seed == seed


@pytest.mark.parametrize("seed", [MAX_SEED + 1, -MAX_SEED - 2, 1.5, "1", True])
def test_another_seed_is_refused(seed: object):
    assert refusal(seed=seed).param == "seed"


def test_logprobs_are_none_or_up_to_the_limit():
    for value in (None, 0, MAX_TOP_LOGPROBS):
        assert SamplingParams(logprobs=value).logprobs == value
    for value in (-1, MAX_TOP_LOGPROBS + 1, True):
        assert refusal(logprobs=value).param == "logprobs"


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}])
def test_every_way_to_keep_one_token_is_greedy(fields: dict[str, int]):
    """Case D25."""
    assert SamplingParams(**fields).is_greedy


@pytest.mark.parametrize("fields", [{"temperature": 0.01}, {"top_k": 2}, {"top_p": 0.01}, {"min_p": 0.99}])
def test_anything_else_is_not_greedy(fields: dict[str, float]):
    assert not SamplingParams(**fields).is_greedy


@pytest.mark.parametrize("fields", [{"presence_penalty": 0.1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1}])
def test_each_penalty_needs_the_token_counts(fields: dict[str, float]):
    assert SamplingParams(**fields).needs_token_counts


@pytest.mark.parametrize("num_top", [0, 1, MAX_TOP_LOGPROBS])
def test_a_prompt_may_have_so_many_log_probabilities_and_no_more(num_top: int):
    params = SamplingParams(prompt_logprobs=num_top)
    longest = MAX_PROMPT_LOGPROBS // (1 + num_top)
    params.check_prompt_logprobs(longest)
    with pytest.raises(InvalidRequest, match=str((longest + 1) * (1 + num_top))) as refused:
        params.check_prompt_logprobs(longest + 1)
    assert refused.value.param == "prompt_logprobs"
    SamplingParams().check_prompt_logprobs(10 * longest)
