"""Brings the engine the image embeddings that it wants: one task a fetch, so that none waits for another."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from services.text_engine.embedding_fetcher import EmbeddingFetcher
from services.text_engine.engine import Engine
from services.text_engine.engine_thread import EngineThread
from services.text_engine.metrics import EngineMetrics
from services.text_engine.request_timeline import FetchLog
from shared.errors import DiptychError
from shared.log import get_logger
from shared.wire.images import ImageRef

log = get_logger(__name__)


class EmbeddingDelivery:
    """To be used on one event loop.

    fetches   hears when each fetch was, and where the embedding came from
    """

    def __init__(
        self, fetcher: EmbeddingFetcher, thread: EngineThread, fetches: FetchLog, metrics: EngineMetrics
    ) -> None:
        self._fetcher = fetcher
        self._thread = thread
        self._fetches = fetches
        self._metrics = metrics
        self._tasks: dict[asyncio.Task[None], str] = {}  # and the key of the image that each fetches

    def start(self, ref: ImageRef) -> None:
        """Fetch one embedding, and give the engine its rows or the reason why there are none."""
        task = asyncio.create_task(self._deliver(ref))
        self._tasks[task] = ref.image_key
        task.add_done_callback(self._tasks.pop)

    def stop(self, image_key: str) -> None:
        """Nobody needs that image any more: its encoder may drop it, too."""
        for task, key in self._tasks.items():
            if key == image_key:
                task.cancel()

    def cancel(self) -> None:
        """Give up what is still being fetched."""
        for task in self._tasks:
            task.cancel()

    async def _deliver(self, ref: ImageRef) -> None:
        started, source = time.monotonic(), None
        try:
            with self._fetches.fetching(ref.image_key) as fetch:
                rows, fetch.source = await self._fetcher.fetch(ref)
                source = fetch.source
        except DiptychError as error:
            log.warning("no embedding for an image", image_key=ref.image_key[:12], reason=error.message)
            self._thread.submit(partial(Engine.image_failed, ref=ref, error=error))
        except Exception as error:
            log.error("fetching an embedding failed", image_key=ref.image_key[:12], exc_info=error)
            reason = "the engine failed to fetch an image's embedding; the log has the details"
            self._thread.submit(partial(Engine.image_failed, ref=ref, error=DiptychError(reason)))
        else:
            self._thread.submit(partial(Engine.put_image, image_key=ref.image_key, rows=rows))
        finally:
            self._metrics.observe_fetch(source, time.monotonic() - started)
