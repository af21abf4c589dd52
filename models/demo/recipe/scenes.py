"""Composes pictures from a seed: render(assets, seed, split, kind) -> (picture, Scene).

Splits: 'train'; 'eval' (trained styles and fonts, unseen seeds and texts); 'unseen' (a pictogram style and a font never
trained on).
"""
import io
import random
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageFilter

from .concepts import COLOUR_NAMES, COLOURS, SHAPES, pictograms
from .drawing import (
    COLOUR_STYLES,
    SIZE,
    TRAIN_FONTS,
    TRAIN_STYLES,
    UNSEEN_FONTS,
    UNSEEN_STYLE,
    Assets,
    Box,
    Spans,
    background,
    contrast,
    draw_pictogram,
    draw_shape,
    draw_text,
    mean_colour,
    tint,
)
from .words import random_number, random_word

ROWS, NAMES = pictograms()
CATEGORY = {name: category for _char, name, category in ROWS}
KINDS = ("shapes", "pictogram", "text", "several", "mixed", "captioned")
TOWER_MIX = (0.13, 0.24, 0.35, 0.18, 0.05, 0.05)
FULL = (3, 3, SIZE - 3, SIZE - 3)


@dataclass(slots=True)
class Thing:
    """One object of a scene; `name` of a text is what it says."""

    type: str  # shape, pictogram, number or word
    name: str
    box: Box
    radius: float
    colour: str | None = None
    spans: Spans = field(default_factory=list)

    @property
    def is_text(self) -> bool:
        return self.type in ("number", "word")

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass(slots=True)
class Scene:
    """What a picture shows."""

    kind: str
    background: str | None
    things: list[Thing] = field(default_factory=list)


