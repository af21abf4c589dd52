"""Pillow's resampling, for a window of the result: the same bytes as `resize(...).crop(...)`, without the rest.

A 499 x 1 picture whose short side is brought to 336 is 167 664 pixels long, of which a centre crop keeps 336. Pillow
would compute them all; here memory and time follow the window. Formula and rounding are those of Pillow's Resample.c.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8]

PRECISION_BITS: Final = 32 - 8 - 2


def _bilinear(x: Floats) -> Floats:
    return np.maximum(0.0, 1.0 - np.abs(x))


def _bicubic(x: Floats) -> Floats:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: Floats) -> Floats:
    return np.where((x >= -3.0) & (x < 3.0), np.sinc(x) * np.sinc(x / 3), 0.0)


# resample code of the checkpoint's processor -> (filter, support in source pixels)
FILTERS: Final[dict[int, tuple[Callable[[Floats], Floats], float]]] = {
    int(Image.Resampling.BILINEAR): (_bilinear, 1.0),
    int(Image.Resampling.BICUBIC): (_bicubic, 2.0),
    int(Image.Resampling.LANCZOS): (_lanczos, 3.0),
}


def resize_window(
    image: Image.Image, size: tuple[int, int], window: tuple[int, int, int, int], resample: int
) -> Pixels:
    """What `image.resize(size, resample)` would hold inside `window` = (left, top, right, bottom): [height, width, 3].

    The window must lie inside the resized picture.
    """
    left, top, right, bottom = window
    columns, column_weights = _taps(image.width, size[0], left, right, resample)
    rows, row_weights = _taps(image.height, size[1], top, bottom, resample)
    first_row = int(rows.min())
    source = np.asarray(image.crop((0, first_row, image.width, int(rows.max()) + 1)))
    # Pillow resamples rows, rounds to 8 bits, then resamples columns.
    across = _weigh(source.transpose(1, 0, 2), columns, column_weights)  # [width, source rows, 3]
    return _weigh(across.transpose(1, 0, 2), rows - first_row, row_weights)


def _taps(
    source_size: int, target_size: int, first: int, last: int, resample: int
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """For each target position in [first, last): which source positions count, and by how much.

    returns   source positions, fixed-point weights, each [last - first, num_taps]; a weight of 0 marks padding
    """
    weigh, support = FILTERS[resample]
    scale = source_size / target_size
    stretch = max(scale, 1.0)
    support *= stretch
    centre = (np.arange(first, last) + 0.5) * scale
    start = np.maximum((centre - support + 0.5).astype(np.intp), 0)
    end = np.minimum((centre + support + 0.5).astype(np.intp), source_size)
    positions = start[:, None] + np.arange(math.ceil(support) * 2 + 1)
    weights = weigh((positions - centre[:, None] + 0.5) * (1.0 / stretch))
    weights[positions >= end[:, None]] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    fixed = np.trunc(weights * (1 << PRECISION_BITS) + np.copysign(0.5, weights)).astype(np.int64)
    return np.minimum(positions, source_size - 1), fixed


def _weigh(source: NDArray[Any], positions: NDArray[np.intp], weights: NDArray[np.int64]) -> Pixels:
    """source [source positions, ...], positions and weights [targets, taps] -> [targets, ...]"""
    total = np.full((len(positions), *source.shape[1:]), 1 << (PRECISION_BITS - 1), dtype=np.int64)
    for tap in range(positions.shape[1]):
        total += source[positions[:, tap]].astype(np.int64) * weights[:, tap, None, None]
    pixels: Pixels = np.clip(total >> PRECISION_BITS, 0, 255).astype(np.uint8)
    return pixels
