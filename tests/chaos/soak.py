"""Mixed traffic for a long time, with clients that leave and inputs that are bad, and what grows meanwhile.

  python -m tests.chaos.soak [--minutes 60] [--samples FILE]

Memory, open files, threads and children of every service are sampled; the slope is a least-squares line over the second
half, when caches are as full as they get. Referenced KV blocks must be 0 at the end.

It may be stopped (SIGSTOP to it and all that it started) and continued: its clock stands still meanwhile, and what was
under way is not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import orjson

from tests.chaos.__main__ import new_traffic
from tests.chaos.cluster import Cluster, Holdings, running_cluster
from tests.chaos.pauses import Pauses
from tests.chaos.traffic import PAUSE_S, Outcome, Questions, Traffic, tally

SAMPLE_S: Final = 5.0
MOST_RSS_GROWTH: Final = 0.10  # over the second half, of the service's memory, extrapolated from the line
# Time limits of a machine that does other work too: what is late here is not what a soak looks for.
GIVE_UP_S: Final = 180.0
PATIENT: Final = {
    "DIPTYCH_ENGINE_EMBEDDING_TIMEOUT_S": "120",
    "DIPTYCH_ENGINE_STEP_TIMEOUT_S": "120",
    "DIPTYCH_ENCODER_DECODE_TIMEOUT_S": "120",
    "DIPTYCH_ENCODER_STALL_TIMEOUT_S": "120",
    "DIPTYCH_GATEWAY_PROBE_TIMEOUT_S": "10",
    "DIPTYCH_GATEWAY_CONNECT_TIMEOUT_S": "10",
    "DIPTYCH_GATEWAY_ADMIT_TIMEOUT_S": "60",
    "DIPTYCH_GATEWAY_ENCODE_TIMEOUT_S": "120",
    "DIPTYCH_GATEWAY_START_TIMEOUT_S": "60",
    "DIPTYCH_GATEWAY_IDLE_TIMEOUT_S": "120",
}
# Small caches fill within minutes; the usual ones would still be filling after an hour.
SMALL: Final = {
    "DIPTYCH_ENGINE_MAX_IDLE_EMBEDDING_BYTES": str(16 << 20),
    "DIPTYCH_ENCODER_MAX_QUEUED_IMAGES": "64",
    "DIPTYCH_ENCODER_MAX_RECENT_BYTES": str(16 << 20),
    "DIPTYCH_GATEWAY_KNOWN_IMAGES": "500",
    "DIPTYCH_GATEWAY_MAX_FETCH_CACHE_BYTES": str(4 << 20),
}
MOST_WORDS: Final = 600  # of a question whose length nobody has seen before
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


@dataclass(frozen=True, slots=True)
class Sample:
    """at_s   since the soak began, pauses not counted"""

    at_s: float
    held: dict[str, Holdings]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=4, help="requests at a time that are read to their end")
    parser.add_argument(
        "--samples", type=Path, help="file for every sample and how requests ended so far, as lines of JSON"
    )
    given = parser.parse_args()
    pauses = Pauses()
    with (
        tempfile.TemporaryDirectory(prefix="diptych-soak-") as folder,
        running_cluster(Path(folder), num_encoders=1, num_engines=1, **PATIENT, **SMALL) as cluster,
        pauses.watching(),
    ):
        traffic = new_traffic(cluster, given.clients, GIVE_UP_S)
        samples: list[Sample] = []
        with traffic.running(), _rude_client(traffic, pauses):
            for sample in _samples(cluster, pauses, given.minutes * 60):
                samples.append(sample)
                if given.samples:
                    _write(sample, tally(traffic.outcomes), given.samples)
        quiet = cluster.wait_until_quiet()
        problems = _print_ends(given.minutes, traffic.outcomes, pauses)
        problems += _print_slopes(samples)
        problems += [f"{name} still holds {held.num_open:g}" for name, held in quiet.items() if held.num_open]
    print(
        "\n"
        + (
            "; ".join(problems)
            or f"No memory grew by more than {MOST_RSS_GROWTH:.0%} in the second half, and nothing is held."
        )
    )
    return len(problems)


def _samples(cluster: Cluster, pauses: Pauses, seconds: float) -> Iterator[Sample]:
    began = time.monotonic()
    while (at_s := pauses.awake_s(began, asked := time.monotonic())) < seconds:
        try:
            held = cluster.holdings()
        except httpx.TimeoutException:
            pass  # on a starved machine no news; of a service that answers nobody the requests will tell
        except httpx.TransportError:
            if not pauses.touch(asked, time.monotonic()):
                raise
        else:
            yield Sample(at_s, held)
        time.sleep(SAMPLE_S)


def _write(sample: Sample, ends: Counter[str], file: Path) -> None:
    with file.open("ab") as lines:
        lines.write(orjson.dumps(asdict(sample) | {"ends": dict(ends)}, option=orjson.OPT_APPEND_NEWLINE))


@contextmanager
def _rude_client(traffic: Traffic, pauses: Pauses) -> Iterator[None]:
    """Raises on the way out what went wrong with it."""
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="rude") as pool:
        rude = pool.submit(lambda: asyncio.run(_be_rude(traffic.url, traffic.questions, stop, pauses)))
        try:
            yield
        finally:
            stop.set()
        rude.result()


async def _be_rude(url: str, questions: Questions, stop: threading.Event, pauses: Pauses) -> None:
    """One client that leaves in the middle of every second answer and means nothing by the others."""
    async with httpx.AsyncClient(base_url=url, timeout=GIVE_UP_S, trust_env=False) as http:
        for number in itertools.count():
            if stop.is_set():
                return
            began = time.monotonic()
            try:
                await _leave(http, questions, number)
                answer = await http.post("/v1/chat/completions", json=BAD_BODIES[number % len(BAD_BODIES)])
                assert 400 <= answer.status_code < 500, answer.text
            except (AssertionError, httpx.TransportError):
                if not pauses.touch(began, time.monotonic()):
                    raise
            await asyncio.sleep(PAUSE_S)


async def _leave(http: httpx.AsyncClient, questions: Questions, number: int) -> None:
    """Ask for a long answer, about a new picture or with a question of another length each time, and go."""
    if number % 2:
        body, _ = questions.body("new picture", number, max_tokens=200, stream=True)
    else:
        body, _ = questions.body("text", number, max_tokens=200, stream=True)
        num_words = number // 2 * 37 % MOST_WORDS  # every length once before any comes again
        body["messages"] = [{"role": "user", "content": f"{number}:" + " word" * num_words}]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01 + number % 13 * 0.05):
            await http.post("/v1/chat/completions", json=body)


def _print_ends(minutes: float, outcomes: list[Outcome], pauses: Pauses) -> list[str]:
    """What became of the requests; returns what should not have. Those that ran into a pause may have ended anyhow."""
    judged = [each for each in outcomes if each.end == "right" or not pauses.touch(each.began, each.ended)]
    print(f"{minutes:g} minutes, {len(judged)} requests read to their end: {dict(tally(judged))}")
    if pauses.spans:
        paused_s = sum(until - since for since, until in pauses.spans)
        print(
            f"Paused {len(pauses.spans)} times, {paused_s:.0f} s in all; "
            f"{len(outcomes) - len(judged)} requests that ran into it are not counted."
        )
    print()
    return [] if all(each.end == "right" for each in judged) else ["not every answer was right"]


def _print_slopes(samples: list[Sample]) -> list[str]:
    """The table; returns what grows."""
    half = samples[len(samples) // 2 :]
    seconds = np.array([sample.at_s for sample in half])
    problems = []
    print(
        "| service | memory at half time, MiB | at the end | slope, MiB/h | files | threads | children |\n"
        "|---|---|---|---|---|---|---|"
    )
    for service in half[0].held:
        held = [sample.held[service] for sample in half]
        mib = np.array([each.rss_bytes for each in held]) / 2**20
        slope_per_s, _ = np.polyfit(seconds, mib, 1)
        grown = slope_per_s * (seconds[-1] - seconds[0])
        counts = [
            f"{min(values)}-{max(values)}"
            for values in zip(*((h.num_files, h.num_threads, h.num_children) for h in held), strict=True)
        ]
        print(f"| {service} | {mib[0]:.0f} | {mib[-1]:.0f} | {slope_per_s * 3600:+.1f} | {' | '.join(counts)} |")
        if grown > MOST_RSS_GROWTH * mib[0]:
            problems.append(f"{service} grew by {grown:.0f} MiB in the second half")
    return problems


if __name__ == "__main__":
    sys.exit(main())
