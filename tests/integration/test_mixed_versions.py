"""A roll-out: for a while gateway and panels are of different releases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from shared.wire.common import SCHEMA_VERSION
from shared.wire.engine import Finished, GenerateRequest, ModelInfo
from tests.gateway_stack import Stack, eventually, running_stack

MODEL = {
    "id": "m",
    "max_model_len": 8,
    "vocab_size": 9,
    "hidden_size": 4,
    "dtype": "float32",
    "num_kv_blocks": 1,
    "block_size": 16,
    "supports_images": False,
    "created": 0,
}


@contextmanager
def one_of_two_publishes(**fields: object) -> Iterator[Stack]:
    """Two engines, of which the second is of another release."""
    with running_stack(num_engines=2, num_encoders=0, routing="round_robin") as stack:
        stack.engines[1].script.published = fields
        yield stack


def num_ready(stack: Stack) -> int:
    count: int = stack.http.get("/ready").json()["text_engines"]["ready"]
    return count


def ask(stack: Stack, times: int = 6) -> list[int]:
    return [stack.chat().status_code for _ in range(times)]


@pytest.mark.parametrize(
    "news", [{"colour_of_the_case": "blue"}, {"tool_format": "semaphore", "reasoning_format": "sighs"}]
)
def test_a_newer_replica_with_a_field_or_a_format_more_is_used_like_any_other(news: dict[str, str]):
    with one_of_two_publishes(**news) as stack:
        stack.engines[1].is_ready = False
        eventually(lambda: num_ready(stack) == 1)
        stack.engines[1].is_ready = True  # what it published from here on was read with the new field
        eventually(lambda: num_ready(stack) == 2)
        assert set(ask(stack)) == {200}
        assert stack.engines[1].requests


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0])
def test_a_replica_of_another_wire_version_is_not_used_and_said_to_be_so(version: int):
    # A newer version may lack what this one needs: it must be told apart before the rest is read.
    with capture_logs() as logs, one_of_two_publishes(schema_version=version, max_model_len=None) as stack:
        eventually(lambda: num_ready(stack) == 1)
        before = len(stack.engines[1].requests)
        assert set(ask(stack)) == {200}
        assert len(stack.engines[1].requests) == before
        problems = [replica["problem"] for replica in stack.http.get("/status/data").json()["replicas"]]
        assert problems[0] == ""
        assert problems[1].startswith(f"it speaks wire version {version} and this gateway version {SCHEMA_VERSION}")
        assert problems[1].endswith(f"the {'gateway' if version else 'replica'} must be upgraded")
        assert any(problems[1] in entry.values() for entry in logs if entry["log_level"] == "error")

        stack.engines[1].script.published = {}
        eventually(lambda: num_ready(stack) == 2)
        assert [replica["problem"] for replica in stack.http.get("/status/data").json()["replicas"]] == ["", ""]


def test_a_body_with_a_field_of_tomorrow_reads_as_todays():
    assert ModelInfo.model_validate(MODEL | {"tomorrow": 1}) == ModelInfo.model_validate(MODEL)
    assert GenerateRequest.model_validate({"request_id": "r", "prompt": "p", "tomorrow": []}).prompt == "p"
    event = {"num_prompt_tokens": 1, "num_image_tokens": 0, "num_cached_tokens": 0, "num_generated_tokens": 1}
    assert Finished.model_validate(event | {"tomorrow": {}}) == Finished.model_validate(event)
