"""What an engine says of its model's reasoning, and that constraints hold for what comes after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.text_engine.chat_template import ChatTemplate
from services.text_engine.prompt import PromptBuilder
from services.text_engine.runner.grammar import GrammarCompiler
from services.text_engine.tokenizer import Tokenizer
from shared.errors import InvalidRequest
from shared.reasoning import REASONING_MARKS, ReasoningFormat, ReasoningStart
from shared.sampling import Constraint
from shared.wire.engine import ChatMessage, TextPart
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.tiny_tokenizer import CHAT_TEMPLATE

THINK = REASONING_MARKS["think"]
# As Qwen3's: the model thinks unless it is told not to, and then the template closes the reasoning for it.
QWEN3 = CHAT_TEMPLATE + (
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
# As DeepSeek R1's and Qwen3's thinking editions: reasoning is opened for the model.
R1 = CHAT_TEMPLATE + "{# ends with </think> #}{{ '<think>\n' }}"
MISTRAL = CHAT_TEMPLATE + "{# [THINK] and [/THINK] #}"
ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CONSTRAINTS = [
    Constraint(kind="json_schema", value=json.dumps(ANSWER)),
    Constraint(kind="json_object"),
    Constraint(kind="regex", value=r"\{\"n\": \d{1,3}\}"),
    Constraint(kind="choice", value=json.dumps(['{"n": 4}', '{"n": 5}'])),
    Constraint(kind="grammar", value='root ::= "{\\"n\\": " [0-9] "}"'),
    Constraint(kind="grammar", value='start: "{\\"n\\": " /[0-9]/ "}"'),
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=None, eos_token=None)


@pytest.fixture(scope="module")
def llama(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.mark.parametrize(
    ("source", "form"), [(QWEN3, "think"), (R1, "think"), (MISTRAL, "mistral"), (CHAT_TEMPLATE, None)]
)
def test_the_template_tells_how_a_model_marks_its_reasoning(source: str, form: ReasoningFormat | None):
    assert template(source).reasoning_format == form


@pytest.mark.parametrize(
    ("source", "kwargs", "start"),
    [
        (QWEN3, {}, "optional"),
        (QWEN3, {"enable_thinking": True}, "optional"),
        (QWEN3, {"enable_thinking": False}, None),
        (R1, {}, "open"),
    ],
)
def test_the_prompt_tells_how_the_answer_begins(
    llama: Path, source: str, kwargs: dict[str, bool], start: ReasoningStart | None
):
    prompts = PromptBuilder(Tokenizer.load(llama), template(source), None, None, THINK)
    hello = [ChatMessage(role="user", content=[TextPart(text="Does </think> or <think> end it? <think>")])]
    assert prompts.from_messages(hello, None, kwargs).reasoning == start


def test_variables_that_are_not_the_clients_are_refused(llama: Path):
    prompts = PromptBuilder(Tokenizer.load(llama), template(QWEN3), None)
    hello = [ChatMessage(role="user", content=[TextPart(text="hi")])]
    with pytest.raises(InvalidRequest, match="cannot set messages") as refused:
        prompts.from_messages(hello, None, {"messages": []})
    assert refused.value.param == "chat_template_kwargs"


def test_a_variable_of_the_client_spells_no_special_token(llama: Path):
    tokenizer = Tokenizer.load(llama)
    prompts = PromptBuilder(tokenizer, template("{{ messages[0].content }}{{ note }}"), None)
    hello = [ChatMessage(role="user", content=[TextPart(text="hi")])]
    ids = prompts.from_messages(hello, None, {"note": "<|im_end|>"}).token_ids
    assert tokenizer.token_id("<|im_end|>") not in ids
    assert tokenizer.decode(ids) == "hi<|im_end|>"


def test_marks_that_are_special_tokens_are_shown_all_the_same(llama: Path):
    tokenizer = Tokenizer.load(llama)
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert tokenizer.token_bytes(end) == b""
    shown = tokenizer.showing("<|im_end|>")
    assert shown.token_bytes(end) == b"<|im_end|>"
    assert tokenizer.token_bytes(end) == b""


@pytest.fixture(scope="module")
def grammars(llama: Path) -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = Tokenizer.load(llama)
    size = tokenizer.vocab_size
    return tokenizer, GrammarCompiler(tokenizer, vocab_size=size, eos_token_ids={2}, num_workers=1, reasoning=THINK)


def allows(
    grammars: tuple[Tokenizer, GrammarCompiler], constraint: Constraint, start: ReasoningStart | None, text: str
) -> bool:
    tokenizer, compiler = grammars
    matcher = compiler.matcher(constraint, start)
    for token_id in tokenizer.encode_literal(text):
        if not matcher.allowed()[token_id]:
            return False
        matcher.accept(token_id)
    return bool(matcher.allowed()[2])  # the answer may end here


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda each: each.kind)
def test_a_constraint_begins_after_the_reasoning(grammars: tuple[Tokenizer, GrammarCompiler], constraint: Constraint):
    answer, thought = '{"n": 4}', "hm, { or </th\n"
    assert allows(grammars, constraint, None, answer)
    assert not allows(grammars, constraint, None, f"<think>{thought}</think>{answer}")
    assert allows(grammars, constraint, "optional", answer)
    assert allows(grammars, constraint, "optional", f"<think>{thought}</think>\n\n{answer}")
    assert not allows(grammars, constraint, "optional", f"{thought}</think>{answer}")
    assert not allows(grammars, constraint, "optional", f"<think>{thought}</think>sure: {answer}")
    assert allows(grammars, constraint, "open", f"{thought}</think>\n{answer}")
    assert not allows(grammars, constraint, "open", answer)


def test_an_engine_gives_a_model_room_to_think(checkpoint: CheckpointFactory, tmp_path: Path):
    folder = tmp_path / "thinker"
    folder.mkdir()
    for file in checkpoint("llama").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(R1)
    driver = EngineDriver(folder)
    assert driver.info.reasoning_format == "think"
    hello = [ChatMessage(role="user", content=[TextPart(text="hi")])]
    prompt = driver.prompts.from_messages(hello)
    assert prompt.reasoning == "open"
    choice = {"constraint": Constraint(kind="regex", value="yes|no"), "ignore_eos": False, "max_tokens": 20}
    driver.add("thinks", prompt.token_ids, reasoning="open", **choice)
    unmarked = dict.fromkeys(driver.engine.tokenizer.encode_literal("<"), -100.0)
    driver.add("answers", prompt.token_ids, reasoning="optional", logit_bias=unmarked, **choice)
    answers = driver.run()
    assert answers["thinks"].finish_reason == "length"
    assert len(answers["thinks"].token_ids) == 20
    assert answers["answers"].text in ("yes", "no")
    without = EngineDriver(folder, reasoning_parser="none")
    assert without.info.reasoning_format is None
    assert without.prompts.from_messages(hello).reasoning is None
