"""The token between services: which requests need it, what it is compared with, and that nothing shows it."""

from __future__ import annotations

import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.service_token import MIN_TOKEN_CHARS, RequireServiceToken, token_headers
from shared.settings import SettingsError, load_settings

OLD, NEW = "old-token-0123456789", "new-token-9876543210"
PATHS = ("/v1/info", "/health", "/ready", "/metrics")
SERVICES = (GatewaySettings, VisionEncoderSettings, TextEngineSettings)


@pytest.fixture
def client() -> TestClient:
    async def answer(_request: object) -> PlainTextResponse:
        return PlainTextResponse("in")

    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in PATHS])
    return TestClient(RequireServiceToken(app, [SecretStr(NEW), SecretStr(OLD)]))


@pytest.mark.parametrize("token", [OLD, NEW])
def test_each_of_several_tokens_opens_so_that_one_can_be_exchanged_while_services_run(client: TestClient, token: str):
    assert client.get("/v1/info", headers=token_headers([SecretStr(token)])).text == "in"


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", f"Basic {NEW}", NEW, f"Bearer {NEW}x", f"Bearer {NEW[:-1]}", f"Bearer {NEW},{OLD}"],
)
def test_anything_else_is_refused_with_a_typed_error_that_repeats_nothing(client: TestClient, header: str):
    answer = client.post("/v1/info", headers={"Authorization": header} if header else {}, content=b"x" * 100_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_service_token")
    assert NEW[:-1] not in answer.text


def test_probes_and_metrics_need_none_and_unknown_paths_do(client: TestClient):
    assert [client.get(path).status_code for path in PATHS] == [401, 200, 200, 200]
    assert [client.get(path).status_code for path in ("/", "/health/", "/metrics/x", "//health", "/openapi.json")] == [
        401
    ] * 5


@pytest.mark.parametrize("settings", SERVICES)
def test_one_variable_sets_it_for_every_service(settings: type[GatewaySettings], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIPTYCH_SERVICE_TOKEN", f"{NEW}, {OLD}")
    loaded = load_settings(settings, **({} if settings is GatewaySettings else {"model": "m"}))
    assert [token.get_secret_value() for token in loaded.service_token] == [NEW, OLD]
    assert token_headers(loaded.service_token) == {"Authorization": f"Bearer {NEW}"}
    assert NEW not in repr(loaded)


@pytest.mark.parametrize("blank", ["", "  ", ","])
def test_blank_is_none(blank: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIPTYCH_SERVICE_TOKEN", blank)
    assert load_settings(GatewaySettings).service_token == ()
    assert token_headers(()) == {}


@pytest.mark.parametrize("bad", ["hunter2", "two words, one of them", "schlüssel-0123456789", f"{OLD},short"])
def test_a_token_that_is_weak_or_no_header_stops_the_start_and_is_not_shown(bad: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIPTYCH_SERVICE_TOKEN", bad)
    with pytest.raises(SettingsError, match=f"DIPTYCH_SERVICE_TOKEN.*{MIN_TOKEN_CHARS} or more") as caught:
        load_settings(GatewaySettings)
    assert bad not in str(caught.value)
