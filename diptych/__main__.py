"""The command `diptych`, and `python -m diptych`. Imports hardly anything, so that Ctrl-C is quiet from the beginning.

While the command line is imported there is nothing to put in order: an interrupt ends the process at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130  # what a shell reports after Ctrl-C


def main() -> None:
    """Run the command that sys.argv names; never returns normally where it was interrupted."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ignored: a shell's background job
    if is_ours:
        signal.signal(signal.SIGINT, _leave)
    from diptych.cli import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(_signum: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
