"""`diptych chat`: one question about any number of pictures, the answer printed as it comes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from diptych import launch, machine, models
from diptych.client import Answer, Client, RequestFailed
from diptych.errors import BadSetting, CommandFailed
from diptych.report import timing_line

DEFAULT_SERVER = "http://127.0.0.1:8000"
DEFAULT_MODEL = "demo"


def run(words: list[str], *, server: str, model: str | None, api_key: str | None, options: dict[str, Any]) -> None:
    """Ask the server, or a system started for this one question if none answers at the default address.

    model   that is to answer; None: the server's first, or the demo model if one is started
    """
    images, question = split_words(words)
    console = Console(stderr=True, highlight=False)
    with Client(server, api_key=api_key) as client:
        reason = client.why_not_ready()
    if reason is None:
        _ask(server, api_key, model, images, question, options, console)
    elif reason:
        raise CommandFailed(f"the server at {server} is not ready: {reason}")
    elif server.rstrip("/") != DEFAULT_SERVER:
        raise CommandFailed(f"no server answers at {server}; is the address right, and diptych serve running there?")
    else:
        console.print(f"No server answers at {server}: starting one for this question.")
        asyncio.run(_start_and_ask(model or DEFAULT_MODEL, api_key, images, question, options, console))


def split_words(words: list[str]) -> tuple[list[str], str]:
    """The pictures and the question. Raises BadSetting for a picture that is not there, or a missing question."""
    *images, question = words
    if Path(question).expanduser().is_file():
        raise BadSetting(f'the last word should be a question, but {question} is a file: add one, e.g. "What is it?"')
    for image in images:
        if not image.startswith(("http://", "https://", "data:")) and not Path(image).expanduser().is_file():
            raise BadSetting(f"there is no picture {image!r}; a question of several words needs quotes around it")
    return images, question


def choose_model(served: list[str], wanted: str | None, server: str) -> str:
    """The first that is served, or the wanted one. Raises BadSetting, naming all, if that is not among them."""
    if wanted is None:
        return served[0]
    if wanted not in served:
        raise BadSetting(
            f"--model {wanted} is not served at {server}, which serves {', '.join(served)}; leave --model out, or stop "
            "that server to have this model started"
        )
    return wanted


async def _start_and_ask(
    model: str, api_key: str | None, images: list[str], question: str, options: dict[str, Any], console: Console
) -> None:
    plan = launch.Plan(model=models.resolve(model, say=console.print), port=machine.free_ports(1)[0])
    async with launch.running(plan, console, show_logs=False):
        await asyncio.to_thread(_ask, plan.base_url, api_key, None, images, question, options, console)


def _ask(
    server: str,
    api_key: str | None,
    model: str | None,
    images: list[str],
    question: str,
    options: dict[str, Any],
    console: Console,
) -> None:
    try:
        with Client(server, api_key=api_key) as client:
            name = choose_model(client.models(), model, server)
            for piece in client.stream(question, images, model=name, **options):
                if isinstance(piece, Answer):
                    sys.stdout.write("\n")
                    console.print(timing_line(piece), style="dim")
                else:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
    except RequestFailed as error:
        raise CommandFailed(str(error)) from None
    except httpx.HTTPError as error:
        raise CommandFailed(f"the connection to {server} broke: {error or type(error).__name__}") from None
    except OSError as error:
        raise CommandFailed(f"{error.filename} cannot be read: {error.strerror}") from None
