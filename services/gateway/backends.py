"""HTTP to vision encoders and text engines: typed events out, errors by meaning, nothing about choosing a replica.

Closing a stream early closes its connection, and that is how encodes and generations are cancelled upstream.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Final, TypeVar

import httpx
import orjson
from pydantic import TypeAdapter, ValidationError

from shared.errors import DiptychError, NotReady, UpstreamFailed, UpstreamTimeout, UpstreamTooLong, error_from_body
from shared.lines import LineSplitter, LineTooLong
from shared.service_client import ServiceClient
from shared.wire.common import DEADLINE_HEADER, REQUEST_ID_HEADER, WireError, WireModel
from shared.wire.encoder import (
    DETAIL_HEADER,
    IMAGE_KEY_HEADER,
    IMAGE_NUMBER_HEADER,
    SAFETENSORS,
    Admitted,
    DescribeRequest,
    DescribeResponse,
    Encoded,
    EncodeEvent,
    EncodeFailedEvent,
)
from shared.wire.engine import (
    QUEUE_OPENS_HEADER,
    Failed,
    Finished,
    GenerateEvent,
    GenerateRequest,
    ModelInfo,
    Started,
    TokenizeRequest,
    TokenizeResponse,
    Tokens,
)
from shared.wire.engine_admin import CacheState
from shared.wire.images import Detail

Answer = TypeVar("Answer", bound=WireModel)
RETRY_UNREACHABLE_S: Final = 1.0
_ENCODE_EVENT: Final[TypeAdapter[EncodeEvent]] = TypeAdapter(EncodeEvent)
_GENERATE_EVENT: Final[TypeAdapter[GenerateEvent]] = TypeAdapter(GenerateEvent)


class EncoderClient:
    """`/v1/encode` and `/v1/describe` of one vision encoder."""

    def __init__(self, http: httpx.AsyncClient, *, admit_timeout_s: float, encode_timeout_s: float) -> None:
        self._http = http
        self._admit_timeout_s = admit_timeout_s
        self._encode_timeout_s = encode_timeout_s

    async def encode(
        self,
        url: str,
        image: bytes,
        image_key: str,
        request_id: str,
        *,
        detail: Detail = "high",
        number: int = 0,
        is_embedding: bool = False,
    ) -> AsyncGenerator[Admitted | Encoded]:
        """Yields `Admitted`, then `Encoded`; whatever goes wrong, before or after, is raised.

        number   which of the request's pictures it is
        """
        headers = {
            "Content-Type": SAFETENSORS if is_embedding else "application/octet-stream",
            IMAGE_KEY_HEADER: image_key,
            IMAGE_NUMBER_HEADER: f"{number}",
            DETAIL_HEADER: detail,
            REQUEST_ID_HEADER: request_id,
            DEADLINE_HEADER: f"{self._admit_timeout_s + self._encode_timeout_s:g}",
        }
        waiting_for = f"admission of the image took longer than {self._admit_timeout_s:g} s"
        with _upstream_errors("vision encoder"):
            try:
                async with (
                    asyncio.timeout(self._admit_timeout_s) as deadline,
                    self._http.stream("POST", f"{url}/v1/encode", content=image, headers=headers) as response,
                ):
                    await _raise_for_status(response)
                    async for event in _encode_events(response):
                        if isinstance(event, Admitted):
                            deadline.reschedule(asyncio.get_running_loop().time() + self._encode_timeout_s)
                            waiting_for = f"encoding the image took longer than {self._encode_timeout_s:g} s"
                        yield event
            except TimeoutError as error:
                raise UpstreamTimeout(waiting_for) from error

    async def describe(self, url: str, request: DescribeRequest) -> DescribeResponse:
        with _upstream_errors("vision encoder"):
            return await _ask(self._http, "POST", f"{url}/v1/describe", request, DescribeResponse)


class EngineClient:
    """Of a text engine: `/v1/generate` and `/v1/tokenize`, and what operators ask of its cache and its adapters."""

    def __init__(self, http: ServiceClient, *, start_timeout_s: float) -> None:
        self._http = http
        self._start_timeout_s = start_timeout_s

    @asynccontextmanager
    async def generate(
        self,
        url: str,
        request: GenerateRequest,
        request_id: str,
        *,
        admission: AbstractAsyncContextManager[None],
        on_queue: Callable[[float], None],
    ) -> AsyncIterator[AsyncIterator[Started | Tokens | Finished]]:
        """The engine's events until the block is left, which aborts what still runs.

        admission  entered from before the request is sent until it is taken or refused
        on_queue   hears, taken or refused, after how many seconds the engine would queue another such request
        """
        headers = {"Content-Type": "application/json", REQUEST_ID_HEADER: request_id}
        body = written(request)
        with _upstream_errors("text engine"):
            try:
                async with asyncio.timeout(self._start_timeout_s), admission:
                    response = await self._http.open("POST", f"{url}/v1/generate", content=body, headers=headers)
                    if (opens_in_s := _queue_opens_in_s(response)) is not None:
                        on_queue(opens_in_s)
                    await _raise_for_status(response)
            except TimeoutError as error:
                raise UpstreamTimeout(f"the text engine did not start within {self._start_timeout_s:g} s") from error
        try:
            yield _generate_events(response)
        finally:
            await response.aclose()

    async def tokenize(self, url: str, request: TokenizeRequest) -> TokenizeResponse:
        with _upstream_errors("text engine"):
            return await _ask(self._http, "POST", f"{url}/v1/tokenize", request, TokenizeResponse)

    async def change_adapters(self, url: str, path: str, body: WireModel) -> ModelInfo:
        """Load or unload a LoRA adapter; what the engine serves then."""
        with _upstream_errors("text engine"):
            return await _ask(self._http, "POST", f"{url}{path}", body, ModelInfo)

    async def control_cache(self, method: str, url: str, path: str, body: WireModel | None = None) -> CacheState:
        """One of the routes that answer with the cache's state."""
        # Falling asleep takes as long as the caller allows, which the engine itself sees to.
        timeout = httpx.Timeout(None, connect=self._http.timeout.connect)
        with _upstream_errors("text engine"):
            return await _ask(self._http, method, f"{url}{path}", body, CacheState, timeout)


