"""Which tokens stand in a sequence, and how often: what penalties on repetition look at.

Kept from step to step, because counting a long answer anew for every token would cost its length squared.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import Final

import torch

from shared.sampling import SamplingParams

# A draft's tokens are counted while it is verified; so many at the end may not be the answer's own when it goes on.
MAX_UNSURE: Final = 16


class TokenCounts:
    """Satisfies core.sequence.RowProcessor, for one sequence. Ids from `vocab_size` on count for nothing: they stand
    for rows of images."""

    def __init__(
        self, sampling: SamplingParams, prompt: AbstractSequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._generated: list[int] = []
        self._counts = torch.zeros(vocab_size, device=device)
        self._is_in_prompt: torch.Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self._is_in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._is_in_prompt[self._known(prompt)] = True

    def apply(self, row: torch.Tensor, generated: list[int]) -> None:
        """Penalize what has occurred. row [vocab_size], changed in place; generated: the answer's token ids so far."""
        self._count(generated)
        sampling, counts = self._sampling, self._counts
        if self._is_in_prompt is not None:
            seen = self._is_in_prompt | (counts > 0)
            penalty = sampling.repetition_penalty
            row.copy_(torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row))
        if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
            row -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)

    def _count(self, generated: list[int]) -> None:
        known = self._generated
        num_same = min(max(0, len(known) - MAX_UNSURE), len(generated))
        while num_same < min(len(known), len(generated)) and known[num_same] == generated[num_same]:
            num_same += 1
        self._add(known[num_same:], -1.0)
        self._add(generated[num_same:], 1.0)
        self._generated[num_same:] = generated[num_same:]

    def _add(self, token_ids: list[int], number: float) -> None:
        ids = self._known(token_ids)
        self._counts.index_add_(0, ids, torch.full(ids.shape, number, device=ids.device))

    def _known(self, token_ids: AbstractSequence[int]) -> torch.Tensor:
        ids = [token_id for token_id in token_ids if token_id < self._vocab_size]
        return torch.tensor(ids, dtype=torch.long, device=self._counts.device)
