"""Pictures at the gateway: data URLs, fetches from good and bad servers, and the guard in front of every connection."""

from __future__ import annotations

import base64
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from shared.errors import InvalidImage
from tests.gateway_stack import (
    Stack,
    assert_openai_error,
    data_url,
    eventually,
    image_part,
    question,
    running_stack,
)
from tests.picture_server import PICTURE, Canary, PictureServer, serving
from tests.scripted import IMAGE_TOKENS, EncoderScript, EngineScript, png

PARAM = "messages[0].content[1].image_url"


@pytest.fixture(scope="module")
def pictures() -> Iterator[PictureServer]:
    server = PictureServer()
    with serving(server):
        yield server


@pytest.fixture
def canary() -> Iterator[Canary]:
    server = Canary()
    with serving(server):
        yield server


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    """`localhost` may be fetched from; 127.0.0.1, the same machine by address, may not."""
    with running_stack(allowed_hosts=("localhost",), max_image_bytes=1_000_000, max_images_per_request=4) as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    shared_stack.reset()
    return shared_stack


@pytest.fixture(scope="module")
def strict_stack() -> Iterator[Stack]:
    """With the default guard."""
    with running_stack() as running:
        yield running


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_image_tokens(answer: Any) -> int:
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["usage"]["prompt_tokens_details"]["image_tokens"]
    return count


# --- data URLs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png",
        "data:,",
        "data:image/png;base64",
        "data:image/png,abc",
        "data:image/png;base64,not!!!base64!!!",
        "data:text/plain;base64,aGVsbG8=",
        "data:image/png;base64,AAAAA",
    ],
)
def test_malformed_data_urls_name_their_part(stack: Stack, url: str):
    """Cases A14, A16."""
    assert assert_openai_error(stack.ask(url), 400)["param"] == PARAM
    assert stack.num_encodes() == 0


def test_parameters_and_case_of_a_data_url_do_not_matter(stack: Stack):
    """Cases A15, A16: identical to the plain form, down to the encoder that is asked once."""
    encoded = base64.b64encode(png(11)).decode()
    for url in (
        f"data:image/png;base64,{encoded}",
        f"data:image/jpeg;charset=utf-8;base64,{encoded}",
        f"data:image/jpeg;name=a.jpg;BASE64,{encoded}",
        f"DATA:image/png;base64,{encoded}",
        f"data:image/png;base64,{encoded.rstrip('=')}",
    ):
        assert num_image_tokens(stack.ask(url)) == IMAGE_TOKENS
    assert stack.num_encodes() == 1


@pytest.mark.parametrize("url", ["data:image/jpeg;base64,", "data:;base64,", "", "   "])
def test_empty_pictures_are_refused_before_any_encoder(stack: Stack, url: str):
    """Case A28."""
    assert assert_openai_error(stack.ask(url), 400)["param"] == PARAM
    assert stack.num_encodes() == 0


def test_bare_base64_is_no_url(stack: Stack):
    """Case A18."""
    bare = base64.b64encode(PICTURE * 40).decode()
    error = assert_openai_error(stack.ask(bare), 400)
    assert "data:" in error["message"]
    assert bare not in error["message"]
    assert stack.engine.requests == []


def test_local_paths_and_other_schemes_are_never_opened(stack: Stack, tmp_path: Path):
    """Case A19: an audit hook sees every file that this process, the gateway in it, opens."""
    canary = tmp_path / "canary.png"
    canary.write_bytes(PICTURE)
    opened: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    urls = [str(canary), f"file://{canary}", f"FILE://{canary}", "canary.png", "file.png", "./canary.png", "~/x.png"]
    urls += ["ftp://example.com/a.png", "gopher://example.com/", "unix:/run/x.sock", "s3://bucket/key", "//host/a.png"]
    try:
        for url in urls:
            assert assert_openai_error(stack.ask(url), 400)["param"] == PARAM
    finally:
        watching = False
    assert not [path for path in opened if "canary" in path or path.endswith("file.png")]
    assert stack.num_encodes() == 0


