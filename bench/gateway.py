"""What the gateway itself costs: CPU per streamed chunk and time added to the first token, with a scripted engine.

  python -m bench.gateway [--streams 200] [--tokens 100] [--token-delay 0.05]

The engine, the gateway and this load generator are processes of their own; the CPU time is the gateway's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from diptych.machine import free_ports
from shared.http_protocol import HttpProtocol
from tests.scripted import EngineScript, ScriptedEngine

NUM_ASKED = 300  # for the time to the first token
WAITING_S = 600.0  # between the tokens of streams whose memory is measured


@dataclass(frozen=True, slots=True)
class Result:
    num_chunks: int
    seconds: float
    gateway_cpu_s: float
    first_token_s: list[float]
    rss_mib: float

    def __str__(self) -> str:
        return (
            f"{self.num_chunks} chunks in {self.seconds:.2f} s: {self.num_chunks / self.seconds:.0f} chunks/s, "
            f"{self.gateway_cpu_s / self.num_chunks * 1e6:.0f} us of gateway CPU each "
            f"({self.num_chunks / self.gateway_cpu_s:.0f} chunks/s per core), "
            f"median first token {statistics.median(self.first_token_s) * 1000:.1f} ms, RSS {self.rss_mib:.0f} MiB"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", type=int, default=200, help="streams open at a time")
    options.add_argument("--tokens", type=int, default=100, help="tokens of each stream")
    options.add_argument("--token-delay", type=float, default=0.05, help="seconds between two tokens of a stream")
    given = options.parse_args()
    with served(serve_engine, WAITING_S) as engine_url, gateway(engine_url) as (url, pid):
        print(f"memory: {asyncio.run(memory_kib(url, pid, given.streams)):.0f} KiB for each stream that waits")
    with served(serve_engine, given.token_delay) as engine_url, gateway(engine_url) as (url, pid):
        asyncio.run(measure(url, pid, 4, 10))  # warm
        print("one stream:", asyncio.run(measure(url, pid, 1, given.tokens)))
        print(f"{given.streams} streams:", asyncio.run(measure(url, pid, given.streams, given.tokens)))
        median, fast = asyncio.run(added_s(engine_url, url))
        print(
            f"added to the first token: {median * 1000:.2f} ms (medians of {NUM_ASKED}), {fast * 1000:.2f} ms (tenths)"
        )


async def measure(url: str, pid: int, num_streams: int, num_tokens: int) -> Result:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    async with client(url) as http:
        cpu, start = cpu_s(pid), time.perf_counter()
        streams = [one_stream(http, "/v1/chat/completions", body) for _ in range(num_streams)]
        answers = await asyncio.gather(*streams)
        seconds, used = time.perf_counter() - start, cpu_s(pid) - cpu
    return Result(sum(count for count, _ in answers), seconds, used, [first for _, first in answers], rss_mib(pid))


async def one_stream(http: httpx.AsyncClient, path: str, body: dict[str, object]) -> tuple[int, float]:
    """Number of events and seconds to the first."""
    start, first, count = time.perf_counter(), 0.0, 0
    async with http.stream("POST", path, json=body) as response:
        async for chunk in response.aiter_raw():
            first = first or time.perf_counter() - start
            count += chunk.count(b"\n\n")
    return count, first


async def added_s(engine_url: str, url: str) -> tuple[float, float]:
    """First token through the gateway minus the engine's own, one request at a time, alternating: medians, and the
    fastest tenths, which other work on the machine disturbs less."""
    through: list[float] = []
    direct: list[float] = []
    chat: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 1}
    async with client(url) as gateway_http, client(engine_url) as engine_http:
        for number in range(NUM_ASKED):
            wire = {
                "request_id": f"direct-{number}",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
                "sampling": {"max_tokens": 1},
            }
            direct.append((await one_stream(engine_http, "/v1/generate", dict(wire)))[1])
            through.append((await one_stream(gateway_http, "/v1/chat/completions", chat))[1])
    middle, fast = ([statistics.quantiles(times, n=10)[i] for times in (through, direct)] for i in (4, 0))
    return middle[0] - middle[1], fast[0] - fast[1]


async def memory_kib(url: str, pid: int, num_streams: int) -> float:
    """What the gateway's memory grows by for each stream that has its first token and waits for the next."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 2000, "ignore_eos": True}
    async with client(url) as http, contextlib.AsyncExitStack() as streams:
        before = rss_mib(pid)
        chunks = []  # kept: a stream that nobody reads any more is closed
        for _ in range(num_streams):
            response = await streams.enter_async_context(http.stream("POST", "/v1/chat/completions", json=body))
            chunks.append(response.aiter_raw())
            await anext(chunks[-1])
        return (rss_mib(pid) - before) * 1024 / num_streams


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits)


@contextmanager
def served(serve: Callable[..., None], *arguments: object) -> Iterator[str]:
    """Base URL of what `serve(port, *arguments)` serves in a process of its own."""
    [port] = free_ports(1)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port, *arguments), daemon=True)
    process.start()
    try:
        wait_for(f"http://127.0.0.1:{port}/ready")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


def serve_engine(port: int, token_delay_s: float) -> None:
    scripted = ScriptedEngine(script=EngineScript(token_delay_s=token_delay_s))
    uvicorn.run(scripted.app, port=port, loop="uvloop", http=HttpProtocol, log_level="warning")


@contextmanager
def gateway(engine_url: str) -> Iterator[tuple[str, int]]:
    """Base URL and process id."""
    [port] = free_ports(1)
    env = {
        **os.environ,
        "DIPTYCH_GATEWAY_PORT": str(port),
        "DIPTYCH_GATEWAY_TEXT_ENGINES": engine_url,
        "DIPTYCH_GATEWAY_LOG_LEVEL": "warning",
    }
    process = subprocess.Popen([sys.executable, "-m", "services.gateway"], env=env)
    try:
        wait_for(f"http://127.0.0.1:{port}/ready")
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        time.sleep(0.05)
    raise SystemExit(f"{url} did not become ready")


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
