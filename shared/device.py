"""Which device and number format a model computes in; both panels choose by the same rule. Imports torch."""

from __future__ import annotations

import platform

import torch

from shared.gpus import check_device, check_dtype
from shared.torch_io import DTYPES


def choose_device(requested: str) -> torch.device:
    """The device called `requested`, or the best there is for "auto". Raises ValueError for a GPU that is not there."""
    has_cuda = torch.cuda.is_available()
    check_device(requested, has_gpu=has_cuda)
    return torch.device(("cuda" if has_cuda else "cpu") if requested == "auto" else requested)


def choose_dtype(requested: str, device: torch.device) -> torch.dtype:
    """The dtype called `requested`, or the device's best for "auto": bf16 where it has bf16 arithmetic.

    Without it fp32 on a CPU (bf16 would be emulated, several times slower) and fp16 on a GPU. Raises ValueError.
    """
    check_dtype(requested, device.type)
    if requested == "auto":
        if has_bfloat16(device):
            return torch.bfloat16
        return torch.float32 if device.type == "cpu" else torch.float16
    return DTYPES[requested]


def has_bfloat16(device: torch.device) -> bool:
    """Whether `device` multiplies bf16 in hardware, not merely in a library that emulates it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # built without oneDNN
        return False
    if platform.machine() in ("x86_64", "AMD64"):
        # oneDNN calls bf16 supported on any AVX-512 machine, where it may be emulated.
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
