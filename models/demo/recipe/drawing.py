"""Draws one background, shape, pictogram or text into a 128 x 128 picture.  Knows pixels, not scenes or questions."""
import math
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from .concepts import COLOUR_NAMES, COLOURS
from .words import split_words

SIZE = 128
# Indices into assets.STYLES.  OpenMoji (7) is for evaluation only; from 9 on a style has one ink and no colours.
TRAIN_STYLES, UNSEEN_STYLE, FIRST_INK_STYLE = (0, 1, 2, 3, 4, 5, 6, 8, 9, 10), 7, 9
COLOUR_STYLES = (0, 1, 2, 3, 4, 5, 6)
TRAIN_FONTS = ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif-Bold", "DejaVuSansMono-Bold", "LiberationSans-Regular", "LiberationSans-Bold", "LiberationSerif-Regular", "LiberationSerif-Bold", "LiberationMono-Bold", "OpenSans-Regular", "OpenSans-Bold", "FreeSans", "FreeSerifBold", "FreeMonoBold", "LiberationSansNarrow-Bold", "OpenSans-Semibold"]
UNSEEN_FONTS = ["Lato-Bold", "Lato-Regular"]
RGB = tuple[int, int, int]
Box = tuple[float, float, float, float]


class Assets:
    """Sprites, fonts and words made by assets.py; sprites are kept in memory."""

    def __init__(self, folder: Path) -> None:
        self.sprites = np.load(folder / "sprites.npy", mmap_mode="r")  # [num_sprites, 96, 96, 4] uint8
        self.lines = np.load(folder / "lines.npy")  # [num_drawings, 3] the sprites that redraw each drawing in lines
        self.by_style_and_name: dict[tuple[int, int], list[int]] = {}
        for k, (style, name, _char) in enumerate(np.load(folder / "index.npy")):
            self.by_style_and_name.setdefault((int(style), int(name)), []).append(k)
        self.words, self.held_out_words = split_words(folder / "words.txt")
        self.folder = folder
        self.fonts: dict[tuple[str, int], ImageFont.FreeTypeFont] = {}

    def sprite(self, rng: random.Random, name_id: int, styles: tuple[int, ...], lines: float) -> Image.Image:
        """A random drawing of a thing in one of the styles, as RGBA; with probability `lines`, redrawn in lines."""
        style = rng.choice([s for s in styles if (s, name_id) in self.by_style_and_name])
        which = rng.choice(self.by_style_and_name[style, name_id])
        if style < FIRST_INK_STYLE and rng.random() < lines:
            which = rng.choice(self.lines[which])
        pixels = np.array(self.sprites[which])
        if style >= FIRST_INK_STYLE:
            pixels[..., :3] = tint(rng, rng.choice(COLOUR_NAMES)) if rng.random() < 0.6 else (10, 10, 10)
        return Image.fromarray(pixels)

    def font(self, name: str, size: int) -> ImageFont.FreeTypeFont:
        """A font from the cache."""
        if (name, size) not in self.fonts:
            self.fonts[name, size] = ImageFont.truetype(str(self.folder / "fonts" / f"{name}.ttf"), size)
        return self.fonts[name, size]


def tint(rng: random.Random, name: str, amount: int = 16) -> RGB:
    """A colour near the named one."""
    d = rng.randint(-amount, amount)
    r, g, b = (max(0, min(255, v + d + rng.randint(-6, 6))) for v in COLOURS[name])
    return r, g, b


def contrast(a: RGB, b: RGB) -> int:
    """City-block distance of two colours."""
    return sum(abs(x - y) for x, y in zip(a, b))


