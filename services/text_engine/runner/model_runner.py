"""Runs one scheduled batch through the model: tensors in, sampled tokens out. Knows no requests, queues or text."""

from __future__ import annotations

import torch

from services.text_engine.core.batch import Batch, SampledToken
from services.text_engine.models.decoder import Decoder
from services.text_engine.runner.batch_tensors import build_batch_tensors
from services.text_engine.runner.image_inputs import EmbeddingReader, merge_image_rows
from services.text_engine.runner.sampler import Sampler


class ModelRunner:
    """kv_caches: one tensor per layer in the attention backend's own layout, blocks of `block_size` tokens."""

    def __init__(
        self,
        decoder: Decoder,
        kv_caches: list[torch.Tensor],
        sampler: Sampler,
        embeddings: EmbeddingReader,
        *,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._kv_caches = kv_caches
        self._sampler = sampler
        self._embeddings = embeddings
        self._block_size = block_size
        self._device = device

    @torch.inference_mode()
    def execute_model(self, batch: Batch) -> list[SampledToken]:
        """One forward pass over the ragged batch; a token for each sequence that reached its end, in batch order."""
        tensors = build_batch_tensors(batch, self._block_size, self._device)
        hidden = self._decoder.embed(tensors.token_ids)
        merge_image_rows(hidden, batch, self._embeddings)
        hidden = self._decoder.forward(hidden, tensors.positions, self._kv_caches, tensors.attention)
        sampling = batch.sampling
        if not sampling:
            return []
        logits = self._decoder.compute_logits(hidden[tensors.sampling_rows])
        return self._sampler.sample(logits, [item.sequence for item in sampling])
