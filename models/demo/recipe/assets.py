"""Rasterises the openly licensed pictogram sets to RGBA sprites, once, and gathers fonts and words.

Sources: npm packages @iconify-json/STYLE unpacked to NPM_DIR/STYLE; Debian's fonts-dejavu, fonts-liberation, fonts-open-sans,
fonts-freefont-ttf, fonts-lato and wamerican.
"""
import io
import json
import random
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path

import emoji
import numpy as np
import resvg_py
from PIL import Image

from .concepts import pictograms
from .drawing import TRAIN_FONTS, UNSEEN_FONTS, UNSEEN_STYLE, as_line_drawing

STYLES = ["noto", "twemoji", "fluent-emoji-flat", "fluent-emoji", "noto-v1", "emojione", "fxemoji", "openmoji",
          "streamline-emojis", "fluent-emoji-high-contrast", "emojione-monotone"]
SIZE = 96
LINE_DRAWINGS = 3  # per sprite of a trained style


def squash(text: str) -> str:
    """Letters and digits only, lower case."""
    return "".join(c for c in text.lower() if c.isalnum())


class IconSet:
    """One pictogram style: finds a character's drawing."""

    def __init__(self, folder: Path) -> None:
        self.data = json.loads((folder / "icons.json").read_text())
        self.chars = json.loads((folder / "chars.json").read_text())
        self.aliases = self.data.get("aliases", {})
        self.squashed = {squash(k): k for k in [*self.data["icons"], *self.aliases]}

    def find(self, char: str, other_name: str = "") -> str | None:
        """The icon's name for a character, by code point or by one of its usual names."""
        names = [self.chars[k] for k in (f"{ord(char):x}", f"{ord(char):x}-fe0f") if k in self.chars]
        cldr = emoji.EMOJI_DATA.get(char, emoji.EMOJI_DATA.get(char + "\ufe0f", {})).get("en", "").strip(":")
        for n in (cldr, other_name, unicodedata.name(char, "")):
            names += [n, n + " face", n.replace("FACE", ""), n.replace("face", ""), n + " side"]
        for name in filter(None, names):
            key = self.squashed.get(squash(name))
            while key in self.aliases:
                if any(self.aliases[key].get(turn) for turn in ("hFlip", "vFlip", "rotate")):
                    return None
                key = self.aliases[key]["parent"]
            if key:
                return key
        return None

    def svg(self, key: str) -> str:
        """The icon as a whole SVG document."""
        icon, data = self.data["icons"][key], self.data
        w, h = icon.get("width", data.get("width", 16)), icon.get("height", data.get("height", 16))
        left, top = icon.get("left", 0), icon.get("top", 0)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
                f'viewBox="{left} {top} {w} {h}" width="{SIZE}" height="{SIZE}">{icon["body"]}</svg>')


def rasterise(svg: str) -> Image.Image | None:
    """An SVG cropped to what it shows, on a transparent square; None if it is empty."""
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIZE, height=SIZE, skip_system_fonts=True))
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    box = image.getchannel("A").point([255 if v > 24 else 0 for v in range(256)]).getbbox()
    if box is None:
        return None
    image = image.crop(box)
    side = max(image.size)
    square = Image.new("RGBA", (side, side))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def draw_all(npm: Path, note: Callable[[str], None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """sprites [n, 96, 96, 4] uint8; index [n, 3] of style, name and character; lines [n, 3]: each sprite's line drawings, or -1."""
    rows, names = pictograms()
    noto = IconSet(npm / "noto")
    sprites, index = [], []
    for style_id, style in enumerate(STYLES):
        icons = IconSet(npm / style)
        for char, name, _category in rows:
            key = icons.find(char, noto.find(char) or "")
            image = rasterise(icons.svg(key)) if key else None
            if image is not None:
                sprites.append(np.asarray(image))
                index.append((style_id, names.index(name), ord(char)))
        note(f"{style}: {sum(i[0] == style_id for i in index)} of {len(rows)} pictograms")
    lines = np.full((len(index), LINE_DRAWINGS), -1, np.int32)
    rng = random.Random(0)
    for i, (style_id, _name, _char) in enumerate(index):
        if style_id != UNSEEN_STYLE:
            for k in range(LINE_DRAWINGS):
                lines[i, k] = len(sprites)
                sprites.append(np.asarray(as_line_drawing(Image.fromarray(sprites[i]), rng)))
    return np.stack(sprites), np.array(index, np.int32), lines


def build(npm: Path, fonts: Path, words: Path, out: Path) -> None:
    """Make the asset folder, unless it is there."""
    if (out / "lines.npy").exists():
        return
    (out / "fonts").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(words, out / "words.txt")
    for font in fonts.rglob("*.ttf"):
        if font.stem in TRAIN_FONTS + UNSEEN_FONTS:
            shutil.copyfile(font, out / "fonts" / font.name)
    sprites, index, lines = draw_all(npm, print)
    np.save(out / "sprites.npy", sprites)
    np.save(out / "index.npy", index)
    np.save(out / "lines.npy", lines)
