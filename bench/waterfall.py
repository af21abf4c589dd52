"""A waterfall of one request as SVG: lanes of bars over a common time axis, wherever the times come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP = 960, 150, 20, 34
LANE_HEIGHT, BAR_HEIGHT, PANEL_GAP = 24, 16, 46
COLOURS = ("#4878a8", "#c8743c", "#5a9a5a", "#a8507c", "#8a6fb0", "#b09a3c", "#4aa0a0", "#b05a50")
GREY = "#8a8f98"


@dataclass(frozen=True, slots=True)
class Bar:
    """Seconds from the panel's zero.

    colour   a number picks one of COLOURS, None is grey
    faint    waiting, not working
    """

    start_s: float
    end_s: float
    label: str = ""
    colour: int | None = None
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """marks   (seconds, what happened then): upright lines through all lanes"""

    title: str
    lanes: Sequence[tuple[str, Sequence[Bar]]]
    marks: Sequence[tuple[float, str]]

    @property
    def height(self) -> int:
        return LANE_HEIGHT * len(self.lanes)

    @property
    def end_s(self) -> float:
        return max([bar.end_s for _, bars in self.lanes for bar in bars] + [at for at, _ in self.marks])


def draw(panels: Sequence[Panel]) -> str:
    """The panels below each other, to one scale, so that lengths can be compared across them."""
    end_s = max(panel.end_s for panel in panels) * 1.04
    scale = (WIDTH - LEFT - RIGHT) / end_s
    parts, y = [], TOP
    for panel in panels:
        parts.append(_text(8, y - 12, panel.title, weight="bold"))
        parts += _grid(y, panel.height, end_s, scale)
        for index, (name, bars) in enumerate(panel.lanes):
            lane_y = y + index * LANE_HEIGHT
            parts.append(_text(LEFT - 10, lane_y + 16, name, anchor="end"))
            parts += [_bar(bar, lane_y + (LANE_HEIGHT - BAR_HEIGHT) / 2, scale) for bar in bars]
        for at_s, name in panel.marks:
            x = LEFT + at_s * scale
            parts.append(f'<path d="M{x:.1f} {y - 4}V{y + panel.height}" stroke="#c03030" stroke-width="1.5"/>')
            parts.append(_text(x, y - 8, f"{name} {at_s * 1000:.0f} ms", anchor="end", fill="#c03030"))
        y += panel.height + PANEL_GAP
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    style = "font-family:system-ui,sans-serif;font-size:12px"
    background = f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">{background}{"".join(parts)}</svg>\n'


def _bar(bar: Bar, y: float, scale: float) -> str:
    x, width = LEFT + bar.start_s * scale, max(1.0, (bar.end_s - bar.start_s) * scale)
    fill = GREY if bar.colour is None else COLOURS[bar.colour % len(COLOURS)]
    opacity = ' opacity="0.3"' if bar.faint else ""
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="2" fill="{fill}"{opacity}/>'
    fits = bar.label and width > 7 * len(bar.label)
    return box + (_text(x + width / 2, y + 12, bar.label, anchor="middle", fill="#ffffff") if fits else "")


def _grid(y: int, height: int, end_s: float, scale: float) -> list[str]:
    """A line each round number of milliseconds, at most ten of them."""
    step_ms = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if end_s * 1000 / step <= 10)
    parts = []
    for tick in range(int(end_s * 1000 / step_ms) + 1):
        x = LEFT + tick * step_ms / 1000 * scale
        parts.append(f'<path d="M{x:.1f} {y}V{y + height}" stroke="#dde0e4"/>')
        parts.append(_text(x, y + height + 14, f"{tick * step_ms}", anchor="middle", fill="#60656c"))
    return [*parts, _text(LEFT - 10, y + height + 14, "ms", anchor="end", fill="#60656c")]


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#202428", weight: str = "normal"
) -> str:
    style = f'text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
