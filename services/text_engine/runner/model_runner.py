"""Runs one scheduled batch through the model: tensors in, sampled tokens out. Knows no requests, queues or text."""

from __future__ import annotations

import torch

from services.text_engine.core.batch import Batch, SampledToken
from services.text_engine.runner.batch_tensors import BatchArrays, build_batch_arrays
from services.text_engine.runner.forward_pass import ForwardPass
from services.text_engine.runner.image_inputs import EmbeddingReader, MergeRows, merge_image_rows
from services.text_engine.runner.sampler import Sampler
from services.text_engine.runner.tensor_parallel import Workers


class ModelRunner:
    """forward_pass        over KV caches with blocks of `block_size` tokens
    has_grid_positions  whether the model's positions have three coordinates
    merge_rows          see `merge_image_rows`
    workers             the other ranks of the model, if there are any
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        sampler: Sampler,
        embeddings: EmbeddingReader,
        *,
        block_size: int,
        has_grid_positions: bool = False,
        merge_rows: MergeRows | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._forward_pass = forward_pass
        self._sampler = sampler
        self._embeddings = embeddings
        self._block_size = block_size
        self._has_grid_positions = has_grid_positions
        self._merge_rows = merge_rows
        self._workers = workers

    @torch.inference_mode()
    def execute_model(self, batch: Batch) -> list[SampledToken]:
        """One forward pass over the ragged batch; a token for each sequence that reached its end, in batch order."""
        arrays = build_batch_arrays(batch, self._block_size, has_grid_positions=self._has_grid_positions)
        if self._workers is None:
            return self._sample(batch, self._forward(batch, arrays))
        with self._workers.watched():
            with self._workers.step(arrays):
                logits = self._forward(batch, arrays)
            return self._sample(batch, logits)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def _forward(self, batch: Batch, arrays: BatchArrays) -> torch.Tensor:
        def merge_images(hidden: torch.Tensor) -> None:
            merge_image_rows(hidden, batch, self._embeddings, self._merge_rows)

        return self._forward_pass.run(arrays, merge_images)

    def _sample(self, batch: Batch, logits: torch.Tensor) -> list[SampledToken]:
        sampling = batch.sampling
        return self._sampler.sample(logits, [item.sequence for item in sampling]) if sampling else []
