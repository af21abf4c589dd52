"""Sizes in bytes as people write them: `512MiB`, `2 GiB`, `512mb`, plain bytes. Written back in one way, `512MiB`."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator

_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LEAST_MEMORY_BYTES: Final = 1 << 10
_PRINTED: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def parse_size(text: str) -> int:
    """ "512MiB", "2 GiB", "512mb" or plain bytes -> bytes; case does not matter, MB is 10**6 and MiB 2**20.

    Raises ValueError naming the forms that are known.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", text.upper())
    unit = match.group(2) if match else None
    if match is None or (unit not in _UNITS and f"{unit}B" not in _UNITS):
        raise ValueError("is not a size; give a number with KiB, MiB, GiB, KB, MB or GB, e.g. 512MiB, or plain bytes")
    return int(float(match.group(1)) * _UNITS[unit if unit in _UNITS else f"{unit}B"])


def format_size(size_bytes: int) -> str:
    """536870912 -> "512MiB"; to one decimal, which `parse_size` reads again."""
    for unit, factor in _PRINTED:
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f}".removesuffix(".0") + unit
    return f"{size_bytes}B"


def parse_memory(text: str) -> int:
    """As `parse_size`, for a cache's memory. Raises ValueError also for a number that nobody means in bytes."""
    size_bytes = parse_size(text)
    if not size_bytes:
        raise ValueError("is no memory at all; give a size, e.g. 512MiB, or leave it out")
    if size_bytes < LEAST_MEMORY_BYTES:
        raise ValueError(f"is {format_size(size_bytes)}, too little for any cache; give it with a unit, e.g. 512MiB")
    return size_bytes


def _is_memory(text: str) -> str:
    parse_memory(text)
    return text


def _bytes(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


Size = Annotated[str, AfterValidator(_is_memory)]  # of memory, as the operator wrote it
ByteSize = Annotated[int, BeforeValidator(_bytes)]  # bytes, however they were written
