"""Drives a `Decoder` as the engine does: ragged batches over a paged cache, blocks handed out in shuffled order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from services.text_engine.attention.interface import AttentionBackend, AttentionMetadata
from services.text_engine.models.decoder import Decoder


@dataclass
class PagedSequence:
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0


class PagedDecoder:
    """A decoder with its KV caches and a pool of blocks that is never given back."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        *,
        num_blocks: int = 96,
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.kv_caches = [
            attention.allocate_kv_cache(num_blocks, block_size, shape) for shape in decoder.attention_shapes
        ]
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    @torch.inference_mode()
    def step(self, batch: list[tuple[PagedSequence, torch.Tensor]]) -> list[torch.Tensor]:
        """Append each sequence's new rows, in one forward pass; the logits at every new position.

        batch    (sequence, token ids [n] or embeddings [n, hidden_size]) each
        returns  [n, vocab_size] fp32 each
        """
        inputs = [new if new.is_floating_point() else self.decoder.embed(new) for _, new in batch]
        lengths = [len(rows) for rows in inputs]
        positions, slots = [], []
        for (sequence, _), num_new in zip(batch, lengths, strict=True):
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_new
            while len(sequence.block_table) * self.block_size < end:
                sequence.block_table.append(self._free.pop())
            positions += range(start, end)
            slots += [self._slot(sequence, position) for position in range(start, end)]
            sequence.num_computed_tokens = end
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            seq_lens=torch.tensor([sequence.num_computed_tokens for sequence, _ in batch], dtype=torch.int32),
            block_tables=self._block_tables([sequence for sequence, _ in batch]),
            slot_mapping=torch.tensor(slots),
        )
        hidden = self.decoder.forward(torch.cat(inputs), torch.tensor(positions), self.kv_caches, metadata)
        return list(self.decoder.compute_logits(hidden).split(lengths))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of one new sequence, computed whole."""
        [logits] = self.step([(PagedSequence(), tokens)])
        return logits

    def generate(self, prompts: list[torch.Tensor], num_new_tokens: int) -> list[list[int]]:
        """Greedy continuations of all prompts (token ids or embeddings) as one batch, step by step."""
        sequences = [PagedSequence() for _ in prompts]
        outputs: list[list[int]] = [[] for _ in prompts]
        inputs = prompts
        for _ in range(num_new_tokens):
            logits = self.step(list(zip(sequences, inputs, strict=True)))
            inputs = [rows[-1:].argmax(-1) for rows in logits]
            for output, token in zip(outputs, inputs, strict=True):
                output.append(int(token))
        return outputs

    def _slot(self, sequence: PagedSequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _block_tables(self, sequences: list[PagedSequence]) -> torch.Tensor:
        widest = max(len(sequence.block_table) for sequence in sequences)
        rows = [sequence.block_table + [0] * (widest - len(sequence.block_table)) for sequence in sequences]
        return torch.tensor(rows, dtype=torch.int32)
