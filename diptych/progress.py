"""What a person sees of the children: their log lines under their names, and what each is doing while all start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from diptych.processes import Child

REFRESH_S = 0.1
COLOURS = ("cyan", "magenta", "green", "yellow", "blue")
_CLOCK_AND_LEVEL = re.compile(r"^[\d:.TZ-]+ \[\w+ *\] ")


class Lines:
    """Prints the children's log lines, or keeps silent about them.

    On a terminal each line gets its child's name in front. Elsewhere lines pass as they are, one JSON object each, for
    a log collector to parse.
    """

    def __init__(self, console: Console, *, shown: bool) -> None:
        self.console = console
        self._shown = shown
        self._held_back = False
        self._colours: dict[str, str] = {}

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """While a progress display has the terminal, log lines only appear in it."""
        self._held_back = self.console.is_terminal
        try:
            yield
        finally:
            self._held_back = False

    def say(self, text: str) -> None:
        self.console.print(Text(text, style="bold yellow"))

    def add(self, name: str, line: str) -> None:
        if not self._shown or self._held_back:
            return
        if not self.console.is_terminal:
            self.console.file.write(f"{line}\n")
            return
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        self.console.print(Text(f"{name:>16} │ ", style=colour) + Text.from_ansi(line), soft_wrap=True)


@contextlib.asynccontextmanager
async def starting(children: Sequence[Child], lines: Lines) -> AsyncIterator[None]:
    """Show what each child is doing until the block ends."""
    show = _show_live if lines.console.is_terminal else _show_plain
    with lines.held_back():
        showing = asyncio.create_task(show(children, lines.console))
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)


async def _show_live(children: Sequence[Child], console: Console) -> None:
    since = time.monotonic()
    spinner = Spinner("dots", style="cyan")
    ready_after: dict[str, float] = {}

    def table() -> Table:
        grid = Table.grid(padding=(0, 1))
        for child in children:
            ready_s = _ready_after(child, since, ready_after)
            mark = spinner if ready_s is None else Text("✓", style="green")
            clock = f"{time.monotonic() - since if ready_s is None else ready_s:5.1f} s"
            grid.add_row(mark, child.name, clock, Text(_doing(child), style="dim", overflow="ellipsis", no_wrap=True))
        return grid

    with Live(table(), console=console, refresh_per_second=1 / REFRESH_S) as live:
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                live.update(table())
        finally:
            live.update(table())


async def _show_plain(children: Sequence[Child], console: Console) -> None:
    since = time.monotonic()
    ready_after: dict[str, float] = {}

    def report() -> None:
        for child in children:
            known = child.name in ready_after
            if (ready_s := _ready_after(child, since, ready_after)) is not None and not known:
                console.print(f"{child.name} is ready after {ready_s:.1f} s.")

    console.print(f"Starting {', '.join(child.name for child in children)}.")
    try:
        while True:
            await asyncio.sleep(REFRESH_S)
            report()
    finally:
        report()


def _ready_after(child: Child, since: float, known: dict[str, float]) -> float | None:
    if child.state == "ready":
        known.setdefault(child.name, time.monotonic() - since)
    return known.get(child.name)


def _doing(child: Child) -> str:
    """The child's last log line without clock and level; nothing once it is ready."""
    if child.state == "ready":
        return "ready"
    line = child.last_line
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            return str(json.loads(line).get("event", ""))
    return _CLOCK_AND_LEVEL.sub("", line) or "starting"
