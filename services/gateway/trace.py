"""What one request did and how long each stage took: the source of its log line, its metrics and its timings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.gateway.timeline import Timeline
from shared.errors import DiptychError

SERVER_FAULT = 500


@dataclass(slots=True)
class Trace:
    """Filled in along the way. `stages` maps a stage of `shared.wire.common.Stage` to seconds.

    key_name    of the API key that it counts for; None until it is known
    is_counted  its key's limits let it in, so that it takes a place until it ends
    reason      of a failure that is not the client's: the error's message
    """

    request_id: str
    started_at: float = field(default_factory=time.perf_counter)
    stages: dict[str, float] = field(default_factory=dict)
    outcome: str = "ok"
    reason: str | None = None
    key_name: str | None = None
    is_counted: bool = False
    model: str | None = None
    num_images: int = 0
    num_prompt_tokens: int | None = None
    num_image_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_generated_tokens: int | None = None
    first_token_s: float | None = None
    timeline: Timeline = field(init=False)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.started_at)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_at

    def failed(self, error: DiptychError) -> None:
        self.outcome = error.code
        self.reason = error.message if error.status >= SERVER_FAULT else None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - start

    def merge(self, timings: Mapping[str, float]) -> None:
        """Take over another service's stages; of pictures worked on side by side the longest counts."""
        for name, seconds in timings.items():
            self.stages[name] = max(seconds, self.stages.get(name, 0.0))

    def first_token(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = self.elapsed_s

    def rounded_stages(self) -> dict[str, float]:
        return {name: round(seconds, 6) for name, seconds in self.stages.items()}

    def server_timing(self) -> str:
        """The value of a `Server-Timing` header, in milliseconds."""
        return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in self.stages.items())
