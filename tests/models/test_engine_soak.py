"""The engine under everything at once: right answers, every invariant after every step, true metrics, nothing left.

A few hundred requests here; `python -m bench.engine_soak` takes any number.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from services.text_engine.core.sequence import Sequence
from tests.conftest import CheckpointFactory
from tests.engine_soak import Soak

NUM_REQUESTS = 250


@pytest.fixture(scope="module")
def soak(checkpoint: CheckpointFactory) -> Soak:
    """Over when a test sees it."""
    folder: Path = checkpoint("llava_clip_llama")
    soak = Soak(folder, num_requests=NUM_REQUESTS)
    soak.run()
    return soak


def test_whatever_happens_answers_are_right_and_at_the_end_everything_is_as_at_the_start(soak: Soak):
    soak.check_end()


def test_everything_that_can_happen_has_happened(soak: Soak):
    scheduler = soak.engine.scheduler
    happened = {
        "preemptions": scheduler.num_preemptions,
        "evictions": scheduler.blocks.pool.num_evictions,
        "prefix hits": scheduler.blocks.num_hit_tokens,
        "embedding hits": soak.engine.embeddings.num_hits,
        **{name: soak.counts[name] for name in ("finished", "failed", "aborted", "refused", "resets", "slept")},
        **{name: soak.counts[name] for name in ("broken steps", "images failed")},
    }
    assert all(happened.values()), happened


def test_nobody_remembers_a_request_that_is_over_but_the_list_of_past_steps(soak: Soak):
    gc.collect()
    remembered = {item.sequence for step in soak.engine.past_steps for item in step.scheduled}
    alive = {thing for thing in gc.get_objects() if type(thing) is Sequence and thing.request_id[:5] == "soak "}
    assert alive <= remembered
