"""The command `diptych`: reads the command line, then hands over. Work is done in the modules it imports late.

Late imports keep `diptych --help` quick and let the gateway start where torch is not installed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from diptych import __version__, start_checks, variables
from diptych.__main__ import INTERRUPTED
from diptych.bench.cli import app as bench_app
from diptych.errors import CommandFailed
from diptych.help import Command
from diptych.options import Given, build, with_settings
from diptych.planner.cli import plan
from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings

MODEL_HELP = (
    "A folder in Hugging Face format, a Hugging Face id, [bold]demo[/bold] (small, built in, sees simple pictures) "
    "or [bold]smollm2[/bold] (text only, from a pip package)."
)
EPILOG = "Every setting can also be an environment variable: --{} is DIPTYCH_{}."
ENGINE_EPILOG = EPILOG.format("max-model-len", "ENGINE_MAX_MODEL_LEN")

# A panel of `serve` is one of many, so its place and its model are not the user's to set.
SET_BY_SERVE = (
    *("model", "served_model_name", "host", "port", "redis_url", "service_token"),
    *("tls_cert_file", "tls_key_file", "tls_ca_file", "tls_require_client_cert", "tls_server_name"),
)

app = typer.Typer(
    name="diptych",
    help="Serve vision-language models: an encoder that sees, an engine that speaks, one OpenAI-style gateway.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with [bold]diptych demo[/bold], or [bold]diptych serve[/bold] and the page on http://127.0.0.1:8000.",
)
app.add_typer(bench_app, name="bench", rich_help_panel="Measure")
app.command(cls=Command, rich_help_panel="Measure")(plan)


def main() -> None:
    """Entry point: every expected failure ends with one readable message, never with a traceback."""
    try:
        app()
    except CommandFailed as error:
        console = Console(stderr=True, highlight=False)
        for line in str(error).splitlines():
            console.print("error:", line, markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `diptych ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diptych {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that come before any command."""


@app.command(cls=Command, rich_help_panel="One machine", epilog=ENGINE_EPILOG)
@with_settings(TextEngineSettings, skip=SET_BY_SERVE, panel="Each text engine")
def serve(
    given: Given,
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "demo",
    host: Annotated[
        str,
        typer.Option(
            help="Address of the gateway; 0.0.0.0 opens it to the network.",
            envvar="DIPTYCH_GATEWAY_HOST",
            show_envvar=True,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(help="Port of the gateway.", min=1, max=65535, envvar="DIPTYCH_GATEWAY_PORT", show_envvar=True),
    ] = 8000,
    vision_encoders: Annotated[int, typer.Option(help="How many vision encoders to run.", min=1, max=64)] = 1,
    text_engines: Annotated[int, typer.Option(help="How many text engines to run.", min=1, max=64)] = 1,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model id in requests and answers. Default: MODEL, or its folder's name.")
    ] = None,
    cache_memory: Annotated[
        str, typer.Option(help="Size of the embedding cache; 0: no limit.", metavar="SIZE")
    ] = "512MiB",
) -> None:
    """Run the whole system on this machine: gateway, vision encoder, text engine and an embedding cache.

    The page on http://127.0.0.1:8000 and any OpenAI client can then ask about pictures. Ctrl-C stops everything.

    The gateway's and the encoder's own settings can be set as environment variables: see diptych gateway --help and
    diptych vision-encoder --help.

    [bold]Examples[/bold]

      diptych serve
      diptych serve llava-hf/llava-1.5-7b-hf --max-model-len 4096
      diptych serve ./my-llava --port 9000 --vision-encoders 2
    """
    from diptych import launch, models, serving

    console = Console(stderr=True, highlight=False)
    _warn_of_unknown_variables()
    if overruled := variables.overruled(model):
        _warn(f"diptych serve sets these itself and ignores the environment's: {', '.join(overruled)}")
    variables.drop_overruled()
    # Whatever is wrong with any setting of any service stops here, before anything is downloaded, loaded or started.
    settings = start_checks.build_engine_settings({"model": ".", **given})
    encoder = build(VisionEncoderSettings, {"model": "."})
    front = start_checks.build_gateway_settings(host, port)
    cache_memory_bytes = launch.cache_memory_bytes(cache_memory)
    start_checks.check_port(front)
    found = models.resolve(model, say=console.print)
    if found.has_vision:  # else no encoder is started
        start_checks.check_encoder_machine(encoder)
    draft_folder = start_checks.draft_folder(settings, given)
    if draft_folder is not None:
        given = {**given, "speculative_model": str(draft_folder)}
    name = served_model_name or found.name
    checked = {"model": found.folder, "served_model_name": name, "speculative_model": draft_folder}
    start_checks.check_checkpoint(settings.model_copy(update=checked), given)
    plan = launch.Plan(
        model=found,
        served_model_name=name,
        host=front.host,
        port=front.port,
        num_vision_encoders=vision_encoders,
        num_text_engines=text_engines,
        engine=given,
        cache_memory_bytes=cache_memory_bytes,
    )
    asyncio.run(serving.serve(plan, console))


