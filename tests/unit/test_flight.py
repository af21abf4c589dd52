"""One image's way, shared: it goes on while anybody wants it."""

from __future__ import annotations

import asyncio

from services.vision_encoder.flight import Flight
from shared.wire.encoder import Encoded
from shared.wire.images import ImageMetadata


async def test_a_follower_that_leaves_does_not_call_off_what_another_has_been_promised():
    """The first caller has read its `admitted` line and not yet asked for the second when another joins and leaves."""
    flight = Flight(ImageMetadata(num_tokens=4, width=8, height=8))
    may_end = asyncio.Event()

    async def work() -> Encoded:
        await may_end.wait()
        return Encoded(stored=True)

    flight.take_off(work(), on_end=lambda: None)
    with flight.followed():
        leaving = asyncio.create_task(flight.embedding(5.0))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        may_end.set()
        assert (await flight.encoded(5.0)).stored
