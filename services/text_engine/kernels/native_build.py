"""Compiles the native CPU kernels: `python -m services.text_engine.kernels.native_build`, once, at set-up.

The same sources are compiled once per instruction set of this architecture and `native_library` picks one when the
engine starts. A library's file name carries the hash of its sources and flags, so a stale one is never loaded and an
up-to-date one is never rebuilt.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shared.log import get_logger

SOURCE_DIR = Path(__file__).parent / "native"
# -ffp-contract=off: the order and rounding of every operation is the source's, so that a token's result is the same
# in every unrolled variant of a loop. -fno-strict-aliasing: tensors of any type are read as 32-bit lanes.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fvisibility=hidden",
)
COMPILE_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What to compile for, and the flags in /proc/cpuinfo that a CPU must show to run the result."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]


# Best first.
INSTRUCTION_SETS: dict[str, tuple[InstructionSet, ...]] = {
    "x86_64": (
        InstructionSet(
            "avx512bf16",
            ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
            # Every CPU with the first of the last two has the second.
            frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}),
        ),
        InstructionSet("avx2", ("-march=x86-64-v3",), frozenset({"avx2", "fma", "bmi2", "f16c", "movbe"})),
        # Little used, but it is as wide as Arm's vectors, so that their path is tested here too.
        InstructionSet("sse4", ("-march=x86-64-v2",), frozenset({"sse4_2", "ssse3", "popcnt"})),
    ),
    "aarch64": (InstructionSet("neon", (), frozenset({"asimd"})),),
}


log = get_logger(__name__)


class CompilerMissing(RuntimeError):
    """No C++ compiler is installed."""


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Those this architecture's compiler can target, best first."""
    return INSTRUCTION_SETS.get(platform.machine(), ())


def library_name(target: InstructionSet) -> str:
    digest = hashlib.sha256()
    for part in (*FLAGS, *target.compiler_flags, *(path.read_text() for path in _sources("*.h", "*.cpp"))):
        digest.update(len(part).to_bytes(8, "big") + part.encode())
    return f"diptych-{target.name}-{digest.hexdigest()[:16]}.so"


def library_dirs() -> tuple[Path, Path]:
    """Where libraries are kept: beside the sources, or where an installation is read-only in the user's cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return SOURCE_DIR, Path(cache_home) / "diptych" / "native"


def find_library(target: InstructionSet) -> Path | None:
    """The compiled library of exactly these sources, if there is one."""
    candidates = (directory / library_name(target) for directory in library_dirs())
    return next((path for path in candidates if path.exists()), None)


def build(target: InstructionSet) -> Path:
    """The library for `target`, compiled now unless it is up to date."""
    library = find_library(target)
    if library is not None:
        return library
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CompilerMissing("no C++ compiler found: install g++ (Debian, Ubuntu: apt install g++) or set CXX")
    directory = _writable_dir()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        objects = []
        for source in _sources("*.cpp"):
            objects.append(Path(scratch) / f"{source.stem}.o")
            _run(compiler, *FLAGS, *target.compiler_flags, "-c", str(source), "-o", str(objects[-1]))
        linked = Path(scratch) / "linked.so"
        # Linked without -fopenmp: the OpenMP symbols come from the runtime torch has loaded, not from a second one.
        _run(compiler, "-shared", *map(str, objects), "-o", str(linked))
        for stale in directory.glob(f"diptych-{target.name}-*.so"):
            stale.unlink()
        return linked.rename(directory / library_name(target))


def _sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in SOURCE_DIR.glob(pattern))


def _writable_dir() -> Path:
    beside_sources, cache = library_dirs()
    if os.access(beside_sources, os.W_OK):
        return beside_sources
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)  # noqa: S603 - no shell
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


def main() -> None:
    if not instruction_sets():
        log.warning("no native CPU kernels for this architecture", machine=platform.machine())
    with ThreadPoolExecutor() as pool:
        for path in pool.map(build, instruction_sets()):
            log.info("native CPU kernels ready", library=path.name)


if __name__ == "__main__":
    main()
