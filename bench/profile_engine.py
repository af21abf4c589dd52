"""Where an engine step's time goes: `python -m bench.profile_engine FOLDER [--batch 32 --prompt 512 --output 32]`.

Wraps the parts of a real engine with a clock and runs a W1-shaped load in this process: no HTTP, no other service.
Prints one table for steps that prefill and one for steps that only decode, in milliseconds a step. Nested parts are
subtracted from what holds them, so a column adds up to its step.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.text_engine import engine as engine_module
from services.text_engine.build import build_engine
from services.text_engine.config import TextEngineSettings
from services.text_engine.engine import Engine
from services.text_engine.engine_io import EngineRequest
from services.text_engine.kernels.native_matmul import PackedLinear
from services.text_engine.kernels.native_quantized import NativeQuantizedLinear
from services.text_engine.models.layers import Linear
from services.text_engine.runner import model_runner
from shared.sampling import SamplingParams


class Stopwatch:
    """Self time per part: what runs inside another part is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._nested = [0.0]

    def wrap(self, owner: Any, name: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._nested.append(0.0)
            try:
                return inner(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - started
                self.seconds[part] += elapsed - self._nested.pop()
                self._nested[-1] += elapsed

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def instrument(engine: Engine) -> Stopwatch:
    watch = Stopwatch()
    decoder = engine.runner._forward_pass._decoder
    layer = decoder._layers[0]
    for product in (Linear, PackedLinear, NativeQuantizedLinear):
        watch.wrap(product, "__call__", "matmul")
    watch.wrap(type(layer._attention), "attend", "attention")
    for name in ("rms_norm", "add_rms_norm", "silu_mul"):
        watch.wrap(layer._kernels, name, "elementwise")
    watch.wrap(decoder, "compute_logits", "lm_head, float()")
    watch.wrap(decoder, "embed", "embedding")
    watch.wrap(decoder, "forward", "layers' Python")
    watch.wrap(engine.runner._sampler, "sample", "sampler")
    watch.wrap(model_runner, "build_batch_arrays", "batch arrays")
    watch.wrap(model_runner, "merge_image_rows", "image rows")
    watch.wrap(engine.runner, "execute_model", "runner's Python")
    watch.wrap(engine.scheduler, "schedule", "schedule")
    watch.wrap(engine.scheduler, "update", "update")
    watch.wrap(engine_module.Engine, "_publish", "detokenize, publish")
    watch.wrap(engine, "step", "step's Python")
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--budget", type=int, default=512, help="max_num_batched_tokens")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    options = parser.parse_args()
    settings = TextEngineSettings(
        model=options.folder,
        max_num_batched_tokens=options.budget,
        max_num_seqs=options.batch,
        dtype=options.dtype,
        quantization=options.quantization,
        speculative="off",
    )
    engine = build_engine(settings, lambda ref: None).engine
    rng = random.Random(0)
    for i in range(options.batch):
        token_ids = [rng.randrange(100, 10_000) for _ in range(options.prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=options.output, ignore_eos=True)
        engine.add(EngineRequest(request_id=str(i), token_ids=token_ids, sampling=sampling))
    watch = instrument(engine)
    steps: dict[str, list[tuple[float, dict[str, float]]]] = {"prefill": [], "decode": []}
    while engine.scheduler.has_work:
        has_prompts = any(s.num_uncomputed_tokens > 1 for s in engine.scheduler.running) or engine.scheduler.waiting
        started = time.perf_counter()
        engine.step()
        steps["prefill" if has_prompts else "decode"].append((time.perf_counter() - started, watch.take()))
    for kind, taken in steps.items():
        report(kind, taken)


def report(kind: str, steps: list[tuple[float, dict[str, float]]]) -> None:
    if not steps:
        return
    total = sum(seconds for seconds, _ in steps)
    parts: dict[str, float] = defaultdict(float)
    for _, step in steps:
        for part, seconds in step.items():
            parts[part] += seconds
    table = Table(title=f"{kind}: {len(steps)} steps, {total / len(steps) * 1000:.1f} ms each, {total:.2f} s in all")
    for column in ("part", "ms a step", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{seconds / len(steps) * 1000:.2f}", f"{seconds / total:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
