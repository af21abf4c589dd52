"""Logs: nothing secret, nothing long, and a traceback keeps the line that says what happened."""

from __future__ import annotations

from shared.log import MAX_VALUE_CHARS, _redact_event, redact


def test_secrets_and_bulk_are_masked():
    """Cases E21 and E22."""
    text = redact(f"redis://user:hunter2@host/0 Authorization: Bearer sk-123 https://a.example/x?sig=abc {'A' * 400}")
    for secret in ("hunter2", "sk-123", "sig=abc", "A" * 100):
        assert secret not in text


def test_long_values_are_cut():
    assert len(redact("word " * 2000)) < MAX_VALUE_CHARS + 50


def test_a_long_traceback_keeps_its_last_line():
    frames = "\n".join(f'  File "x.py", line {i}, in f' for i in range(500))
    event = _redact_event(None, "error", {"exception": f"{frames}\nValueError: the reason, Bearer sk-123"})
    assert event["exception"].endswith("ValueError: the reason, Bearer ***")
