"""Bidirectional images: their rows see each other, so the scheduler computes all of them in one step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.core.batch import Batch
from services.text_engine.core.sequence import ImageSpan, Sequence
from tests.unit.test_scheduler import CAT, PIZZA, Driver, Images, answer_alone, make_sequence


def seeing_ahead(image: str, start: int, num_tokens: int) -> ImageSpan:
    return ImageSpan(image, start, num_tokens, attention="bidirectional")


def picture_question(name: str, image: str = CAT, *, start: int = 5, rows: int = 12, tail: int = 6) -> Sequence:
    return make_sequence(name, start + rows + tail, images=(seeing_ahead(image, start, rows),))


def num_cuts(batch: Batch) -> int:
    """Chunks of the batch that end inside a bidirectional image."""
    return sum(
        span.start < item.end < span.end
        for item in batch.scheduled
        for span in item.sequence.images_between(item.start, item.end)
        if span.attention == "bidirectional"
    )


class UncutDriver(Driver):
    def schedule(self) -> Batch:
        batch = super().schedule()
        assert num_cuts(batch) == 0
        return batch


def test_a_chunk_ends_before_an_image_that_it_would_cut():
    driver = UncutDriver(images=Images(CAT), max_num_seqs=4, max_num_batched_tokens=16)
    driver.add(picture_question("a"))
    assert driver.step() == {"a": 5}
    assert driver.step() == {"a": 16}


def test_causal_images_are_cut_as_before():
    driver = Driver(images=Images(CAT), max_num_seqs=4, max_num_batched_tokens=16)
    driver.add(make_sequence("a", 23, images=(ImageSpan(CAT, 5, 12),)))
    assert driver.step() == {"a": 16}


def test_an_image_of_the_limits_size_starts_beside_as_many_decodes_as_there_can_be():
    driver = UncutDriver(images=Images(CAT), max_num_seqs=4, max_num_batched_tokens=16, num_blocks=256)
    driver.add(*(make_sequence(f"decode {i}", 3, max_tokens=60) for i in range(3)))
    while driver.step() != {f"decode {i}": 1 for i in range(3)}:
        pass
    driver.add(a := picture_question("a", start=0, rows=driver.scheduler.max_whole_span))
    assert driver.step()["a"] == 13
    driver.run()
    assert a.generated_token_ids == answer_alone(a)


def test_short_prompts_do_not_keep_an_image_from_its_room():
    """A quarter of the budget is kept for short prompts; an image that needs it comes first."""
    driver = UncutDriver(images=Images(CAT), max_num_seqs=8, max_num_batched_tokens=20, num_blocks=256)
    driver.add(a := picture_question("a", start=0, rows=13, tail=2))
    num_steps = 0
    while a.num_computed_tokens < 13:
        driver.add(*(make_sequence(f"short {num_steps} {i}", 4, max_tokens=1) for i in range(5)))
        driver.step()
        num_steps += 1
        assert num_steps < 3
    driver.run()


def test_nobody_overtakes_a_waiting_image_for_ever():
    driver = UncutDriver(images=Images(CAT), max_num_seqs=4, max_num_batched_tokens=16, num_blocks=512)
    driver.add(make_sequence("book", 100, max_tokens=1))
    driver.step()
    driver.add(a := picture_question("a", start=0, rows=13))
    for i in range(40):
        driver.add(make_sequence(f"other {i}", 9, max_tokens=1))
    driver.step_until(lambda: a.num_computed_tokens > 0, max_steps=12)
    driver.run()


def test_an_image_of_which_the_cache_holds_a_part_is_computed_from_there_in_one_step():
    driver = UncutDriver(images=Images(CAT), max_num_batched_tokens=16, max_num_seqs=2)
    token_ids = list(range(100, 123))
    span = (seeing_ahead(CAT, 5, 12),)
    driver.add(make_sequence("a", token_ids, images=span))
    driver.run()
    driver.add(b := make_sequence("b", [*token_ids[:17], 7, 8, 9], images=span))
    driver.run()
    assert b.num_cached_tokens == 16
    assert b.generated_token_ids == answer_alone(b)


@settings(max_examples=150, deadline=None)
@given(
    budget=st.integers(8, 40),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_blocks=st.integers(20, 60),
    max_prefill=st.sampled_from([None, 1, 6]),
    requests=st.lists(
        st.tuples(st.sampled_from([CAT, PIZZA]), st.integers(0, 19), st.integers(1, 30), st.integers(1, 9)),
        min_size=1,
        max_size=6,
    ),
)
def test_no_image_is_ever_cut_and_every_request_gets_its_answer(
    budget: int,
    block_size: int,
    num_blocks: int,
    max_prefill: int | None,
    requests: list[tuple[str, int, int, int]],
):
    driver = UncutDriver(
        images=Images(CAT, PIZZA),
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_prefill_tokens_while_decoding=max_prefill,
        block_size=block_size,
        num_blocks=max(num_blocks, 80 // block_size),
    )
    largest = driver.scheduler.max_whole_span
    sequences = [
        picture_question(f"r{i}", image, start=start, rows=min(rows, largest), tail=tail)
        for i, (image, start, rows, tail) in enumerate(requests)
    ]
    driver.add(*sequences)
    driver.run()
    assert [s.generated_token_ids for s in sequences] == [answer_alone(s) for s in sequences]


@pytest.mark.parametrize("rows", [14, 200])
def test_the_largest_image_that_is_sure_to_fit_follows_from_the_limits(rows: int):
    driver = Driver(max_num_seqs=4, max_num_batched_tokens=rows + 3)
    assert driver.scheduler.max_whole_span == rows
