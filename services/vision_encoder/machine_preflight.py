"""What this machine lets no encoder have, found out without torch: told before anything is downloaded or started."""

from __future__ import annotations

from services.vision_encoder.config import Quantization, VisionEncoderSettings
from shared.gpus import check_dtype, expected_device
from shared.settings_errors import SettingRefused


def check_machine(settings: VisionEncoderSettings) -> None:
    """Raises SettingRefused for a setting that cannot be had here, whatever the checkpoint."""
    device = expected_device(settings.device)
    if device is not None:
        check_dtype(settings.dtype, device)
        check_quantization(settings.quantization, device)


def check_quantization(quantization: Quantization, device: str) -> None:
    """Raises SettingRefused where the device has no kernels for it.

    device   "cpu" or "cuda"
    """
    if device != "cpu" and quantization == "int8":
        raise SettingRefused("quantization", "int8", "is for CPUs; on a GPU leave it at none")
