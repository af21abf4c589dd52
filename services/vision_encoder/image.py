"""Image bytes to upright RGB pixels. Runs in decode workers only.

The rules, the same on every path: the first frame of an animation; 16-bit values v become round(v / 257); EXIF
orientation applied; transparency composited on a stated background; anything truncated or corrupt refused.
"""

from __future__ import annotations

import io
import zlib

from PIL import Image

from shared.errors import InvalidImage
from shared.image_header import ImageHeader, png_chunks

Colour = tuple[int, int, int]

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TO_8_BIT = [(value + 128) // 257 for value in range(1 << 16)]


def decode(data: bytes, header: ImageHeader, background: Colour) -> Image.Image:
    """The upright RGB picture. Raises InvalidImage if `data` is not, wholly and exactly, what `header` announced."""
    try:
        if header.format == "PNG":
            _check_png(data)
        image = Image.open(io.BytesIO(data), formats=[header.format])
        if image.size == (header.width, header.height):  # else: nothing of that size was ever admitted
            image.load()
            rgb = _to_rgb(image, background)
            return rgb.transpose(_TURNS[header.orientation]) if header.orientation in _TURNS else rgb
        reason = f"its pixels say {image.width} x {image.height}, its header {header.width} x {header.height}"
    except Exception as error:  # noqa: BLE001 - decoders raise whatever they stumble over; all of it means one thing
        reason = str(error) or type(error).__name__
    raise InvalidImage(f"truncated or corrupt {header.format} image: {reason}")


def _check_png(data: bytes) -> None:
    """Pillow does not check the pixels' checksums: a flipped bit would pass as another picture."""
    for kind, start, end in png_chunks(data):
        stored = int.from_bytes(data[end : end + 4], "big")
        if zlib.crc32(memoryview(data)[start - 4 : end]) != stored:
            raise ValueError(f"the checksum of its {kind.decode('latin-1')!r} chunk is wrong")


def _to_rgb(image: Image.Image, background: Colour) -> Image.Image:
    if image.mode.startswith("I"):
        image = _from_16_bit_grey(image)
    if not image.has_transparency_data:
        # CMYK from JPEG arrives here with Adobe's inversion already undone by Pillow.
        return image.convert("RGB")
    canvas = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")


def _from_16_bit_grey(image: Image.Image) -> Image.Image:
    """Pillow's own conversion clips at 255. A transparent grey value (PNG tRNS) becomes an alpha channel."""
    wide = image.convert("I")
    grey = wide.point(_TO_8_BIT, "L")
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int):
        return grey
    alpha = wide.point([0 if value == transparent else 255 for value in range(1 << 16)], "L")
    return Image.merge("LA", (grey, alpha))
