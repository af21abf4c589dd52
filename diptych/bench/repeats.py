"""Several runs of one workload: waits for a quiet machine, repeats disturbed runs, counts the quietest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.bench.client import Tally, Target
from diptych.bench.errors import BenchError
from diptych.bench.figures import METRICS, Figures, over_runs, rounded
from diptych.bench.load import run_load
from diptych.bench.machine import ProcessTrees, wait_until_quiet
from diptych.bench.sessions import SessionShape, run_bursts, run_sliding_window
from diptych.bench.workloads import IMAGE_WORKLOADS, require_image_packages


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `max_foreign_cores` and `extra_runs` apply where the server's process is watched."""

    workloads: tuple[str, ...]
    reps: int = 3
    extra_runs: int = 3
    seed: int = 1
    salt: str = ""
    max_foreign_cores: float = 0.15
    num_warm_ups: int = 2
    max_concurrency: int | None = None
    max_requests: int | None = None
    shape: SessionShape = field(default_factory=SessionShape)

    def check(self) -> None:
        if unknown := [name for name in self.workloads if name not in METRICS]:
            raise BenchError(f"unknown workload {', '.join(unknown)}; there are {', '.join(METRICS)}")
        if not IMAGE_WORKLOADS.isdisjoint(self.workloads) or {"W6", "W7"} & set(self.workloads):
            require_image_packages()


@dataclass(slots=True)
class Run:
    seed: int
    figures: Figures
    first_error: str | None = None
    counted: bool = True

    @property
    def foreign_cores(self) -> float:
        return self.figures.get("other_cpu") or 0.0

    def to_json(self) -> dict[str, Any]:
        error = {} if self.first_error is None else {"first_error": self.first_error}
        return {"seed": self.seed, "counted": self.counted, **rounded(self.figures), **error}


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of one workload against one server; the figures are those of the counted runs."""

    label: str
    workload: str
    runs: tuple[Run, ...]

    @property
    def figures(self) -> Figures:
        return over_runs([run.figures for run in self.runs if run.counted])

    @property
    def first_error(self) -> str | None:
        return next((run.first_error for run in self.runs if run.first_error is not None), None)


# Told before every run: workload, its number from 1, how many are wanted. Returns the tally that the run will fill.
OnStart = Callable[[str, int, int], Tally]


async def measure(
    label: str, workload: str, plan: Plan, target: Target, server: ProcessTrees | None, on_start: OnStart
) -> Result:
    """Run `workload` until `plan.reps` runs were undisturbed, or the extra runs are used up too."""
    runs: list[Run] = []
    while wants_another(runs, plan):
        tally = on_start(workload, len(runs) + 1, plan.reps)
        if server is not None:
            await wait_until_quiet(server, plan.max_foreign_cores)
        runs.append(await _run_once(workload, plan.seed + len(runs), plan, target, server, tally))
    count_quietest(runs, plan.reps)
    return Result(label, workload, tuple(runs))


def wants_another(runs: Sequence[Run], plan: Plan) -> bool:
    num_undisturbed = sum(run.foreign_cores <= plan.max_foreign_cores for run in runs)
    return num_undisturbed < plan.reps and len(runs) < plan.reps + plan.extra_runs


def count_quietest(runs: Sequence[Run], reps: int) -> None:
    for run in sorted(runs, key=lambda run: run.foreign_cores)[reps:]:
        run.counted = False


async def _run_once(
    workload: str, seed: int, plan: Plan, target: Target, server: ProcessTrees | None, tally: Tally
) -> Run:
    if workload in {"W6", "W7"}:
        run_session = run_sliding_window if workload == "W6" else run_bursts
        figures, errors = await run_session(seed, plan.salt, target, server, tally, plan.shape)
    else:
        figures, errors = await run_load(
            workload,
            seed,
            plan.salt,
            target,
            server,
            tally,
            num_warm_ups=plan.num_warm_ups,
            max_concurrency=plan.max_concurrency,
            max_requests=plan.max_requests,
        )
    return Run(seed, figures, first_error=errors[0] if errors else None)
