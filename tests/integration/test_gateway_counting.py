"""`/v1/tokenize`: prompts counted with their pictures, of which the size is enough; with scripted services."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shared.errors import ImageTooLarge, Overloaded
from tests.gateway_stack import Stack, assert_openai_error, data_url, question, running_stack
from tests.scripted import IMAGE_TOKENS, EncoderScript, EngineScript, png

SIZES = [{"width": 640, "height": 480}, {"width": 1, "height": 1}]


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    with running_stack(num_encoders=2) as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    shared_stack.reset()
    return shared_stack


def count(stack: Stack, **body: Any) -> httpx.Response:
    return stack.http.post("/v1/tokenize", json=body)


def test_pictures_are_counted_from_their_sizes_alone(stack: Stack):
    counted = count(stack, images=SIZES).json()
    assert counted["image_tokens"] == [IMAGE_TOKENS, IMAGE_TOKENS]
    assert counted["count"] == 2 * IMAGE_TOKENS + 1  # and what a message costs
    assert counted["max_model_len"] == 2048
    assert stack.num_encodes() == 0


def test_sizes_count_as_if_the_pictures_were_parts_of_the_last_question(stack: Stack):
    by_size = count(stack, messages=question(text="a b"), images=SIZES[:1]).json()
    sent = count(stack, messages=question(data_url(png(1)), text="a b")).json()
    assert by_size == sent
    both = count(stack, messages=question(data_url(png(1)), text="a b"), images=SIZES[:1]).json()
    assert both["image_tokens"] == [IMAGE_TOKENS, IMAGE_TOKENS]


def test_after_an_answer_pictures_are_a_question_of_their_own(stack: Stack):
    talk = [*question(text="a b"), {"role": "assistant", "content": "c"}]
    assert count(stack, messages=talk, images=SIZES[:1]).json()["count"] == 3 + 3 + IMAGE_TOKENS


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"images": []}, "prompt"),
        ({"prompt": "x", "images": SIZES}, "prompt"),
        ({"prompt": "x", "messages": question()}, "prompt"),
        ({"images": [{"width": 0, "height": 1}]}, "images[0].width"),
        ({"images": [{"width": 1}]}, "images[0].height"),
        ({"images": [*SIZES, {"width": "1", "height": 1}]}, "images[2].width"),
        ({"images": SIZES * 1000}, "images"),
    ],
)
def test_what_cannot_be_counted_names_its_field(stack: Stack, body: dict[str, Any], param: str):
    assert assert_openai_error(count(stack, **body), 400)["param"] == param


def test_a_size_that_no_picture_may_have_is_refused_as_the_picture_would_be(stack: Stack):
    for encoder in stack.encoders:
        encoder.script = EncoderScript(refuse=ImageTooLarge("too many pixels", param="images[0]"))
    error = assert_openai_error(count(stack, images=SIZES), 400, "image_too_large")
    assert error["param"] == "images[0]"


def test_an_encoder_that_takes_nothing_is_passed_over(stack: Stack):
    stack.encoders[0].script = EncoderScript(refuse=Overloaded("full"))
    assert all(count(stack, images=SIZES).status_code == 200 for _ in range(4))
    stack.encoders[1].script = EncoderScript(refuse=Overloaded("full"))
    assert_openai_error(count(stack, images=SIZES), 503, "overloaded")


def test_a_text_model_has_no_pictures_to_count():
    with running_stack(script=EngineScript(text_only=True)) as stack:
        error = assert_openai_error(count(stack, images=SIZES), 400, "unsupported_feature")
        assert error["param"] == "images"
