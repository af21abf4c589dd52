"""Offered load beyond capacity: how many answers still come in time?

  python -m bench.overload [--seconds 15] [--queue-wait 1] [--svg FILE]
  python -m bench.overload --simulate

Capacity is found first: the answers of a closed loop with a client for each of the engine's places. Then requests
arrive at random (Poisson, open loop) at 0.25 to 4 times that rate. An answer is good if its first token came within
--first-token seconds and no gap between two tokens was longer than --gap. A refusal is no good answer, and costs the
others nothing.

The engine is the real one on the demo model, with a core of its own, as engines have: gateway and clients share
another. The last columns say how much of a core each took.

--simulate plays the same on a simulated clock, on the CPU preset, in three ways: nobody is refused; engines refuse, and
are asked each time; the gateway believes what engines say of their queues. Equal arguments give equal figures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from bench.gateway import cpu_s
from bench.simulated_overload import FACTORS, QUESTIONS, sweep
from bench.waterfall import COLOURS, GREY
from diptych.bench.client import Reply, Target, ask
from diptych.bench.workloads import Request
from diptych.simulator.costs import PRESETS
from diptych.simulator.world import Settings, Slo
from shared.http_transport import HttpTransport
from tests.chaos.cluster import MODEL, running_cluster
from tests.e2e.system import Service

NUM_OUTPUT_TOKENS: Final = 48
MAX_NUM_SEQS: Final = 8
WORDS: Final = ("red", "green", "blue", "circle", "square", "cat", "dog", "house", "tree", "seven")


def is_good(reply: Reply, slo: Slo) -> bool:
    if reply.error is not None or reply.ttft_s is None:
        return False
    return slo.is_met(reply.ttft_s, max(reply.gaps_s, default=0.0))


@dataclass(frozen=True, slots=True)
class Point:
    """One offered load. Rates per second.

    shed    of the refused: those that the engine was not asked for
    cores   what each process took of its core
    """

    factor: float
    offered: float
    goodput: float
    answered: float
    refused: float
    shed: float
    num_errors: int
    median_first_token_s: float
    median_refusal_s: float
    cores: dict[str, float]

    def row(self) -> str:
        rates = (self.offered, self.goodput, self.answered, self.refused, self.shed)
        cells = [f"{self.factor:g}", *(f"{rate:.1f}" for rate in rates), str(self.num_errors)]
        cells += [f"{self.median_first_token_s:.2f}", f"{self.median_refusal_s * 1000:.0f}"]
        cells += [f"{cores:.2f}" for cores in self.cores.values()]
        return "| " + " | ".join(cells) + " |"


HEAD: Final = (
    "| load | offered/s | good/s | answered/s | refused/s | shed/s | errors | median first token, s "
    "| median refusal, ms | engine | gateway | clients |\n" + "|---" * 12 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15, help="arrivals of each load")
    parser.add_argument("--first-token", type=float, default=3.0, help="SLO: seconds to the first token")
    parser.add_argument("--gap", type=float, default=1.0, help="SLO: seconds between two tokens")
    parser.add_argument("--queue-wait", type=float, default=1.0, help="DIPTYCH_ENGINE_MAX_QUEUE_WAIT_S; inf: no bound")
    parser.add_argument("--loads", default=",".join(f"{factor:g}" for factor in FACTORS), help="times capacity; a list")
    parser.add_argument("--simulate", action="store_true", help="on a simulated clock")
    parser.add_argument("--svg", type=Path, help="file for the figure")
    given = parser.parse_args()
    settings = {"DIPTYCH_ENGINE_MAX_NUM_SEQS": str(MAX_NUM_SEQS)}
    settings["DIPTYCH_ENGINE_MAX_QUEUE_WAIT_S"] = str(given.queue_wait)
    slo = Slo(given.first_token, given.gap)
    factors = [float(text) for text in given.loads.split(",")]
    if given.simulate:
        simulate_all(slo, given.queue_wait, given.seconds, factors)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        running_cluster(Path(folder), num_encoders=1, num_engines=1, linked=False, **settings) as cluster,
    ):
        system = cluster.system
        pin(system.engine.pid, 0)
        pin(system.gateway.pid, 1)
        pin(os.getpid(), 1)
        pids = {"engine": system.engine.pid, "gateway": system.gateway.pid, "clients": os.getpid()}
        bench = Bench(Target(system.gateway.url, MODEL), slo, given.seconds, pids, system.gateway)
        points = asyncio.run(bench.measure(factors))
    print(f"\n{verdict(factors[-1], [point.goodput for point in points])}")
    if given.svg:
        given.svg.write_text(draw(points))


def pin(pid: int, core: int) -> None:
    """Every thread of a process onto one core, where there are several."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core % (os.cpu_count() or 1)})


def verdict(last_factor: float, goodput: Sequence[float]) -> str:
    return f"At {last_factor:g} times capacity goodput is {goodput[-1] / max(goodput):.0%} of its peak."


