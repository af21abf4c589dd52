"""The engine against transformers, and against itself: however a request is batched, chunked, cached or preempted, its
tokens are the same.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.text_engine.core.queue_limit import DRAINED_SHARE
from services.text_engine.core.sequence import ImageSpan, Sequence
from shared.errors import ContextTooLong, EncodeFailed, InvalidRequest, Overloaded
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "llama_tied"]
BACKENDS = ["reference", "cpu"]


@pytest.fixture(scope="module")
def llama(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def llava(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llava_clip_llama")


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def transformers_greedy(folder: Path, prompt: list[int], max_new_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(checkpoint: CheckpointFactory, family: str, backend: str):
    folder = checkpoint(family)
    prompt = tokens(37)
    driver = EngineDriver(folder, attention_backend=backend)
    assert driver.generate(prompt, max_tokens=24).token_ids == transformers_greedy(folder, prompt, 24)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch_size", [2, 7, 32])
def test_a_request_in_a_batch_equals_the_request_alone(llama: Path, backend: str, batch_size: int):
    """Case D25."""
    driver = EngineDriver(llama, attention_backend=backend, enable_prefix_caching=False)
    alone = driver.generate(tokens(33), max_tokens=16).token_ids
    for i in range(batch_size):
        driver.add(f"filler-{i}", tokens(5 + 7 * i, seed=i), max_tokens=3 + i)
    assert driver.generate(tokens(33), max_tokens=16).token_ids == alone


@pytest.mark.parametrize("budget", [16, 17, 50, 100, 512])
def test_a_chunked_prompt_equals_a_whole_one(llama: Path, budget: int):
    whole = EngineDriver(llama, max_num_batched_tokens=512, max_num_seqs=16).generate(tokens(211)).token_ids
    chunked = EngineDriver(llama, max_num_batched_tokens=budget, max_num_seqs=16).generate(tokens(211)).token_ids
    assert chunked == whole


@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
def test_a_fully_cached_prompt_gives_the_same_answer(llama: Path, length: int):
    """Case D11."""
    driver = EngineDriver(llama)
    cold = driver.generate(tokens(length))
    cached = driver.generate(tokens(length))
    short = driver.generate(tokens(length), max_tokens=1)
    longer = driver.generate([*tokens(length), 5, 6, 7])
    assert cached.token_ids == cold.token_ids
    assert short.token_ids == cold.token_ids[:1]
    assert cold.finished is not None
    assert cached.finished is not None
    assert longer.finished is not None
    assert cold.finished.num_cached_tokens == 0
    assert cached.finished.num_cached_tokens == (length - 1) // 16 * 16
    assert longer.finished.num_cached_tokens == length // 16 * 16


def test_preempted_requests_equal_undisturbed_ones(llama: Path):
    """Case D3: a pool that cannot hold eight answers of 200 tokens at once."""
    undisturbed = EngineDriver(llama, max_num_seqs=8)
    tight = EngineDriver(llama, max_num_seqs=8, kv_cache_memory=f"{40 * bytes_per_block(undisturbed)}")
    for driver in (undisturbed, tight):
        for i in range(8):
            driver.add(f"r{i}", tokens(20 + i, seed=i), max_tokens=200)
        driver.run()
    assert tight.engine.scheduler.num_preemptions >= 3
    for name, answer in tight.answers.items():
        assert len(answer.token_ids) == 200
        assert answer.num_outputs == 200
        assert answer.token_ids == undisturbed.answers[name].token_ids
        assert answer.text == undisturbed.answers[name].text


def bytes_per_block(driver: EngineDriver) -> int:
    caches = driver.engine.runner._forward_pass._kv_caches
    return sum(cache.nbytes for cache in caches) // driver.info.num_kv_blocks


def test_a_prompt_that_can_never_fit_is_refused_at_once_and_the_next_one_runs(llama: Path):
    """Case D1."""
    probe = EngineDriver(llama)
    driver = EngineDriver(llama, kv_cache_memory=f"{10 * bytes_per_block(probe)}", max_num_seqs=4)
    with pytest.raises(ContextTooLong, match=r"400.*160"):
        driver.add("long", tokens(400))
    del driver.answers["long"]
    assert len(driver.generate(tokens(5)).token_ids) == 12


def test_short_memory_evicts_then_preempts_then_refuses_and_answers_as_ever(llama: Path):
    calm = EngineDriver(llama)
    tight = EngineDriver(llama, kv_cache_memory=f"{13 * bytes_per_block(calm)}", max_num_seqs=4, max_waiting_requests=2)
    scheduler = tight.engine.scheduler
    for seed in range(4):
        tight.generate(tokens(67, seed=seed), max_tokens=1)
    assert scheduler.blocks.pool.num_evictions > 0
    assert scheduler.num_preemptions == 0
    names = [f"r{i}" for i in range(6)]
    for i, name in enumerate(names):
        calm.add(name, tokens(20 + i, seed=i), max_tokens=80)
        tight.add(name, tokens(20 + i, seed=i), max_tokens=80)
        tight.step()
        if len(scheduler.waiting) == 2:
            break
    with pytest.raises(Overloaded):
        tight.add("one too many", tokens(5))
    del tight.answers["one too many"]
    tight.run()
    calm.run()
    assert scheduler.num_preemptions > 0
    for name in names[: i + 1]:
        assert tight.answers[name].token_ids == calm.answers[name].token_ids
    assert tight.generate(tokens(5)).error is None


def test_an_answer_that_outgrows_the_pool_ends_with_length(llama: Path):
    """Case D1: the prompt fits, prompt and answer do not."""
    probe = EngineDriver(llama)
    driver = EngineDriver(llama, kv_cache_memory=f"{10 * bytes_per_block(probe)}", max_num_seqs=4)
    answer = driver.generate(tokens(100), max_tokens=400)
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 60


def test_a_prompt_of_exactly_the_context_is_refused_and_one_less_gets_one_token(llama: Path):
    """Case B22."""
    driver = EngineDriver(llama, max_model_len=64)
    with pytest.raises(ContextTooLong):
        driver.add("full", tokens(64))
    del driver.answers["full"]
    answer = driver.generate(tokens(63), max_tokens=None)
    assert (len(answer.token_ids), answer.finish_reason) == (1, "length")


def test_cancelled_requests_leave_nothing_behind(llama: Path):
    """Case D6: 500 requests cancelled at random moments."""
    driver = EngineDriver(llama, max_num_seqs=16, kv_cache_memory="2MiB")
    pool = driver.engine.scheduler.blocks.pool
    rng = random.Random(7)
    alive: list[str] = []
    for i in range(500):
        driver.add(f"r{i}", tokens(rng.randint(1, 60), seed=i % 5), max_tokens=2000)
        alive.append(f"r{i}")
        while len(alive) > 12 or (alive and rng.random() < 0.5):
            driver.engine.abort(alive.pop(rng.randrange(len(alive))))
        driver.step()
    for request_id in alive:
        driver.engine.abort(request_id)
    driver.check_invariants()
    assert not driver.engine.scheduler.has_work
    assert pool.num_available == pool.num_blocks


def test_a_stream_is_not_held_up_by_a_flow_of_long_prompts(llama: Path):
    """Case D14: every step that prefills also moves the running stream by one token."""
    driver = EngineDriver(llama, max_num_batched_tokens=64, max_num_seqs=8)
    driver.add("stream", tokens(4), max_tokens=120)
    driver.step()
    for i in range(6):
        driver.add(f"long-{i}", tokens(300, seed=i), max_tokens=2)
    stream_tokens = []
    while not driver.answers["stream"].is_over:
        before = len(driver.answers["stream"].token_ids)
        driver.step()
        stream_tokens.append(len(driver.answers["stream"].token_ids) - before)
    assert set(stream_tokens) == {1}
    assert sum(answer.is_over for answer in driver.answers.values()) >= 5


def test_a_small_question_overtakes_a_huge_prompt(llama: Path):
    """Case D14."""
    driver = EngineDriver(llama, max_num_batched_tokens=64, max_num_seqs=8)
    driver.add("huge", tokens(450), max_tokens=1)
    driver.step()
    driver.add("tiny", tokens(5), max_tokens=1)
    driver.step()
    assert driver.answers["tiny"].is_over
    assert not driver.answers["huge"].is_over
    driver.run()


def choices_of(driver: EngineDriver) -> dict[int, list[int]]:
    """What each choice of a request came to."""
    sequences = [item.sequence for batch in driver.batches for item in batch.scheduled]
    return {sequence.index: sequence.generated_token_ids for sequence in sequences}


@pytest.mark.parametrize("num_prompt_tokens", [2, 15, 16, 17, 65, 79])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_compute_their_prompt_once(
    llama: Path, num_prompt_tokens: int, kv_cache_dtype: str, prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
):
    def run() -> EngineDriver:
        driver = EngineDriver(llama, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=prefix_caching)
        driver.add("r", tokens(num_prompt_tokens), n=4, seed=3, temperature=1.0, max_tokens=4)
        driver.run()
        return driver

    driver = run()
    num_computed = sum(item.num_new_tokens for batch in driver.batches for item in batch.scheduled)
    # Each choice's own: the prompt's last token, from which its first word is sampled, and all its words but the last.
    assert num_computed == num_prompt_tokens - 1 + 4 * 4
    finished = driver.answers["r"].finished
    assert finished is not None
    assert finished.num_generated_tokens == 16
    monkeypatch.setattr(Sequence, "to_fork_from", lambda _: None)
    monkeypatch.setattr(Sequence, "awaits_another_choice", False)
    assert choices_of(driver) == choices_of(run())


def test_stop_strings_end_the_text_and_count_the_tokens(llama: Path):
    driver = EngineDriver(llama)
    whole = driver.generate(tokens(20), max_tokens=30)
    stop = whole.text[8:11]
    cut = driver.generate(tokens(20), max_tokens=30, stop=(stop,))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.finished is not None
    assert cut.finished.num_generated_tokens == len(cut.token_ids) <= 30


def test_end_of_sequence_stops_unless_ignored_and_never_below_min_tokens(llama: Path):
    """Cases B11 and D21."""
    driver = EngineDriver(llama)
    forced: dict[str, Any] = {"logit_bias": {2: 100.0}, "ignore_eos": False, "max_tokens": 32}
    for minimum in (0, 1, 4):
        answer = driver.generate(tokens(9), min_tokens=minimum, **forced)
        assert len(answer.token_ids) == minimum + 1
        assert (answer.token_ids[-1], answer.finish_reason) == (2, "stop")
        assert 2 not in answer.token_ids[:-1]
    ignored = driver.generate(tokens(9), **(forced | {"ignore_eos": True}))
    assert (len(ignored.token_ids), ignored.finish_reason) == (32, "length")
    last_allowed = driver.generate(tokens(9), min_tokens=4, **(forced | {"max_tokens": 5}))
    assert last_allowed.finish_reason == "stop"


def test_a_seeded_request_repeats_itself_in_any_company(llama: Path):
    """Case D23."""
    driver = EngineDriver(llama, enable_prefix_caching=False)
    seeded: dict[str, Any] = {"temperature": 0.8, "seed": 42, "max_tokens": 20}
    alone = driver.generate(tokens(21), **seeded).token_ids
    for company in ({"temperature": 1.0}, {"temperature": 1.0, "seed": 42}, {}):
        driver.add(f"other-{len(driver.answers)}", tokens(30, seed=9), **company)
        assert driver.generate(tokens(21), **seeded).token_ids == alone


def test_a_bad_logit_bias_and_a_full_queue_are_refused(llama: Path):
    """Case D16."""
    driver = EngineDriver(llama, max_waiting_requests=2)
    with pytest.raises(InvalidRequest, match="999999999"):
        driver.add("biased", tokens(4), logit_bias={999999999: -100.0})
    driver.add("a", tokens(4))
    driver.add("b", tokens(4))
    with pytest.raises(Overloaded):
        driver.add("c", tokens(4))


def test_whoever_would_wait_too_long_is_told_at_once_and_when_to_come_back(llama: Path):
    driver = EngineDriver(llama, max_num_seqs=1, max_queue_wait_s=3.0)
    for name in ("a", "b", "c", "d"):
        driver.add(name, tokens(4))  # a burst that meets an idle engine is taken
    driver.engine.queue.note_step(4.0)
    with pytest.raises(Overloaded, match="4 requests are ahead, about 4 s") as refusal:
        driver.add("late", tokens(4))
    assert refusal.value.retry_after_s == pytest.approx(4.0 - 3.0 + DRAINED_SHARE * 3.0)
    driver.add("urgent", tokens(4), priority=-1)  # those four are not ahead of it
    del driver.answers["late"]
    assert all(len(answer.token_ids) == 12 for answer in driver.run().values())


def test_an_error_in_a_step_fails_its_requests_and_no_others(llama: Path):
    driver = EngineDriver(llama)
    expected = driver.generate(tokens(8)).token_ids
    runner = driver.engine.runner
    good = runner.execute_model
    runner.execute_model = lambda batch: (_ for _ in ()).throw(RuntimeError("boom"))  # type: ignore[method-assign]
    driver.add("broken", tokens(8))
    driver.step()
    assert driver.answers["broken"].error is not None
    runner.execute_model = good  # type: ignore[method-assign]
    assert driver.generate(tokens(8)).token_ids == expected


def test_a_salt_keeps_tenants_prefixes_apart(llama: Path):
    driver = EngineDriver(llama)
    driver.generate(tokens(64), cache_salt="a")
    other = driver.generate(tokens(64), cache_salt="b")
    same = driver.generate(tokens(64), cache_salt="b")
    assert other.finished is not None
    assert same.finished is not None
    assert (other.finished.num_cached_tokens, same.finished.num_cached_tokens) == (0, 48)


# --- images ---------------------------------------------------------------------------------------------------------

NUM_ROWS = 40


def picture(driver: EngineDriver, key: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(ord(key))
    rows = torch.randn(NUM_ROWS, driver.info.hidden_size, generator=generator) * 0.5
    driver.pictures[key * 64] = rows
    return rows


def image_prompt(driver: EngineDriver, *keys: str, before: int = 10, after: int = 7) -> dict[str, Any]:
    """`before` text tokens, then for each image its placeholders and `after` text tokens."""
    placeholder = driver.prompts._image_token_id
    assert placeholder is not None
    token_ids, spans = tokens(before), []
    for key in keys:
        picture(driver, key)
        spans.append(ImageSpan(key * 64, len(token_ids), NUM_ROWS))
        token_ids += [placeholder] * NUM_ROWS + tokens(after, seed=1)
    return {"token_ids": token_ids, "images": spans}


@pytest.mark.parametrize("budget", [16, 33, 37, 64, 512])
@pytest.mark.parametrize("before", [0, 37, 150])
def test_chunks_may_cut_images_anywhere(llava: Path, budget: int, before: int):
    """Case D13: each row is used once and in order, whatever the budget."""
    whole = EngineDriver(llava, max_num_batched_tokens=2048, max_num_seqs=16)
    chunked = EngineDriver(llava, max_num_batched_tokens=budget, max_num_seqs=16)
    answers = [d.generate(**image_prompt(d, "a", "b", before=before)).token_ids for d in (whole, chunked)]
    assert answers[0] == answers[1]


def test_answers_follow_the_picture_and_the_cache_never_mixes_them(llava: Path):
    """Case D7: cat, cat, pizza, pizza, cat with the same text."""
    driver = EngineDriver(llava)
    answers = [driver.generate(**image_prompt(driver, key)) for key in "aabba"]
    cached = [answer.finished.num_cached_tokens for answer in answers if answer.finished is not None]
    assert cached[0] == 0
    assert min(cached[1], cached[3], cached[4]) >= 48
    assert cached[2] <= 10
    assert answers[0].token_ids == answers[1].token_ids == answers[4].token_ids
    assert answers[2].token_ids == answers[3].token_ids != answers[0].token_ids


def test_text_before_an_image_is_prefilled_while_the_image_is_on_its_way(llava: Path):
    driver = EngineDriver(llava, hold_images=True)
    driver.add("r", **image_prompt(driver, "a", before=35))
    driver.step()
    assert [item.num_new_tokens for item in driver.batches[-1].scheduled] == [35]
    assert not driver.step()
    driver.deliver_images()
    assert driver.run()["r"].error is None


def test_a_look_that_finds_nothing_to_compute_is_not_counted_as_a_step(llava: Path):
    from services.text_engine.metrics import EngineMetrics

    driver, metrics = EngineDriver(llava, hold_images=True), EngineMetrics()
    metrics.observe_step(driver.engine, None)
    driver.add("r", **image_prompt(driver, "a", before=35))
    for _ in range(3):
        driver.step()
        metrics.observe_step(driver.engine, 0.25)
    [steps] = metrics.step_seconds.collect()
    assert {s.name: s.value for s in steps.samples}["diptych:step_seconds_sum"] == 0.25
    driver.deliver_images()
    driver.run()


def test_other_peoples_images_hold_up_nobody(llava: Path):
    driver = EngineDriver(llava, hold_images=True)
    driver.add("picture", **image_prompt(driver, "a", before=0))
    driver.add("text", tokens(12), max_tokens=3)
    while driver.step():
        pass
    assert driver.answers["text"].is_over
    assert not driver.answers["picture"].is_over
    driver.deliver_images()
    driver.run()


def test_a_cached_image_is_never_asked_for_again(llava: Path):
    driver = EngineDriver(llava, hold_images=True)
    driver.add("first", **image_prompt(driver, "a", after=30))
    driver.step()
    driver.deliver_images()
    driver.run()
    driver.engine.embeddings.drop_idle()
    driver.add("again", **image_prompt(driver, "a", after=30))
    assert driver.wanted == []
    driver.run()
    assert driver.answers["again"].token_ids == driver.answers["first"].token_ids


def test_one_image_for_many_requests_is_asked_for_once_and_computed_once(llava: Path):
    driver = EngineDriver(llava, hold_images=True)
    for i in range(16):
        driver.add(f"r{i}", **image_prompt(driver, "a", before=30))
    driver.step()
    assert len(driver.wanted) == 1
    driver.deliver_images()
    driver.run()
    image_tokens = sum(
        min(item.end, 70) - max(item.start, 30)
        for batch in driver.batches
        for item in batch.scheduled
        if item.start < 64 and item.end > 30
    )
    assert image_tokens < 2 * NUM_ROWS


def test_a_preempted_image_request_gets_its_rows_again(llava: Path):
    """Case D5: preempted after its prefill while the same image's other request finished."""
    calm = EngineDriver(llava)
    expected = calm.generate(**image_prompt(calm, "a"), max_tokens=60).token_ids
    tight = EngineDriver(llava, kv_cache_memory=f"{9 * bytes_per_block(calm)}", max_num_seqs=4)
    tight.add("text", tokens(20), max_tokens=60)
    tight.add("r", **image_prompt(tight, "a"), max_tokens=60)
    tight.add("same", **image_prompt(tight, "a", after=9), max_tokens=2)
    tight.run()
    assert tight.engine.scheduler.num_preemptions > 0
    assert tight.answers["r"].token_ids == expected


