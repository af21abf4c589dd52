"""The memory of KV blocks is there before they are written to: as much as is soon needed, and not more."""

from __future__ import annotations

import ctypes
import mmap
import queue
import sys
from typing import Any

import pytest
import torch

from services.text_engine import rank_worker
from services.text_engine.attention.cpu_backend import huge_page_zeros
from services.text_engine.runner import memory_ahead
from services.text_engine.runner.memory_ahead import MemoryAhead
from services.text_engine.runner.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that is asked for memory")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def three_mib_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small pages: how much a huge one brings along is the system's business."""
    monkeypatch.setattr(memory_ahead, "AHEAD_BYTES", 3 * MIB)
    monkeypatch.setattr(memory_ahead, "PIECE_BYTES", MIB)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE)


def resident_bytes(tensor: torch.Tensor) -> int:
    pages = (ctypes.c_ubyte * (tensor.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def caches(num_layers: int = 2, num_blocks: int = 64) -> list[torch.Tensor]:
    """With blocks of 64 KiB each."""
    return [huge_page_zeros(num_blocks << 16, torch.uint8).view(num_blocks, 1, -1) for _ in range(num_layers)]


def run(ahead: MemoryAhead, num_used_blocks: int) -> int:
    num_pieces = 0
    while ahead.advance(num_used_blocks):
        num_pieces += 1
        assert num_pieces < 100
    return num_pieces


def test_what_will_be_written_next_is_ready_in_every_layer():
    layers = caches()
    ahead = MemoryAhead(layers, block_dim=0)
    assert [resident_bytes(layer) for layer in layers] == [0, 0]
    run(ahead, num_used_blocks=0)
    assert [resident_bytes(layer) for layer in layers] == [3 * MIB // 2] * 2
    run(ahead, num_used_blocks=16)
    assert [resident_bytes(layer) for layer in layers] == [MIB + 3 * MIB // 2] * 2


def test_nothing_is_left_to_do_when_the_whole_cache_is_ready():
    layers = caches()
    ahead = MemoryAhead(layers, block_dim=0)
    assert run(ahead, num_used_blocks=64) == 8
    assert run(ahead, num_used_blocks=64) == 0
    assert [resident_bytes(layer) for layer in layers] == [4 * MIB] * 2


def test_what_the_cache_holds_stays_as_it_is():
    layers = caches()
    for layer in layers:
        layer[:40] = 7
    run(MemoryAhead(layers, block_dim=0), num_used_blocks=64)
    for layer in layers:
        assert (layer[:40] == 7).all()
        assert (layer[40:] == 0).all()


def test_a_cache_whose_blocks_are_not_in_order_is_left_alone():
    layers = [huge_page_zeros(64 << 16, torch.uint8).view(2, 64, -1) for _ in range(2)]
    assert not MemoryAhead(layers, block_dim=1).advance(0)
    assert [resident_bytes(layer) for layer in layers] == [0, 0]


def test_a_kernel_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_ahead, "_MADV_POPULATE_WRITE", 12345)
    layers = caches()
    ahead = MemoryAhead(layers, block_dim=0)
    assert not ahead.advance(0)
    monkeypatch.setattr(memory_ahead, "_populate", lambda *_: pytest.fail("asked again"))
    assert not ahead.advance(0)


class Cache:
    """A model's, of which so many pieces are not there yet."""

    def __init__(self, num_pieces: int) -> None:
        self.num_pieces = num_pieces
        self.num_used_blocks: list[int] = []

    def prepare_memory(self, num_used_blocks: int) -> bool:
        self.num_used_blocks.append(num_used_blocks)
        self.num_pieces -= 1
        return self.num_pieces >= 0


def test_a_draft_models_memory_is_made_ready_after_its_targets():
    target, draft = Cache(2), Cache(1)
    runner = ModelRunner(target, None, None, list, block_size=16, draft=draft)  # type: ignore[arg-type]
    assert [runner.prepare_memory(7) for _ in range(4)] == [True, True, True, False]
    assert target.num_used_blocks == [7] * 4
    assert draft.num_used_blocks == [7] * 2


def test_a_rank_without_a_step_makes_memory_ready_and_one_with_steps_does_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_worker, "IDLE_AFTER_S", 0.001)
    steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
    cache = Cache(3)

    def prepare() -> bool:
        if not cache.num_pieces:
            steps.put("a step")
        return cache.prepare_memory(0)

    assert rank_worker.next_step(steps, prepare) == "a step"
    assert len(cache.num_used_blocks) == 4, "until nothing was left"
    steps.put(None)
    assert rank_worker.next_step(steps, lambda: pytest.fail("there is something to do")) is None
