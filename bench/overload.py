"""Offered load beyond capacity: how many answers still come in time?

  python -m bench.overload [--seconds 15] [--queue-wait 1] [--svg FILE]

Capacity is found first: the answers of a closed loop with a client for each of the engine's places. Then requests
arrive at random (Poisson, open loop) at 0.25 to 4 times that rate. An answer is good if its first token came within
--first-token seconds and no gap between two tokens was longer than --gap. A refusal is no good answer, and costs the
others nothing.

The engine is the real one on the demo model; clients, gateway and engine share this machine's cores, so that the
figures say how goodput bends, not how fast this machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from bench.waterfall import COLOURS, GREY
from diptych.bench.client import Reply, Target, ask
from diptych.bench.workloads import Request
from tests.chaos.cluster import MODEL, running_cluster

FACTORS: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
NUM_OUTPUT_TOKENS: Final = 48
MAX_NUM_SEQS: Final = 8
WORDS: Final = ("red", "green", "blue", "circle", "square", "cat", "dog", "house", "tree", "seven")


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds: to the first token, and between any two tokens."""

    first_token_s: float
    gap_s: float

    def is_met(self, reply: Reply) -> bool:
        in_time = reply.error is None and reply.ttft_s is not None and reply.ttft_s <= self.first_token_s
        return in_time and max(reply.gaps_s, default=0.0) <= self.gap_s


@dataclass(frozen=True, slots=True)
class Point:
    """One offered load. Rates per second."""

    factor: float
    offered: float
    goodput: float
    answered: float
    refused: float
    num_errors: int
    median_first_token_s: float
    median_refusal_s: float

    def row(self) -> str:
        return (
            f"| {self.factor:g} | {self.offered:.1f} | {self.goodput:.1f} | {self.answered:.1f} | {self.refused:.1f} "
            f"| {self.num_errors} | {self.median_first_token_s:.2f} | {self.median_refusal_s * 1000:.0f} |"
        )


HEAD: Final = (
    "| load | offered/s | good/s | answered/s | refused/s | errors | median first token, s | median refusal, ms |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15, help="arrivals of each load")
    parser.add_argument("--first-token", type=float, default=3.0, help="SLO: seconds to the first token")
    parser.add_argument("--gap", type=float, default=1.0, help="SLO: seconds between two tokens")
    parser.add_argument(
        "--queue-wait", type=float, default=1.0, help="DIPTYCH_ENGINE_MAX_QUEUE_WAIT_S; 0: as before there was a bound"
    )
    parser.add_argument("--svg", type=Path, help="file for the figure")
    given = parser.parse_args()
    settings = {"DIPTYCH_ENGINE_MAX_NUM_SEQS": str(MAX_NUM_SEQS)}
    settings["DIPTYCH_ENGINE_MAX_QUEUE_WAIT_S"] = str(given.queue_wait or 1e6)
    slo = Slo(given.first_token, given.gap)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_cluster(Path(folder), num_encoders=1, num_engines=1, **settings) as cluster,
    ):
        points = asyncio.run(measure(Target(cluster.system.gateway.url, MODEL), slo, given.seconds))
    best = max(point.goodput for point in points)
    print(f"\nAt {points[-1].factor:g} times capacity goodput is {points[-1].goodput / best:.0%} of its peak.")
    if given.svg:
        given.svg.write_text(draw(points))


async def measure(target: Target, slo: Slo, seconds: float) -> list[Point]:
    rng = random.Random(0)
    capacity = await find_capacity(target, rng, seconds)
    print(f"capacity: {capacity:.1f} answers/s of {NUM_OUTPUT_TOKENS} tokens\n\n{HEAD}", flush=True)
    points = []
    for factor in FACTORS:
        points.append(await offer(target, slo, rng, factor, capacity, seconds))
        print(points[-1].row(), flush=True)
    return points


