"""Counts plain decisions by generated code, twice as fast as a loop."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from textwrap import indent
from typing import Any

from limitgate.algorithms.base import State, compiled
from limitgate.limits.template import PlanTemplate
from limitgate.observing.counts import ADMITTED, BOUNDS, COUNTS, REFUSED, SHADOW_REFUSED, SUMS, TINY, RuleSeries, count_buckets

_Count = Callable[[Sequence[State]], None]
_CountMany = Callable[[Sequence[Sequence[State]]], None]
_Window = tuple[int, int, int]
_Shape = tuple[tuple[int, tuple[int, ...]], ...]

_SOURCE = """
def make({constants}):
    def count(debts):
        {debts}, = debts
{rules}
    return count
"""
_RULE = """
share = {first}
{others}
{bucket}
{row}[{outcome}] += 1
{row}[count_place] += 1
{row}[count_place + {width}] += share
"""
_BUCKET = "\nel".join([f"if share <= {bound}:\n    count_place = {COUNTS + place}" for place, bound in enumerate(BOUNDS)])
_BUCKET += f"\nelse:\n    count_place = {COUNTS + len(BOUNDS)}"
"""Finds the histogram bucket of a share. For small shares, `bisect_left` takes three times as long."""
_OTHER = """
if (other := {used}) > share:
    share = other
"""


_MANY = """
def make({constants}):
    def count(many):
        number = len(many)
{rules}
    return count
"""
_MANY_RULE = """
shares = [{share} for {debts}, in many]
shares.sort()
{row}[{outcome}] += number
start = 0
for place, bound in bounds:
    end = bisect_right(shares, bound, start)
    if end > start:
        {row}[place] += end - start
        {row}[place + {width}] += sum(shares[start:end])
        start = end
    if end == number:
        break
"""
"""Sorts a batch of shares once, which takes half as long as a search for each."""
_PLACED_BOUNDS = tuple([(COUNTS + place, bound) for place, bound in enumerate((*BOUNDS, float("inf")))])


class PlainCounter:
    __slots__ = ("charged", "charged_many", "refused")

    def __init__(self, template: PlanTemplate, rows: Sequence[RuleSeries]) -> None:
        if not template.is_of_debts:
            self.charged: _Count = partial(_count_states, template, rows, True)
            self.refused: _Count = partial(_count_states, template, rows, False)
            self.charged_many: _CountMany = partial(_count_each, self.charged)
            return
        rules: dict[RuleSeries, list[_Window]] = {}
        without_room: dict[RuleSeries, int] = {}
        place = 0
        for row, (bucket, cost, enforced, _) in zip(rows, template.buckets):
            without_room[row] = REFUSED if enforced else SHADOW_REFUSED
            for limit in bucket.limits:
                rules.setdefault(row, []).append((place, cost * limit.period_us, limit.capacity))
                place += 1
        places = {row: tuple([place for place, _, _ in windows]) for row, windows in rules.items()}
        constants = _constants(rules, lambda charge, capacity: (1 / capacity, charge / capacity - TINY))
        self.charged = _maker(tuple([(ADMITTED, each) for each in places.values()]), is_refused=False)(*constants)
        self.charged_many = _maker_of_many(tuple(places.values()))(*constants)
        constants = _constants(rules, lambda charge, capacity: (1 / capacity, -TINY, capacity - charge))
        self.refused = _maker(tuple([(without_room[row], each) for row, each in places.items()]), is_refused=True)(*constants)


def _count_each(count: _Count, many: Sequence[Sequence[State]]) -> None:
    for states in many:
        count(states)


def _count_states(
    template: PlanTemplate,
    rows: Sequence[RuleSeries],
    is_charged: bool,  # noqa: FBT001 - called for each request
    states: Sequence[State],
) -> None:
    count_buckets(zip(template.charged(states), rows), is_charged=is_charged, is_allowed=is_charged)


def _constants(rules: Mapping[RuleSeries, Sequence[_Window]], of_window: Callable[[int, int], tuple[float, ...]]) -> list[Any]:
    constants: list[Any] = []
    for row, windows in rules.items():
        constants.append(row.values)
        for _, charge, capacity in windows:
            constants += of_window(charge, capacity)
    return constants


@cache
def _maker_of_many(shape: tuple[tuple[int, ...], ...]) -> Callable[..., _CountMany]:
    constants, rules = [], []
    every = [f"debt{place}" for place in sorted([place for places in shape for place in places])]
    for number, places in enumerate(shape):
        constants += [f"row{number}", *[f"share{place}, more{place}" for place in places]]
        used = [f"share{place} * debt{place} + more{place}" for place in places]
        share = used[0]
        for place, other in enumerate(used[1:]):
            share = f"(a{place} if (a{place} := {share}) > (b{place} := {other}) else b{place})"
        figures = {"row": f"row{number}", "outcome": ADMITTED, "width": SUMS - COUNTS}
        rule = _MANY_RULE.strip("\n").format(share=share, debts=", ".join(every), **figures)
        rules.append(indent(rule, "        "))
    source = _MANY.format(constants=", ".join(constants), rules="\n".join(rules))
    return compiled(source, "make", bounds=_PLACED_BOUNDS, bisect_right=bisect_right)  # type: ignore[no-any-return]


@cache
def _maker(shape: _Shape, *, is_refused: bool) -> Callable[..., _Count]:
    constants, rules = [], []
    for number, (outcome, places) in enumerate(shape):
        used = [f"share{place} * debt{place} + more{place}" for place in places]  # Faster with a float first.
        constants += [f"row{number}", *[f"share{place}, more{place}" + f", room{place}" * is_refused for place in places]]
        others = "\n".join([_OTHER.strip("\n").format(used=each) for each in used[1:]])
        figures = {"row": f"row{number}", "outcome": outcome, "bucket": _BUCKET, "width": SUMS - COUNTS}
        rule = _RULE.strip("\n").format(first=used[0], others=others, **figures)
        if is_refused:
            is_full = " or ".join([f"debt{place} > room{place}" for place in places])
            rule = f"if {is_full}:\n{indent(rule, '    ')}"
        rules.append(indent(rule, "        "))
    debts = ", ".join([f"debt{place}" for place in sorted([place for _, of_rule in shape for place in of_rule])])
    source = _SOURCE.format(constants=", ".join(constants), debts=debts, rules="\n".join(rules))
    return compiled(source, "make")  # type: ignore[no-any-return]