class Composer:
    """Draws one scene; holds what its parts share."""

    def __init__(self, assets: Assets, rng: random.Random, split: str, kind: str) -> None:
        self.assets, self.rng, self.split = assets, rng, split
        self.image, bg = background(rng)
        self.scene = Scene(kind, bg)
        self.reference = COLOURS[bg] if bg else mean_colour(self.image)
        self.fonts = UNSEEN_FONTS if split == "unseen" else TRAIN_FONTS

    def shape(self, cx: int, cy: int, r: int, name: str | None = None, colour: str | None = None) -> None:
        rng, bg = self.rng, self.scene.background
        name = name or rng.choice(SHAPES)
        colours = [c for c in COLOUR_NAMES if c != bg and contrast(COLOURS[c], self.reference) > 110]
        colour = colour if colour in colours else rng.choice(colours)
        draw_shape(rng, self.image, name, tint(rng, colour), cx, cy, r)
        self.scene.things.append(Thing("shape", name, (cx - r, cy - r, cx + r, cy + r), r, colour))

    def pictogram(self, cx: int, cy: int, r: int, name: str | None = None) -> None:
        rng = self.rng
        name = name or rng.choice(NAMES)
        styles = {"train": TRAIN_STYLES, "eval": COLOUR_STYLES, "unseen": (UNSEEN_STYLE,)}[self.split]
        train = self.split == "train"
        sprite = self.assets.sprite(rng, NAMES.index(name), styles, lines=0.35 if train else 0.0)
        box = draw_pictogram(rng, self.image, sprite, cx, cy, r, not train)
        self.scene.things.append(Thing("pictogram", name, box, r))

    def text(self, area: tuple[int, int, int, int] = FULL) -> None:
        rng, train = self.rng, self.split == "train"
        kind = rng.choice(("number", "word"))
        text = (random_number(rng, train) if kind == "number"
                else random_word(rng, self.assets.words, self.assets.held_out_words, train))
        colour, spans, box = draw_text(rng, self.assets, self.image, text, self.fonts, self.scene.background, area)
        self.scene.things.append(Thing(kind, text, box, (box[3] - box[1]) / 2, colour, spans))

    def shapes(self) -> None:
        """One to five shapes, often with repeated ones, so that counting means something."""
        rng, things = self.rng, self.scene.things
        n = rng.randint(1, 5)
        twins = rng.random() < 0.35
        for cx, cy, r in spots(rng, n, 12, (50, 33, 27, 24, 22)[n - 1]):
            if twins and things and rng.random() < 0.6:
                twin, both = rng.choice(things), rng.random()
                self.shape(cx, cy, r, twin.name if both < 0.7 else None, twin.colour if both > 0.4 else None)
            else:
                self.shape(cx, cy, r)

    def single(self) -> None:
        r = self.rng.randint(22, 63)
        jitter = SIZE // 2 - r
        cx, cy = (SIZE // 2 + self.rng.randint(-jitter, jitter) for _ in range(2))
        self.pictogram(cx, cy, r)

    def several(self) -> None:
        """Two to four pictograms."""
        n = self.rng.choice((2, 2, 2, 3, 3, 4))
        for cx, cy, r in spots(self.rng, n, 17, (32, 28, 25)[n - 2]):
            twin = self.scene.things and self.rng.random() < 0.12
            self.pictogram(cx, cy, r, self.scene.things[0].name if twin else None)

    def mixed(self) -> None:
        """Pictograms and shapes together."""
        for i, (cx, cy, r) in enumerate(spots(self.rng, self.rng.choice((2, 2, 3)), 16, 30)):
            (self.pictogram if i == 0 or self.rng.random() < 0.3 else self.shape)(cx, cy, r)

    def captioned(self) -> None:
        """A pictogram or a shape with a text above or below it."""
        rng = self.rng
        above, r = rng.random() < 0.5, rng.randint(20, 34)
        cx, cy = rng.randint(r + 2, SIZE - r - 2), SIZE - r - 3 if above else r + 3
        (self.pictogram if rng.random() < 0.7 else self.shape)(cx, cy, r)
        self.text((3, 3, SIZE - 3, SIZE - 2 * r - 8) if above else (3, 2 * r + 8, SIZE - 3, SIZE - 3))


def spots(rng: random.Random, n: int, low: int, high: int) -> list[tuple[int, int, int]]:
    """n circles (cx, cy, r) that do not touch."""
    while True:
        out: list[tuple[int, int, int]] = []
        for _ in range(n):
            for _try in range(50):
                r = rng.randint(low, high)
                cx, cy = rng.randint(r + 2, SIZE - r - 2), rng.randint(r + 2, SIZE - r - 2)
                if all((cx - x) ** 2 + (cy - y) ** 2 > (r + q + 4) ** 2 for x, y, q in out):
                    out.append((cx, cy, r))
                    break
        if len(out) == n:
            return out
        high = max(low, high - 3)


def wear(rng: random.Random, image: Image.Image) -> Image.Image:
    """Blur, JPEG artefacts and grain, now and then."""
    if rng.random() < 0.12:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.0)))
    if rng.random() < 0.25:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(45, 92))
        image = Image.open(file).convert("RGB")
    if rng.random() < 0.15:
        grain = np.random.RandomState(rng.randrange(2**31)).randint(-9, 10, (SIZE, SIZE, 1), dtype=np.int16)
        image = Image.fromarray((np.asarray(image).astype(np.int16) + grain).clip(0, 255).astype(np.uint8))
    return image


def render(assets: Assets, seed: int, split: str = "train", kind: str | None = None,
           mix: tuple[float, ...] = TOWER_MIX) -> tuple[Image.Image, Scene]:
    """The picture of a seed and what it shows."""
    rng = random.Random(f"{split}-{seed}")
    kind = kind or rng.choices(KINDS, mix)[0]
    composer = Composer(assets, rng, split, kind)
    {"shapes": composer.shapes, "pictogram": composer.single, "text": composer.text, "several": composer.several,
     "mixed": composer.mixed, "captioned": composer.captioned}[kind]()
    return wear(rng, composer.image), composer.scene
