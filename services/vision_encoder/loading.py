"""From settings to a family that is ready to encode, and the name of everything its embeddings depend on."""

from __future__ import annotations

import torch

from services.vision_encoder.config import Quantization, VisionEncoderSettings
from services.vision_encoder.families.interface import Family
from services.vision_encoder.int8_linear import quantize_linears
from services.vision_encoder.machine_preflight import check_quantization
from shared.hashing import digest


def prepare_family(family: Family, quantization: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """`prepare_weights`, behind quantization if it is wanted. Raises ValueError where the device cannot do that.

    Only the tower's layers: the patch embedding and what follows the tower are little work, and what they lose nothing
    behind them makes good.
    """
    check_quantization(quantization, device.type)
    if quantization == "int8":
        quantize_linears(family.tower.get_submodule("layers"))
    family.prepare_weights(device, dtype)


def full_fingerprint(family: Family, dtype: torch.dtype, settings: VisionEncoderSettings) -> str:
    """The family's, with the settings that change embeddings. Those at their defaults leave no trace in it."""
    fingerprint = family.fingerprint(dtype, settings.background_colour)
    if settings.quantization != "none":
        fingerprint = digest(fingerprint.encode(), b"quantization", settings.quantization.encode()).hex()
    if settings.embedding_storage != "exact":
        fingerprint = digest(fingerprint.encode(), settings.embedding_storage.encode()).hex()
    return fingerprint
