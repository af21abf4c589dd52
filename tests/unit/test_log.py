"""Logs: nothing secret, nothing long, and a traceback keeps the line that says what happened."""

from __future__ import annotations

import time

import pytest

from shared.log import MAX_VALUE_CHARS, _redact_event, redact


def test_secrets_and_bulk_are_masked():
    """Cases E21 and E22."""
    text = redact(f"redis://user:hunter2@host/0 Authorization: Bearer sk-123 https://a.example/x?sig=abc {'A' * 400}")
    for secret in ("hunter2", "sk-123", "sig=abc", "A" * 100):
        assert secret not in text


@pytest.mark.parametrize("piece", ["a?", "/?", "bearer ", "://a:", "A" * 159 + " ", "?a=", "basic\t"])
def test_what_a_client_chooses_is_searched_in_bounded_time(piece: str):
    """Each of these took time in the square of its length, or much of it, for a value that is then cut anyway."""
    began_at = time.thread_time()
    assert len(redact(piece * (3_000_000 // len(piece)))) < MAX_VALUE_CHARS + 50
    assert time.thread_time() - began_at < 2


def test_a_question_mark_without_a_query_stays():
    assert redact("what is this? http://a.example/x?y and why?") == "what is this? http://a.example/x?y and why?"


def test_long_values_are_cut():
    assert len(redact("word " * 2000)) < MAX_VALUE_CHARS + 50


def test_a_long_traceback_keeps_its_last_line():
    frames = "\n".join(f'  File "x.py", line {i}, in f' for i in range(500))
    event = _redact_event(None, "error", {"exception": f"{frames}\nValueError: the reason, Bearer sk-123"})
    assert event["exception"].endswith("ValueError: the reason, Bearer ***")
