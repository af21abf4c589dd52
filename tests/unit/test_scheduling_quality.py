"""How well the scheduler serves: short steps while answers are being written, and nobody who waits without need."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.core.batch import SampledToken
from services.text_engine.core.sequence import PRIORITY_HEAD_START, ImageSpan, Sequence, SequenceStatus
from tests.unit.test_scheduler import CAT, PIZZA, Driver, Images, answer_alone, make_sequence, picture_question
from tests.unit.test_whole_images import seeing_ahead

# --- steps while sequences decode --------------------------------------------------------------------------------


def test_prompts_alone_fill_the_step_and_beside_a_decode_only_their_part_of_it():
    driver = Driver(num_blocks=200, max_num_batched_tokens=64, max_prefill_tokens_while_decoding=10)
    driver.add(make_sequence("a", 100, max_tokens=20))
    assert [driver.step() for _ in range(3)] == [{"a": 64}, {"a": 36}, {"a": 1}]
    driver.add(make_sequence("b", 25, max_tokens=1))
    assert [driver.step() for _ in range(3)] == [{"a": 1, "b": 10}, {"a": 1, "b": 10}, {"a": 1, "b": 5}]


def test_several_prompts_share_that_part():
    driver = Driver(num_blocks=200, max_num_batched_tokens=64, max_prefill_tokens_while_decoding=10)
    driver.add(make_sequence("stream", 3, max_tokens=20))
    driver.step()
    driver.add(make_sequence("b", 7, max_tokens=1), make_sequence("c", 7, max_tokens=1))
    assert driver.step() == {"stream": 1, "b": 7, "c": 3}


def test_a_limit_beyond_the_step_changes_nothing():
    driver = Driver(num_blocks=200, max_num_batched_tokens=16, max_prefill_tokens_while_decoding=1000)
    driver.add(make_sequence("stream", 3, max_tokens=20))
    driver.step()
    driver.add(make_sequence("b", 40))
    assert driver.step() == {"stream": 1, "b": 15}


def test_half_of_that_part_is_kept_for_short_prompts():
    driver = Driver(num_blocks=200, max_num_batched_tokens=64, max_prefill_tokens_while_decoding=20)
    driver.add(make_sequence("stream", 3, max_tokens=20))
    driver.step()
    driver.add(make_sequence("book", 300), make_sequence("question", 8, max_tokens=1))
    assert driver.step() == {"stream": 1, "book": 12, "question": 8}
    assert driver.step() == {"stream": 1, "book": 20}


def test_a_new_question_in_a_long_conversation_is_short():
    driver = Driver(num_blocks=400, max_num_batched_tokens=64)
    history = list(range(1000, 1200))
    driver.add(make_sequence("first turn", history, max_tokens=1))
    driver.run()
    driver.add(make_sequence("book", 500))
    driver.step()
    driver.add(make_sequence("second turn", [*history, *range(10)], max_tokens=1))
    assert driver.step()["second turn"] == 10


@pytest.mark.parametrize("max_prefill", [1, 5])
def test_a_bidirectional_image_larger_than_that_part_takes_what_it_needs(max_prefill: int):
    driver = Driver(
        images=Images(CAT),
        num_blocks=200,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_prefill_tokens_while_decoding=max_prefill,
    )
    driver.add(stream := make_sequence("stream", 3, max_tokens=60))
    driver.step()
    rows = driver.scheduler.max_whole_span
    driver.add(a := make_sequence("a", rows + 8, max_tokens=2, images=(seeing_ahead(CAT, 4, rows),)))
    sizes = []
    while a.status is not SequenceStatus.FINISHED:
        sizes.append(driver.step().get("a", 0))
    assert max(sizes) == rows
    driver.run()
    assert a.generated_token_ids == answer_alone(a)
    assert stream.generated_token_ids == answer_alone(stream)


# --- starvation, on a simulated clock -------------------------------------------------------------------------------


def seconds(computed: dict[str, int]) -> float:
    """A step takes 10 ms, and each of its tokens 0.25 ms."""
    return 0.010 + 0.00025 * sum(computed.values())


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    max_prefill=st.sampled_from([8, 24, 48]),
    num_blocks=st.sampled_from([60, 150, 600]),
)
def test_with_any_traffic_gaps_are_short_and_every_prompt_gets_its_turn(seed: int, max_prefill: int, num_blocks: int):
    """A gap is a step of at most `max_prefill` prompt tokens and a token for every other sequence; no step is empty."""
    rng = random.Random(seed)
    driver = Driver(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_prefill_tokens_while_decoding=max_prefill,
    )
    arrivals = sorted(rng.uniform(0, 3) for _ in range(40))
    coming = [
        (arrival, make_sequence(f"r{i}", rng.choice([6, 20, 90, 400]), max_tokens=rng.randint(1, 30)))
        for i, arrival in enumerate(arrivals)
    ]
    total_tokens = sum(sequence.max_total_tokens for _, sequence in coming)
    longest_gap = seconds({"prompts": max_prefill, "decodes": 16})
    clock = 0.0
    latest: dict[Sequence, float] = {}
    preempted: Counter[Sequence] = Counter()
    alive: list[Sequence] = []
    while coming or driver.scheduler.has_work:
        while coming and (coming[0][0] <= clock or not driver.scheduler.has_work):
            clock = max(clock, coming[0][0])
            alive.append(coming.pop(0)[1])
            driver.add(alive[-1])
        before = {sequence: sequence.num_generated_tokens for sequence in alive}
        clock += seconds(driver.step())
        for sequence, num_tokens in before.items():
            if sequence.num_generated_tokens == num_tokens:
                continue
            if sequence in latest and sequence.num_preemptions == preempted[sequence]:
                assert clock - latest[sequence] <= longest_gap + 1e-9
            latest[sequence], preempted[sequence] = clock, sequence.num_preemptions
    assert all(sequence.generated_token_ids == answer_alone(sequence) for sequence in alive)
    # Every step computes something, so that all is over in the time of all tokens one by one; preemption may double it.
    assert clock <= 3 + 2 * total_tokens * seconds({"one": 1})


def test_a_book_is_read_at_half_the_limit_however_many_questions_come():
    driver = Driver(num_blocks=600, max_num_seqs=16, max_num_batched_tokens=64, max_prefill_tokens_while_decoding=16)
    driver.add(make_sequence("stream", 3, max_tokens=500))
    driver.step()
    driver.add(book := make_sequence("book", 400, max_tokens=1))
    num_steps = 0
    while book.status is not SequenceStatus.FINISHED:
        driver.add(*(make_sequence(f"question {num_steps} {i}", 7, max_tokens=1) for i in range(2)))
        driver.step()
        num_steps += 1
    assert num_steps <= 400 // 8 + 1


# --- priorities -----------------------------------------------------------------------------------------------------


def test_whoever_waits_is_overtaken_by_a_bounded_number_of_more_urgent_requests():
    driver = Driver(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=8)
    driver.add(patient := make_sequence("patient", 8, max_tokens=1, priority=1))
    num_overtaking = 0
    while patient.status is not SequenceStatus.FINISHED:
        for _ in range(2):  # twice of what the engine can do
            driver.scheduler.add(make_sequence(f"urgent {num_overtaking}", 8, max_tokens=1))
            num_overtaking += 1
        driver.scheduler.update(batch := driver.scheduler.schedule(), driver.runner.execute_model(batch))
        assert num_overtaking <= 2 * PRIORITY_HEAD_START + 2
    assert num_overtaking > PRIORITY_HEAD_START


def test_within_a_thousand_arrivals_the_more_urgent_goes_first():
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=4)
    driver.add(make_sequence("patient", 8, max_tokens=1, priority=1))
    driver.add(*(make_sequence(f"urgent {i}", 8, max_tokens=1) for i in range(3)))
    assert [list(driver.step()) for _ in range(4)] == [["urgent 0"], ["urgent 1"], ["urgent 2"], ["patient"]]


# --- other people's images --------------------------------------------------------------------------------------------


def waiting_for_images(driver: Driver, count: int, **shape: int) -> list[Sequence]:
    """So many picture questions that have computed their text and can do no more."""
    sequences = [picture_question(f"picture {i}", CAT, **shape) for i in range(count)]
    driver.add(*sequences)
    while driver.step():
        pass
    return sequences


def test_text_does_not_wait_for_a_slot_that_waits_for_an_image():
    driver = Driver(max_num_seqs=4, num_blocks=200)
    pictures = waiting_for_images(driver, 4, start=9)
    driver.add(text := make_sequence("text", 10, max_tokens=3))
    assert driver.step() == {"text": 10}
    driver.step_until(lambda: text.status is SequenceStatus.FINISHED, max_steps=3)
    driver.images.ready.add(CAT)
    driver.run()
    assert all(sequence.generated_token_ids == answer_alone(sequence) for sequence in pictures)


def test_text_does_not_wait_for_memory_that_waits_for_an_image():
    driver = Driver(max_num_seqs=8, num_blocks=24)
    waiting_for_images(driver, 1, start=80, rows=4, tail=4)
    driver.add(make_sequence("text", 40, max_tokens=3))
    assert driver.step() == {"text": 40}
    driver.images.ready.add(CAT)
    driver.run()


def test_text_behind_a_picture_question_without_a_slot_goes_first():
    driver = Driver(max_num_seqs=2, num_blocks=200)
    waiting_for_images(driver, 2, start=9)
    driver.add(make_sequence("new picture", 30, images=(ImageSpan(PIZZA, 12, 6),)), make_sequence("text", 5))
    assert driver.step() == {"text": 5}


def test_a_picture_question_whose_image_is_there_takes_the_place_of_one_whose_image_is_not():
    driver = Driver(images=Images(PIZZA), max_num_seqs=2, num_blocks=200)
    waiting_for_images(driver, 2, start=9)
    driver.add(make_sequence("ready", 30, max_tokens=2, images=(ImageSpan(PIZZA, 12, 6),)))
    assert driver.step() == {"ready": 30}


def test_nobody_is_set_aside_for_a_request_that_cannot_start_even_then():
    driver = Driver(max_num_seqs=8, num_blocks=24)
    driver.add(make_sequence("stream", 40, max_tokens=30), picture := picture_question("picture", CAT, start=9))
    for _ in range(3):
        driver.step()
    assert picture.num_computed_tokens == 9
    driver.add(make_sequence("large", 80, max_tokens=2))
    for _ in range(5):
        assert "large" not in driver.step()
    assert picture.num_preemptions == 0


def test_those_that_wait_for_images_do_not_push_each_other_out():
    driver = Driver(max_num_seqs=2, num_blocks=200, caching=False)
    waiting_for_images(driver, 5, start=9)
    for _ in range(20):
        assert driver.step() == {}
    assert driver.scheduler.num_preemptions == 0


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_newcomer_leaves_those_that_run_room_to_grow():
    driver = Driver(num_blocks=20, block_size=4)
    driver.add(*(make_sequence(f"stream {i}", 7, max_tokens=20) for i in range(2)))
    driver.step()
    assert driver.pool.num_available == 16
    driver.add(make_sequence("too large", 4 * 13), make_sequence("behind it", 3))
    assert list(driver.step()) == ["stream 0", "stream 1"]
    driver.run()
    assert driver.scheduler.num_preemptions == 0


def test_a_newcomer_that_leaves_enough_starts_at_once():
    driver = Driver(num_blocks=20, block_size=4)
    driver.add(*(make_sequence(f"stream {i}", 7, max_tokens=20) for i in range(2)))
    driver.step()
    driver.add(make_sequence("fits", 4 * 12))
    assert driver.step()["fits"] == 48


@pytest.mark.parametrize("seed", range(3))
def test_a_full_cache_preempts_few(seed: int):
    """Without room to grow it would be about thirty."""
    rng = random.Random(seed)
    driver = Driver(num_blocks=100, block_size=16, max_num_seqs=32, max_num_batched_tokens=128)
    sequences = [make_sequence(f"r{i}", rng.randint(20, 200), max_tokens=rng.randint(10, 60)) for i in range(100)]
    for sequence in sequences:
        driver.scheduler.add(sequence)
    while driver.scheduler.has_work:
        batch = driver.scheduler.schedule()
        driver.scheduler.update(batch, [SampledToken(11)] * len(batch.sampling))
    assert driver.scheduler.num_preemptions <= 10


# --- cost -----------------------------------------------------------------------------------------------------------


def test_a_step_looks_at_no_more_of_a_long_queue_than_could_start(monkeypatch: pytest.MonkeyPatch):
    driver = Driver(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=32)
    for i in range(1000):
        driver.scheduler.add(make_sequence(f"r{i}", 40))
    looked_up = Counter[str]()
    find = driver.blocks.find_cached_prefix

    def counted(sequence: Sequence) -> list[int]:
        looked_up[sequence.request_id] += 1
        return find(sequence)

    monkeypatch.setattr(driver.blocks, "find_cached_prefix", counted)
    driver.step()
    assert len(looked_up) <= 8


def test_those_that_wait_for_images_are_asked_about_their_image_only(monkeypatch: pytest.MonkeyPatch):
    driver = Driver(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=32)
    for i in range(300):
        driver.scheduler.add(picture_question(f"picture {i}", CAT, start=0))
    driver.step()
    monkeypatch.setattr(driver.blocks, "find_cached_prefix", lambda _: pytest.fail("the prefix cache was searched"))
    assert driver.step() == {}
    monkeypatch.undo()
    driver.images.ready.add(CAT)
    assert len(driver.step()) > 0
