"""Rotary positions of three coordinates (Qwen-VL): text counts in all of them at once, an image's rows are cells.

A pure function of where a sequence's images are, so that chunks, prefix cache and preemption cannot change it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from services.text_engine.core.sequence import ImageSpan


def grid_positions(images: Iterable[ImageSpan], start: int, end: int) -> NDArray[np.int64]:
    """[3, end - start]: frame, line and column of the tokens `start : end` of a sequence.

    An image begins where the text before it ends, and takes of the count no more than its longest side.
    """
    positions = np.tile(np.arange(start, end, dtype=np.int64), (3, 1))
    num_saved = 0  # counts that the images so far did not take
    for span in images:
        if span.start >= end:
            break
        if span.grid is None:
            continue
        first, last = max(start, span.start), min(end, span.end)
        if first < last:
            rows = span.rows(first, last)
            cells = np.unravel_index(np.arange(rows.start, rows.stop), span.grid)
            positions[:, first - start : last - start] = np.stack(cells) + span.start - num_saved
        saved = span.num_tokens - max(span.grid)
        positions[:, max(span.end - start, 0) :] -= saved
        num_saved += saved
    return positions
