"""The scheduler, driven by a runner that keeps a real, small KV cache: its tokens show whether every block was right.

`Driver` and `Images` also serve test_scheduler_properties.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from zlib import crc32

import pytest

from services.text_engine.core.batch import Batch, Logprobs, SampledToken, ScheduledSequence
from services.text_engine.core.block_manager import BlockManager
from services.text_engine.core.block_pool import BlockPool
from services.text_engine.core.scheduler import Scheduler, StepOutput
from services.text_engine.core.sequence import ImageSpan, Sequence, SequenceStatus
from services.text_engine.core.speculation.interface import Drafter
from services.text_engine.core.stopping import Finish
from shared.sampling import SamplingParams

EOS = 2
PLACEHOLDER = 7
FIRST_WORD = 10  # no generated token is smaller: answers end by length unless a test scripts another end
NUM_WORDS = 990
CAT, PIZZA = "c" * 64, "d" * 64


class Images:
    """An image source with a shelf: an image is ready once somebody has put it there."""

    def __init__(self, *ready: str) -> None:
        self.ready = set(ready)
        self.asked: list[str] = []

    def is_ready(self, sequence: Sequence, span: ImageSpan) -> bool:
        self.asked.append(span.image_key)
        return span.image_key in self.ready


def make_sequence(
    name: str,
    prompt: int | list[int],
    *,
    max_tokens: int = 8,
    images: tuple[ImageSpan, ...] = (),
    priority: int = 0,
    salt: bytes = b"",
    **sampling: object,
) -> Sequence:
    """A request for `max_tokens` tokens; a prompt given as a length shares its tokens with namesakes only."""
    token_ids = list(prompt) if isinstance(prompt, list) else [crc32(f"{name} {i}".encode()) for i in range(prompt)]
    for span in images:
        token_ids[span.start : span.end] = [PLACEHOLDER] * span.num_tokens
    return Sequence(
        name,
        token_ids,
        len(token_ids),
        SamplingParams(**sampling),
        len(token_ids) + max_tokens,
        images=images,
        priority=priority,
        cache_salt=salt,
    )


def picture_question(name: str, image: str, *, start: int = 10, rows: int = 12, tail: int = 6) -> Sequence:
    token_ids = list(range(100, 100 + start + rows + tail))
    return make_sequence(name, token_ids, images=(ImageSpan(image, start, rows),))


def content(sequence: Sequence, position: int) -> tuple[int, int]:
    """What the model reads at a position: a token, or one row of one image."""
    for span in sequence.images_between(position, position + 1):
        return crc32(span.image_key.encode()), position - span.start
    return 0, sequence.token_ids[position]


def next_word(keys: list[int]) -> int:
    return FIRST_WORD + hash(tuple(keys)) % NUM_WORDS


def answer_alone(sequence: Sequence) -> list[int]:
    """What the model answers to a sequence that has the machine to itself, up to its length limit; no EOS."""
    alone = Sequence(
        "alone",
        sequence.token_ids[: sequence.num_prompt_tokens],
        sequence.num_prompt_tokens,
        sequence.sampling,
        sequence.max_total_tokens,
        images=sequence.images,
    )
    keys: list[int] = []
    while alone.num_tokens < alone.max_total_tokens:
        for position in range(len(keys), alone.num_tokens):
            keys.append(hash((keys[-1] if keys else 0, content(alone, position))))
        alone.token_ids.append(next_word(keys))
    return alone.generated_token_ids


class KvRunner:
    """A model whose key at a position depends on all content up to it, and whose next token depends on all keys.

    Keys live in slots `block * block_size + offset`, as on a real device: a block that was shared wrongly, reused too
    early or not computed at all changes the answer.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.keys = [0] * (num_blocks * block_size)

    def slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def execute_model(self, batch: Batch) -> list[SampledToken]:
        sampled = []
        size = self.block_size
        for source, target, direction in batch.copies:
            assert direction == "on_device"
            self.keys[target * size : (target + 1) * size] = self.keys[source * size : (source + 1) * size]
        for item in batch.scheduled:
            sequence = item.sequence
            key = self.keys[self.slot(sequence, item.start - 1)] if item.start else 0
            for position, token_id in zip(range(item.start, item.end), item.token_ids, strict=True):
                is_draft = position >= sequence.num_tokens
                key = hash((key, (0, token_id) if is_draft else content(sequence, position)))
                self.keys[self.slot(sequence, position)] = key
            if item.samples:
                sampled.append(self._sample(item))
        return sampled

    def _sample(self, item: ScheduledSequence) -> SampledToken:
        """The words after the last token and after each draft token, up to the first that is not the draft's."""
        words: list[SampledToken] = []
        for position, guess in enumerate((*item.draft_token_ids, None), start=item.sequence.num_tokens):
            words.append(SampledToken(next_word(self._read(item.sequence, position))))
            if words[-1].token_id != guess:
                break
        return replace(words[-1], accepted=tuple(words[:-1]))

    def _read(self, sequence: Sequence, end: int) -> list[int]:
        keys: list[int] = []
        for block in sequence.block_table:
            keys += self.keys[block * self.block_size : (block + 1) * self.block_size]
        return keys[:end]


