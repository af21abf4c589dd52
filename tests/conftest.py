"""Fixtures for every test: tiny checkpoints, written once per run."""

from __future__ import annotations

import os

# Every Triton kernel of the tests runs in the interpreter: the same source, no GPU. Triton decides it when a kernel's
# module is imported, so it has to be said before any test imports one.
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from pathlib import Path

import pytest

CheckpointFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """`checkpoint("qwen2", layout="published", max_shard_size=None)` -> its folder; see tests/checkpoints.py."""
    from tests.checkpoints import write_checkpoint  # late: most tests need no torch and no transformers

    written: dict[tuple[str, str, str | None], Path] = {}

    def get(name: str, *, layout: str = "published", max_shard_size: str | None = None) -> Path:
        key = (name, layout, max_shard_size)
        if key not in written:
            folder = tmp_path_factory.mktemp(f"{name}-{layout}")
            written[key] = write_checkpoint(name, folder, layout=layout, max_shard_size=max_shard_size)
        return written[key]

    return get
