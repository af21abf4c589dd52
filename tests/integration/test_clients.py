"""Other people's clients, unmodified, against a gateway with scripted services: LangChain and LiteLLM.

The official `openai` client is in the tests of each API. LiteLLM is large (350 MB), so it is in no default set-up:
`pip install -e .[clients]` adds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import BadRequestError, NotFoundError

from shared.errors import ContextTooLong
from tests.gateway_stack import Stack, data_url, running_stack
from tests.scripted import IMAGE_TOKENS, WORDS, EngineScript, png

ANSWER = " ".join(WORDS)
PICTURE = {"type": "image_url", "image_url": {"url": data_url(png(1))}}


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    shared_stack.reset()
    return shared_stack


# --- LangChain --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(stack: Stack, request: pytest.FixtureRequest) -> Iterator[ChatOpenAI]:
    """Over either API."""
    with httpx.Client() as client:  # one of its own, LangChain would leave open
        yield langchain(stack, use_responses_api=request.param, http_client=client)


def langchain(stack: Stack, **options: Any) -> ChatOpenAI:
    options = {"max_retries": 0, "stream_usage": True, **options}
    return ChatOpenAI(model="scripted", base_url=f"{stack.url}/v1", api_key="any", **options)


def test_langchain_gets_an_answer_with_its_usage(model: ChatOpenAI):
    answer = model.invoke([SystemMessage("Be terse."), HumanMessage("hi there")])
    assert answer.text == ANSWER
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len(WORDS)


def test_langchain_streams_the_same_text_with_its_usage(model: ChatOpenAI):
    chunks = list(model.stream("hi there"))
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == len(WORDS)


@pytest.mark.parametrize("use_responses_api", [False, True])
async def test_langchain_answers_and_streams_asynchronously(stack: Stack, use_responses_api: bool):
    async with httpx.AsyncClient() as client:
        model = langchain(stack, use_responses_api=use_responses_api, http_async_client=client)
        assert (await model.ainvoke("hi there")).text == ANSWER
        assert "".join([chunk.text async for chunk in model.astream("hi there")]) == ANSWER


def test_langchain_asks_about_a_picture_in_a_conversation(model: ChatOpenAI):
    first = HumanMessage([{"type": "text", "text": "what is it"}, PICTURE])
    answer = model.invoke([first, AIMessage("a cat"), HumanMessage("and its colour?")])
    assert answer.text == ANSWER
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] > IMAGE_TOKENS


def test_langchain_calls_a_tool_and_goes_on_with_its_result(stack: Stack, model: ChatOpenAI):
    stack.engine.script = EngineScript(tokens=['<tool_call>{"name": "look", "arguments": {"at":', "1}}</tool_call>"])
    tools = model.bind_tools([{"name": "look", "description": "looks", "parameters": {"type": "object"}}])
    asked = tools.invoke("look at it")
    [call] = asked.tool_calls
    assert (call["name"], call["args"]) == ("look", {"at": 1})
    stack.engine.script = EngineScript()
    told = tools.invoke([HumanMessage("look at it"), asked, ToolMessage("a cat", tool_call_id=call["id"])])
    assert told.text == ANSWER
    assert [message.role for message in stack.engine.requests[-1].messages or ()] == ["user", "assistant", "tool"]


def test_langchain_gets_structured_output(stack: Stack, model: ChatOpenAI):
    stack.engine.script = EngineScript(tokens=['{"name":', '"cat"}'])
    schema = {"title": "Animal", "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    assert model.with_structured_output(schema, method="json_schema").invoke("what is it") == {"name": "cat"}
    assert stack.engine.requests[0].sampling["constraint"]["kind"] == "json_schema"


def test_langchain_gets_typed_errors(stack: Stack, model: ChatOpenAI):
    stack.engine.script = EngineScript(refuse=ContextTooLong("the prompt is too long", param="messages"))
    with pytest.raises(BadRequestError) as refused:
        model.invoke("hi there")
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(NotFoundError):
        model.bind(model="no-such-model").invoke("hi there")


# --- LiteLLM ----------------------------------------------------------------------------------------------------------


# Its modules warn while they are imported, for whatever version of its dependencies is there.
UNCLEAN = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def litellm() -> ModuleType:
    module: ModuleType = pytest.importorskip("litellm", reason="LiteLLM is not installed: pip install -e .[clients]")
    return module


def litellm_options(stack: Stack) -> dict[str, Any]:
    return {"model": "openai/scripted", "api_base": f"{stack.url}/v1", "api_key": "any", "max_retries": 0}


@UNCLEAN
def test_litellm_answers_streams_and_sees(litellm: ModuleType, stack: Stack):
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it"}, PICTURE]}]
    answer = litellm.completion(messages=messages, **litellm_options(stack))
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.prompt_tokens > IMAGE_TOKENS
    chunks = litellm.completion(messages=messages, stream=True, **litellm_options(stack))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


@UNCLEAN
def test_litellm_speaks_the_responses_api(litellm: ModuleType, stack: Stack):
    answer = litellm.responses(input="hi there", **litellm_options(stack))
    assert answer.output[0].content[0].text == ANSWER


@UNCLEAN
def test_litellm_gets_typed_errors(litellm: ModuleType, stack: Stack):
    stack.engine.script = EngineScript(refuse=ContextTooLong("the prompt is too long", param="messages"))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "hi there"}], **litellm_options(stack))