class Driver:
    """The engine's loop without an engine; checks every invariant around each step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        images: Images | None = None,
        caching: bool = True,
        eos_token_ids: frozenset[int] = frozenset({EOS}),
        max_prefill_tokens_while_decoding: int | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.images = images or Images()
        self.pool = BlockPool(num_blocks)
        self.blocks = BlockManager(self.pool, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            self.blocks,
            self.images,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_token_ids=eos_token_ids,
            max_prefill_tokens_while_decoding=max_prefill_tokens_while_decoding,
            drafter=drafter,
        )
        self.runner = KvRunner(num_blocks, block_size)
        self.finished: dict[str, Finish] = {}
        self.rewrite: Callable[[Sequence, SampledToken], SampledToken] = lambda _, sampled: sampled

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)
        check_at_rest(self)

    def schedule(self) -> Batch:
        batch = self.scheduler.schedule()
        check_batch(self, batch)
        return batch

    def update(self, batch: Batch) -> list[StepOutput]:
        sampled = self.runner.execute_model(batch)
        sampled = [self.rewrite(item.sequence, token) for item, token in zip(batch.sampling, sampled, strict=True)]
        outputs = self.scheduler.update(batch, sampled)
        for output in outputs:
            if output.finish is not None:
                assert output.sequence.request_id not in self.finished, "a sequence finished twice"
                self.finished[output.sequence.request_id] = output.finish
        check_at_rest(self)
        return outputs

    def step(self) -> dict[str, int]:
        """One step: how many tokens it computed for whom, in the order of the batch."""
        batch = self.schedule()
        computed = {item.sequence.request_id: item.num_new_tokens for item in batch.scheduled}
        self.update(batch)
        return computed

    def step_until(self, reached: Callable[[], bool], max_steps: int = 200) -> None:
        for _ in range(max_steps):
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached within {max_steps} steps")

    def run(self, max_steps: int = 1000) -> int:
        """Step until nothing is left to do; how many steps that took."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work:
                return num_steps
            assert self.step(), f"nothing can run, and yet work is left: {self.scheduler.waiting}"
        raise AssertionError(f"still at work after {max_steps} steps: {self.scheduler.running}")


def check_at_rest(driver: Driver) -> None:
    """What holds between two calls of the scheduler."""
    scheduler, pool = driver.scheduler, driver.pool
    assert pool.num_free + pool.num_referenced + pool.num_cached == pool.num_blocks
    references = Counter(block for sequence in scheduler.running for block in sequence.block_table)
    assert all(pool.ref_count(block) == references[block] for block in range(pool.num_blocks)), "blocks leak"
    assert len(scheduler.running) <= scheduler.max_num_seqs
    for queue, status in ((scheduler.running, SequenceStatus.RUNNING), (scheduler.waiting, SequenceStatus.WAITING)):
        assert all(sequence.status is status for sequence in queue)
        assert queue == sorted(queue, key=lambda s: s.order)
        assert len(set(queue)) == len(queue)
    for sequence in scheduler.waiting:
        assert (sequence.block_table, sequence.num_computed_tokens) == ([], 0)
    for sequence in scheduler.running:
        assert 0 <= sequence.num_computed_tokens < sequence.num_tokens
        assert len(set(sequence.block_table)) == len(sequence.block_table)
        assert len(sequence.block_table) == driver.blocks.num_blocks_for(sequence.num_computed_tokens)


