"""Prometheus metrics: one registry per app, names under `diptych:`, so that two apps in one process never collide."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString
from starlette.responses import Response

from shared.embedding_cache import EmbeddingCache
from shared.tls import Tls

PREFIX = "diptych:"
TOTAL = "_total"

# Seconds; from a cached look-up to a long answer, about three steps per decade.
STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


def service_registry(service: str) -> CollectorRegistry:
    """A registry that says what runs here, and what the process takes of the machine (on Linux; without prefix)."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for every series, which nobody asked for
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info(registry, "build_info", "1, with what runs here", {"service": service, "version": version("diptych")})
    return registry


def metrics_response(registry: CollectorRegistry) -> Response:
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class Readout:
    """Exports figures that live elsewhere, read at scrape time: the code that counts needs no metrics library.

    A name ending in `_total` becomes a counter, any other a gauge.
    """

    def __init__(self, registry: CollectorRegistry, figures: dict[str, tuple[str, Callable[[], float]]]) -> None:
        """figures: name without prefix -> (help text, function that reads the value)"""
        self._figures = figures
        registry.register(self)

    def collect(self) -> list[Metric]:
        return [self._metric(name, text, read()) for name, (text, read) in self._figures.items()]

    @staticmethod
    def _metric(name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        return family(PREFIX + name, text, value=value)


class Info:
    """Facts that do not change, as labels of a gauge that is 1."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Mapping[str, str]) -> None:
        self._family = GaugeMetricFamily(PREFIX + name, text, labels=list(labels))
        self._family.add_metric(list(labels.values()), 1)
        registry.register(self)

    def collect(self) -> list[Metric]:
        return [self._family]


class Distribution:
    """A histogram for what happens with every token: counted by one thread, without a lock, read by any.

    buckets   upper bounds, ascending; what is above the last is counted, too
    """

    def __init__(self, registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name = PREFIX + name
        self._text = text
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> list[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        return [HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)]


class Collector(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class Aliases:
    """Offers metrics under a second name, for boards and autoscalers that know only an older one."""

    def __init__(self, registry: CollectorRegistry, older: Mapping[str, Collector]) -> None:
        self._older = older
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for name, metric in self._older.items():
            for family in metric.collect():
                renamed = Metric(
                    PREFIX + name,
                    f"Older name of {family.name}{TOTAL if family.type == 'counter' else ''}",
                    family.type,
                )
                start = len(family.name)
                renamed.samples = [s._replace(name=renamed.name + s.name[start:]) for s in family.samples]
                yield renamed


def watch_cache(registry: CollectorRegistry, cache: EmbeddingCache) -> None:
    """What one service's use of the embedding cache came to."""
    stats = cache.stats
    Readout(
        registry,
        {
            "embedding_cache_hits_total": ("Look-ups that found an entry", lambda: stats.hits),
            "embedding_cache_misses_total": ("Look-ups that did not", lambda: stats.misses),
            "embedding_cache_stores_total": ("Embeddings stored", lambda: stats.stores),
            "embedding_cache_corrupt_total": ("Entries found damaged", lambda: stats.corrupt),
            "embedding_cache_errors_total": ("Operations that failed", lambda: cache.num_errors),
            "embedding_cache_breaker_open": ("1 while Redis is not asked", lambda: float(cache.breaker_open)),
        },
    )


class _CertificateExpiry:
    """Read at scrape time, for certificates are renewed while services run. Without any there is no sample."""

    def __init__(self, identities: Sequence[Tls]) -> None:
        self._identities = identities

    def collect(self) -> list[Metric]:
        family = GaugeMetricFamily(
            f"{PREFIX}tls_certificate_expiry_timestamp_seconds",
            "When the first certificate that this service shows or trusts expires, in Unix time, by its use",
            labels=["use"],
        )
        for identity in self._identities:
            if identity.expires_at is not None:
                family.add_metric([identity.use], identity.expires_at.timestamp())
        return [family]


def watch_certificates(registry: CollectorRegistry, identities: Sequence[Tls]) -> None:
    registry.register(_CertificateExpiry(identities))


def counts_by_label(counter: Counter) -> dict[str, int]:
    """A counter's values by its only label; one without labels is called ""."""
    return {
        next(iter(sample.labels.values()), ""): int(sample.value)
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


class RecentTimes:
    """The last durations of something, for percentiles that follow the load within a minute."""

    def __init__(self, max_kept: int, *, max_age_s: float = 60.0) -> None:
        self._max_age_s = max_age_s
        self._kept: deque[tuple[float, float]] = deque(maxlen=max_kept)

    def add(self, seconds: float) -> None:
        self._kept.append((time.monotonic(), seconds))

    def percentiles(self, shares: Sequence[float] = (0.5, 0.95, 0.99)) -> list[float] | None:
        """None: nothing happened in the last minute."""
        oldest = time.monotonic() - self._max_age_s
        seconds = sorted(value for at, value in list(self._kept) if at >= oldest)
        if not seconds:
            return None
        return [seconds[min(len(seconds) - 1, int(share * len(seconds)))] for share in shares]
