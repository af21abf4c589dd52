"""A cost model of running services: asks an engine for answers and an encoder for embeddings, and watches the clock.

Meant for replicas that nobody else is asking. Prompts are random tokens and pictures random colours, so that no cache
knows them; a minute or two on a small CPU, seconds on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import statistics
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import httpx
import orjson

from diptych.errors import CommandFailed
from diptych.planner.fit import Timed, fit_step
from diptych.planner.hardware import BLOCK_SIZE, Hardware, Memory
from diptych.simulator.costs import PRESETS, CostModel
from shared.lines import async_lines_of
from shared.wire.common import NDJSON
from shared.wire.encoder import EncoderInfo
from shared.wire.engine import ModelInfo
from shared.wire.engine_admin import CacheState

LONE_PROMPTS: Final = (32, 128, 256, 512, 1024)
BATCHES: Final = ((1, 32), (4, 32), (16, 32), (8, 256), (4, 768))  # sequences, and tokens of each prompt
NUM_OUTPUT_TOKENS: Final = 24
NUM_REPEATS: Final = 2  # of which the fastest counts
MAX_CHUNK: Final = 512  # tokens of a step, by default
NUM_PICTURES: Final = 8
PICTURE_SIZE: Final = (640, 480)
TIMEOUT_S: Final = 120.0


@dataclass(slots=True)
class Answered:
    """perf_counter() at which the question went out and each token came."""

    asked_at: float
    tokens_at: list[float] = field(default_factory=list)


async def measure(engine_url: str, encoder_url: str | None, headers: Mapping[str, str] | None = None) -> Hardware:
    """headers   what the services want to be shown, if they want a token. Raises CommandFailed."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers, trust_env=False) as http:
        if encoder_url is not None:  # measuring an engine takes a minute, which should not be for nothing
            with _told_as("--encoder", "vision encoder", encoder_url):
                await _encoder_info(http, _base_url(encoder_url))
        with _told_as("--engine", "text engine", engine_url):
            hardware = await _engine(http, _base_url(engine_url))
        if encoder_url is None:
            return hardware
        with _told_as("--encoder", "vision encoder", encoder_url):
            return await _encoder(http, _base_url(encoder_url), hardware)


@contextlib.contextmanager
def _told_as(option: str, kind: str, url: str) -> Iterator[None]:
    """Raises CommandFailed, which names the option, for whatever is not a ready service of this kind."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise CommandFailed(f"{option} {url}: {_refusal(error.response, kind)}") from error
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CommandFailed(f"{option} {url}: no {kind} answers there ({reason}); is it running?") from error
    except (ValueError, KeyError) as error:
        raise CommandFailed(f"{option} {url}: what answers there is no {kind}; start one with diptych") from error


def _refusal(response: httpx.Response, kind: str) -> str:
    match response.status_code:
        case httpx.codes.UNAUTHORIZED:
            return f"the {kind} wants a token; put it into DIPTYCH_SERVICE_TOKEN"
        case httpx.codes.NOT_FOUND:
            return f"what answers there is no {kind}; give the address of one, not of the gateway"
        case httpx.codes.SERVICE_UNAVAILABLE:
            return f"the {kind} is not ready yet; try again when it has loaded its model"
        case status:
            return f"the {kind} answered with status {status}"


def _base_url(url: str) -> str:
    """With the http:// that people leave out, and without a slash at its end."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


async def _engine(http: httpx.AsyncClient, url: str) -> Hardware:
    info = ModelInfo.model_validate_json((await http.get(f"{url}/v1/model")).raise_for_status().content)
    cache = CacheState.model_validate_json((await http.get(f"{url}/v1/cache")).raise_for_status().content)
    longest = info.max_model_len - NUM_OUTPUT_TOKENS - 1
    engine = _Engine(http, url, info.vocab_size)
    await engine.answers(2, min(16, longest))  # warm
    timed = [await engine.prefill(num_tokens) for num_tokens in LONE_PROMPTS if num_tokens <= longest]
    for num_sequences, num_tokens in BATCHES:
        if num_tokens <= longest:
            timed.append(await engine.decode(num_sequences, num_tokens))
    costs = replace(
        PRESETS["cpu"],
        **fit_step(timed),  # type: ignore[arg-type]  # floats for the fields that are floats
        num_blocks=info.num_kv_blocks * info.block_size // BLOCK_SIZE,
        max_model_len=info.max_model_len,
        source=f"measured: {info.id} in {info.dtype}; pictures assumed as on the preset cpu",
    )
    kv_token_bytes = cache.size_bytes // max(1, cache.num_blocks * cache.block_size)
    return Hardware(name=info.id, costs=costs, memory=Memory(kv_token_bytes=kv_token_bytes or None))