def check_batch(driver: Driver, batch: Batch) -> None:
    """What holds for every scheduled batch."""
    assert batch.num_tokens <= driver.scheduler.max_num_batched_tokens
    assert len({item.sequence for item in batch.scheduled}) == len(batch.scheduled)
    written: Counter[int] = Counter()
    for item in batch.scheduled:
        sequence = item.sequence
        assert sequence in driver.scheduler.running
        assert item.num_new_tokens > 0
        assert item.start == sequence.num_computed_tokens
        assert item.end <= sequence.num_tokens + len(item.draft_token_ids)
        if item.draft_token_ids:
            assert item.samples
            assert item.end < sequence.max_total_tokens, "a guess at more than the answer may hold"
        assert item.end <= len(sequence.block_table) * driver.blocks.block_size, "a token has no slot"
        for position in range(item.start, item.end):
            block = sequence.block_table[position // driver.blocks.block_size]
            assert driver.pool.ref_count(block) == 1, "a block that others read is written"
            written[driver.runner.slot(sequence, position)] += 1
        for span in sequence.images_between(item.start, item.end):
            assert span.image_key in driver.images.ready, "rows of an image that is not there"
    assert all(count == 1 for count in written.values()), "two tokens share a slot"


# --- one sequence -------------------------------------------------------------------------------------------------


def test_a_sequence_is_prefilled_then_decoded_token_by_token():
    driver = Driver()
    driver.add(a := make_sequence("a", 10, max_tokens=3))
    assert [driver.step() for _ in range(3)] == [{"a": 10}, {"a": 1}, {"a": 1}]
    assert driver.finished == {"a": Finish("length")}
    assert a.generated_token_ids == answer_alone(a)
    assert a.status is SequenceStatus.FINISHED


def test_nothing_to_do_is_an_empty_batch():
    driver = Driver()
    assert not driver.scheduler.has_work
    assert driver.schedule().is_empty


@pytest.mark.parametrize("budget", [8, 9, 13, 37, 38])
def test_a_prompt_is_cut_into_chunks_within_the_budget(budget: int):
    driver = Driver(max_num_batched_tokens=budget)
    driver.add(a := make_sequence("a", 37, max_tokens=2))
    chunks = []
    while a.num_generated_tokens == 0:
        chunks.append(driver.step()["a"])
    assert chunks == [budget] * (37 // budget) + ([37 % budget] if 37 % budget else [])
    driver.run()
    assert a.generated_token_ids == answer_alone(a)


def test_only_the_step_that_reaches_the_last_token_samples():
    driver = Driver(max_num_batched_tokens=10)
    driver.add(make_sequence("a", 20))
    assert driver.schedule().sampling == []
    driver.step()
    batch = driver.schedule()
    assert batch.sampling == batch.scheduled


def test_a_finished_sequence_gives_its_blocks_back_in_the_same_step():
    driver = Driver(num_blocks=8)
    driver.add(make_sequence("a", 9, max_tokens=1))
    driver.step()
    assert driver.finished.keys() == {"a"}
    assert driver.pool.num_referenced == 0
    assert driver.pool.num_available == 8


def test_an_end_token_finishes_the_sequence_and_stays_its_last_token():
    driver = Driver()
    driver.rewrite = lambda sequence, sampled: SampledToken(EOS) if sequence.num_generated_tokens == 2 else sampled
    driver.add(a := make_sequence("a", 5, max_tokens=20))
    driver.run()
    assert driver.finished["a"] == Finish("stop", text_excludes_last=True)
    assert a.generated_token_ids == [*answer_alone(a)[:2], EOS]


def test_each_output_carries_its_sequence_token_and_logprobs():
    driver = Driver()
    logprobs = Logprobs(-0.5, [11, 12], [-0.5, -1.5])
    driver.rewrite = lambda _, sampled: SampledToken(sampled.token_id, logprobs)
    driver.add(a := make_sequence("a", 5), b := make_sequence("b", 5))
    outputs = driver.update(driver.schedule())
    assert [output.sequence for output in outputs] == [a, b]
    assert [output.sampled.token_id for output in outputs] == [a.token_ids[-1], b.token_ids[-1]]
    assert all(output.sampled.logprobs is logprobs and output.finish is None for output in outputs)


def test_a_step_budget_below_one_token_per_sequence_is_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 7, below max_num_seqs \(8\)"):
        Driver(max_num_batched_tokens=7, max_num_seqs=8)


def test_a_sequence_that_exactly_fills_the_pool_runs_to_its_end():
    driver = Driver(num_blocks=4, block_size=4)
    driver.add(a := make_sequence("a", 9, max_tokens=16 - 9 + 1))  # the last token is never computed
    driver.run()
    assert a.generated_token_ids == answer_alone(a)
    assert a.num_preemptions == 0


# --- order within a step ------------------------------------------------------------------------------------------


def test_decodes_go_first_and_prompts_share_what_is_left():
    driver = Driver(max_num_batched_tokens=16)
    driver.add(make_sequence("a", 5, max_tokens=50), make_sequence("b", 5, max_tokens=50))
    driver.step()
    driver.add(make_sequence("c", 40))
    assert driver.step() == {"a": 1, "b": 1, "c": 14}
    assert list(driver.step()) == ["a", "b", "c"]


def test_equal_priorities_are_served_in_order_of_arrival():
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=4)
    driver.add(*(make_sequence(name, 8, max_tokens=1) for name in "abc"))
    assert [driver.step() for _ in range(3)] == [{"a": 8}, {"b": 8}, {"c": 8}]


def test_a_lower_priority_value_goes_first_whenever_it_arrives():
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=4)
    driver.add(*(make_sequence(name, 8, max_tokens=1, priority=p) for name, p in [("c", 5), ("b", 0), ("a", -1)]))
    assert [driver.step() for _ in range(3)] == [{"a": 8}, {"b": 8}, {"c": 8}]


