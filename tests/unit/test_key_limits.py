"""Limits of one API key: how many requests may begin, and how many may run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from services.gateway.auth import ANONYMOUS, Keyring
from services.gateway.key_limits import MINUTE_S, KeyLimits
from shared.errors import RateLimited, Unauthorized


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_limits_everything_enters():
    limits = KeyLimits(max_per_minute=None, max_running=None)
    for _ in range(1000):
        limits.enter("alice")


def test_a_refusal_says_when_to_come_back_and_coming_back_then_helps():
    clock = Clock()
    limits = KeyLimits(max_per_minute=6, max_running=None, clock=clock)
    for _ in range(6):
        limits.enter("alice")
    with pytest.raises(RateLimited) as refusal:
        limits.enter("alice")
    assert refusal.value.retry_after_s == pytest.approx(10)
    clock.now += 10.001
    limits.enter("alice")
    with pytest.raises(RateLimited):
        limits.enter("alice")


def test_a_place_that_is_given_back_can_be_taken_again():
    limits = KeyLimits(max_per_minute=None, max_running=1)
    limits.enter("alice")
    limits.enter("bob")
    with pytest.raises(RateLimited, match="at most 1 at a time"):
        limits.enter("alice")
    limits.leave("alice")
    limits.enter("alice")


@given(waits=st.lists(st.floats(0, 30), max_size=60), max_per_minute=st.integers(1, 20))
def test_no_minute_ever_sees_more_than_twice_the_limit_nor_any_stretch_more_than_its_share(
    waits: list[float], max_per_minute: int
):
    clock = Clock()
    limits = KeyLimits(max_per_minute=max_per_minute, max_running=None, clock=clock)
    begun = []
    for wait in waits:
        clock.now += wait
        try:
            limits.enter("alice")
        except RateLimited:
            continue
        begun.append(clock.now)
    for i, first in enumerate(begun):
        for j, last in enumerate(begun[i:], start=1):
            assert j <= max_per_minute * (1 + (last - first) / MINUTE_S) + 1e-6


def test_keys_may_have_names_and_those_without_are_called_after_their_digest():
    keyring = Keyring(map(SecretStr, ["alice:sk-a", "sk-b", "team.x:sk:with:colons"]))
    assert keyring.check("Bearer sk-a") == "alice"
    assert keyring.check("Bearer sk:with:colons") == "team.x"
    nameless = keyring.check("bearer sk-b")
    assert nameless.startswith("key-")
    assert "sk-b" not in nameless
    for wrong in ("Bearer alice:sk-a", "Bearer alice", "Bearer sk"):
        with pytest.raises(Unauthorized):
            keyring.check(wrong)
    assert Keyring([]).check(None) == ANONYMOUS
