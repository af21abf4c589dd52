"""`diptych batch`: answers in OpenAI's format, whatever was interrupted, broken or refused on the way."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import time
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from diptych import launch, machine
from diptych.batch import run as batch_run
from diptych.batch.answers import BatchOutput
from diptych.batch.counter import Counter
from diptych.batch.requests import BadLine, BatchInput, Place
from diptych.client import Client
from diptych.errors import BadSetting, CommandFailed
from diptych.models import Model
from shared.errors import NotReady, Overloaded
from tests.gateway_stack import Stack, running_stack
from tests.ports import refusing_port
from tests.scripted import png

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running


@pytest.fixture(autouse=True)
def _healthy(request: pytest.FixtureRequest) -> None:
    if "stack" in request.fixturenames:
        request.getfixturevalue("stack").reset()


def line(custom_id: str, text: str = "hi there", **changes: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


def picture_line(custom_id: str, url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it"}]
    return line(custom_id, body={"messages": [{"role": "user", "content": content}]})


def write(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def run(stack: Stack | str, source: Path, **options: Any) -> tuple[int, str]:
    """Exit code, and what was said."""
    said = io.StringIO()
    url = stack if isinstance(stack, str) else stack.url
    plan = batch_run.Plan(source=source, destination=source.parent / "out.jsonl", url=url, **options)
    return batch_run.run(plan, Console(file=said, width=200)), said.getvalue()


def answers(folder: Path) -> dict[str | None, dict[str, Any]]:
    lines = [json.loads(each) for each in (folder / "out.jsonl").read_text().splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines), "each is answered once"
    return found


def test_every_line_gets_its_answer(stack: Stack, tmp_path: Path):
    source = write(
        tmp_path,
        *(line(f"chat-{number}", f"question {number}") for number in range(37)),
        "",
        line("text", url="/v1/completions", body={"prompt": "Once"}),
        line("responses", url="/v1/responses", body={"input": "Hello"}),
    )
    code, said = run(stack, source, concurrency=5)
    assert code == 0
    assert "39 of 39" in said
    found = answers(tmp_path)
    assert len(found) == 39
    for answer in found.values():
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"]
        assert answer["error"] is None
    assert found["chat-3"]["response"]["body"]["choices"][0]["message"]["content"]
    assert found["text"]["response"]["body"]["object"] == "text_completion"
    assert found["responses"]["response"]["body"]["object"] == "response"


def test_no_more_requests_are_under_way_than_allowed(stack: Stack, tmp_path: Path):
    most = 0
    stack.engine.script.start_delay_s = 0.02
    generate = stack.engine._generate
    running = 0

    async def counted(request: Any) -> Any:
        nonlocal most, running
        running += 1
        most = max(most, running)
        try:
            return await generate(request)
        finally:
            running -= 1

    stack.engine._generate = counted  # type: ignore[method-assign]
    try:
        assert run(stack, write(tmp_path, *(line(str(i)) for i in range(20))), concurrency=3)[0] == 0
    finally:
        stack.engine._generate = generate  # type: ignore[method-assign]
    assert most == 3


def test_what_is_wrong_with_a_line_is_said_in_its_place_and_the_others_are_answered(stack: Stack, tmp_path: Path):
    source = write(
        tmp_path,
        line("good"),
        "no JSON at all",
        line("get", method="GET"),
        line("elsewhere", url="/v1/embeddings"),
        line("no-body", body=None),
        line("stream", body={"messages": [], "stream": True}),
        line("refused", body={"messages": []}),
    )
    code, said = run(stack, source)
    assert code == 1
    assert "7 of 7, 6 failed" in said
    found = answers(tmp_path)
    for words in (
        "line 2: this is not valid JSON (",
        'line 3, custom_id get: method is "GET"; give POST',
        'line 4, custom_id elsewhere: url is "/v1/embeddings"; give one of /v1/chat/completions',
        "line 5, custom_id no-body: body is missing",
        "line 7, custom_id refused: status 400: messages",
        "6 lines have no good answer; mend the input, then --retry-failed asks again.",
    ):
        assert words in said
    assert found["good"]["response"]["status_code"] == 200
    assert found["refused"]["response"]["status_code"] == 400
    assert found["refused"]["response"]["body"]["error"]["param"] == "messages"
    assert found[None]["line"] == 2
    for custom_id, word in [(None, "JSON"), ("get", "POST"), ("elsewhere", "url"), ("no-body", "body")]:
        assert found[custom_id]["response"] is None
        assert found[custom_id]["error"]["code"] == "invalid_line"
        assert word in found[custom_id]["error"]["message"]
    assert "stream" in found["stream"]["error"]["message"]


def test_a_second_run_asks_only_what_is_missing(stack: Stack, tmp_path: Path):
    run(stack, write(tmp_path, line("a"), "broken", line("b", body={"messages": []})))
    before = (tmp_path / "out.jsonl").read_text()
    stack.engine.requests.clear()
    code, said = run(stack, write(tmp_path, line("a"), "broken", line("b", body={"messages": []}), line("c")))
    assert len(stack.engine.requests) == 1
    assert (tmp_path / "out.jsonl").read_text().startswith(before)
    assert code == 1, "an earlier failure is still one"
    assert "3 of 4 lines are in" in said
    assert "line 2: this is not valid JSON" in said, "whenever it failed"
    assert "2 lines have no good answer" in said
    assert len(answers(tmp_path)) == 4


def test_of_many_failures_ten_are_told_and_the_others_counted(stack: Stack, tmp_path: Path):
    _, said = run(stack, write(tmp_path, *(line(str(i), url="/nowhere") for i in range(13))))
    assert said.count('url is "/nowhere"') == 10
    assert f"and 3 more, each with its reason in {tmp_path / 'out.jsonl'}" in said


def test_a_model_is_put_into_lines_that_name_none_if_the_server_has_it(stack: Stack, tmp_path: Path):
    with Client(stack.url) as client:
        [served] = client.models()
    named = line("named", body={"messages": [{"role": "user", "content": "hi"}], "model": "other"})
    run(stack, write(tmp_path, line("a"), named), model=served)
    assert answers(tmp_path)["a"]["response"]["body"]["model"] == served
    assert "other" in answers(tmp_path)["named"]["response"]["body"]["error"]["message"]
    with pytest.raises(BadSetting, match=f"--model llava is not served at .*, which serves {served}"):
        run(stack, write(tmp_path, line("b")), model="llava")


def test_what_failed_is_asked_again_if_that_is_wanted(stack: Stack, tmp_path: Path):
    run(stack, write(tmp_path, line("a"), line("b", body={"messages": []}), line("c")))
    stack.engine.requests.clear()
    code, _ = run(stack, write(tmp_path, line("a"), line("b"), line("c")), retry_failed=True)
    assert code == 0
    assert len(stack.engine.requests) == 1
    assert {each["response"]["status_code"] for each in answers(tmp_path).values()} == {200}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@settings(deadline=None)
@given(cut=st.integers(min_value=0, max_value=4000))
def test_wherever_a_run_was_cut_off_the_next_one_completes_the_output(tmp_path_factory: Any, cut: int):
    folder = tmp_path_factory.mktemp("cut")
    path = folder / "out.jsonl"
    places = [Place(number, 0, f"line-{number} ü" if number != 3 else None) for number in range(1, 8)]
    with BatchOutput(path) as output:
        for place in places:
            output.add(place, response={"status_code": 200, "request_id": "r", "body": {}}, error=None)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with BatchOutput(path) as output:
        assert len(output.done) in (whole[:cut].count(b"\n"), whole[:cut].count(b"\n") + 1)
        for place in places:
            if place.name not in output.done:
                output.add(place, response={"status_code": 200, "request_id": "r", "body": {}}, error=None)
    lines = [json.loads(each) for each in path.read_bytes().splitlines()]
    assert [each["custom_id"] for each in lines] == [place.custom_id for place in places]


@pytest.mark.parametrize("content", ["my thesis\n", "my thesis", '{"custom_id": "a"}\n', '["batch_req_1"]', "{}"])
def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, content: str):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(BadSetting, match="not the output of a batch"), BatchOutput(path):
        pass
    assert path.read_text() == content


def test_two_runs_do_not_write_one_file(tmp_path: Path):
    with BatchOutput(tmp_path / "out.jsonl"), pytest.raises(BadSetting, match="another run"):  # noqa: SIM117
        with BatchOutput(tmp_path / "out.jsonl"):
            pass


def test_pictures_are_read_relative_to_the_input_and_only_below_its_folder(stack: Stack, tmp_path: Path):
    folder = tmp_path / "batch"
    (folder / "pictures").mkdir(parents=True)
    (folder / "pictures" / "one.png").write_bytes(png(seed=1))
    (tmp_path / "secret.png").write_bytes(png(seed=2))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    outside = ["../secret.png", str(tmp_path / "secret.png"), "link.png", "/etc/hostname"]
    source = write(
        folder,
        picture_line("in", "pictures/one.png"),
        picture_line("in-again", f"file://{folder}/pictures/one.png"),
        picture_line("missing", "pictures/two.png"),
        *(picture_line(f"out-{number}", url) for number, url in enumerate(outside)),
    )
    assert run(stack, source)[0] == 1
    found = answers(folder)
    for custom_id in ("in", "in-again"):
        assert found[custom_id]["response"]["body"]["usage"]["prompt_tokens_details"]["image_tokens"] == 576
    assert "cannot be read" in found["missing"]["error"]["message"]
    for number in range(len(outside)):
        assert "outside" in found[f"out-{number}"]["error"]["message"]
    assert run(stack, source, image_root=tmp_path, retry_failed=True)[0] == 1
    assert answers(folder)["out-0"]["response"]["status_code"] == 200


@pytest.mark.parametrize("url", ["a\0b.png", "loop.png", "x" * 5000])
def test_what_can_be_no_path_spoils_its_own_line_only(stack: Stack, tmp_path: Path, url: str):
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    assert run(stack, write(tmp_path, line("before"), picture_line("bad", url), line("after")))[0] == 1
    found = answers(tmp_path)
    assert found["bad"]["error"]["code"] == "invalid_line"
    assert [found[custom_id]["response"]["status_code"] for custom_id in ("before", "after")] == [200, 200]


def test_what_is_no_path_goes_to_the_server_as_it_is(tmp_path: Path):
    sources = ["https://example.com/a.png", "data:image/png;base64,AAAA", "file-123abc", "HTTP://EXAMPLE.COM/a.png"]
    batch = BatchInput(write(tmp_path, *(picture_line(str(i), url) for i, url in enumerate(sources))))
    for place, url in zip(batch.places, sources, strict=True):
        [message] = batch.request(place).body["messages"]
        assert message["content"][0]["image_url"]["url"] == url


def test_the_example_is_a_batch_whose_pictures_are_there():
    batch = BatchInput(ROOT / "examples/questions.jsonl", ROOT)
    requests = [batch.request(place) for place in batch.places]
    assert len(requests) == 2
    assert "data:image/png;base64," in json.dumps(requests[0].body)


def test_a_picture_of_the_responses_api_is_read_too(tmp_path: Path):
    (tmp_path / "one.png").write_bytes(png(seed=1))
    part = {"type": "input_image", "image_url": "one.png"}
    body = {"input": [{"role": "user", "content": [part]}]}
    batch = BatchInput(write(tmp_path, line("r", url="/v1/responses", body=body)))
    [item] = batch.request(batch.places[0]).body["input"]
    assert item["content"][0]["image_url"].startswith("data:image/png;base64,")


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path):
    source = write(tmp_path, line("a"), line("b"))
    source.write_bytes(BOM_UTF8 + source.read_bytes())
    batch = BatchInput(source)
    assert [place.custom_id for place in batch.places] == ["a", "b"]
    assert [batch.request(place).url for place in batch.places] == ["/v1/chat/completions"] * 2


def test_a_folder_of_pictures_that_is_none_stops_the_start(tmp_path: Path):
    with pytest.raises(BadSetting, match=r"--images .*/nosuch is no folder"):
        BatchInput(write(tmp_path, line("a")), tmp_path / "nosuch")


def test_an_id_that_comes_twice_stops_the_start(tmp_path: Path):
    with pytest.raises(BadSetting, match="lines 1 and 3"):
        BatchInput(write(tmp_path, line("a"), line("b"), line("a")))


def test_a_line_without_an_id_is_bad_by_itself(tmp_path: Path):
    batch = BatchInput(write(tmp_path, {"url": "/v1/completions"}, "[]", line("")))
    assert [place.custom_id for place in batch.places] == [None, None, None]
    for place in batch.places:
        with pytest.raises(BadLine, match="custom_id"):
            batch.request(place)


def test_a_busy_server_is_asked_again(stack: Stack, tmp_path: Path):
    stack.engine.script.refuse = Overloaded("full", retry_after_s=0)
    asked = 0
    generate = stack.engine._generate

    async def refuse_twice(request: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > 2:
            stack.engine.script.refuse = None
        return await generate(request)

    stack.engine._generate = refuse_twice  # type: ignore[method-assign]
    try:
        assert run(stack, write(tmp_path, line("a")))[0] == 0
    finally:
        stack.engine._generate = generate  # type: ignore[method-assign]
    assert asked >= 3


def test_a_full_server_is_left_alone_as_long_as_it_says_and_asked_until_it_has_room(stack: Stack, tmp_path: Path):
    """More often than other failures are retried: it works, and nothing of the batch may be lost."""
    full = Overloaded("full", retry_after_s=1)
    stack.engine.script.refuse = full
    asked_at: list[float] = []
    generate = stack.engine._generate

    async def refuse_three_times(request: Any) -> Any:
        asked_at.append(time.monotonic())
        stack.engine.script.refuse = full if len(asked_at) <= 3 else None
        return await generate(request)

    stack.engine._generate = refuse_three_times  # type: ignore[method-assign]
    try:
        assert run(stack, write(tmp_path, line("a")), num_retries=1)[0] == 0
    finally:
        stack.engine._generate = generate  # type: ignore[method-assign]
    assert answers(tmp_path)["a"]["response"]["status_code"] == 200
    assert len(asked_at) == 4
    assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(asked_at))


def test_a_server_that_stays_unready_leaves_its_words_in_the_output(stack: Stack, tmp_path: Path):
    stack.engine.script.refuse = NotReady("shutting down", retry_after_s=0)
    assert run(stack, write(tmp_path, line("a")), num_retries=1)[0] == 1
    assert answers(tmp_path)["a"]["response"]["status_code"] == 503


def test_a_server_that_is_gone_ends_the_run_and_not_the_lines(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with refusing_port() as port:
        source = write(tmp_path, line("a"), line("b"))
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(CommandFailed, match="no server answers"):
            run(url, source)
        monkeypatch.setattr(batch_run, "_running_server", lambda plan: url)
        with pytest.raises(CommandFailed, match="goes on from here"):
            run(url, source, num_retries=1)
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    monkeypatch.undo()
    assert run(stack, source)[0] == 0


def test_where_no_server_runs_the_model_that_was_named_is_started(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    named, started = tmp_path / "named-model", []
    named.mkdir()
    (named / "config.json").write_text("{}")
    (named / "model.safetensors").touch()

    @contextlib.asynccontextmanager
    async def running(system: launch.Plan, console: Console, *, show_logs: bool) -> AsyncIterator[None]:
        started.append(system.model)
        yield

    monkeypatch.setattr(batch_run, "_running_server", lambda plan: None)
    monkeypatch.setattr(machine, "free_ports", lambda count: [httpx.URL(stack.url).port])
    monkeypatch.setattr(launch, "running", running)
    code, _ = run(stack, write(tmp_path, line("a")), model=str(named))
    assert started == [Model("named-model", named)]
    assert code == 0, "no line asks for a model by another name than the one it is served under"


def test_plain_lines_tell_rate_and_time_left_where_there_is_no_terminal():
    now, said = [100.0], io.StringIO()
    with Counter(Console(file=said), 40, num_before=10, clock=lambda: now[0]) as counter:
        for number in range(20):
            now[0] += 2.0
            counter.note(failed=number == 0, num_tokens=8)
    assert said.getvalue().splitlines() == [
        "15 of 40, 1 failed, 0.5/s, 4 tokens/s, 50 s left",
        "20 of 40, 1 failed, 0.5/s, 4 tokens/s, 40 s left",
        "25 of 40, 1 failed, 0.5/s, 4 tokens/s, 30 s left",
        "30 of 40, 1 failed, 0.5/s, 4 tokens/s, 20 s left",
    ]


def test_a_terminal_gets_a_bar():
    said = io.StringIO()
    with Counter(Console(file=said, force_terminal=True, width=100), 3) as counter:
        for _ in range(3):
            counter.note(num_tokens=5)
    assert "3/3" in said.getvalue()


def command(stack: Stack, source: Path, *, largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    """`diptych batch` in a process of its own. largest_file   in bytes; beyond it writing fails as on a full disk"""
    words = [sys.executable, "-m", "diptych", "batch", str(source), "-o", str(source.parent / "out.jsonl")]
    if largest_file is not None:
        words = ["prlimit", f"--fsize={largest_file}", *words]
    environment = {**os.environ, "DIPTYCH_SERVER": stack.url}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_an_output_that_cannot_grow_ends_the_run_with_a_word_and_the_next_one_goes_on(stack: Stack, tmp_path: Path):
    source = write(tmp_path, *(line(str(number)) for number in range(20)))
    ended = command(stack, source, largest_file=5001)
    assert ended.returncode == 1
    assert "out.jsonl cannot be written: File too large; the same command goes on from here" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "out.jsonl").stat().st_size == 5001
    assert command(stack, source).returncode == 0
    assert len(answers(tmp_path)) == 20


def test_the_command_itself_answers_a_file(stack: Stack, tmp_path: Path):
    done = command(stack, write(tmp_path, line("a"), line("b")))
    assert done.returncode == 0, done.stderr
    assert "2 of 2" in done.stderr
    assert done.stdout == ""
    assert len(answers(tmp_path)) == 2
