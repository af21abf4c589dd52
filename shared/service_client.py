"""How one service asks another: httpx with our transport, the names that certificates must hold, and our token.

No proxies, and no limit on connections. Addresses from outside are not asked through this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import httpx
from pydantic import SecretStr

from shared.http_transport import HttpTransport
from shared.peer_names import PeerNames
from shared.service_token import token_headers
from shared.tls import Tls


class ServiceClient(httpx.AsyncClient):
    """tokens   of which the first is shown; none: the services want none"""

    def __init__(
        self, *, tls: Tls, names: PeerNames, tokens: Sequence[SecretStr], timeout: httpx.Timeout | None = None
    ) -> None:
        self._own_headers = token_headers(tokens)
        self._http_transport = HttpTransport(tls=tls.client_context())
        super().__init__(
            transport=self._http_transport,
            event_hooks={"request": [names.name_request]},
            headers=self._own_headers,
            timeout=timeout or httpx.Timeout(5.0),
            trust_env=False,
        )

    async def open(self, method: str, url: str, *, content: str | bytes, headers: Mapping[str, str]) -> httpx.Response:
        """As `send(build_request(...), stream=True)`, a quarter of a millisecond sooner: without cookies, redirects and
        authentication, none of which our services know. Whoever calls closes the answer.

        Raises httpx.TransportError of the usual kinds.
        """
        request = httpx.Request(
            method,
            _parsed(url),
            content=content,
            headers={**headers, **self._own_headers},
            extensions={"timeout": self.timeout.as_dict()},
        )
        for hook in self.event_hooks["request"]:
            await hook(request)
        return await self._http_transport.handle_async_request(request)


@lru_cache(maxsize=1024)
def _parsed(url: str) -> httpx.URL:
    return httpx.URL(url)