def test_no_more_sequences_run_than_allowed():
    driver = Driver(max_num_seqs=2)
    driver.add(*(make_sequence(name, 3, max_tokens=2) for name in "abcd"))
    assert [list(driver.step()) for _ in range(4)] == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]


def test_a_slot_freed_by_one_sequence_goes_to_the_next_in_the_next_step():
    driver = Driver(max_num_seqs=2)
    driver.add(make_sequence("a", 3, max_tokens=1), make_sequence("b", 3, max_tokens=9), make_sequence("c", 3))
    driver.step()
    assert driver.step() == {"b": 1, "c": 3}


def test_a_running_stream_gets_a_token_in_every_step_however_many_prompts_arrive():
    """Case D14."""
    driver = Driver(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=32)
    driver.add(stream := make_sequence("stream", 5, max_tokens=40))
    driver.step()
    for i in range(39):
        driver.add(make_sequence(f"book {i}", 90, max_tokens=2))
        assert driver.step()["stream"] == 1
    assert stream.generated_token_ids == answer_alone(stream)


def test_a_quarter_of_the_budget_is_kept_for_short_prompts():
    driver = Driver(max_num_batched_tokens=32, num_blocks=200)
    driver.add(make_sequence("book", 300), make_sequence("question", 8, max_tokens=1))
    assert driver.step() == {"book": 24, "question": 8}
    assert driver.step() == {"book": 32}  # nobody short waits: the book gets all of it


def test_a_question_does_not_wait_behind_a_book_that_is_being_read():
    """Case D14: a tiny prompt behind a huge one, whether the huge one runs or waits."""
    driver = Driver(max_num_batched_tokens=32, num_blocks=1000)
    driver.add(book := make_sequence("book", 2000), make_sequence("other book", 1000))
    driver.step()
    driver.add(question := make_sequence("question", 7))
    assert driver.step()["question"] == 7
    assert question.num_generated_tokens == 1
    assert book.num_uncomputed_tokens > 1900


def test_a_prompt_just_above_a_quarter_waits_its_turn():
    driver = Driver(max_num_batched_tokens=32, num_blocks=200)
    driver.add(make_sequence("book", 60), make_sequence("nine", 9, max_tokens=1))
    assert [driver.step() for _ in range(3)] == [{"book": 32}, {"book": 28, "nine": 4}, {"book": 1, "nine": 5}]


def test_a_short_prompt_without_a_slot_takes_nothing_from_those_that_run():
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=32)
    driver.add(make_sequence("book", 100), make_sequence("question", 4))
    driver.step()
    assert driver.step() == {"book": 32}


def test_a_book_is_not_starved_by_questions_where_decodes_fill_most_of_the_step():
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=8, num_blocks=400)
    driver.add(*(make_sequence(f"stream {i}", 2, max_tokens=400) for i in range(6)))
    for _ in range(6):
        driver.step()
    driver.add(book := make_sequence("book", 40, max_tokens=1))
    for i in range(200):
        driver.add(make_sequence(f"question {i}", 2, max_tokens=1))
        driver.step()
    assert book.status is SequenceStatus.FINISHED


# --- memory -------------------------------------------------------------------------------------------------------


def test_nobody_overtakes_a_sequence_that_waits_for_memory():
    driver = Driver(num_blocks=10)
    driver.add(make_sequence("a", 22, max_tokens=4))  # holds 6 of 10 blocks and grows to 7
    driver.step()
    driver.add(make_sequence("large", 17, max_tokens=1), make_sequence("small", 3, max_tokens=1))
    computed = [driver.step() for _ in range(4)]
    assert computed == [{"a": 1}, {"a": 1}, {"a": 1}, {"large": 17, "small": 3}]


def test_a_sequence_without_room_for_its_whole_prompt_does_not_start():
    driver = Driver(num_blocks=10, max_num_batched_tokens=16)
    driver.add(make_sequence("a", 23, max_tokens=3))
    driver.step()
    driver.step()
    driver.add(b := make_sequence("b", 17, max_tokens=1))  # its first chunk would fit
    assert driver.step() == {"a": 1}
    driver.run()
    assert b.num_preemptions == 0


