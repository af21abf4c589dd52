"""`diptych serve` and `diptych demo` as a person runs them: real services on a tiny random checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from PIL import Image

from diptych.client import Answer, Client
from diptych.machine import free_ports
from tests.conftest import CheckpointFactory

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and other systems have no death signal"),
]


@dataclass
class Serving:
    """A running `diptych serve` and what it has printed to `log`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def descendants(self) -> set[int]:
        """Every process below it: services and the encoder's decode workers."""
        parents = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        found, frontier = set[int](), {self.process.pid}
        while frontier:
            frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
            found |= frontier
        return found

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(base_url=self.url, trust_env=False) as client:
            while not all_ready(client):  # the gateway itself is ready as soon as an engine is
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.1)


def all_ready(client: httpx.Client) -> bool:
    try:
        state = client.get("/ready").json()
    except httpx.TransportError:
        return False
    return bool(state["text_engines"]["ready"] and state["vision_encoders"]["ready"])


@pytest.fixture(scope="module")
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llava_clip_llama")


@pytest.fixture
def serving(model: Path, tmp_path: Path) -> Iterator[Serving]:
    [port] = free_ports(1)
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = start(model, "--port", str(port), "--kv-cache-memory", "64MiB", output=output.fileno())
    running = Serving(process, f"http://127.0.0.1:{port}", log)
    try:
        running.wait_until_ready()
        yield running
    finally:
        process.kill()
        process.wait()


def start(model: Path, *options: str, output: int) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "MODEL")}
    command = [sys.executable, "-m", "diptych", "serve", str(model), *options]
    return subprocess.Popen(
        command, cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.STDOUT
    )


def wait_until_gone(pids: set[int], timeout_s: float = 10.0) -> set[int]:
    """Those of `pids` that are still alive at the end."""
    deadline = time.monotonic() + timeout_s
    alive = pids
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = {pid for pid in alive if is_alive(pid)}
    return alive


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_panels_refuse_whoever_is_not_of_this_system_and_no_argument_shows_the_token(serving: Serving) -> None:
    children = [words for pid in serving.descendants() if (words := words_of(pid))[-1:] and "diptych" in words]
    panels = [words for words in children if "vision-encoder" in words or "text-engine" in words]
    ports = {word.removeprefix("--port=") for words in panels for word in words if word.startswith("--port=")}
    assert len(ports) == 2
    for port in ports:
        for path, status in (("/health", 200), ("/v1/state", 401), ("/v1/embeddings/" + "0" * 64, 401)):
            assert httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code == status
    [gateway] = [pid for pid in serving.descendants() if "gateway" in words_of(pid)]
    variables = dict(line.split("=", 1) for line in Path(f"/proc/{gateway}/environ").read_text().split("\0") if line)
    token = variables["DIPTYCH_SERVICE_TOKEN"]
    assert len(token) >= 32
    assert all(token not in word for words in children for word in words)
    assert token not in serving.log.read_text()


def test_it_answers_survives_the_death_of_a_panel_and_leaves_nothing_behind(serving: Serving, tmp_path: Path) -> None:
    picture = tmp_path / "red.png"
    Image.new("RGB", (40, 30), "red").save(picture)
    children = serving.descendants()
    assert len(children) >= 5  # valkey, encoder, a decode worker, engine, gateway
    with Client(serving.url) as client:
        first = client.ask("What is this?", [picture], temperature=0, max_tokens=8)
        assert first.usage["completion_tokens"] <= 8
        *pieces, last = client.stream("What is this?", [picture], temperature=0, max_tokens=8)
        assert isinstance(last, Answer)
        assert "".join(str(piece) for piece in pieces) == last.text == first.text
        assert last.num_cached_tokens > 0

        [engine] = [pid for pid in children if "text-engine" in words_of(pid)]
        os.kill(engine, signal.SIGKILL)
        assert not wait_until_gone({engine})
        time.sleep(1.5)  # until the gateway has seen it go
        serving.wait_until_ready()
        assert client.ask("What is this?", [picture], temperature=0, max_tokens=8).text == first.text
    assert "text-engine was ended by signal SIGKILL; starting it again in 0.5 s" in serving.log.read_text()

    children = serving.descendants()
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(60) == 0
    assert not wait_until_gone(children, timeout_s=1)
    told = serving.log.read_text().partition("Stopping: running answers are finished first.")[2]
    assert "Everything is stopped." in told
    assert not re.search(r"SIG[A-Z]+|Traceback|error|warning", told), "who pressed Ctrl-C has nothing to fear"


def test_nothing_outlives_it_when_it_is_killed(serving: Serving) -> None:
    children = serving.descendants()
    assert len(children) >= 5
    serving.process.kill()
    serving.process.wait()
    assert wait_until_gone(children) == set()


def test_a_taken_port_is_said_at_once(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = start(model, "--port", str(port), output=subprocess.PIPE)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert re.fullmatch(rf"error: port {port} on 127\.0\.0\.1 is taken by process {os.getpid()} .*\n", output.decode())


def test_a_model_that_cannot_be_loaded_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no-such-model"}')
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    process = start(tmp_path, "--port", str(free_ports(1)[0]), output=subprocess.PIPE)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert re.match(r"error: .*architectures is \['NoSuchModel'\]", output.decode().splitlines()[-1])


def test_what_only_loading_finds_out_is_the_last_line_too_and_names_the_setting_as_it_was_typed(model: Path) -> None:
    process = start(model, "--port", str(free_ports(1)[0]), "--logits-processors", "json:Such", output=subprocess.PIPE)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    lines = output.decode().splitlines()
    assert lines[-1].startswith("error: text-engine: --logits-processors json:Such cannot be had: AttributeError")
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert not any("Uvicorn" in line or "startup" in line or "Unknown child" in line for line in lines)


def test_the_demo_asks_about_every_sample_and_stops(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "samples").mkdir()
    entries = []
    for colour in ("red", "green", "blue"):
        Image.new("RGB", (64, 64), colour).save(folder / "samples" / f"{colour}.png")
        entries.append({"file": f"{colour}.png", "questions": [{"question": "What color is it?", "answer": colour}]})
    (folder / "samples" / "samples.json").write_text(json.dumps(entries))
    env = {**os.environ, "DIPTYCH_DEMO_MODEL": str(folder), "DIPTYCH_ENGINE_KV_CACHE_MEMORY": "64MiB"}
    env.pop("REDIS_URL", None)
    command = [sys.executable, "-m", "diptych", "demo"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for label in ("red, streamed", "green", "blue", "red, again"):
        assert len(re.findall(rf"^ *{label} ", done.stdout, re.MULTILINE)) == 2  # its answer, and its timings
    assert re.search(r"\d of 4 answers are as expected\.", done.stdout)
    assert "Every service has stopped." in done.stdout
