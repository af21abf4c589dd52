"""Pictures in several tiles: the LLaVA-NeXT and LLaVA-OneVision image processors.

The first tile is the whole picture, squeezed; the others are the picture at the best fitting of some resolutions, its
aspect ratio kept, between black bars.
"""

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
from services.vision_encoder.preprocessing.single_tile import SingleTile

Size = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyRes:
    """See `Preprocessing` for the last three fields.

    tile_size     side of the square tiles
    resolutions   (height, width) of each resolution to choose from, whole tiles
    resample      Pillow's code
    """

    tile_size: int
    resolutions: tuple[Size, ...]
    resample: int
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def size(self) -> Size:
        return self.tile_size, self.tile_size

    def num_working_pixels(self, width: int, height: int) -> int:
        return width * height

    def num_tiles(self, width: int, height: int) -> Size:
        """(down, across), without the first tile."""
        best_height, best_width = self._best_resolution(width, height)
        return best_height // self.tile_size, best_width // self.tile_size

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """[1 + down * across, 3, tile_size, tile_size]: the whole picture, then the tiles line by line."""
        side, resample = self.tile_size, Image.Resampling(self.resample)
        down, across = self.num_tiles(*image.size)
        width, height = _fitted_size(image.size, (across * side, down * side))
        canvas = Image.new("RGB", (across * side, down * side))
        fitted = image.resize((width, height), resample=resample)
        canvas.paste(fitted, ((canvas.width - width) // 2, (canvas.height - height) // 2))
        grid = np.asarray(canvas).reshape(down, side, across, side, 3).transpose(0, 2, 4, 1, 3)
        whole = np.asarray(image.resize((side, side), resample=resample)).transpose(2, 0, 1)
        return np.concatenate((whole[None], grid.reshape(-1, 3, side, side)))

    def whole_picture(self, *, is_padded: bool) -> SingleTile:
        """One tile of the whole picture: squeezed as the first one here is, or padded to a square with the mean."""
        return SingleTile(
            pad_colour=tuple(int(value * 255) for value in self.mean) if is_padded else None,
            shortest_edge=None,
            resize_to=self.size,
            crop_to=None,
            resample=self.resample,
            rescale_factor=self.rescale_factor,
            mean=self.mean,
            std=self.std,
        )

    def _best_resolution(self, width: int, height: int) -> Size:
        """The one that keeps most of the picture's own pixels; of those, the one with the least left over."""

        def merit(resolution: Size) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            num_kept = min(int(width * scale) * int(height * scale), width * height)
            return num_kept, num_kept - resolution[0] * resolution[1]

        return max(self.resolutions, key=merit)


def _fitted_size(image: Size, canvas: Size) -> Size:
    """(width, height) of the picture inside the canvas, one side filled; the other is rounded up, as the reference
    does."""
    (width, height), (canvas_width, canvas_height) = image, canvas
    across, down = canvas_width / width, canvas_height / height
    if across < down:
        return canvas_width, min(math.ceil(height * across), canvas_height)
    return min(math.ceil(width * down), canvas_width), canvas_height


def load_anyres(folder: Path, *, tile_size: int, resolutions: object) -> AnyRes:
    """Resolve the checkpoint's processor file; what it leaves open comes from the model's config.

    Raises UnsupportedCheckpoint if the processor does something that is not implemented.
    """
    raw = read_processor(folder)
    kind = processor_kind(raw, "LlavaNextImageProcessor")
    if kind not in ("LlavaNextImageProcessor", "LlavaOnevisionImageProcessor"):
        raise UnsupportedCheckpoint(
            f"image_processor_type {kind!r} is not supported; supported here: LLaVA-NeXT's and LLaVA-OneVision's"
        )
    side = _tile_size(raw, tile_size)
    return AnyRes(
        tile_size=side,
        resolutions=_resolutions(raw.get("image_grid_pinpoints") or resolutions, side),
        resample=read_resample(raw),
        **asdict(read_normalization(raw, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)),
    )


def _tile_size(raw: Mapping[str, Any], default: int) -> int:
    """Every size that the processor states must be this one: else it would scale each tile once more."""
    sizes: list[Any] = [raw.get("size") or default]
    if raw.get("do_center_crop", True) and raw.get("crop_size"):
        sizes.append(raw["crop_size"])
    sides = {side for size in sizes for side in (size.values() if isinstance(size, dict) else [size])}
    if len(sides) != 1 or not raw.get("do_resize", True):
        raise UnsupportedCheckpoint(
            f"the image processor must make square tiles of one size; this one has size={raw.get('size')}, "
            f"crop_size={raw.get('crop_size')}, do_resize={raw.get('do_resize', True)}"
        )
    return int(sides.pop())


def _resolutions(value: object, tile_size: int) -> tuple[Size, ...]:
    resolutions: list[Any] = value if isinstance(value, list) else []
    if not resolutions or any(len(r) != 2 or r[0] % tile_size or r[1] % tile_size for r in resolutions):
        raise UnsupportedCheckpoint(f"image_grid_pinpoints {value!r} must be resolutions in whole tiles of {tile_size}")
    return tuple((int(height), int(width)) for height, width in resolutions)
