"""What stops a benchmark before it measures anything; the command prints it without a traceback."""

from __future__ import annotations


class BenchError(Exception):
    """A setting that cannot be used, or a file that cannot be compared."""
