"""Everything that wants a GPU, in at most ten minutes: `python -m bench.gpu_check OUT [--tiny] [--only PART]`.

Parts, each in a process of its own with a time limit, so that one that fails or hangs costs the others nothing:

    correctness              every GPU kernel, and the engine with CUDA graphs, against plain PyTorch on the device
    kernels                  the table of bench/kernels.py
    engine…                  tokens/s of the engine on a LLaVA-1.5-7B of random weights made on the device: 512 tokens
                             in, 128 out, and with images; also without graphs, and with a KV cache of bytes
    transformers…            the same text work with transformers: static batches of 32, and its continuous batching

OUT receives results.jsonl, one object a line as soon as it is known, and a log for each part. Exit status: 0 if every
part ran to its end and nothing was wrong. `--tiny` runs all of it with tiny shapes, on a CPU in Triton's interpreter,
to test this script itself; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "results.jsonl"


@dataclass(frozen=True, slots=True)
class Part:
    """argv: a module of bench and its arguments. Its stdout is JSON lines."""

    name: str
    argv: tuple[str, ...]
    limit_s: float


# The limits add up to ten minutes; a part usually takes half of its own.
PARTS = (
    Part("correctness", ("bench.gpu_correctness",), 120),
    Part("kernels", ("bench.kernels", "--json"), 110),
    Part("engine", ("bench.gpu_throughput", "engine"), 100),
    Part("transformers static", ("bench.gpu_throughput", "transformers-static"), 70),
    Part("transformers continuous", ("bench.gpu_throughput", "transformers-continuous"), 80),
    Part("engine without graphs", ("bench.gpu_throughput", "engine", "--enforce-eager"), 60),
    Part("engine with an fp8 cache", ("bench.gpu_throughput", "engine", "--kv-cache-dtype=fp8"), 60),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="test this script itself, without a GPU")
    parser.add_argument("--only", metavar="NAME", help="only parts whose name contains this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / RESULTS
    results.write_text("")
    if not torch.cuda.is_available() and not options.tiny:
        print("torch sees no GPU here: there is nothing to measure. --tiny tests the script itself.", file=sys.stderr)
        return 2
    record(results, "machine", machine() | {"tiny": options.tiny})
    num_bad = 0
    for part in PARTS:
        if not options.only or options.only in part.name:
            num_bad += not run(part, options.out, is_tiny=options.tiny)
    print(f"{results}: {num_bad} parts with something wrong{'; NOTHING WAS MEASURED' if options.tiny else ''}")
    return 1 if num_bad else 0


def run(part: Part, out: Path, *, is_tiny: bool) -> bool:
    """True if all is well. What a part has printed when it fails is kept."""
    argv = [sys.executable, "-m", *part.argv]
    env = dict(os.environ)
    if is_tiny:
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        argv += ["--paper"] if part.name == "kernels" else ["--tiny"]
    started = time.monotonic()
    log_file = out / f"{part.name.replace(' ', '-')}.log"
    with (
        log_file.open("w") as log,
        subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True) as child,
    ):
        try:
            printed, _ = child.communicate(timeout=part.limit_s)
            outcome = "ended" if child.returncode == 0 else f"failed with status {child.returncode}"
        except subprocess.TimeoutExpired:
            child.kill()
            printed, _ = child.communicate()
            outcome = f"stopped after its limit of {part.limit_s:.0f} s"
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    for result in found:
        record(out / RESULTS, part.name, result)
    is_well = outcome == "ended" and bool(found) and not any(result.get("error") for result in found)
    seconds = round(time.monotonic() - started, 1)
    record(out / RESULTS, part.name, {"outcome": outcome, "is_well": is_well, "seconds": seconds, "log": log_file.name})
    return is_well


def record(results: Path, part: str, result: dict[str, Any]) -> None:
    line = json.dumps({"part": part} | result)
    with results.open("a") as file:
        print(line, file=file)
    print(line, flush=True)


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "measured_on": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "measured_on": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return facts


if __name__ == "__main__":
    sys.exit(main())
