"""A plan for people, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from diptych.planner.hardware import Hardware
from diptych.planner.part import MAX_REPLICAS
from diptych.planner.plan import ENCODER_LOAD, GATEWAY_LOAD, Plan
from diptych.planner.start import NO_MODEL, compose_command, helm_command
from diptych.planner.traffic import NUM_KNOWN_IMAGES, SIGMA, Target, Traffic

MIB = 2**20


def as_json(
    plan: Plan, traffic: Traffic, target: Target, hardware: Hardware, headroom: float, model: str | None
) -> dict[str, Any]:
    """Counts, bytes and seconds; null where something is not known.

    model   for the commands that start it; None: not known
    """
    return {
        "traffic": asdict(traffic),
        "target": asdict(target),
        "hardware": asdict(hardware),
        "headroom": headroom,
        "replicas": {"gateway": plan.gateways, "vision_encoder": plan.encoders, "text_engine": plan.engines},
        "engine_requests_per_s": plan.engine_requests_per_s,
        "memory": {
            "text_engine_weights_bytes": hardware.memory.engine_bytes,
            "text_engine_kv_bytes": hardware.kv_bytes,
            "vision_encoder_weights_bytes": hardware.memory.encoder_bytes,
            "redis_bytes": plan.redis_bytes,
        },
        "simulated": plan.figures,
        "alone": plan.alone,
        "start": {"compose": compose_command(plan, model), "helm": helm_command(plan, model)},
        "assumptions": assumptions(traffic, hardware, headroom),
    }


def as_text(
    plan: Plan, traffic: Traffic, target: Target, hardware: Hardware, headroom: float, model: str | None
) -> str:
    """The same for people."""
    return "\n".join(
        [
            *_question(traffic, hardware),
            "",
            *_replicas(plan, hardware),
            "",
            *_times(plan, target),
            "",
            *_start(plan, model),
            "",
            "Assumptions",
            *(f"  * {text}" for text in assumptions(traffic, hardware, headroom)),
        ]
    )


def _question(traffic: Traffic, hardware: Hardware) -> list[str]:
    pictures = (
        f"; pictures a request: {traffic.pictures:g}, {traffic.new_pictures:.0%} of them new"
        if traffic.pictures
        else ""
    )
    return [
        f"Traffic    {traffic.requests_per_s:g} requests/s, {traffic.prompt_tokens} prompt tokens, "
        f"{traffic.output_tokens} output tokens{pictures}",
        f"Hardware   {hardware.name}: {hardware.costs.source}",
    ]


def _replicas(plan: Plan, hardware: Hardware) -> list[str]:
    memory, seen = hardware.memory, plan.figures
    engine_memory = f"{_size(memory.engine_bytes)} weights, {_size(hardware.kv_bytes)} KV cache"
    rows = [
        ("gateways", plan.gateways, "no model", "two where a restart must go unnoticed"),
        (
            "vision encoders",
            plan.encoders,
            f"{_size(memory.encoder_bytes)} weights",
            f"{seen['encoders_busy']:.0%} busy",
        ),
        (
            "text engines",
            plan.engines,
            engine_memory,
            f"KV cache {seen['kv_use_mean']:.0%} used, at most {seen['kv_use_max']:.0%}",
        ),
    ]
    redis = f"{'':>6}  {'Redis':<16} {_size(plan.redis_bytes)} for the pictures that are to be kept"
    needed = [row for row in rows if row[1]]
    return [
        *(f"{count:>6}  {name:<16} {each:<36} {note}" for name, count, each, note in needed),
        *([redis] if plan.encoders else []),
    ]


def _times(plan: Plan, target: Target) -> list[str]:
    """Percentiles of what users wait for; p95 is what 95 of 100 requests stay below."""
    seen, alone = plan.figures, plan.alone
    headings = ("p50", "p95", "p99", "wanted p95", "alone p95")
    first = [*(seen[f"ttft_p{p}_s"] for p in (50, 95, 99)), target.ttft_s, alone["ttft_p95_s"]]
    gaps = [*(seen[f"gap_p{p}_ms"] / 1000 for p in (50, 95, 99)), target.gap_s, alone["gap_p95_ms"] / 1000]
    rows = {"to the first token": first, "between two tokens": gaps}
    return [
        f"{'Time':<20}" + "".join(f"{heading:>12}" for heading in headings),
        *(f"{name:<20}" + "".join(f"{_time(each):>12}" for each in times) for name, times in rows.items()),
        f"{seen['output_tokens_per_s']:.0f} tokens/s in all; one engine carries {plan.engine_requests_per_s:.3g} such "
        f"requests/s within the wanted times. Simulated with {seen['num_requests']:.0f} requests; alone: a request "
        "that meets no other.",
    ]


def _start(plan: Plan, model: str | None) -> list[str]:
    lines = [
        "Start it with Compose",
        f"  {compose_command(plan, model)}",
        "or on Kubernetes",
        f"  {helm_command(plan, model)}",
    ]
    if model is None:
        lines.append(f"{NO_MODEL} is a Hugging Face id or a folder; --model puts it in.")
    if plan.gateways > 1:
        lines.append("Compose gives each gateway a port of its own; clients or a balancer have to spread over them.")
    return lines


def assumptions(traffic: Traffic, hardware: Hardware, headroom: float) -> list[str]:
    costs = hardware.costs
    texts = [
        f"Steps, encodes and fetches cost what they do on {hardware.name!r}; each replica has such a machine alone.",
        f"{headroom:.0%} of the engines' capacity stay free for peaks, failures and roll-outs.",
        f"Lengths are lognormal with sigma {SIGMA}, arrivals {traffic.arrivals}, settings the defaults.",
        f"Gateways are loaded to {GATEWAY_LOAD:.0%} of one core each, encoders to {ENCODER_LOAD:.0%}.",
        f"Of more than {MAX_REPLICAS} replicas of a kind a part is simulated, with its share of the traffic.",
        "Messages between services take no time, nothing fails, Redis forgets nothing within the time given.",
    ]
    if traffic.pictures:
        texts.append(
            f"A picture is {costs.image_tokens} tokens; known ones are {NUM_KNOWN_IMAGES} different ones, "
            "drawn equally often."
        )
    if hardware.kv_bytes is None or hardware.memory.engine_bytes is None:
        texts.append("What is not known of the hardware's memory is left out.")
    return texts


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown"
    return f"{num_bytes / MIB / 1024:.1f} GiB" if num_bytes >= 1024 * MIB else f"{num_bytes / MIB:.0f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
