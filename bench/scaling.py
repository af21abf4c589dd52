"""Each panel scales its own work: pictures with encoders, text with engines, and neither with the other's replicas.

  python -m bench.scaling                               a table, simulated, 1 to 64 replicas
  python -m bench.scaling --svg docs/images/scaling.svg
  python -m bench.scaling --real --replicas 1,2,4       real processes on this machine (as many as it has cores for)

Simulated: full load, all the work offered at once, on the `cpu` cost model with the real scheduler and balancer. The
other panel has as many replicas as it takes not to be what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

import httpx

from bench.waterfall import COLOURS
from diptych.machine import free_ports
from diptych.planner.measure import png
from diptych.simulator.cluster import simulate
from diptych.simulator.costs import PRESETS
from diptych.simulator.trace import Conversation, Turn
from diptych.simulator.world import Settings

REPLICAS: Final = (1, 2, 4, 8, 16, 32, 64)
REQUESTS_PER_REPLICA: Final = 96


@dataclass(frozen=True, slots=True)
class Work:
    """A kind of request and the panel that it is the work of."""

    name: str
    panel: str
    num_new_tokens: int
    num_output_tokens: int
    has_picture: bool


PICTURES: Final = Work("pictures", "encoders", 12, 1, has_picture=True)
TEXT: Final = Work("text", "engines", 200, 60, has_picture=False)
WORKS: Final = (PICTURES, TEXT)
OTHER: Final = {"encoders": "engines", "engines": "encoders"}


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests a second by number of replicas of the panel `scaled`."""

    work: Work
    scaled: str
    by_replicas: dict[int, float]

    @property
    def speedup(self) -> dict[int, float]:
        return {n: rate / self.by_replicas[min(self.by_replicas)] for n, rate in self.by_replicas.items()}


def rate(work: Work, *, encoders: int, engines: int, num_requests: int) -> float:
    """Requests a second at full load, simulated."""
    costs = PRESETS["cpu"]
    conversations = (
        Conversation(
            0.0, 0, 0, (Turn(0, work.num_new_tokens, work.num_output_tokens, (i,) if work.has_picture else ()),)
        )
        for i in range(num_requests)
    )
    settings = Settings(encoders=encoders, engines=engines, max_waiting_requests=num_requests)
    result = simulate(costs, settings, conversations)
    assert result.num_finished == num_requests
    return num_requests / result.seconds


def scale(work: Work, scaled: str, replicas: Sequence[int]) -> Rates:
    """The panel `scaled` grows; the other one is large if it is not this work's, and has one replica if it is."""
    by_replicas = {}
    for count in replicas:
        other = 1 if scaled != work.panel else 2 * count
        counts = {scaled: count, OTHER[scaled]: other}
        num_requests = REQUESTS_PER_REPLICA * (count if scaled == work.panel else 1)
        by_replicas[count] = rate(work, **counts, num_requests=num_requests)
    return Rates(work, scaled, by_replicas)


def table(rows: Sequence[Rates]) -> str:
    replicas = list(rows[0].by_replicas)
    lines = [
        ["requests/s of", "more", *map(str, replicas)],
        ["---", "---", *["---:"] * len(replicas)],
        *([row.work.name, row.scaled, *(f"{value:.1f}" for value in row.by_replicas.values())] for row in rows),
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# --- the drawing ----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 60, 170, 40, 50


def draw(rows: Sequence[Rates]) -> str:
    """Speed-up over replicas, both axes in doublings; the grey diagonal is a replica's worth for each replica."""
    replicas = list(rows[0].by_replicas)
    doublings = max(1, len(replicas) - 1)
    step_x, step_y = (WIDTH - LEFT - RIGHT) / doublings, (HEIGHT - TOP - BOTTOM) / doublings

    def point(index: float, speedup: float) -> str:
        return f"{LEFT + index * step_x:.1f} {HEIGHT - BOTTOM - math.log2(max(1.0, speedup)) * step_y:.1f}"

    parts = [_text(LEFT, 20, "Speed-up by replicas of one panel, simulated", weight="bold")]
    for index, count in enumerate(replicas):
        x, y = point(index, count).split()
        parts.append(
            f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}M{x} {TOP}V{HEIGHT - BOTTOM}" stroke="#dde0e4" fill="none"/>'
        )
        parts.append(_text(float(x), HEIGHT - BOTTOM + 18, str(count), anchor="middle", fill="#60656c"))
        parts.append(_text(LEFT - 8, float(y) + 4, f"{count}×", anchor="end", fill="#60656c"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "replicas", anchor="middle", fill="#60656c"))
    ideal = "L".join(point(index, count) for index, count in enumerate(replicas))
    parts.append(f'<path d="M{ideal}" stroke="#8a8f98" stroke-dasharray="4 4" fill="none"/>')
    labels: list[float] = []
    for number, row in enumerate(rows):
        colour = COLOURS[number % len(COLOURS)]
        points = [point(index, value) for index, value in enumerate(row.speedup.values())]
        parts.append(f'<path d="M{"L".join(points)}" stroke="{colour}" stroke-width="2.5" fill="none"/>')
        parts += [f'<circle cx="{p.split()[0]}" cy="{p.split()[1]}" r="3.5" fill="{colour}"/>' for p in points]
        y = float(points[-1].split()[1]) + 4
        while any(abs(y - taken) < 15 for taken in labels):
            y += 15 if y < HEIGHT / 2 else -15
        labels.append(y)
        parts.append(_text(WIDTH - RIGHT + 10, y, f"{row.work.name}, more {row.scaled}", fill=colour))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = "font-family:system-ui,sans-serif;font-size:12px"
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">{background}{"".join(parts)}</svg>\n'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#202428", weight: str = "normal"
) -> str:
    style = f'text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


