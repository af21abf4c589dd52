"""Image bytes to RGB pixels: every stated rule, on every format and mode that a client may send."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile, ImageOps

from services.vision_encoder.image import decode
from shared.errors import InvalidImage, UnsupportedImageFormat
from shared.image_header import MAX_PARTS, SUPPORTED_FORMATS, ImageHeader, read_header

WHITE = (255, 255, 255)
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def encode(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def pixels_of(data: bytes, background: tuple[int, int, int] = WHITE) -> np.ndarray[Any, Any]:
    """[height, width, 3]"""
    image = decode(data, read_header(data), background)
    assert image.mode == "RGB"
    assert image.size == read_header(data).upright_size
    return np.asarray(image)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *, bits: int, colour_type: int, rows: bytes, extra: bytes = b"") -> bytes:
    """A PNG written by hand: Pillow cannot write every kind it can read. `rows`: filter byte 0 and samples, per row."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")


def gradient(width: int = 64, height: int = 48) -> Image.Image:
    across = np.linspace(0, 255, width, dtype=np.uint8)
    down = np.linspace(0, 255, height, dtype=np.uint8)
    red, green = np.broadcast_to(across, (height, width)), np.broadcast_to(down[:, None], (height, width))
    return Image.fromarray(np.stack([red, green, red // 2 + green // 2], axis=-1))


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags.tobytes()


# --- orientation (Case A1) --------------------------------------------------------------------------------------------


def barred() -> Image.Image:
    """Red bar on the left edge, green bar on the bottom edge."""
    image = Image.new("RGB", (640, 480), WHITE)
    image.paste(RED, (0, 0, 40, 480))
    image.paste(GREEN, (0, 440, 640, 480))
    return image


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_every_exif_orientation_gives_the_same_pixels_as_baking_it_in(orientation: int, file_format: str) -> None:
    """Case A1."""
    options: dict[str, Any] = {"lossless": True} if file_format == "WEBP" else {}
    tagged = encode(barred(), file_format, exif=exif(orientation), **options)
    baked = ImageOps.exif_transpose(Image.open(io.BytesIO(tagged)))
    assert np.array_equal(pixels_of(tagged), pixels_of(encode(baked.convert("RGB"))))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_of_a_jpeg_is_applied(orientation: int) -> None:
    """Case A1."""
    tagged = encode(barred(), "JPEG", exif=exif(orientation))
    reference = ImageOps.exif_transpose(Image.open(io.BytesIO(tagged)))
    assert np.array_equal(pixels_of(tagged), np.asarray(reference))


def test_orientation_6_puts_the_left_edge_on_top_and_swaps_the_size() -> None:
    """Case A1."""
    pixels = pixels_of(encode(barred(), exif=exif(6)))
    assert pixels.shape == (640, 480, 3)
    assert tuple(pixels[5, 240]) == RED
    assert tuple(pixels[320, 5]) == GREEN


def test_orientation_in_a_png_is_found_behind_the_pixels_too() -> None:
    plain = encode(barred())
    late = plain[:-12] + png_chunk(b"eXIf", exif(6).removeprefix(b"Exif\0\0")) + plain[-12:]
    assert read_header(late).upright_size == (480, 640)
    assert np.array_equal(pixels_of(late), pixels_of(encode(barred(), exif=exif(6))))


def test_orientation_is_read_from_xmp_where_exif_is_silent() -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    tagged = encode(barred(), "JPEG", xmp=xmp)
    assert read_header(tagged).upright_size == (480, 640)
    assert np.array_equal(pixels_of(tagged), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(tagged)))))


