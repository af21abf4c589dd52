"""Mixed traffic for a long time, with clients that leave and inputs that are bad, and what grows meanwhile.

  python -m tests.chaos.soak [--minutes 60]

Memory, open files, threads and children of every service are sampled; the slope is a least-squares line over the second
half, when caches are as full as they get. Referenced KV blocks must be 0 at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from tests.chaos.__main__ import new_traffic
from tests.chaos.cluster import Cluster, Holdings, running_cluster
from tests.chaos.traffic import Questions, tally

SAMPLE_S: Final = 5.0
MOST_RSS_GROWTH: Final = 0.10  # over the second half, of the service's memory, extrapolated from the line
# Small caches fill within minutes; the usual ones would still be filling after an hour.
SETTINGS: Final = {
    "DIPTYCH_ENCODER_MAX_QUEUED_IMAGES": "64",
    "DIPTYCH_GATEWAY_KNOWN_IMAGES": "500",
    "DIPTYCH_GATEWAY_MAX_FETCH_CACHE_BYTES": str(4 << 20),
}
BAD_BODIES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"messages": []},
    {"messages": [{"role": "user", "content": "hi"}], "temperature": 9},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
        ]
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}
        ]
    },
    {"messages": [{"role": "user", "content": "word " * 9000}]},
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=4, help="requests at a time that are read to their end")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="diptych-soak-") as folder,
        running_cluster(Path(folder), num_encoders=1, num_engines=1, **SETTINGS) as cluster,
    ):
        traffic = new_traffic(cluster, given.clients)
        stop = threading.Event()
        rude = threading.Thread(target=lambda: asyncio.run(_be_rude(traffic.url, traffic.questions, stop)))
        samples: list[tuple[float, dict[str, Holdings]]] = []
        began = time.monotonic()
        with traffic.running():
            rude.start()
            while time.monotonic() < began + given.minutes * 60:
                samples.append((time.monotonic() - began, cluster.holdings()))
                time.sleep(SAMPLE_S)
            stop.set()
            rude.join()
        quiet = cluster.wait_until_quiet()
        ends = tally(traffic.outcomes)
        print(f"{given.minutes:g} minutes, {sum(ends.values())} requests read to their end: {dict(ends)}\n")
        problems = _print_slopes(samples, cluster)
        problems += [f"{name} still holds {held.num_open:g}" for name, held in quiet.items() if held.num_open]
        if set(ends) != {"right"}:
            problems.append("not every answer was right")
    print(
        "\n"
        + (
            "; ".join(problems)
            or f"No memory grew by more than {MOST_RSS_GROWTH:.0%} in the second half, and nothing is held."
        )
    )
    return len(problems)


async def _be_rude(url: str, questions: Questions, stop: threading.Event) -> None:
    """One client that leaves in the middle of every second answer and means nothing by the others."""
    ends: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        number = 0
        while not stop.is_set():
            number += 1
            body, _ = questions.body("new picture" if number % 4 else "text", number, max_tokens=200, stream=True)
            try:
                async with asyncio.timeout(0.01 + number % 13 * 0.05):
                    ends[(await http.post("/v1/chat/completions", json=body)).status_code] += 1
            except (TimeoutError, httpx.TransportError):
                ends[0] += 1
            answer = await http.post("/v1/chat/completions", json=BAD_BODIES[number % len(BAD_BODIES)])
            assert 400 <= answer.status_code < 500, answer.text
            await asyncio.sleep(0.1)


def _print_slopes(samples: list[tuple[float, dict[str, Holdings]]], cluster: Cluster) -> list[str]:
    """The table; returns what grows."""
    half = samples[len(samples) // 2 :]
    seconds = np.array([at for at, _ in half])
    problems = []
    print(
        "| service | memory at half time, MiB | at the end | slope, MiB/h | files | threads | children |\n"
        "|---|---|---|---|---|---|---|"
    )
    for service in cluster.system.services:
        held = [each[service.name] for _, each in half]
        mib = np.array([each.rss_bytes for each in held]) / 2**20
        slope_per_s, _ = np.polyfit(seconds, mib, 1)
        grown = slope_per_s * (seconds[-1] - seconds[0])
        counts = [
            f"{min(values)}-{max(values)}"
            for values in zip(*((h.num_files, h.num_threads, h.num_children) for h in held), strict=True)
        ]
        print(f"| {service.name} | {mib[0]:.0f} | {mib[-1]:.0f} | {slope_per_s * 3600:+.1f} | {' | '.join(counts)} |")
        if grown > MOST_RSS_GROWTH * mib[0]:
            problems.append(f"{service.name} grew by {grown:.0f} MiB in the second half")
    return problems


if __name__ == "__main__":
    sys.exit(main())