async def find_capacity(target: Target, rng: random.Random, seconds: float) -> float:
    """Answers a second of a closed loop that fills every place and no more."""
    async with client(target) as http:
        end = time.perf_counter() + seconds

        async def loop() -> int:
            for count in itertools.count():
                if time.perf_counter() >= end:
                    return count
                await ask(http, target, question(rng))
            raise AssertionError

        began = time.perf_counter()
        counts = await asyncio.gather(*(loop() for _ in range(MAX_NUM_SEQS)))
        return sum(counts) / (time.perf_counter() - began)


async def offer(target: Target, slo: Slo, rng: random.Random, factor: float, capacity: float, seconds: float) -> Point:
    async with client(target) as http:
        began = time.perf_counter()
        tasks: list[asyncio.Task[tuple[Reply, float]]] = []
        due = 0.0
        while (due := due + rng.expovariate(factor * capacity)) < seconds:
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks.append(asyncio.create_task(timed(http, target, question(rng))))
        replies = await asyncio.gather(*tasks)
    # What ends after the arrivals would make a short run look slower than it is: rates are of those that arrived.
    refusals = [spent for reply, spent in replies if is_refusal(reply)]
    answered = [reply for reply, _ in replies if reply.error is None]
    errors = Counter(reply.error for reply, _ in replies if reply.error is not None and not is_refusal(reply))
    if errors:
        print(errors.most_common(3))
    # Everything good was made between the first arrival and the last good token.
    last_s = max([seconds, *(spent for reply, spent in replies if slo.is_met(reply))])
    return Point(
        factor=factor,
        offered=len(replies) / seconds,
        goodput=sum(slo.is_met(reply) for reply in answered) / last_s,
        answered=len(answered) / last_s,
        refused=len(refusals) / seconds,
        num_errors=sum(errors.values()),
        median_first_token_s=middle([reply.ttft_s for reply in answered if reply.ttft_s is not None]),
        median_refusal_s=middle(refusals),
    )


async def timed(http: httpx.AsyncClient, target: Target, request: Request) -> tuple[Reply, float]:
    began = time.perf_counter()
    return await ask(http, target, request), time.perf_counter() - began


def is_refusal(reply: Reply) -> bool:
    return reply.error is not None and reply.error.startswith(("BadStream: 503", "BadStream: 429"))


@asynccontextmanager
async def client(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    async with target.open_client() as http:
        yield http


def question(rng: random.Random) -> Request:
    words = [rng.choice(WORDS) for _ in range(24)]
    return Request(text=" ".join(words), images=(), num_prompt_tokens=len(words), num_output_tokens=NUM_OUTPUT_TOKENS)


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


# --- the figure -------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 320, 64, 30, 110, 46


def draw(points: list[Point]) -> str:
    """Good, answered and refused requests a second over offered load."""
    most = max(point.offered for point in points)
    widest = points[-1].factor

    def place(factor: float, rate: float) -> tuple[float, float]:
        x = LEFT + factor / widest * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - rate / most * (HEIGHT - TOP - BOTTOM)

    series = {
        "offered": ([point.offered for point in points], GREY),
        "good": ([point.goodput for point in points], COLOURS[2]),
        "refused": ([point.refused for point in points], COLOURS[1]),
    }
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for tick in range(int(widest) + 1):
        x, bottom = place(tick, 0)
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom:.1f}" stroke="#dde0e4"/>')
        parts.append(_text(x, bottom + 16, f"{tick}×", "middle"))
    for name, (rates, colour) in series.items():
        spots = [place(point.factor, rate) for point, rate in zip(points, rates, strict=True)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        parts.append(_text(spots[-1][0] + 8, spots[-1][1] + 4, f"{name} {rates[-1]:.0f}/s", "start", colour))
    parts.append(_text(LEFT, 18, "requests a second", "start"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "offered load, in multiples of capacity", "middle"))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = "font-family:system-ui,sans-serif;font-size:12px"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">{"".join(parts)}</svg>\n'


def _text(x: float, y: float, text: str, anchor: str, fill: str = "#202428") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{text}</text>'


if __name__ == "__main__":
    main()
