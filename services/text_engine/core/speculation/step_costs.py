"""What a step of so many tokens costs on this machine, out of a few that were measured."""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class StepCosts:
    """Seconds that a step of so many tokens takes, measured for some numbers of tokens.

    In between and beyond the last the cost grows along straight lines; it never falls.
    """

    def __init__(self, measured: Iterable[tuple[int, float]]) -> None:
        """measured   (number of tokens, seconds), at least one of them; more tokens take no less"""
        self._num_tokens: list[int] = []
        self._seconds: list[float] = []
        for num_tokens, seconds in sorted(measured):
            self._num_tokens.append(num_tokens)
            self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 0.0))

    def __str__(self) -> str:
        pairs = zip(self._num_tokens, self._seconds, strict=True)
        return ", ".join(f"{num_tokens}: {1000 * seconds:.3g} ms" for num_tokens, seconds in pairs)

    def seconds(self, num_tokens: int) -> float:
        known, seconds = self._num_tokens, self._seconds
        if num_tokens <= known[0]:
            return seconds[0]
        if len(known) == 1:  # nothing is known of longer steps: as if each token cost as much as the first ones
            return seconds[0] * num_tokens / known[0]
        right = min(bisect.bisect_left(known, num_tokens), len(known) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (known[right] - known[left])
        return seconds[left] + slope * (num_tokens - known[left])
