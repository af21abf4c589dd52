"""Writes the Grafana boards beside this file: what a person would click together, as code that can be reviewed.

python deploy/observability/grafana/make_boards.py            write them again
python deploy/observability/grafana/make_boards.py --check    only say whether they are true
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "dashboards"
SOURCE: Final = {"type": "prometheus", "uid": "prometheus"}
WIDTH: Final = 24  # of a board, in Grafana's units
HEIGHT: Final = 8
RATE: Final = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """One chart. `queries`: what each line is called -> its PromQL."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    about: str = ""
    most: float | None = None


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    panels: list[Panel] = field(default_factory=list)
    job: str | None = None  # boards of one service choose among its replicas


def chosen(selector: str = "") -> str:
    """Labels of a board that chooses among replicas."""
    return "{" + ",".join(filter(None, ['instance=~"$instance"', selector])) + "}"


def quantiles(metric: str, selector: str = "", by: str = "") -> dict[str, str]:
    grouping = f"le, {by}" if by else "le"
    name = f" {{{{{by}}}}}" if by else ""
    buckets = f"sum by ({grouping}) (rate({metric}_bucket{selector}{RATE}))"
    return {f"p{percent}{name}": f"histogram_quantile({percent / 100:g}, {buckets})" for percent in (50, 95, 99)}


def mean(metric: str, selector: str, by: str) -> str:
    total = f"sum by ({by}) (rate({metric}_sum{selector}{RATE}))"
    return f"{total} / sum by ({by}) (rate({metric}_count{selector}{RATE}))"


def ratio(part: str, whole: str, selector: str = "") -> str:
    return f"sum(rate({part}{selector}{RATE})) / sum(rate({whole}{selector}{RATE}))"