def background(rng: random.Random) -> tuple[Image.Image, str | None]:
    """An empty picture and the name of its colour; None for a colourful one."""
    k = rng.random()
    name = "white" if rng.random() < 0.3 else rng.choice(COLOUR_NAMES)
    if k < 0.72:
        return Image.new("RGB", (SIZE, SIZE), tint(rng, name)), name
    if k < 0.87:  # a light gradient of one colour
        ramp = np.linspace(0, 1, SIZE, dtype=np.float32)
        ramp = np.broadcast_to(ramp[:, None] if rng.random() < 0.5 else ramp[None, :], (SIZE, SIZE))[..., None]
        a, b = np.array(tint(rng, name)), np.array(tint(rng, name))
        return Image.fromarray((a * (1 - ramp) + b * ramp).astype(np.uint8)), name
    n = rng.choice((2, 3, 5, 9))  # blurred spots, checks or stripes
    spots = np.random.RandomState(rng.randrange(2**31)).randint(30, 256, (n, n, 3)).astype(np.uint8)
    if rng.random() < 0.5:
        spots = (spots // 3 + 160).astype(np.uint8)
    how = Image.Resampling.BICUBIC if rng.random() < 0.75 else Image.Resampling.NEAREST
    return Image.fromarray(spots).resize((SIZE, SIZE), how), None


def mean_colour(image: Image.Image) -> RGB:
    """The average colour of a picture."""
    r, g, b = image.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    return r, g, b


def polygon(kind: str, r: float) -> list[tuple[float, float]]:
    """Corner points of a shape of radius r round the origin."""
    if kind in ("square", "rectangle"):
        w, h = (r * 0.88, r * 0.88) if kind == "square" else (r, r * 0.5)
        return [(-w, -h), (w, -h), (w, h), (-w, h)]
    if kind == "diamond":
        return [(0, -r), (r * 0.68, 0), (0, r), (-r * 0.68, 0)]
    if kind == "cross":
        t = r * 0.33
        return [(-t, -r), (t, -r), (t, -t), (r, -t), (r, t), (t, t), (t, r), (-t, r), (-t, t), (-r, t), (-r, -t), (-t, -t)]
    if kind == "heart":
        turns = [i * 2 * math.pi / 36 for i in range(36)]
        return [(r * 0.062 * 16 * math.sin(t) ** 3,
                 -r * 0.062 * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t))) for t in turns]
    n, inner = {"triangle": (3, 1.0), "pentagon": (5, 1.0), "hexagon": (6, 1.0), "star": (10, 0.42)}[kind]
    radii = [r if i % 2 == 0 else r * inner for i in range(n)]
    return [(q * math.sin(i * 2 * math.pi / n), -q * math.cos(i * 2 * math.pi / n)) for i, q in enumerate(radii)]


def draw_shape(rng: random.Random, image: Image.Image, kind: str, colour: RGB, cx: int, cy: int, r: int) -> None:
    """Draw a filled shape of radius r at (cx, cy), turned a little."""
    mask = Image.new("L", (4 * r, 4 * r))
    draw, c, big = ImageDraw.Draw(mask), 2 * r, 2 * r - 2
    if kind in ("circle", "oval", "ring"):
        h = big if kind != "oval" else big * 0.58
        draw.ellipse((c - big, c - h, c + big, c + h), fill=255)
        if kind == "ring":
            q = big * 0.58
            draw.ellipse((c - q, c - q, c + q, c + q), fill=0)
    else:
        limit = 0.12 if kind in ("diamond", "square", "rectangle", "cross") else 0.2
        turn = rng.uniform(-limit, limit)
        if kind == "rectangle" and rng.random() < 0.4:
            turn += math.pi / 2
        ca, sa = math.cos(turn), math.sin(turn)
        draw.polygon([(c + x * ca - y * sa, c + x * sa + y * ca) for x, y in polygon(kind, big)], fill=255)
    if kind == "oval" and rng.random() < 0.4:
        mask = mask.transpose(Image.Transpose.ROTATE_90)
    image.paste(colour, (cx - r, cy - r), mask.reduce(2))


