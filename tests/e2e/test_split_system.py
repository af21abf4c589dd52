"""Gateway, vision encoder, text engine and Valkey as separate processes: their answers are those of transformers, and
everything that is promised about the whole holds for the whole.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from tests.conftest import CheckpointFactory
from tests.e2e.system import (
    IMAGE_ROWS,
    KV_CACHE_BYTES,
    NUM_TOKENS,
    Oracle,
    Service,
    System,
    Turn,
    assistant,
    hung_up,
    picture,
    running_system,
    user,
)
from tests.gateway_stack import assert_openai_error, eventually

NUM_BLOCKS = 64
BLOCK_BYTES = 12_288  # 3 layers x keys and values x 16 tokens x 2 heads x 16 numbers x 4 bytes
LONG_TEXT = "Describe the colours and the shapes that you can see. There are three red circles."

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llava_clip_llama")


@pytest.fixture(scope="module")
def system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One of each, with a KV cache so small that concurrent requests preempt each other."""
    folder = tmp_path_factory.mktemp("logs")
    with running_system(
        model,
        folder,
        DIPTYCH_ENGINE_KV_CACHE_MEMORY=str(NUM_BLOCKS * BLOCK_BYTES),
        DIPTYCH_ENCODER_MAX_QUEUED_IMAGES="64",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


# --- right answers ----------------------------------------------------------------------------------------------------

PICTURES = {
    "landscape": picture(1, (61, 47)),
    "portrait": picture(2, (30, 90)),
    "exact": picture(3, (56, 56)),
    "large photo": picture(4, (640, 480), "JPEG"),
    "flat": picture(5, (500, 19)),
    "tiny": picture(6, (1, 1)),
    "grey": picture(7, (40, 40), mode="L"),
    "palette": picture(8, (50, 70), mode="P"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_answers_about_pictures_are_those_of_transformers(system: System, oracle: Oracle, name: str):
    question = user(PICTURES[name], "What is shown in the image?")
    answer = system.ask(question)
    assert answer.tokens == oracle.answer(question)
    assert (answer.finish_reason, answer.num_image_tokens) == ("length", IMAGE_ROWS)
    streamed = system.stream(question)
    assert (streamed.tokens, streamed.text, streamed.finish_reason) == (answer.tokens, answer.text, "length")
    assert streamed.usage["completion_tokens"] == answer.usage["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize(
    "parts",
    [
        (PICTURES["flat"], "What is it?"),
        ("What is it?", PICTURES["flat"]),
        ("See this: ", PICTURES["portrait"], " and tell me."),
        ("First ", PICTURES["portrait"], " then ", PICTURES["grey"]),
        ("First ", PICTURES["grey"], " then ", PICTURES["portrait"]),
        (PICTURES["exact"], PICTURES["exact"], "Are they the same?"),
    ],
)
def test_pictures_stand_where_their_parts_stand(system: System, oracle: Oracle, parts: tuple[str | bytes, ...]):
    """Case C9: any other order gives other tokens."""
    question = user(*parts)
    answer = system.ask(question)
    assert answer.tokens == oracle.answer(question)
    assert answer.num_image_tokens == IMAGE_ROWS * sum(isinstance(part, bytes) for part in parts)


def test_a_picture_in_an_earlier_turn_is_part_of_the_conversation(system: System, oracle: Oracle):
    turns: list[Turn] = [("system", ("You are a helpful assistant.",)), user("Look: ", picture(20), " What is it?")]
    for question in ("And the colours?", "And the shapes?"):
        answer = system.ask(*turns)
        assert answer.tokens == oracle.answer(*turns)
        turns += [assistant("A red circle."), user(question)]
    turns[-1] = user(question, picture(21))
    assert system.ask(*turns).tokens == oracle.answer(*turns)


def test_many_different_questions_at_once_are_answered_as_each_alone(system: System, oracle: Oracle):
    questions = [
        [user(*parts)]
        for i in range(6)
        for parts in ((f"Question {i}? ", picture(30 + i)), (f"Just text, number {i}.",), (picture(30 + i), "Hm?"))
    ]
    random.Random(1).shuffle(questions)
    for turns, answer in zip(questions, system.ask_all(questions), strict=True):
        assert answer.tokens == oracle.answer(*turns)


def test_a_picture_alone_is_a_question(system: System, oracle: Oracle):
    """Case C12."""
    image = picture(40)
    alone, with_empty_text = system.ask(user(image)), system.ask(user("", image))
    assert alone.tokens == with_empty_text.tokens == oracle.answer(user(image))
    assert alone.usage["prompt_tokens"] == with_empty_text.usage["prompt_tokens"]
    assert alone.num_image_tokens == IMAGE_ROWS


def test_the_placeholder_typed_by_a_user_is_text(system: System):
    """Case C1: whoever types it, before or after the picture, one picture fills 16 positions and no more."""
    image, typed = picture(41), "what does <image> mean in HTML? <image>"
    conversations: list[list[Turn]] = [
        [user(typed, image)],
        [user(image, typed)],
        [("system", (typed,)), user(image, "Hm?")],
        [user("Hm?"), assistant(typed), user(image, "Hm?")],
    ]
    for turns in conversations:
        answer = system.ask(*turns)
        assert answer.num_image_tokens == IMAGE_ROWS
        # The typed word costs as many tokens as its letters, not one, and not sixteen.
        plain = [
            (role, [p.replace("<image>", "<imagE>") if isinstance(p, str) else p for p in ps]) for role, ps in turns
        ]
        assert answer.usage["prompt_tokens"] == system.ask(*plain).usage["prompt_tokens"]
    assert system.ask(user(typed)).num_image_tokens == 0


def _in_plain_letters(part: str | bytes) -> str | bytes:
    return part.replace("<image>", "<imagE>") if isinstance(part, str) else part


# --- caches -----------------------------------------------------------------------------------------------------------


def test_a_conversation_whose_picture_is_cached_asks_neither_encoder_nor_redis(system: System, oracle: Oracle):
    turns = [user("Look: ", picture(), LONG_TEXT)]
    first = system.ask(*turns)
    system.assert_idle()
    images = system.encoder.metric("encoder_images_total")
    commands = system.cache.num_entry_commands()
    for number in range(3):
        turns += [assistant(first.text), user(f"And what about this, number {number}?")]
        answer = system.ask(*turns, max_tokens=4)
        assert answer.tokens == oracle.answer(*turns, max_tokens=4)
        assert answer.num_image_tokens == IMAGE_ROWS
        assert answer.num_cached > IMAGE_ROWS
    assert system.encoder.metric("encoder_images_total") == images
    assert system.cache.num_entry_commands() == commands


def test_a_known_picture_is_not_encoded_again_for_another_question(system: System, oracle: Oracle):
    image = picture()
    system.ask(user(image, "What is it?"))
    passes = system.encoder.metric("encoder_tower_passes_total")
    other = user("Something else entirely: ", image)
    assert system.ask(other).tokens == oracle.answer(other)
    assert system.encoder.metric("encoder_tower_passes_total") == passes


def test_the_prefix_cache_tells_pictures_apart(system: System):
    """Case D7: cat, cat, pizza, pizza, cat with the same words and the same size."""
    before, cat, pizza = f"{random.random()} {LONG_TEXT}", picture(), picture()
    answers = [system.ask(user(before, image, LONG_TEXT)) for image in (cat, cat, pizza, pizza, cat)]
    cached = [answer.num_cached for answer in answers]
    text = system.gateway.http.post("/v1/tokenize", json={"messages": [{"role": "user", "content": before}]}).json()[
        "count"
    ]
    assert cached[0] < 16
    assert cached[2] <= text
    assert all(number > text for number in (cached[1], cached[3], cached[4]))
    assert answers[0].tokens == answers[1].tokens == answers[4].tokens
    assert answers[2].tokens == answers[3].tokens
    assert answers[0].tokens != answers[2].tokens


def test_preempted_pictures_are_fetched_again_from_wherever_they_are(system: System):
    """Case D5: six answers that cannot be in memory together, two of each picture; Redis is emptied meanwhile."""
    images = [picture() for _ in range(3)]
    questions = [[user(f"Number {i}: ", images[i % 3], LONG_TEXT)] for i in range(6)]
    undisturbed = [system.ask(*turns, max_tokens=150) for turns in questions]
    preemptions = system.engine.metric("num_preemptions_total")
    stop = threading.Event()

    def keep_flushing() -> None:
        while not stop.wait(0.01):
            system.cache.flush()

    flushing = threading.Thread(target=keep_flushing)
    flushing.start()
    try:
        together = system.ask_all(questions, max_tokens=150)
    finally:
        stop.set()
        flushing.join()
    assert system.engine.metric("num_preemptions_total") > preemptions
    assert [answer.tokens for answer in together] == [answer.tokens for answer in undisturbed]
    system.assert_serves()


# --- encode and prefill overlap ---------------------------------------------------------------------------------------


@contextmanager
def stopped_decoding(encoder: Service) -> Iterator[None]:
    """Its decode worker is paused: images are admitted, and not encoded until the way out."""
    [worker] = encoder.workers()
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def test_text_before_a_picture_is_prefilled_while_the_picture_is_encoded(system: System, oracle: Oracle):
    text = f"{random.random()} {LONG_TEXT}"
    question = user(text, picture())
    num_text_tokens = system.gateway.http.post(
        "/v1/tokenize", json={"messages": [{"role": "user", "content": text}]}
    ).json()["count"]
    steps = system.engine.metric("step_seconds_count")
    with ThreadPoolExecutor(1) as pool:
        with stopped_decoding(system.encoder):
            answer = pool.submit(system.ask, question)
            eventually(lambda: system.engine.metric("num_requests_running") == 1)
            assert system.engine.metric("step_seconds_count") > steps
            # Only text holds blocks: the end of the prompt, a few tokens, is behind the picture.
            blocks = round(system.engine.metric("kv_cache_usage_perc") * NUM_BLOCKS)
            assert (num_text_tokens - 12) // 16 <= blocks <= num_text_tokens // 16 + 1
            assert len(system.ask(user("Meanwhile?")).tokens) == NUM_TOKENS
            time.sleep(1)
            assert not answer.done()
        got = answer.result()
    assert got.tokens == oracle.answer(question)
    timings = got.usage["timings"]
    assert timings["transfer"] > 1
    assert timings["queue"] < 0.5
    assert timings["prefill"] > 1  # counted from its first token, which was computed at once


def test_five_hundred_clients_that_leave_at_any_moment_leave_nothing(system: System):
    """Case D6 through all services: with new, shared and known pictures or none, streamed or not, at any stage."""
    rng = random.Random(5)
    shared, known = picture(), picture()
    system.ask(user("What is it?", known))

    def turn(number: int) -> Turn:
        image: tuple[bytes, ...] = ((), (picture(),), (shared,), (known,))[number % 4]
        return user(f"Number {number}: ", *image, LONG_TEXT)

    def leave(number: int, delay_s: float, stream: bool) -> None:
        with hung_up(system, turn(number), stream=stream) as hang_up:
            time.sleep(delay_s)
            hang_up()

    delays = [rng.choice([0, 0.002, 0.01, 0.03, 0.1, 0.3]) for _ in range(500)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(500), delays, (rng.random() < 0.5 for _ in range(500))))
    system.assert_idle(within_s=20)
    system.assert_serves()
    assert system.engine.metric("num_requests_running") == 0
    assert system.engine.metric("num_requests_waiting") == 0
    assert system.engine.metric("kv_cache_usage_perc") == 0


# --- bad pictures -----------------------------------------------------------------------------------------------------

HEIC = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(200)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (HEIC, "unsupported_image_format"),
        (os.urandom(500), "unsupported_image_format"),
        (picture(50)[:-900], "invalid_image"),
    ],
    ids=["heic", "noise", "truncated"],
)
def test_a_picture_that_cannot_be_read_is_a_plain_error_that_names_its_part(
    system: System, data: bytes, code: str, stream: bool
):
    """Cases A11, B25, C16: never 200 without the picture, and nobody after it suffers."""
    good = picture(51)
    response = system.post(user("What is in the ", good, data), stream=stream)
    error = assert_openai_error(response, 400, code)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "messages[0].content[2].image_url"
    if code == "unsupported_image_format":
        assert "PNG" in error["message"]
        assert "JPEG" in error["message"]
    assert response.headers["content-type"].startswith("application/json")
    answer = system.ask(user("What is in the ", good))
    assert answer.num_image_tokens == IMAGE_ROWS
    system.assert_idle()


