"""A plan for people, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from diptych.planner.hardware import Hardware
from diptych.planner.plan import ENCODER_LOAD, GATEWAY_LOAD, Plan
from diptych.planner.traffic import NUM_KNOWN_IMAGES, SIGMA, Target, Traffic

MIB = 2**20


def as_json(plan: Plan, traffic: Traffic, target: Target, hardware: Hardware, headroom: float) -> dict[str, Any]:
    """Counts, bytes and seconds; null where something is not known."""
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
        "assumptions": assumptions(traffic, hardware, headroom),
    }


def as_text(plan: Plan, traffic: Traffic, target: Target, hardware: Hardware, headroom: float) -> str:
    memory, seen, alone = hardware.memory, plan.figures, plan.alone
    pictures = (
        f", {traffic.pictures:g} pictures of which {traffic.new_pictures:.0%} are new" if traffic.pictures else ""
    )
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
            f"{_size(memory.engine_bytes)} weights, {_size(hardware.kv_bytes)} KV cache",
            f"KV cache {seen['kv_use_mean']:.0%} used, at most {seen['kv_use_max']:.0%}",
        ),
    ]
    return "\n".join(
        [
            f"Traffic    {traffic.requests_per_s:g} requests/s, {traffic.prompt_tokens} prompt tokens, "
            f"{traffic.output_tokens} output tokens{pictures}",
            f"Hardware   {hardware.name}: {hardware.costs.source}",
            "",
            *(f"{count:>6}  {name:<16} {each:<36} {note}" for name, count, each, note in rows),
            f"{'':>6}  {'Redis':<16} {_size(plan.redis_bytes)} for the pictures that are to be kept",
            "",
            "            p50        p95        p99        target (p95)   alone (p95)",
            "TTFT   "
            + "".join(f"{_time(seen[f'ttft_p{p}_s']):>11}" for p in (50, 95, 99))
            + f"{_time(target.ttft_s):>15}{_time(alone['ttft_p95_s']):>14}",
            "gap    "
            + "".join(f"{_time(seen[f'gap_p{p}_ms'] / 1000):>11}" for p in (50, 95, 99))
            + f"{_time(target.gap_s):>15}{_time(alone['gap_p95_ms'] / 1000):>14}",
            f"{seen['output_tokens_per_s']:.0f} tokens/s in all; one engine carries "
            f"{plan.engine_requests_per_s:.3g} such requests/s within the targets. "
            f"Simulated with {seen['num_requests']:.0f} requests.",
            "",
            "Start it:  docker compose up --detach --wait "
            f"--scale vision_encoder={plan.encoders} --scale text_engine={plan.engines}",
            "",
            "Assumptions",
            *(f"  * {text}" for text in assumptions(traffic, hardware, headroom)),
        ]
    )


def assumptions(traffic: Traffic, hardware: Hardware, headroom: float) -> list[str]:
    costs = hardware.costs
    texts = [
        f"Steps, encodes and fetches cost what they do on {hardware.name!r}; each replica has such a machine alone.",
        f"{headroom:.0%} of the engines' capacity stay free for peaks, failures and roll-outs.",
        f"Lengths are lognormal with sigma {SIGMA}, arrivals {traffic.arrivals}, settings the defaults.",
        f"Gateways are loaded to {GATEWAY_LOAD:.0%} of one core each, encoders to {ENCODER_LOAD:.0%}.",
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
