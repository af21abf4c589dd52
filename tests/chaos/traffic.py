"""Steady mixed load, and what became of every request: answered rightly, refused in time, or one of the bad ends.

The same few questions are asked again and again, so that an undisturbed run says what each answer must be. A picture is
made new by a comment in its file: another key, another encode, and the same pixels.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import orjson
from PIL import Image, PngImagePlugin

from tests.gateway_stack import data_url

NUM_TOKENS: Final = 24
GIVE_UP_S: Final = 60.0
PAUSE_S: Final = 0.1  # of a client between two questions
RETRYABLE: Final = frozenset({429, 503})

Kind = Literal["text", "known picture", "new picture"]
KINDS: Final[tuple[Kind, ...]] = ("text", "known picture", "text", "new picture")
End = Literal["right", "wrong", "refused", "failed", "cut with an error", "cut without a word", "hung", "unreachable"]

TEXTS: Final = ("What can you do?", "Count from one to nine.", "Say hello, please.", "Which colours do you know?")
QUESTION: Final = "What is in the picture?"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times by time.monotonic().

    status    of the HTTP answer; 0: there was none
    detail    the error's code or the exception's name
    is_stream whether a stream was asked for
    """

    kind: Kind
    is_stream: bool
    began: float
    ended: float
    end: End
    status: int = 0
    detail: str = ""

    @property
    def name(self) -> str:
        return self.end if not self.detail else f"{self.end} ({self.status or 'no status'} {self.detail})"


class Questions:
    """Bodies to send, each with the number of the answer that is right."""

    def __init__(self, model: str, pictures: Sequence[Path]) -> None:
        self._model = model
        self._pixels = [Image.open(path).convert("RGB") for path in pictures]
        self._known = [data_url(_encoded(pixels, "known")) for pixels in self._pixels]

    @property
    def num_answers(self) -> int:
        return len(TEXTS) + len(self._pixels)

    def body(self, kind: Kind, number: int, **fields: Any) -> tuple[dict[str, Any], int]:
        if kind == "text":
            index = number % len(TEXTS)
            return self._body(TEXTS[index], fields), index
        index = number % len(self._pixels)
        fresh = kind == "new picture"
        url = data_url(_encoded(self._pixels[index], os.urandom(8).hex())) if fresh else self._known[index]
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        return self._body(content, fields), len(TEXTS) + index

    def all(self) -> Iterator[tuple[dict[str, Any], int]]:
        yield from (self.body("text", number) for number in range(len(TEXTS)))
        yield from (self.body("known picture", number) for number in range(len(self._pixels)))

    def _body(self, content: Any, fields: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return {"model": self._model, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0} | fields


def _encoded(pixels: Image.Image, comment: str) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", comment)
    buffer = io.BytesIO()
    pixels.save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


@dataclass
class Traffic:
    """Clients in a thread of their own, each asking one question after another while `running`.

    give_up_s   after which a request counts as hung
    expected    the right answers, by number; none until `learn` has asked them undisturbed
    """

    url: str
    questions: Questions
    num_clients: int = 6
    give_up_s: float = GIVE_UP_S
    expected: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def learn(self) -> None:
        """Ask everything once, one after another, with nothing broken. Raises if anything is not answered."""
        with httpx.Client(base_url=self.url, timeout=self.give_up_s, trust_env=False) as http:
            for body, _ in self.questions.all():
                response = http.post("/v1/chat/completions", json=body)
                response.raise_for_status()
                self.expected.append(response.json()["choices"][0]["message"]["content"])

    @contextmanager
    def running(self) -> Iterator[None]:
        """On the way out every open request is waited for."""
        stop = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._ask_on(stop)), name="traffic")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    async def _ask_on(self, stop: threading.Event) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=self.give_up_s, trust_env=False, limits=limits) as http:

            async def client() -> None:
                while not stop.is_set():
                    number = next(self._numbers)
                    kind = KINDS[number % len(KINDS)]
                    outcome = await self.ask(http, kind, number // len(KINDS), is_stream=number % 3 != 0)
                    self.outcomes.append(outcome)
                    await asyncio.sleep(PAUSE_S)

            await asyncio.gather(*(client() for _ in range(self.num_clients)))

    async def ask_together(self, count: int, kind: Kind) -> list[Outcome]:
        """`count` requests that are equal, byte for byte, at the same moment."""
        body, index = self.questions.body(kind, 0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=self.give_up_s, trust_env=False, limits=limits) as http:
            return await asyncio.gather(*(self._send(http, kind, body, index, is_stream=False) for _ in range(count)))

    async def ask(self, http: httpx.AsyncClient, kind: Kind, number: int, *, is_stream: bool) -> Outcome:
        body, index = self.questions.body(kind, number)
        return await self._send(http, kind, body, index, is_stream=is_stream)

    async def _send(
        self, http: httpx.AsyncClient, kind: Kind, body: dict[str, Any], index: int, *, is_stream: bool
    ) -> Outcome:
        began = time.monotonic()

        def outcome(end: End, status: int = 0, detail: str = "") -> Outcome:
            return Outcome(kind, is_stream, began, time.monotonic(), end, status, detail)

        status = 0
        try:
            async with (
                asyncio.timeout(self.give_up_s),
                http.stream("POST", "/v1/chat/completions", json=body | {"stream": is_stream}) as response,
            ):
                status = response.status_code
                raw = await response.aread()
        except (TimeoutError, httpx.TimeoutException):
            return outcome("hung", status, "no end in time")
        except httpx.ConnectError:
            return outcome("unreachable", status)
        except httpx.TransportError as error:
            return outcome("cut without a word", status, type(error).__name__)
        if status != 200:
            is_refusal = status in RETRYABLE and "retry-after" in response.headers
            return outcome("refused" if is_refusal else "failed", status, _code(raw))
        text, error_code, is_whole = _read_stream(raw) if is_stream else _read_body(raw)
        if error_code:
            return outcome("cut with an error", status, error_code)
        if not is_whole:
            return outcome("cut without a word", status, "no [DONE]")
        if text != self.expected[index]:
            return outcome("wrong", status, f"{text!r}, not {self.expected[index]!r}")
        return outcome("right", status)


def _read_body(raw: bytes) -> tuple[str, str, bool]:
    choice = orjson.loads(raw)["choices"][0]
    return choice["message"]["content"], "", choice["finish_reason"] is not None


def _read_stream(raw: bytes) -> tuple[str, str, bool]:
    """Text, the error event's code, and whether it was said to its end."""
    text, code, is_whole = "", "", False
    for line in raw.splitlines():
        data = line.removeprefix(b"data: ") if line.startswith(b"data: ") else b""
        if data == b"[DONE]":
            is_whole = True
        elif data:
            event = orjson.loads(data)
            if error := event.get("error"):
                code = str(error.get("code") or error.get("type"))
            text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    return text, code, is_whole


def _code(raw: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = orjson.loads(raw)["error"]
        return str(error.get("code") or error.get("type"))
    return "not an error body"


def tally(outcomes: Sequence[Outcome], wanted: Callable[[Outcome], bool] = lambda _: True) -> Counter[str]:
    return Counter(outcome.name for outcome in outcomes if wanted(outcome))
