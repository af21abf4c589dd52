"""Pictures that are not sent as they are: in low detail, by a name the client chose, or as their embedding; through the
whole split system, with a family whose pictures differ in their number of rows.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from shared.embedding_cache import EMBEDDING_PREFIX
from shared.hashing import image_key
from shared.torch_io import blob_to_tensor
from tests.conftest import CheckpointFactory
from tests.e2e.system import MODEL, Oracle, System, picture, running_system, user
from tests.gateway_stack import assert_openai_error, data_url
from tests.llava_checkpoints import load_processor

LOW_ROWS = 4 * 4 + 1
SIZE = (150, 90)
QUESTION = "What is shown in the picture?"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def system(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    model = checkpoint("llava_onevision")
    with running_system(model, tmp_path_factory.mktemp("logs"), DIPTYCH_ENCODER_ACCEPT_EMBEDDINGS="true") as running:
        yield running


@pytest.fixture(scope="module")
def oracle(checkpoint: CheckpointFactory) -> Oracle:
    folder = checkpoint("llava_onevision")
    return Oracle(folder, load_processor(folder))


def image_part(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}


def embedding_part(rows: torch.Tensor, **metadata: Any) -> dict[str, Any]:
    file = save({"image_embeds": rows.contiguous()}, metadata={name: str(value) for name, value in metadata.items()})
    return {"type": "image_embeds", "image_embeds": base64.b64encode(file).decode()}


def post(system: System, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    body = system.fields([], 12) | {"messages": [{"role": "user", "content": [text_part(QUESTION), *parts]}]}
    body.pop("extra_body")
    with httpx.Client(base_url=system.gateway.url, trust_env=False, timeout=60) as http:
        return http.post("/v1/chat/completions", json=body | {"ignore_eos": True} | fields)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def told(system: System, *parts: dict[str, Any], **fields: Any) -> tuple[list[list[int]], dict[str, int]]:
    """The answer's tokens as bytes, and the prompt's details."""
    answer = post(system, *parts, **fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    tokens = [entry["bytes"] or entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
    return tokens, body["usage"]["prompt_tokens_details"]


def count(system: System, **body: Any) -> list[int]:
    answer = system.gateway.http.post("/v1/tokenize", json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    counted: list[int] = answer.json()["image_tokens"]
    return counted


# --- detail -----------------------------------------------------------------------------------------------------------


def test_low_detail_is_one_tile_and_counted_as_it_is_read(system: System):
    data = picture(1, SIZE)
    tokens = {}
    for detail in ("low", "high", "auto"):
        part = image_part(data, detail=detail)
        tokens[detail], details = told(system, part)
        assert count(system, messages=[{"role": "user", "content": [part]}]) == [details["image_tokens"]]
        width, height = SIZE
        assert count(system, images=[{"width": width, "height": height, "detail": detail}]) == [details["image_tokens"]]
        assert (details["image_tokens"] == LOW_ROWS) == (detail == "low")
    assert tokens["low"] != tokens["high"] == tokens["auto"]
    assert told(system, image_part(data, detail="low"))[0] == tokens["low"]  # each has a key of its own


def test_responses_know_details_too(system: System):
    content = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": data_url(picture(1, SIZE)), "detail": "low"},
    ]
    body = {"model": MODEL, "input": [{"role": "user", "content": content}], "max_output_tokens": 4}
    answer = system.gateway.http.post("/v1/responses", json=body).json()
    high = system.gateway.http.post(
        "/v1/responses",
        json=body | {"input": [{"role": "user", "content": [content[0], content[1] | {"detail": "high"}]}]},
    ).json()
    assert answer["usage"]["input_tokens"] < high["usage"]["input_tokens"]


def test_several_pictures_in_one_conversation_are_read_as_by_transformers(system: System, oracle: Oracle):
    """LLaVA-OneVision gives each of them one tile, wherever in the conversation they stand."""
    first, second = picture(2, SIZE), picture(3, (60, 130))
    for question in ([user(first, "or", second, "?")], [user("Look:", first), user("and", second, "what?")]):
        answer = system.ask(*question)
        assert answer.tokens == oracle.answer(*question)
        assert answer.num_image_tokens == oracle.num_image_tokens(*question) == 2 * LOW_ROWS
    alone = [user("Look:", first)]
    assert system.ask(*alone).num_image_tokens == oracle.num_image_tokens(*alone) > 2 * LOW_ROWS


def test_high_detail_overrules_what_several_pictures_mean(system: System):
    one, other = (image_part(picture(seed, SIZE), detail="high") for seed in (4, 5))
    alone = told(system, one)[1]["image_tokens"]
    assert told(system, one, other)[1]["image_tokens"] == 2 * alone
    width, height = SIZE
    sizes = [{"width": width, "height": height}] * 2
    assert count(system, images=sizes) == [LOW_ROWS] * 2
    assert count(system, images=sizes[:1], messages=[{"role": "user", "content": [one]}]) == [alone, LOW_ROWS]


# --- embeddings sent by the client ------------------------------------------------------------------------------------


def rows_of(system: System, data: bytes, detail: str = "high") -> torch.Tensor:
    """The encoder's own rows of a picture that was asked about."""
    info = system.encoder.http.get("/v1/info").json()
    fingerprint = info["fingerprint" if detail == "high" else "low_detail_fingerprint"]
    answer = system.encoder.http.get(f"/v1/embeddings/{image_key(data, fingerprint)}")
    assert answer.status_code == 200, answer.text
    return blob_to_tensor(bytearray(answer.content))


