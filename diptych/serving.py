"""`diptych serve`: the system on this machine until someone stops it."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.panel import Panel

from diptych import launch

DEFAULT_PORT = 8000  # where `diptych chat` looks
FRAME_WIDTH = 6


async def serve(plan: launch.Plan, console: Console) -> None:
    """Run until Ctrl-C or SIGTERM. Raises CommandFailed if the system cannot start."""
    try:
        async with launch.running(plan, console, show_logs=True):
            console.print(_welcome(plan, console.width), soft_wrap=True)
            await asyncio.Event().wait()
    except asyncio.CancelledError:  # how a signal ends it: see launch.running
        console.print("Everything is stopped.")


def _welcome(plan: launch.Plan, width: int) -> Panel | str:
    url = plan.base_url
    server = "" if plan.port == DEFAULT_PORT else f"--url {url} "
    words = 'cat.png "What is in the picture?"' if plan.model.has_vision else '"What is the capital of France?"'
    lines = [
        f"[bold]{plan.model_name}[/bold] is ready.",
        "",
        f"  chat page      {url}",
        f"  OpenAI API     {url}/v1",
        f"  command line   diptych chat {server}{words}",
        "",
        "Ctrl-C stops everything.",
    ]
    text = "\n".join(lines)
    if max(len(line) for line in lines) + FRAME_WIDTH > width:  # a broken command could not be copied
        return text
    return Panel(text, title="Diptych", expand=False, border_style="green", padding=(1, 2))
