"""A clock that is set, forward or back, while the gateway holds files that expire by it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.gateway import file_store
from services.gateway.file_store import ENTRY_BYTES, FileInfo, FileMemory

DAY_S = 86_400
LIFE_S = 60


class Clocks:
    """The time of day, which may jump, and the timer, which does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.timer = 1_800_000_000.0, 100.0
        monkeypatch.setattr(file_store, "time", SimpleNamespace(time=lambda: self.wall, monotonic=lambda: self.timer))

    def run(self, seconds: float) -> None:
        self.wall += seconds
        self.timer += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def file_at(clocks: Clocks, name: str) -> FileInfo:
    now = int(clocks.wall)
    return FileInfo(
        id=name, owner="a", filename="f", purpose="vision", size_bytes=1, created_at=now, expires_at=now + LIFE_S
    )


def test_a_clock_that_was_a_day_ahead_keeps_no_file_beyond_its_life_once_it_is_right(clocks: Clocks):
    memory = FileMemory(10**6)
    clocks.wall += DAY_S
    memory.put(file_at(clocks, "ahead"), b"x")
    clocks.wall -= DAY_S
    memory.discard("ahead")
    memory.put(file_at(clocks, "right"), b"x")
    clocks.run(LIFE_S / 2)
    assert memory.data("right") == b"x"
    assert memory.num_bytes_of("a") == 1 + ENTRY_BYTES
    clocks.run(LIFE_S)
    assert memory.data("right") is None
    assert memory.num_bytes_of("a") == 0


def test_a_clock_that_jumps_ahead_takes_files_with_it_and_new_ones_live_on(clocks: Clocks):
    memory = FileMemory(10**6)
    memory.put(file_at(clocks, "before"), b"x")
    clocks.run(2.0)
    clocks.wall += DAY_S
    assert memory.data("before") is None
    memory.put(file_at(clocks, "after"), b"x")
    assert memory.num_bytes_of("a") == 1 + ENTRY_BYTES
    assert memory.data("after") == b"x"
