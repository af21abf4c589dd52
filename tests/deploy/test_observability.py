"""Boards and alert rules ask only for what services show; the rules fire when they should; Compose loads them all."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from diptych.metrics_reference import catalogue

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability"
BOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
TESTED = yaml.safe_load((Path(__file__).parent / "rules_test.yml").read_text())["tests"]
# Given by Prometheus itself, with the target.
TARGET_LABELS = {"job", "instance", "le"}
WITHOUT_PREFIX = {
    "up": set[str](),
    "process_resident_memory_bytes": set[str](),
    "process_cpu_seconds_total": set[str](),
}
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt install prometheus, or set PROMTOOL")


def known_labels() -> dict[str, set[str]]:
    """Every series that can be asked for -> its labels."""
    known = {rule["record"]: set[str]() for rule in RULES if "record" in rule} | WITHOUT_PREFIX
    for rows in catalogue().values():
        for row in rows:
            suffixes = ("_bucket", "_sum", "_count") if row.type == "histogram" else ("",)
            for suffix in suffixes:
                known.setdefault(row.name + suffix, set()).update(row.labels)
    return known


def board_queries() -> Iterator[tuple[str, str]]:
    for path in BOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]
        for variable in board["templating"]["list"]:
            yield f"{path.stem}: ${variable['name']}", variable["query"].removeprefix("label_values").strip("()")


def asked_series(query: str) -> Iterator[tuple[str, set[str]]]:
    """Each series that a query names, with the labels of its selector."""
    without_text = re.sub(r'"[^"]*"', '""', query)
    for name, selector in re.findall(r"\b((?:diptych|process_|up\b)[\w:]*)(?:\{([^}]*)\})?", without_text):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))


QUERIES = [*board_queries(), *((rule.get("alert") or rule["record"], rule["expr"]) for rule in RULES)]


@pytest.mark.parametrize(("where", "query"), QUERIES)
def test_a_query_asks_for_series_and_labels_that_exist(where: str, query: str):
    known = known_labels()
    asked = list(asked_series(query))
    assert asked, f"{where} names no series"
    for name, labels in asked:
        assert name in known, f"{where}: nobody shows {name}"
        assert labels <= known[name] | TARGET_LABELS, f"{where}: {name} has no label {labels - known[name]}"
    grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(",")}
    for label in grouped:
        assert label in TARGET_LABELS or any(label in known[name] for name, _ in asked), f"{where}: by ({label})"


def test_the_boards_are_those_that_their_code_makes():
    made = runpy.run_path(str(FOLDER / "grafana" / "make_boards.py"))["boards"]()
    assert {path.name: path.read_text() for path in BOARDS} == made
    assert set(made) == {"overview.json", "gateway.json", "encoder.json", "engine.json"}


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_grafanas_own_types_know_every_field_of_a_board(path: Path):
    """What they do not know is lost on the way through them."""
    register_default_plugins()
    board = json.loads(path.read_text())
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    assert list(lost_fields(board, known)) == []
    board["panels"][0]["options"]["nonsense"] = board["titel"] = 1
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    assert sorted(lost_fields(board, known)) == [".panels[0].options.nonsense", ".titel"]


def lost_fields(given: Any, known: Any, where: str = "") -> Iterator[str]:
    """Paths of what is in `given` and not, or not the same, in `known`."""
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            yield from lost_fields(value, known.get(name), f"{where}.{name}")
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        for i, pair in enumerate(zip(given, known, strict=True)):
            yield from lost_fields(*pair, f"{where}[{i}]")
    elif given != known:
        yield where


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_boards_panels_neither_overlap_nor_leave_the_board(path: Path):
    taken: set[tuple[int, int]] = set()
    panels = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_what_it_means_and_has_a_test(rule: dict[str, Any]):
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["for"]
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]
    fired = [
        case
        for test in TESTED
        for case in test["alert_rule_test"]
        if case["alertname"] == rule["alert"]
        if case["exp_alerts"]
    ]
    assert fired, f"{rule['alert']} is never seen to fire"


def test_compose_loads_what_is_here_and_only_when_asked_to():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    prometheus, grafana = (compose["services"][name] for name in ("prometheus", "grafana"))
    for service in (prometheus, grafana):
        assert service["profiles"] == ["observability"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), source
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    for job in jobs:
        [found] = job["dns_sd_configs"]
        assert found["names"] == [job["job_name"]], "a job is called after its Compose service"
        assert job["job_name"] in compose["services"]
        assert str(found["port"]) == compose["services"][job["job_name"]]["healthcheck"]["test"][-1]


@needs_promtool
def test_the_rules_fire_when_they_should():
    assert PROMTOOL is not None
    check = subprocess.run([PROMTOOL, "check", "rules", FOLDER / "rules.yml"], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr
    cases = Path(__file__).parent / "rules_test.yml"
    done = subprocess.run([PROMTOOL, "test", "rules", cases], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_can_read_every_boards_query(tmp_path: Path):
    """As the expressions of rules: promtool has no other way to look at one without a server."""
    assert PROMTOOL is not None
    rules = [
        {"record": "x", "expr": query.split(", instance")[0].replace("$__rate_interval", "5m"), "labels": {"n": str(i)}}
        for i, (_, query) in enumerate(board_queries())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": rules}]}))
    check = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
    assert f"{len(rules)} rules found" in check.stdout
