"""Numbers and their arithmetic: percentiles, medians over runs, and what each workload's figures mean."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# One run's results by name; None where a run has nothing to say (no answer, no process watched).
Figures = dict[str, float | None]

# Over several runs the worst of these is reported, not the median.
WORST_OF_RUNS = frozenset({"errors", "short", "peak_rss_mib"})


@dataclass(frozen=True, slots=True)
class Metric:
    """How a figure is shown: `scale` turns the stored unit (always seconds) into the shown one."""

    key: str
    title: str
    digits: int
    scale: float = 1.0
    higher_is_better: bool = False

    def format(self, value: float | None) -> str:
        return "–" if value is None else f"{value * self.scale:,.{self.digits}f}"


_OUTPUT = Metric("output_tok_s", "output tok/s", 1, higher_is_better=True)
_LOAD_METRICS = (
    _OUTPUT,
    Metric("ttft_mean", "TTFT mean s", 3),
    Metric("ttft_p95", "TTFT p95 s", 3),
    Metric("itl_mean", "per token ms", 1, scale=1000),
    Metric("itl_p95", "gap p95 ms", 1, scale=1000),
    Metric("peak_rss_mib", "peak MiB", 0),
)
_SLIDING_WINDOW_METRICS = (
    _OUTPUT,
    Metric("ttft_first_turn", "TTFT first turn s", 3),
    Metric("ttft_later_turns", "TTFT later turns s", 3),
    Metric("ratio", "later / first", 3),
    Metric("peak_rss_mib", "peak MiB", 0),
)
_BURST_METRICS = (
    Metric("text_only_p50", "gap p50 ms, text only", 1, scale=1000),
    Metric("text_only_p99", "gap p99 ms, text only", 1, scale=1000),
    Metric("with_bursts_p50", "gap p50 ms, bursts", 1, scale=1000),
    Metric("with_bursts_p99", "gap p99 ms, bursts", 1, scale=1000),
    Metric("with_bursts_max", "gap max ms, bursts", 1, scale=1000),
    Metric("p99_ratio", "p99 bursts / text only", 3),
    Metric("burst_ttft_mean", "TTFT of a burst s", 3),
    Metric("peak_rss_mib", "peak MiB", 0),
)
METRICS: dict[str, tuple[Metric, ...]] = {
    **dict.fromkeys(("W1", "W2", "W3", "W4", "W5"), _LOAD_METRICS),
    "W6": _SLIDING_WINDOW_METRICS,
    "W7": _BURST_METRICS,
}


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value at `share` (0 to 1) of the sorted values, by nearest rank: always one that was measured."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def rounded(figures: Figures) -> Figures:
    return {key: None if value is None else round(value, 6) for key, value in figures.items()}


def over_runs(runs: Sequence[Figures]) -> Figures:
    """One figure for several runs: the median, or the worst of what must not happen even once."""
    summary: Figures = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [value for run in runs if (value := run.get(key)) is not None]
        if not values:
            summary[key] = None
        else:
            summary[key] = max(values) if key in WORST_OF_RUNS else statistics.median(values)
    return summary
