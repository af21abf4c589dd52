"""Runs one service's app under uvicorn: signals, drain and exit code the same for every service."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from shared.log import get_logger

log = get_logger(__name__)
LINGERING_S = 5  # for connections that stay after the last request has ended


class _DrainingServer(uvicorn.Server):
    """On SIGTERM: tell the app first, then let running answers end; a second signal ends at once.

    may_exit   None: the port is closed at once, and whoever comes next finds another replica. Otherwise the app goes on
               answering, if only with refusals, until this says so; what more signals mean is then the app's to say
    """

    def __init__(
        self, config: uvicorn.Config, on_drain: Callable[[], None], may_exit: Callable[[], bool] | None
    ) -> None:
        super().__init__(config)
        self._on_drain = on_drain
        self._may_exit = may_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_first = not self.should_exit
        if is_first:
            log.info("shutting down: running answers may finish", signal=signal.Signals(sig).name)
        if is_first or self._may_exit is not None:
            self._on_drain()
        else:
            self.force_exit = True
        if self._may_exit is None:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or (self._may_exit is not None and self._may_exit())


def serve(
    app: FastAPI,
    *,
    host: str,
    port: int,
    drain_timeout_s: float,
    on_drain: Callable[[], None],
    may_exit: Callable[[], bool] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then wait for running answers and return.

    Without `may_exit` nothing more is accepted, and the wait takes up to `drain_timeout_s`; with it the app decides.
    Exits with status 1 if the app could not start, or set `app.state.failed` and asked itself to stop.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody here asks for the client's address
        timeout_graceful_shutdown=max(1, round(drain_timeout_s)) if may_exit is None else LINGERING_S,
        timeout_keep_alive=75,  # above the idle time of common load balancers, which must close first
    )
    server = _DrainingServer(config, on_drain, may_exit)
    app.state.stop = lambda: setattr(server, "should_exit", True)
    server.run()
    if not server.started or getattr(app.state, "failed", False):
        sys.exit(1)
