"""When and where an answer's stages were: put together from services whose clocks do not agree."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.admission import Admission, AdmittedImage
from services.gateway.balancer import Pool, Replica
from services.gateway.encoding import EncodeJob, Encoding
from services.gateway.timeline import GATEWAY, MAX_SPANS, ImageTrace, Span, Timeline
from services.text_engine.core.sequence import ImageSpan
from services.text_engine.engine_io import EngineRequest, RequestFinished
from services.text_engine.request_timeline import FetchLog, embedding_sources, stage_spans
from services.vision_encoder.stage_clock import StageClock
from shared.sampling import SamplingParams
from shared.wire.common import StageSpan
from shared.wire.encoder import Encoded, EncoderInfo
from shared.wire.images import ImageRef

A, B = "a" * 64, "b" * 64
SECONDS = st.floats(0, 100, allow_nan=False)


def stages(timeline: Timeline, name: str) -> list[Span]:
    return [span for span in timeline.spans if span.stage == name]


# --- the gateway's ----------------------------------------------------------------------------------------------------


def test_another_services_spans_are_placed_on_the_gateways_clock():
    timeline = Timeline(started_at=1000.0)
    spans = [
        StageSpan(stage="encode", start_s=0.002, duration_s=0.003),
        StageSpan(stage="queue", start_s=0, duration_s=0.002),
    ]
    timeline.add_all(spans, began_at=1000.5, where="vision_encoder-2", image=1)
    body = timeline.to_body(first_token_s=0.6)
    assert body["spans"] == [
        {"stage": "queue", "start_ms": 500.0, "duration_ms": 2.0, "where": "vision_encoder-2", "image": 1},
        {"stage": "encode", "start_ms": 502.0, "duration_ms": 3.0, "where": "vision_encoder-2", "image": 1},
    ]
    assert body["first_token_ms"] == 600.0


def test_origins_that_may_tell_of_others_are_left_out_and_kept_for_who_runs_it():
    timeline = Timeline(started_at=0.0, hides_origins=True)
    span = StageSpan(stage="transfer", start_s=1, duration_s=1, image_key=A, source="redis")
    timeline.add_all([span], began_at=0.0, where="text_engine-1", images={A: [0]})
    timeline.images.append(ImageTrace(17, "shared", "text_engine"))
    body = timeline.to_body(first_token_s=None)
    assert body["images"] == [{"num_tokens": 17, "admitted_by": None, "embedding_from": None}]
    assert [set(each) for each in body["spans"]] == [{"stage", "start_ms", "duration_ms", "where", "image"}]
    assert timeline.spans[0].source == "redis"


def test_an_equal_picture_has_its_transfer_in_every_place_where_it_stands():
    timeline = Timeline(started_at=0.0)
    spans = [
        StageSpan(stage="transfer", start_s=1, duration_s=1, image_key=A, source="redis"),
        StageSpan(stage="transfer", start_s=1, duration_s=1, image_key="0" * 64),
        StageSpan(stage="prefill", start_s=2, duration_s=1),
    ]
    timeline.add_all(spans, began_at=0.0, where="text_engine-1", images={A: [0, 2]})
    assert [(span.stage, span.image, span.source) for span in timeline.spans] == [
        ("transfer", 0, "redis"),
        ("transfer", 2, "redis"),
        ("prefill", None, None),
    ]


@given(started_at=SECONDS, ended_after=SECONDS, arrived_at=SECONDS)
def test_work_from_before_the_request_counts_from_its_start(started_at: float, ended_after: float, arrived_at: float):
    timeline = Timeline(started_at=arrived_at)
    timeline.add("encode", started_at, started_at + ended_after, "vision_encoder-1")
    if started_at + ended_after < arrived_at:
        assert not timeline.spans
    else:
        [span] = timeline.spans
        assert span.start_ms >= 0
        assert span.duration_ms >= 0
        assert abs(span.start_ms + span.duration_ms - 1000 * (started_at + ended_after - arrived_at)) < 0.01


def test_a_timeline_is_cut_where_nobody_would_look_any_more():
    timeline = Timeline(started_at=0.0)
    for number in range(MAX_SPANS + 1):
        timeline.add("fetch", 0.0, 1.0, GATEWAY, number)
    assert len(timeline.spans) == MAX_SPANS


async def test_an_answer_waits_for_the_encoders_last_word_and_places_its_stages_before_it():
    job = EncodeJob(A, b"", "fingerprint", "request", again=False)
    admission, encoding, timeline = Admission(), Encoding(job), Timeline(time.perf_counter())
    ref = ImageRef(image_key=A, num_tokens=64, width=8, height=8)
    encoding.replica = Replica("http://encoder", number=3)
    encoding.admit(ref)
    admission.join(encoding)
    admission.images = [AdmittedImage(ref, "messages[0]", encoding, "vision_encoder")] * 2
    spans = [StageSpan(stage="encode", start_s=0.0, duration_s=0.001)]
    asyncio.get_running_loop().call_later(0.01, encoding.finish, Encoded(stored=True, timings={}, spans=spans))
    await admission.tell(timeline)
    assert timeline.images == [ImageTrace(64, "vision_encoder")] * 2
    assert admission.numbers() == {A: [0, 1]}
    ends = [span.start_ms + span.duration_ms for span in timeline.spans if span.stage == "encode"]
    assert len(ends) == 2
    assert all(abs(end - 1000 * (encoding.encoded_at - timeline.started_at)) < 0.01 for end in ends)
    assert {span.where for span in timeline.spans} == {"vision_encoder-3"}
    for admit, encode in zip(*(stages(timeline, name) for name in ("admit", "encode")), strict=True):
        assert admit.start_ms + admit.duration_ms <= encode.start_ms + 0.001


def test_replicas_keep_their_numbers_and_new_ones_take_the_lowest_free():
    pool: Pool[EncoderInfo] = Pool(time.monotonic, rng=None)  # type: ignore[arg-type]

    def numbers() -> dict[str, int]:
        return {replica.url: replica.number for replica in pool.replicas}

    pool.update(["a", "b", "c"])
    assert numbers() == {"a": 1, "b": 2, "c": 3}
    pool.update(["c", "a"])
    assert numbers() == {"c": 3, "a": 1}
    pool.update(["e", "c", "d", "a"])
    assert numbers() == {"e": 2, "c": 3, "d": 4, "a": 1}


# --- the encoder's ----------------------------------------------------------------------------------------------------


def test_stages_told_together_lie_end_to_end_and_waits_add_up():
    clock = StageClock()
    clock.began_at -= 10
    clock.note(("queue", 1.0), ("decode", 2.0))
    clock.note(("queue", 0.25), ("encode", 0.5))
    first, decode, second, encode = clock.spans
    assert abs(first.start_s + 1.0 - decode.start_s) < 1e-9
    assert abs(second.start_s + 0.25 - encode.start_s) < 1e-9
    assert clock.timings() == {"queue": 1.25, "decode": 2.0, "encode": 0.5}


def test_a_stage_never_begins_before_the_clock():
    clock = StageClock()
    clock.note(("decode", 5.0))
    assert clock.spans[0].start_s == 0.0


# --- the engine's -----------------------------------------------------------------------------------------------------


def request(*spans: ImageSpan) -> EngineRequest:
    return EngineRequest(request_id="r", token_ids=[0] * 100, sampling=SamplingParams(), images=spans)


def finished(added_at: float, num_cached_tokens: int = 0) -> RequestFinished:
    timings = {"queue": 0.1, "transfer": 0.0, "prefill": 0.2, "decode_tokens": 0.3}
    return RequestFinished(
        request_id="r",
        num_prompt_tokens=100,
        num_image_tokens=0,
        num_cached_tokens=num_cached_tokens,
        num_generated_tokens=5,
        num_preemptions=0,
        timings=timings,
        added_at=added_at,
    )


def fetched(log: FetchLog, key: str, source: str) -> None:
    with log.fetching(key) as fetch:
        fetch.source = source  # type: ignore[assignment]


def test_stages_of_the_engine_follow_one_another_and_transfers_lie_beside_them():
    log = FetchLog()
    arrived_at = time.monotonic()
    fetched(log, A, "redis")
    spans = stage_spans(
        request(ImageSpan(A, 3, 16), ImageSpan(A, 30, 16), ImageSpan(B, 60, 16)),
        finished(arrived_at),
        log,
        arrived_at=arrived_at - 0.5,
    )
    [transfer] = [span for span in spans if span.stage == "transfer"]
    assert (transfer.image_key, transfer.source) == (A, "redis")
    own = [span for span in spans if span.stage != "transfer"]
    assert [span.stage for span in own] == ["tokenize", "queue", "prefill", "decode_tokens"]
    for span, following in pairwise(own):
        assert abs(span.start_s + span.duration_s - following.start_s) < 1e-6


def test_the_first_tier_that_had_a_pictures_rows_is_named():
    log = FetchLog()
    fetched(log, "c" * 64, "redis")  # by an earlier request
    added_at = time.monotonic()
    fetched(log, B, "vision_encoder")
    asked = request(ImageSpan(A, 0, 16), ImageSpan(B, 16, 16), ImageSpan("c" * 64, 40, 16))
    assert embedding_sources(asked, finished(added_at, num_cached_tokens=16), log) == {
        A: "prefix_cache",
        B: "vision_encoder",
        "c" * 64: "text_engine",
    }


def test_a_picture_cached_in_part_was_needed_after_all():
    log = FetchLog()
    added_at = time.monotonic()
    fetched(log, A, "redis")
    asked = request(ImageSpan(A, 0, 16), ImageSpan(A, 20, 16))
    assert embedding_sources(asked, finished(added_at, num_cached_tokens=16), log) == {A: "redis"}


def test_the_oldest_fetches_are_forgotten_and_failed_ones_tell_nothing():
    log = FetchLog(max_fetches=2)
    since = time.monotonic()
    for key in ("a", "b", "c"):
        fetched(log, key, "redis")
    assert [log.during(key, since) is not None for key in ("a", "b", "c")] == [False, True, True]
    try:
        with log.fetching("b"):
            raise ConnectionError
    except ConnectionError:
        pass
    assert log.during("b", since) is None
