"""One id follows a request: into log lines, into every answer, and from service to service."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import pytest
import structlog
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from shared.errors import InvalidRequest
from shared.http_errors import install_error_handlers
from shared.log import configure_logging, get_logger
from shared.request_id import RequestIds

log = get_logger(__name__)


async def note() -> None:
    log.info("worked on")


async def broken_stream() -> AsyncIterator[bytes]:
    yield b"first"
    raise RuntimeError("a secret detail")


def app() -> FastAPI:
    app = FastAPI()
    app.add_middleware(RequestIds)
    install_error_handlers(app)

    @app.get("/good")
    async def good() -> str:
        await asyncio.create_task(note())
        return "fine"

    @app.get("/refused")
    async def refused() -> None:
        raise InvalidRequest("no")

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a secret detail")

    @app.get("/broken-stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(broken_stream())

    return app


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app()), base_url="http://test") as client:
        yield client


@contextmanager
def json_logs() -> Iterator[None]:
    """As an operator's log collector gets them, on stderr."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("test", "info", "json")
    try:
        yield
    finally:
        structlog.reset_defaults()
        root.handlers[:] = handlers
        root.setLevel(level)


@pytest.mark.parametrize(("path", "status"), [("/good", 200), ("/refused", 400), ("/none", 404), ("/broken", 500)])
async def test_every_answer_carries_the_id_that_the_caller_gave(http: httpx.AsyncClient, path: str, status: int):
    response = await http.get(path, headers={"X-Request-Id": "abc-123"})
    assert (response.status_code, response.headers.get_list("x-request-id")) == (status, ["abc-123"])


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "\u00e9"])
async def test_who_gives_none_that_fits_a_log_line_gets_a_new_one(http: httpx.AsyncClient, given: str | None):
    headers = {} if given is None else {"X-Request-Id": given.encode("latin-1")}
    ids = {(await http.get("/good", headers=headers)).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert given not in ids


async def test_log_lines_of_a_request_name_it_and_a_bug_is_logged_and_not_shown(
    http: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
):
    with json_logs():
        await http.get("/good", headers={"X-Request-Id": "one"})
        answer = await http.get("/broken", headers={"X-Request-Id": "two"})
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line.get("request_id")) for line in lines] == [
        ("worked on", "one"),
        ("unexpected error", "two"),
    ]
    assert "a secret detail" in lines[1]["exception"]


async def test_an_answer_that_has_begun_is_cut_and_not_glued_to_an_error(http: httpx.AsyncClient):
    with pytest.raises(RuntimeError):
        await http.get("/broken-stream")
