"""A table of routes and limits for operators."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from limitgate.http.paths import ANY, REST, covers, meet, segments
from limitgate.limits.bucket import percent
from limitgate.llm.costs import kind_of
from limitgate.messages.text import listed, printable
from limitgate.rules.decorators import Mark
from limitgate.rules.rule import Rule, RuleSet, unreplaced

Group = TypeVar("Group", bound=Hashable)
Row = tuple[str, ...]

METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
"""Methods to list for a route that accepts any."""
_HEADS = ("Route", "Methods", "Tier", "Rule", "Limits", "Key", "Notes")


class Listed(NamedTuple):
    template: str
    pattern: tuple[str, ...]
    methods: tuple[str, ...]
    """HEAD only if there is no GET, and OPTIONS only if there is no other method."""
    marks: Callable[[str], tuple[Mark, ...]]
    """Marks for a method, including limits of dependencies or throttles."""
    takes: Callable[[str], bool]
    """True if the router chooses this route for the path."""
    late: Callable[[str], tuple[Rule, ...]] = lambda _: ()
    """Limits of dependencies or throttles, for a method."""


class Applied(NamedTuple):
    rule: Rule | Literal["exempt"]
    wholly: bool
    """True if the rule covers all paths of the route."""

    @property
    def is_certain(self) -> bool:
        """True if the rule covers all requests to the route."""
        return self.wholly and (self.rule == "exempt" or not self.rule.is_conditional)


class Entry(NamedTuple):
    template: str
    methods: list[str]
    tiers: list[str]
    applied: Applied | None
    rules: RuleSet


Mounted = tuple[RuleSet, Sequence[Listed]]
"""Rules of a mounted gate, and the gate's routes."""


def overview(gates: Sequence[RuleSet], routes: Sequence[Listed], mounted: Sequence[Mounted] = ()) -> str:
    """Return a table of routes, then rules that match none."""
    parts = [_aligned(_HEADS, _rows(gates, routes, mounted))] if routes else []
    idle = [
        (rule.name, listed(rule.paths), ", ".join(sorted(rule.methods or ())), _tier_cell([tier], rules))
        for rules, its_routes in [*[(each, routes) for each in gates], *mounted]
        for tier, rule in unmatched(rules, its_routes)
    ]
    if idle:
        parts.append("These rules match no route:\n\n" + _aligned(("Rule", "Path", "Methods", "Tier"), idle))
    return "\n\n".join(parts)


def applied(of_tier: Sequence[Rule], route: Listed, method: str) -> tuple[Applied, ...]:
    """Return the rules for a method. If all paths are exempt, return only the exemption."""
    marks = [mark for mark in route.marks(method) if mark == "exempt" or mark.applies_to(_class_of(method))]
    found = [*_matching(of_tier, route, method), *[Applied(mark, wholly=True) for mark in marks]]
    exempt = [each for each in found if each.is_certain and (each.rule == "exempt" or each.rule.exempt)]
    return tuple(exempt or _unreplaced(found, marks))


def _unreplaced(found: Sequence[Applied], marks: Sequence[Mark]) -> list[Applied]:
    decorators = [mark for mark in marks if mark != "exempt"]
    decorating = set(map(id, marks))
    listed = [each.rule for each in found if each.rule != "exempt" and id(each.rule) not in decorating]
    applying = set(map(id, unreplaced(listed, decorators)))
    certain = [each.rule for each in found if each.is_certain and each.rule != "exempt" and id(each.rule) in applying]

    def is_replaced(rule: Mark) -> bool:
        return rule != "exempt" and any(other.supersedes(rule, is_decorator=id(rule) in decorating) for other in certain)

    return [each for each in found if not is_replaced(each.rule)]


def unmatched(rules: RuleSet, routes: Sequence[Listed]) -> list[tuple[str, Rule]]:
    """Return the rules that match no route, except deny rules, each with its first tier."""
    idle: dict[int, tuple[str, Rule]] = {}
    for tier, of_tier in rules.tiers.items():
        matched = {id(each.rule) for route in routes for method in route.methods for each in _matching(of_tier, route, method)}
        for rule in of_tier:
            if id(rule) not in matched and not rule.deny:
                idle.setdefault(id(rule), (tier, rule))
    return list(idle.values())


def _matching(of_tier: Sequence[Rule], route: Listed, method: str) -> Iterable[Applied]:
    for rule in of_tier:
        patterns = [segments(path) for path in rule.paths] if rule.applies_to(_class_of(method)) else []
        excluded = [segments(path) for path in rule.exclude]
        if any(_meets(pattern, route) for pattern in patterns) and not any(covers(each, route.pattern) for each in excluded):
            wholly = any(covers(pattern, route.pattern) for pattern in patterns)
            yield Applied(rule, wholly and not any(_meets(each, route) for each in excluded))


def _meets(pattern: Sequence[str], route: Listed) -> bool:
    common = meet(pattern, route.pattern)
    if common is None:
        return False
    return bool(covers(pattern, route.pattern) or {ANY, REST}.intersection(common) or route.takes("/" + "/".join(common)))


def _class_of(method: str) -> str:
    return "GET" if method == "HEAD" else method


def entries(gates: Sequence[RuleSet], routes: Sequence[Listed], mounted: Sequence[Mounted] = ()) -> list[Entry]:
    """Return entries by gate, outermost first, grouped by methods and tiers.

    The outermost gate applies decorators. Each gate applies its exemptions.
    """
    found = list(_entries(gates[0], routes)) if gates else []
    for rules, its_routes in [*[(each, routes) for each in gates[1:]], *mounted]:
        further = [each for each in _entries(rules, [_within(route) for route in its_routes]) if each.applied is not None]
        known = [each[:-1] for each in found]
        found = [*_left(found, further), *[each for each in further if each[:-1] not in known]]
    return sorted(found, key=lambda each: each.template)


