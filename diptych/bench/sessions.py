"""W6 and W7: requests that follow each other, where the caches and the split show.

W6  users talk for some turns; every turn shows a window of pictures, one new and the others of the turn before. The
    first picture leaves each time, so a text prefix cache alone does not help.
W7  text streams run on; then again while bursts of new pictures arrive. What counts are the gaps of the text streams.

All pictures are drawn before the clock starts: drawing one takes longer than a token and would be measured as a gap.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import dataclass, field, replace

import httpx

from diptych.bench.client import Reply, Tally, Target, ask
from diptych.bench.figures import Figures, mean, percentile, quotient
from diptych.bench.machine import Meter, ProcessTrees
from diptych.bench.workloads import Request, draw_image, random_words, seeded

NUM_QUESTION_WORDS = 24
NUM_STREAM_WORDS = 32
NUM_STREAM_TOKENS = 128
NUM_BURST_TOKENS = 4


@dataclass(frozen=True, slots=True)
class SessionShape:
    """How many and how long; the defaults are the recorded workload."""

    num_users: int = 6
    num_turns: int = 6
    window: int = 3
    num_output_tokens: int = 24
    num_streams: int = 2
    stream_s: float = 20.0
    burst_size: int = 4
    burst_every_s: float = 2.0


def session_seed(seed: int, salt: str) -> int:
    """A salt gives other words and pictures, as in the other workloads."""
    return seed if not salt else zlib.crc32(salt.encode()) % 10_000 + 1000 + seed


async def run_sliding_window(
    seed: int, salt: str, target: Target, server: ProcessTrees | None, tally: Tally, shape: SessionShape
) -> tuple[Figures, list[str]]:
    """W6."""
    conversations = [sliding_window_turns(session_seed(seed, salt), user, shape) for user in range(shape.num_users)]
    tally.num_requests = shape.num_users * shape.num_turns
    async with target.open_client() as client:
        await _warm_up(client, target)

        async def talk(turns: list[Request]) -> list[Reply]:
            return [await ask(client, target, turn, tally) for turn in turns]

        async with Meter(server) as meter:
            replies = await asyncio.gather(*map(talk, conversations))
    first = [turns[0].ttft_s for turns in replies if turns[0].ttft_s is not None and not turns[0].error]
    later = [turn.ttft_s for turns in replies for turn in turns[1:] if turn.ttft_s is not None and not turn.error]
    good = [turn for turns in replies for turn in turns if turn.error is None]
    errors = [turn.error for turns in replies for turn in turns if turn.error is not None]
    return {
        "output_tok_s": sum(turn.num_output_tokens for turn in good) / meter.duration_s,
        "ttft_first_turn": mean(first),
        "ttft_later_turns": mean(later),
        "ratio": quotient(mean(later), mean(first)),
        "requests": tally.num_requests,
        "errors": len(errors),
        "short": sum(turn.num_output_tokens < shape.num_output_tokens for turn in good),
        "cached_tok": sum(turn.num_cached_tokens for turn in good),
        **meter.figures(),
    }, errors


def sliding_window_turns(seed: int, user: int, shape: SessionShape) -> list[Request]:
    """One user's turns: turn t shows pictures t to t + window - 1 of that user."""
    rng = seeded(f"W6-{seed}-{user}")
    first_image_seed = seed * 100_000 + user * 1000
    num_images = shape.num_turns + shape.window - 1
    images = [draw_image(first_image_seed + index, 480, 360) for index in range(num_images)]
    return [
        Request(
            text=random_words(rng, NUM_QUESTION_WORDS),
            num_prompt_tokens=NUM_QUESTION_WORDS,
            num_output_tokens=shape.num_output_tokens,
            images=tuple(images[turn : turn + shape.window]),
        )
        for turn in range(shape.num_turns)
    ]


@dataclass(slots=True)
class _Phase:
    """One stretch of W7, with or without bursts: the replies of the text streams and of the pictures."""

    streams: list[Reply] = field(default_factory=list)
    pictures: list[Reply] = field(default_factory=list)

    @property
    def gaps_s(self) -> list[float]:
        return [gap for reply in self.streams for gap in reply.gaps_s]


async def run_bursts(
    seed: int, salt: str, target: Target, server: ProcessTrees | None, tally: Tally, shape: SessionShape
) -> tuple[Figures, list[str]]:
    """W7."""
    seed = session_seed(seed, salt)
    bursts = burst_requests(seed, shape)
    chat = replace(target, text_api="chat", num_template_tokens=0)
    async with target.open_client() as client:
        await _warm_up(client, target)
        async with Meter(server) as meter:
            alone = await _run_phase(client, chat, f"W7-{seed}-a", [], tally, shape)
            disturbed = await _run_phase(client, chat, f"W7-{seed}-b", bursts, tally, shape)
    replies = alone.streams + disturbed.streams + disturbed.pictures
    errors = [reply.error for reply in replies if reply.error is not None]
    figures: Figures = {"requests": len(replies), "errors": len(errors)}
    for name, phase in (("text_only", alone), ("with_bursts", disturbed)):
        gaps_s = phase.gaps_s
        figures[f"{name}_n"] = len(gaps_s)
        figures[f"{name}_p50"] = percentile(gaps_s, 0.5)
        figures[f"{name}_p99"] = percentile(gaps_s, 0.99)
        figures[f"{name}_max"] = max(gaps_s, default=None)
    figures["p99_ratio"] = quotient(figures["with_bursts_p99"], figures["text_only_p99"])
    figures["burst_ttft_mean"] = mean([reply.ttft_s for reply in disturbed.pictures if reply.ttft_s is not None])
    figures["num_pictures"] = len(disturbed.pictures)
    return figures | meter.figures(), errors


def burst_requests(seed: int, shape: SessionShape) -> list[list[Request]]:
    """As many bursts as a server could get through if it took no time to answer."""
    return [
        [
            Request("What is this?", 4, NUM_BURST_TOKENS, (draw_image(seed * 900_000 + burst * 100 + index),))
            for index in range(shape.burst_size)
        ]
        for burst in range(int(shape.stream_s // shape.burst_every_s))
    ]


async def _run_phase(
    client: httpx.AsyncClient,
    target: Target,
    stream_seed: str,
    bursts: list[list[Request]],
    tally: Tally,
    shape: SessionShape,
) -> _Phase:
    phase = _Phase()
    stop_at = time.perf_counter() + shape.stream_s

    async def keep_streaming(index: int) -> None:
        rng = seeded(f"{stream_seed}-{index}")
        while time.perf_counter() < stop_at:
            text = random_words(rng, NUM_STREAM_WORDS)
            reply = await ask(client, target, Request(text, NUM_STREAM_WORDS, NUM_STREAM_TOKENS), tally)
            phase.streams.append(reply)
            if reply.error is not None:
                return

    async def send_bursts() -> None:
        for burst in bursts:
            if time.perf_counter() >= stop_at - shape.burst_every_s:
                return
            await asyncio.sleep(shape.burst_every_s)
            phase.pictures += await asyncio.gather(*(ask(client, target, request, tally) for request in burst))

    await asyncio.gather(send_bursts(), *map(keep_streaming, range(shape.num_streams)))
    return phase


async def _warm_up(client: httpx.AsyncClient, target: Target) -> None:
    await ask(client, replace(target, text_api="chat"), Request("warm up", 2, 8))
