"""What the text engine shows Prometheus: vLLM v1's names under our prefix, read from the engine between steps."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.text_engine.core.scheduler import Scheduler
from services.text_engine.engine import RequestFinished
from shared.metrics import PREFIX, STAGE_BUCKETS

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class EngineMetrics:
    """One registry per app."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(PREFIX + name, text, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(PREFIX + name, text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = STAGE_BUCKETS) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self.running = gauge("num_requests_running", "Sequences that hold KV blocks")
        self.waiting = gauge("num_requests_waiting", "Sequences that wait for their first or next turn")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use by running sequences, 0 to 1")
        self.kv_cached = gauge("kv_cache_cached_perc", "Share of KV blocks kept for a later prefix hit, 0 to 1")
        self.kv_waste = gauge("kv_cache_waste_perc", "Allocated but unused KV slots over allocated ones, 0 to 1")
        self.preemptions = gauge("num_preemptions_total", "Sequences preempted since start")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self.generation_tokens = counter("generation_tokens", "Generated tokens of finished requests")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.success = Counter(PREFIX + "request_success", "Finished requests", ["finished_reason"], registry=registry)
        self.step_seconds = histogram("step_seconds", "One engine step", STEP_BUCKETS)
        self.stages = {
            "queue": histogram("request_queue_time_seconds", "Until first scheduled"),
            "transfer": histogram("request_transfer_time_seconds", "Until the last image embedding was here"),
            "prefill": histogram("request_prefill_time_seconds", "First scheduled to first token"),
            "decode_tokens": histogram("request_decode_time_seconds", "First to last token"),
        }

    def observe_step(self, scheduler: Scheduler, seconds: float | None) -> None:
        """In the engine's thread, after each step; None: no step, but the last request has gone."""
        pool = scheduler.blocks.pool
        if seconds is not None:
            self.step_seconds.observe(seconds)
        self.running.set(len(scheduler.running))
        self.waiting.set(len(scheduler.waiting))
        self.kv_usage.set(pool.num_referenced / pool.num_blocks)
        self.kv_cached.set(pool.num_cached / pool.num_blocks)
        self.kv_waste.set(kv_waste(scheduler))
        self.preemptions.set(scheduler.num_preemptions)

    def observe_finished(self, finished: RequestFinished) -> None:
        self.prompt_tokens.inc(finished.num_prompt_tokens)
        self.generation_tokens.inc(finished.num_generated_tokens)
        self.prefix_queries.inc(finished.num_prompt_tokens)
        self.prefix_hits.inc(finished.num_cached_tokens)
        for stage, seconds in finished.timings.items():
            self.stages[stage].observe(seconds)


def kv_waste(scheduler: Scheduler) -> float:
    """Slots of referenced blocks that hold no token, over all slots of referenced blocks."""
    block_size = scheduler.blocks.block_size
    allocated = scheduler.blocks.pool.num_referenced * block_size
    unused = sum(len(s.block_table) * block_size - s.num_computed_tokens for s in scheduler.running)
    return unused / allocated if allocated else 0.0
