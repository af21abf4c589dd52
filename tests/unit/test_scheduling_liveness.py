"""Whatever arrives, in whatever memory: no step without work, no stream without its token, nobody overtaken who could
start, and nobody who waits for other people's images.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.core.sequence import ImageSpan, Sequence, SequenceStatus
from tests.unit.guesser import Guesser
from tests.unit.test_scheduler import Driver, answer_alone, make_sequence

PICTURES = [letter * 64 for letter in "cdef"]


class StrictDriver(Driver):
    """Looks at every step for what it promises to those that run and to those that wait."""

    def step(self) -> dict[str, int]:
        scheduler = self.scheduler
        streams = {s: (s.num_generated_tokens, s.num_preemptions) for s in scheduler.running if _decodes(s)}
        waiting = [s for s in scheduler.waiting if s.num_preemptions == 0]
        computed = super().step()
        for stream, (num_tokens, num_preemptions) in streams.items():
            if stream.num_preemptions == num_preemptions:
                assert stream.num_generated_tokens > num_tokens, "a stream went without its token"
        left = [s.order for s in waiting if s.status is SequenceStatus.WAITING and not s.images]
        for sequence in waiting:
            if sequence.status is not SequenceStatus.WAITING and left and sequence.order > min(left):
                num_kept_for_short = scheduler.max_num_batched_tokens // 4
                assert sequence.num_prompt_tokens <= num_kept_for_short, "somebody who could start was overtaken"
        return computed

    def run_until_nothing_can_run(self, max_steps: int) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"still at work after {max_steps} steps")


def _decodes(sequence: Sequence) -> bool:
    return sequence.num_generated_tokens > 0 and sequence.num_uncomputed_tokens == 1


def strict_driver(draw: st.DrawFn) -> StrictDriver:
    max_num_seqs = draw(st.integers(1, 6))
    num_right = draw(st.sampled_from([None, None, 0, 2, 9]))
    return StrictDriver(
        num_blocks=draw(st.integers(8, 40)),
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 24)),
        max_prefill_tokens_while_decoding=draw(st.sampled_from([None, 1, 5, 16])),
        caching=draw(st.booleans()),
        drafter=None if num_right is None else Guesser(num_right),
    )


def any_request(rng: random.Random, name: str, capacity: int) -> Sequence:
    """Text, or up to four pictures with text between them; it fits when it is alone. No two share a beginning."""
    num_text = rng.choice([1, 3, 4, 9, 17])
    images: list[ImageSpan] = []
    position = num_text
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        num_rows = rng.choice([1, 4, 5])
        if position + num_rows + 3 > capacity - 4:
            break
        images.append(ImageSpan(rng.choice(PICTURES), position, num_rows))
        position += num_rows + rng.choice([0, 2])
    num_prompt = position + 1
    max_tokens = rng.randint(1, min(12, capacity + 1 - num_prompt))
    kwargs: dict[str, Any] = {"images": tuple(images), "priority": rng.choice([-1, 0, 0, 0, 2])}
    return make_sequence(name, num_prompt, max_tokens=max_tokens, **kwargs)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[StrictDriver, list[Sequence], random.Random]:
    driver = strict_driver(draw)
    rng = random.Random(draw(st.integers(0, 100_000)))
    capacity = driver.blocks.max_sequence_tokens
    return driver, [any_request(rng, f"r{i}", capacity) for i in range(draw(st.integers(2, 14)))], rng


def most_steps(sequences: list[Sequence]) -> int:
    """Each alone and token by token, and once more for each that it may have made room for."""
    return 10 + sum(sequence.max_total_tokens for sequence in sequences) * (1 + len(sequences))


@settings(max_examples=60, deadline=None)
@given(traffic())
def test_text_is_over_before_any_picture_comes_and_then_pictures_in_any_order_end_all(
    found: tuple[StrictDriver, list[Sequence], random.Random],
):
    driver, sequences, rng = found
    for sequence in sequences:
        driver.add(sequence)
        if rng.random() < 0.5:
            driver.step()
    driver.run_until_nothing_can_run(most_steps(sequences))
    assert all(s.status is SequenceStatus.FINISHED for s in sequences if not s.images), "text waits for a picture"
    for picture in rng.sample(PICTURES, len(PICTURES)):
        driver.images.ready.add(picture)
        driver.run_until_nothing_can_run(most_steps(sequences))
    assert not driver.scheduler.has_work, "everything is there, and yet somebody waits"
    assert [s.generated_token_ids for s in sequences] == [answer_alone(s) for s in sequences]
    assert driver.pool.num_referenced == 0


@settings(max_examples=60, deadline=None)
@given(traffic())
def test_embeddings_that_come_and_go_delay_and_never_stop(
    found: tuple[StrictDriver, list[Sequence], random.Random],
):
    """Every picture is there for one step in three, and now and then all memory of it is lost."""
    driver, sequences, rng = found
    coming = list(sequences)
    for _ in range(6 * most_steps(sequences)):
        if coming and rng.random() < 0.3:
            driver.add(coming.pop(0))
        driver.images.ready = {picture for picture in PICTURES if rng.random() < 0.34}
        if rng.random() < 0.02:
            driver.blocks.forget_all()
        driver.step()
        if not coming and not driver.scheduler.has_work:
            break
    driver.images.ready.update(PICTURES)  # no patience with chance: what is left must be able to end
    driver.add(*coming)
    driver.run(max_steps=most_steps(sequences))
    assert [s.generated_token_ids for s in sequences] == [answer_alone(s) for s in sequences]
