"""`diptych bench` against a scripted server on a real socket: what it reports is what that server did."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from diptych.bench.cli import app
from diptych.bench.client import Reply, Target, ask, first_model
from diptych.bench.errors import BenchError
from diptych.bench.machine import Meter, ProcessTrees
from diptych.bench.repeats import Plan, Result, measure
from diptych.bench.report import ProgressLine, result_tables
from diptych.bench.sessions import SessionShape
from diptych.bench.workloads import Request, iter_requests


@dataclass
class ScriptedServer:
    """An OpenAI-style server of a few lines: streams as many `x` as asked, one chunk each, and remembers the bodies."""

    url: str = ""
    status: int = 200
    sends_usage: bool = True
    fail_after: int | None = None
    num_tokens_short: int = 0
    first_token_s: float = 0.0
    models: dict[str, Any] = field(default_factory=lambda: {"data": [{"id": "listed"}, {"id": "other"}]})
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models "):
            writer.write(b"HTTP/1.1 200 _\r\nConnection: close\r\n\r\n" + json.dumps(self.models).encode())
            writer.close()
            return
        length = int(re.search(r"(?i)content-length: (\d+)", head)[1])
        body = json.loads(await reader.readexactly(length))
        path = head.split()[1]
        self.requests.append((path, body))
        kind = b"text/event-stream" if self.status == 200 else b"application/json"
        status = str(self.status).encode()
        writer.write(b"HTTP/1.1 " + status + b" _\r\nConnection: close\r\nContent-Type: " + kind + b"\r\n\r\n")
        async for event in self.events(path, body):
            writer.write(event)
            await writer.drain()
        writer.close()

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        if self.status != 200:
            yield b'{"error": {"message": "no such model"}}'
            return
        await asyncio.sleep(self.first_token_s)
        num_tokens = body["max_tokens"] - self.num_tokens_short
        yield b": a comment\n\n"
        for index in range(num_tokens):
            if index == self.fail_after:
                yield self.event({"error": {"message": "engine died"}})
                return
            text = {"delta": {"content": "x"}} if "chat" in path else {"text": "x"}
            yield self.event({"choices": [{"index": 0, **text}]})
        if self.sends_usage:
            details = {"cached_tokens": 5}
            usage = {"prompt_tokens": 77, "completion_tokens": num_tokens, "prompt_tokens_details": details}
            yield self.event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    @staticmethod
    def event(body: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(body).encode() + b"\n\n"


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield server


async def ask_once(server: ScriptedServer, request: Request, **target: Any) -> Reply:
    async with serving(server):
        aim = Target(server.url, "m", **target)
        async with aim.open_client() as client:
            return await ask(client, aim, request)


async def test_a_reply_holds_what_the_server_did():
    server = ScriptedServer(first_token_s=0.05)
    reply = await ask_once(server, Request(" one two", 2, 7))
    assert reply.error is None
    assert reply.ttft_s >= 0.05
    assert (reply.num_chunks, reply.num_output_tokens) == (7, 7)
    assert (reply.num_prompt_tokens, reply.num_cached_tokens) == (77, 5)
    [(path, body)] = server.requests
    assert path == "/v1/completions"
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == (" one two", 7, 0)
    assert body["ignore_eos"] is True


async def test_a_server_without_usage_is_counted_by_chunks():
    reply = await ask_once(ScriptedServer(sends_usage=False), Request(" one two", 2, 7))
    assert (reply.num_prompt_tokens, reply.num_output_tokens) == (2, 7)


async def test_a_picture_goes_to_chat_as_a_data_url_before_the_text():
    server = ScriptedServer()
    await ask_once(server, Request(" what", 1, 2, images=(b"\xff\xd8jpeg",)))
    [(path, body)] = server.requests
    image, text = body["messages"][0]["content"]
    assert path == "/v1/chat/completions"
    assert image["image_url"]["url"] == "data:image/jpeg;base64,/9hqcGVn"
    assert text == {"type": "text", "text": " what"}


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (ScriptedServer(status=404), "404 .*no such model"),
        (ScriptedServer(fail_after=3), "engine died"),
        (ScriptedServer(num_tokens_short=7), "without any text"),
    ],
)
async def test_a_failure_is_kept_in_the_reply(server, told):
    reply = await ask_once(server, Request(" one two", 2, 7))
    assert re.search(told, reply.error)


async def test_a_server_that_is_not_there_is_an_error_of_each_request():
    target = Target("http://127.0.0.1:9", "m")
    async with target.open_client() as client:
        reply = await ask(client, target, Request(" a", 1, 1))
    assert reply.error.startswith("ConnectError")


async def run_plan(server: ScriptedServer, plan: Plan) -> Result:
    async with serving(server):
        with ProgressLine(Console(quiet=True)) as progress:
            return await measure("scripted", plan.workloads[0], plan, Target(server.url, "m"), None, progress.start_run)


async def test_a_workload_is_run_whole_and_every_repeat_asks_something_new():
    server = ScriptedServer()
    result = await run_plan(server, Plan(("W2",), reps=2, max_requests=5, num_warm_ups=1))
    requests = list(iter_requests("W2", 1))[:5]
    first = result.runs[0].figures
    assert first["requests"] == 5
    assert first["errors"] == first["short"] == 0
    assert first["out_tok"] == sum(request.num_output_tokens for request in requests)
    assert first["in_tok"] == 5 * 77
    assert first["tok_per_chunk"] == 1.0
    assert first["output_tok_s"] == pytest.approx(first["out_tok"] / first["duration_s"])
    assert [run.seed for run in result.runs] == [1, 2]
    assert len({body["prompt"] for _, body in server.requests}) == 12


async def test_short_answers_and_failures_are_counted():
    short = await run_plan(ScriptedServer(num_tokens_short=1), Plan(("W3",), reps=1, num_warm_ups=0))
    assert short.figures["short"] == 1
    failed = await run_plan(ScriptedServer(fail_after=2), Plan(("W3",), reps=1, num_warm_ups=0))
    assert (failed.figures["errors"], failed.figures["output_tok_s"]) == (1, 0)
    assert "engine died" in failed.first_error


async def test_w6_and_w7_run_against_a_server():
    shape = SessionShape(
        num_users=2, num_turns=2, window=2, num_output_tokens=3, stream_s=0.4, burst_size=2, burst_every_s=0.1
    )
    windows = ScriptedServer()
    w6 = (await run_plan(windows, Plan(("W6",), reps=1, shape=shape))).figures
    assert (w6["requests"], w6["errors"], w6["short"]) == (4, 0, 0)
    assert w6["ratio"] == pytest.approx(w6["ttft_later_turns"] / w6["ttft_first_turn"])
    assert [len(body["messages"][0]["content"]) for _, body in windows.requests[1:]] == [3] * 4

    bursts = ScriptedServer()
    w7 = (await run_plan(bursts, Plan(("W7",), reps=1, shape=shape))).figures
    assert w7["errors"] == 0
    assert w7["num_pictures"] in (2, 4, 6)
    assert 0 < w7["with_bursts_p50"] <= w7["with_bursts_p99"] <= w7["with_bursts_max"]


async def test_the_cpu_of_a_child_is_the_servers_not_a_strangers():
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    async with Meter(ProcessTrees([process.pid])) as meter:
        assert await process.stdout.readline() == b"done\n"
    process.stdin.write(b"\n")
    await process.communicate()
    figures = meter.figures()
    assert figures["server_cpu"] * figures["duration_s"] >= 0.4
    assert figures["peak_rss_mib"] >= 5


def test_a_pid_that_does_not_exist_is_refused():
    with pytest.raises(BenchError, match="999999999"):
        ProcessTrees([999999999])


async def test_the_command_prints_a_table_and_writes_lines_that_compare_reads(tmp_path):
    out = tmp_path / "out.jsonl"
    arguments = ["run", "--workloads", "W3", "--reps", "2", "--label", "scripted", "--out", str(out), "--url"]
    async with serving(ScriptedServer()) as server:
        result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, f"{server.url}/v1"])
    assert result.exit_code == 0, result.output
    assert "output" in result.output
    [line] = map(json.loads, out.read_text().splitlines())
    assert (line["label"], line["workload"], line["model"], line["out_tok"]) == ("scripted", "W3", "listed", 128)
    assert line["salt"].isdigit()
    assert [run["counted"] for run in line["runs"]] == [True, True]
    compared = CliRunner().invoke(app, ["compare", str(out)])
    assert "scripted" in compared.output


async def test_the_command_fails_when_requests_fail(tmp_path):
    async with serving(ScriptedServer(status=404)) as server:
        arguments = ["run", "--workloads", "W3", "--reps", "1", "--url", server.url]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 1
    assert "no such model" in result.output.replace("\n", "")


async def test_a_server_that_is_not_there_or_lists_nothing_stops_the_command():
    with pytest.raises(BenchError, match=r"127\.0\.0\.1:9: cannot list models: .*connection"):
        await first_model(Target("http://127.0.0.1:9", ""))
    with pytest.raises(BenchError, match="missing an 'http://'"):
        await first_model(Target("127.0.0.1:9", ""))
    async with serving(ScriptedServer(models={"data": []})) as server:
        with pytest.raises(BenchError, match="lists no model; name one"):
            await first_model(Target(server.url, ""))


def test_the_command_refuses_what_it_cannot_run():
    result = CliRunner().invoke(app, ["run", "--workloads", "W1,W0", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "unknown workload W0" in result.output.replace("\n", " ")


async def test_the_table_says_how_many_runs_were_dropped():
    result = await run_plan(ScriptedServer(), Plan(("W3",), reps=2, num_warm_ups=0))
    result.runs[0].counted = False
    [table] = result_tables([result], title="t")
    assert list(table.columns[1].cells) == ["1 of 2"]
