"""Every instruction set's library that this machine can compile and run, for tests to be parametrized with."""

from __future__ import annotations

from functools import cache

import pytest

from services.text_engine.kernels.native_build import CompilerMissing, build
from services.text_engine.kernels.native_library import NativeLibrary, supported_instruction_sets

INSTRUCTION_SETS = {target.name: target for target in supported_instruction_sets()}


@cache
def native_library(instruction_set: str) -> NativeLibrary:
    try:
        return NativeLibrary(build(INSTRUCTION_SETS[instruction_set]), instruction_set)
    except CompilerMissing as error:
        pytest.skip(str(error))
