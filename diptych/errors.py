"""What the command line says when it cannot go on: one readable message, and the exit code."""

from __future__ import annotations


class CommandFailed(Exception):
    """Ends the command with `exit_code` and its message, without a traceback."""

    exit_code = 1


class BadSetting(CommandFailed):
    """An option, argument or environment variable is wrong; the message names it and what is wanted."""

    exit_code = 2


class ModelUnavailable(BadSetting, ValueError):
    """MODEL names nothing that can be loaded.

    remedy   what to do about it, if the problem does not say so itself
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy or "name a folder, a GGUF file, a Hugging Face id, demo or smollm2"


class PortTaken(BadSetting):
    """Another program listens where the gateway should."""
