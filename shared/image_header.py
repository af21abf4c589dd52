"""Format, size and orientation of an image, read from its bytes in plain Python.

Admission needs nothing else, so no image codec ever runs in the serving process: a decompression bomb is refused before
anything is decompressed, and a codec with a memory bug lives in a worker (decode_pool.py). This runs on event loops, so
a file of millions of tiny parts is not read to its end.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from shared.errors import InvalidImage, UnsupportedImageFormat

EXIF_PREFIX: Final = b"Exif\0\0"
XMP_PREFIX: Final = b"http://ns.adobe.com/xap/1.0/\0"
ORIENTATION_TAG: Final = 0x0112
MAX_PARTS: Final = 50_000  # chunks, segments or blocks that are looked at; some 25 ms
_AFTER_FILL: Final = re.compile(rb"[^\xff]", re.DOTALL)
_XMP_ORIENTATION: Final = re.compile(rb"tiff:Orientation(?:=[\"']|>)([1-8])")


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the file says about itself. `width` and `height` are as stored, before `orientation` is applied.

    orientation   the EXIF value 1 to 8: how the stored pixels must be turned to stand upright
    """

    format: str
    width: int
    height: int
    orientation: int = 1

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) of the picture as a person sees it: orientations 5 to 8 lie on their side."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def read_header(data: bytes) -> ImageHeader:
    """Raises UnsupportedImageFormat, or InvalidImage for a supported format whose header is damaged."""
    for matches, name, read in _FORMATS:
        if matches(data):
            try:
                header = read(data)
            except (struct.error, IndexError, ValueError):
                raise InvalidImage(f"truncated or corrupt {name} image: its header cannot be read") from None
            if header.width <= 0 or header.height <= 0:
                raise InvalidImage(f"corrupt {name} image: its header says {header.width} x {header.height} pixels")
            return header
    raise UnsupportedImageFormat(
        f"{_describe(data)} is not a supported image; supported formats: {', '.join(SUPPORTED_FORMATS)}"
    )


def _describe(data: bytes) -> str:
    """A name for what people send most often by mistake."""
    start = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if data[4:8] == b"ftyp" and data[8:12] in (b"heic", b"heix", b"mif1", b"msf1", b"hevc", b"heim"):
        return "an HEIC file"
    if data[4:8] == b"ftyp":
        return "an MP4 or AVIF file"
    if start.startswith((b"<svg", b"<?xml")):
        return "an SVG or XML file"
    if start.startswith((b"<!doctype", b"<html")):
        return "an HTML page"
    if start.startswith(b"%pdf"):
        return "a PDF file"
    if data[:4] in (b"II*\0", b"MM\0*"):
        return "a TIFF file"
    return "the data"


# --- JPEG -------------------------------------------------------------------------------------------------------------


def _read_jpeg(data: bytes) -> ImageHeader:
    size: tuple[int, int] | None = None
    exif = xmp = b""
    for marker, start, end in _jpeg_segments(data):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of frame, of any coding
            height, width = struct.unpack_from(">HH", data, start + 1)
            size = width, height
        elif marker == 0xE1 and not exif and data.startswith(EXIF_PREFIX, start):
            exif = data[start + len(EXIF_PREFIX) : end]
        elif marker == 0xE1 and not xmp and data.startswith(XMP_PREFIX, start):
            xmp = data[start:end]
    if size is None:
        raise ValueError("no frame before the scan")
    return ImageHeader("JPEG", *size, _orientation(exif, xmp))


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of each segment's payload, up to the first scan."""
    position = 2
    for _ in range(MAX_PARTS):
        fill = data.find(b"\xff", position)  # as decoders do, beyond stray bytes between segments
        found = _AFTER_FILL.search(data, fill) if fill >= 0 else None
        if found is None:
            raise ValueError("it ends before the scan")
        marker, position = found.group()[0], found.end()
        if marker in (0xD9, 0xDA):  # end of image, start of scan
            return
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # without a payload
            continue
        (length,) = struct.unpack_from(">H", data, position)
        yield marker, position + 2, position + length
        position += max(2, length)


# --- PNG --------------------------------------------------------------------------------------------------------------


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(type, start, end) of each chunk's payload; raises ValueError where the file ends early."""
    position = 8
    while True:
        if position + 8 > len(data):
            raise ValueError("it ends before its IEND chunk")
        length, kind = struct.unpack_from(">I4s", data, position)
        start = position + 8
        if start + length + 4 > len(data):
            raise ValueError("it ends within a chunk")
        yield kind, start, start + length
        if kind == b"IEND":
            return
        position = start + length + 4


