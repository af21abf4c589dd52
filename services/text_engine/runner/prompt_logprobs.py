"""Log-probabilities of a prompt's own tokens, out of logits that exist for a few rows at a time.

The logits of a whole prompt, [num_prompt_tokens, vocab_size] in fp32, would be gigabytes; what is kept of a row is a
handful of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import torch

from services.text_engine.core.batch import Batch
from services.text_engine.core.sequence import PromptLogprob, Sequence


class PromptScorer:
    """Takes in the logits of a batch's `scored_positions`, in batch order, and gives each sequence what it asked for.

    vocab_size, banned_ids   as the sampler's: what it never samples has no share of the probability here, either
    """

    def __init__(self, batch: Batch, *, vocab_size: int, banned_ids: AbstractSequence[int]) -> None:
        self._vocab_size = vocab_size
        self._banned_ids = list(banned_ids)
        self._rows = [(item.sequence, position + 1) for item in batch.scheduled for position in item.scored_positions]
        self._num_taken = 0

    def take(self, logits: torch.Tensor) -> None:
        """logits [num_rows, padded_vocab] fp32 of the next rows; may be overwritten."""
        rows = self._rows[self._num_taken : self._num_taken + len(logits)]
        self._num_taken += len(rows)
        logits = logits[:, : self._vocab_size]
        logits[:, self._banned_ids] = float("-inf")
        # An image's placeholder may be beyond the vocabulary; what is computed for it is thrown away.
        targets = [min(sequence.token_ids[index], self._vocab_size - 1) for sequence, index in rows]
        # Not `logsumexp`: torch sums a row that is alone in other pieces than one among many, and so to other bits.
        logprobs = torch.log_softmax(logits, dim=1)
        of_targets = logprobs.gather(1, torch.tensor(targets, device=logits.device)[:, None])
        ranks = (logprobs > of_targets).sum(dim=1) + 1
        num_top = max(_num_top(sequence) for sequence, _ in rows)
        top, top_ids = logprobs.topk(min(num_top, self._vocab_size), dim=1)
        columns = zip(rows, of_targets[:, 0].tolist(), ranks.tolist(), top_ids.tolist(), top.tolist(), strict=True)
        for (sequence, _), logprob, rank, ids, top_logprobs in columns:
            count = _num_top(sequence)
            sequence.prompt_logprobs.append(PromptLogprob(logprob, rank, ids[:count], top_logprobs[:count]))


def _num_top(sequence: Sequence) -> int:
    return sequence.sampling.prompt_logprobs or 0
