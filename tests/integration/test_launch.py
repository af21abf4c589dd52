"""The supervisor with real child processes: small scripted services that listen, log, die and linger on demand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from diptych import launch, machine, models
from diptych.errors import BadSetting, PortTaken
from diptych.models import Model
from diptych.processes import Command, StartFailed, Supervisor, start_failed
from tests.ports import free_port

# Writes its pid, is ready when the file is there, and ends on SIGTERM after writing the time.
SERVICE = """
import os, pathlib, signal, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def stop(*_):
    (folder / f"{name}.stopped").write_text(str(time.monotonic()))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print(f"{name} is loading", flush=True)
(folder / f"{name}.pid").write_text(str(os.getpid()))
(folder / f"{name}.ready").touch()
while True:
    time.sleep(0.05)
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
BROKEN = "import sys; print('reading weights'); print('config.json has no layers', file=sys.stderr); sys.exit(3)"


class Told:
    """Collects what the supervisor says and what its children print."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.lines: list[tuple[str, str]] = []

    def supervisor(self, *commands: Command) -> Supervisor:
        return Supervisor(commands, say=self.said.append, on_line=lambda name, line: self.lines.append((name, line)))


def service(name: str, folder: Path, *, stop_stage: int = 0) -> Command:
    async def is_ready() -> bool:
        return (folder / f"{name}.ready").exists()

    return Command(name, [sys.executable, "-c", SERVICE, name, str(folder)], is_ready, stop_stage=stop_stage)


def script(name: str, source: str, *, stop_timeout_s: float = 5.0) -> Command:
    """A child that counts as ready from its first moment."""

    async def is_ready() -> bool:
        return True

    return Command(name, [sys.executable, "-c", source], is_ready, stop_timeout_s=stop_timeout_s)


def never_ready(command: Command) -> Command:
    async def is_ready() -> bool:
        return False

    return Command(command.name, command.argv, is_ready)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - other processes have no events to wait for
            await asyncio.sleep(0.02)


async def test_all_children_run_when_start_returns_and_none_when_stop_returns(tmp_path: Path) -> None:
    told = Told()
    supervisor = told.supervisor(service("eyes", tmp_path), service("mouth", tmp_path))
    await supervisor.start()
    pids = [int((tmp_path / f"{name}.pid").read_text()) for name in ("eyes", "mouth")]
    assert all(is_alive(pid) for pid in pids)
    assert ("eyes", "eyes is loading") in told.lines
    await supervisor.stop()
    assert not any(is_alive(pid) for pid in pids)
    assert told.said == []


async def test_children_stop_stage_by_stage(tmp_path: Path) -> None:
    order = {"gateway": 0, "engine": 1, "encoder": 1, "cache": 2}
    supervisor = Told().supervisor(*(service(name, tmp_path, stop_stage=stage) for name, stage in order.items()))
    await supervisor.start()
    await supervisor.stop()
    stopped = {name: float((tmp_path / f"{name}.stopped").read_text()) for name in order}
    assert stopped["gateway"] < min(stopped["engine"], stopped["encoder"])
    assert max(stopped["engine"], stopped["encoder"]) < stopped["cache"]


async def test_a_child_that_dies_is_started_again_and_that_is_said(tmp_path: Path) -> None:
    told = Told()
    supervisor = told.supervisor(service("engine", tmp_path))
    await supervisor.start()
    first = int((tmp_path / "engine.pid").read_text())
    (tmp_path / "engine.ready").unlink()
    os.kill(first, signal.SIGKILL)
    await until(lambda: (tmp_path / "engine.ready").exists())
    await until(lambda: supervisor.children[0].state == "ready")
    second = int((tmp_path / "engine.pid").read_text())
    await supervisor.stop()
    assert second != first
    assert not is_alive(second)
    assert told.said == ["engine was ended by signal SIGKILL; starting it again in 0.5 s"]


async def test_stopping_does_not_wait_for_a_restart(tmp_path: Path) -> None:
    told = Told()
    supervisor = told.supervisor(service("engine", tmp_path))
    await supervisor.start()
    os.kill(int((tmp_path / "engine.pid").read_text()), signal.SIGKILL)
    await until(lambda: told.said)
    async with asyncio.timeout(0.4):
        await supervisor.stop()


async def test_a_child_that_dies_while_starting_fails_the_start_with_its_last_words(tmp_path: Path) -> None:
    healthy = service("encoder", tmp_path)
    supervisor = Told().supervisor(healthy, never_ready(script("engine", BROKEN)))
    with pytest.raises(StartFailed, match=r"^engine ended with exit code 3 while starting$") as caught:
        await supervisor.start()
    assert "engine | reading weights" in caught.value.last_words
    assert "engine | config.json has no layers" in caught.value.last_words
    with contextlib.suppress(FileNotFoundError):  # it may have been stopped before it came that far
        assert not is_alive(int((tmp_path / "encoder.pid").read_text()))


@pytest.mark.parametrize(
    ("status", "tail", "message"),
    [
        (1, ['{"event": "loading"}', "error: --dtype int9 is none", "bye"], "engine: --dtype int9 is none"),
        (2, ["error: A=1 is bad", "error: B=2 is bad"], "engine: A=1 is bad; B=2 is bad"),
        (
            -9,
            ["loading"],
            "engine was ended by signal SIGKILL while starting; perhaps this machine has too little memory",
        ),
        (1, [], "engine ended with exit code 1 while starting"),
    ],
)
def test_the_reason_of_a_failed_start_is_one_line_whatever_came_before_it(
    status: int, tail: list[str], message: str
) -> None:
    assert str(start_failed("engine", status, tail)) == message


async def test_a_child_that_ignores_sigterm_is_killed_after_its_time(tmp_path: Path) -> None:
    told = Told()
    supervisor = told.supervisor(script("deaf", STUBBORN, stop_timeout_s=0.3))
    await supervisor.start()
    await until(lambda: told.lines)
    since = time.monotonic()
    await supervisor.stop()
    assert 0.2 < time.monotonic() - since < 3
    process = supervisor.children[0].process
    assert process is not None
    assert process.returncode == -signal.SIGKILL


async def test_workers_of_a_dead_child_die_with_it(tmp_path: Path) -> None:
    source = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "worker")!r}, "w").write(str(worker.pid))
print("up", flush=True)
worker.wait()
"""
    told = Told()
    supervisor = told.supervisor(script("encoder", source))
    await supervisor.start()
    await until(lambda: told.lines)
    worker = int((tmp_path / "worker").read_text())
    assert is_alive(worker)
    await supervisor.stop()
    await until(lambda: not is_alive(worker), timeout_s=2)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no death signal")
