"""What the gateway counts: requests by route and outcome, times per stage, where images came from, replicas' health.

Labels are bounded: routes are templates, outcomes are codes of the error tree, stages are `shared.wire.common.Stage`,
keys are the names in the settings.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.gateway.balancer import Pool
from services.gateway.lifecycle import Lifecycle
from services.gateway.trace import Trace
from services.gateway.vision import Vision
from shared.metrics import PREFIX, STAGE_BUCKETS, RecentTimes
from shared.wire.encoder import EncoderInfo
from shared.wire.engine import ModelInfo

_NAME = f"{PREFIX}gateway_"


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            f"{_NAME}requests", "Requests answered.", ["route", "status", "outcome"], registry=registry
        )
        self._duration = Histogram(
            f"{_NAME}request_duration_seconds",
            "From the first byte of a request to the last of its answer.",
            ["route"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self._first_token = Histogram(
            f"{_NAME}time_to_first_token_seconds",
            "From the request to its first token.",
            ["route"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self._stages = Histogram(
            f"{_NAME}stage_seconds",
            "Time of a request in each stage, of whatever service.",
            ["stage"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )

        self._key_requests = Counter(
            f"{_NAME}key_requests", "Requests answered, by the API key's name.", ["key"], registry=registry
        )
        self._key_tokens = Counter(
            f"{_NAME}key_tokens",
            "Tokens of answered requests, by the API key's name; cached and image tokens are prompt tokens too.",
            ["key", "kind"],
            registry=registry,
        )

        self.recent_first_token = RecentTimes(512)
        self.outcomes: Tally[str] = Tally()  # of requests to the API

    def answered(self, route: str, status: int, trace: Trace) -> None:
        self._requests.labels(route, str(status), trace.outcome).inc()
        if route.startswith("/v1/"):
            self.outcomes[trace.outcome] += 1
        self._duration.labels(route).observe(trace.elapsed_s)
        if trace.first_token_s is not None:
            self._first_token.labels(route).observe(trace.first_token_s)
            self.recent_first_token.add(trace.first_token_s)
        for stage, seconds in trace.stages.items():
            self._stages.labels(stage).observe(seconds)
        if trace.is_counted and trace.key_name is not None:
            self._account(trace.key_name, trace)

    def _account(self, key: str, trace: Trace) -> None:
        self._key_requests.labels(key).inc()
        counts = {
            "prompt": trace.num_prompt_tokens,
            "image": trace.num_image_tokens,
            "cached": trace.num_cached_tokens,
            "generated": trace.num_generated_tokens,
        }
        for kind, count in counts.items():
            if count:
                self._key_tokens.labels(key, kind).inc(count)


class StateCollector:
    """Reads at scrape time what the gateway's parts know anyway."""

    def __init__(
        self,
        registry: CollectorRegistry,
        lifecycle: Lifecycle,
        engines: Pool[ModelInfo],
        encoders: Pool[EncoderInfo],
        vision: Vision,
    ) -> None:
        self._lifecycle = lifecycle
        self._engines = engines
        self._encoders = encoders
        self._vision = vision
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            f"{_NAME}requests_in_flight", "Requests being worked on.", value=self._lifecycle.num_in_flight
        )
        yield GaugeMetricFamily(
            f"{_NAME}encodes_in_flight", "Encodes being waited for.", value=self._vision.num_in_flight
        )
        images = CounterMetricFamily(f"{_NAME}images", "Images by where their reference came from.", labels=["source"])
        for source, count in self._vision.sources.items():
            images.add_metric([source], count)
        yield images
        yield CounterMetricFamily(
            f"{_NAME}requests_shed",
            "Refusals that were foreseen: the text engine had said that its queue is full, and was not asked again.",
            value=self._engines.num_shed,
        )
        queue_opens = GaugeMetricFamily(
            f"{_NAME}replica_room_in_seconds",
            "Until a text engine would queue a request of priority 0, as it said last; 0: at once.",
            labels=["replica"],
        )
        for engine in self._engines.replicas:
            queue_opens.add_metric([engine.url], self._engines.queue_opens_in_s([engine], 0))
        yield queue_opens
        ready = GaugeMetricFamily(f"{_NAME}replica_ready", "1 if ready.", labels=["service", "replica"])
        outstanding = GaugeMetricFamily(
            f"{_NAME}replica_outstanding", "Requests of this gateway at a replica.", labels=["service", "replica"]
        )
        known = GaugeMetricFamily(f"{_NAME}replicas_known", "Replicas that this gateway has found.", labels=["service"])
        num_ready = GaugeMetricFamily(f"{_NAME}replicas_ready", "Replicas that are ready.", labels=["service"])
        waiting = GaugeMetricFamily(
            f"{_NAME}requests_waiting_for_replica", "Requests held while no replica is ready.", labels=["service"]
        )
        for service, pool in (("text_engine", self._engines), ("vision_encoder", self._encoders)):
            known.add_metric([service], len(pool.replicas))
            num_ready.add_metric([service], sum(replica.ready for replica in pool.replicas))
            waiting.add_metric([service], pool.num_waiting)
            for replica in pool.replicas:
                ready.add_metric([service, replica.url], float(replica.ready))
                outstanding.add_metric([service, replica.url], replica.outstanding)
        yield known
        yield num_ready
        yield waiting
        yield ready
        yield outstanding
