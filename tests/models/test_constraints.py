"""Constrained answers of random models, which know nothing of JSON: whatever they would say, the answer is valid."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.sampling import Constraint
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver

CHOICES = ["yes", "no", 'a "quoted"\\ one', "línea\nnueva", "🙂 図", "(x)|*", "yes, but"]
DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
ARITHMETIC = """
root ::= term (("+" | "-") term){0,3}
term ::= [0-9]{1,3} | "(" root ")"
"""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = Constraint(kind="json_schema", value=json.dumps(PERSON))


@pytest.fixture(scope="module")
def llama(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def driver(llama: Path) -> EngineDriver:
    return EngineDriver(llama)


def prompt(seed: int = 0, length: int = 20) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def constrained(constraint: Constraint = SCHEMA, **sampling: Any) -> dict[str, Any]:
    return {"constraint": constraint, "ignore_eos": False, "max_tokens": 300, **sampling}


def assert_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 150
    assert isinstance(person["age"], int)
    assert set(person["tags"]) <= {"a", "b", "c"}
    assert len(person["tags"]) <= 3


# --- valid, whatever the model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_every_answer_matches_its_schema(checkpoint: CheckpointFactory, family: str, temperature: float):
    driver = EngineDriver(checkpoint(family))
    for seed in range(6):
        driver.add(str(seed), prompt(seed), **constrained(temperature=temperature, seed=seed))
    for answer in driver.run().values():
        assert answer.finish_reason == "stop"
        assert_person(answer.text)


def test_patterns_choices_and_grammars_hold_at_every_temperature(driver: EngineDriver):
    choice = Constraint(kind="choice", value=json.dumps(CHOICES))
    seen = set()
    for seed in range(20):
        sampling = {"temperature": seed / 10, "seed": seed}
        date = driver.generate(prompt(seed), **constrained(Constraint(kind="regex", value=DATE), **sampling)).text
        assert re.fullmatch(DATE, date)
        seen.add(driver.generate(prompt(seed), **constrained(choice, **sampling)).text)
        sum_ = driver.generate(prompt(seed), **constrained(Constraint(kind="grammar", value=ARITHMETIC), **sampling))
        assert sum_.finish_reason == "length" or re.fullmatch(r"[\d+()-]+", sum_.text)
        if sum_.finish_reason == "stop":
            eval(re.sub(r"\b0+(?=\d)", "", sum_.text))  # the grammar leaves nothing but sums
    assert seen <= set(CHOICES)
    assert len(seen) > 1


def test_any_json_object_is_an_object_and_white_space_has_no_chance_to_run_away(driver: EngineDriver):
    num_complete = 0
    for seed in range(12):
        sampling = constrained(Constraint(kind="json_object"), temperature=1.0, seed=seed)
        answer = driver.generate(prompt(seed), **sampling)
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
            num_complete += 1
        assert not re.search(r"\n\s*\n|  [^ \n]*:  ", answer.text)
    assert num_complete > 0


def test_a_lark_grammar_is_taken_as_well_as_gbnf(driver: EngineDriver):
    lark = Constraint(kind="grammar", value='start: "<" /[a-z]{2,4}/ ">"')
    assert re.fullmatch("<[a-z]{2,4}>", driver.generate(prompt(), **constrained(lark)).text)


def test_an_answer_cut_by_max_tokens_says_so(driver: EngineDriver):
    answer = driver.generate(prompt(), **constrained(max_tokens=4))
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 4


# --- however it is scheduled ------------------------------------------------------------------------------------------


def test_constrained_rows_and_their_neighbours_are_what_they_are_alone(llama: Path):
    def requests(driver: EngineDriver) -> list[tuple[str, list[int], dict[str, Any]]]:
        return [
            ("greedy", prompt(1), constrained(temperature=0.0)),
            ("sampled", prompt(2, 90), constrained(temperature=1.3, seed=5)),
            ("pattern", prompt(3), constrained(Constraint(kind="regex", value=DATE), temperature=1.0, seed=1)),
            ("free and greedy", prompt(4), {"max_tokens": 40}),
            ("free and sampled", prompt(5, 70), {"max_tokens": 40, "temperature": 1.0, "seed": 3}),
        ]

    together = EngineDriver(llama, max_num_batched_tokens=64)
    for name, token_ids, sampling in requests(together):
        together.add(name, token_ids, **sampling)
    answers = together.run()
    for name, token_ids, sampling in requests(together):
        alone = EngineDriver(llama).generate(token_ids, **sampling)
        assert answers[name].token_ids == alone.token_ids, name


def test_a_preempted_answer_is_the_undisturbed_one(llama: Path):
    options = constrained(temperature=1.0)
    roomy = EngineDriver(llama)
    tight = EngineDriver(llama, kv_cache_memory="160KiB", max_model_len=200, enable_prefix_caching=False)
    for driver in (roomy, tight):
        for seed in range(4):
            driver.add(str(seed), prompt(seed, 60), **options, seed=seed)
        driver.run()
    assert tight.engine.scheduler.num_preemptions > 0
    for request_id, answer in roomy.answers.items():
        assert tight.answers[request_id].token_ids == answer.token_ids
        assert_person(answer.text)


def test_every_choice_follows_the_grammar_on_its_own(driver: EngineDriver):
    driver.add("three", prompt(), **constrained(n=3, temperature=1.5, seed=1, max_tokens=300))
    texts = {0: "", 1: "", 2: ""}
    while driver.engine.num_requests:
        for output in driver.engine.step() or []:
            if hasattr(output, "text"):
                texts[output.index] += output.text
    del driver.answers["three"]
    assert len(set(texts.values())) > 1
    for text in texts.values():
        assert_person(text)


def test_aborted_in_the_middle_it_leaves_nothing_behind(driver: EngineDriver):
    driver.add("gone", prompt(), **constrained())
    for _ in range(5):
        driver.step()
    driver.engine.abort("gone")
    del driver.answers["gone"]
    driver.check_invariants()
    assert_person(driver.generate(prompt(), **constrained()).text)


# --- together with other parameters -----------------------------------------------------------------------------------


def test_bias_works_within_the_grammar_and_never_against_it(driver: EngineDriver):
    choice = Constraint(kind="choice", value='["yes", "no"]')
    [n] = driver.engine.tokenizer.encode_literal("n")
    [x] = driver.engine.tokenizer.encode_literal("x")
    for temperature in (0.0, 1.0):
        sampling = constrained(choice, logit_bias={n: 50, x: 100}, temperature=temperature)
        answer = driver.generate(prompt(), **sampling)
        assert answer.text == "no"


def test_an_answer_that_is_complete_before_min_tokens_is_filled_up_with_end_tokens(driver: EngineDriver):
    choice = Constraint(kind="choice", value='["yes"]')
    answer = driver.generate(prompt(), **constrained(choice, min_tokens=12))
    assert answer.text == "yes"
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) == 13
    endless = driver.generate(prompt(), **constrained(choice, ignore_eos=True, max_tokens=20))
    assert (endless.text, endless.finish_reason) == ("yes", "length")


def test_an_answer_that_may_go_on_goes_on_until_min_tokens(driver: EngineDriver):
    answer = driver.generate(prompt(), **constrained(Constraint(kind="regex", value="[a-z]+"), min_tokens=9))
    assert re.fullmatch("[a-z]{9,}", answer.text)


def test_penalties_and_filters_choose_among_what_is_allowed(driver: EngineDriver):
    for sampling in ({"top_k": 1}, {"top_p": 0.3, "seed": 1}, {"min_p": 0.9, "seed": 2}, {"repetition_penalty": 1.8}):
        assert_person(driver.generate(prompt(), **constrained(temperature=1.0, **sampling)).text)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "constraint",
    [
        {"kind": "json_schema", "value": '{"type": "not-a-type"}'},
        {"kind": "json_schema", "value": '{"type": "string", "pattern": "("}'},
        {"kind": "json_schema", "value": '{"not": {"type": "string"}}'},
        {"kind": "json_schema", "value": '{"minimum": 3, "maximum": 2, "type": "integer"}'},
        {"kind": "json_schema", "value": '{"$ref": "#/$defs/missing"}'},
        {"kind": "json_schema", "value": '{"properties": {"a":' * 500 + "true" + "}}" * 500},
        {"kind": "json_schema", "value": "[" * 100_000},
        {"kind": "json_schema", "value": "[]"},
        {"kind": "json_schema", "value": "{"},
        {"kind": "regex", "value": "[a-z"},
        {"kind": "regex", "value": r"a(?=b)"},
        {"kind": "regex", "value": r"[^\s\S]"},
        {"kind": "grammar", "value": "start: missing"},
        {"kind": "grammar", "value": "root ::= ("},
        {"kind": "grammar", "value": "hello"},
        {"kind": "choice", "value": "[1, 2]"},
        {"kind": "choice", "value": "yes"},
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_field_and_a_reason(
    driver: EngineDriver, constraint: dict[str, Any]
):
    """Case B32."""
    with pytest.raises(InvalidRequest) as refused:
        driver.add("bad", prompt(), **constrained(Constraint(**constraint, param="guided_thing")))
    del driver.answers["bad"]
    assert refused.value.param == "guided_thing"
    assert len(refused.value.message) > len("guided_thing: ")
    assert "<" not in refused.value.message.replace("(?<", "")
    assert_person(driver.generate(prompt(), **constrained()).text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 0, "maximum": 20_000_000_000},
        {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False},
        {"$defs": {"x": {"type": "boolean"}}, "type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 2},
    ],
)
def test_large_bounds_and_references_are_fine(driver: EngineDriver, schema: dict[str, Any]):
    """Case B32."""
    constraint = Constraint(kind="json_schema", value=json.dumps(schema))
    answer = driver.generate(prompt(), **constrained(constraint, temperature=1.0, seed=4))
    assert answer.error is None
    if answer.finish_reason == "stop":
        json.loads(answer.text)


def test_a_grammar_that_grows_too_complex_ends_its_answer_with_an_error_and_nobody_elses(driver: EngineDriver):
    repeated = " ".join(['("a" | "b")*'] * 300)
    driver.add("other", prompt(1), max_tokens=30)
    driver.add("complex", prompt(), **constrained(Constraint(kind="grammar", value=f"start: {repeated}")))
    answers = driver.run()
    error = answers["complex"].error
    assert error is not None
    assert (error.status, error.param) == (400, "constraint")
    assert "make it simpler" in error.message
    assert answers["other"].finish_reason == "length"
    assert answers["other"].token_ids == driver.generate(prompt(1), max_tokens=30).token_ids


def test_stop_tokens_beyond_the_vocabulary_are_refused_with_the_range(driver: EngineDriver):
    with pytest.raises(InvalidRequest, match="from 0 to 315") as refused:
        driver.add("bad", prompt(), stop_token_ids=(316,))
    del driver.answers["bad"]
    assert refused.value.param == "stop_token_ids"