def _read_png(data: bytes) -> ImageHeader:
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if kind != b"IHDR" or length != 13:
        raise ValueError("no IHDR")
    exif = xmp = b""
    try:
        for kind, start, end in islice(png_chunks(data), MAX_PARTS):
            if kind == b"eXIf":  # allowed before and after the pixels
                exif = data[start:end].removeprefix(EXIF_PREFIX)
            elif kind == b"iTXt" and data.startswith(b"XML:com.adobe.xmp\0", start):
                xmp = data[start:end]
    except ValueError:
        pass  # truncated behind a good header: the decoder says so with a better message
    return ImageHeader("PNG", width, height, _orientation(exif, xmp))


# --- WebP -------------------------------------------------------------------------------------------------------------


def _read_webp(data: bytes) -> ImageHeader:
    size: tuple[int, int] | None = None
    exif = xmp = b""
    position = 12
    for _ in range(MAX_PARTS):
        if position + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, position)
        start = position + 8
        if size is None:
            size = _webp_size(kind, data, start)
        elif kind == b"EXIF":
            exif = data[start : start + length].removeprefix(EXIF_PREFIX)
        elif kind == b"XMP ":
            xmp = data[start : start + length]
        position = start + length + length % 2
    if size is None:
        raise ValueError("no chunks")
    return ImageHeader("WebP", *size, _orientation(exif, xmp))


def _webp_size(kind: bytes, data: bytes, start: int) -> tuple[int, int]:
    """The first chunk says the size, in one of three ways: lossy, lossless, extended."""
    if kind == b"VP8 ":
        if data[start + 3 : start + 6] != b"\x9d\x01\x2a":
            raise ValueError("no key frame")
        width, height = struct.unpack_from("<HH", data, start + 6)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BI", data, start)
        if signature != 0x2F:
            raise ValueError("no lossless signature")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        width, width_high, height, height_high = struct.unpack_from("<HBHB", data, start + 4)
        return (width_high << 16 | width) + 1, (height_high << 16 | height) + 1
    raise ValueError("unknown first chunk")


# --- GIF and BMP ------------------------------------------------------------------------------------------------------


def _read_gif(data: bytes) -> ImageHeader:
    """The larger of the logical screen and the first frame, which is allowed to reach beyond it."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    num_blocks = 0
    while data[position] == 0x21:  # extensions before the first frame: type, then sub-blocks up to an empty one
        position += 2
        while data[position] and num_blocks < MAX_PARTS:
            position += data[position] + 1
            num_blocks += 1
        position += 1
        num_blocks += 1
        if num_blocks > MAX_PARTS:
            raise ValueError("too many blocks before the first frame")
    if data[position] != 0x2C:
        raise ValueError("no frame")
    left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, position + 1)
    return ImageHeader("GIF", max(width, left + frame_width), max(height, top + frame_height))


def _read_bmp(data: bytes) -> ImageHeader:
    (header_size,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header_size == 12 else "<ii", data, 18)
    return ImageHeader("BMP", width, abs(height))  # a negative height: rows run from top to bottom


# --- orientation ------------------------------------------------------------------------------------------------------


def _orientation(exif: bytes, xmp: bytes) -> int:
    """EXIF decides; XMP is asked where EXIF is silent, as in Pillow's exif_transpose. Anything odd means upright."""
    try:
        value = _exif_orientation(exif)
    except struct.error:
        value = None
    if value is None and (found := _XMP_ORIENTATION.search(xmp)):
        value = int(found.group(1))
    return value if value is not None and 1 <= value <= 8 else 1


def _exif_orientation(exif: bytes) -> int | None:
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return None
    (offset,) = struct.unpack_from(order + "I", exif, 4)
    (num_entries,) = struct.unpack_from(order + "H", exif, offset)
    for index in range(num_entries):
        entry = offset + 2 + 12 * index
        tag, kind, count = struct.unpack_from(order + "HHI", exif, entry)
        if tag == ORIENTATION_TAG and count == 1 and kind in (3, 4):  # SHORT, LONG
            (value,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), exif, entry + 8)
            return int(value)
    return None


_FORMATS: Final[tuple[tuple[Callable[[bytes], bool], str, Callable[[bytes], ImageHeader]], ...]] = (
    (lambda data: data.startswith(b"\xff\xd8\xff"), "JPEG", _read_jpeg),
    (lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"), "PNG", _read_png),
    (lambda data: data.startswith(b"RIFF") and data[8:12] == b"WEBP", "WebP", _read_webp),
    (lambda data: data.startswith((b"GIF87a", b"GIF89a")), "GIF", _read_gif),
    (lambda data: data.startswith(b"BM"), "BMP", _read_bmp),
)
SUPPORTED_FORMATS: Final = tuple(name for _, name, _ in _FORMATS)
