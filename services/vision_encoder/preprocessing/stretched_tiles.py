"""The GOT-OCR2 image processor, as InternVL uses it: a picture stretched over the grid of tiles that is most like it in
shape, row by row, and the whole of it as one more tile.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchedTiles:
    """
    tile_size               side of a tile
    min_tiles, max_tiles    of a grid, which the whole picture's tile comes on top of
    resample                Pillow's code
    rescale_factor, mean, std    the tower's input is (value * rescale_factor - mean) / std, per channel R, G, B
    """

    tile_size: int
    min_tiles: int
    max_tiles: int
    resample: int
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """(height, width) of a picture of one tile."""
        return self.tile_size, self.tile_size

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tiles: nearest the picture's shape; of such grids the last that it fills by half."""
        best, smallest_difference = (1, 1), math.inf
        for rows, columns in self._grids():
            difference = abs(width / height - columns / rows)
            fills_half = 2 * width * height > rows * columns * self.tile_size**2
            if difference < smallest_difference or (difference == smallest_difference and fills_half):
                best, smallest_difference = (rows, columns), difference
        return best

    def num_tiles(self, width: int, height: int) -> int:
        """A picture of one tile is its own whole."""
        num_in_grid = math.prod(self.grid(width, height))
        return num_in_grid + int(num_in_grid > 1)

    def num_working_pixels(self, width: int, height: int) -> int:
        return max(width * height, math.prod(self.grid(width, height)) * self.tile_size**2)

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """RGB picture -> [num_tiles, 3, tile_size, tile_size], the whole picture last."""
        rows, columns = self.grid(*image.size)
        tile, resample = self.tile_size, Image.Resampling(self.resample)
        stretched = np.asarray(image.resize((columns * tile, rows * tile), resample))
        tiles = stretched.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, np.asarray(image.resize((tile, tile), resample))[None]))
        return np.ascontiguousarray(tiles.transpose(0, 3, 1, 2))

    def _grids(self) -> list[tuple[int, int]]:
        """Small ones first, among equally large ones the higher."""
        sides = range(1, self.max_tiles + 1)
        grids = ((rows, columns) for columns in sides for rows in sides)
        return sorted((grid for grid in grids if self.min_tiles <= math.prod(grid) <= self.max_tiles), key=math.prod)


def load_stretched_tiles(folder: Path) -> StretchedTiles:
    """Raises UnsupportedCheckpoint if the processor does something that is not implemented.

    `crop_to_patches` in the file says nothing: InternVL's processor cuts whatever stands there.
    """
    raw = read_processor(folder)
    kind = processor_kind(raw, "GotOcr2ImageProcessor")
    size = raw.get("size") or {"height": 384, "width": 384}
    if kind != "GotOcr2ImageProcessor" or not raw.get("do_resize", True) or len(set(size.values())) != 1:
        raise UnsupportedCheckpoint(
            "the image processor must be a GotOcr2ImageProcessor that resizes to square tiles; it is a "
            f"{kind} with do_resize={raw.get('do_resize', True)}, size={size}"
        )
    return StretchedTiles(
        tile_size=int(size["height"]),
        min_tiles=int(raw.get("min_patches", 1)),
        max_tiles=int(raw.get("max_patches", 12)),
        resample=read_resample(raw),
        **asdict(read_normalization(raw, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)),
    )
