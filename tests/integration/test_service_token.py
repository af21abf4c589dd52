"""Real services that know a token: they work together as before, and answer nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from structlog.testing import capture_logs

from services.gateway.app import create_app as create_gateway
from services.gateway.config import GatewaySettings
from services.text_engine.app import create_app as create_engine
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.app import create_app as create_encoder
from services.vision_encoder.config import VisionEncoderSettings
from tests.conftest import CheckpointFactory
from tests.encoders import png
from tests.gateway_stack import data_url, eventually, question
from tests.scripted import serve

TOKEN = SecretStr("between-services-0123456789")
OTHER = SecretStr("somebody-elses-0123456789")
OPEN = {"/health", "/ready", "/metrics"}


@dataclass
class Panels:
    encoder: str
    engine: str
    apps: dict[str, FastAPI]


@pytest.fixture(scope="module")
def panels(checkpoint: CheckpointFactory) -> Iterator[Panels]:
    """Without Redis: the engine has to ask the encoder for every embedding, and shows it the token."""
    with ExitStack() as stack:
        folder: Path = checkpoint("llava_clip_llama")
        common: dict[str, Any] = {"model": folder, "service_token": [TOKEN], "redis_url": None, "num_threads": 1}
        encoder = create_encoder(VisionEncoderSettings(**common, dtype="float32", num_decode_workers=1))
        engine = create_engine(TextEngineSettings(**common, dtype="float32", device="cpu", kv_cache_memory="8MiB"))
        urls = [stack.enter_context(serve(app)) for app in (encoder, engine)]
        for app in (encoder, engine):
            eventually(lambda app=app: app.state.service.why_not_ready() is None, within_s=60)  # type: ignore[misc]
        yield Panels(*urls, {urls[0]: encoder, urls[1]: engine})


@contextmanager
def gateway(panels: Panels, *tokens: SecretStr) -> Iterator[httpx.Client]:
    settings = GatewaySettings(
        text_engines=(panels.engine,),
        vision_encoders=(panels.encoder,),
        service_token=tokens,
        probe_interval_s=0.1,
        status_interval_s=0.01,
    )
    with serve(create_gateway(settings)) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        yield http


def ask(http: httpx.Client, seed: int) -> httpx.Response:
    messages = question(data_url(png(seed)), text="What is this?")
    return http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3, "temperature": 0})


@pytest.mark.parametrize("tokens", [(TOKEN,), (TOKEN, OTHER)], ids=["one", "first of two"])
def test_gateway_engine_and_encoder_work_together_with_the_token(panels: Panels, tokens: tuple[SecretStr, ...]):
    with gateway(panels, *tokens) as http:
        answer = ask(http, seed=len(tokens))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 16
        replicas = http.get("/status/data").json()["replicas"]
        assert {each["state"]["kind"] for each in replicas} == {"text_engine", "vision_encoder"}


@pytest.mark.parametrize("tokens", [(), (OTHER,), (OTHER, TOKEN)], ids=["none", "another", "another first"])
def test_a_gateway_that_sends_another_token_finds_no_panel_and_says_why(panels: Panels, tokens: tuple[SecretStr, ...]):
    with capture_logs() as logs, gateway(panels, *tokens) as http:
        assert http.get("/ready").status_code == 503
        assert ask(http, seed=9).status_code == 503
        problems = {each["problem"] for each in http.get("/status/data").json()["replicas"]}
    assert problems == {"it refuses this gateway: DIPTYCH_SERVICE_TOKEN differs"}
    refusals = [log for log in logs if "DIPTYCH_SERVICE_TOKEN differs" in log.get("reason", "")]
    assert {log["event"] for log in refusals} == {"replica cannot be used"}
    assert sorted(log["target"] for log in refusals) == ["text_engine", "vision_encoder"]  # once each, not every probe
    assert TOKEN.get_secret_value() not in str(logs)
    assert OTHER.get_secret_value() not in str(logs)


def test_every_path_of_a_panel_but_probes_and_metrics_needs_the_token(panels: Panels):
    for url, app in panels.apps.items():
        with httpx.Client(base_url=url, timeout=10, trust_env=False) as http:
            asked = [
                (method, route.path.replace("{key}", "0" * 64))  # type: ignore[attr-defined]
                for route in app.routes
                for method in sorted(route.methods)  # type: ignore[attr-defined]
            ]
            assert {path for _, path in asked} >= OPEN
            assert len(asked) > 9
            for method, path in asked:
                answer = http.request(method, path)
                assert (answer.status_code == 401) == (path not in OPEN), (method, path, answer.status_code)
                if path not in OPEN and method != "HEAD":
                    assert answer.json()["error"]["code"] == "invalid_service_token"
                    assert answer.headers["x-request-id"]


def test_a_large_body_without_the_token_is_refused_and_the_connection_goes_on(panels: Panels):
    with httpx.Client(base_url=panels.encoder, timeout=10, trust_env=False) as http:
        for _ in range(3):
            assert http.post("/v1/encode", content=bytes(8 << 20)).status_code == 401
        assert http.get("/ready").status_code == 200
