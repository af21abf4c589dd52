"""The drawing of a request's stages, and what bench/overlap.py makes of its measurements."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from bench import overlap
from bench.overlap import Request
from bench.waterfall import LEFT, RIGHT, WIDTH, Bar, Panel, draw
from shared.wire.common import StageSpan
from shared.wire.encoder import Encoded

SVG = "{http://www.w3.org/2000/svg}"


def bars_of(svg: str) -> list[dict[str, str]]:
    """The bars' rectangles; the first of a drawing is its background."""
    return [each.attrib for each in ElementTree.fromstring(svg).iter(f"{SVG}rect")][1:]


def test_lengths_are_to_one_scale_across_panels_and_stay_inside():
    short = Panel("short", [("a", [Bar(0.0, 0.1)])], [(0.1, "end")])
    long = Panel("long", [("a", [Bar(0.2, 0.4, "x")]), ("b", [Bar(0.4, 1.0)])], [(1.0, "end")])
    widths = [float(bar["width"]) for bar in bars_of(draw([short, long]))]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert widths[2] == pytest.approx(6 * widths[0], abs=0.2)
    for bar in bars_of(draw([short, long])):
        assert float(bar["x"]) >= LEFT
        assert float(bar["x"]) + float(bar["width"]) <= WIDTH - RIGHT


def test_names_are_text_whatever_is_in_them():
    name = 'a < b & "c" </svg>'
    root = ElementTree.fromstring(draw([Panel(name, [(name, [Bar(0.0, 0.1)])], [])]))
    assert [each.text for each in root.iter(f"{SVG}text")].count(name) == 2


def test_a_bar_of_no_length_can_still_be_seen_and_waiting_is_faint():
    point, waiting = bars_of(draw([Panel("p", [("a", [Bar(0.5, 0.5), Bar(0.5, 1.0, faint=True)])], [])]))
    assert float(point["width"]) >= 1
    assert "opacity" not in point
    assert float(waiting["opacity"]) < 1


def asked(order: overlap.Order, began_at: float, seconds: float) -> Request:
    span = StageSpan(stage="encode", start_s=0.01, duration_s=0.02)
    return Request(
        order,
        began_at,
        first_token_at=began_at + seconds,
        ended_at=began_at + seconds,
        pictures=[(began_at, Encoded(stored=False, spans=[span]))] * 2,
    )


def test_savings_are_those_of_neighbouring_requests():
    """Times drift; what two requests have in common is the moment."""
    pairs = [
        asked(order, 0.0, seconds)
        for moment in (1.0, 10.0, 3.0)
        for order, seconds in (("overlap", 0.75 * moment), ("wait", moment))
    ]
    assert "median of the paired savings 25%" in overlap.summary(2, pairs)
    assert [request.first_token_s for request in overlap.typical_pair(pairs)] == [3.0, 2.25]


def test_a_request_is_drawn_with_the_steps_that_were_during_it():
    steps = [
        {"started_at": at, "ended_at": at + 0.01, "start": start, "num_tokens": 196}
        for at, start in ((99.0, 0), (100.03, 0), (100.05, 196), (101.0, 0))
    ]
    drawn = overlap.panel(asked("overlap", 100.0, 0.1), steps)
    assert [name for name, _ in drawn.lanes] == ["picture 1", "picture 2", "prefill (tokens)"]
    assert [round(bar.start_s, 3) for bar in drawn.lanes[-1][1]] == [0.03, 0.05]
    assert [bar.colour for bar in drawn.lanes[-1][1]] == [0, 1]
    assert drawn.marks == [(pytest.approx(0.1), "first token")]
