"""Work on replicas: who is asked next, and that the pool hears how each try ended."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from services.gateway.attempts import on_a_replica
from services.gateway.balancer import Info, Pool, Replica
from services.gateway.encoding import EncodeJob, Encodes
from services.gateway.generation import Generator
from services.gateway.vision import Vision
from shared.embedding_cache import EmbeddingCache
from shared.errors import DiptychError, InvalidRequest, NotReady, UpstreamFailed
from shared.wire.encoder import Admitted, DescribeRequest, DescribeResponse, Encoded, EncoderInfo, ImageSize
from shared.wire.engine import GenerateRequest, ModelInfo, Started, TokenizeRequest, TokenizeResponse, Tokens
from shared.wire.images import ImageMetadata, ImageRef

NOBODY = NotReady("nobody is there")
KEY = "a" * 64
MODEL = ModelInfo(
    id="m",
    max_model_len=8,
    vocab_size=9,
    hidden_size=4,
    dtype="float32",
    num_kv_blocks=1,
    block_size=16,
    supports_images=False,
    created=0,
)
ENCODER = EncoderInfo(
    model="m",
    fingerprint="f",
    dtype="float32",
    hidden_size=4,
    max_image_bytes=9,
    max_image_pixels=9,
    supported_formats=["png"],
)


class Engines:
    """Counts tokens, and remembers who was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @asynccontextmanager
    async def generate(self, url: str, *_request: object, **_details: object) -> AsyncIterator[AsyncIterator[object]]:
        self.asked.append(url)

        async def events() -> AsyncIterator[object]:
            yield Started(num_prompt_tokens=1, num_image_tokens=0)
            yield Tokens(text="a", token_ids=[1])

        yield events()

    async def tokenize(self, url: str, _request: TokenizeRequest) -> TokenizeResponse:
        self.asked.append(url)
        return TokenizeResponse(count=1, max_model_len=8, tokens=[1])


class Encoders:
    async def encode(self, *_job: object, **_details: object) -> AsyncIterator[Admitted | Encoded]:
        yield Admitted(image=ImageRef(image_key=KEY, num_tokens=1, width=1, height=1))
        yield Encoded(stored=True)

    async def describe(self, _url: str, request: DescribeRequest) -> DescribeResponse:
        return DescribeResponse(images=[ImageMetadata(num_tokens=1, width=1, height=1) for _ in request.images])


def pool_of(num_replicas: int, info: Info) -> Pool[Info]:
    pool: Pool[Info] = Pool(time.monotonic, random.Random(0))
    pool.update(f"http://replica-{index}" for index in range(num_replicas))
    for replica in pool.replicas:
        pool.probed(replica, ready=True, info=info)
    return pool


def next_untried(pool: Pool[str]):
    def choose(tried: list[Replica[str]], _failure: DiptychError) -> Replica[str] | None:
        return next(iter(pool.available(tried)), None)

    return choose


@pytest.mark.parametrize(("num_broken", "num_tried"), [(0, 1), (1, 2), (2, 2)])
async def test_a_replica_that_breaks_is_replaced_once(num_broken: int, num_tried: int):
    pool = pool_of(3, "model")
    tries: list[int] = []

    async def work(_replica: Replica[str], num_tries: int) -> str:
        tries.append(num_tries)
        if num_tries < num_broken:
            raise UpstreamFailed("it broke")
        return "done"

    if num_broken < num_tried:
        assert await on_a_replica(pool, next_untried(pool), work, nobody=NOBODY) == "done"
    else:
        with pytest.raises(UpstreamFailed):
            await on_a_replica(pool, next_untried(pool), work, nobody=NOBODY)
    assert tries == list(range(num_tried))
    assert [replica.num_failures for replica in pool.replicas] == [1] * num_broken + [0] * (3 - num_broken)


async def test_a_request_that_is_at_fault_itself_is_tried_nowhere_else():
    pool = pool_of(2, "model")
    tries: list[int] = []

    async def work(_replica: Replica[str], num_tries: int) -> str:
        tries.append(num_tries)
        raise InvalidRequest("no such field")

    with pytest.raises(InvalidRequest):
        await on_a_replica(pool, next_untried(pool), work, nobody=NOBODY)
    assert tries == [0]


async def test_without_a_replica_that_is_said():
    pool = pool_of(0, "model")

    async def work(_replica: Replica[str], _num_tries: int) -> str:
        raise AssertionError("there is nobody to ask")

    with pytest.raises(NotReady, match="nobody is there"):
        await on_a_replica(pool, next_untried(pool), work, nobody=NOBODY)


async def test_counted_tokens_speak_for_an_engine_that_had_failed():
    pool = pool_of(1, MODEL)
    [engine] = pool.replicas
    engine.num_failures = 2
    await Generator(pool, Engines()).tokenize(TokenizeRequest(prompt="hi"), model="m")
    assert engine.num_failures == 0


async def test_a_finished_encode_speaks_for_an_encoder_that_had_failed():
    pool = pool_of(1, ENCODER)
    [encoder] = pool.replicas
    encoder.num_failures = 2
    encoding = Encodes(pool, Encoders(), lambda *_: None).start(EncodeJob(KEY, b"image", "f", "r", again=False))
    await encoding.task
    assert encoder.num_failures == 0


async def test_counted_pictures_speak_for_an_encoder_that_had_failed():
    pool = pool_of(1, ENCODER)
    [encoder] = pool.replicas
    encoder.num_failures = 2
    await Vision(pool, Encoders(), EmbeddingCache(None), known_images=1).describe([ImageSize(width=1, height=1)])
    assert encoder.num_failures == 0


async def test_an_engine_to_avoid_is_asked_only_if_there_is_no_other():
    pool, engines = pool_of(3, MODEL), Engines()
    generator, request = Generator(pool, engines), GenerateRequest(request_id="r", prompt="hi")
    opened = partial(generator.open, request, model="m", affinity=b"", request_id="r")
    await opened()
    [favourite] = [replica for replica in pool.replicas if replica.url == engines.asked[0]]
    await opened(avoided=favourite)
    assert engines.asked[1] != favourite.url
    for replica in pool.replicas:
        replica.ready = replica is favourite
    await opened(avoided=favourite)
    assert engines.asked[2] == favourite.url
