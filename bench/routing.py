"""Routing under load: engines chosen by load and affinity against engines chosen by turns.

  python -m bench.routing [--engines 2] [--rounds 3] [--users 24] [--turns 4] [MODEL]

Every user asks, turn after turn, about one of a few pictures or about none, each turn sending the whole conversation:
what is cached where then matters. Users ask again at once, so that the engines are never idle. A policy's engines start
with empty caches in every round; the policies take turns. Engines share this machine's cores, one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from PIL import Image

from diptych.machine import free_ports
from tests.gateway_stack import data_url

POLICIES = ("affinity", "round_robin")
WORDS = ("apple", "river", "stone", "cloud", "paper", "green", "seven", "light", "under", "house", "music", "water")
START_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Result:
    seconds: float = 0.0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def hit_ratio(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?", default="demo")
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--users", type=int, default=24)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--tokens", type=int, default=24, help="tokens of each answer")
    given = options.parse_args()
    results: dict[str, list[Result]] = {policy: [] for policy in POLICIES}
    for number in range(given.rounds):
        for policy in POLICIES:
            with system(policy, given.model, given.engines) as url:
                result = asyncio.run(load(url, given.users, given.turns, given.tokens, seed=number))
            results[policy].append(result)
            print(f"round {number + 1} {policy:12} {shown([result])}", flush=True)
    for policy in POLICIES:
        print(f"median  {policy:12} {shown(results[policy])}")
    ratio = median(results["affinity"], "tokens_per_s") / median(results["round_robin"], "tokens_per_s")
    print(f"affinity / round robin: {ratio:.2f} of the tokens per second, {given.engines} engines")


def median(results: list[Result], name: str) -> float:
    return statistics.median(getattr(result, name) for result in results)


def shown(results: list[Result]) -> str:
    ttft_s = statistics.median(statistics.mean(result.ttft_s) for result in results)
    return (
        f"{median(results, 'tokens_per_s'):6.0f} tokens/s  prefix hits {median(results, 'hit_ratio'):5.1%}  "
        f"mean time to first token {ttft_s * 1000:5.0f} ms"
    )


@contextmanager
def system(policy: str, model: str, num_engines: int) -> Iterator[str]:
    [port] = free_ports(1)
    env = os.environ | {"DIPTYCH_GATEWAY_ROUTING": policy}
    argv = [sys.executable, "-m", "diptych", "serve", model, f"--port={port}", f"--text-engines={num_engines}"]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, num_engines)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def wait_until_ready(url: str, num_engines: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            state = httpx.get(f"{url}/ready", trust_env=False).json()
        except httpx.TransportError:
            state = {}
        if state.get("text_engines", {}).get("ready") == num_engines:
            return
        time.sleep(0.2)
    raise SystemExit(f"{num_engines} engines did not become ready within {START_TIMEOUT_S:g} s")


async def load(url: str, num_users: int, num_turns: int, num_tokens: int, seed: int) -> Result:
    result = Result()
    pictures = [data_url(picture(1000 * seed + number)) for number in range(max(1, num_users // 4))]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False, limits=limits) as http:
        begun = time.monotonic()
        users = (
            converse(http, random.Random(f"{seed} {user}"), pictures, num_turns, num_tokens, result)
            for user in range(num_users)
        )
        await asyncio.gather(*users)
        result.seconds = time.monotonic() - begun
    return result


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (240, 320, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


async def converse(
    http: httpx.AsyncClient, rng: random.Random, pictures: list[str], num_turns: int, num_tokens: int, result: Result
) -> None:
    messages: list[dict[str, Any]] = []
    for turn in range(num_turns):
        content: list[dict[str, Any]] = [{"type": "text", "text": " ".join(rng.choices(WORDS, k=rng.randint(10, 40)))}]
        if turn == 0 and rng.random() < 0.7:
            content.append({"type": "image_url", "image_url": {"url": rng.choice(pictures)}})
        messages.append({"role": "user", "content": content})
        body = {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        answer = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
        usage = answer["usage"]
        result.num_output_tokens += usage["completion_tokens"]
        result.num_prompt_tokens += usage["prompt_tokens"]
        result.num_cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        result.ttft_s.append(usage["timings"].get("queue", 0.0) + usage["timings"].get("prefill", 0.0))
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "-"})


if __name__ == "__main__":
    main()
