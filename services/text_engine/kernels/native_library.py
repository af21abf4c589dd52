"""Loads the compiled CPU kernels, into the OpenMP runtime that torch already runs on."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from services.text_engine.kernels.native_build import InstructionSet, find_library, instruction_sets
from shared.log import get_logger

# GCC's own, and two that offer its entry points besides theirs.
OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")
# `ElementType` in native/simd.h: what is computed in, and what weights, keys and values may be stored in.
ELEMENT_TYPES = {torch.bfloat16: 0, torch.float32: 1}
WEIGHT_TYPES = {**ELEMENT_TYPES, torch.float16: 2}
CACHE_TYPES = {**ELEMENT_TYPES, torch.uint8: 3}

log = get_logger(__name__)


class NativeLibrary:
    """The entry points of one compiled library with their C types declared; native/*.cpp says what each does.

    Calls release the GIL. Every call names its number of threads: OpenMP's own setting belongs to torch.
    """

    def __init__(self, path: Path, instruction_set: str) -> None:
        self.instruction_set = instruction_set
        _publish_torch_openmp()
        library = ctypes.CDLL(str(path))

        def function(name: str, *arguments: type, returns: type | None = None) -> ctypes._NamedFuncPointer:
            entry = getattr(library, f"diptych_{name}")
            entry.argtypes, entry.restype = arguments, returns
            return entry  # type: ignore[no-any-return]

        self.attend = function("attend", c_int32, c_int32, c_void_p)
        self.rms_norm = function("rms_norm", c_int32, *[c_void_p] * 3, *[c_int64] * 3, c_float, c_int32)
        self.add_rms_norm = function("add_rms_norm", c_int32, *[c_void_p] * 3, *[c_int64] * 2, c_float, c_int32)
        self.rotary = function("rotary", c_int32, *[c_void_p] * 3, c_int64, c_int32, c_int32, *[c_int64] * 5, c_int32)
        self.packed_outputs = function("packed_outputs", c_int64, returns=c_int64)
        self.pack_weight = function("pack_weight", *[c_int32] * 2, *[c_void_p] * 2, *[c_int64] * 2, c_int32)
        self.matmul = function("matmul", *[c_int32] * 2, *[c_void_p] * 4, *[c_int64] * 4, c_int32)
        self.quantized_panel = function("quantized_panel", returns=c_int64)
        self.quantized_matmul = function("quantized_matmul", *[c_int32] * 2, *[c_void_p] * 7, *[c_int64] * 6, c_int32)
        self.silu_mul = function("silu_mul", c_int32, *[c_void_p] * 2, *[c_int64] * 3, c_int32)
        self.gelu_tanh_mul = function("gelu_tanh_mul", c_int32, *[c_void_p] * 2, *[c_int64] * 3, c_int32)


def load_native() -> NativeLibrary | None:
    """The best compiled library this CPU can run; None, with one log line saying why, where there is none."""
    for target in supported_instruction_sets():
        path = find_library(target)
        if path is None:
            continue
        try:
            library = NativeLibrary(path, target.name)
        except OSError as error:
            log.warning("native CPU kernels not loaded: plain PyTorch instead, several times slower", error=str(error))
            return None
        log.info("native CPU kernels loaded", instruction_set=target.name)
        return library
    log.warning(
        "native CPU kernels not found: plain PyTorch instead, several times slower",
        remedy="install g++, then run: python -m services.text_engine.kernels.native_build",
    )
    return None


def supported_instruction_sets() -> list[InstructionSet]:
    """What this CPU can run, best first."""
    flags = cpu_flags()
    return [target for target in instruction_sets() if target.cpu_flags <= flags]


def cpu_flags() -> frozenset[str]:
    """The first processor's feature list: "flags" on x86, "Features" on Arm."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    names_and_values = (line.partition(":") for line in lines)
    found = (value.split() for name, _, value in names_and_values if name.strip() in ("flags", "Features"))
    return frozenset(next(found, []))


def _publish_torch_openmp() -> None:
    """Make the OpenMP runtime in this process visible to the library, which is linked to none: threads are torch's.

    Python loads torch's libraries privately; opening one again with RTLD_GLOBAL publishes its symbols. Without any, the
    library fails to load with an OSError naming the missing symbol.
    """
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {fields[5] for fields in mapped if len(fields) == 6}
    for path in sorted(paths):
        if Path(path).name.startswith(OPENMP_RUNTIMES):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return
