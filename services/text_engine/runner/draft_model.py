"""The draft model on its device: takes in tokens of sequences and says what it thinks comes next.

Its KV cache has the target's block numbers. Which tokens it lacks, and how many guesses are wanted,
core/speculation/draft_model.py decides; nothing here is sampled, and nothing it does can change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from services.text_engine.attention.interface import AttentionBackend
from services.text_engine.core.sequence import Sequence
from services.text_engine.core.speculation.draft_model import DraftRow
from services.text_engine.models.interface import CausalModel
from services.text_engine.runner.batch_tensors import BatchArrays
from services.text_engine.runner.cuda_graphs import graph_memory_bytes, graph_sizes
from services.text_engine.runner.forward_pass import ForwardPass
from services.text_engine.runner.kv_cache import BLOCK_SIZE
from shared.cuda_capture import CudaCapture
from shared.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DraftDecoder:
    """A draft model's weights, and the attention that is its own.

    max_graph_rows   steps of up to so many rows, a token each, are to run as CUDA graphs
    """

    decoder: CausalModel
    attention: AttentionBackend
    dtype: torch.dtype
    max_graph_rows: int

    @property
    def bytes_per_block(self) -> int:
        return sum(kv_cache.nbytes for kv_cache in self.allocate_kv_caches(1))

    @property
    def graph_bytes(self) -> int:
        if not self.max_graph_rows:
            return 0
        return graph_memory_bytes(self.decoder.config, self.max_graph_rows, self.dtype)

    def allocate_kv_caches(self, num_blocks: int) -> list[torch.Tensor]:
        """One per layer."""
        shapes = self.decoder.attention_shapes
        return [self.attention.allocate_kv_cache(num_blocks, BLOCK_SIZE, shape) for shape in shapes]


class _Feed(NamedTuple):
    """Tokens of one row, at positions `start` and on."""

    row: DraftRow
    start: int
    token_ids: list[int]


class DraftRunner:
    """Satisfies `core.speculation.draft_model.DraftModel`.

    num_blocks    of the target's KV cache
    vocab_size    ids that it knows
    num_sampled   of them, that the target may sample: it guesses no others
    banned_ids    never guessed
    max_blocks    of any sequence
    """

    def __init__(
        self,
        draft: DraftDecoder,
        device: torch.device,
        *,
        num_blocks: int,
        num_sampled: int,
        banned_ids: AbstractSequence[int],
        max_blocks: int,
    ) -> None:
        config = draft.decoder.config
        self.max_model_len = config.max_position_embeddings
        self.vocab_size = config.vocab_size
        self.has_grid_positions = config.rope.sections is not None
        self._num_sampled = min(num_sampled, config.vocab_size)
        self._banned_ids = [token_id for token_id in banned_ids if token_id < self._num_sampled]
        self._draft = draft
        self._num_blocks = num_blocks
        kv_caches = draft.allocate_kv_caches(num_blocks)
        self._forward_pass = ForwardPass(draft.decoder, kv_caches, device, block_dim=draft.attention.kv_block_dim)
        if draft.max_graph_rows:
            self._forward_pass.capture(CudaCapture(device), graph_sizes(draft.max_graph_rows), max_blocks=max_blocks)

    def guess(self, rows: list[DraftRow]) -> list[list[int]] | None:
        """See `DraftModel.guess`."""
        try:
            return self._guess(rows)
        except Exception as error:  # whatever broke, answers do without its guesses
            log.error("the draft model failed; answers go on without its guesses", exc_info=error)
            return None

    @torch.inference_mode()
    def _guess(self, rows: list[DraftRow]) -> list[list[int]]:
        """The first pass takes in what each row is behind; each further one the rows' latest guesses."""
        guesses: dict[Sequence, list[int]] = {row.sequence: [] for row in rows}
        feeds = [_Feed(row, row.start, row.sequence.token_ids[row.start : row.end]) for row in rows]
        while feeds:
            logits = self._forward_pass.run(_arrays(feeds, self.has_grid_positions), lambda _: None)
            asked = [feed for feed in feeds if feed.row.num_guesses]
            feeds = []
            for feed, token_id in zip(asked, self._likeliest(logits), strict=True):
                so_far = guesses[feed.row.sequence]
                so_far.append(token_id)
                if len(so_far) < feed.row.num_guesses:
                    feeds.append(_Feed(feed.row, feed.start + len(feed.token_ids), [token_id]))
        return list(guesses.values())

    def _likeliest(self, logits: torch.Tensor) -> list[int]:
        """logits [num_rows, padded_vocab] fp32, may be overwritten"""
        if not len(logits):
            return []
        logits = logits[:, : self._num_sampled]
        if self._banned_ids:
            logits[:, self._banned_ids] = float("-inf")
        token_ids: list[int] = logits.argmax(dim=-1).tolist()
        return token_ids

    @torch.inference_mode()
    def dummy_run(self, arrays: BatchArrays) -> None:
        """A step that stores nothing, from beginning to end: to measure it."""
        self._likeliest(self._forward_pass.run(arrays, lambda _: None))

    @property
    def kv_cache_bytes(self) -> int:
        """0 while it is released."""
        return self._forward_pass.kv_cache_bytes

    def prepare_memory(self, num_used_blocks: int) -> bool:
        """See `ForwardPass.prepare_memory`."""
        return self._forward_pass.prepare_memory(num_used_blocks)

    def release_kv_cache(self) -> None:
        """As the target's: what was in it is lost."""
        self._forward_pass.release_kv_cache()

    @torch.inference_mode()
    def restore_kv_cache(self) -> None:
        self._forward_pass.restore_kv_cache(self._draft.allocate_kv_caches(self._num_blocks))


def _arrays(feeds: list[_Feed], has_grid_positions: bool) -> BatchArrays:
    """One ragged batch; of each row that is to guess, the last token is sampled."""
    num_new = np.array([len(feed.token_ids) for feed in feeds], dtype=np.int32)
    ends = np.array([feed.start + len(feed.token_ids) for feed in feeds], dtype=np.int32)
    cu_seqlens = np.zeros(len(feeds) + 1, dtype=np.int32)
    np.cumsum(num_new, out=cu_seqlens[1:])
    block_tables = np.zeros((len(feeds), -(-int(ends.max()) // BLOCK_SIZE)), dtype=np.int32)
    for i, feed in enumerate(feeds):
        table = feed.row.sequence.block_table[: -(-int(ends[i]) // BLOCK_SIZE)]
        block_tables[i, : len(table)] = table
    positions = np.arange(int(cu_seqlens[-1]), dtype=np.int64) + np.repeat(ends - cu_seqlens[1:], num_new)
    blocks = block_tables[np.repeat(np.arange(len(feeds)), num_new), positions // BLOCK_SIZE].astype(np.int64)
    sampling_rows = [end - 1 for feed, end in zip(feeds, cu_seqlens[1:].tolist(), strict=True) if feed.row.num_guesses]
    return BatchArrays(
        token_ids=np.array([token_id for feed in feeds for token_id in feed.token_ids], dtype=np.int64),
        positions=np.tile(positions, (3, 1)) if has_grid_positions else positions,
        sampling_rows=np.array(sampling_rows, dtype=np.int64),
        cu_seqlens_q=cu_seqlens,
        seq_lens=ends,
        block_tables=block_tables,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
    )