def preempting_run(num_blocks: int, **engine: object) -> tuple[Driver, list[Sequence]]:
    """Eight long answers that do not fit together."""
    driver = Driver(num_blocks=num_blocks, **engine)
    sequences = [make_sequence(f"r{i}", 7 + i, max_tokens=60, ignore_eos=True) for i in range(8)]
    driver.add(*sequences)
    driver.run(max_steps=2000)
    return driver, sequences


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_sequences_answer_as_if_undisturbed(caching: bool):
    """Case D3."""
    driver, sequences = preempting_run(40, caching=caching)
    assert driver.scheduler.num_preemptions >= 3
    assert driver.scheduler.num_preemptions == sum(sequence.num_preemptions for sequence in sequences)
    for sequence in sequences:
        assert sequence.num_generated_tokens == 60
        assert sequence.generated_token_ids == answer_alone(sequence)
    assert driver.pool.num_available == 40


def test_a_large_pool_preempts_nobody():
    driver, _ = preempting_run(8 * 19)
    assert driver.scheduler.num_preemptions == 0


def test_the_last_in_order_is_preempted_and_keeps_its_tokens():
    driver = Driver(num_blocks=6)
    driver.add(a := make_sequence("a", 8, max_tokens=12), b := make_sequence("b", 8, max_tokens=12))
    while driver.scheduler.num_preemptions == 0 and driver.scheduler.has_work:
        before = list(b.generated_token_ids)
        driver.step()
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    assert b.status is SequenceStatus.WAITING
    assert b.generated_token_ids == before
    driver.run()
    assert b.generated_token_ids == answer_alone(b)


def test_the_least_urgent_is_preempted_even_if_it_came_first():
    driver = Driver(num_blocks=6)
    idle, urgent = make_sequence("idle", 8, max_tokens=12, priority=1), make_sequence("urgent", 8, max_tokens=12)
    driver.add(idle, urgent)
    driver.run()
    assert urgent.num_preemptions == 0
    assert idle.num_preemptions >= 1


def test_a_preempted_sequence_goes_on_before_later_arrivals():
    driver = Driver(num_blocks=6)
    driver.add(make_sequence("a", 8, max_tokens=12), make_sequence("b", 8, max_tokens=12))
    driver.step_until(lambda: driver.scheduler.num_preemptions > 0)
    driver.add(make_sequence("c", 3, max_tokens=1))
    driver.run()
    assert list(driver.finished) == ["a", "c", "b"] or list(driver.finished) == ["a", "b", "c"]
    assert driver.scheduler.num_preemptions == 1


def test_cached_tokens_are_counted_once_at_the_first_start_not_after_a_preemption():
    _, sequences = preempting_run(40)
    assert all(sequence.num_cached_tokens == 0 for sequence in sequences)


def early_prompt_and_late_streams() -> tuple[Driver, Sequence]:
    """A long prompt that fits when it arrives, and later arrivals whose answers grow while it is still prefilled."""
    driver = Driver(num_blocks=24, max_num_batched_tokens=16)
    driver.add(early := make_sequence("early", 90, max_tokens=1))
    driver.step()
    driver.add(*(make_sequence(f"late {i}", 3, max_tokens=20) for i in range(7)))
    return driver, early


def test_a_prompt_is_not_preempted_for_the_sake_of_later_arrivals():
    driver, early = early_prompt_and_late_streams()
    driver.run()
    assert early.num_preemptions == 0


def test_nobody_starts_with_the_blocks_of_a_sequence_preempted_in_the_same_step():
    driver = Driver(num_blocks=20, max_num_batched_tokens=16)
    stream = make_sequence("stream", 8, max_tokens=40)
    driver.add(stream, prompt := picture_question("prompt", CAT, start=20, rows=28, tail=2))
    driver.step_until(lambda: stream.num_tokens == 30)
    driver.images.ready.add(CAT)
    driver.add(*(make_sequence(f"late {i}", 5, max_tokens=8) for i in range(6)))
    while prompt.num_preemptions == 0 and driver.scheduler.has_work:
        before = set(driver.scheduler.waiting)
        driver.step()
        started = before - set(driver.scheduler.waiting)
    assert prompt.num_preemptions == 1
    assert not started


# --- abort --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_an_abort_between_steps_frees_everything_at_once(num_steps: int):
    """Case D6: while waiting, in the prompt, in the answer."""
    driver = Driver(max_num_batched_tokens=8)
    driver.add(a := make_sequence("a", 20, max_tokens=100))
    for _ in range(num_steps):
        driver.step()
    driver.scheduler.finish(a)
    check_at_rest(driver)
    assert not driver.scheduler.has_work
    assert driver.pool.num_referenced == 0
    assert a.status is SequenceStatus.FINISHED


