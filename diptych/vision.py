"""Images to embeddings in this process: the vision encoder's parts without its service, for the offline `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from services.vision_encoder.admission import ImageLimits
from services.vision_encoder.config import VisionEncoderSettings
from services.vision_encoder.families.interface import Family, PreparedImage
from services.vision_encoder.families.registry import load_family
from services.vision_encoder.image import decode
from services.vision_encoder.loading import full_fingerprint, prepare_family
from shared.device import choose_device, choose_dtype
from shared.hashing import image_key
from shared.image_header import read_header
from shared.settings import load_settings
from shared.wire.images import Detail, ImageRef

MAX_BATCH_SIZE = 8


class LocalEncoder:
    """One checkpoint's vision half. Embeddings are kept by the caller."""

    def __init__(self, folder: Path) -> None:
        self._settings = settings = load_settings(VisionEncoderSettings, model=folder)
        self._limits = ImageLimits(
            max_bytes=settings.max_image_bytes,
            max_pixels=settings.max_image_pixels,
            max_aspect_ratio=settings.max_aspect_ratio,
        )
        device = choose_device(settings.device)
        dtype = choose_dtype(settings.dtype, device)
        family = load_family(folder)
        prepare_family(family, settings.quantization, device, dtype)
        self._families: dict[Detail, Family] = {"high": family, "low": family.low_detail or family}
        self._fingerprints = {
            detail: full_fingerprint(each, dtype, settings) for detail, each in self._families.items()
        }

    def detail(self, num_images: int) -> Detail:
        """How the pictures of a conversation of so many are read."""
        return "low" if num_images > 1 and self._families["high"].reads_several_in_low_detail else "high"

    def reference(self, image: bytes, detail: Detail) -> ImageRef:
        """From the header alone. Raises InvalidImage for what is no image or too large."""
        family = self._families[detail]
        header = self._limits.admit(image, family.preprocessing)
        metadata = family.describe(*header.upright_size)
        return ImageRef.of(metadata, image_key=image_key(image, self._fingerprints[detail]))

    def prepare(self, image: bytes, detail: Detail) -> PreparedImage:
        """The tower's 8-bit input. Raises InvalidImage if the bytes do not decode whole."""
        picture = decode(image, read_header(image), self._settings.background_colour)
        pixels = torch.from_numpy(self._families[detail].preprocessing.apply(picture))
        return PreparedImage(pixels, *picture.size, detail)

    def encode(self, images: Sequence[PreparedImage]) -> list[torch.Tensor]:
        """One [num_tokens, num_row_parts * hidden_size] tensor per image, in order."""
        indices_of_shape: dict[tuple[Detail, torch.Size], list[int]] = {}
        for index, image in enumerate(images):
            indices_of_shape.setdefault((image.detail, image.pixels.shape), []).append(index)
        embeddings: dict[int, torch.Tensor] = {}
        for (detail, _shape), indices in indices_of_shape.items():
            for start in range(0, len(indices), MAX_BATCH_SIZE):
                batch = indices[start : start + MAX_BATCH_SIZE]
                rows = self._families[detail].encode([images[index] for index in batch])
                embeddings.update(zip(batch, rows, strict=True))
        return [embeddings[index] for index in range(len(images))]
