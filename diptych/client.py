"""A small client of the chat API: pictures from disk or the web, a question, the answer whole or as it comes.

For anything more, any OpenAI client works against the same server.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from shared.lines import lines_of

# An answer may take minutes on a slow machine: only connecting has a limit.
TIMEOUT = httpx.Timeout(None, connect=5.0)
_IMAGE_PART = re.compile(r"messages\[0\]\.content\[(\d+)\]")  # where `_body` puts pictures: before the question


class RequestFailed(Exception):
    """The server refused or broke off; the message is its own.

    param   the field of the request that it is about; None: it does not say
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, the usage that the server reported, and what the client itself measured.

    first_token_s  until the first text arrived; None if the answer was not streamed
    """

    text: str
    usage: dict[str, Any] = field(default_factory=dict)
    total_s: float = 0.0
    first_token_s: float | None = None

    @property
    def timings(self) -> dict[str, float]:
        """Seconds per stage, from `usage.timings`."""
        return dict(self.usage.get("timings") or {})

    @property
    def num_cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def server_url(text: str) -> str:
    """ "127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1" -> "http://127.0.0.1:8000" """
    return (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1").rstrip("/")


class Client:
    """Asks a running server: `with Client() as client: client.ask("What is in the picture?", ["cat.png"]).text`."""

    def __init__(self, base_url: str = "http://127.0.0.1:8000", *, api_key: str | None = None) -> None:
        """base_url   with or without the /v1 that OpenAI's clients want, and the http:// that people leave out"""
        base_url = server_url(base_url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A proxy from the environment cannot reach this machine's loopback.
        is_local = httpx.URL(base_url).host in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=TIMEOUT, trust_env=not is_local)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._http.close()

    def is_ready(self) -> bool:
        """Whether a server answers there and can take requests."""
        return self.why_not_ready() is None

    def why_not_ready(self) -> str | None:
        """The server's reason for not taking requests yet, "" if none answers at all, None if it is ready."""
        try:
            response = self._http.get("/ready", timeout=5.0)
        except httpx.HTTPError:
            return ""
        if response.status_code == 200:
            return None
        return _message(response.text) or f"it answers /ready with status {response.status_code}"

    def models(self) -> list[str]:
        """The ids of the models that the server offers."""
        return [model["id"] for model in self._checked(self._http.get("/v1/models")).json()["data"]]

    def ask(self, question: str, images: Sequence[str | Path] = (), **options: Any) -> Answer:
        """One question about any number of pictures; `options` are fields of the request, e.g. `max_tokens=50`."""
        since = time.perf_counter()
        with _naming(images):
            response = self._checked(self._http.post("/v1/chat/completions", json=_body(question, images, options)))
        body = response.json()
        text = body["choices"][0]["message"]["content"] or ""
        return Answer(text, body.get("usage") or {}, time.perf_counter() - since)

    def stream(self, question: str, images: Sequence[str | Path] = (), **options: Any) -> Iterator[str | Answer]:
        """The answer's text piece by piece, and last of all the whole Answer with its usage."""
        since, first_token_s = time.perf_counter(), None
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        body = _body(question, images, {**options, "stream": True, "stream_options": {"include_usage": True}})
        with _naming(images), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                self._checked(response)
            for chunk in _events(lines_of(response.iter_bytes())):
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", []):
                    if piece := choice["delta"].get("content"):
                        first_token_s = first_token_s or time.perf_counter() - since
                        pieces.append(piece)
                        yield piece
        yield Answer("".join(pieces), usage, time.perf_counter() - since, first_token_s)

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if not response.is_error:
            return response
        raise _failure(response.text, f"the server answered with status {response.status_code}")


def image_url(image: str | Path) -> str:
    """A web or data URL as it is; a file as a data URL. Raises FileNotFoundError."""
    if isinstance(image, str) and image.startswith(("http://", "https://", "data:")):
        return image
    path = Path(image).expanduser()
    mime = mimetypes.guess_type(path.name)[0] or ""
    if not mime.startswith("image/"):  # whether it is a picture nevertheless, its bytes tell
        mime = "application/octet-stream"
    return f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _body(question: str, images: Sequence[str | Path], options: dict[str, Any]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image_url(image)}} for image in images]
    parts.append({"type": "text", "text": question})
    return {"messages": [{"role": "user", "content": parts}], **options}


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream. Raises RequestFailed for an error event."""
    for line in lines:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise _failure(data.decode(), "the server broke off the answer")
        yield event


@contextlib.contextmanager
def _naming(images: Sequence[str | Path]) -> Iterator[None]:
    """What the server says of a part of the request is said of the picture that was put there."""
    try:
        yield
    except RequestFailed as error:
        part = _IMAGE_PART.match(error.param or "")
        if part is None or int(part.group(1)) >= len(images):
            raise
        number = int(part.group(1))
        image = str(images[number])
        name = f"picture {number + 1}" if image.startswith("data:") else image
        raise RequestFailed(f"{name}: {str(error).removeprefix(f'{error.param}: ')}", param=error.param) from None


def _failure(body: str, otherwise: str) -> RequestFailed:
    """What an error body says; `otherwise` if it is none of ours."""
    message = _message(body)
    param = json.loads(body)["error"].get("param") if message else None
    return RequestFailed(message or otherwise, param=param if isinstance(param, str) else None)


def _message(body: str) -> str | None:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(message)