def test_the_official_client_raises_its_own_errors(system: System):
    """Cases B21, B24 over the whole system: both numbers, and the next request is served."""
    with pytest.raises(openai.BadRequestError, match="512") as caught:
        system.ask(user("word " * 600))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        system.ask(user("hi"), logit_bias={"999999": 1})
    assert caught.value.param == "logit_bias"
    system.assert_serves()


# --- load -------------------------------------------------------------------------------------------------------------


def test_two_hundred_pictures_at_once_are_answered_or_refused_and_none_is_lost(system: System):
    """Case E10: one encoder, whose queue holds 64 images, and one engine."""
    images = [picture(1000 + i) for i in range(200)]
    with ThreadPoolExecutor(200) as pool:
        since = time.monotonic()
        answers = list(pool.map(lambda image: system.post(user("Hm?", image), max_tokens=2), images))
        assert time.monotonic() - since < 30
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) <= {200, 429, 503}
    assert statuses.count(200) >= 64
    for answer in answers:
        if answer.status_code == 200:
            details = answer.json()["usage"]["prompt_tokens_details"]
            assert details["image_tokens"] == IMAGE_ROWS
        else:
            assert_openai_error(answer, answer.status_code)
            assert int(answer.headers["retry-after"]) >= 1
    system.assert_serves()


