"""How many guessed tokens hold: a token is sampled at every position of a draft, and the guess must be that token.

For a guess that is certain of itself this *is* rejection sampling (Leviathan et al., Fast Inference from Transformers
via Speculative Decoding, 2023; Chen et al., 2023): with the model's probability p(x) the sampled token is the guess x,
and if it is not, it is drawn from p without x, renormalised. And since the number that decides a token hangs on seed
and position alone, a seeded answer is the same, token by token, with drafts and without.

Every position is sampled as if the guesses before it were its sequence's own tokens: penalties, min_tokens, bias and
log-probabilities need nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import replace

import torch

from services.text_engine.core.batch import SampledToken, ScheduledSequence
from services.text_engine.core.sequence import Sequence
from services.text_engine.runner.sampler import Sampler


def sample_and_accept(
    sampler: Sampler, logits: torch.Tensor, items: AbstractSequence[ScheduledSequence]
) -> list[SampledToken]:
    """One answer for each item, all of which sample.

    logits   [sum of the items' num_sampling_rows, padded_vocab] fp32, in the items' order; may be overwritten
    """
    if not any(item.draft_token_ids for item in items):
        return sampler.sample(logits, [item.sequence for item in items])
    verifications = []
    num_rows = 0
    for item in items:
        verifications.append(_Verification(item, num_rows))
        num_rows += item.num_sampling_rows
    assert num_rows == len(logits)
    # Together where that costs nothing; where a row is work of its own, or needs what was sampled before it, in turns.
    in_turns = [v for v in verifications if sampler.samples_in_turns(v.sequence)]
    turn = [(v, i) for v in verifications for i in range(1 if v in in_turns else v.num_rows)]
    while turn:
        rows = [v.first_row + i for v, i in turn]
        tokens = sampler.sample(logits if len(rows) == num_rows else logits[rows], [v.sequence_at(i) for v, i in turn])
        for (verification, i), token in zip(turn, tokens, strict=True):
            verification.take(i, token)
        turn = [(v, len(v.tokens)) for v in in_turns if not v.is_done]
    return [verification.answer() for verification in verifications]


class _Verification:
    """One row of a batch while its draft is compared with what is sampled.

    tokens   sampled so far: all but the last are the draft's
    """

    def __init__(self, item: ScheduledSequence, first_row: int) -> None:
        self.sequence = item.sequence
        self.first_row = first_row
        self.num_rows = item.num_sampling_rows
        self.tokens: list[SampledToken] = []
        self.is_done = False
        self._draft = item.draft_token_ids

    def sequence_at(self, index: int) -> Sequence:
        """As if `index` tokens of the draft were its own; with the prompt only where the sampler looks at it."""
        if index == 0:
            return self.sequence
        sequence = self.sequence
        # A long prompt is not copied at every position of every draft.
        start = 0 if sequence.sampling.repetition_penalty != 1.0 else sequence.num_prompt_tokens
        return replace(
            sequence,
            token_ids=[*sequence.token_ids[start:], *self._draft[:index]],
            num_prompt_tokens=sequence.num_prompt_tokens - start,
        )

    def take(self, index: int, token: SampledToken) -> None:
        if self.is_done:
            return  # a guess before it did not hold
        self.tokens.append(token)
        self.is_done = index == len(self._draft) or token.token_id != self._draft[index]

    def answer(self) -> SampledToken:
        *accepted, last = self.tokens
        return replace(last, accepted=tuple(accepted)) if accepted else last
