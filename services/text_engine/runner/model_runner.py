"""Runs one scheduled batch through the model: tensors in, sampled tokens out. Knows no requests, queues or text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from services.text_engine.core.batch import Batch, SampledToken
from services.text_engine.runner.acceptance import sample_and_accept
from services.text_engine.runner.batch_tensors import BatchArrays, build_batch_arrays
from services.text_engine.runner.draft_model import DraftRunner
from services.text_engine.runner.forward_pass import ForwardPass
from services.text_engine.runner.image_inputs import EmbeddingReader, MergeRows, merge_image_rows
from services.text_engine.runner.prompt_logprobs import PromptScorer
from services.text_engine.runner.sampler import Sampler
from services.text_engine.runner.tensor_parallel import Workers


class ModelRunner:
    """forward_pass        over KV caches with blocks of `block_size` tokens
    allocate_kv_caches  makes such caches again
    has_grid_positions  whether the model's positions have three coordinates
    merge_rows          see `merge_image_rows`
    workers             the other ranks of the model, if there are any
    draft               the model that guesses, if there is one: its KV cache comes and goes with this one's
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        sampler: Sampler,
        embeddings: EmbeddingReader,
        allocate_kv_caches: Callable[[], list[torch.Tensor]],
        *,
        block_size: int,
        has_grid_positions: bool = False,
        merge_rows: MergeRows | None = None,
        workers: Workers | None = None,
        draft: DraftRunner | None = None,
    ) -> None:
        self._forward_pass = forward_pass
        self._sampler = sampler
        self._embeddings = embeddings
        self._allocate_kv_caches = allocate_kv_caches
        self._block_size = block_size
        self.has_grid_positions = has_grid_positions
        self._merge_rows = merge_rows
        self._workers = workers
        self._draft = draft

    @torch.inference_mode()
    def execute_model(self, batch: Batch) -> list[SampledToken]:
        """One forward pass over the ragged batch; a token for each sequence that reached its end, in batch order."""
        arrays = build_batch_arrays(batch, self._block_size, has_grid_positions=self.has_grid_positions)
        if self._workers is None:
            return self._sample(batch, self._forward(batch, arrays))
        with self._workers.watched():
            with self._workers.step(arrays):
                logits = self._forward(batch, arrays)
            return self._sample(batch, logits)

    @torch.inference_mode()
    def dummy_run(self, arrays: BatchArrays) -> None:
        """A step that stores nothing and whose tokens nobody gets, from beginning to end."""
        with contextlib.nullcontext() if self._workers is None else self._workers.step(arrays):
            logits = self._forward_pass.run(arrays, lambda _: None)
        logits.max(dim=-1).indices.tolist()

    @property
    def kv_cache_bytes(self) -> int:
        """0 while it is released."""
        return self._forward_pass.kv_cache_bytes + (0 if self._draft is None else self._draft.kv_cache_bytes)

    def prepare_memory(self, num_used_blocks: int) -> bool:
        """See `ForwardPass.prepare_memory`; a draft model's blocks have the same numbers. Other ranks see to theirs."""
        if self._forward_pass.prepare_memory(num_used_blocks):
            return True
        return self._draft is not None and self._draft.prepare_memory(num_used_blocks)

    def release_kv_cache(self) -> None:
        """Free its memory. What was in it is lost, and nothing can run until `restore_kv_cache`."""
        self._forward_pass.release_kv_cache()
        if self._draft is not None:
            self._draft.release_kv_cache()

    @torch.inference_mode()
    def restore_kv_cache(self) -> None:
        """Allocate it again. Whatever is raised, out of memory above all, everything is released as before."""
        try:
            self._forward_pass.restore_kv_cache(self._allocate_kv_caches())
            if self._draft is not None:
                self._draft.restore_kv_cache()
        except BaseException:
            self.release_kv_cache()
            raise

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def _forward(self, batch: Batch, arrays: BatchArrays) -> torch.Tensor:
        def merge_images(hidden: torch.Tensor) -> None:
            merge_image_rows(hidden, batch, self._embeddings, self._merge_rows)

        if arrays.prompt_rows is None:
            return self._forward_pass.run(arrays, merge_images)
        scorer = PromptScorer(batch, vocab_size=self._sampler.vocab_size, banned_ids=self._sampler.banned_ids)
        return self._forward_pass.run(arrays, merge_images, scorer.take)

    def _sample(self, batch: Batch, logits: torch.Tensor) -> list[SampledToken]:
        sampling = batch.sampling
        return sample_and_accept(self._sampler, logits, sampling) if sampling else []