API: Final = '{route=~"/v1/.*"}'
OVERVIEW: Final = Board(
    "overview",
    "Diptych: overview",
    [
        Panel(
            "Text engines ready",
            {"": 'sum(diptych:gateway_replicas_ready{service="text_engine"})'},
            kind="stat",
            width=4,
        ),
        Panel(
            "Vision encoders ready",
            {"": 'sum(diptych:gateway_replicas_ready{service="vision_encoder"})'},
            kind="stat",
            width=4,
        ),
        Panel("Requests", {"": f"sum(rate(diptych:gateway_requests_total{API}{RATE}))"}, "reqps", "stat", 4),
        Panel("Tokens written", {"": f"sum(rate(diptych:generation_tokens_total{RATE}))"}, "short", "stat", 4),
        Panel("Failed, of all", {"": "diptych:gateway_error_ratio:rate5m"}, "percentunit", "stat", 4),
        Panel("KV cache in use, fullest", {"": "max(diptych:kv_cache_usage_perc)"}, "percentunit", "stat", 4),
        Panel(
            "Requests by outcome",
            {"{{outcome}}": f"sum by (outcome) (rate(diptych:gateway_requests_total{API}{RATE}))"},
            "reqps",
            stacked=True,
        ),
        Panel("Time to the first token", quantiles("diptych:gateway_time_to_first_token_seconds"), "s"),
        Panel("Between tokens", quantiles("diptych:inter_token_latency_seconds"), "s"),
        Panel(
            "Where the time goes",
            {"{{stage}}": mean("diptych:gateway_stage_seconds", "", "stage")},
            "s",
            stacked=True,
            about="Mean seconds of a request in each stage, of whatever service. Stages overlap.",
        ),
        Panel(
            "Queues",
            {
                "engines": "sum(diptych:num_requests_waiting)",
                "of them for a picture": "sum(diptych:num_requests_waiting_for_image)",
                "encoders": "sum(diptych:encoder_queued_images)",
            },
        ),
        Panel(
            "What was not computed again",
            {
                "prompt tokens from the prefix cache": ratio(
                    "diptych:prefix_cache_hits_total", "diptych:prefix_cache_queries_total"
                ),
                "pictures not encoded": f'1 - sum(rate(diptych:gateway_images_total{{source="encoder"}}{RATE}))'
                f" / sum(rate(diptych:gateway_images_total{RATE}))",
            },
            "percentunit",
            most=1,
        ),
        Panel("Replicas not ready", {"{{service}} {{replica}}": "diptych:gateway_replica_ready == 0"}, width=12),
        Panel("Memory of the processes", {"{{job}} {{instance}}": "process_resident_memory_bytes"}, "bytes", width=12),
    ],
)
GATEWAY: Final = Board(
    "gateway",
    "Diptych: gateway",
    [
        Panel(
            "Requests by route",
            {"{{route}}": f"sum by (route) (rate(diptych:gateway_requests_total{chosen()}{RATE}))"},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Requests by status",
            {"{{status}}": f"sum by (status) (rate(diptych:gateway_requests_total{chosen()}{RATE}))"},
            "reqps",
            stacked=True,
        ),
        Panel(
            "In flight",
            {
                "requests": f"sum(diptych:gateway_requests_in_flight{chosen()})",
                "encodes": f"sum(diptych:gateway_encodes_in_flight{chosen()})",
                "waiting for a replica": f"sum(diptych:gateway_requests_waiting_for_replica{chosen()})",
            },
        ),
        Panel("Whole answers", quantiles("diptych:gateway_request_duration_seconds", chosen('route=~"/v1/.*"')), "s"),
        Panel("First token", quantiles("diptych:gateway_time_to_first_token_seconds", chosen()), "s"),
        Panel(
            "Pictures by where their reference came from",
            {"{{source}}": f"sum by (source) (rate(diptych:gateway_images_total{chosen()}{RATE}))"},
            stacked=True,
            about="memory and redis cost nothing; joined waits for an encode under way; encoder is a new encode.",
        ),
        Panel(
            "Outstanding at each replica", {"{{service}} {{replica}}": f"diptych:gateway_replica_outstanding{chosen()}"}
        ),
        Panel("Replicas ready", {"{{service}}": f"sum by (service) (diptych:gateway_replicas_ready{chosen()})"}),
        Panel(
            "Requests by key",
            {"{{key}}": f"sum by (key) (rate(diptych:gateway_key_requests_total{chosen()}{RATE}))"},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Tokens by key",
            {"{{key}} {{kind}}": f"sum by (key, kind) (rate(diptych:gateway_key_tokens_total{chosen()}{RATE}))"},
            width=12,
        ),
        Panel("Redis given up", {"{{job}} {{instance}}": "diptych:embedding_cache_breaker_open"}, width=12, most=1),
    ],
    job="gateway",
)
ENCODER: Final = Board(
    "encoder",
    "Diptych: vision encoders",
    [
        Panel(
            "Load of the tower",
            {"{{instance}}": f"rate(diptych:encoder_tower_seconds_sum{chosen()}{RATE})"},
            "percentunit",
            most=1,
            about="1: it never rests.",
        ),
        Panel(
            "Queue",
            {
                "{{instance}}": f"diptych:encoder_queued_images{chosen()}",
                "limit": f"max(diptych:encoder_max_queued_images{chosen()})",
            },
        ),
        Panel("Refused", {"{{instance}}": f"rate(diptych:encoder_refused_images_total{chosen()}{RATE})"}),
        Panel(
            "Images by outcome",
            {"{{outcome}}": f"sum by (outcome) (rate(diptych:encoder_images_total{chosen()}{RATE}))"},
            stacked=True,
            about="encoded: here. Spared: joined (under way), recent (kept here), shared (another replica's).",
        ),
        Panel(
            "Time of one image by stage",
            {"{{stage}}": mean("diptych:encoder_stage_seconds", chosen(), "stage")},
            "s",
            stacked=True,
        ),
        Panel("Encode, one image", quantiles("diptych:encoder_stage_seconds", chosen('stage="encode"')), "s"),
        Panel(
            "Images per pass",
            {"mean": ratio("diptych:encoder_batch_size_sum", "diptych:encoder_batch_size_count", chosen())},
        ),
        Panel("Passes", {"{{instance}}": f"rate(diptych:encoder_tower_passes_total{chosen()}{RATE})"}, "ops"),
        Panel("Embeddings kept in the process", {"{{instance}}": f"diptych:encoder_recent_bytes{chosen()}"}, "bytes"),
        Panel(
            "Shared cache",
            {
                "found": f"sum(rate(diptych:embedding_cache_hits_total{chosen()}{RATE}))",
                "not found": f"sum(rate(diptych:embedding_cache_misses_total{chosen()}{RATE}))",
                "stored": f"sum(rate(diptych:embedding_cache_stores_total{chosen()}{RATE}))",
                "failed": f"sum(rate(diptych:embedding_cache_errors_total{chosen()}{RATE}))",
                "damaged": f"sum(rate(diptych:embedding_cache_corrupt_total{chosen()}{RATE}))",
            },
            width=12,
        ),
        Panel(
            "Processor time",
            {"{{instance}}": f"rate(process_cpu_seconds_total{chosen()}{RATE})"},
            "short",
            width=12,
            about="Cores kept busy.",
        ),
    ],
    job="vision_encoder",
)
ENGINE: Final = Board(
    "engine",
    "Diptych: text engines",
    [
        Panel(
            "Tokens written", {"{{instance}}": f"rate(diptych:generation_tokens_total{chosen()}{RATE})"}, stacked=True
        ),
        Panel(
            "Running",
            {
                "{{instance}}": f"diptych:num_requests_running{chosen()}",
                "limit": f"max(diptych:max_num_seqs{chosen()})",
            },
        ),
        Panel(
            "Waiting",
            {
                "{{instance}}": f"diptych:num_requests_waiting{chosen()}",
                "for a picture {{instance}}": f"diptych:num_requests_waiting_for_image{chosen()}",
            },
        ),
        Panel("First token", quantiles("diptych:time_to_first_token_seconds", chosen()), "s"),
        Panel("Between tokens", quantiles("diptych:inter_token_latency_seconds", chosen()), "s"),
        Panel("Whole answers", quantiles("diptych:e2e_request_latency_seconds", chosen()), "s"),
        Panel(
            "KV cache",
            {
                "in use {{instance}}": f"diptych:kv_cache_usage_perc{chosen()}",
                "cached {{instance}}": f"diptych:kv_cache_cached_perc{chosen()}",
                "waste {{instance}}": f"diptych:kv_cache_waste_perc{chosen()}",
            },
            "percentunit",
            most=1,
        ),
        Panel(
            "Blocks evicted, sequences preempted",
            {
                "evictions {{instance}}": f"rate(diptych:kv_cache_evictions_total{chosen()}{RATE})",
                "preemptions {{instance}}": f"rate(diptych:num_preemptions_total{chosen()}{RATE})",
            },
        ),
        Panel(
            "Prefix cache, found",
            {
                "{{instance}}": f"rate(diptych:prefix_cache_hits_total{chosen()}{RATE})"
                f" / rate(diptych:prefix_cache_queries_total{chosen()}{RATE})"
            },
            "percentunit",
            most=1,
        ),
        Panel(
            "Time of a request by stage",
            {
                stage: ratio(
                    f"diptych:request_{stage}_time_seconds_sum", f"diptych:request_{stage}_time_seconds_count", chosen()
                )
                for stage in ("queue", "transfer", "prefill", "decode")
            },
            "s",
            stacked=True,
            about="transfer overlaps with queue and prefill.",
        ),
        Panel("One step", quantiles("diptych:step_seconds", chosen()), "s"),
        Panel("Tokens in a step", quantiles("diptych:iteration_tokens_total", chosen())),
        Panel(
            "Embeddings by where they were found",
            {
                "{{source}}": f"sum by (source) (rate(diptych:image_embeddings_total{chosen()}{RATE}))",
                "memory": f"sum(rate(diptych:mm_cache_hits_total{chosen()}{RATE}))",
            },
            stacked=True,
        ),
        Panel("Fetching one embedding", quantiles("diptych:image_embedding_fetch_seconds", chosen()), "s"),
        Panel(
            "Drafted tokens that were right",
            {
                "share": ratio(
                    "diptych:spec_decode_num_accepted_tokens_total",
                    "diptych:spec_decode_num_draft_tokens_total",
                    chosen(),
                )
            },
            "percentunit",
            most=1,
        ),
        Panel(
            "Ended choices and failed requests",
            {
                "{{finished_reason}}": "sum by (finished_reason) "
                f"(rate(diptych:request_success_total{chosen()}{RATE}))",
                "{{code}}": f"sum by (code) (rate(diptych:request_failures_total{chosen()}{RATE}))",
            },
            stacked=True,
        ),
    ],
    job="text_engine",
)
BOARDS: Final = (OVERVIEW, GATEWAY, ENCODER, ENGINE)


