"""Counts the decisions about plain plans, written out rule by rule and window by window as `limitgate.stores.straight` is.

A loop over three windows takes twice as long, and almost every request that is counted comes by here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from limitgate.limits.template import PlanTemplate
from limitgate.observing.counts import ADMITTED, BOUNDS, COUNTS, REFUSED, SHADOW_REFUSED, SUMS, TINY, RuleRow

_Debts = Sequence[int]
_Rule = tuple[RuleRow, int, tuple[tuple[int, int, int], ...]]
"""Figures of a rule, the place of its outcome where it has no room, and of each window place, charge and capacity."""

_SOURCE = """
def make(bisect_left, bounds, {constants}):
    def count(debts):
        {debts}, = debts
{rules}
    return count
"""
_RULE = """
        share = {first}
{others}
        bucket = bisect_left(bounds, share)
        {row}[{admitted}] += 1
        {row}[{counts} + bucket] += 1
        {row}[{sums} + bucket] += share
"""
_OTHER = """
        if (other := {used}) > share:
            share = other
"""


class PlainCounter:
    """Counts the decisions about plain plans of one template, whose charges are of rules with these figures."""

    __slots__ = ("_rules", "charged")

    def __init__(self, template: PlanTemplate, rows: Sequence[RuleRow]) -> None:
        windows: dict[RuleRow, list[tuple[int, int, int]]] = {}
        outcomes: dict[RuleRow, int] = {}
        place = 0
        for row, (bucket, cost, enforced, _) in zip(rows, template.buckets):
            outcomes[row] = REFUSED if enforced else SHADOW_REFUSED
            for limit in bucket.limits:
                windows.setdefault(row, []).append((place, cost * limit.period_us, limit.capacity))
                place += 1
        self._rules: list[_Rule] = [(row, outcomes[row], tuple(each)) for row, each in windows.items()]
        self.charged = _charged(self._rules)
        """Counts a plan that was charged, by the ticks that each window owed before."""

    def refused(self, debts: _Debts) -> None:
        """Count a plan that was refused, by the ticks that each window owes: the rules that had no room."""
        for row, outcome, windows in self._rules:
            if any(debts[place] + charge > capacity for place, charge, capacity in windows):
                row.count(outcome, max([debts[place] / capacity - TINY for place, _, capacity in windows]))


def _charged(rules: Sequence[_Rule]) -> Callable[[_Debts], None]:
    """Make the function that counts a plan as charged to rules."""
    constants: list[Any] = []
    for row, _, windows in rules:
        constants.append(row.values)
        for _, charge, capacity in windows:
            constants += 1 / capacity, charge / capacity - TINY
    shape = tuple([tuple([place for place, _, _ in windows]) for _, _, windows in rules])
    return _maker(shape)(bisect_left, BOUNDS, *constants)


@cache
def _maker(shape: tuple[tuple[int, ...], ...]) -> Callable[..., Callable[[_Debts], None]]:
    """The function that makes it, for rules whose windows have these places."""
    constants, rules = [], []
    for number, places in enumerate(shape):
        used = [f"debt{place} * share{place} + charge{place}" for place in places]
        constants += [f"row{number}", *[f"share{place}, charge{place}" for place in places]]
        others = "\n".join([_OTHER.strip("\n").format(used=each) for each in used[1:]])
        figures = {"row": f"row{number}", "admitted": ADMITTED, "counts": COUNTS, "sums": SUMS}
        rules.append(_RULE.strip("\n").format(first=used[0], others=others, **figures))
    debts = ", ".join([f"debt{place}" for place in sorted([place for of_rule in shape for place in of_rule])])
    source = _SOURCE.format(constants=", ".join(constants), debts=debts, rules="\n".join(rules))
    made: dict[str, Callable[..., Callable[[_Debts], None]]] = {}
    exec(source, made)  # noqa: S102 - the text above, and numbers of windows
    return made["make"]
