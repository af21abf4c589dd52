"""What the engine shows of itself between two steps: true to its blocks and batches, and bounded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from services.text_engine.core.block_manager import BlockManager
from services.text_engine.core.block_pool import BlockPool
from services.text_engine.core.sequence import ImageSpan
from services.text_engine.core.speculation.prompt_lookup_drafter import PromptLookupDrafter
from services.text_engine.core.speculation.step_costs import StepCosts
from services.text_engine.engine import Engine
from services.text_engine.state import Snapshot, block_map, sequence_states, step_states, take_snapshot
from shared.sampling import Constraint
from shared.state import CELLS, MAX_CELLS, BlockMap
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver

BLOCK_SIZE = 16
FREE = CELLS[0]


@pytest.fixture(scope="module")
def text_folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


def seen(driver: EngineDriver) -> tuple[Snapshot, BlockMap]:
    snapshot = take_snapshot(driver.engine)
    return snapshot, block_map(snapshot)


def check(driver: EngineDriver) -> BlockMap:
    """The map, after comparing it with the pool it is of."""
    snapshot, shown = seen(driver)
    pool = driver.engine.scheduler.blocks.pool
    assert (shown.num_free, shown.num_cached, shown.num_held) == (pool.num_free, pool.num_cached, pool.num_referenced)
    assert shown.num_free + shown.num_cached + shown.num_held == shown.num_blocks
    assert shown.blocks_per_cell == 1
    lower = shown.cells.lower()
    assert lower.count(FREE) == shown.num_free
    assert lower.count("c") == shown.num_cached
    assert lower.count("s") == shown.num_shared
    assert lower.count("p") + lower.count("s") == shown.num_held
    held = {cell for state in sequence_states(snapshot) for cell in state.cells}
    assert held == {i for i, letter in enumerate(lower) if letter in "ps"}
    return shown


def test_the_map_is_true_after_every_step_of_a_shared_prompt(text_folder: Path):
    driver = EngineDriver(text_folder, kv_cache_memory="2MiB", max_num_batched_tokens=37, max_num_seqs=8)
    prompt = list(range(10, 10 + 3 * BLOCK_SIZE))
    driver.generate(prompt, max_tokens=3)
    assert check(driver).num_cached >= 3
    for i in range(5):
        driver.add(f"same-{i}", [*prompt, 100 + i], max_tokens=7)
    most_shared = 0
    while driver.step():
        most_shared = max(most_shared, check(driver).num_shared)
    assert most_shared == 3, "the prompt's three full blocks are held by all five"
    assert check(driver).num_held == 0


def test_blocks_with_an_image_are_marked_while_held_and_while_cached(text_folder: Path):
    driver = EngineDriver(text_folder, kv_cache_memory="2MiB")
    key = "a" * 64
    driver.pictures[key] = torch.randn(2 * BLOCK_SIZE, driver.info.hidden_size)
    tokens = [*range(10, 10 + BLOCK_SIZE), *[0] * (2 * BLOCK_SIZE), *range(50, 50 + BLOCK_SIZE)]
    driver.add("picture", tokens, images=[ImageSpan(key, BLOCK_SIZE, 2 * BLOCK_SIZE)], max_tokens=4)
    driver.step()
    assert check(driver).cells.count("P") == 2
    driver.run()
    assert check(driver).cells.count("C") == 2
    driver.generate(list(range(100, 100 + 2 * BLOCK_SIZE)), max_tokens=1)
    assert check(driver).cells.count("C") == 2, "text has taken other blocks"


def test_steps_say_what_each_sequence_did_in_them(text_folder: Path):
    driver = EngineDriver(text_folder, max_num_batched_tokens=16, max_num_seqs=4, max_prefill_tokens_while_decoding=16)
    driver.add("short", range(10, 15), max_tokens=8)
    driver.step()
    driver.add("long", range(20, 60), max_tokens=2)
    driver.run()
    snapshot, _ = seen(driver)
    batches = [batch for batch in driver.batches if not batch.is_empty]
    steps = step_states(snapshot)[-len(batches) :]  # before them the engine warmed up
    assert [step.number for step in steps] == [steps[0].number + i for i in range(len(steps))]
    for step, batch in zip(steps, batches, strict=True):
        assert step.num_tokens == batch.num_tokens == sum(num_tokens for _, num_tokens, _ in step.rows) <= 16
        assert step.num_rows == len(step.rows) == len(batch.scheduled)
        assert step.seconds > 0
    kinds = [[(number, kind) for number, _, kind in step.rows] for step in steps]
    short, long = (batch.scheduled[-1].sequence.arrival for batch in batches[:2])
    assert kinds[0] == [(short, "prefill")]
    assert kinds[1] == [(short, "decode"), (long, "prefill")], "a long prompt is read beside an answer"


def test_what_is_shown_stays_small_however_large_the_cache_and_long_the_queue(text_folder: Path):
    num_blocks = 3 * MAX_CELLS + 5
    pool = BlockPool(num_blocks)
    held = pool.allocate(1)
    snapshot = Snapshot(
        num_running=1,
        num_waiting=0,
        num_awaiting_image=0,
        num_preemptions=0,
        num_evictions=0,
        num_embedding_hits=0,
        waste=0.0,
        block_size=16,
        ref_counts=pool.ref_counts(),
        cached=pool.cached_blocks(),
        image_blocks=set(held),
        sequences=[],
        tables=[],
        steps=[],
    )
    shown = block_map(snapshot)
    assert len(shown.cells) <= MAX_CELLS
    assert shown.blocks_per_cell == 4
    assert shown.cells.strip(FREE) == "P", "one held block is seen among thousands of free ones"

    driver = EngineDriver(text_folder, max_num_seqs=4)
    for i in range(100):
        driver.add(f"request-{i}", range(10 + i, 30 + i), max_tokens=3)
    driver.step()
    snapshot, _ = seen(driver)
    assert len(snapshot.sequences) == 64
    assert (snapshot.num_running, snapshot.num_waiting) == (4, 96)
    driver.run()


def test_a_look_at_an_engine_changes_nothing(text_folder: Path):
    plain, watched = EngineDriver(text_folder), EngineDriver(text_folder)
    for driver in (plain, watched):
        for i in range(3):
            driver.add(f"request-{i}", range(10 + i, 50 + i), max_tokens=5)
    plain.run()
    while watched.step():
        check(watched)
    assert {name: answer.token_ids for name, answer in watched.answers.items()} == {
        name: answer.token_ids for name, answer in plain.answers.items()
    }


def test_an_empty_engine_can_be_looked_at():
    blocks = BlockManager(BlockPool(7), BLOCK_SIZE)
    scheduler: Any = SimpleNamespace(running=[], waiting=[], blocks=blocks, num_preemptions=0)
    engine = SimpleNamespace(scheduler=scheduler, past_steps=[], embeddings=SimpleNamespace(num_hits=0))
    shown = block_map(take_snapshot(cast(Engine, engine)))
    assert shown.cells == FREE * 7


def test_steps_keep_nothing_large_of_sequences_that_have_ended(text_folder: Path):
    driver = EngineDriver(text_folder)
    free = StepCosts([(1, 1.0), (64, 1.0)])
    driver.engine.scheduler.drafter = PromptLookupDrafter(free, num_speculative_tokens=3, never_sampled=frozenset())
    yes = Constraint(kind="choice", value='["yes and yes and yes again", "no, and no, and no again"]')
    driver.add("scored", range(40, 90), prompt_logprobs=2, n=2)
    driver.add("bound", range(40, 70), constraint=yes, ignore_eos=False)
    driver.add("cut", range(40, 95))
    for _ in range(4):
        driver.step()
    held = [item.sequence for step in driver.engine.past_steps for item in step.scheduled]
    assert any(each.lookup for each in held)
    assert any(each.token_filter for each in held)
    assert any(each.prompt_logprobs for each in held)
    driver.engine.abort("cut")
    del driver.answers["cut"]
    driver.run()
    remembered = {item.sequence for step in driver.engine.past_steps for item in step.scheduled}
    assert {each.request_id for each in remembered} >= {"scored", "bound", "cut"}
    for sequence in remembered:
        assert (sequence.lookup, sequence.token_filter, sequence.processors) == (None, None, None)
        assert sequence.prompt_logprobs == []
    assert len(step_states(take_snapshot(driver.engine))) == len(driver.engine.past_steps)
