"""One tensor as bytes: magic, version, dtype, shape, checksum, data. Never pickle.

Anything that is not exactly such a blob raises `BlobError`; callers treat that as a cache miss. This module knows
bytes only; `torch_io` turns blobs into tensors without a copy.

Layout, little-endian:  4s magic "DPTB" | B version | B dtype | B ndim | x | I crc32 | ndim x Q shape | data
The checksum covers dtype, shape and data. No dimension is 0: nothing that travels is empty.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

MAGIC = b"DPTB"
VERSION = 1
MAX_DIMS = 4
_HEAD = struct.Struct("<4sBBBxI")

# code -> (name, bytes per element); codes are part of the format: only ever append.
_DTYPES: dict[int, tuple[str, int]] = {1: ("float32", 4), 2: ("float16", 2), 3: ("bfloat16", 2), 4: ("int8", 1)}
_CODES = {name: code for code, (name, _) in _DTYPES.items()}


class BlobError(ValueError):
    """The bytes are not one whole, undamaged tensor blob of a known version."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A parsed blob: `data` is a view into the received bytes, `shape` and `dtype` are checked against its size."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def pack(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> bytes:
    """Serialise one tensor; `data` is its contiguous row-major bytes.

    Raises ValueError if dtype, shape and data size do not belong together.
    """
    if dtype not in _CODES:
        raise ValueError(f"dtype {dtype!r} cannot be stored; known: {sorted(_CODES)}")
    code = _CODES[dtype]
    if not 1 <= len(shape) <= MAX_DIMS:
        raise ValueError(f"a blob has 1 to {MAX_DIMS} dimensions, not {len(shape)}")
    view = memoryview(data).cast("B")
    if not view.nbytes or math.prod(shape) * _DTYPES[code][1] != view.nbytes:
        raise ValueError(f"shape {shape} of {dtype} does not have {view.nbytes} bytes")
    head = _HEAD.pack(MAGIC, VERSION, code, len(shape), _checksum(code, shape, view))
    return b"".join((head, struct.pack(f"<{len(shape)}Q", *shape), view))


def unpack(blob: bytes | memoryview) -> Blob:
    """Parse and verify a blob; the returned data is a view, not a copy. Raises BlobError on anything unexpected."""
    view = memoryview(blob).cast("B")
    if view.nbytes < _HEAD.size:
        raise BlobError(f"{view.nbytes} bytes are too few for a tensor blob")
    magic, version, code, ndim, checksum = _HEAD.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise BlobError(f"not a tensor blob of version {VERSION}")
    if code not in _DTYPES or not 1 <= ndim <= MAX_DIMS or view.nbytes < _HEAD.size + 8 * ndim:
        raise BlobError("the tensor blob's header is damaged")
    shape = struct.unpack_from(f"<{ndim}Q", view, _HEAD.size)
    name, itemsize = _DTYPES[code]
    data = view[_HEAD.size + 8 * ndim :]
    if not data.nbytes or math.prod(shape) * itemsize != data.nbytes:
        raise BlobError(f"a tensor {shape} of {name} does not have {data.nbytes} bytes")
    if _checksum(code, shape, data) != checksum:
        raise BlobError("the tensor blob's checksum does not match its data")
    return Blob(name, shape, data)


def _checksum(code: int, shape: tuple[int, ...], data: memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(struct.pack(f"<B{len(shape)}Q", code, *shape)))
