"""Settings: where they come from, and that a bad one stops the start with its name, its value and what was wanted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import SecretStr
from pydantic_settings import BaseSettings

from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared import resources
from shared.settings import SettingRefused, SettingsError, choices, env_name, load_settings, reason_of
from shared.settings_errors import flags_of
from shared.sizes import format_size, parse_size


def test_options_win_over_the_environment_and_that_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_ENCODER_PORT", "7001")
    monkeypatch.setenv("DIPTYCH_ENCODER_MAX_BATCH_SIZE", "3")
    settings = load_settings(VisionEncoderSettings, model="somewhere", port=7002, dtype=None)
    assert (settings.model, settings.port, settings.max_batch_size) == (Path("somewhere"), 7002, 3)
    assert (settings.dtype, settings.host) == ("auto", "127.0.0.1")


def test_every_bad_setting_is_named_with_its_value_and_what_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_ENCODER_PORT", "many")
    monkeypatch.setenv("DIPTYCH_ENCODER_BACKGROUND", "white")
    with pytest.raises(SettingsError) as error:
        load_settings(VisionEncoderSettings, max_batch_size=0)
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert any("DIPTYCH_ENCODER_MODEL is not set; wanted: checkpoint folder" in line for line in lines)
    assert "DIPTYCH_ENCODER_PORT=many is not a whole number; give one from 0 to 65535" in lines
    assert any("DIPTYCH_ENCODER_BACKGROUND=white is not written as it must be" in line for line in lines)
    assert "max_batch_size=0 is too small; give a whole number of at least 1" in lines


def test_a_setting_that_does_not_exist_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(SettingsError, match="'quantisation'; did you mean 'quantization'"):
        load_settings(VisionEncoderSettings, model=Path("m"), quantisation="int8")


@pytest.mark.parametrize(("value", "expected"), [("redis://cache:6379/0", "redis://cache:6379/0"), ("  ", None)])
def test_redis_has_its_usual_name_and_blank_means_none(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: str | None
) -> None:
    monkeypatch.setenv("REDIS_URL", value)
    assert load_settings(VisionEncoderSettings, model="m").redis_url == (SecretStr(expected) if expected else None)
    assert env_name(VisionEncoderSettings, "redis_url") == "REDIS_URL"


def test_a_password_in_a_bad_url_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "http://user:hunter2@cache")
    with pytest.raises(SettingsError) as error:
        load_settings(VisionEncoderSettings, model="m")
    assert "REDIS_URL" in str(error.value)
    assert "hunter2" not in str(error.value)


SERVICES: list[type[BaseSettings]] = [GatewaySettings, VisionEncoderSettings, TextEngineSettings]


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("value", ["none such", "-1", "1e99", "[]", "\0"])
def test_no_wording_of_pydantic_passes_whatever_the_setting(service: type[BaseSettings], value: str) -> None:
    for name, field in service.model_fields.items():
        needed = {"model": "m"} if "model" in service.model_fields else {}
        try:
            load_settings(service, **(needed | {name: value}))
        except SettingsError as error:
            [line] = str(error).splitlines()
            assert line.startswith((f"{name}=", f"{name} (not shown)"))
            assert not re.search(r"[Ii]nput|unable to|valid |Value error|pydantic|pattern", line), line
            assert not (choices(field.annotation) and "is not one of" not in line), line


@pytest.mark.parametrize(
    ("words", "variables", "spelling"),
    [
        (["diptych", "serve", "--max-model-len", "7"], {}, "--max-model-len 7"),
        (["diptych", "serve", "--max-model-len=7"], {"DIPTYCH_ENGINE_MAX_MODEL_LEN": "8"}, "--max-model-len 7"),
        (["diptych", "serve"], {"DIPTYCH_ENGINE_MAX_MODEL_LEN": "7"}, "DIPTYCH_ENGINE_MAX_MODEL_LEN=7"),
        (["script.py"], {}, "max_model_len=7"),
    ],
)
def test_a_refused_setting_is_named_as_it_was_written(
    words: list[str], variables: dict[str, str], spelling: str
) -> None:
    error = SettingRefused("max_model_len", 7, "is too much; give 5")
    said = reason_of(error, TextEngineSettings, flags=flags_of(TextEngineSettings, words), environ=variables)
    assert said == f"{spelling} is too much; give 5"


@pytest.mark.parametrize(("value", "spelling"), [(True, "--enforce-eager"), (False, "--no-enforce-eager")])
def test_a_refused_switch_is_named_as_the_flag_that_it_was(value: bool, spelling: str) -> None:
    error = SettingRefused("enforce_eager", value, "is not for this model")
    assert reason_of(error, TextEngineSettings, flags=["enforce_eager"]) == f"{spelling} is not for this model"


def test_an_error_of_another_kind_keeps_its_words_and_one_without_words_gets_its_name() -> None:
    assert reason_of(OSError(2, "No such file", "x"), TextEngineSettings) == "[Errno 2] No such file: 'x'"
    assert reason_of(KeyError("x"), TextEngineSettings) == "KeyError: 'x'"


@pytest.mark.parametrize("written", ["64MiB", "64 mib", str(64 << 20)])
def test_every_number_of_bytes_may_be_written_as_a_size(written: str) -> None:
    assert load_settings(GatewaySettings, max_body_bytes=written).max_body_bytes == 64 << 20


@pytest.mark.parametrize(
    ("size_bytes", "written"), [(512 << 20, "512MiB"), (3 << 29, "1.5GiB"), (1000, "1000B"), (4096, "4KiB")]
)
def test_sizes_are_printed_in_one_way_that_is_read_again(size_bytes: int, written: str) -> None:
    assert format_size(size_bytes) == written
    assert parse_size(written) == size_bytes


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = load_settings(VisionEncoderSettings, model="m")
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(("given", "threads"), [("4,2", 4), (" 3 ", 3), ("1024", 1024)])
def test_a_model_has_the_first_of_openmps_numbers_of_threads(
    monkeypatch: pytest.MonkeyPatch, given: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert load_settings(VisionEncoderSettings, model="m").tower_threads == threads
    assert resources.default_threads() == threads


def test_a_model_has_every_core_where_openmp_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert resources.default_threads() == resources.available_cores()


@pytest.mark.parametrize("keys", ["alpha,beta", "alice:p[w, bob:a'b"])
def test_a_key_may_hold_a_bracket_or_quote_within(keys: str) -> None:
    given = load_settings(GatewaySettings, api_keys=keys).api_keys
    assert [key.get_secret_value() for key in given] == keys.replace(" ", "").split(",")
