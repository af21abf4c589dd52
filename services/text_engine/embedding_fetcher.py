"""Gets image embeddings over the network: from Redis, or from the encoder that made them. Knows no requests."""

from __future__ import annotations

import asyncio

import httpx
import torch

from services.text_engine.request_timeline import Source
from shared.embedding_cache import EmbeddingCache
from shared.errors import (
    DiptychError,
    EmbeddingNotFound,
    EncodeFailed,
    NotReady,
    UpstreamFailed,
    UpstreamTimeout,
    error_from_body,
)
from shared.log import get_logger
from shared.row_codec import dequantize_rows, stored_width
from shared.tensor_blob import BlobError
from shared.torch_io import blob_to_tensor
from shared.wire.common import DEADLINE_HEADER
from shared.wire.images import ImageRef

log = get_logger(__name__)


class EmbeddingFetcher:
    """Gets one embedding: from Redis, else from the encoder named in the reference, which may still be computing it.

    hidden_size    of the model
    num_row_parts  how many vectors of that size make a row; rows of any other width are refused
    timeout_s      total deadline of one fetch
    """

    def __init__(
        self,
        cache: EmbeddingCache,
        http: httpx.AsyncClient,
        *,
        hidden_size: int,
        num_row_parts: int = 1,
        timeout_s: float,
    ) -> None:
        self._cache = cache
        self._http = http
        self._hidden_size = hidden_size
        self._num_row_parts = num_row_parts
        self._timeout_s = timeout_s

    async def fetch(self, ref: ImageRef) -> tuple[torch.Tensor, Source]:
        """[num_tokens, num_row_parts * hidden_size], finite, and who had them.

        Raises a DiptychError saying who could not deliver.
        """
        [blob] = await self._cache.get([ref.image_key])
        if blob is not None:
            try:
                return self._checked(blob, ref), "redis"
            except (BlobError, EncodeFailed) as error:
                log.warning("dropping a damaged cache entry", image_key=ref.image_key[:12], reason=str(error))
                await self._cache.discard(ref.image_key)  # or encoders, which check less of it, would pass it on
        if ref.encoder_url is None:
            raise EmbeddingNotFound(f"the embedding of image {ref.image_key[:12]} has left the cache")
        blob = await self._pull(ref, ref.encoder_url)
        try:
            return self._checked(blob, ref), "vision_encoder"
        except BlobError as error:
            raise UpstreamFailed(f"the vision encoder sent a damaged embedding: {error}") from error

    async def _pull(self, ref: ImageRef, encoder_url: str) -> bytes:
        url = f"{encoder_url}/v1/embeddings/{ref.image_key}"
        headers = {DEADLINE_HEADER: f"{self._timeout_s:g}"}
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.get(url, headers=headers, timeout=self._timeout_s)
        except (TimeoutError, httpx.TimeoutException) as error:
            # Not this engine's fault, and the gateway can have the image encoded elsewhere.
            raise EmbeddingNotFound(f"the vision encoder did not deliver within {self._timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise EmbeddingNotFound(f"the vision encoder that made the embedding is gone ({error!r})") from error
        if response.status_code != httpx.codes.OK:
            refusal = _error_of(response)
            if isinstance(refusal, (NotReady, UpstreamTimeout)):  # of the encoder: from here it would be the engine's
                raise EmbeddingNotFound(refusal.message) from refusal
            raise refusal
        return response.content

    def _checked(self, blob: bytes, ref: ImageRef) -> torch.Tensor:
        tensor = blob_to_tensor(blob)
        is_quantized = tensor.dtype == torch.int8
        size, num_parts = self._hidden_size, self._num_row_parts
        width = stored_width(size, num_parts) if is_quantized else num_parts * size
        if tuple(tensor.shape) != (ref.num_tokens, width):
            raise EncodeFailed(
                f"the embedding has shape {tuple(tensor.shape)}; {ref.num_tokens} rows of {width} were announced"
            )
        if is_quantized:
            tensor = dequantize_rows(tensor, num_parts)
        if not bool(torch.isfinite(tensor).all()):
            raise EncodeFailed("the embedding holds values that are not finite")
        return tensor


def _error_of(response: httpx.Response) -> DiptychError:
    try:
        body = response.json()
    except ValueError:
        body = None
    return error_from_body(response.status_code, body)
