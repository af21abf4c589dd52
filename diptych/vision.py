"""Images to embeddings in this process: the vision encoder's parts without its service, for the offline `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from services.vision_encoder.admission import ImageLimits
from services.vision_encoder.config import VisionEncoderSettings
from services.vision_encoder.families.interface import PreparedImage
from services.vision_encoder.families.registry import load_family
from services.vision_encoder.image import decode
from services.vision_encoder.image_header import read_header
from shared.device import choose_device, choose_dtype
from shared.hashing import image_key
from shared.settings import load_settings
from shared.wire import ImageRef

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
        self._family = load_family(folder)
        self._family.prepare_weights(device, dtype)
        self._fingerprint = self._family.fingerprint(dtype, settings.background_colour)

    def reference(self, image: bytes) -> ImageRef:
        """From the header alone. Raises InvalidImage for what is no image or too large."""
        header = self._limits.admit(image, self._family.preprocessing)
        metadata = self._family.describe(*header.upright_size)
        return ImageRef.of(metadata, image_key=image_key(image, self._fingerprint))

    def prepare(self, image: bytes) -> PreparedImage:
        """The tower's 8-bit input. Raises InvalidImage if the bytes do not decode whole."""
        picture = decode(image, read_header(image), self._settings.background_colour)
        return PreparedImage(torch.from_numpy(self._family.preprocessing.apply(picture)), *picture.size)

    def encode(self, images: Sequence[PreparedImage]) -> list[torch.Tensor]:
        """One [num_tokens, hidden_size] tensor per image, in order."""
        indices_of_shape: dict[torch.Size, list[int]] = {}
        for index, image in enumerate(images):
            indices_of_shape.setdefault(image.pixels.shape, []).append(index)
        embeddings: dict[int, torch.Tensor] = {}
        for indices in indices_of_shape.values():
            for start in range(0, len(indices), MAX_BATCH_SIZE):
                batch = indices[start : start + MAX_BATCH_SIZE]
                rows = self._family.encode([images[index] for index in batch])
                embeddings.update(zip(batch, rows, strict=True))
        return [embeddings[index] for index in range(len(images))]
