"""Errors about the chat that a response became, told of what the client sent: paths are mapped, not words."""

from __future__ import annotations

import pytest

from services.gateway.responses_chat import with_client_paths
from shared.errors import ContextTooLong, DiptychError, InvalidRequest, RateLimited

PATHS = ["instructions", "input[0]", "input[3]"]


def told(error: DiptychError) -> DiptychError:
    with pytest.raises(type(error)) as caught, with_client_paths(PATHS):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("messages[1].content[0].image_url", "input[0].content[0].image_url"),
        ("messages[2]", "input[3]"),
        ("messages[7].content", "messages[7].content"),
        ("messages", "input"),
        ("max_tokens", "max_output_tokens"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("tools[2].function.name", "tools[2].name"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("reasoning_effort", "reasoning.effort"),
        ("temperature", "temperature"),
        (None, None),
    ],
)
def test_a_field_is_named_where_the_client_wrote_it(param: str | None, expected: str | None):
    assert told(InvalidRequest("no", param=param)).param == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("messages[2].content: an image is cut", "input[3].content: an image is cut"),
        ("min_tokens is 9 but max_tokens is only 3", "min_tokens is 9 but max_output_tokens is only 3"),
        ("response_format and guided_json both say it", "text.format and guided_json both say it"),
        ("there are many messages of the tool", "there are many messages of the tool"),
        ("there is no tool of the name 'max_tokens'", "there is no tool of the name 'max_tokens'"),
        ("the model's max_tokens, not 'messages[0]'", "the model's max_output_tokens, not 'messages[0]'"),
        ('given: "response_format"', 'given: "response_format"'),
        ("my_max_tokens and max_tokens_of", "my_max_tokens and max_tokens_of"),
        ("it's the client's, isn't it", "it's the client's, isn't it"),
    ],
)
def test_a_message_is_changed_where_it_names_a_field_and_nowhere_else(message: str, expected: str):
    assert told(InvalidRequest(message)).message == expected


def test_what_an_error_means_stays():
    assert told(RateLimited("later", retry_after_s=3.0)).retry_after_s == 3.0
    assert told(ContextTooLong("too long", param="messages")).code == "context_length_exceeded"
