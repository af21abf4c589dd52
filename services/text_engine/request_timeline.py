"""When each stage of one request was, and where its pictures' embeddings came from. Times are monotonic seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Final, Literal

from services.text_engine.core.sequence import ImageSpan
from services.text_engine.engine_io import EngineRequest, RequestFinished
from shared.wire.common import StageSpan

MAX_FETCHES: Final = 4096  # remembered; a request's own are among the newest
Source = Literal["redis", "vision_encoder"]


@dataclass(slots=True)
class Fetch:
    """ended_at, source   None while it runs or if it failed"""

    started_at: float
    ended_at: float | None = None
    source: Source | None = None


class FetchLog:
    """The latest fetch of each image's embedding."""

    def __init__(self, max_fetches: int = MAX_FETCHES) -> None:
        self._max_fetches = max_fetches
        self._fetches: OrderedDict[str, Fetch] = OrderedDict()

    @contextmanager
    def fetching(self, image_key: str) -> Iterator[Fetch]:
        """The fetch, whose source is to be told; it ends with the block."""
        fetch = self._fetches[image_key] = Fetch(monotonic())
        self._fetches.move_to_end(image_key)
        while len(self._fetches) > self._max_fetches:
            self._fetches.popitem(last=False)
        yield fetch
        fetch.ended_at = monotonic()

    def during(self, image_key: str, since: float) -> Fetch | None:
        """The fetch that a request which came at `since` may have waited for."""
        fetch = self._fetches.get(image_key)
        return fetch if fetch is not None and fetch.ended_at is not None and fetch.ended_at >= since else None


def stage_spans(
    request: EngineRequest, finished: RequestFinished, fetches: FetchLog, *, arrived_at: float
) -> list[StageSpan]:
    """Tokenizing, every picture's transfer, and the stages of the engine, from the request's arrival on."""
    added_s = finished.added_at - arrived_at
    spans = [StageSpan(stage="tokenize", start_s=0.0, duration_s=max(0.0, added_s))]
    for key in dict.fromkeys(span.image_key for span in request.images):
        fetch = fetches.during(key, finished.added_at)
        if fetch is not None and fetch.ended_at is not None:
            start = max(fetch.started_at, arrived_at)
            spans.append(
                StageSpan(
                    stage="transfer",
                    start_s=start - arrived_at,
                    duration_s=fetch.ended_at - start,
                    image_key=key,
                    source=fetch.source,
                )
            )
    start_s = added_s
    for stage in ("queue", "prefill", "decode_tokens"):
        spans.append(StageSpan(stage=stage, start_s=start_s, duration_s=finished.timings[stage]))
        start_s += finished.timings[stage]
    return spans


def embedding_sources(request: EngineRequest, finished: RequestFinished, fetches: FetchLog) -> dict[str, str]:
    """Where each picture's rows came from, by image key; see shared.wire.engine.Finished."""
    sources: dict[str, str] = {}
    for span in request.images:
        sources[span.image_key] = _source(span, finished, fetches, sources.get(span.image_key))
    return sources


def _source(span: ImageSpan, finished: RequestFinished, fetches: FetchLog, earlier: str | None) -> str:
    """Of a picture with several spans the last one decides: it is the least likely to be cached."""
    if earlier not in (None, "prefix_cache"):
        return str(earlier)
    if span.start + span.num_tokens <= finished.num_cached_tokens:
        return "prefix_cache"
    fetch = fetches.during(span.image_key, finished.added_at)
    return "text_engine" if fetch is None or fetch.source is None else fetch.source
