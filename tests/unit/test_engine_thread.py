"""The engine's thread: how it ends, and what it tells of the requests that it was given. A scripted engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.text_engine import engine_thread
from services.text_engine.engine_io import EngineOutput
from services.text_engine.engine_thread import EngineThread
from shared.errors import Overloaded


class ScriptedEngine:
    """Its steps wait for `may_step`; `add` raises `refusal` if there is one; when idle it does `num_idle_pieces`."""

    def __init__(self) -> None:
        self.in_step, self.may_step = threading.Event(), threading.Event()
        self.scheduler = SimpleNamespace(has_work=True)
        self.refusal: Exception | None = None
        self.is_closed = False
        self.num_idle_pieces = 0

    def use_idle_time(self) -> bool:
        self.num_idle_pieces = max(0, self.num_idle_pieces - 1)
        return self.num_idle_pieces > 0

    def add(self, _request: Any) -> None:
        if self.refusal is not None:
            raise self.refusal

    def step(self) -> list[EngineOutput] | None:
        self.in_step.set()
        self.may_step.wait()
        return None

    def close(self) -> None:
        self.is_closed = True


class Running:
    """A started thread with a scripted engine in it, and what it has delivered."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = ScriptedEngine()
        self.outputs: list[EngineOutput] = []
        self.thread = EngineThread(
            lambda _give_up: SimpleNamespace(engine=self.engine),  # type: ignore[arg-type, return-value]
            loop,
            self.outputs.extend,
            lambda _engine, _seconds: None,
            lambda: None,
        )
        self.thread.start().result(timeout=5)

    def begin_step(self) -> None:
        self.thread.submit(lambda _engine: None)
        assert self.engine.in_step.wait(5)


@contextmanager
def running() -> Iterator[Running]:
    loop = asyncio.new_event_loop()
    run = Running(loop)
    try:
        yield run
    finally:
        run.engine.may_step.set()
        run.thread.stop(step_timeout_s=5)
        loop.close()


def in_thread(thread: EngineThread) -> bool:
    """Wait until all that was submitted before has run."""
    done = threading.Event()
    thread.submit(lambda _engine: done.set())
    return done.wait(5)


def request(request_id: str) -> Any:
    return SimpleNamespace(request_id=request_id)


def test_a_step_may_take_its_time_before_the_thread_ends():
    with running() as run:
        run.begin_step()
        threading.Timer(0.3, run.engine.may_step.set).start()
        assert run.thread.stop(step_timeout_s=20)
        assert run.engine.is_closed


def test_a_step_that_hangs_is_given_up_and_said_to_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_thread, "STUCK_TIMEOUT_S", 0.05)
    with running() as run, capture_logs() as logs:
        run.begin_step()
        time.sleep(1.0)
        started = time.monotonic()
        assert not run.thread.stop(step_timeout_s=2.0)
        assert time.monotonic() - started < 1.8, "what the step had taken before counts"
        assert [entry["event"] for entry in logs] == ["the engine's thread hangs and is given up"]
        assert not run.engine.is_closed


@pytest.mark.parametrize("refusal", [None, Overloaded("full"), RuntimeError("broken")])
def test_whoever_adds_a_request_hears_once_that_it_was_queued_or_refused_and_not_before(refusal: Exception | None):
    with running() as run:
        run.engine.refusal = refusal
        run.begin_step()
        heard: list[str] = []
        run.thread.add(request("r"), on_added=lambda: heard.append(threading.current_thread().name))
        time.sleep(0.05)
        assert not heard, "the step still runs"
        run.engine.may_step.set()
        assert in_thread(run.thread)
        assert heard == ["engine"]


def test_idle_time_is_used_until_nothing_is_left_and_again_after_work():
    with running() as run:
        for _ in range(2):
            run.engine.num_idle_pieces = 5
            run.begin_step()
            run.engine.may_step.set()
            deadline = time.monotonic() + 5
            while run.engine.num_idle_pieces and time.monotonic() < deadline:
                time.sleep(0.001)
            assert run.engine.num_idle_pieces == 0
            run.engine.in_step.clear()


def test_work_does_not_wait_for_idle_pieces_that_are_left():
    with running() as run:
        run.engine.num_idle_pieces = 1 << 60
        run.begin_step()
        assert run.engine.num_idle_pieces > 1 << 59
