"""Puts the gateway together and runs it. Everything is built in the app's lifespan and closed with it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.admin import admin_routes
from services.gateway.assets import Assets
from services.gateway.auth import Keyring
from services.gateway.backends import EncoderClient, EngineClient
from services.gateway.balancer import Pool
from services.gateway.cache_salts import CacheSalts
from services.gateway.chat import Chat
from services.gateway.chosen_ids import ChosenIds
from services.gateway.completions import Completions
from services.gateway.config import GatewaySettings
from services.gateway.counting import Counting
from services.gateway.discovery import Discovery
from services.gateway.fetch import ImageFetcher
from services.gateway.file_store import FileStore
from services.gateway.files import FileLimits, Files
from services.gateway.generation import Generator
from services.gateway.images import ImageLoader
from services.gateway.key_limits import KeyLimits
from services.gateway.lifecycle import Lifecycle
from services.gateway.metrics import GatewayMetrics, StateCollector
from services.gateway.middleware import RequestScope, trace_of
from services.gateway.net_guard import HostResolver, NetGuard
from services.gateway.openapi import document
from services.gateway.page import page_routes
from services.gateway.responses import Responses
from services.gateway.routes import Handlers, api_routes, document_routes, file_routes, model_routes, operator_routes
from services.gateway.status import ControlRoom, gateway_state, status_routes
from services.gateway.vision import Vision
from shared.client_certificate import RequireClientCertificate
from shared.embedding_cache import EmbeddingCache
from shared.errors import DiptychError
from shared.http_errors import error_response, install_error_handlers
from shared.log import configure_logging
from shared.metrics import service_registry, watch_cache, watch_certificates
from shared.peer_names import PeerNames
from shared.redis_link import RedisLink
from shared.server import serve
from shared.service_client import ServiceClient
from shared.tls import Tls
from shared.tracing import tracing
from shared.wire.encoder import EncoderInfo
from shared.wire.engine import ModelInfo

if TYPE_CHECKING:
    from shared.otel import Otel

FILE_TIMEOUT_S = 2.0  # to write a file to Redis or read it: a picture of 20 MB takes 0.2 s at 1 Gbit/s


def create_app(settings: GatewaySettings, lifecycle: Lifecycle | None = None) -> FastAPI:
    """lifecycle   kept by the caller, to tell it when to drain; None: it never drains

    What it has to be served with is in its state: `tls_context`, None for plain HTTP, and the `identities` to refresh.
    """
    lifecycle = lifecycle or new_lifecycle(settings)
    registry = service_registry("gateway")
    metrics = GatewayMetrics(registry)
    tracer = tracing("gateway")
    services_tls, front_tls = app_tls = _identities(settings)
    watch_certificates(registry, app_tls)
    limits = KeyLimits(max_per_minute=settings.max_requests_per_minute, max_running=settings.max_running_requests)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if tracer is not None:
                stack.push_async_callback(asyncio.to_thread, tracer.close)
            await _build(app, settings, services_tls, lifecycle, limits, registry, metrics, tracer, stack)
            yield

    # FastAPI's own document would not be true: bodies are read by hand, for their size limit and strict JSON.
    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.identities, app.state.tls_context = app_tls, front_tls.server_context()
    if settings.front_client_ca_file is not None:
        app.add_middleware(RequireClientCertificate)
    app.add_middleware(RequestScope, lifecycle=lifecycle, limits=limits, metrics=metrics)
    if tracer is not None:
        app.add_middleware(tracer.middleware)
    install_error_handlers(app)
    app.add_exception_handler(DiptychError, _on_error)
    return app


def _identities(settings: GatewaySettings) -> tuple[Tls, Tls]:
    """What other services know this gateway by, and what its own clients do."""
    services = Tls(
        "services",
        cert_file=settings.tls_cert_file,
        key_file=settings.tls_key_file,
        ca_file=settings.tls_ca_file,
    )
    front = Tls(
        "front",
        cert_file=settings.front_cert_file,
        key_file=settings.front_key_file,
        ca_file=settings.front_client_ca_file,
    )
    return services, front


def new_lifecycle(settings: GatewaySettings) -> Lifecycle:
    return Lifecycle(drain_delay_s=settings.drain_delay_s, drain_timeout_s=settings.drain_timeout_s)


async def _build(
    app: FastAPI,
    settings: GatewaySettings,
    tls: Tls,
    lifecycle: Lifecycle,
    limits: KeyLimits,
    registry: CollectorRegistry,
    metrics: GatewayMetrics,
    tracer: Otel | None,
    stack: AsyncExitStack,
) -> None:
    names = PeerNames(settings.tls_server_name)
    http = await stack.enter_async_context(
        ServiceClient(
            tls=tls,
            names=names,
            tokens=settings.service_token,
            timeout=httpx.Timeout(settings.idle_timeout_s, connect=settings.connect_timeout_s),
        )
    )
    if tracer is not None:
        http.event_hooks["request"].append(tracer.hand_on)
    rng = random.Random()  # noqa: S311 - spreads load, guards nothing
    by_turns, wait_s = settings.routing == "round_robin", settings.replica_wait_s
    engines: Pool[ModelInfo] = Pool(time.monotonic, rng, by_turns=by_turns, wait_s=wait_s)
    encoders: Pool[EncoderInfo] = Pool(time.monotonic, rng, wait_s=wait_s)
    await _watch(settings, http, names, engines, encoders, stack)

    cache = EmbeddingCache(settings.redis_url, tls=tls)
    stack.push_async_callback(cache.close)
    encoder_client = EncoderClient(
        http, admit_timeout_s=settings.admit_timeout_s, encode_timeout_s=settings.encode_timeout_s
    )
    vision = Vision(encoders, encoder_client, cache, known_images=settings.known_images)
    stack.push_async_callback(vision.close)

    store = FileStore(
        RedisLink(settings.redis_url, op_timeout_s=FILE_TIMEOUT_S, subject="file store", tls=tls),
        max_memory_bytes=settings.max_file_memory_bytes,
        max_bytes_per_owner=settings.file_quota_bytes,
    )
    stack.push_async_callback(store.close)
    chosen_ids = ChosenIds(store, ttl_s=settings.file_ttl_s)
    loader = ImageLoader(_fetcher(settings, stack), store, chosen_ids, max_images=settings.max_images_per_request)
    engine_client = EngineClient(http, start_timeout_s=settings.start_timeout_s)
    generator = Generator(engines, engine_client)
    salts = CacheSalts(by_key=settings.salt_cache_by_key)
    chat = Chat(generator, vision, loader, salts, max_image_bytes=settings.max_image_bytes)

    StateCollector(registry, lifecycle, engines, encoders, vision)
    watch_cache(registry, cache)
    keyring = Keyring(settings.api_keys)
    handlers = Handlers(chat, Completions(generator, salts), Responses(chat), Counting(generator, vision, chat))
    app.include_router(api_routes(handlers, keyring, limits, lifecycle, settings.max_body_bytes))
    app.include_router(file_routes(Files(store, _file_limits(settings)), store, keyring, limits))
    app.include_router(model_routes(generator, keyring))
    app.include_router(operator_routes(engines, encoders, lifecycle, registry))
    admins = Keyring(settings.admin_keys, "admin key (one of DIPTYCH_GATEWAY_ADMIN_KEYS)")
    app.include_router(admin_routes(engines, engine_client, lifecycle, admins if settings.admin_keys else None))
    assets = Assets()
    app.include_router(page_routes(assets, settings.samples_dir, has_status=settings.status_page))
    if settings.status_page:
        itself = partial(gateway_state, metrics, lifecycle, vision, cache)
        room = ControlRoom(engines, encoders, http, gateway=itself, interval_s=settings.status_interval_s)
        app.include_router(status_routes(room, assets, keyring))
    app.include_router(document_routes(document(app.routes, version("diptych"))))


def _file_limits(settings: GatewaySettings) -> FileLimits:
    return FileLimits(max_bytes=settings.max_image_bytes, ttl_s=settings.file_ttl_s, max_ttl_s=settings.max_file_ttl_s)


async def _watch(
    settings: GatewaySettings,
    http: httpx.AsyncClient,
    names: PeerNames,
    engines: Pool[ModelInfo],
    encoders: Pool[EncoderInfo],
    stack: AsyncExitStack,
) -> None:
    intervals = {
        "probe_interval_s": settings.probe_interval_s,
        "probe_timeout_s": settings.probe_timeout_s,
        "resolve_interval_s": settings.resolve_interval_s,
    }
    engine_watch = Discovery(
        service="text_engine",
        addresses=settings.text_engines,
        pool=engines,
        info_path="/v1/model",
        info_type=ModelInfo,
        http=http,
        names=names,
        **intervals,
    )
    encoder_watch = Discovery(
        service="vision_encoder",
        addresses=settings.vision_encoders,
        pool=encoders,
        info_path="/v1/info",
        info_type=EncoderInfo,
        http=http,
        names=names,
        **intervals,
    )
    stack.push_async_callback(engine_watch.close)
    stack.push_async_callback(encoder_watch.close)
    await asyncio.gather(engine_watch.start(), encoder_watch.start())


def _fetcher(settings: GatewaySettings, stack: AsyncExitStack) -> ImageFetcher:
    resolver = HostResolver()
    stack.callback(resolver.close)
    guard = NetGuard(
        resolver,
        allow_private_addresses=settings.allow_private_addresses,
        allowed_hosts=settings.allowed_hosts,
        denied_hosts=settings.denied_hosts,
        only_hosts=settings.only_hosts,
    )
    fetcher = ImageFetcher(
        guard,
        timeout_s=settings.fetch_timeout_s,
        max_redirects=settings.max_redirects,
        max_fetches_per_host=settings.max_fetches_per_host,
        max_cached_bytes=settings.max_fetch_cache_bytes,
        ssl_context=httpx.create_ssl_context(),
    )
    stack.push_async_callback(fetcher.close)
    return fetcher


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DiptychError)
    trace_of(request).failed(error)
    response = error_response(error)
    if "expect" in request.headers:
        # The client may skip the body it asked leave for; what it sends next must not be taken for that body.
        response.headers["Connection"] = "close"
    return response


# --- the process ----------------------------------------------------------------------------------------------------


def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT, and while it leaves: clients have nowhere else to go, so they get a 503."""
    configure_logging("gateway", settings.log_level, settings.log_format)
    lifecycle = new_lifecycle(settings)
    app = create_app(settings, lifecycle)
    serve(
        app,
        host=settings.host,
        port=settings.port,
        drain_timeout_s=settings.drain_timeout_s,
        on_drain=lifecycle.drain,
        may_exit=lifecycle.may_exit,
        tls_context=app.state.tls_context,
        identities=app.state.identities,
    )
