"""What the scheduler promises whatever happens: right answers, no leak, no livelock, no starvation, little waste."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.text_engine.core.batch import SampledToken
from services.text_engine.core.sequence import ImageSpan, Sequence, SequenceStatus
from tests.unit.apprentice import Apprentice
from tests.unit.guesser import Guesser
from tests.unit.test_scheduler import CAT, PIZZA, Driver, answer_alone, check_at_rest, make_sequence

IMAGES = [CAT, PIZZA]


class AnyTraffic(RuleBasedStateMachine):
    """Requests come, go, share prefixes and wait for images in any order, on an engine of any size, with guesses or
    without.

    The driver checks its invariants around every step; at the end every request that nobody ended must finish within a
    bounded number of steps, with the tokens it would have had alone.
    """

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 20),
        max_prefill=st.sampled_from([None, 1, 3, 8]),
        caching=st.booleans(),
        num_right=st.sampled_from([None, None, 0, 1, 3]),
        has_draft_model=st.booleans(),
    )
    def start_engine(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        max_prefill: int | None,
        caching: bool,
        num_right: int | None,
        has_draft_model: bool,
    ) -> None:
        self.driver = Driver(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_prefill_tokens_while_decoding=max_prefill,
            caching=caching,
            drafter=None if num_right is None else Guesser(num_right),
        )
        if num_right is not None and has_draft_model:
            Apprentice(num_right).joins(self.driver)
        self.driver.rewrite = self.break_rows
        self.sequences: list[Sequence] = []
        self.ended: set[Sequence] = set()  # by an abort or an error
        self.broken: set[str] = set()

    def break_rows(self, sequence: Sequence, sampled: SampledToken) -> SampledToken:
        if sequence.request_id not in self.broken:
            return sampled
        self.ended.add(sequence)
        return SampledToken(0, error="logits are not finite")

    @property
    def alive(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    @rule(
        num_shared=st.integers(0, 12),
        num_own=st.integers(1, 8),
        image=st.sampled_from([None, CAT, PIZZA]),
        num_rows=st.integers(1, 6),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        choices=st.sampled_from([1, 1, 2, 3]),
    )
    def a_request_comes(
        self,
        num_shared: int,
        num_own: int,
        image: str | None,
        num_rows: int,
        max_tokens: int,
        priority: int,
        choices: int,
    ) -> None:
        capacity = self.driver.blocks.max_sequence_tokens
        prompt = [*range(100, 100 + num_shared), *[0] * (num_rows if image else 0), *range(200, 200 + num_own)]
        prompt = prompt[-capacity:]
        images: tuple[ImageSpan, ...] = ()
        if image and len(prompt) == num_shared + num_rows + num_own:
            images = (ImageSpan(image, num_shared, num_rows),)
        max_tokens = min(max_tokens, capacity + 1 - len(prompt))
        siblings: list[Sequence] = []
        for _ in range(choices):
            name = f"r{len(self.sequences)}"
            sequence = make_sequence(name, prompt, max_tokens=max_tokens, priority=priority, images=images)
            siblings.append(sequence)
            sequence.choices = siblings
            self.sequences.append(sequence)
            self.driver.add(sequence)

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule(num_steps=st.integers(1, 4))
    def the_engine_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_client_goes_away_between_steps(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        self.driver.scheduler.finish(sequence)
        self.ended.add(sequence)
        check_at_rest(self.driver)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_client_goes_away_during_a_step(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        batch = self.driver.schedule()
        sampled = self.driver.runner.execute_model(batch)
        self.driver.scheduler.finish(sequence)
        self.ended.add(sequence)
        for output in self.driver.scheduler.update(batch, sampled):
            assert output.sequence is not sequence
            if output.finish is not None:
                self.driver.finished[output.sequence.request_id] = output.finish
        check_at_rest(self.driver)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_row_breaks(self, data: st.DataObject) -> None:
        self.broken.add(data.draw(st.sampled_from(self.alive)).request_id)

    @rule(image=st.sampled_from(IMAGES))
    def an_image_arrives(self, image: str) -> None:
        self.driver.images.ready.add(image)

    @rule(image=st.sampled_from(IMAGES))
    def an_embedding_is_evicted(self, image: str) -> None:
        self.driver.images.ready.discard(image)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.images.ready.update(IMAGES)
        total = sum(sequence.max_total_tokens for sequence in self.sequences)
        self.driver.run(max_steps=10 + total * (1 + len(self.sequences)))
        assert self.driver.pool.num_referenced == 0
        assert self.driver.pool.num_available == self.driver.pool.num_blocks
        for sequence in self.sequences:
            if sequence not in self.ended:
                assert self.driver.finished[sequence.request_id].reason == "length"
                assert sequence.generated_token_ids == answer_alone(sequence)
                assert sequence.num_cached_tokens is not None
                assert sequence.num_cached_tokens < sequence.num_prompt_tokens


AnyTraffic.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestAnyTraffic = AnyTraffic.TestCase


# --- liveness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [16, 17, 23, 31, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_sequences_that_fill_the_pool_alone_all_finish_without_preempting_each_other_for_ever(
    num_blocks: int, caching: bool
):
    driver = Driver(num_blocks=num_blocks, max_num_batched_tokens=16, caching=caching)
    sequences = [make_sequence(f"r{i}", 1 + 9 * i, max_tokens=65 - (1 + 9 * i)) for i in range(7)]
    driver.add(*sequences)
    num_steps = driver.run(max_steps=2000)
    assert all(sequence.generated_token_ids == answer_alone(sequence) for sequence in sequences)
    # Recomputing costs time, but never more than running one after the other with every prompt computed anew.
    assert num_steps <= sum(sequence.max_total_tokens for sequence in sequences)


@pytest.mark.parametrize("order", [(CAT, PIZZA), (PIZZA, CAT)])
def test_images_may_arrive_in_any_order_even_if_their_requests_fill_the_pool(order: tuple[str, str]):
    driver = Driver(num_blocks=12)
    sequences = [
        make_sequence(name, 30, max_tokens=10, images=(ImageSpan(image, 12, 6),))
        for name, image in [("a", CAT), ("b", PIZZA), ("c", CAT)]
    ]
    driver.add(*sequences)
    for image in order:
        for _ in range(25):
            driver.step()
        driver.images.ready.add(image)
    driver.run()
    assert all(sequence.generated_token_ids == answer_alone(sequence) for sequence in sequences)


def test_five_hundred_aborts_at_random_moments_leave_nothing_behind():
    """Case D6."""
    rng = random.Random(6)
    driver = Driver(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=32)
    alive: list[Sequence] = []
    for i in range(500):
        sequence = make_sequence(f"r{i}", rng.randint(1, 60), max_tokens=100, ignore_eos=True)
        driver.add(sequence)
        alive.append(sequence)
        while alive and rng.random() < 0.5:
            driver.step()
            driver.scheduler.finish(alive.pop(rng.randrange(len(alive))))
    for sequence in alive:
        driver.scheduler.finish(sequence)
    check_at_rest(driver)
    assert not driver.scheduler.has_work
    assert driver.pool.num_referenced == 0


# --- no starvation, on a simulated clock -----------------------------------------------------------------------------


@dataclass
class Visit:
    """One request's times on the simulated clock, in seconds."""

    sequence: Sequence
    arrived: float
    first_token: float | None = None


