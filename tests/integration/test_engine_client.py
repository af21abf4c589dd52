"""What the gateway makes of an engine that says or breaks off what no engine should."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress

import httpx
import pytest

from services.gateway.backends import EngineClient, written
from services.gateway.balancer import Pool, Replica
from services.gateway.generation import Generation, Generator
from services.gateway.schema import wire_sampling
from services.text_engine.input_processing import sampling_params
from shared.errors import DiptychError, ModelNotFound, UpstreamFailed, UpstreamTimeout
from shared.peer_names import PeerNames
from shared.sampling import Constraint, SamplingParams
from shared.service_client import ServiceClient
from shared.tls import Tls
from shared.wire.engine import (
    ChatMessage,
    Finished,
    GenerateRequest,
    ImagePart,
    ModelInfo,
    Started,
    TextPart,
    Tokens,
)
from shared.wire.images import ImageRef

STARTED = Started(num_prompt_tokens=1, num_image_tokens=0)
FINISHED = Finished(num_prompt_tokens=1, num_image_tokens=0, num_cached_tokens=0, num_generated_tokens=1)


@asynccontextmanager
async def engine_that_answers(raw: bytes, *, then_hangs: bool) -> AsyncIterator[str]:
    is_over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        with suppress(ConnectionError):
            if then_hangs:
                await reader.read()
            writer.close()
            await writer.wait_closed()
        is_over.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await is_over.wait()


@pytest.mark.parametrize(("then_hangs", "error"), [(False, UpstreamFailed), (True, UpstreamTimeout)])
async def test_a_refusal_that_breaks_off_is_the_engine_s_fault(then_hangs: bool, error: type[DiptychError]):
    refusal = b"HTTP/1.1 503 Full\r\nContent-Length: 50\r\n\r\nhalf of it"
    client = ServiceClient(tls=Tls("services"), names=PeerNames(), tokens=(), timeout=httpx.Timeout(30))
    request = GenerateRequest(request_id="r", prompt="hi")
    async with engine_that_answers(refusal, then_hangs=then_hangs) as url, client, AsyncExitStack() as stack:
        engines = EngineClient(client, start_timeout_s=0.5)
        generating = engines.generate(url, request, "r", admission=nullcontext(), on_queue=lambda _: None)
        with pytest.raises(error):
            await stack.enter_async_context(generating)


async def test_a_generation_whose_end_is_not_waited_for_is_closed_all_the_same():
    async def events() -> AsyncIterator[Started | Tokens | Finished]:
        await asyncio.Event().wait()
        yield FINISHED

    stack = AsyncExitStack()
    is_closed = asyncio.Event()
    stack.callback(is_closed.set)
    replica: Replica[ModelInfo] = Replica("http://engine")
    generation = Generation(STARTED, FINISHED, events(), stack, replica=replica, asked_at=0.0, note=lambda _: None)
    closing = asyncio.create_task(generation.aclose())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert is_closed.is_set()


async def test_a_model_that_has_just_gone_is_not_found():
    async with ServiceClient(tls=Tls("services"), names=PeerNames(), tokens=()) as client:
        pool: Pool[ModelInfo] = Pool(time.monotonic, random.Random(0))
        generator = Generator(pool, EngineClient(client, start_timeout_s=1))
        with pytest.raises(ModelNotFound, match="'gone' is not served any more"):
            generator.served("gone")


def test_a_request_is_written_as_the_engine_reads_it():
    sampling = SamplingParams(
        logit_bias={7: -1.5}, stop=("é\n", '"'), constraint=Constraint(kind="choice", value='["a"]')
    )
    image = ImageRef(image_key="a" * 64, num_tokens=6, width=5, height=7, grid=(1, 2, 3))
    request = GenerateRequest(
        request_id="r",
        messages=[ChatMessage(role="user", content=[TextPart(text="\u2028 and \U0001f600"), ImagePart(image=image)])],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"x": [None, 1e300, 2**53]}}}],
        sampling=wire_sampling(sampling),
    )
    read = GenerateRequest.model_validate_json(written(request))
    assert read == GenerateRequest.model_validate_json(request.model_dump_json(exclude_none=True))
    assert sampling_params(read) == sampling
