"""How far many requests have come: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S: Final = 10.0


class Counter:
    """Counts finished requests while entered.

    num_total   all there are
    num_before  of them, done by an earlier run: they say nothing of the rate
    """

    def __init__(
        self,
        console: Console,
        num_total: int,
        *,
        num_before: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self.num_total = num_total
        self.num_before = num_before
        self._clock = clock
        self._started = self._told = clock()
        self.num_done = num_before
        self.num_failed = 0
        self.num_tokens = 0
        self._bar = self._new_bar() if console.is_terminal else None

    def __enter__(self) -> Self:
        self._started = self._told = self._clock()  # what had to be started before says nothing of the rate
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, *, failed: bool = False, num_tokens: int = 0) -> None:
        """One more is done.

        num_tokens   that were generated for it
        """
        self.num_done += 1
        self.num_failed += failed
        self.num_tokens += num_tokens
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.num_done, rest=self._rest())
        elif self._clock() - self._told >= LINE_INTERVAL_S:
            self._told = self._clock()
            self._console.print(self.line())

    def line(self) -> str:
        """ "120 of 1000, 3 failed, 12.3/s, 456 tokens/s, 72 s left" """
        rate = self._rate()
        left = f", {(self.num_total - self.num_done) / rate:.0f} s left" if rate and self._is_unfinished else ""
        return f"{self.num_done} of {self.num_total}{self._rest()}{left}"

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    @property
    def _is_unfinished(self) -> bool:
        return self.num_done < self.num_total

    def _rate(self) -> float:
        return (self.num_done - self.num_before) / self.seconds if self.seconds > 0 else 0.0

    def _rest(self) -> str:
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        tokens = f", {self.num_tokens / self.seconds:.0f} tokens/s" if self.num_tokens and self.seconds > 0 else ""
        return f"{failed}, {self._rate():.3g}/s{tokens}"

    def _new_bar(self) -> Progress:
        bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rest]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
        )
        bar.add_task("", total=self.num_total, completed=self.num_done, rest="")
        return bar
