"""PassGraphs: passes over tiles of one size as CUDA graphs: hundreds of launches become one.

A pass is padded to the next recorded number of tiles; rows of padding are dropped. All but `CudaCapture` runs on any
device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from shared.cuda_capture import Capture

SIZES: Final = (1, 2, 4, 8)


class PassGraphs:
    """run   pixels [num_tiles, 3, height, width] -> rows [num_tiles, num_rows, hidden_size], each tile by itself"""

    def __init__(self, run: Callable[[Tensor], Tensor], like: Tensor, capture: Capture) -> None:
        """like   one tile's pixels [3, height, width], for their shape, dtype and device"""
        self._run = run
        # Fixed memory; the largest first, so that the others find room in what it has left of the pool.
        self._inputs = {size: torch.zeros((size, *like.shape), dtype=like.dtype, device=like.device) for size in SIZES}
        self._replays = {size: capture.record(partial(run, self._inputs[size])) for size in reversed(SIZES)}

    def __call__(self, pixels: Tensor) -> Tensor:
        """As `run`; more tiles than were ever recorded at once run as they are."""
        num_tiles = len(pixels)
        if num_tiles > SIZES[-1]:
            return self._run(pixels)
        size = SIZES[bisect.bisect_left(SIZES, num_tiles)]
        self._inputs[size][:num_tiles].copy_(pixels)
        # A copy: the next replay overwrites its output.
        return self._replays[size]()[:num_tiles].clone()
