"""Results as rows of figures, and rows as a Markdown table."""

from __future__ import annotations

import numpy as np

from diptych.simulator.world import Result

Figures = dict[str, float]

# figure -> heading and how it is written
COLUMNS = {
    "ttft_p50_s": ("TTFT p50, s", "{:.2f}"),
    "ttft_p99_s": ("TTFT p99, s", "{:.2f}"),
    "short_ttft_p99_s": ("short TTFT p99, s", "{:.2f}"),
    "gap_p50_ms": ("gap p50, ms", "{:.1f}"),
    "gap_p95_ms": ("gap p95, ms", "{:.1f}"),
    "gap_p99_ms": ("gap p99, ms", "{:.1f}"),
    "gap_max_ms": ("gap max, ms", "{:.0f}"),
    "output_tokens_per_s": ("tokens/s", "{:.0f}"),
    "busy": ("engines busy", "{:.0%}"),
    "num_preemptions": ("preemptions", "{:.0f}"),
    "prefix_hits": ("prefix hits", "{:.1%}"),
    "kv_use_mean": ("KV use", "{:.0%}"),
    "kv_use_max": ("KV max", "{:.0%}"),
    "num_refused": ("refused", "{:.0f}"),
}


def figures(result: Result, num_engines: int, num_encoders: int = 1) -> Figures:
    """short_ttft: of prompts without a picture and with at most SHORT_PROMPT tokens to compute."""
    return {
        "num_requests": result.num_requests,
        "num_refused": result.num_refused,
        "seconds": result.seconds,
        "output_tokens_per_s": result.num_output_tokens / result.seconds,
        "ttft_mean_s": float(np.mean(result.ttft)) if result.ttft else 0.0,
        "ttft_p50_s": percentile(result.ttft, 50),
        "ttft_p95_s": percentile(result.ttft, 95),
        "ttft_p99_s": percentile(result.ttft, 99),
        "short_ttft_p99_s": percentile(result.short_ttft, 99),
        "gap_p50_ms": 1000 * percentile(result.gaps, 50),
        "gap_p95_ms": 1000 * percentile(result.gaps, 95),
        "gap_p99_ms": 1000 * percentile(result.gaps, 99),
        "gap_max_ms": 1000 * max(result.gaps, default=0.0),
        "num_steps": result.num_steps,
        "busy": result.busy_s / (result.seconds * num_engines),
        "num_preemptions": result.num_preemptions,
        "prefix_hits": result.num_cached_tokens / max(1, result.num_prompt_tokens),
        "num_images": result.num_images,
        "num_encodes": result.num_encodes,
        "encoders_busy": result.encode_busy_s / (result.seconds * max(1, num_encoders)),
        "kv_use_mean": result.kv_use_s / max(result.busy_s, 1e-9),
        "kv_use_max": result.max_kv_use,
    }


def percentile(values: object, percent: float) -> float:
    array = np.asarray(values)
    return float(np.percentile(array, percent)) if array.size else 0.0


def table(rows: list[tuple[dict[str, str], Figures]]) -> str:
    """One line a configuration: first what was set, then what came of it."""
    names = [*rows[0][0], *(heading for heading, _ in COLUMNS.values())]
    lines = [names, ["---"] * len(rows[0][0]) + ["---:"] * len(COLUMNS)]
    for given, figures_ in rows:
        lines.append([*given.values(), *(form.format(figures_[name]) for name, (_, form) in COLUMNS.items())])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
