"""Keys, tokens and passwords are secret by their type: no error, repr or log line shows one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import SecretStr
from pydantic_settings import BaseSettings

from diptych.batch.run import Plan
from diptych.bench.client import Target
from diptych.processes import Command
from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.settings import SettingRefused, SettingsError, load_settings, reason_of
from shared.settings_errors import is_secret

SERVICES: list[type[BaseSettings]] = [GatewaySettings, VisionEncoderSettings, TextEngineSettings]
SECRET = "hunter2-of-the-operator"
WRITTEN = {
    "api_keys": SECRET,
    "admin_keys": f"operator:{SECRET}",
    "service_token": SECRET,
    "redis_url": f"redis://:{SECRET}@cache:6379/0",
}
REFUSED = {"api_keys": f"[{SECRET}", "admin_keys": f'"{SECRET}"', "service_token": f"{SECRET} ", "redis_url": SECRET}


def names_a_secret(name: str, annotation: object) -> bool:
    """A switch or a file may be named after one."""
    return bool(re.search(r"key|token|password|secret|redis_url", name)) and annotation not in (bool, Path | None)


@pytest.mark.parametrize("service", SERVICES)
def test_whatever_is_called_a_key_token_or_password_has_the_type_of_a_secret(service: type[BaseSettings]) -> None:
    fields = {name: field.annotation for name, field in service.model_fields.items()}
    called_so = {name for name, annotation in fields.items() if names_a_secret(name, annotation)} - {
        *("max_num_batched_tokens", "max_prefill_tokens_while_decoding", "num_speculative_tokens")
    }
    assert called_so == {name for name, annotation in fields.items() if is_secret(annotation)}
    assert called_so


@pytest.mark.parametrize("service", SERVICES)
def test_settings_print_no_secret(service: type[BaseSettings]) -> None:
    given = {name: value for name, value in WRITTEN.items() if name in service.model_fields}
    settings = load_settings(service, **({"model": "m"} if "model" in service.model_fields else {}), **given)
    for shown in (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump())):
        assert SECRET not in shown


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "service_token"])
@pytest.mark.parametrize("is_variable", [False, True])
def test_a_refused_secret_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, is_variable: bool) -> None:
    variable = "REDIS_URL" if name == "redis_url" else f"DIPTYCH_GATEWAY_{name.upper()}"
    if is_variable:
        monkeypatch.setenv(variable, REFUSED[name])
    with pytest.raises(SettingsError) as refusal:
        load_settings(GatewaySettings, **({} if is_variable else {name: REFUSED[name]}))
    assert str(refusal.value).startswith(f"{variable if is_variable else name} (not shown)")
    assert SECRET not in str(refusal.value)


def test_a_secret_that_a_running_service_refuses_is_not_shown_either() -> None:
    error = SettingRefused("redis_url", WRITTEN["redis_url"], "cannot be reached")
    said = reason_of(error, GatewaySettings, flags=["redis_url"], environ={})
    assert said == "--redis-url (not shown) cannot be reached"


@pytest.mark.parametrize(
    "url", [f"http://user:{SECRET}@engine:8002", f"user:{SECRET}@engine:8002", f"http://a:1,dns://u:{SECRET}/x@b:2"]
)
def test_a_password_in_an_address_of_a_service_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingsError, match="no address may hold a user or a password") as refusal:
        load_settings(GatewaySettings, text_engines=url)
    assert SECRET not in str(refusal.value)


def test_what_carries_a_secret_through_the_commands_prints_none() -> None:
    async def is_up() -> bool:
        return True

    carriers = [
        Plan(source=Path("in"), destination=Path("out"), api_key=SECRET),
        Target("http://here", "demo", api_key=SECRET),
        Command("valkey", ["valkey"], is_up, env={"REDIS_URL": SECRET}, stdin=SECRET.encode()),
        SecretStr(SECRET),
    ]
    assert SECRET not in repr(carriers)
