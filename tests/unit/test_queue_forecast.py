"""What a replica said of its queue is repeated for as long as it can be true, and to whom it was said."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.balancer import Pool, Replica
from services.gateway.queue_forecast import LONGEST_BELIEF_S, QueueForecast

SOON = LONGEST_BELIEF_S / 4


def test_a_replica_that_said_nothing_is_taken_to_be_open():
    assert QueueForecast().opens_in_s(0, now=5.0) == 0


def test_a_full_queue_is_open_again_when_it_said_so():
    queue = QueueForecast()
    queue.told(0, SOON, now=10.0)
    assert queue.opens_in_s(0, now=10.0) == SOON
    assert queue.opens_in_s(0, now=10.0 + SOON / 2) == SOON / 2
    assert queue.opens_in_s(0, now=10.0 + SOON) == 0


def test_urgent_requests_are_sent_to_a_queue_that_is_full_for_others():
    queue = QueueForecast()
    queue.told(0, SOON, now=0.0)
    assert queue.opens_in_s(-1, now=0.0) == 0
    assert queue.opens_in_s(1, now=0.0) == SOON


def test_a_queue_that_is_full_for_urgent_requests_is_full_for_all():
    queue = QueueForecast()
    queue.told(5, SOON, now=0.0)
    queue.told(0, SOON, now=0.0)
    assert queue.opens_in_s(0, now=0.0) == queue.opens_in_s(5, now=0.0) == SOON


def test_that_an_urgent_request_was_taken_says_nothing_of_others():
    queue = QueueForecast()
    queue.told(5, SOON, now=0.0)
    queue.told(0, 0.0, now=0.0)
    assert queue.opens_in_s(5, now=0.0) == SOON
    queue.told(5, 0.0, now=0.0)
    assert queue.opens_in_s(5, now=0.0) == 0


def test_a_long_wait_is_told_whole_and_asked_about_again_soon():
    """All who were in the queue may have left it."""
    queue = QueueForecast()
    queue.told(0, 60.0, now=0.0)
    assert queue.opens_in_s(0, now=0.0) == 60.0
    assert queue.opens_in_s(0, now=LONGEST_BELIEF_S) == 0


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 9), st.floats(0, 3)), max_size=30),
    st.integers(-3, 3),
    st.floats(0, 3),
)
def test_nobody_is_kept_out_for_longer_than_was_said_to_those_at_least_as_urgent(
    said: list[tuple[int, float, float]], priority: int, later_s: float
):
    queue, now = QueueForecast(), 0.0
    for its_priority, opens_in_s, passed_s in said:
        now += passed_s
        queue.told(its_priority, opens_in_s, now)
    longest = max((opens_in_s for its, opens_in_s, _ in said if its <= priority), default=0.0)
    assert 0 <= queue.opens_in_s(priority, now + later_s) <= longest + 1e-9  # what adding to a clock rounds
    assert queue.opens_in_s(priority, now + LONGEST_BELIEF_S) == 0
    # A queue that is open to somebody is open to whoever is more urgent.
    assert queue.opens_in_s(priority - 1, now + later_s) <= queue.opens_in_s(priority, now + later_s)


def test_of_several_replicas_those_with_an_open_queue_are_chosen():
    now = 0.0
    pool: Pool[str] = Pool(lambda: now, random.Random(0))
    pool.update(["http://a", "http://b"])
    for replica in pool.replicas:
        pool.probed(replica, ready=True, info="model")
    full, free = pool.replicas
    pool.note_queue(full, 0, SOON)
    assert pool.with_open_queue(pool.available(), 0) == [free]
    assert pool.queue_opens_in_s(pool.available(), 0) == 0
    pool.note_queue(free, 0, SOON / 2)
    both: list[Replica[str]] = pool.available()
    assert pool.with_open_queue(both, 0) == []
    assert pool.queue_opens_in_s(both, 0) == SOON / 2
    now = SOON / 2
    assert pool.with_open_queue(both, 0) == [free]
