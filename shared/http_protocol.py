"""uvicorn's HTTP/1.1 as the services speak it: an answer's head leaves with the first piece of its body, and apps see
the client's certificate.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final, cast

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

GOODBYE_S: Final = 0.5
JOINED_BYTES: Final = 64 * 1024  # a body up to this size is copied behind its head; a larger one is not worth it


class HttpProtocol(HttpToolsProtocol):
    """With ASGI's `tls` extension as far as it is used here: `client_cert_chain`, of one certificate or none."""

    _tls: dict[object, object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(cast(asyncio.Transport, _HeadJoiner(transport, self.loop)))
        connection = transport.get_extra_info("ssl_object")
        if connection is not None:
            certificate = connection.getpeercert(binary_form=True)
            self._tls = {"client_cert_chain": [ssl.DER_cert_to_PEM_cert(certificate)] if certificate else []}

    def shutdown(self) -> None:
        """To be called when the server leaves: an idle connection ends, one that is being answered ends after that."""
        super().shutdown()
        if self._tls is not None and self.transport.is_closing():
            # Its end waits for the client's goodbye, which a pool of idle connections does not read our own for.
            self.loop.call_later(GOODBYE_S, self.transport.abort)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._tls is not None:
            self.scope["extensions"] = {"tls": self._tls}


class _HeadJoiner:
    """A transport that keeps what begins an answer until more is written or the event loop goes on.

    uvicorn writes the head by itself, and uvloop sends at once: the client, on the same machine perhaps on the same
    core, would wake up for a head of which it has no use, and the first token would wait for it.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | memoryview) -> None:
        if self._head is not None and len(data) <= JOINED_BYTES:
            data = self._head + data
            self._head = None
        elif self._head is not None:
            self._flush()
        elif data[:9] == b"HTTP/1.1 ":
            self._head = bytes(data)
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head is not None:
            self._transport.write(self._head)
            self._head = None


async def until_disconnected(receive: Receive) -> None:
    """Returns when the client has left. The request's body must have been read: it would be thrown away here."""
    while (await receive())["type"] != "http.disconnect":
        pass
