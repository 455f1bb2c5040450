"""The pictures in docs/internals/overload.md: goodput over load, and goodput over time while the capacity changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from benchmarks.overload.app import ADAPTIVE, NONE
from benchmarks.overload.report import most_of
from benchmarks.overload.rows import LOADS, STEADY, STEP, STEP_DOWN_S, STEP_RATE, STEP_UP_S, STEPS_END_S, WORKS, Results
from handbook.frame import WIDTH, framed

_LEFT, _RIGHT, _BETWEEN = 72, 24, 64
_TOP, _HIGH = 108, 250
_BIN_S = 0.5
_STYLE = """\
.line { fill: none; stroke: currentColor; stroke-width: 2.5 }
.dot { fill: currentColor }
.label { fill: currentColor; font-weight: 600 }
.with { color: #1a7f64 }
.without { color: #b35900 }
.most { color: #6e7781; stroke-dasharray: 5 4; stroke-width: 1.5 }"""
_DARK = """\
  .with { color: #2ea98a }
  .without { color: #e08a3c }
  .most { color: #8d96a0 }"""

Point = tuple[float, float]


class _Panel(NamedTuple):
    """A rectangle with axes from zero."""

    left: float
    wide: float
    most_x: float
    most_y: float

    def at(self, point: Point) -> Point:
        """Where a point is drawn."""
        x, y = point
        return self.left + self.wide * x / self.most_x, _TOP + _HIGH * (1 - min(y, self.most_y) / self.most_y)

    def line(self, points: Sequence[Point], kind: str, *, dots: bool = False) -> list[str]:
        """A line through points."""
        drawn = [self.at(point) for point in points]
        parts = [f'<path class="line {kind}" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in drawn)}"/>']
        return parts + [f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in drawn if dots]

    def grid(self, marks: Sequence[float], label: Callable[[float], str]) -> list[str]:
        """Horizontal lines with their labels."""
        parts = []
        for mark in marks:
            x, y = self.at((0, mark))
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{x + self.wide:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="small" x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(label(mark))}</text>')
        return parts

    def below(self, x: float, text: str) -> str:
        """A label of the horizontal axis."""
        at, _ = self.at((x, 0))
        return f'<text class="small" x="{at:.1f}" y="{_TOP + _HIGH + 20}" text-anchor="middle">{escape(text)}</text>'


def loads(results: Results, captions: Sequence[str]) -> str:
    """Goodput over load, of both kinds of work, with the adaptive limit and without."""
    drawn = _legend(("with", "adaptive"), ("without", "without a limit"), ("most", "the most that can be served"))
    wide = (WIDTH - _LEFT - _RIGHT - _BETWEEN) / 2
    places = list(enumerate(LOADS))
    for number, work in enumerate(STEADY):
        panel = _Panel(_LEFT + number * (wide + _BETWEEN), wide, len(LOADS) - 0.5, 100)
        rate = results.capacity[work].rate
        drawn += panel.grid((0, 25, 50, 75, 100), lambda mark: f"{mark:g} %")
        drawn += [panel.below(place + 0.25, f"{load:g}") for place, load in places]
        drawn.append(f'<text class="strong" x="{panel.left:.1f}" y="{_TOP - 12}">{escape(WORKS[work].name)}</text>')
        most = [most_of(results, work, load) for load in LOADS]
        drawn += panel.line([(place + 0.25, 100 * most[place]) for place, _ in places], "most")
        for kind, runs in (("without", results.unlimited), ("with", results.limited)):
            points = [(place + 0.25, 100 * runs[work, load].goodput / rate) for place, load in places]
            drawn += panel.line(points, kind, dots=True)
    said = ("Answered within a second, of the capacity, over the load in multiples of it.", *captions)
    return framed("What is served under load", drawn, _TOP + _HIGH, said, style=_STYLE, dark=_DARK)


def steps(results: Results, captions: Sequence[str]) -> str:
    """Goodput over time while the capacity changes."""
    rate = results.capacity["pool"].rate
    panel = _Panel(_LEFT, WIDTH - _LEFT - _RIGHT, STEPS_END_S, 100 * (STEP * rate * 1.1 // 100 + 1))
    drawn = _legend(("with", "adaptive"), ("without", "without a limit"), ("most", "capacity"))
    drawn += panel.grid(range(0, int(panel.most_y) + 1, 100), lambda mark: f"{mark:g}/s")
    drawn += [panel.below(second, f"{second} s") for second in range(0, int(STEPS_END_S) + 1, 5)]
    corners = [(0.0, rate), (STEP_UP_S, rate), (STEP_UP_S, STEP * rate), (STEP_DOWN_S, STEP * rate), (STEP_DOWN_S, rate)]
    drawn += panel.line([*corners, (STEPS_END_S, rate)], "most")
    bins = [number * _BIN_S for number in range(round(STEPS_END_S / _BIN_S))]
    for kind, limit in (("without", NONE), ("with", ADAPTIVE)):
        run = results.steps[limit]
        drawn += panel.line([(begin + _BIN_S / 2, run.rate(begin, begin + _BIN_S)) for begin in bins], kind)
    said = (f"Answered within a second, per second, while {STEP_RATE:,} come per second.", *captions)
    return framed(
        f"A pool that grows to {STEP} times its size, and shrinks again", drawn, _TOP + _HIGH, said, style=_STYLE, dark=_DARK
    )


def _legend(*entries: tuple[str, str]) -> list[str]:
    parts, x = [], float(_LEFT)
    for kind, text in entries:
        parts.append(f'<path class="line {kind}" d="M{x:.0f} 58h26"/>')
        parts.append(f'<text class="small" x="{x + 32:.0f}" y="62">{escape(text)}</text>')
        x += 32 + 7 * len(text) + 16
    return parts
