"""Settings: where they come from, and that a bad one stops the start with its name, its value and what was wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.vision_encoder.config import VisionEncoderSettings
from shared.settings import SettingsError, env_name, load_settings


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
    assert any("DIPTYCH_ENCODER_PORT = 'many'" in line and "valid integer" in line for line in lines)
    assert any("DIPTYCH_ENCODER_BACKGROUND = 'white'" in line for line in lines)
    assert any("--max-batch-size = 0" in line and "greater than or equal to 1" in line for line in lines)


def test_a_setting_that_does_not_exist_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(SettingsError, match="'quantisation'; did you mean 'quantization'"):
        load_settings(VisionEncoderSettings, model=Path("m"), quantisation="int8")


@pytest.mark.parametrize(("value", "expected"), [("redis://cache:6379/0", "redis://cache:6379/0"), ("  ", None)])
def test_redis_has_its_usual_name_and_blank_means_none(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: str | None
) -> None:
    monkeypatch.setenv("REDIS_URL", value)
    assert load_settings(VisionEncoderSettings, model="m").redis_url == expected
    assert env_name(VisionEncoderSettings, "redis_url") == "REDIS_URL"


def test_a_password_in_a_bad_url_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "http://user:hunter2@cache")
    with pytest.raises(SettingsError) as error:
        load_settings(VisionEncoderSettings, model="m")
    assert "REDIS_URL" in str(error.value)
    assert "hunter2" not in str(error.value)


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = load_settings(VisionEncoderSettings, model="m")
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]
