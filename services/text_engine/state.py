"""The engine between two steps, for people who watch: copied in its thread at once, put in order elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from prometheus_client import Counter

from services.text_engine.config import TextEngineSettings
from services.text_engine.core.batch import ScheduledSequence
from services.text_engine.core.sequence import Sequence, SequenceStatus
from services.text_engine.engine import Engine, PastStep
from services.text_engine.metrics import EngineMetrics, kv_waste, num_awaiting_image
from shared.metrics import counts_by_label
from shared.state import (
    CELLS,
    MAX_BLOCKS_OF_SEQUENCE,
    MAX_CELLS,
    MAX_SEQUENCES,
    MAX_STEP_ROWS,
    MAX_STEPS,
    BlockMap,
    EngineState,
    SequenceState,
    StepRow,
    StepState,
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of what changes with the next step. Of sequences that is their block tables.

    ref_counts     of every block
    image_blocks   those that hold image positions: of cached blocks and of the listed sequences' own
    tables         the listed sequences' blocks, in the order of `sequences`
    """

    num_running: int
    num_waiting: int
    num_awaiting_image: int
    num_preemptions: int
    num_evictions: int
    num_embedding_hits: int
    waste: float
    block_size: int
    ref_counts: list[int]
    cached: list[int]
    image_blocks: set[int]
    sequences: list[SequenceState]
    tables: list[list[int]]
    steps: list[PastStep]


def take_snapshot(engine: Engine) -> Snapshot:
    """To be called in the engine's thread."""
    scheduler = engine.scheduler
    blocks = scheduler.blocks
    listed = [*scheduler.running, *scheduler.waiting[:MAX_SEQUENCES]][:MAX_SEQUENCES]
    return Snapshot(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_awaiting_image=num_awaiting_image(scheduler),
        num_preemptions=scheduler.num_preemptions,
        num_evictions=blocks.pool.num_evictions,
        num_embedding_hits=engine.embeddings.num_hits,
        waste=kv_waste(scheduler),
        block_size=blocks.block_size,
        ref_counts=blocks.pool.ref_counts(),
        cached=blocks.pool.cached_blocks(),
        image_blocks=blocks.image_blocks | _image_blocks(listed, blocks.block_size),
        sequences=[_state(sequence) for sequence in listed],
        tables=[sequence.block_table[:MAX_BLOCKS_OF_SEQUENCE] for sequence in listed],
        steps=list(engine.past_steps)[-MAX_STEPS:],
    )


def _image_blocks(sequences: Iterable[Sequence], block_size: int) -> set[int]:
    found: set[int] = set()
    for sequence in sequences:
        for span in sequence.images:
            found.update(sequence.block_table[span.start // block_size : -(-span.end // block_size)])
    return found


def _state(sequence: Sequence) -> SequenceState:
    return SequenceState(
        number=sequence.arrival,
        status="running" if sequence.status is SequenceStatus.RUNNING else "waiting",
        awaits_image=sequence.awaited_image is not None and sequence.status is SequenceStatus.WAITING,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_image_tokens=sum(span.num_tokens for span in sequence.images),
        num_cached_tokens=sequence.num_cached_tokens or 0,
        num_computed_tokens=sequence.num_computed_tokens,
        num_tokens=sequence.num_tokens,
        num_preemptions=sequence.num_preemptions,
        cells=[],
    )


# --- in any thread ----------------------------------------------------------------------------------------------------


def engine_state(snapshot: Snapshot, model: str, settings: TextEngineSettings, metrics: EngineMetrics) -> EngineState:
    return EngineState(
        model=model,
        num_running=snapshot.num_running,
        num_waiting=snapshot.num_waiting,
        num_awaiting_image=snapshot.num_awaiting_image,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_preemptions=snapshot.num_preemptions,
        num_prompt_tokens=_count(metrics.prompt_tokens),
        num_generated_tokens=_count(metrics.generation_tokens),
        num_prefix_queries=_count(metrics.prefix_queries),
        num_prefix_hits=_count(metrics.prefix_hits),
        first_token=metrics.recent_first_token.percentiles(),
        between_tokens=metrics.recent_between_tokens.percentiles(),
        embeddings=counts_by_label(metrics.embeddings) | {"memory": snapshot.num_embedding_hits},
        blocks=block_map(snapshot),
        sequences=sequence_states(snapshot),
        steps=step_states(snapshot),
    )


def _count(counter: Counter) -> int:
    return sum(counts_by_label(counter).values())


def block_map(snapshot: Snapshot) -> BlockMap:
    num_blocks = len(snapshot.ref_counts)
    held = np.minimum(np.array(snapshot.ref_counts), 2)
    # Places in CELLS: free, cached, private, shared; three further on with an image, where there is anything.
    places = np.where(held > 0, held + 1, 0)
    places[snapshot.cached] = 1
    images = np.fromiter(snapshot.image_blocks, dtype=np.int64)
    places[images[places[images] > 0]] += 3
    per_cell = blocks_per_cell(num_blocks)
    grouped = np.pad(places, (0, -num_blocks % per_cell)).reshape(-1, per_cell).max(axis=1)
    num_held = int(np.count_nonzero(held))
    return BlockMap(
        num_blocks=num_blocks,
        block_size=snapshot.block_size,
        num_free=num_blocks - num_held - len(snapshot.cached),
        num_cached=len(snapshot.cached),
        num_held=num_held,
        num_shared=int(np.count_nonzero(held == 2)),
        num_evictions=snapshot.num_evictions,
        waste=snapshot.waste,
        blocks_per_cell=per_cell,
        cells=np.frombuffer(CELLS.encode(), dtype=np.uint8)[grouped].tobytes().decode(),
    )


def blocks_per_cell(num_blocks: int) -> int:
    """So that a map of any cache has MAX_CELLS cells at most."""
    return -(-num_blocks // MAX_CELLS)


def sequence_states(snapshot: Snapshot) -> list[SequenceState]:
    per_cell = blocks_per_cell(len(snapshot.ref_counts))
    return [
        state.model_copy(update={"cells": [block // per_cell for block in table]})
        for state, table in zip(snapshot.sequences, snapshot.tables, strict=True)
    ]


def step_states(snapshot: Snapshot) -> list[StepState]:
    return [
        StepState(
            number=step.number,
            seconds=step.seconds,
            num_rows=len(step.scheduled),
            num_tokens=step.num_tokens,
            rows=[_row(item) for item in step.scheduled[:MAX_STEP_ROWS]],
        )
        for step in snapshot.steps
    ]


def _row(item: ScheduledSequence) -> StepRow:
    sequence = item.sequence
    if item.start >= sequence.num_prompt_tokens:
        return sequence.arrival, item.num_new_tokens, "decode"
    has_image = bool(sequence.images_between(item.start, item.end))
    return sequence.arrival, item.num_new_tokens, "image" if has_image else "prefill"
