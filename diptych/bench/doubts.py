"""Why a figure should not be believed: said beside every table, so that nobody has to know what to look for."""

from __future__ import annotations

from diptych.bench.figures import Figures

MAX_FOREIGN_CORES = 0.15
MAX_CACHED_SHARE = 0.05
MAX_TOKENS_PER_CHUNK = 1.05


def doubts(workload: str, figures: Figures) -> list[str]:
    found = []
    if errors := figures.get("errors"):
        found.append(f"{errors:.0f} of {figures.get('requests') or 0:.0f} requests failed")
    if short := figures.get("short"):
        found.append(f"{short:.0f} answers shorter than asked: the server does not know ignore_eos, or stopped early")
    cached, num_prompt_tokens = figures.get("cached_tok") or 0, figures.get("in_tok") or 0
    if workload in {"W1", "W2", "W3"} and cached > MAX_CACHED_SHARE * num_prompt_tokens:
        found.append(f"{cached:.0f} of {num_prompt_tokens:.0f} prompt tokens came from a warm cache")
    if (foreign := figures.get("other_cpu") or 0) > MAX_FOREIGN_CORES:
        found.append(f"other processes used {foreign:.2f} cores meanwhile")
    if (per_chunk := figures.get("tok_per_chunk") or 0) > MAX_TOKENS_PER_CHUNK:
        found.append(f"{per_chunk:.2f} tokens per chunk: gaps between chunks are not gaps between tokens")
    return found