def test_an_image_that_can_never_be_computed_in_one_step_is_refused_with_both_numbers(llava: Path):
    driver = EngineDriver(llava, max_num_batched_tokens=48, max_num_seqs=16)
    prompt = image_prompt(driver, "a")
    prompt["images"] = [replace(span, attention="bidirectional") for span in prompt["images"]]
    with pytest.raises(ContextTooLong, match=r"40 tokens .* room for 33"):
        driver.add("a", **prompt)
    assert driver.engine.num_requests == 0


def test_an_image_that_will_not_come_fails_only_those_who_need_it(llava: Path):
    driver = EngineDriver(llava, hold_images=True)
    driver.add("a", **image_prompt(driver, "a"))
    driver.add("b", **image_prompt(driver, "b"))
    driver.step()
    [ref] = [ref for ref in driver.wanted if ref.image_key.startswith("a")]
    driver.wanted.remove(ref)
    driver._take(driver.engine.image_failed(ref, EncodeFailed("no")))
    driver.hold_images = False
    driver.run()
    assert isinstance(driver.answers["a"].error, EncodeFailed)
    assert driver.answers["b"].error is None


def test_a_picture_that_was_encoded_again_is_fetched_from_there_although_the_first_fetch_hangs(llava: Path):
    driver = EngineDriver(llava, hold_images=True)
    prompt = image_prompt(driver, "a")
    driver.add("first", **prompt)
    driver.step()
    [hanging] = driver.wanted
    elsewhere = hanging.model_copy(update={"encoder_url": "http://other"})
    driver.add("second", **prompt, image_refs=(elsewhere,))
    driver.add("third", **prompt, image_refs=(elsewhere.model_copy(),))
    driver.step()
    assert driver.wanted == [hanging, elsewhere]
    driver._take(driver.engine.image_failed(hanging, EncodeFailed("it timed out")))
    driver.wanted.remove(hanging)
    driver.hold_images = False
    answers = driver.run().values()
    assert [answer.error for answer in answers] == [None] * 3
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


def test_kv_waste_stays_below_four_percent_on_the_benchmarks_shapes(llama: Path):
    from services.text_engine.metrics import kv_waste

    driver = EngineDriver(llama, max_num_seqs=32)
    rng = random.Random(1)
    for i in range(32):
        driver.add(f"r{i}", tokens(rng.randint(32, 400), seed=i), max_tokens=rng.randint(16, 100))
    waste = []
    while driver.step():
        waste.append(kv_waste(driver.engine.scheduler))
    assert sum(waste) / len(waste) < 0.04
