"""The runbook: every alert, every error of ours and every error or warning that a service logs has its place
in it, and nothing else has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from shared.errors import all_errors

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = (ROOT / "docs" / "operations.md").read_text()
GROUPS = yaml.safe_load((ROOT / "deploy" / "observability" / "rules.yml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}


# Logged where no service runs, and so to nobody on call.
OF_NO_SERVICE = {"no native CPU kernels for this architecture": "warning"}  # when kernels are compiled
LEVELS = {"info": "info", "warning": "warning", "error": "error", "exception": "error", "critical": "error"}


def logged() -> dict[str, set[str]]:
    """Level -> pattern of each event that services log at it, whatever is filled into it."""
    found: dict[str, set[str]] = {level: set() for level in LEVELS.values()}
    for folder in ("services", "shared"):
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            chosen = levels_by_name(tree)
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
                levels = chosen.get(call.func.id, set()) if isinstance(call.func, ast.Name) else levels_in(call.func)
                for level in levels:
                    found[level].add(pattern(call.args[0]))
    return found


def levels_in(node: ast.AST) -> set[str]:
    """Of each `log.warning` and the like in it, but for what it hands on as arguments."""
    methods = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    named = [each for each in methods if isinstance(each.value, ast.Name) and each.value.id == "log"]
    return {LEVELS[each.attr] for each in named if each.attr in LEVELS}


def levels_by_name(tree: ast.AST) -> dict[str, set[str]]:
    """Of variables that hold a method of the log: `tell = log.warning if … else log.info`."""
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    values = {each.targets[0].id: each.value for each in assignments if isinstance(each.targets[0], ast.Name)}
    return {name: levels_in(value) for name, value in values.items() if not isinstance(value, ast.Call)}


def pattern(event: ast.expr) -> str:
    """Of a literal, or of an f-string with any text for each of its values."""
    if isinstance(event, ast.JoinedStr):
        return "".join(pattern(part) for part in event.values)
    return re.escape(str(event.value)) if isinstance(event, ast.Constant) else ".+"


def rows(section: str) -> list[str]:
    """The events in the table of one section."""
    text = RUNBOOK.partition(f"\n### {section}\n")[2].partition("\n##")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def headings(text: str) -> list[str]:
    return re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_alert_links_to_its_section_and_every_section_about_an_alert_has_one():
    sections = {heading for heading in headings(RUNBOOK) if heading.startswith("Diptych")}
    assert sections == set(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{anchor(name)}"


def test_every_error_of_ours_has_a_section():
    ours = {error.code for error in all_errors() if error.status >= 499}
    sections = {heading.strip("`") for heading in headings(RUNBOOK) if heading.startswith("`")}
    assert ours <= sections
    assert sections <= {error.code for error in all_errors()}


def test_every_line_that_a_service_logs_as_an_error_or_warning_is_explained():
    lines = logged()
    assert len(lines["error"]) > 15
    assert len(lines["warning"]) > 10
    for level, section in (("error", "Errors"), ("warning", "Warnings")):
        explained = rows(section)
        unexplained = {event for event in lines[level] if not any(re.fullmatch(event, row) for row in explained)}
        assert unexplained == {re.escape(event) for event, at in OF_NO_SERVICE.items() if at == level}


def test_every_explained_line_is_one_that_a_service_logs_at_that_level():
    lines = logged()
    for section, level in (("Errors", "error"), ("Warnings", "warning"), ("Good to know", "info")):
        assert [row for row in rows(section) if not any(re.fullmatch(event, row) for event in lines[level])] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_between_the_pages_lead_somewhere(page: Path):
    for target, fragment in re.findall(r"\]\(([\w/.-]*\.md)?(?:#([\w-]+))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        if fragment:
            assert fragment in {anchor(heading) for heading in headings(file.read_text())}, f"{target}#{fragment}"
