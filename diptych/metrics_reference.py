"""The reference of all metrics, docs/metrics.md, made from the services' own registries.

python -m diptych.metrics_reference            write it again
python -m diptych.metrics_reference --check    only say whether it is true
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from services.gateway.balancer import Pool
from services.gateway.lifecycle import Lifecycle
from services.gateway.metrics import GatewayMetrics, StateCollector
from services.text_engine.metrics import EngineMetrics
from services.vision_encoder.admission import Queue
from services.vision_encoder.metrics import EncoderMetrics
from services.vision_encoder.recent import RecentEmbeddings
from shared.embedding_cache import EmbeddingCache
from shared.metrics import PREFIX, service_registry, watch_cache, watch_certificates

FILE: Final = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
INTRODUCTION: Final = """\
# Metrics

Every metric of every service, as `GET /metrics` of its port shows it to Prometheus. The text engine has the names of
vLLM v1 with `diptych:` in place of `vllm:`, and some older ones beside them: boards and autoscalers made for vLLM need
one replacement. What else there is to see with, and alerts on these figures: [observability](observability.md).

* A counter's name ends in `_total`; a histogram `x` has `x_bucket`, `x_sum` and `x_count`. Times are in seconds.
* No label's value comes from a client: routes are templates, outcomes and codes those of the [API](api.md)'s errors,
  keys are the names in the settings, replicas the addresses in the settings or behind their DNS names.
* Every service also shows what its process takes of the machine: `process_cpu_seconds_total`, `process_open_fds`,
  `process_resident_memory_bytes`, `process_start_time_seconds`.

Worth knowing: `encoder_tower_seconds_sum` grows by one a second while the tower never rests, so its rate is the
encoder's load. `kv_cache_usage_perc` counts blocks of running sequences only; cached blocks are free for the taking.
`num_requests_waiting_for_image` tells a queue that waits for the vision panel from one that waits for this one.

This page is made from the code by `python -m diptych.metrics_reference`; a test keeps it true.
"""


class Row(NamedTuple):
    name: str
    type: str
    labels: tuple[str, ...]
    text: str


def catalogue() -> dict[str, list[Row]]:
    """Every metric by service, in the order of its name."""
    return {service: sorted(_rows(registry)) for service, registry in _registries().items()}


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for service, rows in catalogue().items():
        parts.append(f"\n## {service}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n")
        parts += [f"| `{row.name}` | {row.type} | {', '.join(row.labels)} | {row.text} |\n" for row in rows]
    return "".join(parts)


def _registries() -> dict[str, CollectorRegistry]:
    """Registries as the services fill them; nothing is started, and what is read at scrape time is empty."""
    cache = EmbeddingCache(None)
    gateway = service_registry("gateway")
    GatewayMetrics(gateway)
    lifecycle = Lifecycle(drain_delay_s=0, drain_timeout_s=1)
    pool: Pool[Any] = Pool(time.monotonic, random.Random(0))  # noqa: S311 - chooses nothing here
    StateCollector(gateway, lifecycle, pool, pool, _stand_in(num_in_flight=0, sources={}))
    watch_cache(gateway, cache)
    identity: Any = _stand_in(use="services", expires_at=datetime.now(UTC))
    watch_certificates(gateway, [identity])
    encoder = EncoderMetrics()
    watch_certificates(encoder.registry, [identity])
    encoder.watch(cache, Queue(max_images=1, max_bytes=1), RecentEmbeddings(0), 1)
    engine = EngineMetrics()
    watch_certificates(engine.registry, [identity])
    embeddings = SimpleNamespace(num_queries=0, num_hits=0, num_idle_bytes=0)
    info = SimpleNamespace(block_size=16, num_kv_blocks=1, dtype="float32", implementation="native")
    built = _stand_in(engine=SimpleNamespace(embeddings=embeddings, num_steps=0), info=info)
    engine.watch(built, cache, max_num_seqs=1, prefix_caching=True)
    return {"gateway": gateway, "vision encoder": encoder.registry, "text engine": engine.registry}


def _stand_in(**facts: Any) -> Any:
    """In place of a part of which only these figures are read."""
    return SimpleNamespace(**facts)


def _rows(registry: CollectorRegistry) -> Iterator[Row]:
    for collector in list(registry._collector_to_names):
        own_labels: Iterable[str] = getattr(collector, "_labelnames", ())
        for family in collector.collect():
            if family.name.startswith(PREFIX):
                yield _row(family, tuple(own_labels))


def _row(family: Metric, own_labels: tuple[str, ...]) -> Row:
    labels = own_labels or tuple(getattr(family, "_labelnames", ())) or tuple(family.samples[0].labels)
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Row(name, family.type, tuple(label for label in labels if label != "le"), family.documentation.rstrip("."))


def main() -> int:
    if "--check" in sys.argv:
        return 0 if FILE.read_text() == reference() else 1
    FILE.write_text(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
