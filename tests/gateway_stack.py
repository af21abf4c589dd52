"""A gateway with scripted services behind it, all on loopback sockets, and what tests ask of it."""

from __future__ import annotations

import base64
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from services.gateway.app import create_app
from services.gateway.config import GatewaySettings
from tests.scripted import EncoderScript, EngineScript, ScriptedEncoder, ScriptedEngine, png, serve

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi there"}]


class Stack:
    """One gateway, some engines, some encoders. `reset` makes them healthy and forgetful again between tests."""

    def __init__(self, url: str, engines: list[ScriptedEngine], encoders: list[ScriptedEncoder]) -> None:
        self.url = url
        self.engines = engines
        self.encoders = encoders
        self.http = httpx.Client(base_url=url, timeout=20, trust_env=False)

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    @property
    def encoder(self) -> ScriptedEncoder:
        return self.encoders[0]

    def reset(self) -> None:
        for engine in self.engines:
            engine.script, engine.is_ready, engine.num_aborted = EngineScript(), True, 0
            engine.requests.clear()
        for encoder in self.encoders:
            encoder.script, encoder.is_ready, encoder.num_aborted = EncoderScript(), True, 0
            encoder.keys.clear()
        eventually(lambda: self.ready()["vision_encoders"]["ready"] == len(self.encoders))
        eventually(lambda: self.ready()["text_engines"]["ready"] == len(self.engines))

    def ready(self) -> dict[str, Any]:
        body: dict[str, Any] = self.http.get("/ready").json()
        return body

    def chat(self, messages: Any = HELLO, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": messages, **fields})

    def ask(self, *urls: str, text: str = "what is in the picture", **fields: Any) -> httpx.Response:
        return self.chat(question(*urls, text=text), **fields)

    def num_encodes(self) -> int:
        return sum(len(encoder.keys) for encoder in self.encoders)

    def assert_serves(self) -> None:
        """After whatever happened, one plain text request and one good image request succeed."""
        assert self.chat().status_code == 200
        answer = self.ask(data_url(png(seed=time.monotonic_ns() % 2**31)))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 576


@contextmanager
def running_stack(
    num_engines: int = 1, num_encoders: int = 1, script: EngineScript | None = None, **settings: Any
) -> Iterator[Stack]:
    with ExitStack() as stack:
        engines = [ScriptedEngine(script=script) for _ in range(num_engines)]
        encoders = [ScriptedEncoder() for _ in range(num_encoders)]
        urls = {
            "text_engines": tuple(stack.enter_context(serve(engine.app)) for engine in engines),
            "vision_encoders": tuple(stack.enter_context(serve(encoder.app)) for encoder in encoders),
        }
        fast = {"probe_interval_s": 0.1, "fetch_timeout_s": 1.0}
        app = create_app(GatewaySettings(**{**urls, **fast, **settings}))
        running = Stack(stack.enter_context(serve(app)), engines, encoders)
        stack.callback(running.http.close)
        yield running


@contextmanager
def hung_up(stack: Stack, body: dict[str, Any], path: str = "/v1/chat/completions") -> Iterator[Any]:
    """A request over a bare socket; yields a function that closes it."""
    raw = httpx.Request("POST", stack.url + path, json=body)
    address = urlsplit(stack.url)
    connection = socket.create_connection((address.hostname, address.port))
    head = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in raw.headers.items())]
    connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + raw.read())
    try:
        yield connection.close
    finally:
        connection.close()


def data_url(image: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(image).decode()}"


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def question(*urls: str, text: str = "what is in the picture") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text}, *map(image_part, urls)]}]


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Waits for what other threads do; fails if it does not come."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def assert_openai_error(response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The error object, after checking that it is one and gives nothing away."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    for leak in ("Traceback", os.getcwd(), "site-packages", ".py", "Error("):
        assert leak not in response.text
    if code is not None:
        assert error["code"] == code
    return error