def test_an_abort_of_a_finished_sequence_changes_nothing():
    driver = Driver()
    driver.add(a := make_sequence("a", 5, max_tokens=1), make_sequence("b", 5))
    driver.step()
    driver.scheduler.finish(a)
    driver.scheduler.finish(a)
    driver.run()
    assert driver.finished.keys() == {"a", "b"}


def test_an_abort_while_the_step_is_computed_drops_its_token_only():
    driver = Driver()
    driver.add(a := make_sequence("a", 9), b := make_sequence("b", 9), c := make_sequence("c", 9))
    batch = driver.schedule()
    sampled = driver.runner.execute_model(batch)
    driver.scheduler.finish(b)
    outputs = driver.scheduler.update(batch, sampled)
    assert [output.sequence for output in outputs] == [a, c]
    assert b.num_generated_tokens == 0
    driver.run()
    assert a.generated_token_ids == answer_alone(a)
    assert c.generated_token_ids == answer_alone(c)


def test_a_preempted_sequence_can_be_aborted():
    driver = Driver(num_blocks=6)
    driver.add(a := make_sequence("a", 8, max_tokens=12), b := make_sequence("b", 8, max_tokens=12))
    driver.step_until(lambda: b.num_preemptions > 0)
    driver.scheduler.finish(b)
    driver.run()
    assert driver.finished.keys() == {"a"}
    assert a.generated_token_ids == answer_alone(a)


def test_what_an_aborted_sequence_computed_serves_the_next_one():
    driver = Driver()
    driver.add(a := make_sequence("same", 21))
    driver.step()
    driver.scheduler.finish(a)
    driver.add(b := make_sequence("same", 21))
    driver.run()
    assert b.num_cached_tokens == 20
    assert b.generated_token_ids == answer_alone(b)


# --- errors -------------------------------------------------------------------------------------------------------


def broken(name: str) -> Callable[[Sequence, SampledToken], SampledToken]:
    def rewrite(sequence: Sequence, sampled: SampledToken) -> SampledToken:
        return SampledToken(0, error="logits are not finite") if sequence.request_id == name else sampled

    return rewrite


def test_a_row_without_finite_logits_ends_its_own_sequence_only():
    """Case D26."""
    driver = Driver()
    driver.rewrite = broken("b")
    driver.add(a := make_sequence("a", 9), b := make_sequence("b", 9), c := make_sequence("c", 9))
    outputs = driver.update(driver.schedule())
    assert [(o.sequence.request_id, o.sampled.error) for o in outputs if o.finish] == [("b", "logits are not finite")]
    assert driver.finished["b"] == Finish("abort")
    assert b.num_generated_tokens == 0
    driver.run()
    assert a.generated_token_ids == answer_alone(a)
    assert c.generated_token_ids == answer_alone(c)


def test_the_step_that_fails_publishes_nothing_of_that_sequence():
    driver = Driver()
    driver.rewrite = broken("a")
    driver.add(make_sequence("a", 9))
    driver.run()
    assert driver.pool.num_cached == 0


def test_a_failed_prompt_leaves_no_chunk_of_itself_in_the_prefix_cache():
    driver = Driver(max_num_batched_tokens=8)
    driver.rewrite = broken("a")
    driver.add(make_sequence("a", 20))
    driver.run()
    assert driver.pool.num_cached == 0


# --- prefix cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32, 48])
def test_a_prompt_sent_twice_computes_at_least_its_last_token(num_tokens: int, max_tokens: int):
    """Case D11."""
    driver = Driver(block_size=16, num_blocks=20)
    driver.add(first := make_sequence("same", num_tokens, max_tokens=max_tokens))
    driver.run()
    driver.finished.clear()
    driver.add(second := make_sequence("same", num_tokens, max_tokens=max_tokens))
    num_cached = (num_tokens - 1) // 16 * 16
    assert driver.step() == {"same": num_tokens - num_cached}
    assert second.num_cached_tokens == num_cached
    driver.run()
    assert second.generated_token_ids == first.generated_token_ids == answer_alone(first)


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32, 48])
def test_a_longer_prompt_goes_on_behind_the_shorter_ones_whole_blocks(num_tokens: int):
    driver = Driver(block_size=16, num_blocks=20)
    driver.add(make_sequence("same", num_tokens, max_tokens=1))
    driver.run()
    driver.finished.clear()
    driver.add(longer := make_sequence("same", num_tokens + 23))
    driver.run()
    assert longer.num_cached_tokens == num_tokens // 16 * 16
    assert longer.generated_token_ids == answer_alone(longer)


