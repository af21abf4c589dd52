"""Logits to tokens, one row per sequence, each row's outcome independent of every other row.

Randomness is counter-based: the uniform number for a sequence's i-th token is a hash of (seed, i), so a seeded request
repeats itself in any batch, after a preemption and after a restart. Order of the transforms as in vLLM: the operator's
logits processors, the grammar's mask, bias, forbidden tokens, penalties, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as AbstractSequence

import torch

from services.text_engine.core.batch import Logprobs, SampledToken
from services.text_engine.core.sequence import Sequence
from services.text_engine.runner.device_sampling import DrawTokens, sampling_tensors, to_host
from services.text_engine.runner.token_bans import NOTHING_LEFT
from services.text_engine.runner.token_counts import TokenCounts
from shared.sampling import SamplingParams

_MASK = 2**64 - 1
NON_FINITE = "the model produced logits that are not finite"
PROCESSED_AWAY = "a logits processor failed, or left no token to choose; the log may have the details"


class Sampler:
    """Samples for sequences of one model.

    vocab_size      ids from here on are padding of the lm_head and never sampled
    banned_ids      never sampled (the image placeholder: it stands for input, not text)
    eos_token_ids   held back while a sequence is below its min_tokens
    draw_tokens     draws for all rows on the logits' device, by the same numbers; None: row by row
    """

    def __init__(
        self,
        vocab_size: int,
        banned_ids: AbstractSequence[int],
        eos_token_ids: frozenset[int],
        draw_tokens: DrawTokens | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._draw_tokens = draw_tokens
        self.banned_ids = list(banned_ids)
        self.eos_token_ids = eos_token_ids
        self._process_seed = secrets.randbits(63)

    def samples_in_turns(self, sequence: Sequence) -> bool:
        """Whether to sample its next token before a later one: it decides what may follow, or a row is work of its own.

        The operator's code never sees what was only guessed, either.
        """
        if sequence.token_filter is not None or sequence.processors is not None:
            return True
        return self._draw_tokens is None and not sequence.sampling.is_greedy

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """logits [num_rows, padded_vocab] fp32, may be overwritten -> one SampledToken per row."""
        if self._draw_tokens is not None:
            return self._sample_on_device(self._draw_tokens, logits, sequences)
        logits = logits[:, : self.vocab_size]
        if self.banned_ids:
            logits[:, self.banned_ids] = float("-inf")
        best, greedy_ids = logits.max(dim=-1)
        is_finite = torch.isfinite(best).tolist()
        errors = [_problem(s, fine, row) for s, fine, row in zip(sequences, is_finite, logits, strict=True)]
        wanted_logprobs = self._logprobs(logits, sequences)
        token_ids = greedy_ids.tolist()
        special = [i for i, s in enumerate(sequences) if errors[i] is None and _needs_own_row(s)]
        if special:
            rows = logits[special]
            for row, i in zip(rows, special, strict=True):
                self._adjust(row, sequences[i])
                if sequences[i].processors is not None or sequences[i].bans is not None:
                    errors[i] = _problem(sequences[i], bool(torch.isfinite(row.max())), row)
            if any(errors[i] is not None for i in special):
                rows = rows[[errors[i] is None for i in special]]
                special = [i for i in special if errors[i] is None]
            for i, token_id in zip(special, self._choose(rows, [sequences[i] for i in special]), strict=True):
                token_ids[i] = token_id
                if (token_filter := sequences[i].token_filter) is not None:
                    token_filter.accept(token_id)
        return [
            self._result(token_id, error, chosen, row)
            for token_id, error, chosen, row in zip(token_ids, errors, wanted_logprobs, logits, strict=True)
        ]

    def _sample_on_device(
        self, draw_tokens: DrawTokens, logits: torch.Tensor, sequences: list[Sequence]
    ) -> list[SampledToken]:
        """As `sample`; for plain requests the host waits for nothing but the tokens."""
        for token_id in self.banned_ids:
            logits[:, token_id] = float("-inf")
        rows = logits[:, : self.vocab_size]
        wanted_logprobs = self._logprobs(rows, sequences)
        for row, sequence in zip(rows, sequences, strict=True):
            if _needs_own_row(sequence) and _problem(sequence, True, row) is None:
                self._adjust(row, sequence)
        if all(sequence.sampling.is_greedy for sequence in sequences):
            best, chosen = rows.max(dim=-1)
            is_finite = torch.isfinite(best)
        else:
            tensors = sampling_tensors(sequences, [self._seed(s) for s in sequences], logits.device)
            chosen, is_finite = draw_tokens(logits, self.vocab_size, tensors)
        token_ids = to_host(torch.where(is_finite, chosen, -1))
        results = []
        for token_id, sequence, logprobs, row in zip(token_ids, sequences, wanted_logprobs, rows, strict=True):
            error = _problem(sequence, token_id >= 0, row)
            if error is None and sequence.token_filter is not None:
                sequence.token_filter.accept(token_id)
            results.append(self._result(token_id, error, logprobs, row))
        return results

    def _result(
        self, token_id: int, error: str | None, logprobs: tuple[torch.Tensor, int] | None, row: torch.Tensor
    ) -> SampledToken:
        if error is not None:
            return SampledToken(-1, error=error)
        if logprobs is None:
            return SampledToken(token_id)
        values, count = logprobs
        top, ids = values.topk(min(count, row.numel())) if count else (values[:0], values[:0])
        return SampledToken(token_id, Logprobs(float(values[token_id]), ids.tolist(), top.tolist()))

    def _logprobs(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[tuple[torch.Tensor, int] | None]:
        """Log-probabilities of the model itself, before any transform, for the rows that asked."""
        return [
            None if s.sampling.logprobs is None else (torch.log_softmax(logits[i], dim=-1), s.sampling.logprobs)
            for i, s in enumerate(sequences)
        ]

    # --- one row --------------------------------------------------------------------------------------------------

    def _adjust(self, row: torch.Tensor, sequence: Sequence) -> None:
        """Bias, forbidden tokens and penalties, in place. row [vocab]."""
        sampling = sequence.sampling
        if sequence.processors is not None:
            sequence.processors.apply(row, sequence.generated_token_ids)
            row[self.banned_ids] = float("-inf")
        if sequence.token_filter is not None:
            row.masked_fill_(~torch.from_numpy(sequence.token_filter.allowed()).to(row.device), float("-inf"))
        if sequence.bans is not None:
            sequence.bans.apply(row, sequence.generated_token_ids)
        if sampling.logit_bias:
            known = {t: v for t, v in sampling.logit_bias.items() if t < self.vocab_size}
            ids = torch.tensor(list(known), dtype=torch.long, device=row.device)
            row[ids] += torch.tensor(list(known.values()), dtype=row.dtype, device=row.device)
        if sequence.num_generated_tokens < sampling.min_tokens:
            self._hold_back_ends(row, sampling)
        if sampling.needs_token_counts:
            self._penalize(row, sequence)

    def _hold_back_ends(self, row: torch.Tensor, sampling: SamplingParams) -> None:
        """No end yet, unless nothing else is left: an answer that its grammar calls complete is filled up with ends."""
        ends = [*(() if sampling.ignore_eos else self.eos_token_ids), *sampling.stop_token_ids]
        ids = [t for t in ends if t < self.vocab_size]
        values = row[ids]
        row[ids] = float("-inf")
        if sampling.constraint is not None and row.max() == float("-inf"):
            row[ids] = values

    def _penalize(self, row: torch.Tensor, sequence: Sequence) -> None:
        if sequence.token_counts is None:
            is_prompt_read = sequence.sampling.repetition_penalty != 1.0
            prompt = sequence.token_ids[: sequence.num_prompt_tokens] if is_prompt_read else []
            sequence.token_counts = TokenCounts(sequence.sampling, prompt, self.vocab_size, row.device)
        sequence.token_counts.apply(row, sequence.generated_token_ids)

    # --- choosing -------------------------------------------------------------------------------------------------

    def _choose(self, rows: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """rows [n, vocab], adjusted -> token ids."""
        return [
            int(row.argmax()) if s.sampling.is_greedy else self._draw(row, s)
            for row, s in zip(rows, sequences, strict=True)
        ]

    def _draw(self, row: torch.Tensor, sequence: Sequence) -> int:
        """One draw by inverting the cumulative distribution of what the filters leave of the row."""
        sampling = sequence.sampling
        # From the best token down, in double: a temperature of 1e-40 would make plain fp32 logits infinite.
        probabilities = torch.softmax((row.double() - row.max()) / sampling.temperature, dim=-1)
        uses_order = 0 < sampling.top_k < self.vocab_size or sampling.top_p < 1.0
        if sampling.min_p > 0.0:
            probabilities = probabilities * (probabilities >= sampling.min_p * probabilities.max())
        ids = None
        if uses_order:
            count = sampling.top_k if 0 < sampling.top_k < self.vocab_size else self.vocab_size
            probabilities, ids = probabilities.topk(count)
            if sampling.top_p < 1.0:
                before = probabilities.cumsum(0) - probabilities
                probabilities = probabilities * (before < sampling.top_p * probabilities.sum())
        cumulative = probabilities.cumsum(0)
        threshold = self._uniform(sequence) * float(cumulative[-1])
        index = int(torch.searchsorted(cumulative, threshold, right=True))
        index = min(index, int(probabilities.nonzero()[-1]))
        return index if ids is None else int(ids[index])

    def _uniform(self, sequence: Sequence) -> float:
        """The number in [0, 1) that decides this sequence's next token: a hash of seed, choice and position."""
        state = _splitmix64((self._seed(sequence) & _MASK) ^ _splitmix64(sequence.index))
        return (_splitmix64(state ^ _splitmix64(sequence.num_generated_tokens)) >> 11) / 2**53

    def _seed(self, sequence: Sequence) -> int:
        seed = sequence.sampling.seed
        return self._process_seed ^ (sequence.arrival << 1) if seed is None else seed


def _problem(sequence: Sequence, is_finite: bool, row: torch.Tensor) -> str | None:
    """Why no token can be chosen for this row, if so."""
    if not is_finite and sequence.bans is not None and row.max() == float("-inf"):
        return NOTHING_LEFT
    if not is_finite:
        return NON_FINITE if sequence.processors is None else PROCESSED_AWAY
    return None if sequence.token_filter is None else sequence.token_filter.problem


def _needs_own_row(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return (
        sequence.token_filter is not None
        or sequence.processors is not None
        or sequence.bans is not None
        or not sampling.is_greedy
        or bool(sampling.logit_bias)
        or sampling.needs_token_counts
        or sequence.num_generated_tokens < sampling.min_tokens
    )


def _splitmix64(value: int) -> int:
    """Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014); a bijection that mixes all bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