async def _ask(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    body: WireModel | None,
    answer: type[Answer],
    limits: httpx.Timeout | None = None,
) -> Answer:
    """The answer of a route that gives it in one piece. limits: in seconds; None: the client's own"""
    response = await http.request(
        method,
        url,
        content=None if body is None else written(body),
        headers={} if body is None else {"Content-Type": "application/json"},
        timeout=limits or httpx.USE_CLIENT_DEFAULT,
    )
    await _raise_for_status(response)
    return answer.model_validate_json(response.content)


def written(body: WireModel) -> bytes:
    """As JSON, without what is None. Pydantic's own writer takes three times as long over megabytes of text, in which
    nothing else of this process runs."""
    return orjson.dumps(body.model_dump(exclude_none=True), option=orjson.OPT_NON_STR_KEYS)


async def _encode_events(response: httpx.Response) -> AsyncIterator[Admitted | Encoded]:
    is_complete = False
    lines = LineSplitter()
    async for chunk in response.aiter_raw():
        for line in lines.feed(chunk):
            event = _ENCODE_EVENT.validate_json(line)
            if isinstance(event, EncodeFailedEvent):
                raise _from_wire(event.error)
            is_complete = isinstance(event, Encoded)
            yield event
    if not is_complete:
        raise UpstreamFailed("the vision encoder ended its answer too early")


async def _generate_events(response: httpx.Response) -> AsyncIterator[Started | Tokens | Finished]:
    """Ends where the response ends, not at `Finished`: only a response read to its end frees its connection."""
    is_complete = False
    lines = LineSplitter()
    # The transport's own stream: httpx's `aiter_raw` around it costs as much as the parsing of a token.
    assert isinstance(response.stream, httpx.AsyncByteStream)
    with _upstream_errors("text engine"):
        async for chunk in response.stream:
            for line in lines.feed(chunk):
                event = _GENERATE_EVENT.validate_json(line)
                if isinstance(event, Failed):
                    raise _from_wire(event.error)
                if isinstance(event, Tokens) and event.finish_reason == "abort":
                    raise UpstreamFailed("the text engine gave up this request")
                is_complete = isinstance(event, Finished)
                yield event
    if not is_complete:
        raise UpstreamFailed("the text engine ended its answer too early")


async def _raise_for_status(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    try:
        body: object = orjson.loads(await response.aread())
    except orjson.JSONDecodeError:
        body = None
    finally:
        await response.aclose()
    raise error_from_body(response.status_code, body, retry_after_s=_retry_after(response))


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else None  # "²" is a digit, and no number


def _queue_opens_in_s(response: httpx.Response) -> float | None:
    """None: the engine is older than this, or says what is no time."""
    try:
        seconds = float(response.headers.get(QUEUE_OPENS_HEADER, "nan"))
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _from_wire(error: WireError) -> DiptychError:
    return error_from_body(error.status, {"error": error.model_dump()}, retry_after_s=error.retry_after_s)


@contextmanager
def _upstream_errors(service: str) -> Iterator[None]:
    """The HTTP client's failures by what they mean for a request."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise NotReady(f"the {service} cannot be reached", retry_after_s=RETRY_UNREACHABLE_S) from error
    except httpx.TimeoutException as error:
        raise UpstreamTimeout(f"the {service} stopped answering") from error
    except httpx.TransportError as error:
        raise UpstreamFailed(f"the connection to the {service} broke") from error
    except LineTooLong as error:
        raise UpstreamTooLong(f"the {service} sent an event that is too long") from error
    except ValidationError as error:
        raise UpstreamFailed(f"the {service} sent an event that is not understood") from error
