"""The vision encoder as its callers meet it: answers, joining, leaving, refusals; without Redis."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from services.vision_encoder.app import create_app
from services.vision_encoder.config import VisionEncoderSettings
from shared.wire.common import DEADLINE_HEADER
from shared.wire.encoder import IMAGE_KEY_HEADER, Admitted, DescribeResponse, EncoderInfo
from shared.wire.images import ImageMetadata, ImageRef
from tests.conftest import CheckpointFactory
from tests.encoders import NUM_TOKENS, Replica, png, refusal, running, wait_until


@pytest.fixture
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llava_clip_llama")


@pytest.fixture
async def replica(folder: Path) -> AsyncIterator[Replica]:
    """Without Redis."""
    async with running(folder) as opened:
        yield opened


# --- the answer -------------------------------------------------------------------------------------------------------


async def test_an_image_is_admitted_encoded_and_served_with_the_reference_s_numbers(
    replica: Replica, folder: Path
) -> None:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    for size in [(60, 44), (1, 1), (3, 1), (1, 3), (499, 1), (500, 19), (19, 500), (64, 819)]:
        data = png(size=size)
        admitted, encoded = await replica.encode(data, **{IMAGE_KEY_HEADER: replica.key(data)})
        image = ImageRef(image_key=replica.key(data), num_tokens=NUM_TOKENS, width=size[0], height=size[1])
        assert Admitted.model_validate(admitted) == Admitted(image=image)
        assert encoded["stored"] is False
        assert set(encoded["timings"]) == {"queue", "decode", "preprocess", "encode", "store"}
        result = await replica.embedding(data)
        pixels = processor(Image.open(io.BytesIO(data)), return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            [expected] = model.get_image_features(pixel_values=pixels).pooler_output
        assert result.shape == (NUM_TOKENS, 64)
        assert (result - expected).abs().max() / expected.abs().max() < 1e-5


async def test_admission_comes_before_the_embedding_exists_and_get_waits_for_it(replica: Replica) -> None:
    data = png(1)
    async with replica.http.stream("POST", "/v1/encode", content=data) as response:
        lines = response.aiter_lines()
        with replica.held_tower():
            assert json.loads(await anext(lines))["event"] == "admitted"
            encoded, fetched = asyncio.ensure_future(anext(lines)), asyncio.create_task(replica.embedding(data))
            done, _ = await asyncio.wait((encoded, fetched), timeout=0.2)
            assert not done
        assert json.loads(await encoded)["event"] == "encoded"
        assert (await fetched).shape == (NUM_TOKENS, 64)


async def test_info_says_what_a_gateway_needs(replica: Replica, folder: Path) -> None:
    info = EncoderInfo.model_validate((await replica.http.get("/v1/info")).json())
    assert info.fingerprint == replica.fingerprint
    assert (info.model, info.dtype, info.hidden_size) == (folder.name, "float32", 64)
    assert info.supported_formats == ["JPEG", "PNG", "WebP", "GIF", "BMP"]


async def test_sizes_are_described_as_pictures_of_them_are_announced(replica: Replica) -> None:
    sizes = [(60, 44), (1, 1), (3, 1), (500, 19)]
    asked = {"images": [{"width": width, "height": height} for width, height in sizes]}
    response = await replica.http.post("/v1/describe", json=asked)
    for size, described in zip(sizes, DescribeResponse.model_validate(response.json()).images, strict=True):
        admitted, _ = await replica.encode(png(size=size))
        assert described == ImageMetadata.model_validate(admitted["image"])


async def test_a_size_that_no_picture_may_have_is_refused_by_its_number(replica: Replica) -> None:
    asked = {"images": [{"width": 60, "height": 44}, {"width": 100_000, "height": 100_000}]}
    response = await replica.http.post("/v1/describe", json=asked)
    assert refusal(response) == (400, "image_too_large")
    assert response.json()["error"]["param"] == "images[1]"


async def test_metrics_are_exported_under_their_names(replica: Replica) -> None:
    await replica.encoded(png())
    text = (await replica.http.get("/metrics")).text
    for name in ("encoder_stage_seconds_bucket", "encoder_tower_passes_total", "encoder_batch_size_bucket"):
        assert f"diptych:{name}" in text
    assert 'diptych:encoder_images_total{outcome="encoded"} 1.0' in text
    assert "diptych:encoder_queued_images 0.0" in text
    assert "diptych:embedding_cache_breaker_open 0.0" in text


# --- one encode for many ----------------------------------------------------------------------------------------------


async def test_two_hundred_equal_images_at_once_cost_one_pass_of_the_tower(replica: Replica) -> None:
    data = png(2)
    before = replica.num_tower_passes
    answers = await asyncio.gather(*(replica.encoded(data) for _ in range(200)))
    assert len(answers) == 200
    assert replica.num_tower_passes == before + 1


async def test_two_hundred_different_images_at_once_are_all_answered_in_batches(replica: Replica) -> None:
    before = replica.num_tower_passes
    with replica.held_tower():
        tasks = [asyncio.create_task(replica.encoded(png(seed))) for seed in range(1000, 1200)]
        await wait_until(lambda: replica.encoder._batcher.num_waiting >= 192)
    await asyncio.gather(*tasks)
    # The first pass takes whoever came first without waiting for company; the others are of 8 each.
    assert before + 25 <= replica.num_tower_passes <= before + 26
    assert (await replica.embedding(png(1199))).shape == (NUM_TOKENS, 64)


async def test_more_images_than_the_queue_holds_get_503_with_retry_after_at_once(folder: Path) -> None:
    async with running(folder, max_queued_images=20) as replica:
        with replica.held_tower():
            tasks = [
                asyncio.create_task(replica.http.post("/v1/encode", content=png(seed))) for seed in range(2000, 2200)
            ]
            await wait_until(lambda: sum(task.done() for task in tasks) >= 180)
            refused = [task.result() for task in tasks if task.done()]
        responses = await asyncio.gather(*tasks)
        assert sorted({response.status_code for response in responses}) == [200, 503]
        assert all("encoded" in response.text for response in responses if response.status_code == 200)
        for response in refused:
            assert response.json()["error"]["code"] == "overloaded"
            assert int(response.headers["Retry-After"]) >= 1
        await replica.encoded(png())


# --- callers that leave -----------------------------------------------------------------------------------------------


async def leave_after_admission(replica: Replica, data: bytes) -> None:
    async with replica.http.stream("POST", "/v1/encode", content=data) as response:
        assert json.loads(await anext(response.aiter_lines()))["event"] == "admitted"


async def test_work_that_nobody_waits_for_any_more_never_reaches_the_tower(replica: Replica) -> None:
    before = replica.num_tower_passes
    with replica.held_tower():
        # A pass is under way, so whatever is decoded while it lasts waits for the next one.
        first = asyncio.create_task(replica.encoded(png(2999)))
        await wait_until(lambda: replica.encoder.busy_s > 0)
        await asyncio.gather(*(leave_after_admission(replica, png(seed)) for seed in range(3000, 3010)))
        await wait_until(lambda: len(replica.encoder._flights) == 1)
    await first
    await replica.encoded(png(3999))
    assert replica.num_tower_passes == before + 2
    assert replica.metric("encoder_images_total", outcome="cancelled") == 10


async def test_an_image_whose_caller_has_left_before_the_answer_began_is_not_encoded(folder: Path) -> None:
    settings = VisionEncoderSettings(model=folder, redis_url=None, dtype="float32", num_threads=1, num_decode_workers=1)
    app = create_app(settings)
    async with app.router.lifespan_context(app):  # here, not in a server: so the test decides what is received when
        service = app.state.service
        await wait_until(lambda: service.why_not_ready() is None)
        arriving = iter([{"type": "http.request", "body": png(2998)}, {"type": "http.disconnect"}])

        async def receive() -> dict[str, Any]:
            return next(arriving)

        async def send(_message: object) -> None:
            await asyncio.Event().wait()  # the line is clogged, so not even the first event is asked for

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},  # uvicorn's
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/encode",
            "query_string": b"",
            "headers": [],
        }
        passes = service.metrics.tower_passes._value.get()
        await app(scope, receive, send)
        encoder = service.encoder
        assert not encoder._flights
        assert (encoder._queue.num_images, encoder._queue.num_bytes) == (0, 0)
        stream = await encoder.encode(png(2997), None, 20.0)  # whatever still ran would go through the tower before
        assert [event.event async for event in stream.events] == ["admitted", "encoded"]
        stream.close()
        assert service.metrics.tower_passes._value.get() == passes + 1


async def test_work_goes_on_while_someone_else_waits_for_the_same_image(replica: Replica) -> None:
    data = png(5)
    with replica.held_tower():
        staying = asyncio.create_task(replica.encoded(data))
        await wait_until(lambda: len(replica.encoder._flights) == 1)
        await leave_after_admission(replica, data)
        await asyncio.sleep(0.1)
        assert len(replica.encoder._flights) == 1
    await staying


async def test_a_fetch_of_the_embedding_keeps_the_work_going_too(replica: Replica) -> None:
    data = png(6)
    with replica.held_tower():
        async with replica.http.stream("POST", "/v1/encode", content=data) as response:
            lines = response.aiter_lines()
            await anext(lines)
            fetch = asyncio.create_task(replica.embedding(data))
            await wait_until(
                lambda: next(iter(replica.encoder._flights.values()))._num_followers == 3
            )  # the POST counts twice: as reader and as waiter
        await asyncio.sleep(0.1)
    assert (await fetch).shape == (NUM_TOKENS, 64)


async def test_work_ends_when_the_fetch_that_kept_it_going_is_given_up(replica: Replica) -> None:
    data = png(8)
    with replica.held_tower():
        async with replica.http.stream("POST", "/v1/encode", content=data) as response:
            lines = response.aiter_lines()
            await anext(lines)
            fetch = asyncio.create_task(replica.embedding(data))
            await wait_until(
                lambda: next(iter(replica.encoder._flights.values()))._num_followers == 3
            )  # the POST counts twice: as reader and as waiter
        await asyncio.sleep(0.1)
        assert len(replica.encoder._flights) == 1
        fetch.cancel()
        await wait_until(lambda: not replica.encoder._flights)


async def test_a_caller_s_deadline_ends_its_wait_with_the_reason(replica: Replica) -> None:
    data = png(7)
    with replica.held_tower():
        _, failed = await replica.encode(data, **{DEADLINE_HEADER: "0.3"})
        assert (failed["event"], failed["error"]["status"]) == ("failed", 504)
        assert "0.3 s" in failed["error"]["message"]
    assert (await replica.http.get(f"/v1/embeddings/{replica.key(data)}")).status_code == 404


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_what_can_be_refused_from_the_header_is_a_plain_http_error(folder: Path) -> None:
    async with running(folder, max_image_pixels=10_000, max_image_bytes=50_000, max_aspect_ratio=50) as replica:
        cases = {
            b"<svg/>": (400, "unsupported_image_format"),
            b"": (400, "unsupported_image_format"),
            png(size=(101, 100)): (400, "image_too_large"),
            png(size=(101, 2)): (400, "image_too_large"),
            b"\x89PNG\r\n\x1a\n" + bytes(50): (400, "invalid_image"),
            png() + bytes(60_000): (413, "payload_too_large"),
        }
        for data, expected in cases.items():
            response = await replica.http.post("/v1/encode", content=data)
            assert refusal(response) == expected, response.text
        response = await replica.http.post("/v1/encode", content=png(size=(101, 100)))
        assert "101 x 100 = 10100" in response.text
        assert "10000" in response.text

        async def without_content_length() -> AsyncIterator[bytes]:
            for _ in range(60):
                yield bytes(1000)

        response = await replica.http.post("/v1/encode", content=without_content_length())
        assert refusal(response) == (413, "payload_too_large")
        await replica.encoded(png())


async def test_wrong_headers_and_unknown_keys_are_refused(replica: Replica) -> None:
    post = replica.http.post
    assert refusal(await post("/v1/encode", content=png(), headers={IMAGE_KEY_HEADER: "abc"}))[0] == 400
    assert refusal(await post("/v1/encode", content=png(), headers={DEADLINE_HEADER: "soon"}))[0] == 400
    assert refusal(await post("/v1/encode", content=png(), headers={DEADLINE_HEADER: "-1"}))[0] == 400
    response = await post("/v1/encode", content=png(), headers={IMAGE_KEY_HEADER: "0" * 64})
    assert refusal(response) == (503, "not_ready")
    assert "another model" in response.text
    assert refusal(await replica.http.get(f"/v1/embeddings/{'0' * 64}")) == (404, "embedding_not_found")
    assert refusal(await replica.http.get("/v1/embeddings/etc")) == (400, "invalid_value")
    assert refusal(await replica.http.get("/nothing")) == (404, "not_found")
    assert refusal(await replica.http.get("/v1/encode")) == (405, "method_not_allowed")


async def test_an_image_that_breaks_while_it_is_decoded_fails_alone(replica: Replica) -> None:
    good, cut = png(8), png(9)[:-40]
    (_, failed), _ = await asyncio.gather(replica.encode(cut), replica.encoded(good))
    assert (failed["event"], failed["error"]["status"]) == ("failed", 400)
    assert failed["error"]["code"] == "invalid_image"
    assert (await replica.http.get(f"/v1/embeddings/{replica.key(cut)}")).status_code == 404
    await replica.encoded(png(10))


async def test_sixteen_decompression_bombs_are_refused_at_once_without_growing(replica: Replica) -> None:
    """Case A9."""
    buffer = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(buffer, "PNG")
    pids = [os.getpid(), *replica.encoder._pool.pids]
    before = sum(map(resident_bytes, pids))
    with replica.held_tower():
        responses = await asyncio.gather(
            *(replica.http.post("/v1/encode", content=buffer.getvalue()) for _ in range(16))
        )
    assert {refusal(response) for response in responses} == {(400, "image_too_large")}
    assert "12000 x 12000" in responses[0].text
    assert sum(map(resident_bytes, pids)) - before < 100_000_000


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
