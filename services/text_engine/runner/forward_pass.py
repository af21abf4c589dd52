"""One step's batch through the decoder, on one rank: arrays in, logits out. Knows no sequences."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from services.text_engine.models.interface import CausalModel
from services.text_engine.models.lora.adapted import LoadedAdapters
from services.text_engine.runner.batch_tensors import BatchArrays, BatchTensors, to_tensors
from services.text_engine.runner.block_copies import copy_blocks
from services.text_engine.runner.cuda_graphs import Graphs
from services.text_engine.runner.host_tier import HostTier
from services.text_engine.runner.memory_ahead import MemoryAhead
from shared.cuda_capture import Capture

MergeImages = Callable[[torch.Tensor], None]
TakeLogits = Callable[[torch.Tensor], None]
PROMPT_LOGITS_BYTES: Final = 32 << 20  # of the logits of a prompt's tokens that exist at one time


class ForwardPass:
    """kv_caches   one tensor per layer in the attention backend's own layout
    block_dim   their dimension that counts blocks
    adapters    those that the decoder's products take part in; None: there will be none
    host_tier   where evicted blocks are copied to, if anywhere
    """

    def __init__(
        self,
        decoder: CausalModel,
        kv_caches: list[torch.Tensor],
        device: torch.device,
        *,
        block_dim: int,
        adapters: LoadedAdapters | None = None,
        host_tier: HostTier | None = None,
    ) -> None:
        self._decoder = decoder
        self._adapters = adapters
        self._kv_caches = kv_caches
        self._block_dim = block_dim
        self._host_tier = host_tier
        self._memory_ahead: MemoryAhead | None = None
        self._device = device
        self._graphs: Graphs | None = None
        self._capture_again: Callable[[], None] | None = None

    @property
    def kv_cache_bytes(self) -> int:
        return sum(kv_cache.nbytes for kv_cache in self._kv_caches)

    def prepare_memory(self, num_used_blocks: int) -> bool:
        """Some of the memory that blocks beyond these will need. False: nothing is left to prepare."""
        if not self._kv_caches:
            return False
        if self._memory_ahead is None:
            self._memory_ahead = MemoryAhead(self._kv_caches, self._block_dim)
        return self._memory_ahead.advance(num_used_blocks)

    def release_kv_cache(self) -> None:
        """Give its memory back, and the graphs', which have its addresses in them; nothing can run until `restore`."""
        self._graphs = None
        self._memory_ahead = None
        self._kv_caches.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_kv_cache(self, kv_caches: list[torch.Tensor]) -> None:
        """Go on with new caches of the same shapes; without any, as before, if the graphs cannot be captured."""
        assert not self._kv_caches, "the KV cache was not released"
        self._kv_caches += kv_caches
        if self._capture_again is not None:
            try:
                self._capture_again()
            except BaseException:
                self.release_kv_cache()
                raise

    @torch.inference_mode()
    def capture(self, capture: Capture, sizes: list[int], *, max_blocks: int) -> None:
        """Have decode steps of up to the largest size run as graphs from now on; takes a while.

        max_blocks  of any sequence
        """
        self._capture_again = partial(self.capture, capture, sizes, max_blocks=max_blocks)
        self._graphs = Graphs(
            self._forward,
            sizes,
            max_blocks=max_blocks,
            device=self._device,
            capture=capture,
            has_grid_positions=self._decoder.config.rope.sections is not None,
        )

    @torch.inference_mode()
    def run(
        self, arrays: BatchArrays, merge_images: MergeImages, take_prompt_logits: TakeLogits | None = None
    ) -> torch.Tensor:
        """The logits [num_sampling, vocab_size] fp32 of the rows that are to be sampled, drafts' too; on rank 0.

        merge_images        overwrites rows of the batch's embeddings [num_tokens, row_size], in place, with images'
        take_prompt_logits  is given those of `arrays.prompt_rows`, some [num_rows, vocab_size] fp32 at a time; rank 0's
        """
        if arrays.copies:
            host_caches = None if self._host_tier is None else self._host_tier.caches
            copy_blocks(arrays.copies, self._kv_caches, self._block_dim, host_caches)
        if self._graphs is not None and self._graphs.fit(arrays):
            hidden, sampling_rows = self._graphs.run(arrays)
        else:
            tensors = to_tensors(arrays, self._device)
            with self._with_adapters(arrays.adapter_of_token):
                hidden = self._forward(tensors, merge_images if arrays.num_image_rows else None)
            sampling_rows = tensors.sampling_rows
        if arrays.prompt_rows is not None:
            self._compute_prompt_logits(hidden, torch.from_numpy(arrays.prompt_rows), take_prompt_logits)
        if not len(sampling_rows):
            return hidden[:0]
        return self._decoder.compute_logits(hidden[sampling_rows])

    def _compute_prompt_logits(self, hidden: torch.Tensor, rows: torch.Tensor, take: TakeLogits | None) -> None:
        """A collective where there are ranks: each makes its part of the logits, the first has somebody take them."""
        num_rows_at_once = max(1, PROMPT_LOGITS_BYTES // (4 * self._decoder.config.vocab_size))
        for portion in torch.split(rows.to(hidden.device), num_rows_at_once):
            logits = self._decoder.compute_logits(hidden[portion])
            if take is not None:
                take(logits)

    def _forward(self, tensors: BatchTensors, merge_images: MergeImages | None = None) -> torch.Tensor:
        hidden = self._decoder.embed(tensors.token_ids)
        if merge_images is not None:
            num_deep = (self._decoder.config.num_row_parts - 1) * hidden.shape[1]
            if num_deep:  # what the images' rows have for further layers; tokens have nothing there
                hidden = functional.pad(hidden, (0, num_deep))
            merge_images(hidden)
        return self._decoder.forward(hidden, tensors.positions, self._kv_caches, tensors.attention)

    def _with_adapters(self, adapter_of_token: NDArray[np.int32] | None) -> AbstractContextManager[None]:
        if self._adapters is None:
            assert adapter_of_token is None
            return nullcontext()
        return self._adapters.applied(adapter_of_token)
