"""What a person sees while and after a benchmark runs, and the JSON lines that it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from diptych.bench.client import Tally
from diptych.bench.doubts import doubts
from diptych.bench.figures import METRICS, rounded
from diptych.bench.repeats import Plan, Result


class ProgressLine:
    """One line on the terminal: which run, how many answers, how much text so far. Silent where nobody watches.

    It is redrawn twice a second only: the client shares the machine with the server that it measures.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            TextColumn("{task.fields[tally].num_finished}/{task.fields[tally].num_requests} answers"),
            TextColumn("{task.fields[tally].num_chunks} chunks"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=2,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressLine:
        self._progress.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self._progress.stop()

    def start_run(self, workload: str, number: int, num_wanted: int) -> Tally:
        if self._task is not None:
            self._progress.remove_task(self._task)
        tally = Tally()
        again = " (again: disturbed)" if number > num_wanted else ""
        self._task = self._progress.add_task(f"{workload} run {number} of {num_wanted}{again}", total=None, tally=tally)
        return tally


def result_tables(results: Sequence[Result], title: str) -> list[Table]:
    """One table per kind of workload, since W6 and W7 measure other things than W1 to W5."""
    tables = []
    for metrics in dict.fromkeys(METRICS[result.workload] for result in results):
        rows = [result for result in results if METRICS[result.workload] == metrics]
        shown = [m for m in metrics if any(result.figures.get(m.key) is not None for result in rows)]
        table = Table(title=title, title_justify="left")
        table.add_column("workload", no_wrap=True)
        table.add_column("runs", justify="right")
        for metric in shown:
            table.add_column(metric.title, justify="right")
        for result in rows:
            figures = result.figures
            counted = sum(run.counted for run in result.runs)
            runs = str(counted) if counted == len(result.runs) else f"{counted} of {len(result.runs)}"
            table.add_row(result.workload, runs, *(metric.format(figures.get(metric.key)) for metric in shown))
        tables.append(table)
    return tables


def result_notes(results: Sequence[Result]) -> list[str]:
    notes = []
    for result in results:
        notes += [f"{result.workload}: {doubt}" for doubt in doubts(result.workload, result.figures)]
        if result.first_error is not None:
            notes.append(f"{result.workload}: first error: {result.first_error}")
    return notes


def json_line(result: Result, plan: Plan, model: str) -> bytes:
    """The medians under their names, and under `runs` every run that was made, the uncounted ones too."""
    line: dict[str, Any] = {
        "label": result.label,
        "workload": result.workload,
        "model": model,
        "tool": f"diptych bench {version('diptych')}",
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "salt": plan.salt,
        "reps": plan.reps,
        **rounded(result.figures),
        "runs": [run.to_json() for run in result.runs],
    }
    return orjson.dumps(line) + b"\n"


def append_line(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line)