def simulate(driver: Driver, arrivals: list[tuple[float, Sequence]], *, end: float) -> list[Visit]:
    """Play arrivals against a machine whose step takes 5 ms and 0.1 ms a token."""
    clock = 0.0
    visits: list[Visit] = []
    coming = sorted(arrivals, key=lambda arrival: arrival[0])
    while clock < end:
        while coming and coming[0][0] <= clock:
            arrived, sequence = coming.pop(0)
            driver.add(sequence)
            visits.append(Visit(sequence, arrived))
        clock += 0.005 + 0.0001 * sum(driver.step().values())
        for visit in visits:
            if visit.first_token is None and visit.sequence.num_generated_tokens > 0:
                visit.first_token = clock
    return visits


def longest_wait(visits: list[Visit], *, until: float) -> float:
    """The longest time to a first token; who has none waits until the end."""
    return max((visit.first_token or until) - visit.arrived for visit in visits)


def crowd(*, period: float, end: float) -> list[tuple[float, Sequence]]:
    """Ten short questions at once, one long document, then a question every `period` seconds."""
    arrivals = [(0.0, make_sequence(f"first {i}", 12, max_tokens=40)) for i in range(10)]
    arrivals.append((0.0, make_sequence("document", 520, max_tokens=8)))
    arrivals += [(i * period, make_sequence(f"later {i}", 12, max_tokens=40)) for i in range(1, int(end / period))]
    return arrivals


def test_a_long_prompt_and_a_crowd_of_short_ones_both_get_their_turn():
    driver = Driver(num_blocks=400, block_size=16, max_num_batched_tokens=64, max_num_seqs=32)
    visits = simulate(driver, crowd(period=0.04, end=4.0), end=4.5)
    assert longest_wait(visits, until=4.5) < 0.3


def test_a_long_prompt_is_not_starved_by_a_crowd_of_short_ones_when_memory_is_short():
    driver = Driver(num_blocks=40, block_size=16, max_num_batched_tokens=64, max_num_seqs=32)
    visits = simulate(driver, crowd(period=0.04, end=4.0), end=4.5)
    assert next(visit for visit in visits if visit.sequence.request_id == "document").first_token is not None
    assert longest_wait(visits, until=4.5) < 1.5


def test_a_stream_never_waits_longer_than_one_full_step_for_its_next_token():
    """Case D14: the gap is bounded by the step's budget, whatever else there is to compute."""
    driver = Driver(num_blocks=2000, max_num_batched_tokens=64)
    driver.add(stream := make_sequence("stream", 5, max_tokens=100))
    driver.step()
    driver.add(make_sequence("book", 3000), *(make_sequence(f"r{i}", 30 + i) for i in range(30)))
    for expected in range(2, 101):
        assert sum(driver.step().values()) <= 64
        assert stream.num_generated_tokens == expected


# --- waste ----------------------------------------------------------------------------------------------------------


def wasted_share(sizes: list[tuple[int, int]]) -> float:
    """Allocated but unused KV slots over allocated ones, summed over all steps of a run, blocks of 16."""
    driver = Driver(num_blocks=3200, block_size=16, max_num_seqs=64, max_num_batched_tokens=512)
    for i, (num_prompt, num_answer) in enumerate(sizes):
        driver.scheduler.add(make_sequence(f"r{i}", num_prompt, max_tokens=num_answer))
    num_allocated = num_used = 0
    while driver.scheduler.has_work:
        batch = driver.scheduler.schedule()
        driver.scheduler.update(batch, [SampledToken(11)] * len(batch.sampling))
        num_allocated += driver.pool.num_referenced * 16
        num_used += sum(sequence.num_computed_tokens for sequence in driver.scheduler.running)
    return 1 - num_used / num_allocated


def test_equal_requests_waste_little_of_the_kv_cache():
    assert wasted_share([(512, 128)] * 32) < 0.04


@pytest.mark.parametrize("seed", range(3))
def test_mixed_requests_waste_little_of_the_kv_cache(seed: int):
    rng = random.Random(seed)
    assert wasted_share([(rng.randint(32, 512), rng.randint(16, 256)) for _ in range(64)]) < 0.04
