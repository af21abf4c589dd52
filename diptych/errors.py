"""What the command line says when it cannot go on: one readable message, and the exit code."""

from __future__ import annotations


class CommandFailed(Exception):
    """Ends the command with `exit_code` and its message, without a traceback."""

    exit_code = 1


class BadSetting(CommandFailed):
    """An option, argument or environment variable is wrong; the message names it and what is wanted."""

    exit_code = 2


class ModelUnavailable(BadSetting, ValueError):
    """MODEL names nothing that can be loaded; the message says what to do about it."""


class PortTaken(BadSetting):
    """Another program listens where the gateway should."""
