"""How a process ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(status: int) -> str:
    """ "ended with exit code 1", "was ended by signal SIGKILL"; status negative: the signal's number"""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was ended by signal {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