def test_the_same_new_prompt_by_many_at_once_is_computed_once():
    driver = Driver(max_num_batched_tokens=64)
    asking = [make_sequence("same", [*range(100, 132), question], max_tokens=3) for question in (1, 2, 3)]
    for i, sequence in enumerate(asking):
        sequence.request_id = f"q{i}"
    driver.add(*asking)
    assert driver.step() == {"q0": 33}
    assert driver.step() == {"q0": 1, "q1": 1, "q2": 1}
    driver.run()
    assert [sequence.num_cached_tokens for sequence in asking] == [0, 32, 32]
    assert all(sequence.generated_token_ids == answer_alone(sequence) for sequence in asking)


def test_a_sequence_that_waits_for_a_prefix_lets_others_go_ahead():
    driver = Driver(max_num_batched_tokens=64)
    first, twin = make_sequence("same", 33), make_sequence("same", 33)
    twin.request_id = "twin"
    driver.add(first, twin, make_sequence("other", 5))
    assert driver.step() == {"same": 33, "other": 5}
    assert driver.step() == {"same": 1, "other": 1, "twin": 1}


def test_a_sequence_that_shares_little_does_not_wait():
    driver = Driver()
    driver.add(make_sequence("a", [*range(100, 108)]), make_sequence("b", [*range(100, 108), *range(200, 220)]))
    assert driver.step() == {"a": 8, "b": 28}


def test_a_twin_whose_model_step_was_aborted_is_computed_after_all():
    driver = Driver()
    first, twin = make_sequence("same", 33), make_sequence("same", 33)
    twin.request_id = "twin"
    driver.add(first, twin)
    batch = driver.schedule()
    driver.scheduler.finish(first)
    driver.scheduler.update(batch, [SampledToken(11)])
    assert driver.step() == {"twin": 33}
    driver.run()
    assert twin.generated_token_ids == answer_alone(twin)


def test_without_prefix_caching_nobody_waits_and_nothing_is_shared():
    driver = Driver(caching=False)
    first, twin = make_sequence("same", 17), make_sequence("same", 17)
    twin.request_id = "twin"
    driver.add(first, twin)
    assert driver.step() == {"same": 17, "twin": 17}
    driver.run()
    assert (first.num_cached_tokens, twin.num_cached_tokens) == (0, 0)
    assert driver.pool.num_free == driver.pool.num_blocks


def test_another_salt_shares_nothing():
    driver = Driver()
    for salt in (b"a", b"b", b"a"):
        driver.add(last := make_sequence("same", 20, max_tokens=1, salt=salt))
        driver.run()
        driver.finished.clear()
        assert last.num_cached_tokens == (16 if salt == b"a" and last.arrival > 0 else 0)


# --- images -------------------------------------------------------------------------------------------------------


def test_text_before_a_missing_image_is_computed_and_nothing_beyond_it():
    driver = Driver()
    driver.add(a := picture_question("a", CAT))
    assert driver.images.asked == [CAT]  # fetching starts at arrival
    assert driver.step() == {"a": 10}
    assert driver.schedule().is_empty
    driver.images.ready.add(CAT)
    assert driver.step() == {"a": 18}
    driver.run()
    assert a.generated_token_ids == answer_alone(a)


def test_others_go_on_while_an_image_is_missing():
    driver = Driver()
    driver.add(picture_question("a", CAT, start=0), make_sequence("b", 5, max_tokens=3))
    assert [driver.step() for _ in range(4)] == [{"b": 5}, {"b": 1}, {"b": 1}, {}]
    assert driver.scheduler.has_work
    driver.images.ready.add(CAT)
    driver.run()
    assert driver.finished.keys() == {"a", "b"}


def test_images_are_taken_one_by_one_as_they_arrive():
    driver = Driver()
    spans = (ImageSpan(CAT, 4, 6), ImageSpan(PIZZA, 13, 6))
    driver.add(a := make_sequence("a", 24, images=spans))
    assert driver.images.asked == [CAT, PIZZA]
    driver.images.ready.add(PIZZA)  # the second picture does not help without the first
    assert driver.step() == {"a": 4}
    assert driver.step() == {}
    driver.images.ready.add(CAT)
    assert driver.step() == {"a": 20}
    driver.run()
    assert a.generated_token_ids == answer_alone(a)


