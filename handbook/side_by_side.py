"""The picture in docs/algorithms.md: what each algorithm lets through of the same traffic, counted by the real code.

After some idle time there is a burst, half of it before the end of a window and half after; then twice as much as the limit
lets through, a pause, and the same again. Whoever is refused does not ask again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from html import escape
from typing import NamedTuple

from handbook.frame import WIDTH, framed
from limitgate import Limit, MemoryStore
from limitgate.limits.bucket import Bucket
from limitgate.limits.decision import decide
from limitgate.limits.plan import Charge, Plan, full_refund

SECOND = 1_000_000
SECONDS = 60
PERIOD = 10
"""Seconds, of the limits and so of the windows."""
TRAFFIC = ((8, 12, 60), (22, 42, 20), (50, 60, 20))
"""From when to when, in seconds, how many requests come in each."""
LIMIT = "100 per 10 seconds"

_TOP, _NAMES, _RATES, _RATE_WIDE = 84, 24, 194, 310
_SUMS, _SUM_WIDE = 530, WIDTH - 530 - 24
"""Where names begin, and in each row a picture of rates and one of sums, and how wide those are, in pixels."""
_PLACES = ((_RATES, _RATE_WIDE), (_SUMS, _SUM_WIDE))
_HIGH, _ROW = 60, 92
_STYLE = """\
.asked { fill: #d0d7de }
.passed { fill: #1a7f64 }
.total { fill: none; stroke: #1a7f64; stroke-width: 2 }
.other { fill: none; stroke: #8c959f; stroke-width: 1.25; stroke-dasharray: 3 3 }"""
_DARK = """\
  .asked { fill: #30363d }
  .passed { fill: #2ea98a }
  .total { stroke: #2ea98a }
  .other { stroke: #6e7681 }"""


class Way(NamedTuple):
    """A way to limit, and when what it let through went on its way."""

    name: str
    moments: list[int]
    """In µs, in order."""

    @property
    def each_second(self) -> list[int]:
        """How many in each second."""
        counts = Counter(moment // SECOND for moment in self.moments)
        return [counts[second] for second in range(SECONDS)]

    @property
    def most(self) -> int:
        """How many within one period at most, wherever it begins."""
        ends = [bisect_right(self.moments, moment + PERIOD * SECOND - 1) for moment in self.moments]
        return max(end - begin for begin, end in enumerate(ends))

    def until(self, second: float) -> int:
        """How many up to a time."""
        return bisect_right(self.moments, second * SECOND)


def ways() -> list[Way]:
    """The rows of the picture."""
    return [
        Way("gcra", _let_through(Limit(LIMIT))),
        Way("gcra, burst 10", _let_through(Limit(LIMIT, burst=10))),
        Way("with max_delay 2 s", _let_through(Limit(LIMIT, burst=10), delay=2)),
        Way("fixed_window", _let_through(Limit(LIMIT, algorithm="fixed_window"))),
        Way("sliding_window", _let_through(Limit(LIMIT, algorithm="sliding_window"))),
        Way("sliding_log", _let_through(Limit(LIMIT, algorithm="sliding_log"))),
        Way("warm_up 10 s", _let_through(Limit(LIMIT, warm_up="10s"))),
        Way("20 at once", _let_through(Limit("20 at once"))),
    ]


def asked() -> list[int]:
    """When requests come, in µs."""
    return [begin * SECOND + number * SECOND // rate for begin, end, rate in TRAFFIC for number in range((end - begin) * rate)]


def lasts(number: int) -> int:
    """For how long a request is under way, in µs: from one second to three, two on average."""
    return SECOND + number * 7 % 21 * SECOND // 10


def _let_through(limit: Limit, delay: int = 0) -> list[int]:
    """When requests go on their way that a limit lets through, some of them after a delay of up to so many seconds."""
    now = 0
    store, windows = MemoryStore(lambda: now), Bucket((limit,))
    moments: list[int] = []
    under_way: list[tuple[int, int, Plan]] = []
    for number, moment in enumerate(asked(), 1):
        while limit.algorithm == "concurrency" and under_way and under_way[0][0] <= moment:
            now, _, done = heappop(under_way)
            store.spend(done)
        now = moment
        plan = Plan((Charge("client", windows, 1, enforced=True, rule=None, max_wait_us=delay * SECOND, slot=number),))
        reading = store.spend(plan)
        decision = decide(plan, reading)
        if decision.allowed:
            moments.append(now + round(decision.delay * SECOND))
            heappush(under_way, (now + lasts(number), number, full_refund(plan, reading)))
    return moments


def picture() -> str:
    """The rows as an SVG."""
    shown = ways()
    bottom = _TOP + _ROW * len(shown) - (_ROW - _HIGH)
    captions = (
        f"Each limit is 100 per {PERIOD} s, but for 20 at once, where a request takes 1 to 3 s. Windows end at the lines.",
        "Grey bars are requests that come. The dashed line repeats what gcra lets through.",
    )
    heads = [
        *[
            f'<line class="grid" x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}"/>'
            for x in map(_turn, range(0, SECONDS + 1, PERIOD))
        ],
        f'<text class="small" x="{_RATES}" y="{_TOP - 20}">let through in each second</text>',
        f'<text class="small" x="{_SUMS}" y="{_TOP - 20}">let through in all</text>',
    ]
    highest = max(len(way.moments) for way in shown)
    rows = [part for place, way in enumerate(shown) for part in _row(way, shown[0], _TOP + _ROW * place, highest)]
    title = "The same traffic under each algorithm"
    return framed(title, [*heads, *rows, *_times(bottom)], bottom, captions, style=_STYLE, dark=_DARK)


def _turn(second: int) -> float:
    """Where a window ends in the left one of the two pictures."""
    return _RATES + second / SECONDS * _RATE_WIDE


def _row(way: Way, first: Way, y: int, highest: int) -> list[str]:
    floor = y + _HIGH
    came = Counter(moment // SECOND for moment in asked())
    fastest = max(came.values())
    return [
        f'<text class="strong" x="{_NAMES}" y="{y + 20}">{escape(way.name)}</text>',
        f'<text class="small" x="{_NAMES}" y="{y + 39}">at most {way.most} in {PERIOD} s</text>',
        f'<text class="small" x="{_NAMES}" y="{y + 56}">{len(way.moments)} in all</text>',
        f'<path class="asked" d="{_bars([came[second] for second in range(SECONDS)], fastest, floor)}"/>',
        f'<path class="passed" d="{_bars(way.each_second, fastest, floor)}"/>',
        *[f'<line class="grid" x1="{x}" y1="{floor}" x2="{x + wide}" y2="{floor}"/>' for x, wide in _PLACES],
        f'<path class="other" d="{_line(first, highest, floor)}"/>',
        f'<path class="total" d="{_line(way, highest, floor)}"/>',
    ]


def _bars(values: Sequence[int], most: int, floor: int) -> str:
    """Bars beside each other, one for each second that has something, as one path."""
    wide = _RATE_WIDE / SECONDS
    return "".join(
        [
            f"M{_RATES + second * wide:.1f} {floor}v{-value / most * _HIGH:.1f}h{wide - 0.8:.1f}V{floor}z"
            for second, value in enumerate(values)
            if value
        ]
    )


def _line(way: Way, highest: int, floor: int) -> str:
    """How many have been let through up to each half second; only where that changes."""
    points, before = [f"M{_SUMS} {floor}"], 0
    for half in range(1, 2 * SECONDS + 1):
        value = way.until(half / 2)
        if value != before:
            y = floor - before / highest * _HIGH
            points.append(f"L{_x(half / 2 - 0.5):.1f} {y:.1f}L{_x(half / 2):.1f} {floor - value / highest * _HIGH:.1f}")
            before = value
    return "".join([*points, f"H{_x(SECONDS):.1f}"])


def _x(second: float) -> float:
    return _SUMS + second / SECONDS * _SUM_WIDE


def _times(floor: int) -> list[str]:
    """The seconds below the last row."""
    return [
        f'<text class="small" x="{x + second / SECONDS * wide:.1f}" y="{floor + 18}" text-anchor="middle">'
        f"{second}{' s' if second == SECONDS else ''}</text>"
        for x, wide in _PLACES
        for second in range(0, SECONDS + 1, 10 if wide == _RATE_WIDE else 20)
    ]
