"""Room: what a replica said of its queue is repeated for as long as it can be true, and to whom it was said."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.balancer import Pool, Replica
from services.gateway.room import LONGEST_BELIEF_S, Room

SOON = LONGEST_BELIEF_S / 4


def test_a_replica_that_said_nothing_has_room():
    assert Room().opens_in_s(0, now=5.0) == 0


def test_a_full_queue_has_room_again_when_it_said_so():
    room = Room()
    room.told(0, SOON, now=10.0)
    assert room.opens_in_s(0, now=10.0) == SOON
    assert room.opens_in_s(0, now=10.0 + SOON / 2) == SOON / 2
    assert room.opens_in_s(0, now=10.0 + SOON) == 0


def test_urgent_requests_are_sent_to_a_queue_that_is_full_for_others():
    room = Room()
    room.told(0, SOON, now=0.0)
    assert room.opens_in_s(-1, now=0.0) == 0
    assert room.opens_in_s(1, now=0.0) == SOON


def test_a_queue_that_is_full_for_urgent_requests_is_full_for_all():
    room = Room()
    room.told(5, SOON, now=0.0)
    room.told(0, SOON, now=0.0)
    assert room.opens_in_s(0, now=0.0) == room.opens_in_s(5, now=0.0) == SOON


def test_that_an_urgent_request_was_taken_says_nothing_of_others():
    room = Room()
    room.told(5, SOON, now=0.0)
    room.told(0, 0.0, now=0.0)
    assert room.opens_in_s(5, now=0.0) == SOON
    room.told(5, 0.0, now=0.0)
    assert room.opens_in_s(5, now=0.0) == 0


def test_a_long_wait_is_told_whole_and_asked_about_again_soon():
    """All who were in the queue may have left it."""
    room = Room()
    room.told(0, 60.0, now=0.0)
    assert room.opens_in_s(0, now=0.0) == 60.0
    assert room.opens_in_s(0, now=LONGEST_BELIEF_S) == 0


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 9), st.floats(0, 3)), max_size=30),
    st.integers(-3, 3),
    st.floats(0, 3),
)
def test_nobody_is_kept_out_for_longer_than_was_said_to_those_at_least_as_urgent(
    said: list[tuple[int, float, float]], priority: int, later_s: float
):
    room, now = Room(), 0.0
    for its_priority, room_in_s, passed_s in said:
        now += passed_s
        room.told(its_priority, room_in_s, now)
    longest = max((room_in_s for its, room_in_s, _ in said if its <= priority), default=0.0)
    assert 0 <= room.opens_in_s(priority, now + later_s) <= longest + 1e-9  # what adding to a clock rounds
    assert room.opens_in_s(priority, now + LONGEST_BELIEF_S) == 0
    # Whoever is more urgent has room wherever somebody less urgent has.
    assert room.opens_in_s(priority - 1, now + later_s) <= room.opens_in_s(priority, now + later_s)


def test_of_several_replicas_those_with_room_are_chosen():
    now = 0.0
    pool: Pool[str] = Pool(lambda: now, random.Random(0))
    pool.update(["http://a", "http://b"])
    for replica in pool.replicas:
        pool.probed(replica, ready=True, info="model")
    full, free = pool.replicas
    pool.told_room(full, 0, SOON)
    assert pool.with_room(pool.available(), 0) == [free]
    assert pool.room_in_s(pool.available(), 0) == 0
    pool.told_room(free, 0, SOON / 2)
    both: list[Replica[str]] = pool.available()
    assert pool.with_room(both, 0) == []
    assert pool.room_in_s(both, 0) == SOON / 2
    now = SOON / 2
    assert pool.with_room(both, 0) == [free]