def test_what_the_encoder_cannot_read_is_refused_with_the_part_and_the_formats(stack: Stack):
    """Case A11: never a 200 with the picture missing."""
    for data in (b"\x00\x00\x00\x18ftypheic" + bytes(100), os.urandom(200), b"<svg xmlns='x'></svg>"):
        error = assert_openai_error(stack.ask(data_url(data)), 400, "unsupported_image_format")
        assert error["param"] == PARAM
        assert PARAM in error["message"]
        assert "PNG" in error["message"]
    assert stack.engine.requests == []
    stack.assert_serves()


@pytest.mark.parametrize("stream", [False, True])
def test_a_picture_that_breaks_while_it_is_decoded_is_refused_with_its_part(stack: Stack, stream: bool):
    """Case B25 (b): after admission the engine already runs; the answer is a plain 400 all the same."""
    stack.encoder.script = EncoderScript(encode_delay_s=0.05, fail=InvalidImage("the image is truncated"))
    stack.engine.script.first_token_delay_s = 5
    begun = time.monotonic()
    error = assert_openai_error(stack.ask(data_url(png(12 + stream)), stream=stream), 400, "invalid_image")
    assert error["param"] == PARAM
    assert time.monotonic() - begun < 2
    eventually(lambda: stack.engine.num_running == 0)
    stack.reset()
    stack.assert_serves()


def test_the_second_of_two_pictures_is_named_if_it_is_the_bad_one(stack: Stack):
    error = assert_openai_error(stack.ask(data_url(png(14)), data_url(b"nothing")), 400)
    assert error["param"] == "messages[0].content[2].image_url"


def test_there_are_limits_on_number_and_size(stack: Stack):
    five = [data_url(png(number)) for number in range(5)]
    assert "at most 4" in assert_openai_error(stack.ask(*five), 400)["message"]
    error = assert_openai_error(stack.ask(data_url(PICTURE + bytes(1_000_000))), 400, "image_too_large")
    assert "1000000" in error["message"]


# --- fetching -------------------------------------------------------------------------------------------------------


def test_a_picture_is_fetched_with_the_right_host_header(stack: Stack, pictures: PictureServer):
    pictures.requests.clear()
    assert num_image_tokens(stack.ask(f"{pictures.base}/good?size=1#x")) == IMAGE_TOKENS
    [head] = pictures.requests
    assert head.startswith("GET /good?size=1 HTTP/1.1\r\n")
    assert f"\r\nHost: localhost:{pictures.port}\r\n" in head
    assert "User-Agent: diptych" in head


def test_the_same_bytes_from_anywhere_are_one_picture(stack: Stack, pictures: PictureServer):
    stack.ask(f"{pictures.base}/good")
    stack.ask(data_url(PICTURE))
    assert stack.num_encodes() <= 1


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/status/404", "404"),
        ("/status/403", "403"),
        ("/status/500", "500"),
        ("/status/304", "304"),
        ("/reset", "connection"),
        ("/empty", "0 bytes"),
        ("/gzip", "compressed"),
    ],
)
def test_what_a_picture_server_does_wrong_is_told(stack: Stack, pictures: PictureServer, path: str, reason: str):
    """Cases A25, A28."""
    error = assert_openai_error(stack.ask(f"{pictures.base}{path}?token=secret"), 400)
    assert error["param"] == PARAM
    assert reason in error["message"]
    assert "secret" not in error["message"]
    assert stack.num_encodes() == 0


@pytest.mark.parametrize("kind", ["flaky", "flaky-reset"])
def test_a_server_that_fails_for_a_moment_is_asked_again_but_not_for_ever(
    stack: Stack, pictures: PictureServer, kind: str
):
    assert num_image_tokens(stack.ask(f"{pictures.base}/{kind}/2")) == IMAGE_TOKENS
    assert pictures.num_failures[f"/{kind}/2"] == 2
    assert_openai_error(stack.ask(f"{pictures.base}/{kind}/99"), 400, "image_fetch_failed")
    assert pictures.num_failures[f"/{kind}/99"] == 3


