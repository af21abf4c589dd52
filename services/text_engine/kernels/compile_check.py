"""Compiles every Triton kernel for every supported GPU on a machine that has none, and checks what came out.

`python -m services.text_engine.kernels.compile_check [--arch 80 90 100] [--only NAME] [--json]` prints registers,
shared memory, spills and the instructions found for every configuration that a launcher can choose, and fails on a
violation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Each exports compile_cases() -> list[CompileCase]. Imported late: they need Triton, the rest of the engine does not.
KERNEL_MODULES = ("rms_norm", "silu_mul", "merge_rows", "quant_matmul", "sample", "store_kv", "paged_attention")
# Shared memory that one block may have.
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
INSTRUCTIONS = (
    "mma.sync",
    "wgmma.mma_async",
    "tcgen05.mma",
    "cp.async",
    "ld.global.v4.b32",
    "st.global.v4.b32",
    "ldmatrix",
)


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One configuration of one kernel.

    kernel           the @triton.jit function
    signature        argument -> "*bf16", "i32", ...; "constexpr" for those in `constexprs`
    is_hot           on the decode path: no register may spill
    ptx_contains     each must occur in the PTX; "a|b" means either
    max_registers    a thread's, where the launcher limits them
    divisible_by_16  the pointers and integers that are multiples of 16 at run time, as the launcher's would be
    archs            the chips that the launcher chooses it on
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    is_hot: bool = True
    ptx_contains: tuple[str, ...] = ()
    divisible_by_16: frozenset[str] = frozenset()
    max_registers: int | None = None
    archs: tuple[int, ...] = (80, 90, 100)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a case became on one chip. `stack_bytes` holds spilled registers: our kernels have no local arrays."""

    name: str
    arch: int
    num_warps: int
    num_registers: int
    shared_bytes: int
    stack_bytes: int
    instructions: tuple[str, ...]
    violations: tuple[str, ...]


def collect_cases(modules: Iterable[str] = KERNEL_MODULES) -> list[CompileCase]:
    package = __name__.rpartition(".")[0] if __name__ != "__main__" else "services.text_engine.kernels"
    return [case for name in modules for case in importlib.import_module(f"{package}.{name}").compile_cases()]


def compile_case(case: CompileCase, arch: int) -> Compiled:
    import triton  # late, and not at all under the interpreter
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    assert list(case.signature) == names, f"{case.name}: signature {list(case.signature)} of a kernel taking {names}"
    assert case.divisible_by_16 <= set(names), f"{case.name}: {case.divisible_by_16 - set(names)} are no arguments"
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16}
    source = ASTSource(case.kernel, case.signature, case.constexprs, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.max_registers}
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack_bytes = _resource_usage(binary.asm["cubin"])
    ptx, shared_bytes = binary.asm["ptx"], binary.metadata.shared
    return Compiled(
        name=case.name,
        arch=arch,
        num_warps=case.num_warps,
        num_registers=registers,
        shared_bytes=shared_bytes,
        stack_bytes=stack_bytes,
        instructions=tuple(name for name in INSTRUCTIONS if contains(ptx, name)),
        violations=violations(case, arch=arch, ptx=ptx, shared_bytes=shared_bytes, stack_bytes=stack_bytes),
    )


def violations(case: CompileCase, *, arch: int, ptx: str, shared_bytes: int, stack_bytes: int) -> tuple[str, ...]:
    found = []
    if shared_bytes > MAX_SHARED_BYTES[arch]:
        found.append(f"{shared_bytes} bytes of shared memory, the chip has {MAX_SHARED_BYTES[arch]}")
    if case.is_hot and stack_bytes:
        found.append(f"{stack_bytes} bytes of registers spilled on the decode path")
    missing = [wanted for wanted in case.ptx_contains if not any(contains(ptx, name) for name in wanted.split("|"))]
    return (*found, *(f"no {wanted} in the PTX" for wanted in missing))


def contains(ptx: str, instruction: str) -> bool:
    """Modifiers may stand between an instruction's parts: "ld.global.v4.b32" finds ld.global.L1::evict_last.v4.b32."""
    first, *rest = instruction.split(".")
    pattern = r"\b" + re.escape(first) + "".join(rf"\.(?:[\w:]+\.)*?{re.escape(part)}\b" for part in rest)
    return re.search(pattern, ptx) is not None


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of its stack), read by the cuobjdump that Triton ships."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - no shell
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def format_table(results: list[Compiled]) -> str:
    width = max((len(result.name) for result in results), default=0)
    head = f"{'kernel':{width}}  {'arch':>6} {'warps':>5} {'regs':>5} {'shared':>8} {'spilled':>8}  instructions"
    lines = [
        f"{r.name:{width}}  {'sm_' + str(r.arch):>6} {r.num_warps:5} {r.num_registers:5} {r.shared_bytes:8} "
        f"{r.stack_bytes:8}  {', '.join(r.instructions)}"
        for r in results
    ]
    wrong = [f"FAILED {r.name} on sm_{r.arch}: {violation}" for r in results for violation in r.violations]
    return "\n".join([head, *lines, "", *(wrong or [f"{len(results)} compiled, all within their limits."])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(MAX_SHARED_BYTES), default=[80, 90, 100])
    parser.add_argument("--only", metavar="NAME", help="only cases whose name contains this")
    parser.add_argument("--module", nargs="+", choices=KERNEL_MODULES, default=KERNEL_MODULES)
    parser.add_argument("--json", action="store_true", help="one JSON object per case and chip")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # it would turn the kernels into Python
    cases = [case for case in collect_cases(options.module) if not options.only or options.only in case.name]
    if not cases:
        parser.error(f"no case is named like {options.only}")
    results = [compile_case(case, arch) for case in cases for arch in options.arch if arch in case.archs]
    if options.json:
        print("\n".join(json.dumps(asdict(result)) for result in results))  # noqa: T201
    else:
        print(format_table(results))  # noqa: T201
    return 1 if any(result.violations for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
