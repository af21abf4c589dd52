"""Damaged images: a good file per way of storing pixels, and what bad disks, cut lines and attackers make of it."""

from __future__ import annotations

import io
import itertools
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from PIL import Image

Mutation = Callable[[bytearray, random.Random], bytes]

# What a size field may claim: nothing, a little, the limits of signed and unsigned 16 and 32 bits, and beyond them.
LIES: Final = (0, 1, 2, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 100_000, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFE, 0xFFFF_FFFF)
# (offset, struct format) of the width and height in a file's fixed part.
SIZE_FIELDS: Final = {
    b"\x89PNG": ((16, ">I"), (20, ">I")),
    b"GIF8": ((6, "<H"), (8, "<H")),
    b"BM": ((18, "<I"), (22, "<I"), (28, "<H"), (10, "<I"), (14, "<I")),
    b"RIFF": ((4, "<I"), (16, "<I"), (20, "<I"), (24, "<I"), (26, "<H"), (28, "<H")),
}


def good_images() -> dict[str, bytes]:
    """Name -> file, of some kB each."""
    random_pixels = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    picture = Image.fromarray(random_pixels).resize((61, 43), Image.Resampling.BICUBIC)
    clear = picture.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(picture.size))
    frames = [picture.rotate(angle) for angle in (90, 180, 270)]
    film: dict[str, Any] = {"save_all": True, "append_images": frames, "duration": 40}
    turned = Image.Exif()
    turned[0x0112] = 6
    wide = Image.fromarray(np.linspace(0, 65535, 43 * 61, dtype=np.uint16).reshape(43, 61))
    palette = picture.quantize(16)
    return {
        "png": _saved(picture, "PNG"),
        "png-alpha": _saved(clear, "PNG"),
        "png-palette": _saved(palette, "PNG", transparency=3),
        "png-16-bit": _saved(wide, "PNG"),
        "png-1-bit": _saved(picture.convert("1"), "PNG"),
        "png-exif": _saved(picture, "PNG", exif=turned),
        "png-animated": _saved(picture, "PNG", **film),
        "jpeg": _saved(picture, "JPEG"),
        "jpeg-progressive": _saved(picture, "JPEG", progressive=True, quality=90),
        "jpeg-grey": _saved(picture.convert("L"), "JPEG"),
        "jpeg-cmyk": _saved(picture.convert("CMYK"), "JPEG"),
        "jpeg-exif": _saved(picture, "JPEG", exif=turned, restart_marker_blocks=2),
        "gif": _saved(palette, "GIF"),
        "gif-transparent": _saved(palette, "GIF", transparency=3, interlace=True),
        "gif-animated": _saved(picture, "GIF", **film),
        "webp": _saved(picture, "WebP"),
        "webp-lossless": _saved(clear, "WebP", lossless=True),
        "webp-exif": _saved(clear, "WebP", exif=turned),
        "webp-animated": _saved(picture, "WebP", **film),
        "bmp": _saved(picture, "BMP"),
        "bmp-palette": _saved(palette, "BMP"),
        "bmp-1-bit": _saved(picture.convert("1"), "BMP"),
        "tiff": _saved(picture, "TIFF"),  # not accepted, whatever is in it
    }


def mutated(files: dict[str, bytes], seed: int) -> tuple[str, bytes]:
    """What was done to which file, and the result; the same for the same seed."""
    chance = random.Random(seed)
    name = chance.choice(list(files))
    steps, data = [], files[name]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        mutation = chance.choice(MUTATIONS)
        steps.append(mutation.__name__)
        data = mutation(bytearray(data), chance)
    if chance.random() < 0.2:
        steps.append("concatenated")
        data += files[chance.choice(list(files))]
    if data.startswith(b"\x89PNG") and chance.random() < 0.7:  # else the first checksum hides what lies behind it
        steps.append("checksums mended")
        data = _with_good_checksums(data)
    return f"seed {seed}: {name} {' '.join(steps)}", data


# --- what is done to a file -------------------------------------------------------------------------------------------


def flipped_bits(data: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 2, 8, 64))):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def flipped_bits_in_front(data: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 2, 4))):
        if data:
            data[chance.randrange(min(64, len(data)))] ^= 1 << chance.randrange(8)
    return bytes(data)


