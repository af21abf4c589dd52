"""A cost model from measured times: least squares over what the parts of a step cost, none of them below nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

NUM_ROUNDS: Final = 20_000
GOOD_ENOUGH: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """So many steps with these in them took `seconds` together."""

    seconds: float
    num_steps: float
    num_prompt_tokens: float = 0.0
    num_pairs: float = 0.0
    num_sequences: float = 0.0
    num_context_tokens: float = 0.0

    @property
    def amounts(self) -> tuple[float, ...]:
        return (self.num_steps, self.num_prompt_tokens, self.num_pairs, self.num_sequences, self.num_context_tokens)


def fit_step(timed: Sequence[Timed]) -> dict[str, float]:
    """CostModel's fields about steps, each at least 0. Every time counts by its relative error, long or short."""
    rows = [[amount / one.seconds for amount in one.amounts] for one in timed]
    names = ("step_s", "prompt_token_s", "attention_pair_s", "sequence_s", "context_token_s")
    return dict(zip(names, non_negative(rows, [1.0] * len(rows)), strict=True))


def non_negative(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """x >= 0 that minimises |rows x - wanted|², by coordinate descent; a column of zeros gets 0."""
    size = len(rows[0])
    scales = [sum(row[i] ** 2 for row in rows) ** 0.5 for i in range(size)]
    scaled = [[value / scale if scale else 0.0 for value, scale in zip(row, scales, strict=True)] for row in rows]
    products = [[sum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    aims = [sum(row[i] * want for row, want in zip(scaled, wanted, strict=True)) for i in range(size)]
    x = [0.0] * size
    for _ in range(NUM_ROUNDS):
        if max(_improved(x, products, aims), default=0.0) < GOOD_ENOUGH:
            break
    return [value / scale if scale else 0.0 for value, scale in zip(x, scales, strict=True)]


def _improved(x: list[float], products: list[list[float]], aims: list[float]) -> Iterator[float]:
    """Each coordinate put where the others want it; yields how far it moved."""
    for i, row in enumerate(products):
        if not row[i]:
            continue
        best = max(0.0, x[i] + (aims[i] - sum(p * value for p, value in zip(row, x, strict=True))) / row[i])
        moved, x[i] = abs(best - x[i]), best
        yield moved
