"""Ctrl-C while a command is still being imported: no traceback, and the status that a shell expects."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERRUPT_AT_IMPORT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["diptych", *{words!r}]
from diptych.__main__ import main
main()
"""


def interrupted(words: list[str], module: str, *, is_job: bool = False) -> subprocess.CompletedProcess[str]:
    """The command, with SIGINT when it imports the module. The tests themselves may be run in the background.

    is_job   as a shell starts its background jobs, which Ctrl-C is not for
    """
    at_start = signal.SIG_IGN if is_job else signal.SIG_DFL
    return subprocess.run(
        [sys.executable, "-c", INTERRUPT_AT_IMPORT.format(module=module, words=words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, at_start),
    )


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["serve"], "typer"),
        (["serve"], "services.gateway.config"),
        (["serve"], "diptych.launch"),
        (["gateway", "--port", "0"], "services.gateway.app"),
        (["vision-encoder", "--port", "0"], "torch"),
        (["text-engine", "--port", "0"], "torch"),
        (["check"], "torch"),
        (["chat", "Hello"], "diptych.chat"),
        (["batch", "none", "-o", "none"], "diptych.batch.run"),
        (["demo"], "diptych.demo"),
    ],
)
def test_an_interrupt_during_an_import_ends_the_command_quietly(words: list[str], module: str) -> None:
    done = interrupted(words, module)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_background_job_goes_on() -> None:
    done = interrupted(["--version"], "typer", is_job=True)
    assert done.returncode == 0
    assert done.stdout.startswith("diptych ")
