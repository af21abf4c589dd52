"""One streamed request seen from outside: when the first token came, the gaps after it, the usage, what failed."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import orjson

from diptych.bench.errors import BenchError
from diptych.bench.workloads import Request
from shared.lines import async_lines_of

MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """The server asked, and how.

    text_api             where requests without images go; those with images always go to chat
    num_template_tokens  what the server's chat template adds: that many words fewer are sent to chat
    """

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)
    text_api: Literal["completions", "chat"] = "completions"
    num_template_tokens: int = 0
    timeout_s: float = 600.0

    def url(self, path: str) -> str:
        """`base_url` is taken with or without its final `/v1`."""
        return self.base_url.rstrip("/").removesuffix("/v1") + path

    def open_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        # Proxies from the environment would be measured along with the server.
        return httpx.AsyncClient(timeout=self.timeout_s, limits=limits, headers=headers, trust_env=False)


@dataclass(slots=True)
class Tally:
    """What has come back so far, for the progress line."""

    num_requests: int = 0
    num_finished: int = 0
    num_chunks: int = 0


@dataclass(slots=True)
class Reply:
    """Times in seconds; a chunk is one event with text in it, usually one token."""

    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)  # between neighbouring chunks
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def num_chunks(self) -> int:
        return 0 if self.ttft_s is None else 1 + len(self.gaps_s)

    @property
    def inter_token_s(self) -> float:
        """Mean time per token after the first; does not depend on how many tokens a server puts in one chunk."""
        return sum(self.gaps_s) / max(1, self.num_output_tokens - 1)


async def first_model(target: Target) -> str:
    """The first model that the server lists; also tells at once that no server is there."""
    async with target.open_client() as client:
        try:
            response = await client.get(target.url("/v1/models"))
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            raise BenchError(f"{target.base_url}: cannot list models: {failure or type(failure).__name__}") from failure
        except (ValueError, LookupError, TypeError) as failure:
            raise BenchError(f"{target.base_url} lists no model; name one with --model") from failure


class BadStream(Exception):
    """The server answered, but not with a stream of tokens."""


async def ask(client: httpx.AsyncClient, target: Target, request: Request, tally: Tally | None = None) -> Reply:
    """Send `request` and read its answer to the end. Failures are kept in the reply: a benchmark counts them."""
    reply = Reply(num_prompt_tokens=request.num_prompt_tokens)
    path, body = request_body(target, request)
    try:
        sent_at = time.perf_counter()
        async with client.stream("POST", target.url(path), content=body) as response:
            await _read_answer(response, reply, sent_at, tally)
        if reply.ttft_s is None:
            raise BadStream("the stream ended without any text")
    except (httpx.HTTPError, BadStream, orjson.JSONDecodeError) as failure:
        reply.error = f"{type(failure).__name__}: {failure}"[:MAX_ERROR_CHARS]
    if tally is not None:
        tally.num_finished += 1
    return reply


def request_body(target: Target, request: Request) -> tuple[str, bytes]:
    """Path and JSON body; greedy, and the length is exact because EOS is ignored where the server knows that field."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": request.num_output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if not request.images and target.text_api == "completions":
        return "/v1/completions", orjson.dumps(body | {"prompt": request.text})
    return "/v1/chat/completions", orjson.dumps(body | {"messages": [_user_message(target, request)]})


def _user_message(target: Target, request: Request) -> dict[str, Any]:
    if request.images:
        content: Any = [_image_part(image) for image in request.images] + [{"type": "text", "text": request.text}]
    elif target.num_template_tokens:
        num_words = max(1, request.num_prompt_tokens - target.num_template_tokens)
        content = " ".join(request.text.split()[:num_words])
    else:
        content = request.text
    return {"role": "user", "content": content}


def _image_part(jpeg: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()}}


async def _read_answer(response: httpx.Response, reply: Reply, sent_at: float, tally: Tally | None) -> None:
    if response.status_code != httpx.codes.OK:
        raise BadStream(f"{response.status_code} {(await response.aread())[:MAX_ERROR_CHARS]!r}")
    last_at = sent_at
    usage: dict[str, Any] = {}
    async for event in _events(response):
        usage = event.get("usage") or usage
        if not any(_text_of(choice) for choice in event.get("choices") or ()):
            continue
        now = time.perf_counter()
        if reply.ttft_s is None:
            reply.ttft_s = now - sent_at
        else:
            reply.gaps_s.append(now - last_at)
        last_at = now
        if tally is not None:
            tally.num_chunks += 1
    # A server that sends no usage is counted by chunks.
    reply.num_output_tokens = usage.get("completion_tokens") or reply.num_chunks
    reply.num_prompt_tokens = usage.get("prompt_tokens") or reply.num_prompt_tokens
    reply.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each `data:` line up to `[DONE]`; comments and other fields of the event stream are skipped."""
    async for line in async_lines_of(response.aiter_bytes()):
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = orjson.loads(data)
        if event.get("error"):
            raise BadStream(str(event["error"]))
        yield event


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return delta.get("content") or choice.get("text") or ""
