"""When each stage of one image was, told as it ends."""

from __future__ import annotations

import time

from shared.wire.common import StageSpan


class StageClock:
    """Starts when it is made. Work that waits in line twice has two spans of `queue`, which `timings` adds up."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self.spans: list[StageSpan] = []

    def note(self, *stages: tuple[str, float], source: str | None = None) -> None:
        """These stages and their seconds have just ended, one after the other."""
        start_s = time.monotonic() - self.began_at - sum(seconds for _, seconds in stages)
        for stage, seconds in stages:
            self.spans.append(StageSpan(stage=stage, start_s=max(0.0, start_s), duration_s=seconds, source=source))
            start_s += seconds

    def timings(self) -> dict[str, float]:
        """Seconds per stage."""
        timings: dict[str, float] = {}
        for span in self.spans:
            timings[span.stage] = timings.get(span.stage, 0.0) + span.duration_s
        return timings
