"""Every instruction set's library that this machine can compile and run, for tests to be parametrized with."""

from __future__ import annotations

import fcntl
import tempfile
from functools import cache
from pathlib import Path

import pytest

from services.text_engine.kernels.native_build import CompilerMissing, InstructionSet, build
from services.text_engine.kernels.native_library import NativeLibrary, supported_instruction_sets

# As many lanes as AVX-512 has, in plain code: where everything lies is tested on CPUs that lack it.
SIXTEEN_LANES = InstructionSet("16lanes", ("-march=x86-64-v2", "-DDIPTYCH_WIDTH=16", "-O1", "-Wno-psabi"), frozenset())


def _testable() -> dict[str, InstructionSet]:
    targets = {target.name: target for target in supported_instruction_sets()}
    if "sse4" in targets and "avx512bf16" not in targets:
        targets[SIXTEEN_LANES.name] = SIXTEEN_LANES
    return targets


INSTRUCTION_SETS = _testable()


@cache
def native_library(instruction_set: str) -> NativeLibrary:
    lock = Path(tempfile.gettempdir()) / "diptych-tests-native.lock"
    try:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # workers need not all compile the same
            return NativeLibrary(build(INSTRUCTION_SETS[instruction_set]), instruction_set)
    except CompilerMissing as error:
        pytest.skip(str(error))
