"""The Pixtral and Qwen2-VL image processors: one resize to whole patches, near the picture's own size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.preprocessing.processor_file import (
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    processor_kind,
    read_normalization,
    read_processor,
    read_resample,
)

WARM_UP_PATCHES = 16  # a side of the picture that an encoder is warmed up with


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinBox:
    """Pixtral: shrunk into a box if it is larger, then stretched to whole patches.

    box          (height, width) that no picture exceeds by more than a patch
    patch_size   pixels of a side; of the patches that become one row, where several do
    resample     Pillow's code
    rescale_factor, mean, std    the tower's input is (value * rescale_factor - mean) / std, per channel R, G, B
    """

    box: tuple[int, ...]
    patch_size: int
    resample: int
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(min(side, WARM_UP_PATCHES * self.patch_size) for side in self.box)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(lines, columns) of patches."""
        max_height, max_width = self.box
        ratio = max(height / max_height, width / max_width)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        # A sliver may shrink to nothing, where the reference fails: it gets one line of patches.
        return max(1, math.ceil(height / self.patch_size)), max(1, math.ceil(width / self.patch_size))

    def num_working_pixels(self, width: int, height: int) -> int:
        return max(width * height, math.prod(self.grid(width, height)) * self.patch_size**2)

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """RGB picture -> [1, 3, height, width]"""
        return _resized(image, self.grid(*image.size), self.patch_size, self.resample)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinBudget:
    """Qwen2-VL: to whole patches, and no fewer and no more pixels than allowed.

    patch_size   pixels of a side of the patches that become one row together
    resample     Pillow's code
    rescale_factor, mean, std    the tower's input is (value * rescale_factor - mean) / std, per channel R, G, B
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    resample: int
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def size(self) -> tuple[int, ...]:
        side = WARM_UP_PATCHES * self.patch_size
        lines, columns = self.grid(side, side)
        return lines * self.patch_size, columns * self.patch_size

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(lines, columns) of patches. Halves are rounded to even numbers, as the reference rounds."""
        patch = self.patch_size
        lines, columns = round(height / patch), round(width / patch)
        if lines * columns * patch**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            lines, columns = math.floor(height / shrink / patch), math.floor(width / shrink / patch)
        elif lines * columns * patch**2 < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (height * width))
            lines, columns = math.ceil(height * stretch / patch), math.ceil(width * stretch / patch)
        return max(1, lines), max(1, columns)

    def num_working_pixels(self, width: int, height: int) -> int:
        return max(width * height, math.prod(self.grid(width, height)) * self.patch_size**2)

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """RGB picture -> [1, 3, height, width]"""
        return _resized(image, self.grid(*image.size), self.patch_size, self.resample)


def load_within_box(folder: Path, patch_size: int) -> WithinBox:
    """patch_size   pixels of a side of what becomes one row. Raises UnsupportedCheckpoint."""
    raw = read_processor(folder)
    _check(raw, "PixtralImageProcessor", ("PixtralImageProcessor",))
    size = raw.get("size") or {"longest_edge": 1024}
    return WithinBox(
        box=(int(size.get("longest_edge") or size["height"]), int(size.get("longest_edge") or size["width"])),
        patch_size=patch_size,
        resample=read_resample(raw),
        **asdict(read_normalization(raw, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)),
    )


def load_within_budget(folder: Path, patch_size: int) -> WithinBudget:
    """patch_size   pixels of a side of what becomes one row. Raises UnsupportedCheckpoint."""
    raw = read_processor(folder)
    _check(raw, "Qwen2VLImageProcessor", ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"))
    size = raw.get("size") or {}
    # Three spellings over the years; the plain fields win, as in the reference.
    return WithinBudget(
        min_pixels=int(raw.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56),
        max_pixels=int(raw.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280),
        patch_size=patch_size,
        resample=read_resample(raw),
        **asdict(read_normalization(raw, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)),
    )


def _check(raw: Mapping[str, Any], default: str, supported: tuple[str, ...]) -> None:
    kind = processor_kind(raw, default)
    if kind not in supported:
        raise UnsupportedCheckpoint(f"image_processor_type {kind!r} is not supported here; supported: {supported[0]}")
    if not raw.get("do_resize", True) or raw.get("do_center_crop"):
        raise UnsupportedCheckpoint("the image processor must resize to whole patches and must not crop")


def _resized(image: Image.Image, grid: tuple[int, int], patch_size: int, resample: int) -> NDArray[np.uint8]:
    lines, columns = grid
    size = (columns * patch_size, lines * patch_size)
    pixels = np.asarray(image.resize(size, Image.Resampling(resample)))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]
