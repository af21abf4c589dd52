"""The command `diptych plan`."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from diptych.errors import BadSetting

_TRAFFIC: Final = "Traffic"
_TARGET: Final = "Target"
_HARDWARE: Final = "Hardware"


def plan(
    requests_per_s: Annotated[
        float, typer.Option(min=0.001, max=100_000, help="Arriving requests, at the busiest hour.")
    ],
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Text of a mean prompt.", rich_help_panel=_TRAFFIC)] = 200,
    output_tokens: Annotated[int, typer.Option(min=1, help="A mean answer.", rich_help_panel=_TRAFFIC)] = 100,
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Of the prompt, equal in all: system prompt, tools.", rich_help_panel=_TRAFFIC)
    ] = 0,
    pictures: Annotated[float, typer.Option(min=0, max=64, help="In a mean request.", rich_help_panel=_TRAFFIC)] = 0.0,
    new_pictures: Annotated[
        float, typer.Option(min=0, max=1, help="Share of pictures not seen before.", rich_help_panel=_TRAFFIC)
    ] = 1.0,
    bursty: Annotated[
        bool,
        typer.Option("--bursty", help="Requests come in bursts of 24 within half a second.", rich_help_panel=_TRAFFIC),
    ] = False,
    keep_pictures_s: Annotated[
        float, typer.Option(min=0, help="How long Redis should remember a picture.", rich_help_panel=_TRAFFIC)
    ] = 3600.0,
    ttft_s: Annotated[
        float, typer.Option(min=0.001, help="95th percentile of the time to the first token.", rich_help_panel=_TARGET)
    ] = 1.0,
    gap_ms: Annotated[
        float, typer.Option(min=0.1, help="95th percentile between two tokens.", rich_help_panel=_TARGET)
    ] = 200.0,
    headroom: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the engines to keep free.", rich_help_panel=_TARGET)
    ] = 0.2,
    hardware: Annotated[
        str, typer.Option(help="cpu, h100 (an assumption) or a file of --save-costs.", rich_help_panel=_HARDWARE)
    ] = "cpu",
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure this idle engine instead.", rich_help_panel=_HARDWARE)
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(metavar="URL", help="And this vision encoder.", rich_help_panel=_HARDWARE)
    ] = None,
    save_costs: Annotated[
        Path | None, typer.Option(help="Write what was measured to this file.", rich_help_panel=_HARDWARE)
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="For the printed commands; default: the one measured.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How many gateways, encoders and engines a traffic needs, with how much memory, and how fast they will answer.

    First it finds how many requests one engine carries within the wanted times. Then it simulates the whole system,
    with the real scheduler and balancer, and adds replicas until the times hold. It prints the replicas, the times, the
    commands that start them, and what it assumed. That takes seconds, for a large traffic half a minute.

    Exit code 1 if no number of replicas is enough; the message then says how long a request takes alone.

    How fast a replica is comes from --hardware: [bold]cpu[/bold] is SmolLM2-135M on two cores, measured, and
    [bold]h100[/bold] a guess. For your model on your machine, start one engine and one encoder, let nobody use them,
    and give their addresses: they are measured for a minute or two.

    [bold]Examples[/bold]

      diptych plan --requests-per-s 12 --prompt-tokens 300 --pictures 1
      diptych plan --requests-per-s 80 --hardware h100 --output-tokens 250 --json

      diptych text-engine demo --port 8002 &
      diptych vision-encoder demo --port 8001 &
      diptych plan --requests-per-s 12 --engine http://127.0.0.1:8002 \\
          --encoder http://127.0.0.1:8001 --save-costs mine.json
    """
    if shared_tokens >= prompt_tokens:
        raise BadSetting(f"--shared-tokens {shared_tokens} are a part of --prompt-tokens, which are {prompt_tokens}")
    if engine is None and (encoder is not None or save_costs is not None):
        raise BadSetting("--encoder and --save-costs need --engine: an engine's costs are measured first")
    try:
        from diptych.planner import hardware as machines
        from diptych.planner import report
        from diptych.planner.measure import measure
        from diptych.planner.plan import Planner
        from diptych.planner.traffic import Target, Traffic
    except ModuleNotFoundError as missing:
        raise BadSetting(f"diptych plan simulates engines and needs {missing.name}: pip install numpy") from missing

    traffic = Traffic(
        requests_per_s=requests_per_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        shared_tokens=shared_tokens,
        pictures=pictures,
        new_pictures=new_pictures,
        arrivals="bursty" if bursty else "poisson",
    )
    target = Target(ttft_s=ttft_s, gap_s=gap_ms / 1000)
    with Console(stderr=True).status("measuring: a minute or two") as status:
        machine = machines.load(hardware) if engine is None else asyncio.run(measure(engine, encoder, _headers()))
        if save_costs is not None:
            machine.save(save_costs)
        planner = Planner(machine, target, headroom=headroom, say=status.update)
        found = planner.plan(traffic, keep_pictures_s=keep_pictures_s)
    name = model or machine.model
    if json_:
        typer.echo(json.dumps(report.as_json(found, traffic, target, machine, headroom, name), indent=2))
    else:
        typer.echo(report.as_text(found, traffic, target, machine, headroom, name))


def _headers() -> dict[str, str]:
    """The services' token, where they ask each other for one."""
    token = os.environ.get("DIPTYCH_SERVICE_TOKEN", "").split(",")[0].strip()
    return {"Authorization": f"Bearer {token}"} if token else {}
