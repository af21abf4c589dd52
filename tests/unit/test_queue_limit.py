"""Who may still join the queue: its bounds in number and in time, for a real scheduler."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.core.queue_limit import DRAINED_SHARE, RETRY_FULL_S, Newcomers, QueueLimit
from services.text_engine.core.sequence import PRIORITY_HEAD_START
from shared.errors import InvalidRequest, Overloaded
from tests.unit.test_scheduler import CAT, Driver, Images, make_sequence, picture_question


def served_one_by_one(num_waiting: int, *, max_queue_wait_s: float, step_s: float = 0.5) -> tuple[Driver, QueueLimit]:
    """An engine with one place, every answer of which takes 4 steps, and so many behind it."""
    driver = Driver(num_blocks=256, max_num_seqs=1)
    queue = QueueLimit(driver.scheduler, max_queue_wait_s=max_queue_wait_s)
    for number in range(num_waiting + 11):
        driver.add(make_sequence(f"q{number}", 5, max_tokens=4))
    for _ in range(40):  # ten of them are over then, and the eleventh begins with the next step
        driver.step()
        queue.note_step(step_s)
    driver.step()
    queue.note_step(step_s)
    assert len(driver.scheduler.waiting) == num_waiting
    return driver, queue


def test_whoever_would_wait_too_long_is_refused_and_told_when_to_come_back():
    _, queue = served_one_by_one(6, max_queue_wait_s=8.0)
    wait_s = queue.wait_s(priority=0)
    assert wait_s == pytest.approx(6 * 2.0, rel=0.25)
    assert queue.opens_in_s(0) == pytest.approx(wait_s - 8.0 + DRAINED_SHARE * 8.0)
    with pytest.raises(Overloaded, match="6 requests are ahead") as refusal:
        queue.check(0)
    assert refusal.value.retry_after_s == queue.opens_in_s(0)


def test_whoever_would_be_served_in_time_is_let_in():
    _, queue = served_one_by_one(3, max_queue_wait_s=8.0)
    queue.check(0)
    assert queue.opens_in_s(0) == 0


def test_those_behind_a_newcomer_do_not_count():
    _, queue = served_one_by_one(6, max_queue_wait_s=8.0)
    queue.check(priority=-1)
    assert queue.opens_in_s(-1) == 0 < queue.opens_in_s(0)


def test_less_urgent_requests_that_have_been_overtaken_often_enough_go_before_a_more_urgent_newcomer():
    driver = Driver(num_blocks=256, max_num_seqs=1)
    queue = QueueLimit(driver.scheduler)
    for number in range(6):
        driver.scheduler.add(make_sequence(f"patient {number}", 5, priority=1))
    assert [driver.scheduler.num_ahead(priority) for priority in (0, 1)] == [0, 6]
    for number in range(PRIORITY_HEAD_START - 5):
        driver.scheduler.add(gone := make_sequence(f"urgent {number}", 5))
        driver.scheduler.finish(gone)
    assert [driver.scheduler.num_ahead(priority) for priority in (-1, 0, 1)] == [0, 2, 6]
    driver.step()
    queue.note_step(10.0)
    assert queue.wait_s(priority=-1) == 0 < queue.wait_s(priority=0)
    driver.scheduler.add(newcomer := make_sequence("newcomer", 5))
    assert driver.scheduler.waiting.index(newcomer) == 1  # the first of the patient has begun


def test_requests_that_were_let_in_and_are_not_queued_yet_count():
    _, queue = served_one_by_one(3, max_queue_wait_s=8.0)
    with pytest.raises(Overloaded):
        queue.check(0, num_newcomers=3)
    assert queue.opens_in_s(0, num_newcomers=3) > 0


def test_who_waits_for_a_picture_is_in_nobodys_way():
    driver, queue = served_one_by_one(3, max_queue_wait_s=8.0)
    before = queue.wait_s(0)
    asked = picture_question("picture", CAT)
    asked.awaited_image = asked.images[0]
    driver.add(asked)
    assert queue.wait_s(0) == before


def test_several_may_begin_in_one_step():
    driver = Driver(num_blocks=256, max_num_seqs=4, images=Images())
    queue = QueueLimit(driver.scheduler, max_queue_wait_s=100)
    for number in range(400):
        driver.add(make_sequence(f"q{number}", 5, max_tokens=1))
    for _ in range(60):
        driver.step()
        queue.note_step(0.5)
    assert queue.wait_s(0) == pytest.approx(len(driver.scheduler.waiting) / 8, rel=0.1)


def test_the_number_of_those_that_wait_is_bounded_too():
    driver = Driver()
    queue = QueueLimit(driver.scheduler, max_waiting_requests=2)
    driver.add(make_sequence("a", 5))
    queue.check(0)
    with pytest.raises(Overloaded, match="1 requests are waiting; this server queues 2"):
        queue.check(0, num_choices=2)
    driver.add(make_sequence("b", 5))
    assert queue.opens_in_s(0) == RETRY_FULL_S
    with pytest.raises(Overloaded):
        queue.check(0)


def test_more_choices_than_the_queue_has_places_are_the_requests_fault_and_never_told_to_come_back():
    queue = QueueLimit(Driver().scheduler, max_waiting_requests=4)
    queue.check(0, num_choices=4)
    with pytest.raises(InvalidRequest, match="n is 5; this server queues at most 4 choices") as refusal:
        queue.check(0, num_choices=5)
    assert (refusal.value.status, refusal.value.param, refusal.value.retry_after_s) == (400, "n", None)


@settings(max_examples=50, deadline=None)
@given(
    num_waiting=st.integers(0, 8),
    max_waiting_requests=st.integers(1, 12),
    max_queue_wait_s=st.sampled_from([0.5, 4.0, 8.0, 1e9]),
    priority=st.integers(-1, 1),
    num_choices=st.integers(1, 6),
    num_newcomers=st.integers(0, 6),
)
def test_a_queue_is_open_at_once_exactly_to_those_that_are_let_in(
    num_waiting: int,
    max_waiting_requests: int,
    max_queue_wait_s: float,
    priority: int,
    num_choices: int,
    num_newcomers: int,
):
    _, queue = served_one_by_one(num_waiting, max_queue_wait_s=max_queue_wait_s)
    queue.max_waiting_requests = max_waiting_requests
    if num_choices > max_waiting_requests:
        with pytest.raises(InvalidRequest):
            queue.check(priority, num_choices, num_newcomers)
        return
    opens_in_s = queue.opens_in_s(priority, num_choices, num_newcomers)
    if opens_in_s == 0:
        queue.check(priority, num_choices, num_newcomers)
        return
    with pytest.raises(Overloaded) as refusal:
        queue.check(priority, num_choices, num_newcomers)
    assert refusal.value.retry_after_s == opens_in_s > 0


def test_a_queue_may_be_open_to_one_and_closed_to_two():
    driver = Driver()
    queue = QueueLimit(driver.scheduler, max_waiting_requests=2)
    driver.add(make_sequence("a", 5))
    assert queue.opens_in_s(0, num_choices=1) == 0
    assert queue.opens_in_s(0, num_choices=2) == RETRY_FULL_S


def test_a_newcomer_is_counted_until_it_leaves_and_leaves_once():
    newcomers = Newcomers()
    leave, other = newcomers.enter(3), newcomers.enter(1)
    assert newcomers.num == 4
    leave()
    leave()
    assert newcomers.num == 1
    other()
    assert newcomers.num == 0


def test_without_a_bound_in_time_everybody_may_wait():
    driver = Driver(max_num_seqs=1)
    queue = QueueLimit(driver.scheduler)
    for number in range(300):
        driver.scheduler.add(make_sequence(f"q{number}", 5))
    driver.step()
    queue.note_step(10.0)
    queue.check(0)
    assert queue.opens_in_s(0) == 0 < queue.wait_s(0)
