"""The runbook: every alert, every error of ours and every line that a service logs as an error has its place in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from shared.errors import all_errors

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = (ROOT / "docs" / "operations.md").read_text()
GROUPS = yaml.safe_load((ROOT / "deploy" / "observability" / "rules.yml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}


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


def test_every_line_that_a_service_logs_as_an_error_is_explained():
    logged = {
        event.split(":")[0] if event.startswith("native") else event
        for folder in ("services", "shared")
        for file in (ROOT / folder).rglob("*.py")
        for event in re.findall(r'log\.error\(\s*"([^"]+)"', file.read_text())
    }
    assert len(logged) > 5
    assert {event for event in logged if f"| `{event}` |" not in RUNBOOK} == set()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_between_the_pages_lead_somewhere(page: Path):
    for target, fragment in re.findall(r"\]\(([\w/.-]*\.md)?(?:#([\w-]+))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        if fragment:
            assert fragment in {anchor(heading) for heading in headings(file.read_text())}, f"{target}#{fragment}"