# --- real processes -------------------------------------------------------------------------------------------------


@contextmanager
def running(command: str, count: int, model: str) -> Iterator[list[str]]:
    """So many services of one panel, one thread each, until the block is left."""
    ports = free_ports(count)
    words = [sys.executable, "-m", "diptych", command, model, "--num-threads", "1", "--log-level", "error"]
    processes = [subprocess.Popen([*words, "--port", str(port)]) for port in ports]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url, process in zip(urls, processes, strict=True):
            _await_ready(url, process)
        yield urls
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _await_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"a service ended with {process.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


async def _ask(http: httpx.AsyncClient, work: Work, url: str, number: int) -> None:
    if work.has_picture:
        response = await http.post(f"{url}/v1/encode", content=png(640, 480, seed=time.time_ns() + number))
    else:
        rng = random.Random(time.time_ns() + number)
        sampling = {"max_tokens": work.num_output_tokens, "temperature": 0.0, "ignore_eos": True}
        prompt = [rng.randrange(300, 900) for _ in range(work.num_new_tokens)]
        body = {"request_id": f"scaling-{number}", "prompt": prompt, "sampling": sampling}
        response = await http.post(f"{url}/v1/generate", json=body)
    response.raise_for_status()


async def real_rate(work: Work, urls: Sequence[str], num_requests: int) -> float:
    """Requests a second, asked of the panel's replicas in turns."""
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(_ask(http, work, url, -1 - i) for i, url in enumerate(urls)))  # warm
        started = time.perf_counter()
        await asyncio.gather(*(_ask(http, work, urls[i % len(urls)], i) for i in range(num_requests)))
        return num_requests / (time.perf_counter() - started)


def scale_really(work: Work, replicas: Sequence[int], model: str, num_requests: int) -> Rates:
    command = {"encoders": "vision-encoder", "engines": "text-engine"}[work.panel]
    by_replicas = {}
    for count in replicas:
        with running(command, count, model) as urls:
            by_replicas[count] = asyncio.run(real_rate(work, urls, num_requests))
    return Rates(work, work.panel, by_replicas)


def main(argv: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--replicas", help="a list; 1,2,4,…,64, with --real 1,2,4")
    options.add_argument("--svg", type=Path, help="draw the simulated speed-up into this file")
    options.add_argument("--real", action="store_true", help="processes of this machine, one thread each")
    options.add_argument("--model", default="demo", help="with --real")
    options.add_argument("--requests", type=int, default=48, help="with --real: for each number of replicas")
    given = options.parse_args(argv)
    if given.real:
        replicas = [int(n) for n in (given.replicas or "1,2,4").split(",")]
        print(table([scale_really(work, replicas, given.model, given.requests) for work in WORKS]))
        return
    replicas = [int(n) for n in given.replicas.split(",")] if given.replicas else list(REPLICAS)
    rows = [scale(work, panel, replicas) for work in WORKS for panel in (work.panel, OTHER[work.panel])]
    print(table(rows))
    if given.svg:
        given.svg.write_text(draw(rows))


if __name__ == "__main__":
    main()
