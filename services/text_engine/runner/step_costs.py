"""What steps of some lengths cost on this machine, measured once, at the start: a draft is worth verifying only where a
few tokens more hardly lengthen a step. On a small CPU that ends at a handful of tokens, on a large GPU at hundreds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np

from services.text_engine.core.speculation.step_costs import StepCosts
from services.text_engine.runner.batch_tensors import BatchArrays

MAX_TOKENS: Final = 128
NUM_RUNS: Final = 4  # of which the fastest counts: everything else that happens on a machine makes a step slower
BUDGET_S: Final = 3.0  # a model so slow that this does not suffice is measured at fewer lengths
PROPORTIONAL: Final = 1.7  # twice the tokens for so many times the cost: from here on the line goes straight up


class Measured(Protocol):
    """A model, the engine's or one that guesses for it. has_grid_positions: whether positions have three coordinates"""

    has_grid_positions: bool

    def dummy_run(self, arrays: BatchArrays) -> None:
        """A step that stores nothing."""
        ...


def measure_step_costs(runner: Measured, *, block_size: int, max_num_tokens: int) -> StepCosts:
    """Runs steps that belong to nobody and store nothing; takes BUDGET_S and a step at most.

    max_num_tokens   of any step
    """
    return StepCosts(_measure(runner, block_size, min(MAX_TOKENS, max_num_tokens)))


def _measure(runner: Measured, block_size: int, max_num_tokens: int) -> Iterator[tuple[int, float]]:
    deadline = time.perf_counter() + BUDGET_S
    num_tokens, half_of_it = 1, float("inf")
    while num_tokens <= max_num_tokens:
        fastest = float("inf")
        for _ in range(NUM_RUNS):
            started = time.perf_counter()
            runner.dummy_run(_one_row(num_tokens, block_size, has_grid_positions=runner.has_grid_positions))
            fastest = min(fastest, time.perf_counter() - started)
            if time.perf_counter() > deadline:
                break
        yield num_tokens, fastest
        if time.perf_counter() > deadline or fastest > PROPORTIONAL * half_of_it:
            return
        num_tokens, half_of_it = 2 * num_tokens, fastest


def _one_row(num_tokens: int, block_size: int, *, has_grid_positions: bool) -> BatchArrays:
    """One sequence's first tokens, all to be sampled; whatever the cache's first block holds is read."""
    rows = np.arange(num_tokens, dtype=np.int64)
    return BatchArrays(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.tile(rows, (3, 1)) if has_grid_positions else rows,
        sampling_rows=rows,
        cu_seqlens_q=np.array([0, num_tokens], dtype=np.int32),
        seq_lens=np.array([num_tokens], dtype=np.int32),
        block_tables=np.zeros((1, -(-num_tokens // block_size)), dtype=np.int32),
        slot_mapping=np.full(num_tokens, -1, dtype=np.int64),
    )
