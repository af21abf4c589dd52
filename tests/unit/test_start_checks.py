"""What is judged before anything is downloaded, loaded or started, without torch, and how it is said."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from diptych import launch, start_checks
from diptych.cli import app
from diptych.errors import BadSetting, ModelUnavailable
from diptych.machine import free_ports
from diptych.models import Model
from diptych.processes import Command, StartFailed, Supervisor
from diptych.variables import OVERRULED_BY_SERVE
from services.gateway.config import GatewaySettings
from services.text_engine import machine_preflight
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from services.vision_encoder.machine_preflight import check_machine as check_encoder
from shared import gpus
from shared.settings import SettingRefused, SettingsError, env_name, load_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machine(2)`: one with so many GPUs; `machine(None)`: one of which only torch can tell."""

    def have(num_gpus: int | None) -> None:
        for module in (gpus, machine_preflight):
            monkeypatch.setattr(module, "num_gpus", lambda: num_gpus)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return have


def refused(**settings: Any) -> str:
    with pytest.raises(SettingRefused) as refusal:
        machine_preflight.check_machine(load_settings(TextEngineSettings, model="m", **settings))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "cuda"}, "device=cuda cannot be used: torch sees no CUDA device"),
        ({"dtype": "float16"}, "dtype=float16 is for GPUs"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 needs the Triton kernels, and so a GPU; use int8"),
        ({"attention_backend": "triton"}, "attention_backend=triton needs a GPU"),
        ({"host_cache_memory": "1GiB"}, "host_cache_memory=1GiB is for GPUs"),
        ({"batch_invariant": True, "enforce_eager": True}, "batch_invariant=True needs the compiled CPU kernels"),
        ({"logits_processors": "none_such:Class"}, "names the module 'none_such', which is not installed"),
        ({"logits_processors": "none_such.inner:Class"}, "names the module 'none_such.inner', which is not installed"),
        ({"logits_processors": "__main__:Class"}, "names the module '__main__', which is not installed"),
        ({"logits_processors": "a..b:Class"}, "names the module 'a..b', which is not installed"),
        ({"logits_processors": "none_such"}, "is no entry point of any package in diptych.logits_processors"),
    ],
)
def test_what_a_machine_without_a_gpu_cannot_do_is_said_at_once(
    machine: Any, settings: dict[str, Any], said: str
) -> None:
    machine(0)
    assert said in refused(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"device": "cuda", "tensor_parallel_size": 4},
            "tensor_parallel_size=4 needs as many GPUs; this machine has 2",
        ),
        ({"tensor_parallel_size": 2, "host_cache_memory": "1GiB"}, "works with one process only"),
        ({"kv_cache_dtype": "fp8", "attention_backend": "reference"}, "needs the Triton kernels"),
        ({"device": "cuda", "batch_invariant": True}, "needs the compiled CPU kernels"),
        ({"device": "cuda", "attention_backend": "cpu", "kv_cache_dtype": "fp8"}, "needs the Triton kernels"),
    ],
)
def test_what_a_machine_with_gpus_cannot_do_is_said_at_once(machine: Any, settings: dict[str, Any], said: str) -> None:
    machine(2)
    assert said in refused(**settings)


@pytest.mark.parametrize(
    ("num_gpus", "settings"),
    [
        (0, {"logits_processors": "json.decoder:JSONDecoder"}),
        (0, {"kv_cache_dtype": "int8", "batch_invariant": True}),
        (2, {"device": "cuda", "kv_cache_dtype": "fp8", "dtype": "float16", "tensor_parallel_size": 2}),
        (2, {"host_cache_memory": "1GiB"}),
        (2, {"batch_invariant": True}),
        (2, {"tensor_parallel_size": 4}),
        (2, {"dtype": "float16", "kv_cache_dtype": "fp8"}),
        (0, {"logits_processors": "json.made_at_import:Class"}),
        (None, {"device": "cuda", "kv_cache_dtype": "fp8", "tensor_parallel_size": 8}),
    ],
)
def test_what_can_be_had_and_what_only_torch_can_tell_is_let_through(
    machine: Any, num_gpus: int | None, settings: dict[str, Any]
) -> None:
    machine(num_gpus)
    machine_preflight.check_machine(load_settings(TextEngineSettings, model="m", **settings))


