"""The text engine's process with a model that two processes share: how it ends, wanted and unwanted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.conftest import CheckpointFactory
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0


class Service:
    """`diptych text-engine`, and what it logs."""

    def __init__(self, child: subprocess.Popen[str], http: httpx.Client) -> None:
        self.child = child
        self.http = http
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        self.log.extend(self.child.stderr)

    def status(self, path: str) -> int | None:
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return None

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.status("/ready") != 200:
            assert self.child.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)

    def worker_pid(self) -> int:
        children = Path(f"/proc/{self.child.pid}/task").glob("*/children")
        [pid] = {int(pid) for file in children for pid in file.read_text().split()}
        return pid


@contextmanager
def service(folder: Path, temporary: Path) -> Iterator[Service]:
    """temporary   where it may leave files, and should leave none"""
    port = free_port()
    command = [sys.executable, "-m", "diptych", "text-engine", str(folder), f"--port={port}", "--dtype=float32"]
    command += ["--tensor-parallel-size=2", "--kv-cache-memory=16MiB"]
    env = {name: value for name, value in os.environ.items() if name != "REDIS_URL"} | {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(temporary),
    }
    with (
        subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as child,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as http,
    ):
        try:
            yield Service(child, http)
        finally:
            child.kill()


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_rank_turns_readiness_off_and_ends_the_process_so_that_it_is_restarted(
    checkpoint: CheckpointFactory, tmp_path: Path
):
    with service(checkpoint("llama"), tmp_path) as running:
        running.wait_until_ready()
        os.kill(running.worker_pid(), signal.SIGKILL)
        started = time.monotonic()
        while (status := running.status("/ready")) == 200:
            assert time.monotonic() - started < 2
        assert status in (503, None)
        assert running.child.wait(timeout=5) == 1
        time.sleep(0.2)
        [line] = [line for line in running.log if "this engine cannot go on" in line]
        assert "rank 1 (pid" in line
        assert "SIGKILL" in line
    assert not list(tmp_path.glob("diptych-*"))


def test_sigterm_ends_all_ranks_in_order_and_a_killed_engine_leaves_none(checkpoint: CheckpointFactory, tmp_path: Path):
    with service(checkpoint("llama"), tmp_path) as running:
        running.wait_until_ready()
        worker = running.worker_pid()
        os.kill(worker, signal.SIGTERM)  # as a supervisor does that signals the whole process group
        os.kill(worker, signal.SIGINT)
        body = {"request_id": "r", "prompt": [3, 4, 5], "sampling": {"max_tokens": 4, "ignore_eos": True}}
        assert running.http.post("/v1/generate", json=body).text.count('"tokens"') == 4
        running.child.terminate()
        assert running.child.wait(timeout=10) == 0
        assert not is_running(worker)
        assert not [line for line in running.log if '"error"' in line]
    with service(checkpoint("llama"), tmp_path) as running:
        running.wait_until_ready()
        worker = running.worker_pid()
        running.child.kill()
        wait_until_gone(worker)