@pytest.mark.parametrize("bad", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_means_upright(bad: int) -> None:
    assert read_header(encode(barred(), "JPEG", exif=exif(bad))).orientation == 1


@pytest.mark.parametrize("block", [b"", b"II", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff"])
def test_a_damaged_exif_block_means_upright(block: bytes) -> None:
    assert read_header(encode(barred(), "JPEG", exif=b"Exif\0\0" + block)).orientation == 1


# --- transparency (Case A2) -------------------------------------------------------------------------------------------


def half_transparent() -> Image.Image:
    """Left half hidden red, right half half-transparent red."""
    image = Image.new("RGBA", (8, 8), (*RED, 0))
    image.paste((*RED, 128), (4, 0, 8, 8))
    return image


@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_transparency_is_composited_on_white(file_format: str) -> None:
    """Case A2."""
    options: dict[str, Any] = {"lossless": True, "exact": True} if file_format == "WEBP" else {}
    pixels = pixels_of(encode(half_transparent(), file_format, **options)).astype(int)
    assert np.array_equal(pixels[:, :4], np.full((8, 4, 3), 255))
    assert np.abs(pixels[:, 4:] - (255, 127, 127)).max() <= 1


def test_the_background_can_be_chosen() -> None:
    """Case A2."""
    pixels = pixels_of(encode(half_transparent()), background=(0, 0, 0))
    assert np.array_equal(pixels[:, :4], np.zeros((8, 4, 3)))
    assert np.abs(pixels[:, 4:].astype(int) - (128, 0, 0)).max() <= 1


def test_a_transparent_palette_entry_shows_the_background() -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([*RED, *GREEN])
    image.paste(1, (2, 0, 4, 4))
    pixels = pixels_of(encode(image, transparency=0))
    assert tuple(pixels[0, 0]) == WHITE
    assert tuple(pixels[0, 3]) == GREEN


@pytest.mark.parametrize(
    ("mode", "colour", "transparency", "shown"),
    [("L", 7, 7, WHITE), ("L", 7, 8, (7, 7, 7)), ("RGB", BLUE, BLUE, WHITE), ("RGB", BLUE, GREEN, BLUE)],
)
def test_a_single_transparent_colour_shows_the_background(
    mode: str, colour: Any, transparency: Any, shown: Any
) -> None:
    pixels = pixels_of(encode(Image.new(mode, (4, 4), colour), transparency=transparency))
    assert tuple(pixels[1, 1]) == shown


def test_a_transparent_16_bit_grey_shows_the_background() -> None:
    rows = b"\0" + struct.pack(">HH", 1000, 40000)
    pixels = pixels_of(png(2, 1, bits=16, colour_type=0, rows=rows, extra=png_chunk(b"tRNS", struct.pack(">H", 1000))))
    assert [tuple(pixel) for pixel in pixels[0]] == [WHITE, (156, 156, 156)]


# --- modes (Cases A4, A5) ---------------------------------------------------------------------------------------------


def test_a_checker_board_is_the_same_in_every_mode() -> None:
    """Case A4."""
    board = Image.fromarray((np.indices((32, 32)).sum(axis=0) % 2 * 255).astype(np.uint8))
    expected = np.repeat(np.asarray(board)[..., None], 3, axis=-1)
    for mode in ("L", "LA", "1", "P", "RGB", "RGBA"):
        assert np.array_equal(pixels_of(encode(board.convert(mode))), expected), mode


def test_a_16_bit_grey_ramp_stays_a_ramp() -> None:
    """Case A5."""
    values = np.linspace(0, 65535, 256).astype(np.uint16)
    data = encode(Image.fromarray(np.tile(values, (16, 1))))
    expected = np.round(values / 257).astype(int)
    pixels = pixels_of(data).astype(int)
    assert np.abs(pixels - expected[None, :, None]).max() == 0
    assert (pixels == 255).mean() < 0.01


@pytest.mark.parametrize(("colour_type", "num_channels"), [(2, 3), (4, 2), (6, 4)])
def test_16_bit_colour_and_alpha_ramps_stay_ramps(colour_type: int, num_channels: int) -> None:
    """Case A5."""
    values = np.linspace(0, 65535, 256).astype(np.uint16)
    samples = np.repeat(values[:, None], num_channels, axis=1)
    if colour_type in (4, 6):
        samples[:, -1] = 65535
    data = png(256, 1, bits=16, colour_type=colour_type, rows=b"\0" + samples.astype(">u2").tobytes())
    assert np.abs(pixels_of(data)[0].astype(int) - np.round(values / 257)[:, None]).max() <= 1


@pytest.mark.parametrize("colour", [RED, GREEN, BLUE, (255, 255, 255), (0, 0, 0), (200, 100, 50)])
def test_a_cmyk_jpeg_keeps_its_colours(colour: tuple[int, int, int]) -> None:
    """Pillow writes CMYK as Adobe does, inverted and marked so; reading must undo it."""
    data = encode(Image.new("RGB", (16, 16), colour).convert("CMYK"), "JPEG", quality=100)
    assert b"Adobe" in data
    assert np.abs(pixels_of(data).astype(int) - colour).max() <= 3


def test_a_progressive_jpeg_gives_nearly_the_pixels_of_a_baseline_one() -> None:
    baseline = pixels_of(encode(gradient(), "JPEG", quality=95)).astype(int)
    progressive = pixels_of(encode(gradient(), "JPEG", quality=95, progressive=True)).astype(int)
    assert np.abs(baseline - progressive).max() <= 1


def test_lossless_formats_give_equal_pixels() -> None:
    expected = np.asarray(gradient())
    for file_format, options in [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})]:
        assert np.array_equal(pixels_of(encode(gradient(), file_format, **options)), expected), file_format


def test_every_header_size_equals_the_decoders() -> None:
    for file_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        for size in [(1, 1), (3, 1), (1, 3), (499, 1), (17, 31), (640, 480)]:
            header = read_header(encode(Image.new("RGB", size, RED), file_format))
            assert (header.width, header.height) == size, (file_format, size)


# --- animations (Case A29) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(file_format: str) -> None:
    frames = [Image.new("RGB", (20, 10), RED), Image.new("RGB", (20, 10), BLUE)]
    options: dict[str, Any] = {"lossless": True} if file_format == "WEBP" else {}
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    for _ in range(2):
        assert np.array_equal(pixels_of(data), np.asarray(frames[0]))


def test_a_gif_with_one_frame_decodes() -> None:
    assert tuple(pixels_of(encode(Image.new("RGB", (20, 10), BLUE), "GIF"))[0, 0]) == BLUE


# --- what is refused (Cases A9, A11, A12, A31) ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1", "AVIF"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "SVG"),
        (b'\n<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY x SYSTEM "http://canary/">]><svg>&x;</svg>', "SVG"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (b"%PDF-1.7", "PDF"),
        (encode(Image.new("RGB", (4, 4)), "TIFF"), "TIFF"),
        (encode(Image.new("RGB", (4, 4)), "ICO"), "the data"),
        (b"", "the data"),
        (bytes(range(256)) * 4, "the data"),
    ],
)
def test_other_formats_are_refused_with_the_list_of_supported_ones(data: bytes, named: str) -> None:
    with pytest.raises(UnsupportedImageFormat) as refusal:
        read_header(data)
    assert named in refusal.value.message
    assert all(name in refusal.value.message for name in SUPPORTED_FORMATS)


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :]


