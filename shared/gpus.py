"""How many GPUs torch would find, asked of the driver in milliseconds: torch itself takes seconds to be imported.

What is said of a device or dtype that cannot be had is here, too, so that it can be said before torch is there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Final, Literal

from shared.settings_errors import SettingRefused

DRIVER_DEVICES: Final = ("/dev/nvidiactl", "/dev/dxg")  # Linux's own, and that of Windows' subsystem for it
DTYPE_NAMES: Final = ("bfloat16", "float16", "float32")
DeviceType = Literal["cpu", "cuda"]


@cache
def num_gpus() -> int | None:
    """0: torch will find none. None: only torch can tell: it is built for something else than CUDA, or the driver does
    not answer here."""
    builds = _torch_builds()
    if builds & {"hip", "rocm", "xpu"}:
        return None
    return _num_devices_of_the_driver() if "cuda" in builds else 0


def expected_device(requested: str) -> DeviceType | None:
    """What torch will choose for a setting `device`, if it starts at all. Raises SettingRefused.

    None: only torch can tell, which may be unable to use a GPU that the driver has.
    """
    if requested == "cpu":
        return "cpu"
    found = num_gpus()
    check_device(requested, has_gpu=found != 0)
    if requested == "cuda":
        return "cuda"
    return "cpu" if found == 0 else None


def check_device(requested: str, *, has_gpu: bool) -> None:
    """Raises SettingRefused for a GPU that is not there."""
    if requested == "cuda" and not has_gpu:
        raise SettingRefused("device", requested, "cannot be used: torch sees no CUDA device; use cpu or auto")


def check_dtype(requested: str, device: str) -> None:
    """Raises SettingRefused for what is no dtype, or none of the device's.

    device   "cpu" or "cuda"
    """
    if requested not in ("auto", *DTYPE_NAMES):
        raise SettingRefused("dtype", requested, f"is not one of auto, {', '.join(DTYPE_NAMES)}")
    if requested == "float16" and device == "cpu":
        raise SettingRefused("dtype", requested, "is for GPUs; on a CPU use bfloat16, float32 or auto")


def _torch_builds() -> set[str]:
    """What the installed torch was built for, e.g. {"cuda"}; empty for CPUs only, and where there is no torch."""
    spec = importlib.util.find_spec("torch")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders if (file := Path(folder) / "version.py").is_file()]
    return {name for file in files for name in re.findall(r"^(\w+)\b.* = '", file.read_text(), re.MULTILINE)}


def _num_devices_of_the_driver() -> int | None:
    """Those that CUDA_VISIBLE_DEVICES leaves. None: there is a driver, and its library cannot be opened here."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None if any(Path(device).exists() for device in DRIVER_DEVICES) else 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
