"""What this machine lets no engine have, found out without torch: told before anything is downloaded or started.

Only what is certain is refused here. Whoever loads the model asks torch itself, and has the last word.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Final

from services.text_engine.config import TextEngineSettings
from shared.gpus import DeviceType, check_dtype, expected_device, num_gpus
from shared.settings_errors import SettingRefused

ENTRY_POINTS: Final = "diptych.logits_processors"


def check_machine(settings: TextEngineSettings) -> None:
    """Raises SettingRefused for a setting that cannot be had here, whatever the checkpoint."""
    _check_logits_processors(settings.logits_processors)
    device = expected_device(settings.device)
    if device is not None:
        check_dtype(settings.dtype, device)
        _check_kernels(settings, device)
        _check_processes(settings, device)
    if settings.batch_invariant:
        _check_can_be_invariant(settings, device)


def _check_kernels(settings: TextEngineSettings, device: DeviceType) -> None:
    wants_triton = settings.attention_backend == "triton"
    if wants_triton and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SettingRefused("attention_backend", "triton", "needs a GPU (or, for tests, TRITON_INTERPRET=1); use auto")
    has_triton = wants_triton or (settings.attention_backend == "auto" and device == "cuda")
    if settings.kv_cache_dtype == "fp8" and not has_triton:
        raise SettingRefused("kv_cache_dtype", "fp8", "needs the Triton kernels, and so a GPU; use int8")
    if settings.host_cache_memory is not None and device == "cpu":
        raise SettingRefused(
            "host_cache_memory",
            settings.host_cache_memory,
            "is for GPUs: on a CPU the KV cache is in host memory already; raise kv_cache_memory instead",
        )


def _check_processes(settings: TextEngineSettings, device: DeviceType) -> None:
    size, found = settings.tensor_parallel_size, num_gpus()
    if device == "cuda" and found is not None and size > found:
        raise SettingRefused("tensor_parallel_size", size, f"needs as many GPUs; this machine has {found}")
    if settings.host_cache_memory is not None and size > 1:
        raise SettingRefused(
            "host_cache_memory", settings.host_cache_memory, "works with one process only, tensor_parallel_size 1"
        )


def _check_can_be_invariant(settings: TextEngineSettings, device: DeviceType | None) -> None:
    is_plain = settings.attention_backend in ("reference", "triton") or settings.enforce_eager
    if device == "cuda" or is_plain or settings.tensor_parallel_size > 1:
        raise SettingRefused(
            "batch_invariant",
            True,
            "needs the compiled CPU kernels: device cpu, attention_backend auto or cpu, no enforce_eager and "
            "tensor_parallel_size 1",
        )


def _check_logits_processors(names: Iterable[str]) -> None:
    """That each can be found. What is in it is seen when it is imported, which may take as long as torch's import."""
    for name in names:
        module, colon, _ = name.partition(":")
        problem = None
        if colon and not _is_module(module):
            problem = (
                f"names the module {module!r}, which is not installed; set PYTHONPATH to its folder, or install it"
            )
        elif not colon and not entry_points(group=ENTRY_POINTS, name=name):
            problem = f"is no entry point of any package in {ENTRY_POINTS}; give module:Class, or install the package"
        if problem is not None:
            raise SettingRefused("logits_processors", name, problem)


def _is_module(name: str) -> bool:
    """Whether Python would find it, in the current folder as well; nothing is imported, not even its parents."""
    top, *inner = name.split(".")
    if not all(part.isidentifier() for part in (top, *inner)):
        return False
    spec = find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec is not None
