"""Large data URLs are taken out of a JSON body before it is parsed, and come back in their places as views of it.

A parser holds the interpreter's lock while it copies forty megabytes of base64 into a text that will only be decoded.
What is left of such a body is small, and the search for quotation marks runs at the speed of memory.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Final, Self

import orjson
from pydantic import ValidatorFunctionWrapHandler, WrapValidator

CUT_BYTES: Final = 64 * 1024  # shorter ones stay where they are
MAX_HEAD_BYTES: Final = 256  # up to the comma
_COLON: Final = re.compile(rb"\s*:")  # behind a text that is a field's name


class CutUrl(str):
    """A data URL up to its comma. payload: what follows, in the body as it was received"""

    __slots__ = ("payload",)
    payload: memoryview

    @classmethod
    def of(cls, head: bytes, payload: memoryview) -> Self:
        url = cls(head.decode("ascii"))
        url.payload = payload
        return url

    def whole(self) -> str:
        """As the parser would have made it. Raises orjson.JSONDecodeError."""
        text: str = orjson.loads(b"".join((b'"', self.encode(), self.payload, b'"')))
        return text


def _keep_cut(value: object, check: ValidatorFunctionWrapHandler) -> object:
    return value if isinstance(value, CutUrl) else check(value)


# The type of a field that may hold one; pydantic would make a plain text of it.
Url = Annotated[str, WrapValidator(_keep_cut)]


def cut_out(body: bytearray) -> tuple[bytes, dict[str, CutUrl]]:
    """The body with names in the place of its large data URLs, and what they stand for. `body` must not change again.

    A quotation mark with `data:` behind it and no backslash before it begins a string, in whatever is JSON; one without
    a backslash inside ends at the next mark.
    """
    view, secret = memoryview(body), secrets.token_hex(8)  # so that no client can write such a name
    pieces: list[bytes | memoryview] = []
    cut: dict[str, CutUrl] = {}
    copied = at = 0
    while (mark := body.find(b'"data:', at)) >= 0:
        start, at = mark + 1, body.find(b'"', mark + 1)
        if at < 0:
            break
        comma = body.find(b",", start, min(at, start + MAX_HEAD_BYTES))
        head = bytes(view[start : comma + 1])
        is_plain = head.isascii() and body[mark - 1] != ord("\\") and body.find(b"\\", start, at) < 0
        if comma < 0 or at - comma <= CUT_BYTES or not is_plain or _COLON.match(body, at + 1):
            continue
        name = f"{secret}-{len(cut)}"
        cut[name] = CutUrl.of(head, view[comma + 1 : at])
        pieces += [view[copied:start], name.encode()]
        copied = at
    return b"".join([*pieces, view[copied:]]), cut


def put_back(body: dict[str, Any], cut: dict[str, CutUrl]) -> None:
    """Exchange the names in the parsed body: for what they stand for in the parts that may have a picture's URL, for
    its whole text anywhere else. Raises orjson.JSONDecodeError for a text that is none.
    """
    for part in _parts(body) if cut else ():
        image = part.get("image_url")
        holder, field = (image, "url") if isinstance(image, dict) else (part, "image_url")
        if isinstance(name := holder.get(field), str):
            holder[field] = cut.get(name, name)
    rest: list[Any] = [body] if cut else []
    while rest:
        node = rest.pop()
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if isinstance(value, dict | list):
                rest.append(value)
            elif type(value) is str and value in cut:
                node[key] = cut[value].whole()


def _parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of a chat's messages or a response's input."""
    for message in _objects(body.get("messages")) + _objects(body.get("input")):
        yield from _objects(message.get("content"))


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
