"""When each stage of one answer ran and where: bars that a page can draw, put together from every service's own word.

Each service counts from the moment a request reached it; here everything is placed on this gateway's clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from shared.wire.common import StageSpan

# A timeline is for looking at: a request with hundreds of prompts or pictures is cut, not its answer.
MAX_SPANS: Final = 256
GATEWAY: Final = "gateway"


@dataclass(frozen=True, slots=True)
class Span:
    """start_ms   since the request reached the gateway
    where      "gateway" or a replica's name: "text_engine-2"
    image      number of the picture, in the order of the request; None: the request as a whole
    source     of a transferred embedding: "redis" or "vision_encoder"
    """

    stage: str
    start_ms: float
    duration_ms: float
    where: str
    image: int | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class ImageTrace:
    """Who knew a picture, and who had its embedding.

    admitted_by      "gateway" (remembered), "redis", "vision_encoder", or "shared" (another request's encode);
                     None: it is not told
    embedding_from   "prefix_cache" (keys and values were still there, no embedding was needed), "text_engine" (still
                     held there), "redis" or "vision_encoder"; None if an older engine does not say, or it is not told
    """

    num_tokens: int
    admitted_by: str | None
    embedding_from: str | None = None


@dataclass(slots=True)
class Timeline:
    """started_at       of the request, by time.perf_counter()
    hides_origins    where a picture and its embedding were found is not told: it may be there because of others
    """

    started_at: float
    hides_origins: bool = False
    spans: list[Span] = field(default_factory=list)
    images: list[ImageTrace] = field(default_factory=list)

    def add(self, stage: str, started_at: float, ended_at: float, where: str, image: int | None = None) -> None:
        self._place(stage, started_at, ended_at - started_at, where, image, None)

    def add_all(
        self,
        spans: Iterable[StageSpan],
        *,
        began_at: float,
        where: str,
        images: Mapping[str, Sequence[int]] | None = None,
        image: int | None = None,
    ) -> None:
        """Another service's spans.

        began_at   its zero, by this process's time.perf_counter()
        images     image key -> numbers of the pictures that it names
        image      the one picture that all of them are about
        """
        for span in spans:
            numbers = [image] if span.image_key is None else (images or {}).get(span.image_key, [])
            for number in numbers:
                self._place(span.stage, began_at + span.start_s, span.duration_s, where, number, span.source)

    def _place(
        self, stage: str, started_at: float, duration_s: float, where: str, image: int | None, source: str | None
    ) -> None:
        """Work that began before this request, a joined encode say, counts from the request's start."""
        start_s = started_at - self.started_at
        end_s = start_s + duration_s
        if end_s >= 0 and len(self.spans) < MAX_SPANS:
            start_s = max(0.0, start_s)
            self.spans.append(
                Span(stage, round(start_s * 1000, 3), round((end_s - start_s) * 1000, 3), where, image, source)
            )

    def to_body(self, first_token_s: float | None) -> dict[str, Any]:
        spans, images = sorted(self.spans, key=lambda span: span.start_ms), self.images
        if self.hides_origins:
            spans = [replace(span, source=None) for span in spans]
            images = [replace(image, admitted_by=None, embedding_from=None) for image in images]
        return {
            "spans": [{name: value for name, value in asdict(span).items() if value is not None} for span in spans],
            "images": [asdict(image) for image in images],
            "first_token_ms": None if first_token_s is None else round(first_token_s * 1000, 3),
            "total_ms": round((time.perf_counter() - self.started_at) * 1000, 3),
        }
