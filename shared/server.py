"""Runs one service's app under uvicorn: signals, drain and exit code the same for every service."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from shared.http_protocol import HttpProtocol
from shared.log import get_logger
from shared.malloc import limit_arenas
from shared.resources import available_cores
from shared.threads import started_threads
from shared.tls import Tls

log = get_logger(__name__)
REFRESH_TICKS = 100  # of a tenth of a second: how soon renewed certificates are noticed
FAREWELL_S = 0.01
MAX_WORKER_THREADS = 32
LINGERING_S = 5  # for connections that stay after the last request has ended


class _DrainingServer(uvicorn.Server):
    """On SIGTERM: tell the app first, then let running answers end; a second signal ends at once.

    may_exit     None: the port is closed at once, and whoever comes next finds another replica. Otherwise the app goes
                 on answering, if only with refusals, until this says so; what more signals mean is then the app's to
                 say
    identities   looked at now and then, so that renewed certificates are taken up
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_drain: Callable[[], None],
        may_exit: Callable[[], bool] | None,
        identities: Sequence[Tls] = (),
    ) -> None:
        super().__init__(config)
        self._identities = identities
        self._on_drain = on_drain
        self._may_exit = may_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_first = not self.should_exit
        if is_first:
            log.info("shutting down: running answers may finish")
        if is_first or self._may_exit is not None:
            self._on_drain()
        else:
            self.force_exit = True
        if self._may_exit is None:
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        num_threads = min(MAX_WORKER_THREADS, available_cores() + 4)  # as many as asyncio would start one by one
        asyncio.get_running_loop().set_default_executor(started_threads(num_threads))
        await super().startup(sockets)
        if self.started:
            log.info("listening", host=self.config.host, port=self.config.port)

    async def on_tick(self, counter: int) -> bool:
        if counter % REFRESH_TICKS == 0:
            for identity in self._identities:
                identity.refresh()
        return await super().on_tick(counter) or (self._may_exit is not None and self._may_exit())


def run_to_the_end(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
    """As `server.run`, and gives connections that were just closed the moment that their end takes.

    uvloop closes no loop in which a TLS connection still ends, and says EBUSY then: what is left is a stranger's, in
    the middle of a handshake.
    """
    try:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets))
            runner.run(asyncio.sleep(FAREWELL_S))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise


def serve(
    app: FastAPI,
    *,
    host: str,
    port: int,
    drain_timeout_s: float,
    on_drain: Callable[[], None],
    may_exit: Callable[[], bool] | None = None,
    tls_context: ssl.SSLContext | None = None,
    identities: Sequence[Tls] = (),
) -> None:
    """Serve until SIGTERM or SIGINT, then wait for running answers and return; by TLS where there is a `tls_context`.

    Without `may_exit` nothing more is accepted, and the wait takes up to `drain_timeout_s`; with it the app decides.
    Exits with status 1 if the app could not start, or asked itself to stop and said why in `app.state.failed`; the
    reason is then the last thing printed, `error: ...`, as the command line ends for every other failure.
    """
    limit_arenas()
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=HttpProtocol,
        ssl_context_factory=None if tls_context is None else lambda _config, _default: tls_context,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody here asks for the client's address
        timeout_graceful_shutdown=max(1, round(drain_timeout_s)) if may_exit is None else LINGERING_S,
        timeout_keep_alive=75,  # above the idle time of common load balancers, which must close first
    )
    server = _DrainingServer(config, on_drain, may_exit, identities)
    app.state.stop = lambda: setattr(server, "should_exit", True)
    run_to_the_end(server)
    reason = getattr(app.state, "failed", None)
    if reason is not None:
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
    if reason is not None or not server.started:
        sys.exit(1)
