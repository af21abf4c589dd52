"""Encodes whose encoder falls silent: who takes them over, when, and when they are better left where they are."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest

from services.gateway.balancer import MAX_MISSED_PROBES, Pool, Replica
from services.gateway.encoding import EncodeJob, Encodes, Encoding
from shared.errors import NotReady
from shared.wire.encoder import Admitted, Encoded, EncoderInfo
from shared.wire.images import ImageRef
from tests.unit.test_attempts import ENCODER, KEY

JOB = EncodeJob(KEY, b"image", "f", "r", again=False)


class Encoders:
    """Each admits once told to, if at all, and encodes once told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_admit, self.may_encode = asyncio.Event(), asyncio.Event()
        self.num_open = 0

    async def encode(self, url: str, *_job: object, **_details: object) -> AsyncIterator[Admitted | Encoded]:
        self.asked.append(url)
        self.num_open += 1
        try:
            await self.may_admit.wait()
            yield Admitted(image=ImageRef(image_key=KEY, num_tokens=1, width=1, height=1))
            await self.may_encode.wait()
            yield Encoded(stored=True)
        finally:
            self.num_open -= 1


class Scene:
    """One encode that a replica has, admitted or not, with others beside it."""

    def __init__(self, num_replicas: int = 2) -> None:
        self.pool: Pool[EncoderInfo] = Pool(time.monotonic, random.Random(0))
        self.pool.update(f"http://replica-{index}" for index in range(num_replicas))
        for replica in self.pool.replicas:
            self.pool.probed(replica, ready=True, info=ENCODER)
        self.encoders = Encoders()
        self.told: list[str] = []
        self.encodes = Encodes(self.pool, self.encoders, lambda _, holder: self.told.append(holder.url))  # type: ignore[arg-type]

    async def start(self, job: EncodeJob = JOB, *, admitted: bool) -> Encoding:
        encoding = self.encodes.start(job)
        if admitted:
            self.encoders.may_admit.set()
            await encoding.admitted
        await settled()
        return encoding

    def silence(self, url: str) -> Replica[EncoderInfo]:
        [replica] = [each for each in self.pool.replicas if each.url == url]
        for _ in range(MAX_MISSED_PROBES + 1):
            self.pool.missed_probe(replica)
        return replica


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_whoever_waits_for_an_admitted_picture_is_told_at_once_so_as_to_send_it_elsewhere():
    scene = Scene()
    encoding = await scene.start(admitted=True)
    silent = scene.silence(scene.encoders.asked[0])
    with pytest.raises(NotReady, match="silent"):
        await asyncio.wait_for(encoding.encoded, 1)
    await settled()
    assert (scene.encoders.num_open, silent.outstanding, len(scene.encodes)) == (0, 0, 0)

    scene.encoders.may_encode.set()
    again = scene.encodes.start(EncodeJob(KEY, b"image", "f", "r", again=True))
    assert (await again.encoded).stored
    assert scene.encoders.asked[1] != silent.url
    assert scene.told == [scene.encoders.asked[1]]


async def test_a_picture_that_is_not_admitted_yet_goes_to_another_without_a_word():
    scene = Scene()
    encoding = await scene.start(admitted=False)
    scene.silence(scene.encoders.asked[0])
    await settled()
    assert sorted(scene.encoders.asked) == [replica.url for replica in scene.pool.replicas]
    scene.encoders.may_admit.set()
    scene.encoders.may_encode.set()
    assert (await encoding.encoded).stored
    assert encoding.where == f"vision_encoder-{1 + int(scene.encoders.asked[1][-1])}"


async def test_the_only_encoder_keeps_its_pictures_until_there_is_another():
    scene = Scene()
    encoding = await scene.start(admitted=True)
    [other] = [each for each in scene.pool.replicas if each.url != scene.encoders.asked[0]]
    scene.pool.probed(other, ready=False, info=None)
    silent = scene.silence(scene.encoders.asked[0])
    await settled()
    assert not encoding.encoded.done()
    scene.pool.probed(other, ready=True, info=ENCODER)
    scene.pool.missed_probe(silent)
    with pytest.raises(NotReady):
        await asyncio.wait_for(encoding.encoded, 1)


async def test_an_encoder_that_comes_to_itself_finishes_what_it_kept():
    scene = Scene(num_replicas=1)
    encoding = await scene.start(admitted=True)
    scene.silence(scene.encoders.asked[0])
    scene.encoders.may_encode.set()
    assert (await encoding.encoded).stored


async def test_a_picture_is_taken_from_its_encoder_once():
    """Where everybody is late it would go round for ever."""
    scene = Scene()
    encoding = await scene.start(EncodeJob(KEY, b"image", "f", "r", again=True), admitted=True)
    scene.silence(scene.encoders.asked[0])
    await settled()
    assert not encoding.encoded.done()
    scene.encoders.may_encode.set()
    assert (await encoding.encoded).stored


async def test_pictures_of_other_encoders_are_left_alone():
    scene = Scene(num_replicas=3)
    encoding = await scene.start(admitted=True)
    for url in {replica.url for replica in scene.pool.replicas} - {scene.encoders.asked[0]}:
        scene.silence(url)
    await settled()
    assert not encoding.encoded.done()
    scene.encoders.may_encode.set()
    assert (await encoding.encoded).stored