def test_a_host_that_asks_for_a_pause_is_asked_by_others_meanwhile(pictures: PictureServer):
    options = {"allowed_hosts": ("localhost",), "max_fetches_per_host": 1, "fetch_timeout_s": 20}
    with running_stack(**options) as stack, ThreadPoolExecutor(1) as pool:
        patient = pool.submit(stack.ask, f"{pictures.base}/later/2")
        eventually(lambda: pictures.num_failures["/later/2"] == 1)
        assert num_image_tokens(stack.ask(f"{pictures.base}/good")) == IMAGE_TOKENS
        assert not patient.done(), "the other picture did not wait for the pause to end"
        assert num_image_tokens(patient.result()) == IMAGE_TOKENS


def test_what_cannot_change_is_asked_once(stack: Stack, pictures: PictureServer):
    pictures.requests.clear()
    assert_openai_error(stack.ask(f"{pictures.base}/status/404"), 400, "image_fetch_failed")
    assert len(pictures.requests) == 1


@pytest.mark.parametrize(
    ("control", "requests"),
    [("max-age=60", 1), ("no-cache", 2), ("max-age=0", 2), ("no-store", 2), ("private,max-age=60", 2)],
)
def test_a_picture_is_fetched_again_only_as_its_server_wants_it(
    stack: Stack, pictures: PictureServer, control: str, requests: int
):
    pictures.requests.clear()
    for _ in range(2):
        assert num_image_tokens(stack.ask(f"{pictures.base}/cached?control={control}")) == IMAGE_TOKENS
    assert len(pictures.requests) == requests
    if requests == 2:
        may_be_kept = control in ("no-cache", "max-age=0")
        assert ('If-None-Match: "v1"' in pictures.requests[1]) is may_be_kept


def test_hosts_can_be_denied_or_named_one_by_one(pictures: PictureServer):
    with running_stack(allowed_hosts=("localhost",), denied_hosts=("localhost",)) as stack:
        assert_openai_error(stack.ask(f"{pictures.base}/good"), 400, "forbidden_url")
    with running_stack(allowed_hosts=("localhost",), only_hosts=("pictures.example",)) as stack:
        assert_openai_error(stack.ask(f"{pictures.base}/good"), 400, "forbidden_url")
    with running_stack(allowed_hosts=("localhost",), only_hosts=("localhost",)) as stack:
        pictures.requests.clear()
        url = quote(f"http://127.0.0.1:{pictures.port}/good")
        assert_openai_error(stack.ask(f"{pictures.base}/to?url={url}"), 400, "forbidden_url")
        assert num_image_tokens(stack.ask(f"{pictures.base}/good")) == IMAGE_TOKENS
        assert len(pictures.requests) == 2


def test_an_unknown_host_and_a_closed_port_are_told(stack: Stack):
    """Case A25."""
    assert_openai_error(stack.ask("http://no-such-host.invalid/a.png"), 400, "image_fetch_failed")
    assert_openai_error(stack.ask("http://localhost:1/a.png"), 400, "image_fetch_failed")


@pytest.mark.parametrize("path", ["/large", "/endless"])
def test_a_picture_above_the_limit_is_not_read_to_its_end(stack: Stack, pictures: PictureServer, path: str):
    assert_openai_error(stack.ask(f"{pictures.base}{path}"), 400, "image_too_large")


def test_silent_and_dripping_servers_meet_one_deadline_and_disturb_nobody(stack: Stack, pictures: PictureServer):
    """Case A24: the deadline is for the whole fetch, not for each read."""
    urls = [f"{pictures.base}{path}" for path in ("/silent", "/drip", "/to?url=/silent") for _ in range(4)]
    before = num_open_files()
    # A client of its own, so that its connections do not count afterwards.
    with ThreadPoolExecutor(len(urls)) as pool, httpx.Client(base_url=stack.url, timeout=20) as http:
        begun = time.monotonic()
        bodies = [{"messages": question(url)} for url in urls]
        answers = [pool.submit(http.post, "/v1/chat/completions", json=body) for body in bodies]
        text = stack.chat()
        assert text.status_code == 200
        assert time.monotonic() - begun < 0.9
        for answer in answers:
            assert_openai_error(answer.result(), 400, "image_fetch_failed")
        assert time.monotonic() - begun < 2
    eventually(lambda: num_open_files() <= before + 5)
    stack.assert_serves()