def test_a_module_in_the_current_folder_is_found_as_a_child_process_would(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(0)
    (tmp_path / "my_processor_of_this_test.py").write_text("raise RuntimeError('nothing may be imported')")
    monkeypatch.chdir(tmp_path)
    settings = load_settings(TextEngineSettings, model="m", logits_processors="my_processor_of_this_test:Mine")
    machine_preflight.check_machine(settings)


def test_an_encoders_settings_are_judged_too(machine: Any) -> None:
    machine(0)
    with pytest.raises(SettingRefused, match="device=cuda cannot be used"):
        check_encoder(load_settings(VisionEncoderSettings, model="m", device="cuda"))
    machine(1)
    with pytest.raises(SettingRefused, match="quantization=int8 is for CPUs"):
        check_encoder(load_settings(VisionEncoderSettings, model="m", device="cuda", quantization="int8"))
    check_encoder(load_settings(VisionEncoderSettings, model="m", quantization="int8"))


def test_a_machine_is_judged_without_torch_and_as_torch_sees_it() -> None:
    source = "import sys; from shared.gpus import num_gpus; print(num_gpus(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    import torch

    found = torch.cuda.device_count() if torch.version.hip is None else None
    assert done.stdout.split() == [str(found), "False"]


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (0, {"cpu": "cpu", "auto": "cpu"}),
        (1, {"cpu": "cpu", "auto": None, "cuda": "cuda"}),
        (None, {"cpu": "cpu", "auto": None, "cuda": "cuda"}),
    ],
)
def test_a_gpu_of_the_driver_is_no_promise_that_torch_can_use_it(
    machine: Any, num_gpus: int | None, expected: dict[str, str | None]
) -> None:
    machine(num_gpus)
    assert {requested: gpus.expected_device(requested) for requested in expected} == expected


