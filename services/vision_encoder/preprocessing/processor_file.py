"""A checkpoint's image processor file, and what all kinds of preprocessing read from it alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.resample import FILTERS

OPENAI_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
HALF: Final = (0.5, 0.5, 0.5)
BICUBIC: Final = int(Image.Resampling.BICUBIC)
BILINEAR: Final = int(Image.Resampling.BILINEAR)
LANCZOS: Final = int(Image.Resampling.LANCZOS)


@dataclass(frozen=True, slots=True)
class Normalization:
    """Fields of every `Preprocessing`."""

    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_processor(folder: Path) -> dict[str, Any]:
    """transformers 5 nests the image processor in processor_config.json; earlier: preprocessor_config.json."""
    nested = _read_json(folder / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else _read_json(folder / "preprocessor_config.json")


def processor_kind(raw: Mapping[str, Any], default: str) -> str:
    """The processor's class in transformers, whichever of its implementations was saved."""
    return str(raw.get("image_processor_type") or default).removesuffix("Fast").removesuffix("Pil")


def read_normalization(raw: Mapping[str, Any], mean: tuple[float, ...], std: tuple[float, ...]) -> Normalization:
    """mean, std   the processor's own defaults"""
    normalizes = raw.get("do_normalize", True)
    return Normalization(
        rescale_factor=float(raw.get("rescale_factor", 1 / 255)) if raw.get("do_rescale", True) else 1.0,
        mean=tuple(raw.get("image_mean") or mean) if normalizes else (0.0, 0.0, 0.0),
        std=tuple(raw.get("image_std") or std) if normalizes else (1.0, 1.0, 1.0),
    )


def read_resample(raw: Mapping[str, Any], default: int = BICUBIC) -> int:
    resample = int(raw.get("resample", default))
    if resample not in FILTERS:
        raise UnsupportedCheckpoint(f"the image processor's resample {resample} is not one of {sorted(FILTERS)}")
    return resample


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    parsed = json.loads(file.read_text())
    if not isinstance(parsed, dict):
        raise UnsupportedCheckpoint(f"{file} does not hold a JSON object")
    return parsed
