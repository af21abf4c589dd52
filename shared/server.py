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


class _DrainingServer(uvicorn.Server):
    """On SIGTERM: tell the app first, then let running answers end; a second signal ends at once."""

    def __init__(self, config: uvicorn.Config, on_drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_drain = on_drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            log.info("shutting down: running answers may finish", signal=signal.Signals(sig).name)
            self._on_drain()
        else:
            self.force_exit = True
        self.should_exit = True


def serve(app: FastAPI, *, host: str, port: int, drain_timeout_s: float, on_drain: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then stop accepting, wait for running answers up to `drain_timeout_s`, and return.

    Exits with status 1 if the app could not start, or set `app.state.failed` and asked itself to stop.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        timeout_keep_alive=75,  # above the idle time of common load balancers, which must close first
    )
    server = _DrainingServer(config, on_drain)
    app.state.stop = lambda: setattr(server, "should_exit", True)
    server.run()
    if not server.started or getattr(app.state, "failed", False):
        sys.exit(1)
