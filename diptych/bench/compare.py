"""Ratios of medians between servers, from the JSON lines of `diptych bench run` (or any with the same names)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.table import Table
from rich.text import Text

from diptych.bench.doubts import doubts
from diptych.bench.errors import BenchError
from diptych.bench.figures import METRICS, Figures, Metric, over_runs, quotient

# Closer than this is a tie on a shared machine.
TIE_SHARE = 0.15


@dataclass(slots=True)
class Column:
    """One server: its runs of each workload, pooled over all lines of one file that bear its label."""

    name: str
    runs: dict[str, list[Figures]] = field(default_factory=dict)

    def figures(self, workload: str) -> Figures:
        return over_runs(self.runs.get(workload, []))


def read_columns(paths: Sequence[Path]) -> list[Column]:
    """A label that is in several files gives one column for each, named after the file as well."""
    columns: dict[tuple[str, Path], Column] = {}
    for path in paths:
        for line in _read_lines(path):
            label = line.get("label") or path.stem
            column = columns.setdefault((label, path), Column(label))
            column.runs.setdefault(line["workload"], []).extend(_runs_of(line))
    files_per_label = Counter(label for label, _ in columns)
    for (label, path), column in columns.items():
        if files_per_label[label] > 1:
            column.name = f"{label} ({path.stem})"
    return list(columns.values())


def _read_lines(path: Path) -> Iterable[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as failure:
        raise BenchError(f"{path}: {failure.strerror}") from failure
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = orjson.loads(line)
        except orjson.JSONDecodeError as failure:
            raise BenchError(f"{path}, line {number}: not JSON: {failure}") from failure
        if not isinstance(parsed, dict) or parsed.get("workload") not in METRICS:
            raise BenchError(f"{path}, line {number}: no result of a workload {', '.join(METRICS)}")
        yield parsed


def _runs_of(line: dict[str, Any]) -> list[Figures]:
    """The counted runs; a line without single runs (another tool's summary) counts as one."""
    runs = [run for run in line.get("runs", [line]) if run.get("counted", True)]
    return [_numbers_of(run) for run in runs]


def _numbers_of(run: dict[str, Any]) -> Figures:
    numbers: Figures = {}
    for key, value in run.items():
        if isinstance(value, dict):
            numbers |= {f"{key}_{inner}": number for inner, number in _numbers_of(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[key] = value
    return numbers


def comparison_table(columns: Sequence[Column], *, markdown: bool = False) -> Table:
    """Medians of each server, and how many times the first one's each of the others has."""
    baseline, *others = columns
    table = Table(box=box.MARKDOWN if markdown else box.ROUNDED)
    table.add_column("workload")
    table.add_column("figure")
    for column in columns:
        table.add_column(Text(column.name), justify="right")
    for column in others:
        table.add_column(Text(f"{column.name} ÷ {baseline.name}"), justify="right")
    for workload in METRICS:
        medians = [column.figures(workload) for column in columns]
        for metric in METRICS[workload]:
            values = [figures.get(metric.key) for figures in medians]
            if all(value is None for value in values):
                continue
            ratios = [_format_ratio(metric, quotient(value, values[0])) for value in values[1:]]
            table.add_row(workload, metric.title, *map(metric.format, values), *ratios)
        if not markdown:  # Markdown knows no line between rows
            table.add_section()
    return table


def _format_ratio(metric: Metric, ratio: float | None) -> str:
    if ratio is None:
        return "–"
    if abs(ratio - 1) <= TIE_SHARE:
        return f"[dim]{ratio:.2f}×[/dim]"
    colour = "green" if (ratio > 1) == metric.higher_is_better else "red"
    return f"[{colour}]{ratio:.2f}×[/{colour}]"


def comparison_notes(columns: Sequence[Column]) -> list[str]:
    """What makes the comparison doubtful: each server's own doubts, and work that was not the same."""
    notes = []
    for workload in METRICS:
        for column in columns:
            notes += [f"{column.name}, {workload}: {doubt}" for doubt in doubts(workload, column.figures(workload))]
        counts = _prompt_tokens_at_a_common_seed(columns, workload)
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} {count:.0f}" for name, count in counts.items())
            notes.append(f"{workload}: equal requests were counted as different numbers of prompt tokens: {listed}")
    return notes


def _prompt_tokens_at_a_common_seed(columns: Sequence[Column], workload: str) -> dict[str, float]:
    """Lengths depend on the seed alone, so at one seed and without errors every server should count the same."""
    by_seed: dict[str, dict[float, float]] = {}
    for column in columns:
        for run in column.runs.get(workload, ()):
            seed, count = run.get("seed"), run.get("in_tok")
            if seed is not None and count is not None and not run.get("errors"):
                by_seed.setdefault(column.name, {})[seed] = count
    if not by_seed:
        return {}
    common_seeds = set.intersection(*(set(counts) for counts in by_seed.values()))
    if not common_seeds:
        return {}
    seed = min(common_seeds)
    return {name: counts[seed] for name, counts in by_seed.items()}