def test_redirects_are_followed_within_their_limit(stack: Stack, pictures: PictureServer):
    """Case A21."""
    assert num_image_tokens(stack.ask(f"{pictures.base}/to?url={quote(pictures.base + '/good')}")) == IMAGE_TOKENS
    assert num_image_tokens(stack.ask(f"{pictures.base}/hops/5")) == IMAGE_TOKENS
    assert "redirects" in assert_openai_error(stack.ask(f"{pictures.base}/hops/6"), 400)["message"]
    assert_openai_error(stack.ask(f"{pictures.base}/hops/11"), 400)


def test_every_hop_is_checked(stack: Stack, pictures: PictureServer, canary: Canary):
    """Case A21."""
    targets = [
        f"http://127.0.0.1:{canary.port}/",
        f"http://[::1]:{canary.port}/",
        f"http://2130706433:{canary.port}/",
        f"//127.0.0.1:{canary.port}/",
        "file:///etc/hostname",
        "ftp://localhost/x",
        "http://169.254.169.254/latest/meta-data/",
        "http://user:pass@localhost/x",
    ]
    for target in targets:
        error = assert_openai_error(stack.ask(f"{pictures.base}/to?url={quote(quote(target))}"), 400)
        assert error["code"] == "forbidden_url", (target, error)
    assert canary.num_connections == 0


@pytest.mark.parametrize("target", ["http://[::1", "http://[foo]/x", "//["])
def test_a_redirect_to_a_malformed_url_is_the_remote_hosts_fault(stack: Stack, pictures: PictureServer, target: str):
    error = assert_openai_error(stack.ask(f"{pictures.base}/to?url={quote(quote(target))}"), 400)
    assert error["param"] == PARAM


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "LOCALHOST",
        "localhost.",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "0.0.0.0",
        "0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::127.0.0.1]",
        "[::127.0.0.1]",
        "user@127.0.0.1",
        "example.com@127.0.0.1",
        "127.0.0.1%2f",
        "127%2e0%2e0%2e1",
        "\u2460\u2461\u2466.0.0.1",
        "127\u30020\u30020\u30021",
        "127.0.0.2",
        "127.255.255.254",
        "127.0.1",
        "127.000.000.001",
        "0127.0.0.1",
        "0x7F.0x0.0x0.0x1",
        "0X7F000001",
        "017700000001",
        "127.0.0.1.",
        "127.0.0.1..",
        "0.0.0.0.",
        "00000000000",
        "0x0",
        "4294967296",
        "2130706433.",
        "[::ffff:0:127.0.0.1]",
        "[0:0:0:0:0:0:0:1]",
        "[0000::0001]",
        "[::1%25lo]",
        "[::1%lo]",
        "[::ffff:7f01]",
        "[2002:7f00:1::]",
        "[2001:0:7f00:1::1]",
        "[fe80::1%25eth0]",
        "[fd00::1]",
        "localhost@localhost",
        "a:b@localhost",
        "@localhost",
        "localhost:80@127.0.0.1",
        "localhost%00.example.com",
        "localhost%23.example.com",
        "localhost\\\\@example.com",
        "example.com\\\\@localhost",
        "LocalHost.",
        "\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3",
        "\uff11\uff12\uff17.0.0.1",
        "127\uff0e0\uff0e0\uff0e1",
        "127.0.0.1\u200b",
        "localhost\u00ad",
        "ip6-localhost",
        "ip6-loopback",
    ],
)
def test_loopback_is_refused_however_it_is_spelled(strict_stack: Stack, canary: Canary, host: str):
    """Case A20."""
    error = assert_openai_error(strict_stack.ask(f"http://{host}:{canary.port}/x.png"), 400)
    assert error["param"] == PARAM
    assert canary.num_connections == 0


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "10.0.0.1", "100.64.0.1", "192.168.0.1", "[fd00:ec2::254]", "[fe80::1]"]
)
def test_internal_addresses_are_refused_at_once(strict_stack: Stack, host: str):
    """Case A20: refused by looking, not by a connection that times out."""
    begun = time.monotonic()
    assert_openai_error(strict_stack.ask(f"http://{host}/latest/meta-data"), 400, "forbidden_url")
    assert time.monotonic() - begun < 0.5


