"""Inputs that come close to good ones: damaged files, texts of meaningful pieces, bodies with exchanged values.

Each kind has some that are one piece repeated many times, where time or memory that grows too fast shows.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from hypothesis import strategies as st

MAX_REPEATED_BYTES: Final = 200_000
LIES: Final = [value.to_bytes(4, order) for value in (0, 2**31 - 1, 2**31, 2**32 - 1) for order in ("big", "little")]
NAMES: Final = st.sampled_from(
    [
        "messages",
        "role",
        "content",
        "type",
        "text",
        "image_url",
        "url",
        "detail",
        "uuid",
        "tools",
        "function",
        "parameters",
        "name",
        "arguments",
        "strict",
        "stop",
        "logit_bias",
        "response_format",
        "json_schema",
        "schema",
        "n",
        "max_tokens",
        "temperature",
        "input",
        "output",
        "call_id",
        "tool_choice",
        "seed",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "chat_template_kwargs",
        "vllm_xargs",
        "images",
        "width",
        "prompt",
    ]
) | st.text(max_size=4)


@st.composite
def damaged(draw: st.DrawFn, good: list[bytes]) -> bytes:
    """A good input in which something was exchanged, cut out, put in twice or repeated many times."""
    data = draw(st.sampled_from(good))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 16)))
        piece = draw(st.one_of(st.binary(max_size=8), st.just(data[start:end] * 2), st.sampled_from(LIES)))
        times = draw(st.sampled_from([0, 1, 1, 1, MAX_REPEATED_BYTES // max(1, len(piece))]))
        data = data[:start] + piece * times + data[end:]
    return data


def repeated(pieces: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One piece, again and again: what is quadratic shows."""
    return pieces.filter(bool).map(lambda piece: piece * (MAX_REPEATED_BYTES // len(piece)))


def texts(*pieces: str) -> st.SearchStrategy[str]:
    """Made of pieces that mean something to the parser, and of anything."""
    some = st.one_of(st.sampled_from(pieces), st.text(max_size=4))
    short = st.lists(some, max_size=12).map("".join)
    return st.one_of(short, short, short, repeated(short), st.builds(lambda a, b: a + b, short, repeated(some)))


def byte_texts(*pieces: str) -> st.SearchStrategy[bytes]:
    return texts(*pieces).map(lambda text: text.encode("utf-8", "surrogatepass"))


def bodies(*good: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Bodies with values exchanged for others of any type, at any depth; and bytes that are no JSON."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("9" * 5000)
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
    )

    @st.composite
    def changed(draw: st.DrawFn) -> bytes:
        body: Any = orjson.loads(orjson.dumps(draw(st.sampled_from(good))))
        for _ in range(draw(st.integers(1, 3))):
            place: Any = body
            while (steps := list(place) if isinstance(place, dict) else list(range(len(place)))) and draw(
                st.booleans()
            ):
                if not isinstance(place[step := draw(st.sampled_from(steps))], dict | list):
                    break
                place = place[step]
            value = draw(values)
            if isinstance(place, dict):
                place[draw(st.sampled_from(steps) | NAMES if steps else NAMES)] = value
            else:
                place.append(value)
        return orjson.dumps(body, option=orjson.OPT_PASSTHROUGH_SUBCLASS, default=str) if _fits(body) else b"{}"

    deep = st.sampled_from([b"[", b'{"a":', b'{"messages":[', b"[[],", b'{"content":[{"type":"text","text":']).map(
        lambda opening: b'{"messages":' + opening * 40_000
    )
    start = orjson.dumps(good[0])
    many = st.sampled_from([b"[]", b"{}", b'""', b"0", b'{"role":"user","content":[]}', b'"a?a?"']).map(
        lambda item: start[:-1] + b',"stop":[' + b",".join([item] * (MAX_REPEATED_BYTES // (len(item) + 1))) + b"]}"
    )
    return st.one_of(changed(), changed(), changed(), damaged([orjson.dumps(each) for each in good]), deep, many)


def _fits(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError):
        return False
    return True
