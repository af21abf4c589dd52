"""The chat page and its sample pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from services.gateway.assets import SAFE_HEADERS, Assets
from shared.errors import NotFound

_STATUS_LINK: Final = '      <a class="button ghost" href="/status">Status</a>\n'
_PICTURES: Final = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


def page_routes(assets: Assets, samples_dir: Path | None, *, has_status: bool) -> APIRouter:
    """samples_dir   pictures to offer; `samples.json` in it may say what they show and what to ask
    has_status    there is a control room to link to
    """
    router = APIRouter(include_in_schema=False)
    if not has_status:
        assets.leave_out("index.html", _STATUS_LINK)
    samples = {} if samples_dir is None else _samples(samples_dir)

    @router.get("/")
    async def index(request: Request) -> Response:
        return assets.answer("index.html", request)

    @router.get("/web/{name:path}")
    async def web_file(name: str, request: Request) -> Response:
        if name.endswith(".html"):
            raise NotFound("pages have addresses of their own")
        return assets.answer(name, request)

    @router.get("/samples/index.json")
    async def sample_list() -> Response:
        return Response(orjson.dumps(list(samples.values())), media_type="application/json", headers=SAFE_HEADERS)

    @router.get("/samples/{name}")
    async def sample(name: str) -> Response:
        # Only names that were listed at the start are served, so no name can lead out of the folder.
        if samples_dir is None or name not in samples:
            raise NotFound("there is no such sample here")
        return FileResponse(samples_dir / name, media_type=_PICTURES[Path(name).suffix.lower()], headers=SAFE_HEADERS)

    return router


def _samples(folder: Path) -> dict[str, dict[str, Any]]:
    """File name -> what the page needs to offer it."""
    listed = folder / "samples.json"
    described = {entry["file"]: entry for entry in json.loads(listed.read_text())} if listed.is_file() else {}
    return {
        path.name: {
            "url": f"/samples/{path.name}",
            "about": described.get(path.name, {}).get("about", path.stem.replace("-", " ")),
            "questions": [asked["question"] for asked in described.get(path.name, {}).get("questions", [])],
        }
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in _PICTURES
    }
