"""W1 to W5: all requests of a workload at once, and what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import httpx

from diptych.bench.client import Reply, Tally, Target, ask
from diptych.bench.figures import Figures, mean, percentile, quotient
from diptych.bench.machine import Meter, ProcessTrees
from diptych.bench.workloads import Request, iter_requests

WARM_UP_SEED = 10_000  # far from the measured ones, so that a warm-up leaves nothing useful in a cache
NUM_WARM_UP_TOKENS = 8


async def run_load(
    name: str,
    seed: int,
    salt: str,
    target: Target,
    server: ProcessTrees | None,
    tally: Tally,
    *,
    num_warm_ups: int = 2,
    max_concurrency: int | None = None,
    max_requests: int | None = None,
) -> tuple[Figures, list[str]]:
    """One timed run. Returns its figures and the errors of the requests that failed."""
    requests = list(islice(iter_requests(name, seed, salt), max_requests))
    tally.num_requests = len(requests)
    gate = asyncio.Semaphore(max_concurrency or len(requests))
    async with target.open_client() as client:
        await _warm_up(client, target, name, seed, salt, num_warm_ups)

        async def ask_in_turn(request: Request) -> Reply:
            async with gate:
                return await ask(client, target, request, tally)

        async with Meter(server) as meter:
            replies = await asyncio.gather(*map(ask_in_turn, requests))
    errors = [reply.error for reply in replies if reply.error is not None]
    return _figures(requests, replies, meter.duration_s) | meter.figures(), errors


async def _warm_up(
    client: httpx.AsyncClient, target: Target, name: str, seed: int, salt: str, num_warm_ups: int
) -> None:
    """A few short requests of the same kind: lazy compilation and thread pools are not what is measured."""
    for index in range(num_warm_ups):
        request = next(iter_requests(name, WARM_UP_SEED + seed * 10 + index, salt))
        await ask(client, target, replace(request, num_output_tokens=NUM_WARM_UP_TOKENS))


def _figures(requests: Sequence[Request], replies: Sequence[Reply], duration_s: float) -> Figures:
    answered = [(request, reply) for request, reply in zip(requests, replies, strict=True) if reply.error is None]
    good = [reply for _, reply in answered]
    num_output_tokens = sum(reply.num_output_tokens for reply in good)
    num_prompt_tokens = sum(reply.num_prompt_tokens for reply in good)
    first_token_s = [reply.ttft_s for reply in good if reply.ttft_s is not None]
    return {
        "output_tok_s": num_output_tokens / duration_s,
        "total_tok_s": (num_output_tokens + num_prompt_tokens) / duration_s,
        "ttft_mean": mean(first_token_s),
        "ttft_p95": percentile(first_token_s, 0.95),
        "itl_mean": mean([reply.inter_token_s for reply in good]),
        "itl_p95": percentile([gap for reply in good for gap in reply.gaps_s], 0.95),
        "tok_per_chunk": quotient(num_output_tokens, sum(reply.num_chunks for reply in good)),
        "requests": len(requests),
        "errors": len(requests) - len(good),
        "short": sum(reply.num_output_tokens < request.num_output_tokens for request, reply in answered),
        "in_tok": num_prompt_tokens,
        "out_tok": num_output_tokens,
        "cached_tok": sum(reply.num_cached_tokens for reply in good),
    }
