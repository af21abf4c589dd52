"""The small client against a scripted server: whole and streamed answers, errors before and in the stream."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from diptych.client import Answer, Client, RequestFailed
from diptych.report import milliseconds, timing_line

PNG = b"\x89PNG"
USAGE = {
    "prompt_tokens": 137,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 112},
    "timings": {"encode": 0.012, "prefill": 0.0001},
}


class Server(ThreadingHTTPServer):
    """Gives `answer` (status, body) to every POST and keeps what was asked."""

    answer: tuple[int, str] = (200, "")
    ready_status = 200
    asked: dict[str, Any] | None = None


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._reply(self.server.ready_status, json.dumps({"error": {"message": "the model is loading"}}))

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._reply(*self.server.answer)

    def _reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(("127.0.0.1", 0), Handler)
    thread = Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(f"http://127.0.0.1:{server.server_port}/") as opened:
        yield opened


def chunk(text: str | None = None, **fields: Any) -> str:
    choices = [] if text is None else [{"delta": {"content": text}}]
    return f"data: {json.dumps({'choices': choices, **fields})}\n\n"


def test_a_whole_answer_comes_with_usage_and_timings(server: Server, client: Client) -> None:
    server.answer = (200, json.dumps({"choices": [{"message": {"content": "a cat"}}], "usage": USAGE}))
    answer = client.ask("What is it?", max_tokens=5)
    assert (answer.text, answer.num_cached_tokens, answer.timings["encode"]) == ("a cat", 112, 0.012)
    assert server.asked is not None
    assert server.asked["max_tokens"] == 5
    assert server.asked["messages"] == [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}]


def test_pictures_come_before_the_question_as_data_or_web_addresses(
    server: Server, client: Client, tmp_path: Path
) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(PNG)
    server.answer = (200, json.dumps({"choices": [{"message": {"content": "yes"}}]}))
    client.ask("Same?", [picture, "https://example.com/cat.jpg"])
    assert server.asked is not None
    first, second, question = server.asked["messages"][0]["content"]
    assert first["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert second["image_url"]["url"] == "https://example.com/cat.jpg"
    assert question["text"] == "Same?"


def test_a_streamed_answer_comes_in_pieces_and_then_whole(server: Server, client: Client) -> None:
    server.answer = (200, chunk("a ") + ": a comment\n\n" + chunk("cat") + chunk(usage=USAGE) + "data: [DONE]\n\n")
    *pieces, last = client.stream("What is it?")
    assert pieces == ["a ", "cat"]
    assert isinstance(last, Answer)
    assert (last.text, last.usage) == ("a cat", USAGE)
    assert last.first_token_s is not None
    assert 0 < last.first_token_s <= last.total_s


def test_an_error_is_the_servers_own_message(server: Server, client: Client) -> None:
    server.answer = (400, json.dumps({"error": {"message": "messages[0]: the picture is damaged"}}))
    with pytest.raises(RequestFailed, match="the picture is damaged"):
        client.ask("What is it?")
    with pytest.raises(RequestFailed, match="the picture is damaged"):
        list(client.stream("What is it?"))


@pytest.mark.parametrize("part", [0, 1])
def test_what_is_said_of_a_part_of_the_request_is_said_of_the_picture_that_is_there(
    server: Server, client: Client, tmp_path: Path, part: int
) -> None:
    (tmp_path / "notes.txt").write_text("no picture")
    param = f"messages[0].content[{part}].image_url"
    server.answer = (400, json.dumps({"error": {"message": f"{param}: this is no image", "param": param}}))
    images = [str(tmp_path / "notes.txt"), "data:image/png;base64,AAAA"]
    name = [str(tmp_path / "notes.txt"), "picture 2"][part]
    for ask in (lambda: client.ask("?", images), lambda: list(client.stream("?", images))):
        with pytest.raises(RequestFailed) as failed:
            ask()
        assert str(failed.value) == f"{name}: this is no image"


def test_an_error_about_something_else_keeps_its_words(server: Server, client: Client) -> None:
    message = "messages[0].content[0].text: too long"
    server.answer = (400, json.dumps({"error": {"message": message, "param": "messages[0].content[0].text"}}))
    with pytest.raises(RequestFailed, match=re.escape(message)):
        client.ask("?", [])


def test_an_error_page_of_someone_else_is_named_by_its_status(server: Server, client: Client) -> None:
    server.answer = (502, "<html>Bad Gateway</html>")
    with pytest.raises(RequestFailed, match="status 502"):
        client.ask("What is it?")


def test_an_error_in_the_middle_of_a_stream_ends_it(server: Server, client: Client) -> None:
    server.answer = (200, chunk("a ") + 'data: {"error": {"message": "the engine died"}}\n\n')
    stream = client.stream("What is it?")
    assert next(stream) == "a "
    with pytest.raises(RequestFailed, match="the engine died"):
        next(stream)


def test_a_file_that_is_called_no_picture_is_sent_for_its_bytes_to_tell(
    server: Server, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "cat.txt").write_bytes(PNG)
    server.answer = (200, json.dumps({"choices": [{"message": {"content": "a cat"}}]}))
    client.ask("What is it?", [tmp_path / "cat.txt"])
    assert server.asked is not None
    [part, _] = server.asked["messages"][0]["content"]
    assert part["image_url"]["url"].startswith("data:application/octet-stream;base64,")


def test_readiness_tells_ready_from_loading_from_absent(server: Server, client: Client) -> None:
    assert client.why_not_ready() is None
    server.ready_status = 503
    assert client.why_not_ready() == "the model is loading"
    with Client("http://127.0.0.1:1") as nobody:
        assert nobody.why_not_ready() == ""


def test_the_timing_line_says_where_the_time_went() -> None:
    line = timing_line(Answer("a cat", USAGE, total_s=1.2, first_token_s=0.5))
    assert line == ("1.20 s, first token after 500 ms: encode 12 ms, prefill 0.1 ms; 137 + 2 tokens, 112 cached")
    decoded = timing_line(Answer("a cat", {"timings": {"preprocess": 0.02, "decode_tokens": 0.8}}, total_s=1.0))
    assert "preprocess 20 ms, decode tokens 800 ms" in decoded
    assert timing_line(Answer("a cat", total_s=0.1)) == "0.10 s; 0 + 0 tokens, 0 cached"
    assert [milliseconds(seconds) for seconds in (1.2345, 0.0012345, 0.0)] == ["1234", "1.2", "0.0"]
