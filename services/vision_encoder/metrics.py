"""What the vision encoder counts."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Histogram

from services.vision_encoder.admission import Queue
from services.vision_encoder.recent import RecentEmbeddings
from shared.embedding_cache import EmbeddingCache
from shared.metrics import PREFIX, STAGE_BUCKETS, Readout, service_registry, watch_cache


class EncoderMetrics:
    def __init__(self) -> None:
        self.registry = service_registry("vision_encoder")
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
        self.tower_seconds = Histogram(
            PREFIX + "encoder_tower_seconds",
            "One pass of the tower; its sum grows by a second a second while the tower is never idle",
            buckets=STAGE_BUCKETS,
            registry=self.registry,
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

    def watch(self, cache: EmbeddingCache, queue: Queue, recent: RecentEmbeddings, max_queued_images: int) -> None:
        watch_cache(self.registry, cache)
        Readout(
            self.registry,
            {
                "encoder_queued_images": ("Images taken on and not finished", lambda: float(queue.num_images)),
                "encoder_queued_bytes": (
                    "Encoded bytes of images taken on and not finished",
                    lambda: float(queue.num_bytes),
                ),
                "encoder_max_queued_images": (
                    "Images that may be taken on at once",
                    lambda: float(max_queued_images),
                ),
                "encoder_refused_images_total": ("Images refused because of a full queue", lambda: queue.num_refused),
                "encoder_recent_bytes": ("Finished embeddings kept in this process", lambda: recent.size_bytes),
            },
        )
