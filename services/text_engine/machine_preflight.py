"""What this machine lets no engine have, found out without torch: told before anything is downloaded or started.

`check_machine` refuses only what is certain. What loads the model knows the device from torch itself, asks the other
checks again and has the last word.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec

from services.text_engine.config import LOGITS_PROCESSORS_GROUP, TextEngineSettings
from shared.gpus import check_dtype, expected_device, num_gpus
from shared.settings_errors import SettingRefused


def check_machine(settings: TextEngineSettings) -> None:
    """Raises SettingRefused for a setting that cannot be had here, whatever the checkpoint."""
    _check_logits_processors(settings.logits_processors)
    device = expected_device(settings.device)
    if device is not None:
        check_dtype(settings.dtype, device)
    if device == "cuda" and (found := num_gpus()) is not None:
        check_num_gpus(settings, found)
    check_kernels(settings, device)
    check_host_cache(settings, device)


def uses_triton(settings: TextEngineSettings, device: str | None) -> bool:
    """Whether Triton's kernels compute attention.

    device   "cpu" or "cuda"; here as below None: not known yet, so only what is true of each is said
    """
    return settings.attention_backend == "triton" or (settings.attention_backend == "auto" and device != "cpu")


def check_kernels(settings: TextEngineSettings, device: str | None) -> None:
    """Raises SettingRefused for a backend that the device has not, and for what the backend cannot do."""
    is_triton = settings.attention_backend == "triton"
    if is_triton and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SettingRefused("attention_backend", "triton", "needs a GPU (or, for tests, TRITON_INTERPRET=1); use auto")
    if settings.kv_cache_dtype == "fp8" and not uses_triton(settings, device):
        raise SettingRefused("kv_cache_dtype", "fp8", "needs the Triton kernels, and so a GPU; use int8")
    is_plain = settings.attention_backend in ("reference", "triton") or settings.enforce_eager
    if settings.batch_invariant and (device == "cuda" or is_plain or settings.tensor_parallel_size > 1):
        raise SettingRefused(
            "batch_invariant",
            True,
            "needs the compiled CPU kernels: device cpu, attention_backend auto or cpu, no enforce_eager and "
            "tensor_parallel_size 1",
        )


def check_num_gpus(settings: TextEngineSettings, found: int) -> None:
    """Raises SettingRefused where there are fewer GPUs than processes that each want one."""
    size = settings.tensor_parallel_size
    if size > found:
        raise SettingRefused("tensor_parallel_size", size, f"needs as many GPUs; this machine has {found}")


def check_host_cache(settings: TextEngineSettings, device: str | None) -> None:
    """Raises SettingRefused for copies of evicted blocks that would be of no use, or that no rank could keep."""
    if settings.host_cache_memory is None:
        return
    problem = None
    if device == "cpu":
        problem = "is for GPUs: on a CPU the KV cache is in host memory already; raise kv_cache_memory instead"
    elif settings.tensor_parallel_size > 1:
        problem = "works with one process only, tensor_parallel_size 1"
    if problem is not None:
        raise SettingRefused("host_cache_memory", settings.host_cache_memory, problem)


def _check_logits_processors(names: Iterable[str]) -> None:
    """That each can be found. What is in it is seen when it is imported, which may take as long as torch's import."""
    for name in names:
        module, colon, _ = name.partition(":")
        problem = None
        if colon and not _is_module(module):
            problem = (
                f"names the module {module!r}, which is not installed; set PYTHONPATH to its folder, or install it"
            )
        elif not colon and not entry_points(group=LOGITS_PROCESSORS_GROUP, name=name):
            problem = (
                f"is no entry point of any package in {LOGITS_PROCESSORS_GROUP}; "
                "give module:Class, or install the package"
            )
        if problem is not None:
            raise SettingRefused("logits_processors", name, problem)


def _is_module(name: str) -> bool:
    """Whether Python would find its package, in the current folder as well. What is in a package is known only once it
    is imported, as it may look for its modules elsewhere as well."""
    parts = name.split(".")
    if not all(parts) or parts[0] == "__main__":  # the engine's own, which is nobody else's
        return False
    try:
        return (find_spec(parts[0]) or PathFinder.find_spec(parts[0], [os.getcwd()])) is not None
    except ValueError:  # it is imported already and has no spec, so Python would not look for it
        return True
