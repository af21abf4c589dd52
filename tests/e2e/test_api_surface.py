"""Responses, uploaded files and counting against the whole system: other ways to ask give the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import CheckpointFactory
from tests.e2e.system import IMAGE_ROWS, System, picture, running_system, user

pytestmark = pytest.mark.slow
SIZE = (61, 47)
QUESTION = "What is shown in the image?"


@pytest.fixture(scope="module")
def system(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(checkpoint("llava_clip_llama"), tmp_path_factory.mktemp("logs")) as running:
        yield running


def test_a_picture_by_its_file_is_the_picture_sent_along(system: System):
    expected = system.ask(user(picture(1, SIZE), QUESTION), max_tokens=16).text
    file_id = system.client.files.create(file=picture(1, SIZE), purpose="vision").id
    content: list[Any] = [{"type": "input_image", "file_id": file_id}, {"type": "input_text", "text": QUESTION}]
    asked: Any = {
        "model": system.client.models.list().data[0].id,
        "input": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_output_tokens": 16,
        "extra_body": {"ignore_eos": True},
    }
    response = system.client.responses.create(**asked)
    assert response.output_text == expected
    assert response.usage is not None
    assert response.usage.input_tokens_details.to_dict()["image_tokens"] == IMAGE_ROWS
    events = system.client.responses.create(**asked, stream=True)
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
    )


def test_sizes_alone_count_what_the_pictures_count(system: System):
    used = system.ask(user(picture(2, SIZE), picture(3, (500, 19)), QUESTION)).usage["prompt_tokens"]
    sizes = [{"width": 500, "height": 19}, {"width": SIZE[0], "height": SIZE[1]}]
    asked = {"messages": [{"role": "user", "content": QUESTION}], "images": sizes}
    counted = system.gateway.http.post("/v1/tokenize", json=asked).json()
    assert counted["count"] == used
    assert counted["image_tokens"] == [IMAGE_ROWS, IMAGE_ROWS]
