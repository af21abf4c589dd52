"""Each vision family through the whole split system: pictures of many shapes, several at once, found again in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import CheckpointFactory
from tests.e2e.system import Oracle, System, picture, running_system, user
from tests.llava_checkpoints import load_processor as load_llava_processor
from tests.models.split_system import load_processor

LLAVA_FAMILIES = ["vip_llava", "llava_next_mistral", "llava_onevision_max_2"]
QWEN_FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
FAMILIES = [*LLAVA_FAMILIES, "smolvlm", "pixtral", "gemma3_untied", "internvl", *QWEN_FAMILIES]
PICTURES = [
    picture(1, (61, 47)),
    picture(2, (30, 190)),
    picture(3, (112, 56)),
    picture(4, (640, 480), "JPEG"),
    picture(5, (1, 1)),
    picture(6, (500, 19)),
]

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Served:
    system: System
    oracle: Oracle


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model: Path = checkpoint(request.param)
    with running_system(model, tmp_path_factory.mktemp("logs")) as system:
        load = load_llava_processor if request.param in LLAVA_FAMILIES else load_processor
        yield Served(system, Oracle(model, load(model)))


def test_answers_about_pictures_of_every_shape_are_those_of_transformers(served: Served):
    """At once, so that images of different shapes and numbers of tiles meet in the encoder's batches."""
    questions = [[user(data, "What is shown in the image?")] for data in PICTURES]
    for question, answer in zip(questions, served.system.ask_all(questions), strict=True):
        assert answer.tokens == served.oracle.answer(*question)
        assert answer.num_image_tokens == served.oracle.num_image_tokens(*question)


def test_a_new_gateway_learns_from_redis_how_a_picture_stands_in_the_prompt(served: Served):
    system, question = served.system, user("Look:", picture(7, (90, 140)), "What is it?")
    before = system.ask(question)
    system.gateway.kill()
    system.arrange()
    num_encoded = system.encoder.metric("encoder_tower_passes_total")
    again = system.ask(question)
    assert system.encoder.metric("encoder_tower_passes_total") == num_encoded
    assert again.tokens == before.tokens == served.oracle.answer(question)
    assert again.num_image_tokens == before.num_image_tokens


def test_nothing_is_left_behind(served: Served):
    served.system.assert_idle()
