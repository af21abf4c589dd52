"""The operator's logits processors: loaded by name at the start, asked for by requests, and nobody else's trouble."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from services.gateway.schema import CompletionRequest
from services.text_engine.config import LOGITS_PROCESSORS_GROUP
from services.text_engine.runner.logits_processors import (
    Adjust,
    LogitsProcessors,
    Vocabulary,
    load_logits_processors,
)
from shared.errors import InvalidRequest
from shared.sampling import Constraint
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.real_stack import real_stack

ROOT = Path(__file__).resolve().parents[2]
HERE = f"{__name__}:"
PROMPT = [5, 77, 130, 9, 200, 41, 18]


class Only:
    """Leaves the tokens that a request lists; a list inside the list is for one position each."""

    name = "only"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size = vocabulary.size

    def for_request(self, arguments: Any, prompt_token_ids: Sequence[int]) -> Adjust | None:
        if arguments is None:
            return None
        if not isinstance(arguments, list):
            raise ValueError("give a list of token ids")

        def adjust(generated: Sequence[int], logits: torch.Tensor) -> None:
            allowed = arguments[len(generated)] if isinstance(arguments[0], list) else arguments
            mask = torch.ones(self._size, dtype=torch.bool)
            mask[allowed] = False
            logits.masked_fill_(mask.to(logits.device), float("-inf"))

        return adjust


class Raise:
    name = "raise"

    def __init__(self, vocabulary: Vocabulary) -> None:
        pass

    def for_request(self, arguments: Any, prompt_token_ids: Sequence[int]) -> Adjust | None:
        def adjust(generated: Sequence[int], logits: torch.Tensor) -> None:
            raise ZeroDivisionError

        return adjust if arguments else None


class Counting:
    """Notes how often it is asked for a function."""

    name = "counting"
    num_calls = 0

    def __init__(self, vocabulary: Vocabulary) -> None:
        pass

    def for_request(self, arguments: Any, prompt_token_ids: Sequence[int]) -> Adjust | None:
        if arguments is not None:
            Counting.num_calls += 1
        return None


class Careless:
    """Looks at its arguments as if they could only be good."""

    name = "careless"

    def __init__(self, vocabulary: Vocabulary) -> None:
        pass

    def for_request(self, arguments: Any, prompt_token_ids: Sequence[int]) -> Adjust | None:
        {"yes": 1}[arguments["really"]]
        return None


class Nameless:
    def __init__(self, vocabulary: Vocabulary) -> None:
        pass


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.fixture
def driver(folder: Path) -> EngineDriver:
    return EngineDriver(folder, logits_processors=f"{HERE}Only, {HERE}Raise")


def vocabulary() -> Vocabulary:
    return Vocabulary(10, frozenset({2}), lambda text: [], lambda token_ids: "")


def test_a_processor_is_asked_once_for_each_choice(folder: Path):
    driver = EngineDriver(folder, logits_processors=f"{HERE}Counting")
    Counting.num_calls = 0
    driver.add("three", PROMPT, n=3, extra_args={"counting": True})
    driver.run()
    assert Counting.num_calls == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_gets_what_its_processor_leaves_and_its_neighbours_all(driver: EngineDriver, temperature: float):
    alone = driver.generate(PROMPT, seed=3).token_ids
    wanted = [[7], [100, 101], [55]] * 4
    options = {"temperature": temperature, "seed": 3}
    driver.add("bound", PROMPT, extra_args={"only": wanted}, **options)
    driver.add("free", PROMPT, seed=3)
    answers = driver.run()
    bound = answers["bound"].token_ids
    assert len(bound) == 12
    assert all(token_id in allowed for token_id, allowed in zip(bound, wanted, strict=True))
    assert answers["free"].token_ids == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("extra_args", [{"raise": True}, {"only": []}])
def test_a_processor_that_fails_or_leaves_nothing_ends_its_own_request_alone(
    driver: EngineDriver, extra_args: dict[str, Any], temperature: float
):
    if extra_args == {"only": []}:
        extra_args = {"only": [[]]}
    alone = driver.generate(PROMPT).token_ids
    driver.add("bad", PROMPT, extra_args=extra_args, temperature=temperature)
    driver.add("good", PROMPT)
    answers = driver.run()
    assert answers["bad"].error is not None
    assert "logits processor" in answers["bad"].error.message
    assert answers["good"].token_ids == alone
    assert driver.generate(PROMPT).token_ids == alone, "the cache holds nothing bad"


def test_a_constraint_holds_whatever_a_processor_prefers(driver: EngineDriver):
    choices = Constraint(kind="choice", value='["yes", "no"]')
    free = driver.generate(PROMPT, constraint=choices, ignore_eos=False).text
    bound = driver.generate(PROMPT, constraint=choices, ignore_eos=False, extra_args={"only": list(range(316))}).text
    assert bound == free
    assert bound in ("yes", "no")


@pytest.mark.parametrize(("extra_args", "param"), [({"onyl": [1]}, "vllm_xargs"), ({"only": "all"}, "vllm_xargs.only")])
def test_a_name_that_is_not_there_and_bad_arguments_are_refused(
    driver: EngineDriver, extra_args: dict[str, Any], param: str
):
    with pytest.raises(InvalidRequest) as refused:
        driver.add("r", PROMPT, extra_args=extra_args)
    assert refused.value.param == param
    del driver.answers["r"]
    assert driver.engine.num_requests == 0


@pytest.mark.parametrize("arguments", [{}, {"really": "no"}, {"really": []}, 5])
def test_a_processor_that_stumbles_over_arguments_has_refused_them(arguments: Any):
    processors = LogitsProcessors([Careless(vocabulary())])
    assert processors.for_request({"careless": {"really": "yes"}}, []) is None
    with pytest.raises(InvalidRequest, match="cannot use these arguments") as refused:
        processors.for_request({"careless": arguments}, [])
    assert refused.value.param == "vllm_xargs.careless"
    with pytest.raises(TypeError):  # without any, the mistake is nobody's but its own
        processors.for_request({}, [])


def test_arguments_are_refused_where_there_are_no_processors(folder: Path):
    with pytest.raises(InvalidRequest, match="none"):
        EngineDriver(folder).add("r", PROMPT, extra_args={"os:system": ["true"]})


@pytest.mark.parametrize(
    "name", ["no_such_module:Class", f"{HERE}NoSuchClass", f"{HERE}Nameless", "no-such-entry-point", f"{HERE}PROMPT"]
)
def test_a_processor_that_cannot_be_had_stops_the_start_by_name(name: str):
    with pytest.raises(ValueError, match=r"^logits_processors=") as stopped:
        load_logits_processors([name], vocabulary())
    assert name in str(stopped.value)


def test_two_of_one_name_stop_the_start():
    with pytest.raises(ValueError, match="two logits processors are called 'only'"):
        load_logits_processors([f"{HERE}Only", f"{HERE}Only"], vocabulary())


def test_an_installed_package_offers_one_by_its_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    package = tmp_path / "tiny_plugin-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: tiny-plugin\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[{LOGITS_PROCESSORS_GROUP}]\ntiny = {HERE}Only\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.entry_points(group=LOGITS_PROCESSORS_GROUP, name="tiny")
    loaded = load_logits_processors(["tiny"], vocabulary())
    assert loaded.for_request({"only": [1]}, []) is not None


def test_a_request_that_asks_for_nothing_costs_nothing():
    assert LogitsProcessors([Only(vocabulary()), Raise(vocabulary())]).for_request({}, []) is None


def test_clients_give_arguments_in_vllm_xargs(folder: Path):
    with real_stack(folder, engine={"logits_processors": (f"{HERE}Only",)}) as system:
        body = {"prompt": "Hello", "max_tokens": 3, "logprobs": 0, "vllm_xargs": {"only": [100]}}
        answer = system.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert len(set(answer.json()["choices"][0]["logprobs"]["tokens"])) == 1
        refused = system.http.post("/v1/completions", json=body | {"vllm_xargs": {"os": "system"}})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "vllm_xargs"


def test_the_example_keeps_a_word_out_of_an_answer():
    done = subprocess.run(
        [sys.executable, "examples/ban_words.py"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    free, bound = (re.findall(r"\w+", line.partition("]: ")[2]) for line in done.stdout.splitlines())
    assert "picture" in free
    assert "picture" not in bound


def test_arguments_nested_without_end_are_refused():
    nested: Any = [1]
    for _ in range(150):
        nested = [nested]
    body = {"prompt": "Hello", "vllm_xargs": {"only": nested}}
    with pytest.raises(ValidationError, match="nested more than"):
        CompletionRequest.model_validate(body)
    CompletionRequest.model_validate(body | {"vllm_xargs": {"only": [[[1]]]}})