def simulate_all(slo: Slo, queue_wait_s: float, seconds: float, factors: Sequence[float]) -> None:
    ways = {
        "nobody is refused": Settings(max_queue_wait_s=math.inf, slo=slo, max_waiting_requests=10**6),
        "engines refuse": Settings(max_queue_wait_s=queue_wait_s, slo=slo, gateway_sheds=False),
        "the gateway sheds": Settings(max_queue_wait_s=queue_wait_s, slo=slo),
    }
    for name, settings in ways.items():
        points = sweep(PRESETS["cpu"], settings, QUESTIONS, seconds=seconds, factors=factors)
        print(f"\n{name}\n\n| load | offered/s | good/s | answered/s | refused/s | shed/s | median first token, s |")
        print("|---" * 7 + "|")
        for point in points:
            rates = (point.offered, point.good, point.answered, point.refused, point.shed, point.first_token_p50_s)
            print(f"| {point.factor:g} | " + " | ".join(f"{rate:.2f}" for rate in rates) + " |")
        print(f"\n{verdict(factors[-1], [point.good for point in points])}")


# --- the real system ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bench:
    """What is asked, and whose cores are watched.

    seconds   of arrivals for each load
    pids      the processes by the name of their column
    """

    target: Target
    slo: Slo
    seconds: float
    pids: dict[str, int]
    gateway: Service
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def measure(self, factors: Sequence[float]) -> list[Point]:
        capacity = await self.find_capacity()
        print(f"capacity: {capacity:.1f} answers/s of {NUM_OUTPUT_TOKENS} tokens\n\n{HEAD}", flush=True)
        points = []
        for factor in factors:
            points.append(await self.offer(factor, capacity))
            print(points[-1].row(), flush=True)
        return points

    async def find_capacity(self) -> float:
        """Answers a second of a closed loop that fills every place and no more."""
        async with client(self.target) as http:
            end = time.perf_counter() + self.seconds

            async def loop() -> int:
                for count in itertools.count():
                    if time.perf_counter() >= end:
                        return count
                    await ask(http, self.target, question(self.rng))
                raise AssertionError

            began = time.perf_counter()
            counts = await asyncio.gather(*(loop() for _ in range(MAX_NUM_SEQS)))
            return sum(counts) / (time.perf_counter() - began)

    async def offer(self, factor: float, capacity: float) -> Point:
        num_shed_before, used_before = self._num_shed(), self._used_s()
        async with client(self.target) as http:
            began = time.perf_counter()
            tasks: list[asyncio.Task[tuple[Reply, float]]] = []
            due = 0.0
            while (due := due + self.rng.expovariate(factor * capacity)) < self.seconds:
                await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
                tasks.append(asyncio.create_task(timed(http, self.target, question(self.rng))))
            used = {name: seconds - used_before[name] for name, seconds in self._used_s().items()}
            replies = await asyncio.gather(*tasks)
        cores = {name: seconds / self.seconds for name, seconds in used.items()}
        return self._point(factor, replies, self._num_shed() - num_shed_before, cores)

    def _point(
        self, factor: float, replies: Sequence[tuple[Reply, float]], num_shed: float, cores: dict[str, float]
    ) -> Point:
        refusals = [took for reply, took in replies if is_refusal(reply)]
        answered = [reply for reply, _ in replies if reply.error is None]
        errors = Counter(reply.error for reply, _ in replies if reply.error is not None and not is_refusal(reply))
        if errors:
            print(errors.most_common(3))
        # What ends after the arrivals would make a short run look slower than it is: everything good was made between
        # the first arrival and the last good token.
        last_s = max([self.seconds, *(took for reply, took in replies if is_good(reply, self.slo))])
        return Point(
            factor=factor,
            offered=len(replies) / self.seconds,
            goodput=sum(is_good(reply, self.slo) for reply in answered) / last_s,
            answered=len(answered) / last_s,
            refused=len(refusals) / self.seconds,
            shed=num_shed / self.seconds,
            num_errors=sum(errors.values()),
            median_first_token_s=middle([reply.ttft_s for reply in answered if reply.ttft_s is not None]),
            median_refusal_s=middle(refusals),
            cores=cores,
        )

    def _num_shed(self) -> float:
        return self.gateway.metric("gateway_requests_shed_total")

    def _used_s(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self.pids.items()}


async def timed(http: httpx.AsyncClient, target: Target, request: Request) -> tuple[Reply, float]:
    began = time.perf_counter()
    return await ask(http, target, request), time.perf_counter() - began


def is_refusal(reply: Reply) -> bool:
    return reply.error is not None and reply.error.startswith(("BadStream: 503", "BadStream: 429"))


@asynccontextmanager
async def client(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    """httpx's own transport looks through all open connections for every request: it would be what is measured."""
    transport = HttpTransport(max_idle=1024)
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(timeout=target.timeout_s, headers=headers, transport=transport) as http:
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
