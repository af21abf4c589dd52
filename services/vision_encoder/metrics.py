"""What the vision encoder counts."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.vision_encoder.admission import Queue
from shared.embedding_cache import EmbeddingCache
from shared.metrics import PREFIX, STAGE_BUCKETS, Readout


class EncoderMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.images = Counter(
            PREFIX + "encoder_images",
            "Images by outcome: encoded here, joined (an encode under way), recent (kept in this process), "
            "shared (another replica's), failed, cancelled",
            ["outcome"],
            registry=self.registry,
        )
        self.tower_passes = Counter(
            PREFIX + "encoder_tower_passes", "Batches that went through the tower", registry=self.registry
        )
        self.batch_size = Histogram(
            PREFIX + "encoder_batch_size",
            "Images per pass of the tower",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self._stage_seconds = Histogram(
            PREFIX + "encoder_stage_seconds",
            "Time of one image per stage: queue, decode, preprocess, encode, store",
            ["stage"],
            buckets=STAGE_BUCKETS,
            registry=self.registry,
        )

    def observe_stages(self, timings: Mapping[str, float]) -> None:
        for stage, seconds in timings.items():
            self._stage_seconds.labels(stage).observe(seconds)

    def watch(self, cache: EmbeddingCache, queue: Queue) -> None:
        stats = cache.stats
        Readout(
            self.registry,
            {
                "encoder_queued_images": ("Images taken on and not finished", lambda: float(queue.num_images)),
                "encoder_queued_bytes": ("Encoded bytes of those images", lambda: float(queue.num_bytes)),
                "embedding_cache_hits_total": ("Look-ups that found an entry", lambda: stats.hits),
                "embedding_cache_misses_total": ("Look-ups that did not", lambda: stats.misses),
                "embedding_cache_stores_total": ("Embeddings stored", lambda: stats.stores),
                "embedding_cache_corrupt_total": ("Entries found damaged", lambda: stats.corrupt),
                "embedding_cache_errors_total": ("Operations that failed", lambda: cache.num_errors),
                "embedding_cache_breaker_open": ("1 while Redis is not asked", lambda: float(cache.breaker_open)),
            },
        )
