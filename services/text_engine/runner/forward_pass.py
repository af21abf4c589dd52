"""One step's batch through the decoder, on one rank: arrays in, logits out. Knows no sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.text_engine.models.decoder import Decoder
from services.text_engine.runner.batch_tensors import BatchArrays, BatchTensors, to_tensors
from services.text_engine.runner.cuda_graphs import Graphs
from shared.cuda_capture import Capture

MergeImages = Callable[[torch.Tensor], None]


class ForwardPass:
    """kv_caches: one tensor per layer in the attention backend's own layout."""

    def __init__(self, decoder: Decoder, kv_caches: list[torch.Tensor], device: torch.device) -> None:
        self._decoder = decoder
        self._kv_caches = kv_caches
        self._device = device
        self._graphs: Graphs | None = None

    @torch.inference_mode()
    def capture(self, capture: Capture, sizes: list[int], *, max_blocks: int) -> None:
        """Have decode steps of up to the largest size run as graphs from now on; takes a while.

        max_blocks  of any sequence
        """
        self._graphs = Graphs(
            self._forward,
            sizes,
            max_blocks=max_blocks,
            device=self._device,
            capture=capture,
            has_grid_positions=self._decoder.config.rope.sections is not None,
        )

    @torch.inference_mode()
    def run(self, arrays: BatchArrays, merge_images: MergeImages) -> torch.Tensor:
        """The logits [num_sampling, vocab_size] fp32 of the rows that are to be sampled; on rank 0.

        merge_images  overwrites rows of the batch's embeddings [num_tokens, hidden_size], in place, with images'
        """
        if self._graphs is not None and self._graphs.fit(arrays):
            hidden, sampling_rows = self._graphs.run(arrays)
        else:
            tensors = to_tensors(arrays, self._device)
            hidden = self._forward(tensors, merge_images if arrays.num_image_rows else None)
            sampling_rows = tensors.sampling_rows
        if not len(sampling_rows):
            return hidden[:0]
        return self._decoder.compute_logits(hidden[sampling_rows])

    def _forward(self, tensors: BatchTensors, merge_images: MergeImages | None = None) -> torch.Tensor:
        hidden = self._decoder.embed(tensors.token_ids)
        if merge_images is not None:
            merge_images(hidden)
        return self._decoder.forward(hidden, tensors.positions, self._kv_caches, tensors.attention)