def board_json(board: Board) -> dict[str, Any]:
    panels, x, y = [], 0, 0
    for number, panel in enumerate(board.panels, start=1):
        height = HEIGHT if panel.kind == "timeseries" else HEIGHT // 2
        if x + panel.width > WIDTH:
            x, y = 0, y + panels[-1]["gridPos"]["h"]
        panels.append(_panel_json(panel, number, {"x": x, "y": y, "w": panel.width, "h": height}))
        x += panel.width
    return {
        "uid": f"diptych-{board.name}",
        "title": board.title,
        "tags": ["diptych"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["diptych"], "title": "Diptych", "asDropdown": False, "keepTime": True}
        ],
        "templating": {"list": [] if board.job is None else [_instances(board.job)]},
        "panels": panels,
    }


def _panel_json(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom = {
        "lineWidth": 1,
        "fillOpacity": 15,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none"},
    }
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom if panel.kind == "timeseries" else {}}
    if panel.most is not None:
        defaults["max"] = panel.most
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": name}
        for i, (name, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}} if panel.kind == "timeseries" else {"graphMode": "area"},
        "targets": targets,
    }


def _instances(job: str) -> dict[str, Any]:
    query = f'label_values(diptych:build_info{{job="{job}"}}, instance)'
    everything = {"text": "All", "value": "$__all"}
    return {
        "name": "instance",
        "label": "Replica",
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": everything,
    }


def boards() -> dict[str, str]:
    """File name -> content."""
    return {f"{board.name}.json": json.dumps(board_json(board), indent=1) + "\n" for board in BOARDS}


def main() -> int:
    if "--check" in sys.argv:
        return 0 if all((FOLDER / name).read_text() == text for name, text in boards().items()) else 1
    for name, text in boards().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
