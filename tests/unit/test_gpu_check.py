"""bench/gpu_check.py without a GPU: what it makes of parts that fail, hang or find something wrong; one tiny part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_check import PARTS, RESULTS, Part, run

pytest.importorskip("torch")


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / RESULTS).read_text().splitlines()]


def test_all_parts_together_fit_into_ten_minutes():
    assert sum(part.limit_s for part in PARTS) <= 600


def test_a_part_that_cannot_run_is_reported_with_its_log(tmp_path: Path):
    assert not run(Part("broken", ("no_such_module",), 20), tmp_path, is_tiny=True)
    [result] = results(tmp_path)
    assert result["outcome"].startswith("failed with status")
    assert "no_such_module" in (tmp_path / result["log"]).read_text()


def test_a_part_that_hangs_is_stopped_at_its_limit_and_keeps_what_it_found(tmp_path: Path, monkeypatch):
    (tmp_path / "hangs.py").write_text('print(\'{"case": "first"}\', flush=True); import time; time.sleep(60)')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not run(Part("hangs", ("hangs",), 2), tmp_path, is_tiny=True)
    first, outcome = results(tmp_path)
    assert first == {"part": "hangs", "case": "first"}
    assert outcome["outcome"] == "stopped after its limit of 2 s"


def test_a_part_that_finds_an_error_is_not_well(tmp_path: Path, monkeypatch):
    (tmp_path / "finds.py").write_text('print(\'{"case": "a", "error": "more than what is allowed"}\')')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not run(Part("finds", ("finds",), 20), tmp_path, is_tiny=True)
    assert results(tmp_path)[-1]["outcome"] == "ended"


@pytest.mark.slow
def test_the_engine_part_runs_to_its_end(tmp_path: Path):
    pytest.importorskip("triton")
    [part] = [part for part in PARTS if part.name == "engine"]
    assert run(Part(part.name, part.argv, 200), tmp_path, is_tiny=True), (tmp_path / "engine.log").read_text()
    cases = [result["case"] for result in results(tmp_path) if "case" in result]
    assert cases == ["text", "text, 2 at once", "image"]
