"""docs/cases.md: every case that a test names is on the page, and the tests on the page exist and name their case."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cases.md"
ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+)$", re.MULTILINE)
TEST = re.compile(r"\[`(\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")
NAMED = re.compile(r"\bCases? ((?:[A-Z]\d+)(?:(?:, and |, | and )[A-Z]\d+)*)")
ROWS = dict(ROW.findall(PAGE.read_text()))


def cases_named_in(text: str) -> set[str]:
    return {case for several in NAMED.findall(text) for case in re.findall(r"[A-Z]\d+", several)}


def test_every_case_that_a_test_names_is_on_the_page():
    named = {case for path in (ROOT / "tests").rglob("test_*.py") for case in cases_named_in(path.read_text())}
    assert named == set(ROWS)
    assert len(named) == 94


@pytest.mark.parametrize("case", ROWS)
def test_the_tests_of_a_case_exist_and_name_it(case: str):
    tests = TEST.findall(ROWS[case])
    assert tests
    for name, path in tests:
        source = (ROOT / path).read_text()
        assert re.search(rf"^(async )?def test_{name}\(", source, re.MULTILINE), f"{path} has no test_{name}"
        assert case in cases_named_in(source)
