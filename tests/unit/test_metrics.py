"""The parts that metrics are made of, and the page that lists them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from diptych.metrics_reference import FILE, catalogue, reference
from shared.metrics import PREFIX, Aliases, Distribution, RecentTimes, counts_by_label

BOUNDS = (0.5, 1.0, 2.0, 8.0)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(BOUNDS))))
def test_a_distribution_counts_as_prometheus_own_histogram_does(values: list[float]):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    distribution = Distribution(ours, "x", "text", BOUNDS)
    histogram = Histogram(f"{PREFIX}x", "text", buckets=BOUNDS, registry=theirs)
    for value in values:
        distribution.observe(value)
        histogram.observe(value)
    assert samples(ours) == pytest.approx(samples(theirs))


def test_an_older_name_shows_the_same_figures_of_every_type():
    registry = CollectorRegistry()
    gauge = Gauge(f"{PREFIX}new_gauge", "text", registry=registry)
    counter = Counter(f"{PREFIX}new_counter", "text", ["kind"], registry=registry)
    distribution = Distribution(registry, "new_times", "text", BOUNDS)
    Aliases(registry, {"old_gauge": gauge, "old_counter": counter, "old_times": distribution})
    gauge.set(3)
    counter.labels("a").inc(2)
    distribution.observe(1.5)
    found = samples(registry)
    for name in ("gauge", "counter_total", "times_sum", "times_count"):
        assert found[f"{PREFIX}old_{name}", ""] == found[f"{PREFIX}new_{name}", ""] > 0
    assert found[f"{PREFIX}old_times_bucket", "2.0"] == 1


def test_counts_by_label_are_whole_numbers_by_the_labels_value():
    counter = Counter("images", "text", ["source"], registry=CollectorRegistry())
    counter.labels("redis").inc()
    counter.labels("encoder").inc(2)
    assert counts_by_label(counter) == {"redis": 1, "encoder": 2}


def test_percentiles_are_of_what_was_kept_and_none_without_anything():
    times = RecentTimes(100)
    assert times.percentiles() is None
    for milliseconds in range(200, 0, -1):
        times.add(milliseconds / 1000)
    assert times.percentiles() == pytest.approx([0.051, 0.096, 0.1])  # of the last hundred: 1 to 100 ms
    assert RecentTimes(100, max_age_s=-1).percentiles() is None


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_the_one_that_the_code_makes():
    assert FILE.read_text() == reference(), "run: python -m diptych.metrics_reference"


def test_every_metric_says_what_it_means_and_is_named_as_prometheus_wants():
    for rows in catalogue().values():
        names = [row.name for row in rows]
        assert len(names) == len(set(names))
        for row in rows:
            assert row.text
            assert row.name.startswith(PREFIX)
            assert (
                row.name.endswith("_total") == (row.type == "counter") or row.name == f"{PREFIX}iteration_tokens_total"
            )


def test_vllms_names_are_all_there():
    """Those of vLLM v1 that mean something here, and the older ones of v0 that boards still ask for."""
    ours = {row.name.removeprefix(PREFIX) for row in catalogue()["text engine"]}
    vllm = """
        num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc num_preemptions_total
        prompt_tokens_total generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total
        gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total mm_cache_queries_total mm_cache_hits_total
        request_success_total request_prompt_tokens request_generation_tokens iteration_tokens_total
        time_to_first_token_seconds time_per_output_token_seconds inter_token_latency_seconds
        request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
        request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds cache_config_info
    """
    assert set(vllm.split()) - ours == set()
