"""What the text engine shows Prometheus: vLLM v1's names under our prefix, read from the engine between steps.

No label's value comes from a client: finish reasons, error codes and sources are short lists of ours.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.text_engine.build import BuiltEngine
from services.text_engine.core.batch import DraftMethod
from services.text_engine.core.scheduler import Scheduler
from services.text_engine.core.speculation.interface import DraftCounts
from services.text_engine.engine import Engine
from services.text_engine.engine_io import RequestFailed, RequestFinished, TokenOutput
from shared.embedding_cache import EmbeddingCache
from shared.errors import Overloaded
from shared.metrics import (
    PREFIX,
    STAGE_BUCKETS,
    Aliases,
    Distribution,
    Info,
    Readout,
    RecentTimes,
    service_registry,
    watch_cache,
)

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
TOKEN_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
STEP_TOKEN_BUCKETS = tuple(2.0**power for power in range(15))


class EngineMetrics:
    """One registry per app."""

    def __init__(self) -> None:
        self.registry = registry = service_registry("text_engine")

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(PREFIX + name, text, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = STAGE_BUCKETS) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self.running = gauge("num_requests_running", "Sequences that hold KV blocks")
        self.waiting = gauge("num_requests_waiting", "Sequences that wait for their first or next turn")
        self.awaiting_image = gauge(
            "num_requests_waiting_for_image", "Waiting sequences that cannot start before an image's embedding is here"
        )
        self.queue_wait = gauge("queue_wait_seconds", "Expected wait of a newcomer of priority 0, 0 where unknown")
        self.refused = counter("requests_refused", "Requests refused because the queue is as long as it may be")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use by running sequences, 0 to 1")
        self.kv_cached = gauge("kv_cache_cached_perc", "Share of KV blocks kept for a later prefix hit, 0 to 1")
        self.kv_waste = gauge("kv_cache_waste_perc", "Allocated but unused KV slots over allocated ones, 0 to 1")
        self.evictions = counter("kv_cache_evictions", "Cached KV blocks that gave way to new tokens")
        self.preemptions = counter("num_preemptions", "Sequences that gave up their blocks to others")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.drafts = counter("spec_decode_num_drafts", "Guesses at coming tokens that a step verified", "method")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens of such guesses", "method")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Those of them that held", "method")
        self.accepted_per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Those that held, by their place in the guess",
            "method",
            "position",
        )
        self.success = counter("request_success", "Finished choices", "finished_reason")
        self.failures = counter("request_failures", "Requests that ended with an error", "code")
        self.embeddings = counter("image_embeddings", "Embeddings fetched, by where they were found", "source")
        self.fetch_seconds = histogram("image_embedding_fetch_seconds", "One fetch of an image's embedding")
        self.step_seconds = histogram("step_seconds", "One engine step", STEP_BUCKETS)
        self.step_tokens = Distribution(
            registry, "iteration_tokens_total", "Tokens computed in one step", STEP_TOKEN_BUCKETS
        )
        self.first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token")
        self.between_tokens = Distribution(
            registry, "inter_token_latency_seconds", "Between two tokens of one choice", STEP_BUCKETS
        )
        self.per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean of one request's times between tokens", STEP_BUCKETS
        )
        self.latency = histogram("e2e_request_latency_seconds", "From a request's arrival to its last token")
        self.inference = histogram("request_inference_time_seconds", "First scheduled to last token")
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of one request", TOKEN_BUCKETS)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens of one request", TOKEN_BUCKETS
        )
        self.stages = {
            "queue": histogram("request_queue_time_seconds", "Until first scheduled"),
            "transfer": histogram("request_transfer_time_seconds", "Until the last image embedding was here"),
            "prefill": histogram("request_prefill_time_seconds", "First scheduled to first token"),
            "decode_tokens": histogram("request_decode_time_seconds", "First to last token"),
        }
        Aliases(
            registry,
            {
                "gpu_cache_usage_perc": self.kv_usage,
                "gpu_prefix_cache_queries": self.prefix_queries,
                "gpu_prefix_cache_hits": self.prefix_hits,
                "time_per_output_token_seconds": self.between_tokens,
            },
        )
        self.recent_first_token = RecentTimes(512)
        self.recent_between_tokens = RecentTimes(4096)
        self._num_steps = self._num_preemptions = self._num_evictions = 0

    def watch(self, built: BuiltEngine, cache: EmbeddingCache, *, max_num_seqs: int, prefix_caching: bool) -> None:
        """The engine is there: show what it holds, and what it was set to."""
        embeddings = built.engine.embeddings
        self._num_steps = built.engine.num_steps  # the warm-up's are nobody's
        watch_cache(self.registry, cache)
        Readout(
            self.registry,
            {
                "mm_cache_queries_total": ("Images that requests came with", lambda: embeddings.num_queries),
                "mm_cache_hits_total": ("Images whose embedding was in the engine", lambda: embeddings.num_hits),
                "mm_cache_idle_bytes": (
                    "Bytes of embeddings kept though no request needs them",
                    lambda: embeddings.num_idle_bytes,
                ),
                "max_num_seqs": ("Most sequences that run at once", lambda: float(max_num_seqs)),
            },
        )
        info = built.info
        labels = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_kv_blocks),
            "enable_prefix_caching": str(prefix_caching),
            "cache_dtype": info.dtype,
        }
        Info(self.registry, "cache_config_info", "1, with what the KV cache was set to", labels)
        labels = {"implementation": info.implementation}
        Info(self.registry, "model_info", "1, with whose code runs the model: native, or transformers' own", labels)

    def observe_step(self, engine: Engine, seconds: float | None) -> None:
        """In the engine's thread, after each step; None: no step, but the last request has gone."""
        scheduler = engine.scheduler
        pool = scheduler.blocks.pool
        if seconds is not None and engine.num_steps > self._num_steps:  # else nothing could run, or the step failed
            self.step_seconds.observe(seconds)
            self.step_tokens.observe(engine.past_steps[-1].num_tokens)
        self._num_steps = engine.num_steps
        self.running.set(len(scheduler.running))
        self.waiting.set(len(scheduler.waiting))
        self.queue_wait.set(engine.queue.wait_s(priority=0))
        self.awaiting_image.set(num_awaiting_image(scheduler))
        self.kv_usage.set(pool.num_referenced / pool.num_blocks)
        self.kv_cached.set(pool.num_cached / pool.num_blocks)
        self.kv_waste.set(kv_waste(scheduler))
        self.preemptions.inc(scheduler.num_preemptions - self._num_preemptions)
        self.evictions.inc(pool.num_evictions - self._num_evictions)
        self._num_preemptions, self._num_evictions = scheduler.num_preemptions, pool.num_evictions
        for method, counts in scheduler.take_draft_counts().items():
            self._observe_drafts(method, counts)

    def _observe_drafts(self, method: DraftMethod, counts: DraftCounts) -> None:
        self.drafts.labels(method).inc(counts.num_drafts)
        self.draft_tokens.labels(method).inc(counts.num_draft_tokens)
        self.accepted_tokens.labels(method).inc(counts.num_accepted_tokens)
        for position, num_accepted in enumerate(counts.num_accepted_per_position):
            self.accepted_per_position.labels(method, str(position)).inc(num_accepted)

    def observe_token(self, output: TokenOutput) -> None:
        """On the event loop, as are those below."""
        self.generation_tokens.inc(len(output.token_ids))
        if not output.is_first and output.waited_s == 0.0:
            pass  # drafted and accepted: it came with the token before it
        elif not output.is_first:
            self.between_tokens.observe(output.waited_s)
            self.recent_between_tokens.add(output.waited_s)
        elif output.index == 0:
            self.first_token.observe(output.waited_s)
            self.recent_first_token.add(output.waited_s)
        if output.finish is not None:
            self.success.labels(output.finish.reason).inc()

    def observe_finished(self, finished: RequestFinished) -> None:
        timings = finished.timings
        self.prompt_tokens.inc(finished.num_prompt_tokens)
        self.prefix_queries.inc(finished.num_prompt_tokens)
        self.prefix_hits.inc(finished.num_cached_tokens)
        self.request_prompt_tokens.observe(finished.num_prompt_tokens)
        self.request_generation_tokens.observe(finished.num_generated_tokens)
        for stage, seconds in timings.items():
            self.stages[stage].observe(seconds)
        inference_s = timings["prefill"] + timings["decode_tokens"]
        self.inference.observe(inference_s)
        self.latency.observe(timings["queue"] + inference_s)
        if finished.num_generated_tokens > 1:
            self.per_output_token.observe(timings["decode_tokens"] / (finished.num_generated_tokens - 1))

    def observe_failed(self, failed: RequestFailed) -> None:
        self.failures.labels(failed.error.code).inc()
        if isinstance(failed.error, Overloaded):
            self.refused.inc()

    def observe_fetch(self, source: str | None, seconds: float) -> None:
        """source   None: it was found nowhere"""
        self.embeddings.labels(source or "failed").inc()
        self.fetch_seconds.observe(seconds)


def num_awaiting_image(scheduler: Scheduler) -> int:
    return sum(sequence.awaited_image is not None for sequence in scheduler.waiting)


def kv_waste(scheduler: Scheduler) -> float:
    """Slots of referenced blocks that hold no token, over all slots of referenced blocks."""
    block_size = scheduler.blocks.block_size
    allocated = scheduler.blocks.pool.num_referenced * block_size
    unused = sum(len(s.block_table) * block_size - s.num_computed_tokens for s in scheduler.running)
    return unused / allocated if allocated else 0.0