def test_probes_and_streams_go_on_while_large_pictures_are_decoded(system: System):
    """Case E16, in small: the limits are wide because the machine of a test has few cores."""
    large = [picture(60 + i, (1536, 2170), "JPEG") for i in range(8)]
    gaps: list[float] = []
    with ThreadPoolExecutor(10) as pool:
        waits: dict[str, list[float]] = {service.name: [] for service in system.services}
        answers = [pool.submit(system.post, user("Hm?", image), max_tokens=1) for image in large]
        stream = pool.submit(_gaps_of_a_stream, system, gaps)
        while not all(answer.done() for answer in answers):
            for service in system.services:
                since = time.monotonic()
                assert service.http.get("/health").status_code == 200
                waits[service.name].append(time.monotonic() - since)
            time.sleep(0.02)
        stream.result()
    assert [answer.result().status_code for answer in answers] == [200] * len(large)
    for name, values in waits.items():
        assert np.percentile(values, 95) < 0.4, name
    assert max(gaps) < 1.0


def _gaps_of_a_stream(system: System, gaps: list[float]) -> None:
    chunks = system.client.chat.completions.create(**system.fields([user("Tell me")], 400), stream=True)
    last = time.monotonic()
    for _ in chunks:
        gaps.append(time.monotonic() - last)
        last = time.monotonic()


