"""What is asked of text that grows piece by piece."""

from __future__ import annotations


def num_beginning(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`, without being all of it: it may yet become it."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
