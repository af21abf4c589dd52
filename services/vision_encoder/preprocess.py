"""Pixels to what the tower takes, with the same numbers as the checkpoint's own Hugging Face image processor.

Resizing and cropping happen in decode workers and give 8-bit values; rescaling and normalising (families.py) follow in
the tower's thread, so that a quarter of the bytes travels between processes. This module imports neither torch nor
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.resample import FILTERS, resize_window

OPENAI_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
HALF: Final = (0.5, 0.5, 0.5)
BICUBIC: Final = int(Image.Resampling.BICUBIC)

# Above this, and above the source itself, a resized picture is computed only inside its crop.
MAX_INTERMEDIATE_PIXELS: Final = 16_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """One image processor, resolved: every field has its value, whatever file or default it came from.

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

    def to_json(self) -> str:
        """Canonical: equal preprocessing gives equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Preprocessing:
        fields: dict[str, Any] = json.loads(text)
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)

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


def load_preprocessing(folder: Path, vision_config: Mapping[str, Any]) -> Preprocessing:
    """Resolve the checkpoint's processor files; what they leave open comes from the model's `vision_config`.

    Raises UnsupportedCheckpoint if the processor does something that is not implemented.
    """
    raw = _read_processor(folder)
    is_siglip = str(vision_config.get("model_type", "")).startswith("siglip")
    kind = str(raw.get("image_processor_type") or ("SiglipImageProcessor" if is_siglip else "CLIPImageProcessor"))
    kind = kind.removesuffix("Fast").removesuffix("Pil")
    if kind not in ("CLIPImageProcessor", "SiglipImageProcessor", "LlavaImageProcessor"):
        raise UnsupportedCheckpoint(
            f"image_processor_type {kind!r} is not supported; supported: CLIP, SigLIP and LLaVA image processors"
        )
    mean = tuple(raw.get("image_mean") or (HALF if kind.startswith("Siglip") else OPENAI_CLIP_MEAN))
    std = tuple(raw.get("image_std") or (HALF if kind.startswith("Siglip") else OPENAI_CLIP_STD))
    pads = kind == "LlavaImageProcessor" and bool(raw.get("do_pad", False))
    normalizes = raw.get("do_normalize", True)
    shortest_edge, resize_to, crop_to = _sizes(raw, kind, int(vision_config["image_size"]))
    return Preprocessing(
        pad_colour=tuple(int(value * 255) for value in mean) if pads else None,
        shortest_edge=shortest_edge,
        resize_to=resize_to,
        crop_to=crop_to,
        resample=_resample(raw),
        rescale_factor=float(raw.get("rescale_factor", 1 / 255)) if raw.get("do_rescale", True) else 1.0,
        mean=mean if normalizes else (0.0, 0.0, 0.0),
        std=std if normalizes else (1.0, 1.0, 1.0),
    )


def _resample(raw: Mapping[str, Any]) -> int:
    resample = int(raw.get("resample", BICUBIC))
    if resample not in FILTERS:
        raise UnsupportedCheckpoint(f"the image processor's resample {resample} is not one of {sorted(FILTERS)}")
    return resample


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


def _read_processor(folder: Path) -> dict[str, Any]:
    """transformers 5 nests the image processor in processor_config.json; earlier: preprocessor_config.json."""
    nested = _read_json(folder / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else _read_json(folder / "preprocessor_config.json")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    parsed = json.loads(file.read_text())
    if not isinstance(parsed, dict):
        raise UnsupportedCheckpoint(f"{file} does not hold a JSON object")
    return parsed


def _pad_to_square(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    side = max(image.size)
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
