"""The pages' own files: read once at the start, sent with type, ETag and a policy that lets in nothing else.

Whatever lies in `web/` is served at `/web/…`; a page is sent under whatever path its route has.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from shared.errors import NotFound

WEB: Final = Path(__file__).parent / "web"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
SAFE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Modules name each other without a version, so a browser has to ask whether its copy is still the one.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """The file, or 304 if the browser has it."""
        headers = SAFE_HEADERS | {"ETag": self.etag}
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


class Assets:
    """Every file below a folder, by its path within it. Nothing else can be named."""

    def __init__(self, folder: Path = WEB) -> None:
        self._assets = {
            path.relative_to(folder).as_posix(): _read(path)
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TYPES
        }

    def leave_out(self, name: str, line: str) -> None:
        """Send a page without one of its lines from now on."""
        page = self._assets[name]
        shorter = page.body.replace(line.encode(), b"")
        assert len(shorter) < len(page.body), f"{name} has no such line"
        self._assets[name] = _asset(shorter, page.media_type)

    def answer(self, name: str, request: Request) -> Response:
        if name not in self._assets:
            raise NotFound("there is no such file here")
        return self._assets[name].answer(request)


def _read(path: Path) -> Asset:
    return _asset(path.read_bytes(), _TYPES[path.suffix])


def _asset(body: bytes, media_type: str) -> Asset:
    return Asset(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
