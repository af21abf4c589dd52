"""One tile per picture: the CLIP, SigLIP and LLaVA image processors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.preprocessing.processor_file import (
    HALF,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    processor_kind,
    read_normalization,
    read_processor,
    read_resample,
)
from services.vision_encoder.resample import resize_window

# Above this, and above the source itself, a resized picture is computed only inside its crop.
MAX_INTERMEDIATE_PIXELS: Final = 16_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTile:
    """The whole picture, resized and cut to the tower's input.

    pad_colour      None: no padding; else the picture is first padded to a square with this colour
    shortest_edge   resize so that the shorter side has this length, or
    resize_to       (height, width) to resize to; one of the two is set
    crop_to         (height, width) to cut or zero-pad to, around the centre; None: no crop
    resample        Pillow's code: 1 Lanczos, 2 bilinear, 3 bicubic
    rescale_factor, mean, std    the tower's input is (value * rescale_factor - mean) / std, per channel R, G, B
    """

    pad_colour: tuple[int, ...] | None
    shortest_edge: int | None
    resize_to: tuple[int, ...] | None
    crop_to: tuple[int, ...] | None
    resample: int
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """(height, width) of every result."""
        size = self.crop_to or self.resize_to
        assert size is not None
        return size

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) after resizing. The longer side is truncated, as the reference does."""
        if self.shortest_edge is None:
            assert self.resize_to is not None
            return self.resize_to[1], self.resize_to[0]
        short, long = min(width, height), max(width, height)
        new_long = int(self.shortest_edge * long / short)
        return (self.shortest_edge, new_long) if width <= height else (new_long, self.shortest_edge)

    def num_working_pixels(self, width: int, height: int) -> int:
        """Pixels of the largest picture on the way; padding a sliver to a square is the one step that can explode."""
        return max(width, height) ** 2 if self.pad_colour is not None else width * height

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """RGB picture -> [1, 3, height, width], channels stated rather than guessed from the shape."""
        if self.pad_colour is not None:
            image = _pad_to_square(image, self.pad_colour)
        pixels = np.asarray(self._resize(image)) if self.crop_to is None else self._resize_and_crop(image, self.crop_to)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]

    def _resize(self, image: Image.Image) -> Image.Image:
        return image.resize(self.resized_size(*image.size), resample=Image.Resampling(self.resample))

    def _resize_and_crop(self, image: Image.Image, crop_to: tuple[int, ...]) -> NDArray[np.uint8]:
        width, height = self.resized_size(*image.size)
        crop_height, crop_width = crop_to
        left, top = (width - crop_width) // 2, (height - crop_height) // 2
        box = (left, top, left + crop_width, top + crop_height)
        inside = left >= 0 and top >= 0
        if inside and width * height > max(MAX_INTERMEDIATE_PIXELS, image.width * image.height):
            return resize_window(image, (width, height), box, self.resample)
        return np.asarray(self._resize(image).crop(box))  # outside the picture a crop is black, as in the reference


def load_single_tile(folder: Path, vision_config: Mapping[str, Any]) -> SingleTile:
    """Resolve the checkpoint's processor files; what they leave open comes from the model's `vision_config`.

    Raises UnsupportedCheckpoint if the processor does something that is not implemented.
    """
    raw = read_processor(folder)
    is_siglip = str(vision_config.get("model_type", "")).startswith("siglip")
    kind = processor_kind(raw, "SiglipImageProcessor" if is_siglip else "CLIPImageProcessor")
    if kind not in ("CLIPImageProcessor", "SiglipImageProcessor", "LlavaImageProcessor"):
        raise UnsupportedCheckpoint(
            f"image_processor_type {kind!r} is not supported; supported: CLIP, SigLIP and LLaVA image processors"
        )
    defaults = (HALF, HALF) if kind == "SiglipImageProcessor" else (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    mean = tuple(raw.get("image_mean") or defaults[0])
    pads = kind == "LlavaImageProcessor" and bool(raw.get("do_pad", False))
    shortest_edge, resize_to, crop_to = _sizes(raw, kind, int(vision_config["image_size"]))
    return SingleTile(
        pad_colour=tuple(int(value * 255) for value in mean) if pads else None,
        shortest_edge=shortest_edge,
        resize_to=resize_to,
        crop_to=crop_to,
        resample=read_resample(raw),
        **asdict(read_normalization(raw, *defaults)),
    )


def _sizes(
    raw: Mapping[str, Any], kind: str, image_size: int
) -> tuple[int | None, tuple[int, int] | None, tuple[int, int] | None]:
    """(shortest_edge, resize_to, crop_to). A plain number means the shortest edge as a size, a square as a crop."""
    square = {"height": image_size, "width": image_size}
    size = raw.get("size") or (square if kind == "SiglipImageProcessor" else image_size)
    size = {"shortest_edge": size} if isinstance(size, int) else size
    crop = raw.get("crop_size") or square
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    crop_to = (int(crop["height"]), int(crop["width"]))
    crops = raw.get("do_center_crop", kind != "SiglipImageProcessor")
    if raw.get("do_resize", True) and set(size) == {"height", "width"}:
        return None, (int(size["height"]), int(size["width"])), crop_to if crops else None
    if raw.get("do_resize", True) and set(size) == {"shortest_edge"} and crops:
        return int(size["shortest_edge"]), None, crop_to
    raise UnsupportedCheckpoint(
        "the image processor must resize to a height and a width, or to a shortest_edge followed by a centre crop; "
        f"this one has do_resize={raw.get('do_resize', True)}, do_center_crop={crops}, size={size}"
    )


def _pad_to_square(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    side = max(image.size)
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
