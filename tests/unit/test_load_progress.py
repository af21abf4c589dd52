"""How far the reading of a checkpoint has come is said every two seconds, and not at all where it is quick."""

from __future__ import annotations

from structlog.testing import capture_logs

from shared.load_progress import LoadProgress, gigabytes


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_quick_start_says_nothing():
    clock = Clock()
    progress = LoadProgress(10**9, clock=clock)
    with capture_logs() as logs:
        for _ in range(100):
            clock.now += 0.019
            progress.read(10**7)
    assert logs == []


def test_a_long_one_says_bytes_and_time_left_every_two_seconds():
    clock = Clock()
    progress = LoadProgress(14 * 10**9, clock=clock)
    with capture_logs() as logs:
        for _ in range(14):
            clock.now += 1.0
            progress.read(10**9)
    said = [line["event"] for line in logs]
    assert said[0] == "reading weights: 2.0 GB of a checkpoint of 14.0 GB, at most 12 s left"
    assert said[-1] == "reading weights: 14.0 GB of a checkpoint of 14.0 GB, at most 0 s left"
    assert len(said) == 7


def test_reading_more_than_the_files_size_is_no_negative_time():
    """A tensor that two parts of a model read counts twice."""
    clock = Clock()
    progress = LoadProgress(10, clock=clock)
    clock.now += 3
    with capture_logs() as logs:
        progress.read(25)
    assert logs[0]["event"].endswith("at most 0 s left")


def test_sizes_are_told_in_readable_units():
    assert [gigabytes(size) for size in (0, 25_000_000, 99_999_999, 10**8, 14 * 10**9)] == [
        "0 MB",
        "25 MB",
        "100 MB",
        "0.1 GB",
        "14.0 GB",
    ]
