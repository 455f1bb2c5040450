"""The chart in README, as an SVG written by hand: one bar for each limiter, as long as what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from handbook.frame import WIDTH, framed

_LEFT, _RIGHT = 140, 100
"""Room for names, and for the figures behind the bars, in pixels."""
_TOP, _ROW, _BAR = 78, 38, 24
_LINES = 4
"""How many grid lines there are besides that at zero."""

_STYLE = """\
.bar { fill: #afb8c1 }
.ours { fill: #1a7f64 }"""
_DARK = """\
  .bar { fill: #484f58 }
  .ours { fill: #2ea98a }"""


@dataclass(frozen=True)
class Row:
    """A limiter and what it costs, or the words that stand in for a bar."""

    name: str
    cost: float | None
    instead: str = ""
    ours: bool = False


def chart(title: str, unit: str, rows: Sequence[Row], captions: Sequence[str]) -> str:
    """Horizontal bars from zero, the cheapest first; ours is coloured, the others say how many times as much they cost."""
    ordered = sorted(rows, key=lambda row: math.inf if row.cost is None else row.cost)
    top = _rounded_up(max((row.cost or 0.0 for row in rows), default=0.0) or 1.0)
    bottom = _TOP + _ROW * len(rows)
    ours = next((row.cost for row in rows if row.ours), None)
    drawn = [
        *_grid(top, unit, bottom),
        *[part for place, row in enumerate(ordered) for part in _row(row, _TOP + _ROW * place, top, ours)],
    ]
    return framed(title, drawn, bottom, captions, style=_STYLE, dark=_DARK)


def _grid(top: float, unit: str, bottom: int) -> list[str]:
    parts = []
    for line in range(_LINES + 1):
        x = _LEFT + _length(top * line / _LINES, top)
        label = f"{top * line / _LINES:g}" + (f" {unit}" if line == _LINES else "")
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP - 10}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(label)}</text>')
    return parts


def _row(row: Row, y: int, top: float, ours: float | None) -> list[str]:
    middle = y + _BAR / 2 + 5
    strong = ' class="strong"' if row.ours else ""
    length = _length(row.cost or 0.0, top)
    parts = [f'<text{strong} x="{_LEFT - 12}" y="{middle}" text-anchor="end">{escape(row.name)}</text>']
    if row.cost is not None:
        kind = "ours" if row.ours else "bar"
        parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="3"/>')
    parts.append(f'<text{strong} x="{_LEFT + length + 8:.1f}" y="{middle}">{escape(_label(row, ours))}</text>')
    return parts


def _label(row: Row, ours: float | None) -> str:
    if row.cost is None:
        return row.instead
    times = f" · {row.cost / ours:.1f}×" if ours and not row.ours else ""  # noqa: RUF001 - the multiplication sign is meant
    return f"{row.cost:.0f}{times}"


def _length(cost: float, top: float) -> float:
    return max(cost, 0.0) / top * (WIDTH - _LEFT - _RIGHT)


def _rounded_up(figure: float) -> float:
    """The next figure of which a quarter is round too."""
    power = 10.0 ** math.floor(math.log10(figure))
    return next(step * power for step in (1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10, 12) if step * power >= figure)
