"""The commands that start what a plan says, with Compose and on Kubernetes."""

from __future__ import annotations

import shlex
from typing import Final

from diptych.planner.plan import Plan

MIB: Final = 2**20
FIRST_PORT: Final = 8000
NO_MODEL: Final = "YOUR-MODEL"  # where a plan knows costs, but not whose they are
REDIS_OVERHEAD_MIB: Final = 256  # of its process, beyond what it is told to hold


def compose_command(plan: Plan, model: str | None) -> str:
    """For the folder with docker-compose.yml. Several gateways get a port each, from 8000 on.

    model   None: the reader has to put it in
    """
    variables = {"MODEL": model or NO_MODEL}
    if plan.redis_bytes:
        variables["REDIS_MEMORY"] = f"{_redis_mib(plan.redis_bytes)}MiB"
    scales = {"vision_encoder": plan.encoders, "text_engine": plan.engines}
    if plan.gateways > 1:
        variables["PORT"] = f"{FIRST_PORT}-{FIRST_PORT + plan.gateways - 1}"
        scales = {"gateway": plan.gateways, **scales}
    return " ".join(
        [
            *(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
            "docker compose up --detach --wait",
            *(f"--scale {service}={count}" for service, count in scales.items()),
        ]
    )


def helm_command(plan: Plan, model: str | None) -> str:
    """For the root of the source tree; the same again changes a release that is there."""
    values: dict[str, object] = {
        "model": model or NO_MODEL,
        "gateway.replicas": plan.gateways,
        "visionEncoder.replicas": plan.encoders,
        "textEngine.replicas": plan.engines,
    }
    if plan.redis_bytes:
        size_mib = _redis_mib(plan.redis_bytes)
        values["redis.maxMemory"] = f"{size_mib}MiB"
        values["redis.resources.requests.memory"] = f"{size_mib + REDIS_OVERHEAD_MIB}Mi"
        values["redis.resources.limits.memory"] = f"{size_mib + size_mib // 2 + REDIS_OVERHEAD_MIB}Mi"
    settings = " ".join(f"--set {name}={shlex.quote(str(value))}" for name, value in values.items())
    return f"helm upgrade --install diptych deploy/helm/diptych {settings}"


def _redis_mib(size_bytes: int) -> int:
    return -(-size_bytes // MIB)
