"""How many CPU threads torch's operations use, for each thread that calls them.

A service computes in one thread of its own. Elsewhere an operation on a tensor must not be split: OpenMP would keep a
second team of threads from then on, and with more of them than cores waiting threads go to sleep too soon. After the
first embedding that the event loop looked at, a decode step took 24 ms instead of 17.
"""

from __future__ import annotations

import torch


def compute_with(num_threads: int) -> None:
    """Let the calling thread's operations use so many threads, whatever others set later."""
    torch.set_num_threads(num_threads)
    torch.get_num_threads()  # a thread takes over what was set last, anywhere, when it first asks: let it ask now


def compute_alone_elsewhere() -> None:
    """Let the operations of the calling thread, and of every thread that has none behind it yet, use one thread.

    To be called when `compute_with` has been called where the work is done.
    """
    compute_with(1)
