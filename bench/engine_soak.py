"""Runs the text engine through thousands of random requests and faults, and says whether anything was wrong or is left.

  python -m bench.engine_soak [--count 10000] [--seed 0]

A tiny random model with everything around it real: text and picture questions with several choices, stop strings,
priorities and seeds; aborts, refusals, late and lost images, rows that are not finite, steps that raise, cache resets,
sleep; guesses at coming tokens, half of them wrong. Every token is held against an answer given by an undisturbed
engine, every invariant is checked after every step, and the metrics are compared with what was counted outside.
The exit status is 1 if anything did not hold, or if memory grew in the second half.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path

from shared.log import configure_logging
from tests.checkpoints import write_checkpoint
from tests.engine_soak import Soak

MIB = 1 << 20
MAX_GROWTH_MIB = 8.0


def rss_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def run(count: int, seed: int) -> bool:
    """Prints the figures; returns whether memory stayed flat. What did not hold is an AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(write_checkpoint("llava_clip_llama", Path(folder)), num_requests=count, seed=seed)
    begun = time.monotonic()
    rss = []
    for quarter in (1, 2, 3):
        soak.run(max_requests=count * quarter // 4)
        rss.append(rss_mib())
    soak.run()
    rss.append(rss_mib())
    seconds = time.monotonic() - begun
    scheduler = soak.engine.scheduler
    figures = {
        **{name.replace(" ", "_"): number for name, number in sorted(soak.counts.items())},
        "tokens": soak.num_tokens,
        "steps": soak.num_steps,
        "preemptions": scheduler.num_preemptions,
        "evictions": scheduler.blocks.pool.num_evictions,
        "longest_wait_steps": soak.longest_wait,
        "prefix_hit_ratio": round(scheduler.blocks.num_hit_tokens / scheduler.blocks.num_queried_tokens, 3),
        "seconds": round(seconds, 1),
        "rss_mib_after_each_quarter": [round(size, 1) for size in rss],
    }
    print(json.dumps(figures, indent=2))
    soak.check_end()
    return rss[3] - rss[1] <= MAX_GROWTH_MIB


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    configure_logging("soak", "critical")  # broken rows and steps are what it is about: no line for each
    if not run(given.count, given.seed):
        raise SystemExit("memory grew in the second half")


if __name__ == "__main__":
    main()