@app.command(cls=Command, rich_help_panel="One machine")
def demo(
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """Start everything, ask the demo model about its sample pictures, print answers and timings, stop everything.

    Needs no GPU and no download. Exit code 0 means that every question was answered and every service has stopped;
    whether the answers are right is printed, not judged.
    """
    from diptych import demo as demo_module

    sys.exit(demo_module.run(port))


@app.command(cls=Command, rich_help_panel="One machine")
def chat(
    words: Annotated[list[str], typer.Argument(metavar="[IMAGE]… QUESTION", help="Pictures, then the question.")],
    server: Annotated[
        str,
        typer.Option("--url", "--server", help="A running server.", envvar=variables.SERVER_VARIABLE, show_envvar=True),
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="The model to ask; started if no server runs. Default: what is served, or demo.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key.", envvar=variables.API_KEY_VARIABLE)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0, max=2)] = 0.0,
) -> None:
    """Ask one question about any number of pictures (files or web addresses) and print the answer as it comes.

    Uses the server on http://127.0.0.1:8000 or the one given; starts one for this question if none answers.

    [bold]Examples[/bold]

      diptych chat cat.png "What is in the picture?"
      diptych chat left.jpg right.jpg "What has changed?"
      diptych chat --url http://gpu:8000 https://example.com/cat.jpg "What is it?"
    """
    from diptych import chat as chat_module

    options = {"max_tokens": max_tokens, "temperature": temperature}
    request = {name: value for name, value in options.items() if value is not None}
    url = start_checks.checked_server_url(server)
    chat_module.run(words, server=url, model=model, api_key=api_key, options=request)