def test_no_child_outlives_a_supervisor_killed_with_sigkill(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import asyncio, pathlib
        from tests.integration.test_launch import Told, service
        async def main():
            folder = pathlib.Path({str(tmp_path)!r})
            supervisor = Told().supervisor(service("eyes", folder), service("mouth", folder))
            await supervisor.start()
            print("up", flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """)
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        pids = [int((tmp_path / f"{name}.pid").read_text()) for name in ("eyes", "mouth")]
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids)


def test_a_taken_port_is_refused_before_anything_starts_and_its_owner_named() -> None:
    port = free_port()
    told = rf"port {port} on 127\.0\.0\.1 is taken by process {os.getpid()} .*--port"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortTaken, match=told):
        launch.check_port("127.0.0.1", port)
    launch.check_port("127.0.0.1", port)


def test_free_ports_are_distinct_and_free() -> None:
    ports = machine.free_ports(20)
    assert len(set(ports)) == 20
    assert all(machine.port_is_free("127.0.0.1", port) for port in ports)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9"),
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::", "http://[::1]:9"),
        ("::1", "http://[::1]:9"),
    ],
)
def test_the_base_url_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert launch.Plan(model=Model("m", Path()), host=host, port=9).base_url == url


def test_children_get_the_first_of_openmps_numbers_of_threads_and_no_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    monkeypatch.setenv("DIPTYCH_GATWAY_API_KEYS", "x")
    *_, engine, gateway = launch.commands(launch.Plan(model=models.resolve("demo", say=print)), Console(quiet=True))
    assert engine.env["DIPTYCH_ENGINE_NUM_THREADS"] == engine.env["OMP_NUM_THREADS"] == "4"
    assert "DIPTYCH_GATWAY_API_KEYS" not in engine.env.keys() | gateway.env.keys()


def test_a_number_of_threads_that_is_none_is_refused_before_any_process_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "abc")
    with pytest.raises(BadSetting, match="OMP_NUM_THREADS=abc is no number of threads"):
        launch.commands(launch.Plan(model=models.resolve("demo", say=print)), Console(quiet=True))
