"""The Idefics3 and SmolVLM image processors: a picture in square tiles, row by row, and the whole of it as one more."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.preprocessing.processor_file import (
    HALF,
    LANCZOS,
    processor_kind,
    read_normalization,
    read_processor,
    read_resample,
)

MAX_SIDE: Final = 4096  # the reference's own, whatever `longest_edge` says


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTiles:
    """A picture brought to `longest_edge`, stretched to whole tiles, and cut.

    tile_size   side of a tile
    splits      False: the whole picture as the only tile
    resample    Pillow's code
    rescale_factor, mean, std    the tower's input is (value * rescale_factor - mean) / std, per channel R, G, B
    """

    longest_edge: int
    tile_size: int
    splits: bool
    resample: int
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """(height, width) of the picture with the fewest tiles that its longest edge allows."""
        return self.tile_size, max(self.longest_edge, self.tile_size)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tiles; (0, 0) if the whole picture is the only one."""
        wide, high = self._tiled_size(width, height)
        if not self.splits or max(wide, high) <= self.tile_size:
            return 0, 0
        return high // self.tile_size, wide // self.tile_size

    def num_working_pixels(self, width: int, height: int) -> int:
        wide, high = self._tiled_size(width, height)
        return max(width * height, wide * high)

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """RGB picture -> [num_tiles, 3, tile_size, tile_size], the whole picture last."""
        rows, columns = self.grid(*image.size)
        tile, resample = self.tile_size, Image.Resampling(self.resample)
        picture = image.resize(self._fitted_size(*image.size), resample)
        if self.splits:
            picture = picture.resize(self._tiled_size(*image.size), resample)
        whole = np.asarray(picture.resize((tile, tile), resample) if rows or not self.splits else picture)[None]
        cut = np.asarray(picture)[: rows * tile, : columns * tile].reshape(rows, tile, columns, tile, 3)
        tiles = np.concatenate((cut.swapaxes(1, 2).reshape(-1, tile, tile, 3), whole))
        return np.ascontiguousarray(tiles.transpose(0, 3, 1, 2))

    def _fitted_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) with the longest edge as wanted, the other even, as the reference rounds."""
        ratio = width / height
        if width >= height:
            width, height = self.longest_edge, _even(int(self.longest_edge / ratio))
        else:
            width, height = _even(int(self.longest_edge * ratio)), self.longest_edge
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > MAX_SIDE:
            width, height = MAX_SIDE, int(MAX_SIDE / ratio)
        elif height > width and height > MAX_SIDE:
            width, height = int(MAX_SIDE * ratio), MAX_SIDE
        return max(width, 1), max(height, 1)

    def _tiled_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in whole tiles."""
        width, height = self._fitted_size(width, height)
        ratio = width / height
        if width >= height:
            width = self._whole_tiles(width)
            return width, self._whole_tiles(int(width / ratio))
        height = self._whole_tiles(height)
        return self._whole_tiles(int(height * ratio)), height

    def _whole_tiles(self, side: int) -> int:
        return max(1, math.ceil(side / self.tile_size)) * self.tile_size


def load_split_tiles(folder: Path) -> SplitTiles:
    """Raises UnsupportedCheckpoint if the processor does something that is not implemented."""
    raw = read_processor(folder)
    kind = processor_kind(raw, "Idefics3ImageProcessor")
    if kind not in ("Idefics3ImageProcessor", "SmolVLMImageProcessor"):
        raise UnsupportedCheckpoint(f"image_processor_type {kind!r} is not supported; supported: Idefics3 and SmolVLM")
    size = raw.get("size") or {"longest_edge": 4 * 364}
    if not raw.get("do_resize", True) or set(size) != {"longest_edge"}:
        raise UnsupportedCheckpoint(f"the image processor must resize to a longest_edge; this one has size={size}")
    return SplitTiles(
        longest_edge=int(size["longest_edge"]),
        tile_size=int((raw.get("max_image_size") or {"longest_edge": 364})["longest_edge"]),
        splits=bool(raw.get("do_image_splitting", True)),
        resample=read_resample(raw, default=LANCZOS),
        **asdict(read_normalization(raw, HALF, HALF)),
    )


def _even(side: int) -> int:
    return side + side % 2