def test_memory_does_not_grow_with_pictures(system: System):
    """Case E19, in small: two choices each, prefix cache on, every picture new.

    The KV cache's pages become resident when a block is used for the first time, so an engine may grow by its size.
    """

    def ask_many(count: int) -> None:
        questions = [[user(f"{i}: ", picture())] for i in range(count)]
        with ThreadPoolExecutor(8) as pool:
            for answer in pool.map(lambda turns: system.post(*turns, max_tokens=2, n=2), questions):
                assert answer.status_code == 200, answer.text

    ask_many(150)
    before = {service.name: service.rss_bytes() for service in system.services}
    ask_many(300)
    for service in system.services:
        grown = service.rss_bytes() - before[service.name]
        assert grown < (12 << 20) + KV_CACHE_BYTES, f"{service.name} has grown by {grown >> 20} MiB"
    system.assert_serves()


def test_nothing_was_logged_as_unexpected(system: System):
    """The last look: whatever the tests of this file did, no service met an error that it did not know."""
    for service in system.services:
        assert "Traceback" not in service.log, service.log.partition("Traceback")[2][:4000]
        assert "unexpected" not in service.log
        assert service.is_ready()
    with httpx.Client(trust_env=False) as http:
        assert http.get(f"{system.gateway.url}/v1/models").json()["data"][0]["id"] == "tiny"