def test_the_opt_out_is_an_explicit_setting(pictures: PictureServer):
    """Case A20."""
    with running_stack(allow_private_addresses=True) as open_stack:
        assert num_image_tokens(open_stack.ask(f"http://127.0.0.1:{pictures.port}/good")) == IMAGE_TOKENS


def test_fetches_leave_no_descriptors_and_no_threads(stack: Stack, pictures: PictureServer):
    """Case E23, in small."""
    paths = ["/good", "/status/404", "/hops/2", "/reset", "/large", "/empty"]
    for path in paths:  # threads that resolve names are started once and kept
        stack.ask(f"{pictures.base}{path}")
    files, threads = num_open_files(), threading.active_count()
    for _ in range(20):
        for path in paths:
            stack.ask(f"{pictures.base}{path}")
    eventually(lambda: num_open_files() <= files + 5)
    assert threading.active_count() <= threads + 8  # the resolver's bounded pool


# --- what is known and what is shared -------------------------------------------------------------------------------


def test_a_known_picture_asks_no_encoder_again(stack: Stack):
    url = data_url(png(21))
    for _ in range(3):
        assert num_image_tokens(stack.ask(url)) == IMAGE_TOKENS
    assert stack.num_encodes() == 1


def test_equal_pictures_in_flight_share_one_encode(stack: Stack):
    stack.encoder.script.admit_delay_s = 0.2
    url = data_url(png(22))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: stack.ask(url, url), range(8)))
    assert {num_image_tokens(answer) for answer in answers} == {2 * IMAGE_TOKENS}
    assert stack.num_encodes() == 1


def test_the_engine_is_asked_as_soon_as_pictures_are_admitted(stack: Stack):
    """Encoding and prefill overlap: the answer does not wait for the encode."""
    stack.encoder.script.encode_delay_s = 1.0
    begun = time.monotonic()
    assert num_image_tokens(stack.ask(data_url(png(23)))) == IMAGE_TOKENS
    assert time.monotonic() - begun < 0.8


def test_pictures_stand_where_their_parts_stand(stack: Stack):
    """Case C9."""
    first, second = data_url(png(24, width=10)), data_url(png(25, width=20))
    parts = [
        {"type": "text", "text": "one"},
        image_part(first),
        {"type": "text", "text": "two <image>"},
        image_part(second),
    ]
    assert stack.chat([{"role": "user", "content": parts}]).status_code == 200
    [request] = stack.engine.requests
    assert request.messages is not None
    sent = request.messages[0].content
    assert [part.type for part in sent] == ["text", "image", "text", "image"]
    assert [part.image.width for part in sent if part.type == "image"] == [10, 20]
    assert all(part.image.encoder_url for part in sent if part.type == "image")
    assert [stack.encoder.numbers[part.image.image_key] for part in sent if part.type == "image"] == ["0", "1"]


def test_a_picture_alone_is_a_question(stack: Stack):
    """Case C12."""
    part = image_part(data_url(png(26)))
    alone = stack.chat([{"role": "user", "content": [part]}]).json()["usage"]
    with_empty_text = stack.chat([{"role": "user", "content": [{"type": "text", "text": ""}, part]}]).json()["usage"]
    assert alone["prompt_tokens"] == with_empty_text["prompt_tokens"]


def test_a_picture_in_an_earlier_turn_is_part_of_the_conversation(stack: Stack):
    url = data_url(png(27))
    history = [*question(url), {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}]
    assert num_image_tokens(stack.chat(history)) == IMAGE_TOKENS


def test_a_text_model_refuses_pictures_with_their_part():
    with running_stack(script=EngineScript(text_only=True)) as stack:
        error = assert_openai_error(stack.ask(data_url(png(90))), 400, "unsupported_feature")
        assert error["param"] == PARAM
        assert stack.chat().status_code == 200
