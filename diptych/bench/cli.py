"""The commands `diptych bench run` and `diptych bench compare`: options in, tables and JSON lines out."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

from diptych.bench.client import Target, first_model
from diptych.bench.compare import comparison_notes, comparison_table, read_columns
from diptych.bench.errors import BenchError
from diptych.bench.figures import METRICS
from diptych.bench.machine import ProcessTrees
from diptych.bench.repeats import Plan, Result, measure
from diptych.bench.report import ProgressLine, append_line, json_line, result_notes, result_tables
from diptych.bench.sessions import SessionShape
from diptych.help import Command
from diptych.start_checks import checked_server_url

app = typer.Typer(
    name="bench",
    help="Measure any OpenAI-compatible server with fixed workloads, and compare servers.",
    no_args_is_help=True,
)

_SERVER, _RUNS, _SHAPE = "Server", "Runs", "Shape of W6 and W7"


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _resolve_salt(salt: str) -> str:
    """`auto` is new at every call, so that no server finds its caches warm; `none` gives the recorded words."""
    if salt == "auto":
        return str(time.time_ns())
    return "" if salt == "none" else salt


@app.command(cls=Command)
def run(
    url: Annotated[
        str, typer.Option("--url", "--server", help="Base URL, with or without /v1.", rich_help_panel=_SERVER)
    ],
    model: Annotated[
        str, typer.Option(help="Model to ask for; the first that the server lists if absent.", rich_help_panel=_SERVER)
    ] = "",
    workloads: Annotated[str, typer.Option(help=f"Some of {','.join(METRICS)}.")] = "W1,W2,W3",
    out: Annotated[Path | None, typer.Option(help="Append one JSON line per workload to this file.")] = None,
    label: Annotated[str, typer.Option(help="Name of this server in tables.")] = "",
    api: Annotated[
        Literal["completions", "chat"], typer.Option(help="Where W1 to W3 are sent.", rich_help_panel=_SERVER)
    ] = "completions",
    chat_overhead: Annotated[
        int, typer.Option(help="Tokens of the chat template, sent as words less.", rich_help_panel=_SERVER)
    ] = 0,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the API key.", rich_help_panel=_SERVER)
    ] = "DIPTYCH_API_KEY",
    timeout_s: Annotated[float, typer.Option(min=1, help="For one read.", rich_help_panel=_SERVER)] = 600.0,
    pid: Annotated[
        list[int] | None,
        typer.Option(metavar="INT", help="Server process on this machine; repeatable.", rich_help_panel=_SERVER),
    ] = None,
    reps: Annotated[int, typer.Option(min=1, help="Counted runs.", rich_help_panel=_RUNS)] = 3,
    extra: Annotated[int, typer.Option(min=0, help="More tries for disturbed runs.", rich_help_panel=_RUNS)] = 3,
    quiet: Annotated[
        float, typer.Option(min=0, help="With --pid: foreign cores of an undisturbed run.", rich_help_panel=_RUNS)
    ] = 0.15,
    salt: Annotated[
        str, typer.Option(help="auto: cold caches at every call; none: fixed words.", rich_help_panel=_RUNS)
    ] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the first run; the next add 1.", rich_help_panel=_RUNS)] = 1,
    warm_ups: Annotated[int, typer.Option(min=0, help="Short requests before a run.", rich_help_panel=_RUNS)] = 2,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at once; all if absent.", rich_help_panel=_RUNS)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.", rich_help_panel=_RUNS)] = None,
    users: Annotated[int, typer.Option(min=1, help="W6.", rich_help_panel=_SHAPE)] = 6,
    turns: Annotated[int, typer.Option(min=1, help="W6.", rich_help_panel=_SHAPE)] = 6,
    window: Annotated[int, typer.Option(min=1, help="W6: pictures per turn.", rich_help_panel=_SHAPE)] = 3,
    streams: Annotated[int, typer.Option(min=1, help="W7.", rich_help_panel=_SHAPE)] = 2,
    stream_s: Annotated[float, typer.Option(min=1, help="W7: of each half.", rich_help_panel=_SHAPE)] = 20.0,
    burst: Annotated[int, typer.Option(min=1, help="W7: pictures at once.", rich_help_panel=_SHAPE)] = 4,
    every_s: Annotated[float, typer.Option(min=0.1, help="W7: between bursts.", rich_help_panel=_SHAPE)] = 2.0,
) -> None:
    """Run workloads against a server. Exits with 1 if any request failed, with 2 if nothing could be run."""
    target = Target(checked_server_url(url), model, os.environ.get(api_key_env, ""), api, chat_overhead, timeout_s)
    shape = SessionShape(users, turns, window, 24, streams, stream_s, burst, every_s)
    plan = Plan(_split(workloads), reps, extra, seed, _resolve_salt(salt), quiet, warm_ups, concurrency, limit, shape)
    try:
        plan.check()
        server = ProcessTrees(pid) if pid else None
        results = asyncio.run(_run_all(label, plan, target, server, out))
    except BenchError as failure:
        _stop(failure)
    if any(result.figures.get("errors") for result in results):
        raise typer.Exit(1)


async def _run_all(
    label: str, plan: Plan, target: Target, server: ProcessTrees | None, out: Path | None
) -> list[Result]:
    """Every workload in turn. A line is written as soon as its workload is done: an abort keeps what there is."""
    if not target.model:
        target = replace(target, model=await first_model(target))
    results = []
    with ProgressLine(Console(stderr=True)) as progress:
        for workload in plan.workloads:
            result = await measure(label, workload, plan, target, server, progress.start_run)
            results.append(result)
            if out is not None:
                append_line(out, json_line(result, plan, target.model))
    console = Console()
    for table in result_tables(results, title=label or target.base_url):
        console.print(table)
    _print_notes(console, result_notes(results))
    return results


@app.command(cls=Command)
def compare(
    files: Annotated[list[Path], typer.Argument(help="JSON lines of `run`; the first server is the baseline.")],
    markdown: Annotated[bool, typer.Option(help="A table to paste into a document.")] = False,
) -> None:
    """Print medians side by side, and their ratios to the first server's. Ratios within 15 % are ties."""
    try:
        columns = read_columns(files)
    except BenchError as failure:
        _stop(failure)
    if not columns:
        _stop(BenchError("no results in these files"))
    console = Console(width=1000) if markdown else Console()
    console.print(comparison_table(columns, markdown=markdown))
    _print_notes(console, comparison_notes(columns))


def _print_notes(console: Console, notes: list[str]) -> None:
    for note in notes:
        console.print(f"- {note}", markup=False, highlight=False, soft_wrap=True)


def _stop(failure: BenchError) -> NoReturn:
    Console(stderr=True).print(f"diptych bench: {failure}", markup=False, soft_wrap=True)
    raise typer.Exit(2)