@pytest.mark.parametrize("num_text", [0, 1, 3, 37])
@pytest.mark.parametrize("budget", [8, 9, 64, 577])
def test_chunks_that_cut_images_use_each_row_once_and_in_order(budget: int, num_text: int):
    """Case D13."""
    driver = Driver(images=Images(CAT, PIZZA), max_num_batched_tokens=budget)
    spans = (ImageSpan(CAT, num_text, 25), ImageSpan(PIZZA, num_text + 25, 25))
    driver.add(a := make_sequence("a", num_text + 60, images=spans))
    driver.run()
    assert a.generated_token_ids == answer_alone(a)


def test_a_picture_in_the_prefix_cache_is_never_asked_for_again():
    driver = Driver(images=Images(CAT))
    driver.add(picture_question("a", CAT))
    driver.run()
    driver.images.ready.clear()
    driver.images.asked.clear()
    driver.add(b := picture_question("b", CAT))
    driver.run()
    assert driver.images.asked == []
    assert b.num_cached_tokens == 24
    assert b.generated_token_ids == answer_alone(b)


def test_a_new_picture_asked_about_by_two_at_once_is_computed_once():
    """Both have started on the text when the image arrives: the second goes on from the first one's blocks."""
    driver = Driver()
    a, b = picture_question("a", CAT), picture_question("b", CAT)
    b.token_ids[-1] = 999
    driver.add(a, b)
    assert driver.step() == {"a": 10, "b": 10}
    driver.images.ready.add(CAT)
    assert driver.step() == {"a": 18}
    assert driver.step() == {"a": 1, "b": 4}
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 14)
    driver.run()
    assert a.generated_token_ids == answer_alone(a)
    assert b.generated_token_ids == answer_alone(b)


def test_what_is_found_after_a_preemption_is_not_counted_as_cached_again():
    driver = Driver()
    a, b = picture_question("a", CAT), picture_question("b", CAT)
    b.token_ids[-1] = 999
    b.num_preemptions, b.num_cached_tokens = 1, 14  # as it stands after a start like the one above
    driver.add(a, b)
    driver.step()
    driver.images.ready.add(CAT)
    driver.run()
    assert b.num_cached_tokens == 14


def test_an_image_is_not_needed_any_more_once_its_rows_are_computed():
    driver = Driver(images=Images(CAT), max_num_batched_tokens=22, max_num_seqs=4)
    driver.add(a := picture_question("a", CAT, start=10, rows=12, tail=6))
    assert driver.step() == {"a": 22}  # the last row and not a token more
    driver.images.ready.clear()
    driver.run()
    assert a.generated_token_ids == answer_alone(a)


def test_every_picture_is_answered_by_its_own_rows():
    """Case D7: cat, cat, pizza, pizza, cat."""
    driver = Driver(images=Images(CAT, PIZZA))
    cached, answers = [], []
    for i, image in enumerate((CAT, CAT, PIZZA, PIZZA, CAT)):
        driver.add(sequence := picture_question(f"r{i}", image))
        driver.run()
        cached.append(sequence.num_cached_tokens)
        answers.append(sequence.generated_token_ids)
        assert sequence.generated_token_ids == answer_alone(sequence)
    assert cached == [0, 24, 8, 24, 24]
    assert answers[0] == answers[1] == answers[4] != answers[2] == answers[3]


def test_a_preempted_picture_request_waits_until_its_image_is_there_again():
    """Case D5: the embedding is gone when the sequence is resumed."""
    driver = Driver(num_blocks=8, images=Images(CAT), caching=False)
    a = make_sequence("a", 8, max_tokens=20)
    driver.add(a, b := picture_question("b", CAT, start=2, rows=4, tail=4))
    driver.step_until(lambda: b.num_preemptions > 0)
    driver.images.ready.clear()
    driver.step_until(lambda: a.status is SequenceStatus.FINISHED)
    for _ in range(3):
        driver.step()
    assert b.num_computed_tokens == 2
    driver.images.ready.add(CAT)
    driver.run()
    assert b.generated_token_ids == answer_alone(b)


def test_a_stream_is_not_preempted_while_another_sequence_only_waits_for_its_image():
    driver = Driver(num_blocks=10)
    driver.add(
        picture_question("waits", CAT, start=24, rows=4, tail=2), stream := make_sequence("stream", 8, max_tokens=12)
    )
    driver.step()
    for _ in range(20):
        driver.step()
    assert stream.status is SequenceStatus.FINISHED


def test_a_short_prompt_that_cannot_run_reserves_nothing():
    driver = Driver(max_num_batched_tokens=64, num_blocks=200)
    driver.add(make_sequence("book", 300), picture_question("waits", CAT, start=0, rows=8, tail=2))
    assert driver.step() == {"book": 64}
