"""The one line that every request leaves in the log: what it was, how long each stage took, how it ended."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.gateway_stack import Stack, data_url, eventually, question, running_stack
from tests.scripted import png


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(api_keys=("alice:sk-alice",)) as running:
        running.http.headers["Authorization"] = "Bearer sk-alice"
        yield running


def lines_of(logs: list[Any], request_id: str) -> list[dict[str, Any]]:
    return [line for line in list(logs) if line["event"] == "request" and line.get("request_id") == request_id]


def ask(stack: Stack, request_id: str, **fields: Any) -> dict[str, Any]:
    """The request's line, of which there must be one."""
    body = {"messages": question(data_url(png(seed=len(request_id)))), **fields}
    with capture_logs() as logs:
        answer = stack.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": request_id})
        assert answer.headers["X-Request-Id"] == request_id
        eventually(lambda: bool(lines_of(logs, request_id)))
    [line] = lines_of(logs, request_id)
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_with_its_stages_and_outcome(stack: Stack, stream: bool):
    line = ask(stack, f"request-{stream}", stream=stream)
    assert (line["route"], line["status"], line["outcome"]) == ("/v1/chat/completions", 200, "ok")
    assert (line["key"], line["num_images"], line["log_level"]) == ("alice", 1, "info")
    assert {"fetch", "prefill", "decode_tokens"} <= line["stages"].keys()
    assert all(0 <= seconds < 10 for seconds in line["stages"].values())
    assert 0 < line["first_token_s"] <= line["duration_s"]
    assert line["num_generated_tokens"] > 0


def test_a_refused_request_is_one_line_that_blames_nobody_here(stack: Stack):
    line = ask(stack, "refused", temperature=9)
    assert (line["status"], line["log_level"]) == (400, "info")
    assert line["outcome"] != "ok"
    assert "reason" not in line


def test_a_failure_of_ours_is_a_warning_with_its_reason(stack: Stack):
    stack.encoder.is_ready = False
    try:
        eventually(lambda: stack.ready()["vision_encoders"]["ready"] == 0)
        line = ask(stack, "failed-on-our-side")
        assert (line["status"], line["outcome"], line["log_level"]) == (503, "not_ready", "warning")
        assert "vision encoder" in line["reason"]
    finally:
        stack.reset()


def test_nothing_of_what_was_asked_is_in_the_line(stack: Stack):
    with capture_logs() as logs:
        stack.ask(data_url(png(seed=3)), text="a word that is nobody's business", user="a user's name")
    written = json.dumps(logs, default=str)
    for hidden in ("nobody's business", "a user's name", "sk-alice", "base64"):
        assert hidden not in written


# --- how it looks ----------------------------------------------------------------------------------------------------

WRITE = """
from shared.log import configure_logging, get_logger
configure_logging("gateway")
get_logger("x").info("request", request_id="abc", route="/v1/chat/completions", status=200, stages={"prefill": 0.01})
"""


def test_on_a_terminal_a_line_can_be_read_by_people():
    reader, terminal = pty.openpty()
    try:
        done = subprocess.run([sys.executable, "-c", WRITE], stderr=terminal, timeout=60)
        assert done.returncode == 0
        os.close(terminal)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(reader, 65536).decode())
    finally:
        os.close(reader)
    [line] = shown.strip().splitlines()
    assert re.match(r"\d\d:\d\d:\d\d \[info +\] request ", line)
    for part in ("request_id=abc", "route=/v1/chat/completions", "status=200", "stages={'prefill': 0.01}"):
        assert part in line


def test_elsewhere_a_line_is_one_json_object():
    done = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, text=True, timeout=60)
    [line] = done.stderr.splitlines()
    parsed = json.loads(line)
    assert parsed["stages"] == {"prefill": 0.01}
    assert (parsed["service"], parsed["level"], parsed["event"]) == ("gateway", "info", "request")
    assert parsed["timestamp"].endswith("Z")