def _entries(rules: RuleSet, routes: Sequence[Listed]) -> Iterable[Entry]:
    for route in sorted(routes, key=lambda route: (route.template, route.methods)):
        shown = [method for method in route.methods if method != "OPTIONS"] or route.methods
        tiers = {method: [(tier, applied(of_tier, route, method)) for tier, of_tier in rules.tiers.items()] for method in shown}
        for methods, by_tier in _alike((method, tuple(by_tier)) for method, by_tier in tiers.items()):
            for names, of_route in _alike(by_tier):
                yield from [Entry(route.template, methods, names, each, rules) for each in of_route or (None,)]


def _within(route: Listed) -> Listed:
    return route._replace(marks=lambda method: tuple([mark for mark in route.marks(method) if mark == "exempt"]))


def _left(found: Sequence[Entry], further: Sequence[Entry]) -> Iterable[Entry]:
    ruled = {(each.template, method) for each in further for method in each.methods}
    for each in found:
        methods = [method for method in each.methods if each.applied is not None or (each.template, method) not in ruled]
        if methods:
            yield each._replace(methods=methods)


def _rows(gates: Sequence[RuleSet], routes: Sequence[Listed], mounted: Sequence[Mounted]) -> list[Row]:
    rows = [
        (each.template, ", ".join(each.methods), _tier_cell(each.tiers, each.rules), *_cells(each.applied))
        for each in entries(gates, routes, mounted)
    ]
    return [_new(row, above) for above, row in zip([(), *rows], rows)]


def _alike(pairs: Iterable[tuple[str, Group]]) -> list[tuple[list[str], Group]]:
    groups: dict[Group, list[str]] = {}
    for name, group in pairs:
        groups.setdefault(group, []).append(name)
    return [(names, group) for group, names in groups.items()]


def _cells(each: Applied | None) -> Row:
    if each is None:
        return ("-", "", "", "")
    rule = each.rule
    if rule == "exempt":
        return ("@exempt", "exempt", "", "")
    limits = listed([*map(str, rule.every_limit)])
    if rule.limits_by is not None:
        limits = f"by code, else {limits}" if limits else "by code"
    key = ", ".join(rule.counted_by) if limits else ""
    if rule.adaptive is not None:
        limits = f"{limits}, adaptive" if limits else "adaptive"
    without = "denied" if rule.deny else "exempt"
    return (rule.name, limits or without, key, ", ".join(notes_on(each)))


def _on_costs(rule: Rule) -> list[str]:
    costs = {"cost": rule.cost} if rule.cost != 1 else {}
    costs |= {f"cost of {rule.limits[place]}": own for place, own in rule.own_costs.items()}
    return [f"{what} {kind_of(cost) or ('varies' if callable(cost) else cost)}" for what, cost in costs.items()]


def notes_on(each: Applied) -> list[str]:
    """Describe what isn't the default."""
    rule = each.rule
    if rule == "exempt":
        return []
    notes = [] if each.wholly else _on_paths(rule)
    notes += _on_requests(rule)
    notes += _on_costs(rule)
    if rule.per == "message":
        notes.append("per message")
    if rule.adaptive is not None:
        notes.append(f"{rule.adaptive.min} to {rule.adaptive.max} in flight in a process")
    if rule.charge_if is not None:
        notes.append(f"charged {rule.charge_if}")
    if rule.ban is not None:
        notes.append(f"bans for {rule.ban.duration:g} s after {rule.ban.after} refusals within {rule.ban.within:g} s")
    if rule.max_delay:
        notes.append(f"waits up to {rule.max_delay:g} s")
    if rule.shadow:
        notes.append("shadow")
    notes += _on_priorities(rule)
    if rule.on_error is not None:
        notes.append(f"on_error {rule.on_error}")
    return notes


def _on_paths(rule: Rule) -> list[str]:
    only = f"only {listed(rule.paths)}"
    return [f"{only} but not {listed(rule.exclude)}" if rule.exclude else only]


def _on_requests(rule: Rule) -> list[str]:
    notes = []
    if rule.clients:
        notes.append(f"only clients {listed(rule.clients)}")
    if rule.when is not None:
        notes.append(f"only when {getattr(rule.when, '__name__', type(rule.when).__name__)}")
    if rule.replaces:
        notes.append(f"replaces {listed(rule.replaces)}")
    return notes


def _on_priorities(rule: Rule) -> list[str]:
    kept = [] if rule.reserve is None else [f"reserve {percent(rule.reserve)}"]
    return kept if rule.priority is None else [*kept, f"priority {rule.priority}"]


def _tier_cell(names: Sequence[str], rules: RuleSet) -> str:
    if len(rules.tiers) == 1:
        return ""
    return "all" if len(names) == len(rules.tiers) else listed(names)


def _new(row: Row, above: Row) -> Row:
    same = 0
    while same < 3 and row[: same + 1] == above[: same + 1]:
        same += 1
    return ("",) * same + row[same:]


def _aligned(heads: Sequence[str], rows: Sequence[Row]) -> str:
    columns = [tuple(map(printable, column)) for column in zip(heads, *rows) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    columns = [(head, "-" * width, *cells) for (head, *cells), width in zip(columns, widths)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)) for line in zip(*columns)]
    return "\n".join(line.rstrip() for line in lines)
