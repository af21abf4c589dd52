"""Every configuration of every kernel compiles for every GPU we serve, within its limits, on a machine without one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.text_engine.kernels import compile_check

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Another process: in this one the kernels are Python, for the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "services.text_engine.kernels.compile_check", *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("module", compile_check.KERNEL_MODULES)
def test_every_case_compiles_within_its_limits(module: str, arch: int):
    checked = run_check("--json", "--module", module, "--arch", str(arch))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    results = [json.loads(line) for line in checked.stdout.splitlines()]
    assert results
    assert {result["arch"] for result in results} == {arch}
    assert all(result["num_registers"] > 0 for result in results)


def test_the_command_prints_a_table():
    printed = run_check("--module", "silu_mul", "--arch", "90").stdout.splitlines()
    assert printed[0].split()[:6] == ["kernel", "arch", "warps", "regs", "shared", "spilled"]
    assert any(line.split()[:2] == ["silu_mul", "sm_90"] for line in printed)


def test_an_instruction_is_found_whatever_its_modifiers():
    ptx = "ld.global.L1::evict_last.v4.b32 {%r1}; cp.async.cg.shared.global [%r1], [%rd1], 0x10;\nst.global.v2.b32 [x];"
    assert compile_check.contains(ptx, "ld.global.v4.b32")
    assert compile_check.contains(ptx, "cp.async")
    assert not compile_check.contains(ptx, "st.global.v4.b32")
    assert not compile_check.contains(ptx, "mma.sync")


def test_a_spill_on_the_decode_path_and_a_missing_instruction_are_violations():
    case = compile_check.CompileCase(
        name="x", kernel=None, signature={}, constexprs={}, ptx_contains=("mma.sync|wgmma", "ld.global.v4.b32")
    )
    found = compile_check.violations(case, arch=80, ptx="wgmma.mma_async", shared_bytes=164 << 10, stack_bytes=8)
    assert len(found) == 3
    assert "spilled" in found[1]
    ptx = "wgmma ld.global.v4.b32"
    assert compile_check.violations(case, arch=90, ptx=ptx, shared_bytes=164 << 10, stack_bytes=0) == ()
