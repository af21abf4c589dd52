"""VisionEncoderService: the encoder and its life: loading, ready, draining, closed. Knows no HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

import torch
from PIL import Image

from services.vision_encoder.admission import ImageLimits, Queue
from services.vision_encoder.batcher import Batcher
from services.vision_encoder.config import VisionEncoderSettings
from services.vision_encoder.decode_pool import DecodePool
from services.vision_encoder.decode_worker import WorkerConfig
from services.vision_encoder.encoder import Encoder, Reading, Tower
from services.vision_encoder.families.interface import Family, PreparedImage
from services.vision_encoder.families.registry import load_family
from services.vision_encoder.loading import full_fingerprint, prepare_family
from services.vision_encoder.metrics import EncoderMetrics
from services.vision_encoder.recent import RecentEmbeddings
from services.vision_encoder.state import Watched
from shared.cuda_capture import CudaCapture
from shared.device import choose_device, choose_dtype
from shared.embedding_cache import EmbeddingCache
from shared.errors import EncodeFailed, NotReady
from shared.image_header import SUPPORTED_FORMATS
from shared.log import get_logger
from shared.metrics import watch_certificates
from shared.state import EncoderState
from shared.tls import Tls
from shared.torch_io import dtype_name
from shared.torch_threads import compute_alone_elsewhere, compute_with
from shared.wire.encoder import EncoderInfo
from shared.wire.images import Detail

log = get_logger(__name__)

LOOK_INTERVAL_S = 1.0  # how often a stalled tower is looked for
GPU_BATCH_SIZE = 8
CPU_BATCH_ROWS = 256


class VisionEncoderService:
    """Create it on the event loop that serves requests; `start` loads the model in the background."""

    def __init__(self, settings: VisionEncoderSettings, tls: Tls | None = None) -> None:
        """tls   how it reaches a Redis that speaks TLS; None: by the public authorities"""
        self.settings = settings
        self._tls = tls or Tls("services")
        self.metrics = EncoderMetrics()
        watch_certificates(self.metrics.registry, (self._tls,))
        self.load_error: Exception | None = None
        self.is_draining = False
        self._resources = AsyncExitStack()
        self._loaded: tuple[Encoder, EncoderInfo, Watched] | None = None

    async def start(self) -> None:
        """Returns when the first image can be encoded at full speed."""
        try:
            self._loaded = await self._resources.enter_async_context(_open(self.settings, self.metrics, self._tls))
        except Exception as error:
            self.load_error = error
            raise
        watch = asyncio.create_task(self._watch_tower())
        self._resources.callback(watch.cancel)

    async def _watch_tower(self) -> None:
        """A pass that does not end leaves its pictures, and all behind it, to whoever else can encode them."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if (stall := self._stall()) is not None and self.encoder.num_flights:
                log.error("a pass of the tower does not end; its pictures are left to other encoders", reason=stall)
                await self.encoder.call_off(NotReady(stall, retry_after_s=2.0))

    async def close(self) -> None:
        await self._resources.aclose()

    @property
    def encoder(self) -> Encoder:
        return self._ready()[0]

    @property
    def info(self) -> EncoderInfo:
        return self._ready()[1]

    def state(self) -> EncoderState:
        return self._ready()[2].state()

    def why_not_ready(self) -> str | None:
        """None if new images are welcome."""
        if self.load_error is not None:
            return f"the model could not be loaded: {self.load_error}"
        if self._loaded is None:
            return "the model is still loading"
        if self.is_draining:
            return "this vision encoder is shutting down"
        return self._stall()

    def _stall(self) -> str | None:
        busy_s = self.encoder.busy_s
        is_stalled = busy_s > self.settings.stall_timeout_s
        return f"one pass of the tower has been running for {busy_s:.0f} s" if is_stalled else None

    def refuse_new_work(self) -> None:
        """Raises NotReady unless new images are welcome. Embeddings that exist are served even while draining."""
        reason = self.why_not_ready()
        if reason is not None:
            raise NotReady(reason, retry_after_s=2.0)

    def _ready(self) -> tuple[Encoder, EncoderInfo, Watched]:
        if self._loaded is None:
            raise NotReady(self.why_not_ready() or "the model is still loading", retry_after_s=2.0)
        return self._loaded


