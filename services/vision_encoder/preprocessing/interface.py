"""What a family's image preprocessing must offer: the same numbers as the checkpoint's own Hugging Face processor.

Resizing, cropping and tiling happen in decode workers and give 8-bit values; rescaling and normalising
(`families.features`) follow in the tower's thread, so that a quarter of the bytes travels between processes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image


class Preprocessing(Protocol):
    """One image processor, resolved: a frozen dataclass in which every field has its value, whatever file or default
    it came from. Numbers, strings, None and tuples of them only: it travels to the workers as JSON, and its fields
    are part of the fingerprint.

    rescale_factor, mean, std   the tower's input is (value * rescale_factor - mean) / std, per channel R, G, B
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def rescale_factor(self) -> float: ...

    @property
    def mean(self) -> tuple[float, ...]: ...

    @property
    def std(self) -> tuple[float, ...]: ...

    @property
    def size(self) -> tuple[int, ...]:
        """(height, width) of a picture that fits without scaling: what an encoder is warmed up with."""
        ...

    def num_working_pixels(self, width: int, height: int) -> int:
        """Pixels of the largest picture on the way, as far as the image's size decides it."""
        ...

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """RGB picture -> [num_tiles, 3, height, width]; tiles of one picture are of one size, pictures may differ."""
        ...
