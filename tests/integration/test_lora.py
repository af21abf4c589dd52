"""LoRA adapters over HTTP: named as models, mixed, coming and going, at an engine and by a gateway's admin keys."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.gateway_stack import assert_openai_error, eventually
from tests.lora_adapters import write_adapter
from tests.real_stack import RealStack, real_stack

ADMIN = {"Authorization": "Bearer operator"}
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def base(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines may load from; "outside" is beside it."""
    root = tmp_path_factory.mktemp("lora")
    for seed, name in enumerate(("one", "two", "three"), start=1):
        write_adapter(base, root / "below" / name, seed=seed)
    write_adapter(base, root / "outside", seed=9)
    (root / "below" / "link").symlink_to(root / "outside")
    return root / "below"


@pytest.fixture(scope="module")
def system(base: Path, folder: Path) -> Iterator[RealStack]:
    engine = {"lora_modules": (f"one={folder / 'one'}",), "lora_folder": folder, "max_loras": 3}
    with real_stack(base, num_engines=2, engine=engine, admin_keys=("operator",)) as system:
        yield system


@pytest.fixture(scope="module")
def expected(base: Path, folder: Path) -> dict[str, str]:
    """The answers of an engine that is driven directly."""
    names = ("one", "two", "three")
    driver = EngineDriver(
        base, attention_backend="auto", lora_modules=tuple(f"{name}={folder / name}" for name in names)
    )
    found = {name: driver.generate(PROMPT, adapter=name).text for name in names}
    found["tiny"] = driver.generate(PROMPT).text
    assert len(set(found.values())) == 4
    return found


def ask(system: RealStack, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    return system.http.post("/v1/completions", json=body)


def answer(system: RealStack, model: str) -> str:
    response = ask(system, model)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    text: str = response.json()["choices"][0]["text"]
    return text


def served(system: RealStack) -> dict[str, Any]:
    return {each["id"]: each for each in system.http.get("/v1/models").json()["data"]}


def change(system: RealStack, what: str, query: str = "", **body: Any) -> httpx.Response:
    return system.http.post(f"/v1/{what}_lora_adapter{query}", json=body, headers=ADMIN)


def test_an_adapter_is_a_model_beside_the_one_it_adapts(system: RealStack, expected: dict[str, str]):
    models = served(system)
    assert list(models) == ["tiny", "one"]
    assert (models["tiny"]["root"], models["tiny"]["parent"]) == ("tiny", None)
    assert (models["one"]["root"], models["one"]["parent"]) == ("one", "tiny")
    assert system.http.get("/v1/models/one").json() == models["one"]
    assert [answer(system, name) for name in ("tiny", "one", "tiny")] == [
        expected["tiny"],
        expected["one"],
        expected["tiny"],
    ]
    chat = {"model": "one", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert system.http.post("/v1/chat/completions", json=chat).json()["model"] == "one"
    assert system.http.post("/v1/tokenize", json={"model": "one", "prompt": "Hello"}).status_code == 200
    assert_openai_error(ask(system, "nobody"), 404, "model_not_found")


def test_adapters_come_and_go_while_others_are_asked(system: RealStack, expected: dict[str, str]):
    assert_openai_error(ask(system, "two"), 404, "model_not_found")
    loaded = change(system, "load", lora_name="two", lora_path="two")
    assert loaded.status_code == 200, loaded.text
    assert [[each["name"] for each in data["adapters"]] for data in loaded.json()["data"]] == [["one", "two"]] * 2
    names = ["one", "two", "tiny"] * 4
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda name: answer(system, name), names)) == [expected[name] for name in names]
    assert change(system, "unload", lora_name="two").status_code == 200
    assert_openai_error(ask(system, "two"), 404, "model_not_found")
    assert answer(system, "one") == expected["one"]