def as_line_drawing(rgba: Image.Image, rng: random.Random) -> Image.Image:
    """Flat colours with dark lines at their borders: a hint of the many outlined pictogram styles."""
    alpha = rgba.getchannel("A")
    flat = rgba.convert("RGB").filter(ImageFilter.MedianFilter(5))
    if rng.random() < 0.6:
        flat = flat.quantize(rng.choice((3, 4, 6, 8))).convert("RGB")
    level = rng.choice((25, 40, 60))
    edges = flat.convert("L").filter(ImageFilter.FIND_EDGES).point([255 if v > level else 0 for v in range(256)])
    rim = Image.fromarray(np.asarray(alpha.filter(ImageFilter.MaxFilter(3))) - np.asarray(alpha.filter(ImageFilter.MinFilter(3))))
    lines = Image.fromarray(np.maximum(np.asarray(edges), np.asarray(rim)))
    if rng.random() < 0.5:
        lines = lines.filter(ImageFilter.MaxFilter(3))
    if rng.random() < 0.15:  # lines on white, as in a colouring book
        flat = Image.new("RGB", flat.size, (255, 255, 255))
    flat.paste((0, 0, 0), (0, 0), lines)
    flat.putalpha(Image.fromarray(np.maximum(np.asarray(alpha), np.asarray(rim))))
    return flat


def recolour(rgb: Image.Image, rng: random.Random) -> Image.Image:
    """Change the colours of a picture at random: grey, lighter, darker, channels turned, or not at all."""
    k = rng.random()
    if k < 0.05:
        return rgb.convert("L").convert("RGB")
    if k < 0.17:
        r, g, b = rgb.split()
        rgb = Image.merge("RGB", rng.choice(((r, b, g), (g, r, b), (g, b, r), (b, r, g), (b, g, r))))
    if k < 0.5:
        low, gain = rng.uniform(-30, 50), rng.uniform(0.65, 1.15)
        rgb = rgb.point([max(0, min(255, int(low + gain * v))) for v in range(256)] * 3)
    return rgb


def draw_pictogram(rng: random.Random, image: Image.Image, sprite: Image.Image, cx: int, cy: int, r: int, plain: bool) -> Box:
    """Paste a sprite of radius r at (cx, cy), distorted and recoloured unless `plain`; returns its box."""
    if rng.random() < 0.35:
        sprite = sprite.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    w = h = max(12, 2 * r)
    if not plain and rng.random() < 0.45:
        w, h = (max(10, int(v * rng.uniform(0.78, 1.0))) for v in (w, h))
    sprite = sprite.resize((w, h), Image.Resampling.BILINEAR)
    if rng.random() < 0.5:
        sprite = sprite.rotate(rng.gauss(0, 5 if plain else 11), Image.Resampling.BILINEAR)
    at, alpha = (cx - w // 2, cy - h // 2), sprite.getchannel("A")
    if not plain and rng.random() < 0.25:
        rim = alpha.filter(ImageFilter.MaxFilter(3 if w < 45 else 5))
        image.paste((0, 0, 0) if rng.random() < 0.7 else (255, 255, 255), at, rim)
    rgb = sprite.convert("RGB")
    image.paste(rgb if plain else recolour(rgb, rng), at, alpha)
    return cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2


Spans = list[tuple[str, float, float]]


def draw_text(rng: random.Random, assets: Assets, image: Image.Image, text: str, fonts: list[str], bg: str | None,
              area: tuple[int, int, int, int]) -> tuple[str, Spans, Box]:
    """Write a text somewhere in the area; returns its colour, [(character, left, right)] and its box."""
    x0, y0, x1, y1 = area
    name, size = rng.choice(fonts), rng.randint(28, 72)
    while True:
        font = assets.font(name, size)
        left, top, right, bottom = font.getbbox(text)
        w, h = int(right - left), int(bottom - top)
        if (w <= x1 - x0 and h <= y1 - y0) or size <= 16:
            break
        size = max(16, int(size * 0.92))
    ref = COLOURS[bg] if bg else mean_colour(image)
    names = [c for c in COLOUR_NAMES if c != bg and contrast(COLOURS[c], ref) > 190] or ["black"]
    colour = "black" if "black" in names and rng.random() < 0.3 else rng.choice(names)
    x, y = rng.randint(x0, max(x0, x1 - w)), rng.randint(y0, max(y0, y1 - h))
    ImageDraw.Draw(image).text((x - left, y - top), text, font=font, fill=tint(rng, colour))
    starts = [x - left + font.getlength(text[:i]) for i in range(len(text) + 1)]
    return colour, list(zip(text, starts[:-1], starts[1:])), (x, y, x + w, y + h)
