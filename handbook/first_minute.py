"""The picture in docs/faq.md: what a client that was idle gets in its first minute, counted by the real code.

The client asks ten times a second, each time until it is refused. Beside three limits there is a fixed window: a count that
starts afresh when the minute on the clock is over, half a minute after the client has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from handbook.frame import WIDTH, framed
from limitgate import Limit, Limiter, MemoryStore

SECONDS = 60
TRIES = 10
"""In a second."""
TURN = 30
"""Seconds after the client has come at which the fixed window starts afresh."""

_LEFT, _RIGHT, _TOP = 64, 212, 74
_WIDE, _HIGH = WIDTH - _LEFT - _RIGHT, 320
_TOP_VALUE = 120
_STYLE = """\
.line { fill: none; stroke: currentColor; stroke-width: 2.5 }
.label { fill: currentColor; font-weight: 600 }
.whole { color: #1a7f64 }
.some { color: #3b6fb6 }
.one { color: #8250a8 }
.window { color: #b35900; stroke-dasharray: 6 4 }"""
_DARK = """\
  .whole { color: #2ea98a }
  .some { color: #6aa0e8 }
  .one { color: #b083d6 }
  .window { color: #e08a3c }"""


class Curve(NamedTuple):
    """How many requests had passed after each try."""

    name: str
    kind: str
    """The class of its line and its label."""
    passed: list[int]

    @property
    def total(self) -> int:
        """How many passed in the whole minute."""
        return self.passed[-1]


def curves() -> list[Curve]:
    """The curves of the picture, from the one that lets most through at once."""
    return [
        Curve("fixed window", "window", _passed(Limit("60/minute", algorithm="fixed_window"))),
        Curve("60/minute", "whole", _passed("60/minute")),
        Curve("60/minute burst 10", "some", _passed("60/minute burst 10")),
        Curve("60/minute burst 1", "one", _passed("60/minute burst 1")),
    ]


def _passed(limit: Limit | str) -> list[int]:
    """How many have passed after each try of a client that goes on until it is refused."""
    now = 0
    limiter = Limiter(MemoryStore(lambda: now))
    total, passed = 0, []
    for attempt in range(SECONDS * TRIES):
        now = (SECONDS - TURN) * 1_000_000 + attempt * 1_000_000 // TRIES
        while limiter.hit("client", limit).allowed:
            total += 1
        passed.append(total)
    return passed


def picture() -> str:
    """The curves as an SVG."""
    title = "What passes in the first minute of a client that was idle"
    captions = (
        "Requests that have passed, over seconds. The client sends as many as it can from second 0 on.",
        f"A fixed window is shown whose minute is over {TURN} s after the client has come.",
    )
    shown = curves()
    lines = [f'<path class="line {curve.kind}" d="{_path(curve.passed)}"/>' for curve in shown]
    return framed(title, [*_grid(), *lines, *_labels(shown)], _TOP + _HIGH, captions, style=_STYLE, dark=_DARK)


def _grid() -> list[str]:
    parts = []
    for value in range(0, _TOP_VALUE + 1, 30):
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{_y(value):.1f}" x2="{_LEFT + _WIDE}" y2="{_y(value):.1f}"/>')
        parts.append(f'<text class="small" x="{_LEFT - 10}" y="{_y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for second in range(0, SECONDS + 1, 10):
        label = f"{second}" if second < SECONDS else f"{second} s"
        parts.append(f'<text class="small" x="{_x(second):.1f}" y="{_TOP + _HIGH + 20}" text-anchor="middle">{label}</text>')
    return parts


def _labels(drawn: Sequence[Curve]) -> list[str]:
    """Each curve's name and total at its end, from the top down, none over another."""
    parts, lowest = [], 0.0
    for curve in sorted(drawn, key=lambda curve: -curve.total):
        y = max(_y(curve.total) + 5, lowest + 18)
        lowest = y
        text = escape(f"{curve.name}: {curve.total}")
        parts.append(f'<text class="label {curve.kind}" x="{_LEFT + _WIDE + 10}" y="{y:.1f}">{text}</text>')
    return parts


def _path(passed: Sequence[int]) -> str:
    """A line of steps from nothing; only where it turns."""
    steps, before = [f"M{_x(0):.1f} {_y(0):.1f}"], 0
    for attempt, value in enumerate(passed):
        if value != before:
            steps.append(f"H{_x(attempt / TRIES):.1f}V{_y(value):.1f}")
            before = value
    return "".join([*steps, f"H{_x(SECONDS):.1f}"])


def _x(second: float) -> float:
    return _LEFT + second / SECONDS * _WIDE


def _y(value: float) -> float:
    return _TOP + _HIGH - value / _TOP_VALUE * _HIGH