@app.command(cls=Command, rich_help_panel="One machine")
def batch(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="Requests, a JSON object a line.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where answers are appended.")],
    url: Annotated[
        str | None, typer.Option(help="A running server.", envvar=variables.SERVER_VARIABLE, show_envvar=True)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="For lines that name none; started if no server runs. Default: as served, or demo."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key.", envvar=variables.API_KEY_VARIABLE)
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="Read pictures from below this folder only; default: the input's own.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests under way at a time.", min=1, max=1024)] = 16,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask again what has no good answer in the output.")
    ] = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format, on a running server or on one started for it.

    Each line has custom_id, method, url and body; a picture may be a path, relative to the input. What the output has
    already is skipped, so a run that was stopped goes on when the command is given again.

    Exit code 1 if a line has no good answer. Without --url the server on port 8000 of this machine is asked, if any.

    [bold]Examples[/bold]

      diptych batch questions.jsonl -o answers.jsonl
      diptych batch questions.jsonl -o answers.jsonl --url http://gpu-box:8000 --concurrency 128
    """
    from diptych.batch import run as batch_run

    plan = batch_run.Plan(
        source=source,
        destination=output,
        image_root=images,
        url=None if url is None else start_checks.checked_server_url(url),
        model=model,
        api_key=api_key,
        concurrency=concurrency,
        retry_failed=retry_failed,
    )
    sys.exit(batch_run.run(plan, Console(stderr=True, highlight=False)))


@app.command(cls=Command, rich_help_panel="One machine")
def check(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "demo",
    port: Annotated[
        int,
        typer.Option(
            help="The port that the gateway would take.",
            min=1,
            max=65535,
            envvar="DIPTYCH_GATEWAY_PORT",
            show_envvar=True,
        ),
    ] = 8000,
) -> None:
    """Look for what would keep Diptych from running well here, and say what to do about it.

    Exit code 1 if something is missing that it cannot run without.
    """
    from diptych import check as check_module

    sys.exit(check_module.run(model, port))


@app.command(cls=Command, rich_help_panel="One service", epilog=EPILOG.format("api-keys", "GATEWAY_API_KEYS"))
@with_settings(GatewaySettings)
def gateway(given: Given) -> None:
    """Run the gateway alone: the OpenAI-style API in front of encoders and engines that run elsewhere.

    [bold]Example[/bold]

      diptych gateway --vision-encoders dns://vision_encoder:8001 \\
          --text-engines http://10.0.0.5:8002,http://10.0.0.6:8002
    """
    _warn_of_unknown_variables()
    settings = build(GatewaySettings, given)
    start_checks.check_port(settings)
    from services.gateway.app import run

    run(settings)


@app.command(cls=Command, rich_help_panel="One service", epilog=EPILOG.format("port", "ENCODER_PORT"))
@with_settings(VisionEncoderSettings, skip=["model"])
def vision_encoder(
    given: Given,
    model: Annotated[str, typer.Argument(help=MODEL_HELP, envvar=["DIPTYCH_ENCODER_MODEL", "MODEL"])] = "demo",
) -> None:
    """Run one vision encoder: pictures in, embeddings out, kept in Redis where REDIS_URL is set.

    [bold]Example[/bold]

      diptych vision-encoder llava-hf/llava-1.5-7b-hf --host 0.0.0.0 \\
          --redis-url redis://cache:6379/0
    """
    _warn_of_unknown_variables()
    start_checks.build_encoder_settings({"model": ".", **given})
    settings = build(VisionEncoderSettings, _with_model(model, given))
    start_checks.check_port(settings)
    from services.vision_encoder.app import run

    run(settings)


@app.command(cls=Command, rich_help_panel="One service", epilog=ENGINE_EPILOG)
@with_settings(TextEngineSettings, skip=["model"])
def text_engine(
    given: Given,
    model: Annotated[str, typer.Argument(help=MODEL_HELP, envvar=["DIPTYCH_ENGINE_MODEL", "MODEL"])] = "demo",
) -> None:
    """Run one text engine: prompts in, tokens out.

    [bold]Example[/bold]

      diptych text-engine llava-hf/llava-1.5-7b-hf --host 0.0.0.0 --dtype bfloat16 --max-num-seqs 128
    """
    _warn_of_unknown_variables()
    start_checks.build_engine_settings({"model": ".", **given})
    settings = build(TextEngineSettings, _with_model(model, given))
    settings = settings.model_copy(update={"speculative_model": start_checks.draft_folder(settings, given)})
    start_checks.check_checkpoint(settings, given)
    start_checks.check_port(settings)
    from services.text_engine.app import run

    run(settings)


def _warn(text: str) -> None:
    typer.echo(f"warning: {text}", err=True)


def _warn_of_unknown_variables() -> None:
    """A misspelt variable would be ignored in silence. Only a warning: orchestrators inject variables of their own."""
    for name in variables.unknown():
        _warn(f"the environment variable {variables.complaint(name)}")


def _with_model(model: str, given: Given) -> Given:
    """The given settings and MODEL as a folder, served under the name that the user knows."""
    from diptych import models

    found = models.resolve(model, say=Console(stderr=True, highlight=False).print)
    return {"served_model_name": found.name, **given, "model": str(found.folder)}