NOISE = Image.fromarray(np.random.default_rng(5).integers(0, 256, (64, 64, 3), dtype=np.uint8))
BROKEN = {
    "JPEG without its last 128 bytes": encode(NOISE, "JPEG")[:-128],
    "JPEG cut at half": encode(NOISE, "JPEG")[: len(encode(NOISE, "JPEG")) // 2],
    "progressive JPEG cut at half": encode(NOISE, "JPEG", progressive=True)[:1500],
    "JPEG cut in its header": encode(NOISE, "JPEG")[:100],
    "PNG with a flipped byte in its pixels": flipped(encode(NOISE), len(encode(NOISE)) // 2),
    "PNG with a flipped byte in stored pixels": flipped(encode(NOISE, compress_level=0), 6000),
    "PNG cut at half": encode(NOISE)[: len(encode(NOISE)) // 2],
    "PNG without its end": encode(NOISE)[:-12],
    "PNG signature, then noise": b"\x89PNG\r\n\x1a\n" + np.random.default_rng(6).bytes(1024),
    "PNG signature alone": b"\x89PNG\r\n\x1a\n",
    "GIF cut at half": encode(NOISE, "GIF")[: len(encode(NOISE, "GIF")) // 2],
    "GIF cut in its header": encode(NOISE, "GIF")[:8],
    "WebP cut at half": encode(NOISE, "WEBP")[: len(encode(NOISE, "WEBP")) // 2],
    "BMP cut at half": encode(NOISE, "BMP")[: len(encode(NOISE, "BMP")) // 2],
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_truncated_and_corrupt_files_are_refused_and_no_switch_is_left_behind(data: bytes) -> None:
    for _ in range(2):
        with pytest.raises(InvalidImage, match="corrupt"):
            pixels_of(data)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    assert np.array_equal(pixels_of(encode(NOISE)), np.asarray(NOISE))


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidImage, match="0 x 5"):
        read_header(png(0, 5, bits=8, colour_type=2, rows=b""))


def test_pixels_of_another_size_than_was_admitted_are_refused() -> None:
    with pytest.raises(InvalidImage, match="64 x 48"):
        decode(encode(gradient()), ImageHeader("PNG", 8, 8), WHITE)


def test_the_header_of_a_decompression_bomb_is_read_without_decompressing() -> None:
    """Case A9."""
    bomb = png(30_000, 30_000, bits=1, colour_type=0, rows=bytes(30_000 * 3751))
    assert len(bomb) < 200_000
    header = read_header(bomb)
    assert (header.width, header.height) == (30_000, 30_000)
    compressed = bomb.index(b"IDAT") + 4
    nothing_to_decompress = bomb[:compressed] + bytes(len(bomb) - compressed - 16) + bomb[-16:]
    assert read_header(nothing_to_decompress) == header


def with_parts(file_format: str, num_parts: int) -> bytes:
    """A picture of 64 x 48 whose size, or orientation, stands behind so many tiny parts."""
    good = encode(gradient(), file_format, **({"exif": exif(6)} if file_format == "WEBP" else {}))
    match file_format:
        case "JPEG":
            return good[:2] + b"\xff\xfe\0\2" * num_parts + good[2:]
        case "GIF":
            start = good.index(b"\x2c", 13 + (3 << (good[10] & 7) + 1))
            return good[:start] + b"\x21\xfe\0" * num_parts + good[start:]
        case "PNG":
            orientation = png_chunk(b"eXIf", exif(6).removeprefix(b"Exif\0\0"))
            return good[:-12] + png_chunk(b"teSt", b"") * num_parts + orientation + good[-12:]
    where = good.index(b"EXIF")
    return good[:where] + b"teSt\0\0\0\0" * num_parts + good[where:]


@pytest.mark.parametrize("file_format", ["JPEG", "GIF", "PNG", "WEBP"])
def test_a_file_of_millions_of_tiny_parts_is_not_read_to_its_end(file_format: str) -> None:
    """It would hold up an event loop for seconds. What stands behind too many parts is not found, or not admitted."""
    turned = file_format in ("PNG", "WEBP")
    few = read_header(with_parts(file_format, MAX_PARTS // 2))
    assert few.upright_size == ((48, 64) if turned else (64, 48))
    many = with_parts(file_format, MAX_PARTS * 2)
    if turned:
        assert read_header(many).orientation == 1
    else:
        with pytest.raises(InvalidImage, match="header cannot be read"):
            read_header(many)


def test_headers_of_random_damage_never_raise_anything_else() -> None:
    random = np.random.default_rng(7)
    for file_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        good = encode(gradient(), file_format, **({"exif": exif(6)} if file_format in ("JPEG", "PNG", "WEBP") else {}))
        for _ in range(300):
            damaged = bytearray(good[: random.integers(1, len(good) + 1)])
            for position in random.integers(0, len(damaged), 4):
                damaged[position] = random.integers(0, 256)
            try:
                read_header(bytes(damaged))
            except InvalidImage:
                continue
