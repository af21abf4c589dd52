"""Three vision encoders and two text engines: what they do once between them, however many ask at the same moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.conftest import CheckpointFactory
from tests.e2e.system import IMAGE_ROWS, Service, System, Turn, picture, running_system, user

NUM_REQUESTS = 200

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def system(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("logs")
    with running_system(checkpoint("llava_clip_llama"), folder, num_encoders=3, num_engines=2) as running:
        yield running


def tower_passes(encoders: Sequence[Service]) -> float:
    return sum(encoder.metric("encoder_tower_passes_total") for encoder in encoders)


def ask_together(system: System, turns: Sequence[Turn]) -> None:
    with ThreadPoolExecutor(len(turns)) as pool:
        responses = list(pool.map(lambda turn: system.post(turn, max_tokens=3, timeout=60), turns))
    for response in responses:
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == IMAGE_ROWS


def about(image: bytes) -> list[Turn]:
    return [user(f"Number {i}: ", image, "What is it?") for i in range(NUM_REQUESTS)]


def test_two_hundred_questions_about_one_new_picture_make_one_tower_pass(system: System):
    before = tower_passes(system.encoders)
    ask_together(system, about(picture()))
    assert tower_passes(system.encoders) == before + 1


def test_two_hundred_questions_straight_to_the_encoders_make_one_tower_pass(system: System):
    """As several gateways would send them, which do not know of each other."""
    image = picture()
    before = tower_passes(system.encoders)

    def encode(number: int) -> str:
        # A client of its own: see `System.post`.
        with httpx.Client(trust_env=False, verify=False, timeout=60) as http:
            response = http.post(f"{system.encoders[number % 3].url}/v1/encode", content=image)
        assert response.status_code == 200
        return response.text

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        assert all('"event":"encoded"' in text.splitlines()[-1] for text in pool.map(encode, range(NUM_REQUESTS)))
    assert tower_passes(system.encoders) == before + 1


def test_without_redis_no_encoder_makes_more_than_one_pass(system: System):
    system.cache.stop()
    try:
        before = [tower_passes([encoder]) for encoder in system.encoders]
        ask_together(system, about(picture()))
        passes = [tower_passes([encoder]) - was for encoder, was in zip(system.encoders, before, strict=True)]
        assert sum(passes) >= 1
        assert max(passes) <= 1
    finally:
        system.arrange()