class _Engine:
    def __init__(self, http: httpx.AsyncClient, url: str, vocab_size: int) -> None:
        self._http = http
        self._url = url
        self._vocab_size = vocab_size
        self._rng = random.Random()
        self._numbers = itertools.count()

    async def prefill(self, num_tokens: int) -> Timed:
        """One prompt alone up to its first token."""
        answers = [(await self.answers(1, num_tokens, 1))[0] for _ in range(NUM_REPEATS)]
        chunks = [min(MAX_CHUNK, num_tokens - start) for start in range(0, num_tokens, MAX_CHUNK)]
        num_pairs = sum(chunk * (i * MAX_CHUNK + chunk // 2) for i, chunk in enumerate(chunks))
        seconds = min(answer.tokens_at[0] - answer.asked_at for answer in answers)
        return Timed(seconds=seconds, num_steps=len(chunks), num_prompt_tokens=num_tokens, num_pairs=num_pairs)

    async def decode(self, num_sequences: int, num_tokens: int) -> Timed:
        """The usual step while so many write together."""
        medians = []
        for _ in range(NUM_REPEATS):
            answers = await self.answers(num_sequences, num_tokens)
            since = max(answer.tokens_at[0] for answer in answers)
            gaps = [
                after - before
                for answer in answers
                for before, after in itertools.pairwise(answer.tokens_at)
                if before >= since
            ]
            medians += [statistics.median(gaps)] if gaps else []
        if not medians:
            raise CommandFailed(f"{num_sequences} answers did not overlap: is somebody else using this engine?")
        context = num_sequences * (num_tokens + NUM_OUTPUT_TOKENS / 2)
        return Timed(seconds=min(medians), num_steps=1, num_sequences=num_sequences, num_context_tokens=context)

    async def answers(
        self, num_sequences: int, num_tokens: int, num_output_tokens: int = NUM_OUTPUT_TOKENS
    ) -> list[Answered]:
        return await asyncio.gather(*(self._answer(num_tokens, num_output_tokens) for _ in range(num_sequences)))

    async def _answer(self, num_tokens: int, num_output_tokens: int) -> Answered:
        body = {
            "request_id": f"plan-{next(self._numbers)}-{self._rng.getrandbits(32):x}",
            # From the middle of the vocabulary: special tokens, which may be refused, are at its ends.
            "prompt": [self._rng.randrange(self._vocab_size // 4, self._vocab_size // 2) for _ in range(num_tokens)],
            "sampling": {"max_tokens": num_output_tokens, "temperature": 0.0, "ignore_eos": True},
        }
        answered = Answered(time.perf_counter())
        async with self._http.stream("POST", f"{self._url}/v1/generate", json=body) as response:
            response.raise_for_status()
            async for line in async_lines_of(response.aiter_raw()):
                event = orjson.loads(line)
                if event["event"] == "error":
                    raise CommandFailed(f"the engine says: {event['error']['message']}")
                if event["event"] == "tokens":
                    answered.tokens_at.append(time.perf_counter())
        return answered


async def _encoder_info(http: httpx.AsyncClient, url: str) -> EncoderInfo:
    return EncoderInfo.model_validate_json((await http.get(f"{url}/v1/info")).raise_for_status().content)


async def _encoder(http: httpx.AsyncClient, url: str, hardware: Hardware) -> Hardware:
    info = await _encoder_info(http, url)
    num_tokens, _ = await _encode(http, url)  # warm
    one_s = min([(await _encode(http, url))[1] for _ in range(NUM_REPEATS)])
    many_s = math.inf
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        await asyncio.gather(*(_encode(http, url) for _ in range(NUM_PICTURES)))
        many_s = min(many_s, (time.perf_counter() - started) / NUM_PICTURES)
    # One pass for one picture takes a + b; under load, full batches of k take a / k + b each.
    batch = hardware.costs.max_encode_batch
    image_s = min(one_s, max(0.0, (many_s - one_s / batch) / (1 - 1 / batch)))
    row_bytes = info.num_row_parts * info.hidden_size * (4 if info.dtype == "float32" else 2)
    costs: CostModel = replace(
        hardware.costs,
        encode_s=one_s - image_s,
        encode_image_s=image_s,
        image_tokens=num_tokens,
        source=hardware.costs.source.split(";")[0] + f"; pictures of {PICTURE_SIZE[0]} x {PICTURE_SIZE[1]}",
    )
    return replace(hardware, costs=costs, memory=replace(hardware.memory, image_row_bytes=row_bytes))


async def _encode(http: httpx.AsyncClient, url: str) -> tuple[int, float]:
    """Tokens of a new picture, and seconds until its embedding is there."""
    picture = png(*PICTURE_SIZE, seed=random.getrandbits(64))
    started = time.perf_counter()
    response = await http.post(f"{url}/v1/encode", content=picture, headers={"Accept": NDJSON})
    seconds = time.perf_counter() - started
    events = [orjson.loads(line) for line in response.raise_for_status().content.splitlines()]
    if events[-1]["event"] != "encoded":
        raise CommandFailed(f"the encoder says: {events[-1].get('error', {}).get('message', events[-1])}")
    return int(events[0]["image"]["num_tokens"]), seconds


def png(width: int, height: int, *, seed: int) -> bytes:
    """Stripes of random colours."""
    rng = random.Random(seed)
    lines = (b"\0" + bytes(rng.randbytes(3) * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(lines), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