def truncated(data: bytearray, chance: random.Random) -> bytes:
    return bytes(data[: chance.randrange(len(data) + 1)])


def lying_size(data: bytearray, chance: random.Random) -> bytes:
    """A width or height of the header, or any number near the front of a format that keeps them elsewhere."""
    fields = next((fields for magic, fields in SIZE_FIELDS.items() if data.startswith(magic)), None)
    offset, kind = chance.choice(fields or _jpeg_size_fields(bytes(data)) or ((chance.randrange(64), ">H"),))
    value = chance.choice(LIES) & (0xFFFF if kind.endswith("H") else 0xFFFF_FFFF)
    if offset + struct.calcsize(kind) <= len(data):
        struct.pack_into(kind, data, offset, value)
    return bytes(data)


def lying_number(data: bytearray, chance: random.Random) -> bytes:
    kind = chance.choice(("<H", ">H", "<I", ">I"))
    value = chance.choice(LIES) & (0xFFFF if kind.endswith("H") else 0xFFFF_FFFF)
    if len(data) >= 4:
        struct.pack_into(kind, data, chance.randrange(len(data) - 3), value)
    return bytes(data)


def swapped(data: bytearray, chance: random.Random) -> bytes:
    """Two neighbouring pieces change places: whole chunks where the format has any."""
    starts = _chunk_starts(bytes(data)) or sorted(chance.randrange(len(data) + 1) for _ in range(3))
    if len(starts) < 3:
        return bytes(data)
    first = chance.randrange(len(starts) - 2)
    start, middle, end = starts[first : first + 3]
    return bytes(data[:start] + data[middle:end] + data[start:middle] + data[end:])


def left_out(data: bytearray, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    return bytes(data[:start] + data[start + chance.randrange(1, 200) :])


def repeated(data: bytearray, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    piece = data[start : start + chance.randrange(1, 200)]
    return bytes(data[:start] + piece * chance.choice((2, 3, 50)) + data[start + len(piece) :])


def overwritten(data: bytearray, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    piece = data[start : start + chance.randrange(1, 100)]
    filling = chance.choice((bytes(len(piece)), b"\xff" * len(piece), chance.randbytes(len(piece))))
    return bytes(data[:start] + filling + data[start + len(piece) :])


def with_garbage_behind(data: bytearray, chance: random.Random) -> bytes:
    return bytes(data) + chance.randbytes(chance.choice((1, 100, 10_000)))


MUTATIONS: Final[tuple[Mutation, ...]] = (
    flipped_bits,
    flipped_bits_in_front,
    truncated,
    lying_size,
    lying_number,
    swapped,
    left_out,
    repeated,
    overwritten,
    with_garbage_behind,
)


# --- formats ----------------------------------------------------------------------------------------------------------


def _saved(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def _jpeg_size_fields(data: bytes) -> tuple[tuple[int, str], ...]:
    """Height and width behind the start of frame, and the segment's length in front of them."""
    starts = [data.find(marker) for marker in (b"\xff\xc0", b"\xff\xc2")]
    start = max(starts)
    return () if start < 0 else ((start + 2, ">H"), (start + 5, ">H"), (start + 7, ">H"))


def _chunk_starts(data: bytes) -> list[int]:
    """Where PNG's and WebP's chunks begin and the last one ends; empty for other formats and broken files."""
    if data.startswith(b"\x89PNG"):
        position, length_format, extra = 8, ">I", 12
    elif data.startswith(b"RIFF"):
        position, length_format, extra = 12, "<4xI", 8
    else:
        return []
    starts = [position]
    while position + 8 <= len(data):
        (length,) = struct.unpack_from(length_format, data, position)
        position += extra + length + (length % 2 if extra == 8 else 0)
        if position > len(data):
            break
        starts.append(position)
    return starts


def _with_good_checksums(data: bytes) -> bytes:
    mended = bytearray(data)
    starts = _chunk_starts(data)
    for start, end in itertools.pairwise(starts):
        mended[end - 4 : end] = zlib.crc32(data[start + 4 : end - 4]).to_bytes(4, "big")
    return bytes(mended)
