"""Prometheus metrics: one registry per app, names under `diptych:`, so that two apps in one process never collide."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response

PREFIX = "diptych:"

# Seconds; from a cached look-up to a long answer, about three steps per decade.
STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


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
