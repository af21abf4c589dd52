"""Builds and drives the engine in a thread of its own, so that neither side waits for the other: commands go in through
a queue, outputs of a whole step go out in one call on the event loop.

Building belongs here because OpenMP keeps a team of threads for every thread that ever ran a parallel region, and a
second team slows down the first (shared/torch_threads.py).
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from services.text_engine.build import BuiltEngine
from services.text_engine.engine import Engine
from services.text_engine.engine_io import EngineOutput, EngineRequest, RequestFailed
from services.text_engine.runner.tensor_parallel import RankFailed
from shared.errors import DiptychError
from shared.log import get_logger

log = get_logger(__name__)

STUCK_TIMEOUT_S = 2.0

Command = Callable[[Engine], list[EngineOutput] | None]  # what it returns is delivered as a step's outputs are
T = TypeVar("T")


class EngineThread:
    """Owns the only thread that touches the engine.

    build     makes the engine, in the thread; what it is given is to be called, from any thread, with the reason if the
              engine can never step again
    deliver   called on the event loop with the outputs of one step, in order
    on_step   called in the thread after a step with its seconds, and with None when there is nothing left to compute
    on_death  called on the event loop if the thread dies: no request will get any more outputs
    """

    def __init__(
        self,
        build: Callable[[Callable[[str], None]], BuiltEngine],
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[list[EngineOutput]], None],
        on_step: Callable[[Engine, float | None], None],
        on_death: Callable[[], None],
    ) -> None:
        self._build = build
        self._built: Future[BuiltEngine] = Future()
        self._loop = loop
        self._deliver = deliver
        self._on_step = on_step
        self._on_death = on_death
        self._has_died = False
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._can_step = False
        self._step_started: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> Future[BuiltEngine]:
        """The result is there when the engine runs; its exception is what building raised."""
        self._thread.start()
        return self._built

    def stop(self, step_timeout_s: float) -> bool:
        """Finish the current step and end the thread. Waits for what is left of the time that a step may take, and at
        least `STUCK_TIMEOUT_S`. False: the thread hangs, and goes on hanging until the process ends.
        """
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        left_s = 0.0 if self._has_died else step_timeout_s - self.seconds_in_step()
        self._thread.join(max(STUCK_TIMEOUT_S, left_s))
        if not self._thread.is_alive():
            return True
        log.error("the engine's thread hangs and is given up", seconds_in_step=round(self.seconds_in_step(), 1))
        return False

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._has_died

    def seconds_in_step(self) -> float:
        """How long the current step has been running; 0 between steps. A hung step keeps growing."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def submit(self, command: Command) -> None:
        """Run a command on the engine between two steps; from any thread."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def add(self, request: EngineRequest, on_added: Callable[[], None] = lambda: None) -> None:
        """Queue a request; a refusal arrives as its RequestFailed.

        on_added   called in the thread as soon as the request is queued or refused; not at all if the thread ends first
        """

        def command(engine: Engine) -> list[EngineOutput] | None:
            try:
                engine.add(request)
            except DiptychError as error:
                return [RequestFailed(request.request_id, error)]
            except Exception as error:
                log.error("a request could not be queued", request_id=request.request_id, exc_info=error)
                reason = "the engine failed on this request; the log has the details"
                return [RequestFailed(request.request_id, DiptychError(reason))]
            finally:
                on_added()
            return None

        self.submit(command)

    def _run(self) -> None:
        if not self._built.set_running_or_notify_cancel():  # the caller of `start` wants it no more
            return
        try:
            built = self._build(self._give_up)
        except BaseException as error:  # noqa: BLE001 - the caller of `start` hears of it
            self._built.set_exception(error)
            return
        # What loading has left is there to stay: the collector need not walk through it again and again.
        gc.collect()
        gc.freeze()
        self._built.set_result(built)
        try:
            while self._wait_for_work(built.engine):
                self._run_commands(built.engine)
                self._step(built.engine)
        except RankFailed as error:
            self._give_up(str(error))
        except BaseException:
            log.exception("the engine's thread died; this service is no longer ready")
            self._die()
            raise
        finally:
            built.engine.close()

    def _give_up(self, reason: str) -> None:
        """From any thread: the engine's may be asleep, or in a step that will never end."""
        if self._die():
            log.error("the engine cannot go on; this service is no longer ready", reason=reason)

    def _die(self) -> bool:
        """True: it has just happened, and all are told."""
        with self._wake:
            is_news = not (self._has_died or self._is_stopping)
            self._has_died = self._is_stopping = True
            self._wake.notify()
        if is_news:
            self._loop.call_soon_threadsafe(self._on_death)
        return is_news

    def _wait_for_work(self, engine: Engine) -> bool:
        """Sleep until there is something to do; False: stop. Blocked sequences wake up by the command that brings
        their image."""
        has_idle_work = True
        while not self._has_work():
            if has_idle_work:
                has_idle_work = engine.use_idle_time()
                continue
            with self._wake:
                self._wake.wait_for(self._has_work)
        return not self._is_stopping

    def _has_work(self) -> bool:
        return bool(self._commands) or self._is_stopping or self._can_step

    def _run_commands(self, engine: Engine) -> None:
        outputs: list[EngineOutput] = []
        while self._commands:
            outputs += self._commands.popleft()(engine) or []
        self._can_step = engine.scheduler.has_work
        if not self._can_step:
            self._on_step(engine, None)
        self._send(outputs)

    def _step(self, engine: Engine) -> None:
        if not self._can_step:
            return
        self._step_started = time.monotonic()
        outputs = engine.step()
        elapsed = time.monotonic() - self._step_started
        self._step_started = None
        self._can_step = outputs is not None
        self._on_step(engine, elapsed)
        self._send(outputs or [])

    def _send(self, outputs: list[EngineOutput]) -> None:
        if outputs:
            self._loop.call_soon_threadsafe(self._deliver, outputs)


async def in_engine(thread: EngineThread, work: Callable[[Engine], T]) -> T:
    """What `work` returns or raises in the engine's thread, between two steps."""
    done: Future[T] = Future()

    def command(engine: Engine) -> None:
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work(engine))
            except Exception as error:  # noqa: BLE001 - the caller hears of it
                done.set_exception(error)

    thread.submit(command)
    return await asyncio.wrap_future(done)
