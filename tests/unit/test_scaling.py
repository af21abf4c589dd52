"""Each panel scales its own work, and no other's replicas change it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.scaling import OTHER, WORKS, Work, draw, main, scale


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_work_grows_with_its_own_panel_and_stays_with_more_of_the_other(work: Work):
    own, other = (scale(work, panel, [1, 3]).speedup for panel in (work.panel, OTHER[work.panel]))
    assert own[3] > 2.4
    assert other[3] == pytest.approx(1.0, abs=0.1)


def test_the_drawing_has_a_line_for_each_row_and_is_xml(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["--replicas", "1,2", "--svg", str(tmp_path / "scaling.svg")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| requests/s of | more | 1 | 2 |"
    assert len(lines) == 6
    text = (tmp_path / "scaling.svg").read_text()
    ElementTree.fromstring(text)
    for work in WORKS:
        for panel in OTHER:
            assert f"{work.name}, more {panel}" in text
    assert draw([scale(WORKS[0], "encoders", [1, 2])]).count("<circle") == 2
