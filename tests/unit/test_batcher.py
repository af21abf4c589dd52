"""The batcher: at once while idle, full batches under load, nobody pays for another's mistake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from services.vision_encoder.batcher import ANY_PLACE, Batcher, Place


class Doubler:
    """Doubles numbers, remembers its batches, and works only while its gate is open. 13 is bad luck."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        assert self.gate.wait(10)
        if 13 in items:
            raise RuntimeError("bad luck")
        return [2 * item for item in items]


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


@pytest.fixture
async def batcher(doubler: Doubler) -> AsyncIterator[Batcher[int, int]]:
    opened = Batcher(doubler, max_batch_size=4)
    yield opened
    doubler.gate.set()
    await opened.close()


async def gathered(
    batcher: Batcher[int, int], doubler: Doubler, items: list[tuple[int, str]], places: Sequence[Place] = ()
) -> list[asyncio.Task]:
    """Submits 0, which keeps the thread busy behind the closed gate, and then `items`, which wait."""
    places = places or [ANY_PLACE] * len(items)
    doubler.gate.clear()
    first = asyncio.create_task(batcher.submit(0, "a"))
    while not doubler.batches:  # noqa: ASYNC110 - the thread tells of its start in no other way
        await asyncio.sleep(0.001)
    tasks = [asyncio.create_task(batcher.submit(*item, place)) for item, place in zip(items, places, strict=True)]
    while batcher.num_waiting < len(items):  # noqa: ASYNC110
        await asyncio.sleep(0)
    return [first, *tasks]


async def test_a_lone_item_does_not_wait_for_company(batcher: Batcher[int, int], doubler: Doubler) -> None:
    result = await batcher.submit(21, "a")
    assert (result.value, result.batch_size) == (42, 1)
    assert result.queue_s < 0.05


async def test_what_gathers_while_the_thread_works_becomes_full_batches_in_order(
    batcher: Batcher[int, int], doubler: Doubler
) -> None:
    tasks = await gathered(batcher, doubler, [(number, "a") for number in range(1, 11)])
    doubler.gate.set()
    assert [(await task).value for task in tasks] == [2 * number for number in range(11)]
    assert doubler.batches == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]


async def test_only_equal_shapes_share_a_batch_and_the_oldest_goes_first(
    batcher: Batcher[int, int], doubler: Doubler
) -> None:
    tasks = await gathered(batcher, doubler, [(1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "a")])
    doubler.gate.set()
    await asyncio.gather(*tasks)
    assert doubler.batches == [[0], [1, 3, 5], [2, 4]]


async def test_who_has_several_items_there_gets_them_in_order_and_nobody_else_waits_longer(
    batcher: Batcher[int, int], doubler: Doubler
) -> None:
    ann, ben = "ann", "ben"
    items = [(3, "a"), (11, "a"), (1, "a"), (12, "b"), (2, "a"), (10, "a")]
    places = [Place(ann, 3), Place(ben, 1), Place(ann, 1), Place(ben, 2), Place(ann, 2), Place(ben, 0)]
    tasks = await gathered(batcher, doubler, items, places)
    doubler.gate.set()
    assert [(await task).value for task in tasks] == [2 * item for item in (0, 3, 11, 1, 12, 2, 10)]
    # As in order of arrival (3, 11, 1, 2), (12), (10), but for whose item it is that Ann and Ben get at each turn.
    assert doubler.batches == [[0], [1, 10, 2, 3], [12], [11]]


async def test_the_order_of_arrival_holds_between_owners_and_for_whoever_wants_no_other(
    batcher: Batcher[int, int], doubler: Doubler
) -> None:
    items = [(number, "a") for number in range(1, 7)]
    places = [Place("ann", 9), ANY_PLACE, Place("ben", 0), ANY_PLACE, Place("ben", 1), Place("carl", 0)]
    tasks = await gathered(batcher, doubler, items, places)
    doubler.gate.set()
    await asyncio.gather(*tasks)
    assert doubler.batches == [[0], [1, 2, 3, 4], [5, 6]]


async def test_items_of_callers_that_left_are_dropped(batcher: Batcher[int, int], doubler: Doubler) -> None:
    tasks = await gathered(batcher, doubler, [(number, "a") for number in range(1, 6)])
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.sleep(0)
    assert batcher.num_waiting == 2
    doubler.gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert doubler.batches == [[0], [4, 5]]


async def test_one_bad_item_fails_alone(batcher: Batcher[int, int], doubler: Doubler) -> None:
    tasks = await gathered(batcher, doubler, [(number, "a") for number in (12, 13, 14)])
    doubler.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[2], RuntimeError)
    assert [result.value for result in (results[1], results[3])] == [24, 28]
    assert (await batcher.submit(1, "a")).value == 2


async def test_closing_cancels_who_waits(doubler: Doubler) -> None:
    batcher = Batcher(doubler, max_batch_size=4)
    tasks = await gathered(batcher, doubler, [(1, "a")])
    await batcher.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    doubler.gate.set()


async def test_the_thread_s_work_can_be_timed_while_it_runs(batcher: Batcher[int, int], doubler: Doubler) -> None:
    assert batcher.busy_s == 0
    tasks = await gathered(batcher, doubler, [])
    await asyncio.sleep(0.02)
    assert batcher.busy_s >= 0.02
    doubler.gate.set()
    await asyncio.gather(*tasks)
    assert batcher.busy_s == 0
