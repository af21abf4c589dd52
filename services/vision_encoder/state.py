"""The encoder right now, for people who watch."""

from __future__ import annotations

from dataclasses import dataclass

from services.vision_encoder.admission import Queue
from services.vision_encoder.batcher import Batcher
from services.vision_encoder.families.interface import PreparedImage
from services.vision_encoder.metrics import EncoderMetrics
from services.vision_encoder.recent import RecentEmbeddings
from shared.embedding_cache import EmbeddingCache
from shared.errors import EncodeFailed
from shared.metrics import counts_by_label
from shared.state import EncoderState, TowerPass


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The parts to look at."""

    model: str
    max_queued_images: int
    queue: Queue
    batcher: Batcher[PreparedImage, bytes | EncodeFailed]
    recent: RecentEmbeddings
    cache: EmbeddingCache
    metrics: EncoderMetrics

    def state(self) -> EncoderState:
        return EncoderState(
            model=self.model,
            num_queued=self.queue.num_images,
            max_queued=self.max_queued_images,
            num_queued_bytes=self.queue.num_bytes,
            num_waiting_for_tower=self.batcher.num_waiting,
            busy_s=self.batcher.busy_s,
            tower_s=self.batcher.total_s,
            recent_bytes=self.recent.size_bytes,
            cache_is_up=self.cache.enabled and not self.cache.breaker_open,
            images=counts_by_label(self.metrics.images),
            passes=[
                TowerPass(number=one.number, num_images=one.num_items, seconds=one.seconds)
                for one in self.batcher.past_runs
            ],
        )
