"""From when until when the certificates in a file are valid.

Reads dates and trusts nothing: whether a certificate is good is OpenSSL's to say, when a connection is made.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_PEM: Final = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

# DER, as far as it leads to the dates: Certificate { TBSCertificate { [0] version, serialNumber, signature, issuer,
# validity { notBefore, notAfter }, ... }, ... }
_VERSION: Final = 0xA0
_VALIDITY: Final = 3  # place among the fields, the version left out
_UTC_TIME: Final = 0x17  # with a year of two digits, until 2049; later dates are GeneralizedTime


@dataclass(frozen=True, slots=True)
class Validity:
    not_before: datetime
    not_after: datetime


def read_validities(file: Path) -> list[Validity]:
    """Of every certificate in a PEM file, in its order; empty if it holds none. Raises OSError, ValueError."""
    text = file.read_bytes().decode("ascii", "replace")
    try:
        return [_validity(ssl.PEM_cert_to_DER_cert(block)) for block in _PEM.findall(text)]
    except (ValueError, IndexError, StopIteration) as error:
        raise ValueError("a certificate in it is damaged") from error


def _validity(der: bytes) -> Validity:
    [(_, certificate), *_] = _elements(der)
    [(_, to_be_signed), *_] = _elements(certificate)
    fields = [content for tag, content in _elements(to_be_signed) if tag != _VERSION]
    [not_before, not_after] = [_time(tag, content) for tag, content in _elements(fields[_VALIDITY])]
    return Validity(not_before, not_after)


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element, one after another."""
    while data:
        tag, length, start = data[0], data[1], 2
        if length & 0x80:
            start += length & 0x7F
            length = int.from_bytes(data[2:start])
        if start + length > len(data):
            raise ValueError("an element is longer than what holds it")
        yield tag, data[start : start + length]
        data = data[start + length :]


def _time(tag: int, content: bytes) -> datetime:
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    when = datetime.strptime(content.decode("ascii"), form).replace(tzinfo=UTC)
    # strptime's century of a two-digit year changes at 69, X.509's at 50.
    return when.replace(year=when.year - 100) if tag == _UTC_TIME and when.year >= 2050 else when
