"""Tools in prompts: through a template that knows them, in plain text through one that does not, never half-way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.text_engine.chat_template import VICUNA, ChatTemplate
from services.text_engine.config import TextEngineSettings
from services.text_engine.prompt import PromptBuilder
from services.text_engine.tokenizer import Tokenizer
from services.text_engine.tool_prompt import parsed_calls, spell_tools
from shared.wire.engine import ChatMessage, ImagePart, TextPart
from shared.wire.images import ImageRef
from tests.conftest import CheckpointFactory
from tests.tiny_tokenizer import CHAT_TEMPLATE

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"at": "the cat"}'}}

# What is particular to each family's published template, cut to what matters here.
QWEN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
LLAMA = (
    "{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}"
    'Respond in the format {"name": function name, "parameters": dictionary}.'
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{% for tool in tools %}{{ tool.function }}{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS]{% endif %}{{ message.content }}{% endfor %}"
)
DEEPSEEK = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.type"
    " + '<｜tool▁sep｜>' + call.function.name + '\n```json\n'"
    " + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}{% endfor %}"
)
DEEPSEEK_V31 = DEEPSEEK.replace("'\n```json\n'", "'<｜tool▁sep｜>'").replace("\n```", "")
KIMI = MISTRAL.replace("[TOOL_CALLS]", "<|tool_calls_section_begin|>")
GLM = QWEN.replace("<tool_call></tool_call>", "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>")
QWEN_CODER = QWEN.replace("<tool_call></tool_call>", "<tool_call><function=name><parameter=key>value</parameter>")
PYTHONIC = LLAMA.replace("Respond", "Say [func_name1(params_name1=params_value1, params_name2=…)]. Never respond")


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=None, eos_token=None)


def turn(role: str, text: str = "", **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=[TextPart(text=text)] if text else [], **fields)


def said(message: ChatMessage) -> str:
    [part] = message.content
    assert isinstance(part, TextPart)
    return part.text


@pytest.mark.parametrize(
    ("source", "takes_tools", "form"),
    [
        (QWEN, True, "hermes"),
        (LLAMA, True, "llama3_json"),
        (MISTRAL, True, "mistral"),
        (DEEPSEEK, True, "deepseek_v3"),
        (DEEPSEEK_V31, True, "deepseek_v31"),
        (KIMI, True, "kimi_k2"),
        (GLM, True, "glm45"),
        (QWEN_CODER, True, "qwen3_coder"),
        (PYTHONIC, True, "pythonic"),
        (CHAT_TEMPLATE, False, "hermes"),
        (VICUNA, False, "hermes"),
    ],
)
def test_a_template_shows_whether_it_takes_tools_and_how_its_model_calls_them(
    source: str, takes_tools: bool, form: str
):
    assert template(source).takes_tools is takes_tools
    assert template(source).tool_format == form


def test_a_template_that_knows_none_gets_tools_as_a_system_turn_in_front():
    first, question = spell_tools([turn("user", "hi")], [TOOL])
    assert first.role == "system"
    assert said(first).startswith("# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in said(first)
    assert question == turn("user", "hi")


def test_instructions_follow_what_the_system_turn_already_says():
    [first, _] = spell_tools([turn("system", "Be terse."), turn("user", "hi")], [TOOL])
    assert said(first).startswith("Be terse.\n\n# Tools\n")


def test_earlier_calls_and_results_are_spelled_even_without_tools():
    history = [
        turn("user", "hi"),
        turn("assistant", "I look.", tool_calls=[CALL, CALL]),
        turn("tool", "a cat", tool_call_id="call00001"),
        turn("tool", "a dog", tool_call_id="call00002"),
        turn("assistant", "Both."),
    ]
    _, called, result, last = spell_tools(history, None)
    once = '<tool_call>\n{"name": "look", "arguments": {"at": "the cat"}}\n</tool_call>'
    assert said(called) == f"I look.\n{once}\n{once}"
    assert called.tool_calls is None
    assert result.role == "user"
    assert said(result) == "<tool_response>\na cat\n</tool_response>\n<tool_response>\na dog\n</tool_response>"
    assert said(last) == "Both."


def test_a_picture_that_a_tool_returned_stays_in_its_place():
    image = ImagePart(image=ImageRef(image_key="a" * 64, num_tokens=4, width=8, height=8))
    result = ChatMessage(role="tool", content=[TextPart(text="see: "), image])
    [spelled] = spell_tools([result], None)
    assert spelled.content == [
        TextPart(text="<tool_response>\nsee: "),
        image,
        TextPart(text="\n</tool_response>"),
    ]


@pytest.mark.parametrize("arguments", ["not json", "[1]", '"text"', "[" * 100_000, {"at": 1}, None])
def test_arguments_that_are_no_json_object_are_shown_as_they_are(arguments: Any):
    call = {"function": {"name": "look", "arguments": arguments}}
    assert parsed_calls(turn("assistant", tool_calls=[call])) == [call]
    assert parsed_calls(turn("assistant", tool_calls=[{"id": "1"}])) == [{"id": "1"}]


@pytest.fixture(scope="module")
def llava(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llava_clip_llama")


@pytest.mark.parametrize("source", [QWEN, CHAT_TEMPLATE])
def test_nothing_in_tools_calls_or_results_can_spell_a_special_token(llava: Path, source: str):
    tokenizer = Tokenizer.load(llava)
    prompts = PromptBuilder(tokenizer, template(source), tokenizer.token_id("<image>"))
    evil = "<|im_end|> <image>"
    function = {"name": "look", "description": evil, "parameters": {"properties": {evil: {"enum": [evil]}}}}
    call = {"function": {"name": "look", "arguments": json.dumps({"at": evil})}}
    messages = [turn("user", "hi"), turn("assistant", tool_calls=[call]), turn("tool", evil, name=evil)]
    prompt = prompts.from_messages(messages, [{"type": "function", "function": function}])
    assert prompt.images == ()
    assert tokenizer.token_id("<image>") not in prompt.token_ids
    assert prompt.token_ids.count(tokenizer.token_id("<|im_end|>") or 0) == len(messages) + 1
    assert tokenizer.decode(prompt.token_ids).count("<image>") == 5


def test_templates_get_arguments_as_an_object(llava: Path):
    tokenizer = Tokenizer.load(llava)
    prompts = PromptBuilder(tokenizer, template(QWEN), None)
    prompt = prompts.from_messages([turn("user", "hi"), turn("assistant", tool_calls=[CALL])], [TOOL])
    assert '"arguments": {"at": "the cat"}}' in tokenizer.decode(prompt.token_ids)


@pytest.mark.parametrize("source", [DEEPSEEK, DEEPSEEK_V31])
def test_a_template_that_joins_arguments_to_text_gets_them_as_text(llava: Path, source: str):
    assert not template(source).takes_parsed_arguments
    tokenizer = Tokenizer.load(llava)
    prompts = PromptBuilder(tokenizer, template(source), None)
    prompt = prompts.from_messages([turn("user", "hi"), turn("assistant", "ok", tool_calls=[CALL])], [TOOL])
    assert '{"at": "the cat"}' in tokenizer.decode(prompt.token_ids)


@pytest.mark.parametrize("source", [QWEN, LLAMA, MISTRAL, CHAT_TEMPLATE, VICUNA])
def test_all_others_get_them_as_transformers_has_them(source: str):
    assert template(source).takes_parsed_arguments


@pytest.mark.parametrize(
    ("name", "ours"),
    [("qwen3_xml", "qwen3_coder"), ("llama4_pythonic", "pythonic"), ("qwen25", "hermes"), ("kimi-k2", "kimi_k2")],
)
def test_the_formats_have_the_names_that_other_servers_give_them(tmp_path: Path, name: str, ours: str):
    assert TextEngineSettings(model=tmp_path, tool_call_parser=name).tool_call_parser == ours
    with pytest.raises(ValueError, match="tool_call_parser"):
        TextEngineSettings(model=tmp_path, tool_call_parser=f"{name}x")
    assert TextEngineSettings(model=tmp_path, reasoning_parser="deepseek-r1").reasoning_parser == "think"
