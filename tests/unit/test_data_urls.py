"""Data URLs: what is accepted, what is refused, and that the bytes come out unchanged."""

from __future__ import annotations

import base64
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.data_urls import PIECE_CHARS, decode_data_url
from shared.errors import InvalidImageUrl

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
BASE64 = base64.b64encode(PICTURE).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f"data:image/jpeg;charset=utf-8;base64,{BASE64}",
        f"data:image/jpeg;name=a.jpg;BASE64,{BASE64}",
        f"DATA:image/png;base64,{BASE64}",
        f"Data:IMAGE/PNG;Base64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:application/octet-stream;base64,{BASE64}",
        "data:image/png;base64," + BASE64.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
        "data:image/png;base64," + "\r\n".join(BASE64[i : i + 76] for i in range(0, len(BASE64), 76)),
    ],
)
def test_every_spelling_of_a_good_data_url_gives_the_same_bytes(url: str):
    """Case A15."""
    assert decode_data_url(url) == PICTURE


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("data:image/png", "no comma"),
        ("data:,", "not base64"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64;charset=x,YWJj", "not base64"),
        ("data:image/png;base64,not!!!base64!!!", "characters that are not base64"),
        ("data:image/png;base64,\u00e9\u00e9\u00e9\u00e9", "characters that are not base64"),
        ("data:image/png;base64,%00%01%02%03", "characters that are not base64"),
        ("data:image/png;base64,YW=j", "characters that are not base64"),
        ("data:image/png;base64,_-_-", "characters that are not base64"),
        ("data:text/plain;base64,aGVsbG8=", "not an image"),
        ("data:image/jpeg;base64,", "0 bytes"),
        ("data:;base64,", "0 bytes"),
        ("data:image/png;base64,====", "0 bytes"),
    ],
)
def test_a_malformed_data_url_is_refused_in_words(url: str, complaint: str):
    """Cases A14, A28."""
    with pytest.raises(InvalidImageUrl) as refused:
        decode_data_url(url)
    assert complaint in refused.value.message


@pytest.mark.parametrize("shift", range(4))
def test_percent_encoding_is_undone_however_long_the_url_is(shift: int):
    data = bytes(range(256)) * 300 + bytes(shift)
    payload = "".join(f"%{ord(char):02X}" if i % 2 else char for i, char in enumerate(base64.b64encode(data).decode()))
    assert len(payload) > 3 * PIECE_CHARS
    assert decode_data_url(f"data:{' ' * shift};base64,{payload[:1]}{' ' * shift}{payload[1:]}") == data


@pytest.mark.parametrize("length", [253, 254, 255, 256])
def test_missing_padding_is_accepted(length: int):
    """Case A16: stripped padding gives the same bytes as padded."""
    padded = base64.b64encode(bytes(length)).decode()
    assert decode_data_url("data:image/png;base64," + padded.rstrip("=")) == bytes(length)


def test_a_length_that_no_bytes_can_have_is_refused():
    """Case A16: 4k + 1 characters."""
    with pytest.raises(InvalidImageUrl, match="cut"):
        decode_data_url("data:image/png;base64," + BASE64.rstrip("=")[:97])


def test_too_much_padding_is_refused():
    with pytest.raises(InvalidImageUrl, match="padding"):
        decode_data_url("data:image/png;base64,YWJj=")


@given(st.binary(min_size=1, max_size=300))
def test_any_bytes_survive_the_round_trip(data: bytes):
    assert decode_data_url("data:image/png;base64," + base64.b64encode(data).decode()) == data


@given(st.text(max_size=60))
def test_no_text_whatever_does_anything_but_decode_or_be_refused(rest: str):
    with contextlib.suppress(InvalidImageUrl):
        assert decode_data_url("data:" + rest)
