"""The lines of a batch's input: checked one by one, pictures named by a path put into them.

A line is read when its turn comes: a batch may be larger than memory.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

import orjson

from diptych.client import image_url
from diptych.errors import BadSetting

URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ELSEWHERE: Final = ("http://", "https://", "data:")


class BadLine(ValueError):
    """A line that cannot be asked; the message says why. The others still can."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one line is.

    number      the first is 1
    offset      of its first byte
    custom_id   None: the line is so broken that it has none
    """

    number: int
    offset: int
    custom_id: str | None

    @property
    def name(self) -> str | int:
        """What it is known by in an output: its id, or for want of one its number."""
        return self.number if self.custom_id is None else self.custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    url: str
    body: dict[str, Any]


class BatchInput:
    """The requests of a file.

    image_root   pictures are read from below this folder only; their paths are relative to the input's own folder

    Raises BadSetting for a missing file or folder, and for an id that comes twice.
    """

    def __init__(self, path: Path, image_root: Path | None = None) -> None:
        if image_root is not None and not image_root.is_dir():
            raise BadSetting(f"--images {image_root} is no folder here")
        self._path = path
        self._image_root = (image_root or path.parent).resolve()
        self.places = self._scan()

    def _scan(self) -> list[Place]:
        """Every line that is not blank. Raises BadSetting for a missing file and an id that comes twice."""
        places: list[Place] = []
        seen: dict[str, int] = {}
        offset = 0
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if number == 1 and line.startswith(BOM_UTF8):
                        offset, line = len(BOM_UTF8), line[len(BOM_UTF8) :]
                    if line.strip():
                        custom_id = _custom_id(line)
                        if custom_id is not None and seen.setdefault(custom_id, number) != number:
                            both = f"lines {seen[custom_id]} and {number}"
                            raise BadSetting(f"{self._path}: {both} have the same custom_id {custom_id!r}")
                        places.append(Place(number, offset, custom_id))
                    offset += len(line)
        except OSError as error:
            raise BadSetting(f"{self._path} cannot be read: {error.strerror}") from None
        return places

    def request(self, place: Place) -> BatchRequest:
        """What stands there, its pictures as data URLs. Raises BadLine."""
        with self._path.open("rb") as file:
            file.seek(place.offset)
            raw = file.readline()
        try:
            line = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BadLine(f"this is not valid JSON ({error.msg} at column {error.colno})") from None
        if place.custom_id is None:
            raise BadLine("this has no custom_id; give an object with a custom_id of its own, a text")
        if (method := line.get("method", "POST")) != "POST":
            raise BadLine(f"method is {_short(method)}; give POST")
        url, body = line.get("url"), line.get("body")
        if url not in URLS:
            raise BadLine(f"url is {_short(url)}; give one of {', '.join(URLS)}")
        if not isinstance(body, dict):
            raise BadLine(f"body is {_short(body)}; give the request, an object, as it would be sent")
        if body.get("stream"):
            raise BadLine("answers in a batch cannot be streamed; leave stream out of the body")
        self._embed_pictures(body)
        return BatchRequest(url, body)

    def _embed_pictures(self, node: object) -> None:
        """Depth first through messages and their parts, changing image parts in place."""
        if isinstance(node, list):
            for child in node:
                self._embed_pictures(child)
        elif isinstance(node, dict):
            if node.get("type") in ("image_url", "input_image") and "image_url" in node:
                node["image_url"] = self._embedded(node["image_url"])
            for name in ("messages", "input", "content"):
                if name in node:
                    self._embed_pictures(node[name])

    def _embedded(self, source: object) -> object:
        """The same `image_url`, a text or an object with a `url`, with a path's file in its place."""
        if isinstance(source, dict) and isinstance(source.get("url"), str):
            return {**source, "url": self._embedded(source["url"])}
        if not _is_path(source):
            return source
        try:
            path = (self._path.parent / source.removeprefix("file://")).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links is the second, a NUL the third
            raise BadLine(f"the picture {source!r} is no path: {error}") from None
        if not path.is_relative_to(self._image_root):
            raise BadLine(f"the picture {source!r} is outside {self._image_root}; see --images")
        try:
            return image_url(path)
        except OSError as error:
            raise BadLine(f"the picture {source!r} cannot be read: {error.strerror}") from None


def _short(value: object) -> str:
    """As it stands in the line, cut; "missing" for what is not there."""
    return "missing" if value is None else orjson.dumps(value).decode(errors="replace")[:80]


def _is_path(source: object) -> TypeGuard[str]:
    """Not a URL, nor an uploaded file's id."""
    return isinstance(source, str) and not source.lower().startswith(_ELSEWHERE) and not source.startswith("file-")


def _custom_id(raw: bytes) -> str | None:
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    found = line.get("custom_id") if isinstance(line, dict) else None
    return found if isinstance(found, str) and found else None