@asynccontextmanager
async def _open(
    settings: VisionEncoderSettings, metrics: EncoderMetrics, tls: Tls
) -> AsyncIterator[tuple[Encoder, EncoderInfo, Watched]]:
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    thread = ThreadPoolExecutor(
        1, thread_name_prefix="tower", initializer=compute_with, initargs=(settings.tower_threads,)
    )
    loop = asyncio.get_running_loop()
    family = await loop.run_in_executor(thread, load_family, settings.model)
    compute_alone_elsewhere()
    await loop.run_in_executor(thread, prepare_family, family, settings.quantization, device, dtype)
    if device.type == "cuda" and not settings.enforce_eager:
        await loop.run_in_executor(thread, _record_graphs, family, device)
    families: dict[Detail, Family] = {"high": family, "low": family.low_detail or family}
    readings = {detail: Reading(each, full_fingerprint(each, dtype, settings)) for detail, each in families.items()}
    max_batch_size = settings.max_batch_size or _good_batch_size(family, device)
    async with AsyncExitStack() as stack:
        pool = await _open_pool(stack, settings, families)
        tower = Tower(families, metrics, settings.embedding_storage)
        batcher = _open_batcher(stack, max_batch_size, tower, thread)
        await _warm_up(batcher, family)
        cache = EmbeddingCache(
            settings.redis_url, ttl_s=settings.embedding_ttl_s, op_timeout_s=settings.redis_timeout_s, tls=tls
        )
        stack.push_async_callback(cache.close)
        queue = Queue(max_images=settings.max_queued_images, max_bytes=settings.max_queued_bytes)
        recent = RecentEmbeddings(settings.max_recent_bytes)
        metrics.watch(cache, queue, recent, settings.max_queued_images)
        limits = ImageLimits(
            max_bytes=settings.max_image_bytes,
            max_pixels=settings.max_image_pixels,
            max_aspect_ratio=settings.max_aspect_ratio,
        )
        encoder = Encoder(
            readings=readings,
            dtype=dtype,
            storage=settings.embedding_storage,
            limits=limits,
            queue=queue,
            pool=pool,
            batcher=batcher,
            cache=cache,
            recent=recent,
            metrics=metrics,
            replica_name=f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}",
            public_url=settings.public_url,
            accepts_embeddings=settings.accept_embeddings,
        )
        stack.push_async_callback(encoder.close)
        info = EncoderInfo(
            model=settings.model_name,
            fingerprint=encoder.fingerprint,
            low_detail_fingerprint=None if families["low"] is family else readings["low"].fingerprint,
            reads_several_in_low_detail=family.reads_several_in_low_detail,
            accepts_embeddings=settings.accept_embeddings,
            dtype=dtype_name(dtype),
            hidden_size=family.hidden_size,
            num_row_parts=family.num_row_parts,
            max_image_bytes=limits.max_bytes,
            max_image_pixels=limits.max_pixels,
            supported_formats=list(SUPPORTED_FORMATS),
        )
        _log_start(settings, info, device, family, max_batch_size)
        watched = Watched(
            model=settings.model_name,
            max_queued_images=settings.max_queued_images,
            queue=queue,
            batcher=batcher,
            recent=recent,
            cache=cache,
            metrics=metrics,
        )
        yield encoder, info, watched


def _record_graphs(family: Family, device: torch.device) -> None:
    started, free_before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
    family.record_graphs(CudaCapture(device))
    mib = (free_before - torch.cuda.mem_get_info(device)[0]) >> 20
    log.info("CUDA graphs of the tower captured", seconds=round(time.monotonic() - started, 1), mib=mib)


async def _open_pool(
    stack: AsyncExitStack, settings: VisionEncoderSettings, families: Mapping[Detail, Family]
) -> DecodePool:
    preprocessing = {detail: family.preprocessing for detail, family in families.items()}
    config = WorkerConfig(preprocessing, settings.background_colour, settings.max_image_pixels)
    pool = DecodePool(config, num_workers=settings.decode_workers, timeout_s=settings.decode_timeout_s)
    stack.push_async_callback(pool.close)
    await pool.start()
    return pool


def _open_batcher(
    stack: AsyncExitStack,
    max_batch_size: int,
    tower: Tower,
    thread: ThreadPoolExecutor,
) -> Batcher[PreparedImage, bytes | EncodeFailed]:
    batcher: Batcher[PreparedImage, bytes | EncodeFailed] = Batcher(tower, max_batch_size=max_batch_size, thread=thread)
    stack.push_async_callback(batcher.close)
    return batcher


async def _warm_up(batcher: Batcher[PreparedImage, bytes | EncodeFailed], family: Family) -> None:
    """The first pass compiles and lays out; no request should wait for that. It also proves that the model runs."""
    log.info("warming up: one picture, so that no request waits for what only the first one needs")
    height, width = family.preprocessing.size
    pixels = family.preprocessing.apply(Image.new("RGB", (width, height), (127, 127, 127)))
    result = await batcher.submit(PreparedImage(torch.from_numpy(pixels), width, height), None)
    if isinstance(result.value, EncodeFailed):
        raise result.value


def _good_batch_size(family: Family, device: torch.device) -> int:
    """A GPU wants large batches. A CPU has no use for more rows than keep it busy, and its caches hold about as many:
    a ViT-B/16 takes 46 ms an image alone and 62 ms in a batch of 8, and alone its first answer comes sooner.
    """
    if device.type != "cpu":
        return GPU_BATCH_SIZE
    height, width = family.preprocessing.size
    return max(1, min(GPU_BATCH_SIZE, CPU_BATCH_ROWS // family.describe(width, height).num_tokens))


def _log_start(
    settings: VisionEncoderSettings, info: EncoderInfo, device: torch.device, family: Family, max_batch_size: int
) -> None:
    height, width = family.preprocessing.size
    log.info(
        "the vision encoder is ready",
        model=info.model,
        fingerprint=info.fingerprint[:12],
        device=str(device),
        dtype=info.dtype,
        quantization=settings.quantization,
        tower_input=f"{width}x{height}",
        hidden_size=info.hidden_size,
        tower_threads=settings.tower_threads,
        decode_workers=settings.decode_workers,
        max_batch_size=max_batch_size,
        max_image_bytes=info.max_image_bytes,
        max_image_pixels=info.max_image_pixels,
        redis="yes" if settings.redis_url else "no",
    )
