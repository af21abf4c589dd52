"""What an encoder's refusal to deliver means for the engine that asked: whose fault it was decides who hears of it."""

from __future__ import annotations

import httpx
import pytest

from services.text_engine.embedding_fetcher import EmbeddingFetcher
from shared.embedding_cache import EmbeddingCache
from shared.errors import DiptychError, EmbeddingNotFound, EncodeFailed, InvalidImage, NotReady, UpstreamTimeout
from shared.wire.images import ImageRef

REF = ImageRef(image_key="a" * 64, num_tokens=1, width=1, height=1, encoder_url="http://encoder")


async def outcome(error: DiptychError) -> DiptychError:
    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(error.status, json=error.to_body())

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        fetcher = EmbeddingFetcher(EmbeddingCache(None), http, hidden_size=4, timeout_s=1)
        with pytest.raises(DiptychError) as raised:
            await fetcher.fetch(REF)
    return raised.value


@pytest.mark.parametrize("error", [InvalidImage("half a picture"), EncodeFailed("not finite")])
async def test_what_is_wrong_with_the_picture_is_told_as_it_is(error: DiptychError):
    told = await outcome(error)
    assert (type(told), told.message) == (type(error), error.message)


@pytest.mark.parametrize("error", [NotReady("shutting down"), UpstreamTimeout("it took too long")])
async def test_what_is_wrong_with_the_encoder_is_not_taken_for_a_fault_of_the_engine(error: DiptychError):
    told = await outcome(error)
    assert (type(told), told.message) == (EmbeddingNotFound, error.message)


async def test_an_encoder_that_cannot_be_reached_has_not_the_embedding():
    def refuse(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody is there")

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as http:
        fetcher = EmbeddingFetcher(EmbeddingCache(None), http, hidden_size=4, timeout_s=1)
        with pytest.raises(EmbeddingNotFound, match="is gone"):
            await fetcher.fetch(REF)