def test_a_reload_in_place_answers_with_the_new_content(system: RealStack, expected: dict[str, str]):
    assert change(system, "load", lora_name="mine", lora_path="two").status_code == 200
    assert answer(system, "mine") == expected["two"]
    again = change(system, "load", lora_name="mine", lora_path="three")
    assert again.status_code == 400
    assert "load_inplace" in again.json()["data"][0]["error"]["message"]
    assert change(system, "load", lora_name="mine", lora_path="three", load_inplace=True).status_code == 200
    assert [answer(system, "mine") for _ in range(3)] == [expected["three"]] * 3
    change(system, "unload", lora_name="mine")


def test_requests_go_to_an_engine_that_has_the_adapter(system: RealStack, expected: dict[str, str]):
    assert change(system, "load", "?engine=2", lora_name="two", lora_path="two").status_code == 200
    assert [answer(system, "two") for _ in range(6)] == [expected["two"]] * 6
    assert change(system, "unload", "?engine=2", lora_name="two").status_code == 200


def test_what_an_engine_has_changed_by_itself_is_soon_known(system: RealStack, expected: dict[str, str]):
    for url in system.engine_urls:
        body = {"lora_name": "three", "lora_path": "three"}
        info = httpx.post(f"{url}/v1/load_lora_adapter", json=body, trust_env=False).json()
        assert [each["name"] for each in info["adapters"]] == ["one", "three"]
    eventually(lambda: "three" in served(system))
    assert answer(system, "three") == expected["three"]
    # Gone at the engines, and the gateway may not have heard of it: either way the client does.
    for url in system.engine_urls:
        assert httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "three"}, trust_env=False).is_success
    assert_openai_error(ask(system, "three"), 404, "model_not_found")
    eventually(lambda: "three" not in served(system))


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"lora_name": "a", "lora_path": "nowhere"}, 404, "not_found"),
        ({"lora_name": "a", "lora_path": "../outside"}, 400, "invalid_value"),
        ({"lora_name": "a", "lora_path": "link"}, 400, "invalid_value"),
        ({"lora_name": "a", "lora_path": "/etc"}, 400, "invalid_value"),
        ({"lora_name": "a", "lora_path": "one\0"}, 400, "invalid_value"),
        ({"lora_name": "tiny", "lora_path": "one"}, 400, "invalid_value"),
        ({"lora_name": "", "lora_path": "one"}, 400, "invalid_value"),
        ({"lora_name": "a"}, 400, None),
    ],
)
def test_what_cannot_be_loaded_is_refused(system: RealStack, body: dict[str, Any], status: int, code: str | None):
    response = httpx.post(f"{system.engine_urls[0]}/v1/load_lora_adapter", json=body, trust_env=False)
    assert_openai_error(response, status, code)
    assert "outside/" not in response.text
    assert list(served(system)) == ["tiny", "one"]


@pytest.mark.parametrize("name", ["never-loaded", "tiny"])
def test_what_is_not_loaded_cannot_be_unloaded_and_is_named_as_it_was_given(system: RealStack, name: str):
    refused = change(system, "unload", lora_name=name)
    assert refused.status_code == 404
    error = refused.json()["data"][0]["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "lora_name")
    assert error["message"] == f"no adapter {name!r} is loaded here; loaded: one"


def test_too_many_are_refused_until_one_goes(system: RealStack):
    for name in ("two", "three"):
        assert change(system, "load", lora_name=name, lora_path=name).status_code == 200
    full = change(system, "load", lora_name="four", lora_path="one")
    assert full.status_code == 503
    assert "max_loras is 3" in full.json()["data"][0]["error"]["message"]
    for name in ("two", "three"):
        assert change(system, "unload", lora_name=name).status_code == 200


def test_only_an_admin_key_changes_adapters_and_only_where_the_engine_allows_it(system: RealStack, base: Path):
    body = {"lora_name": "two", "lora_path": "two"}
    assert_openai_error(system.http.post("/v1/load_lora_adapter", json=body), 401)
    with real_stack(base, admin_keys=("operator",)) as closed:
        refused = change(closed, "load", **body)
        assert refused.status_code == 400
        assert "--lora-folder" in refused.json()["data"][0]["error"]["message"]
        assert change(closed, "unload", lora_name="two").status_code == 400