@pytest.mark.parametrize("detail", ["low", "high"])
def test_the_encoders_own_embedding_gives_the_answer_that_the_picture_gives(system: System, detail: str):
    data, (width, height) = picture(10, SIZE), SIZE
    tokens, details = told(system, image_part(data, detail=detail))
    rows = rows_of(system, data, detail)
    num_passes = system.encoder.metric("encoder_tower_passes_total")
    part = embedding_part(rows, width=width, height=height, detail=detail)
    for expected_cached in (False, True):
        answered, given = told(system, part)
        assert answered == tokens
        assert given["image_tokens"] == details["image_tokens"] == len(rows)
        assert (given["cached_tokens"] > len(rows)) == expected_cached  # its own key in the prefix cache
    assert system.encoder.metric("encoder_tower_passes_total") == num_passes
    assert count(system, messages=[{"role": "user", "content": [part]}]) == [len(rows)]


ROWS = torch.linspace(-1, 1, LOW_ROWS * 64).reshape(LOW_ROWS, 64)
LOW: dict[str, Any] = {"width": 9, "height": 9, "detail": "low"}


def pickled() -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(ROWS, buffer)
    return {"type": "image_embeds", "image_embeds": base64.b64encode(buffer.getvalue()).decode()}


REFUSALS: dict[str, dict[str, Any]] = {
    "torch.save": pickled(),
    "no safetensors file": {"type": "image_embeds", "image_embeds": base64.b64encode(b"x" * 99).decode()},
    "base64": {"type": "image_embeds", "image_embeds": "not!base64!"},
    "takes [rows, 64]": embedding_part(ROWS[:, :63], **LOW),
    "the shape [1, 17, 64]": embedding_part(ROWS[None], **LOW),
    "has 16 rows": embedding_part(ROWS[1:], **LOW),
    "is of int32": embedding_part(ROWS.to(torch.int32), **LOW),
    "not finite": embedding_part(ROWS / 0, **LOW),
    "width and height as whole numbers": embedding_part(ROWS, width=0, height="tall"),
    "at most": embedding_part(ROWS, width=10**6, height=10**6),
    "one tensor called image_embeds": {
        "type": "image_embeds",
        "image_embeds": base64.b64encode(save({"rows": ROWS})).decode(),
    },
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_an_embedding_that_does_not_fit_the_model_is_refused_with_the_reason(system: System, reason: str):
    error = assert_openai_error(post(system, REFUSALS[reason]), 400)
    assert reason in error["message"]
    assert error["param"] == "messages[0].content[1].image_embeds"
    assert error["code"] == ("image_too_large" if reason == "at most" else "invalid_embedding")
    assert told(system, embedding_part(ROWS, **LOW))[1]["image_tokens"] == LOW_ROWS
    for dtype in (torch.float16, torch.bfloat16):
        assert told(system, embedding_part(ROWS.to(dtype), **LOW))[1]["image_tokens"] == LOW_ROWS


# --- ids chosen by the client, and what is forgotten ------------------------------------------------------------------


def upload(system: System, data: bytes, uuid: str) -> str:
    form = {"purpose": "vision", "uuid": uuid}
    file_id: str = system.gateway.http.post("/v1/files", files={"file": ("x.png", data)}, data=form).json()["id"]
    return file_id


def forget_everywhere(system: System) -> None:
    """Every embedding and every cached prefix; what was uploaded stays."""
    with system.cache.client() as client:
        for key in client.scan_iter(f"{EMBEDDING_PREFIX}*"):
            client.delete(key)
    system.encoder.kill()
    system.engine.kill()
    system.arrange()


def test_whatever_is_named_is_encoded_again_where_it_was_forgotten_and_nobody_notices(system: System):
    """By the client's own name, by a file's id, and an embedding that comes along with each request."""
    width, height = SIZE
    sent, uploaded, computed = (picture(seed, SIZE) for seed in (20, 21, 22))
    told(system, image_part(computed))
    named: dict[str, dict[str, Any]] = {
        "uuid": {"type": "image_url", "image_url": None, "uuid": "my picture"},
        "file": {"type": "image_url", "image_url": {"file_id": upload(system, uploaded, "upload 21")}},
        "uploaded uuid": {"type": "image_url", "uuid": "upload 21", "image_url": None},
        "embedding": embedding_part(rows_of(system, computed), width=width, height=height),
    }
    expected = {"uuid": told(system, image_part(sent) | {"uuid": "my picture"})}
    expected |= {kind: told(system, image_part(uploaded)) for kind in ("file", "uploaded uuid")}
    expected["embedding"] = told(system, image_part(computed))
    num_passes = system.encoder.metric("encoder_tower_passes_total")
    for kind, part in named.items():
        assert told(system, part)[0] == expected[kind][0], kind
    assert system.encoder.metric("encoder_tower_passes_total") == num_passes
    forget_everywhere(system)
    for kind, part in named.items():
        tokens, details = told(system, part)
        assert (tokens, details["image_tokens"]) == (expected[kind][0], expected[kind][1]["image_tokens"]), kind
    # Each picture once, the embedding not at all; the first pass was the start's own.
    assert system.encoder.metric("encoder_tower_passes_total") == 1 + 2
    system.assert_idle()


def test_another_gateway_knows_the_names_too(system: System):
    data = picture(23, SIZE)
    tokens, _ = told(system, image_part(data) | {"uuid": "shared"})
    upload(system, data, "shared upload")
    system.gateway.kill()  # the next one has nothing in memory
    system.arrange()
    for uuid in ("shared", "shared upload"):
        assert told(system, {"type": "image_url", "uuid": uuid})[0] == tokens
