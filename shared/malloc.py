"""Keeps glibc's malloc from holding on to memory that is free. Under any other malloc nothing happens.

Threads are given arenas of their own, up to eight for each core, and every arena keeps room for the largest request
that it ever served; what lies below something still in use is never returned by itself.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

M_ARENA_MAX: Final = -8  # its number in malloc.h
MAX_ARENAS: Final = 2


def limit_arenas() -> None:
    """Let all threads of this process share a few arenas; to be called before they are started.

    An operator who sets MALLOC_ARENA_MAX is left alone.
    """
    libc = _glibc()
    if libc is not None and "MALLOC_ARENA_MAX" not in os.environ:
        libc.mallopt(M_ARENA_MAX, MAX_ARENAS)


def return_free_memory() -> None:
    """Give the system what is free; takes milliseconds, in which other threads' allocations may wait."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
