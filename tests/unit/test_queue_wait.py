"""How long a newcomer would wait, told from how fast the queue has been served."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.text_engine.core.queue_wait import SHORTEST_EVIDENCE_S, QueueWait


def served(num_steps: int, step_s: float, num_started_each: int, num_queued: int = 7) -> QueueWait:
    wait = QueueWait()
    for _ in range(num_steps):
        wait.note_step(step_s, num_started_each, num_queued)
    return wait


def test_a_queue_served_at_a_steady_rate_is_waited_for_as_long_as_that_rate_says():
    wait = served(num_steps=4000, step_s=0.05, num_started_each=1)  # 20 a second
    assert wait.seconds(100) == pytest.approx(5.0, rel=0.02)


def test_a_burst_that_meets_an_idle_engine_is_not_judged():
    wait = served(num_steps=3, step_s=SHORTEST_EVIDENCE_S / 4, num_started_each=0)
    assert wait.seconds(1000) == 0


def test_places_taken_before_there_was_a_queue_are_no_reason_to_expect_the_worst():
    wait = served(num_steps=30, step_s=0.1, num_started_each=0)
    assert wait.seconds(1) == wait.seconds(100) == pytest.approx(3.0)


def test_a_queue_that_was_empty_in_between_is_judged_afresh():
    wait = served(num_steps=100, step_s=1.0, num_started_each=0)
    assert wait.seconds(10) > 0
    wait.note_step(0.05, 1, num_queued=0)
    assert wait.seconds(10) == 0


def test_an_engine_that_gets_faster_is_believed_within_a_few_memories():
    wait = served(num_steps=60, step_s=1.0, num_started_each=1)
    slow = wait.seconds(10)
    for _ in range(60):
        wait.note_step(1.0, 10, 7)
    assert wait.seconds(10) == pytest.approx(slow / 10, rel=0.15)


@given(
    st.lists(st.tuples(st.floats(0.001, 5), st.integers(0, 9), st.integers(0, 9)), max_size=40),
    st.integers(0, 500),
)
def test_more_ahead_never_means_less_waiting(steps: list[tuple[float, int, int]], num_ahead: int):
    wait = QueueWait()
    for step in steps:
        wait.note_step(*step)
    assert 0 <= wait.seconds(num_ahead) <= wait.seconds(num_ahead + 1)