@pytest.mark.parametrize(("has_device_file", "found"), [(True, None), (False, 0)])
def test_a_driver_whose_library_cannot_be_opened_leaves_the_number_of_gpus_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_device_file: bool, found: int | None
) -> None:
    def open_none(_name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    device_file = tmp_path / "nvidiactl"
    if has_device_file:
        device_file.touch()
    monkeypatch.setattr(gpus.ctypes, "CDLL", open_none)
    monkeypatch.setattr(gpus, "DRIVER_DEVICES", (device_file,))
    monkeypatch.setattr(gpus, "_torch_builds", lambda: {"cuda"})
    assert gpus.num_gpus.__wrapped__() is found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens=8 is below max_num_seqs, which is 64"),
        ({"max_num_seqs": 1000}, "max_num_batched_tokens=512 is below max_num_seqs, which is 1000"),
    ],
)
def test_a_step_without_room_for_every_sequence_is_refused_with_the_settings(given: dict[str, int], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(TextEngineSettings, model="m", **given)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("http://127.0.0.1", "host=http://127.0.0.1 is a URL; give the address alone"),
        ("127.0.0.1:9000", "host=127.0.0.1:9000 is an address with a port; give them apart, host 127.0.0.1 and port"),
        ("[::1]:9000", "is an address with a port; give them apart, host [::1] and port 9000"),
    ],
)
@pytest.mark.parametrize("service", [GatewaySettings, VisionEncoderSettings, TextEngineSettings])
def test_an_address_to_listen_on_is_refused_with_what_is_wrong_about_it(service: Any, host: str, said: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        load_settings(service, **({"model": "m"} if "model" in service.model_fields else {}), host=host)
    assert said in str(refusal.value)


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize("service", [GatewaySettings, VisionEncoderSettings, TextEngineSettings])
def test_a_blank_address_to_listen_on_counts_as_unset(
    monkeypatch: pytest.MonkeyPatch, service: Any, blank: str
) -> None:
    monkeypatch.setenv(env_name(service, "host"), blank)
    settings = load_settings(service, **({"model": "m"} if "model" in service.model_fields else {}))
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize(("host", "meant"), [("[::1]", "::1"), ("::", "::"), ("localhost", "localhost")])
def test_an_address_to_listen_on_may_have_the_brackets_of_ipv6(host: str, meant: str) -> None:
    assert load_settings(GatewaySettings, host=host).host == meant


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://gpu:8000/", "http://gpu:8000"),
        ("https://gpu/v1/", "https://gpu"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_the_address_of_a_server_may_be_written_as_people_do(given: str, meant: str) -> None:
    assert start_checks.checked_server_url(given) == meant


@pytest.mark.parametrize("given", ["http://gpu:70000", "ftp://gpu", "http://", "gpu :1"])
def test_the_address_of_a_server_that_nobody_can_ask_is_refused(given: str) -> None:
    with pytest.raises(BadSetting, match=r"^--url "):
        start_checks.checked_server_url(given)


@pytest.mark.parametrize(("size", "size_bytes"), [("0", 0), ("16MiB", 16 << 20), ("1GB", 10**9)])
def test_the_embedding_cache_takes_what_a_few_pictures_fit_into(size: str, size_bytes: int) -> None:
    assert launch.cache_memory_bytes(size) == size_bytes


@pytest.mark.parametrize("size", ["1", "512", "15MiB"])
def test_an_embedding_cache_of_next_to_nothing_is_refused_with_its_unit(size: str) -> None:
    with pytest.raises(BadSetting, match="too little for the embeddings of a few pictures; give 16MiB or more with"):
        launch.cache_memory_bytes(size)


@pytest.mark.parametrize("name", ["kv_cache_memory", "host_cache_memory"])
def test_a_memory_that_nobody_means_in_bytes_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}=2 is 2B, too little for any cache; give it with a unit"):
        load_settings(TextEngineSettings, model="m", **{name: "2"})


@pytest.mark.parametrize("name", ["kv_cache_memory", "host_cache_memory"])
def test_a_cache_of_no_memory_is_refused_with_the_settings(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}=0 is no memory at all; give a size, e.g. 512MiB, or leave it out"):
        load_settings(TextEngineSettings, model="m", **{name: "0"})


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    """A folder that passes for a text model's until it is loaded."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def said_by_serve(*words: str) -> str:
    result = CliRunner().invoke(app, ["serve", *words, "--port", str(free_ports(1)[0])])
    assert isinstance(result.exception, BadSetting | ModelUnavailable), result.output
    return str(result.exception)


def test_a_variable_of_the_encoders_is_not_blamed_on_a_flag_for_the_engines(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(0)
    monkeypatch.setenv("DIPTYCH_ENCODER_DEVICE", "cuda")
    assert said_by_serve("demo", "--device", "cpu").startswith("DIPTYCH_ENCODER_DEVICE=cuda cannot be used")


def test_a_flag_is_named_although_its_variable_is_set_too(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(0)
    monkeypatch.setenv("DIPTYCH_ENGINE_DEVICE", "cpu")
    assert said_by_serve("demo", "--device", "cuda").startswith("--device cuda cannot be used")


def test_the_encoders_machine_is_not_judged_for_a_model_without_vision(
    machine: Any, monkeypatch: pytest.MonkeyPatch, text_model: Path
) -> None:
    machine(0)
    monkeypatch.setenv("DIPTYCH_ENCODER_DEVICE", "cuda")
    said = said_by_serve(str(text_model), "--speculative-model", "no-such-draft")
    assert said.startswith("--speculative-model no-such-draft: model")


@pytest.mark.parametrize("variable", OVERRULED_BY_SERVE)
@pytest.mark.parametrize("value", ["tcp://10.0.0.1:80", ""])
def test_serve_does_not_judge_what_it_overrules(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    assert said_by_serve("./no-such-model").startswith("model './no-such-model' is neither")


def test_serve_gives_both_panels_the_name_that_it_was_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    plan = launch.Plan(model=Model("llava", tmp_path), served_model_name="ours")
    for command in launch.commands(plan, Console(quiet=True)):
        is_panel = command.name in ("vision-encoder", "text-engine")
        assert ("--served-model-name=ours" in command.argv) == is_panel
    assert launch.Plan(model=Model("llava", tmp_path)).model_name == "llava"


async def test_why_a_child_has_not_started_is_told_once() -> None:
    async def never() -> bool:
        return False

    lines: list[str] = []
    words = [sys.executable, "-c", "import sys; print('loading'); print('error: no memory'); sys.exit(1)"]
    supervisor = Supervisor(
        [Command("text-engine", words, never)], say=lines.append, on_line=lambda _name, line: lines.append(line)
    )
    with pytest.raises(StartFailed, match=r"^text-engine: no memory$"):
        await asyncio.wait_for(supervisor.start(), 20)
    assert lines == ["loading"]
