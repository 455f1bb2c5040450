"""Review for ``limitgate check``: rules that never apply, limits that never refuse. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network
from itertools import accumulate, islice
from math import inf
from typing import Any, NamedTuple

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.algorithms.fixed_window import ALIGNED
from limitgate.errors import Field
from limitgate.http.paths import ANY, REST, covers, segments
from limitgate.limits.limit import Limit
from limitgate.messages.diagnostics import Diagnosis
from limitgate.rules.callers import DEFAULT_TIER, KnownCaller
from limitgate.rules.lint import most_within
from limitgate.rules.options import check_part
from limitgate.rules.rule import DEFAULTS, EVERY, NEED_COUNTS, Rule, RuleSet

_RESERVED = IPv4Network("240.0.0.0/4")


class Oddity(NamedTuple):
    about: Rule | KnownCaller | str
    field: Field
    message: str


def review(rules: RuleSet, callers: Sequence[KnownCaller] = (), *, identifies: bool = False) -> Iterator[Oddity]:
    """Yield suspicious rules. If ``identifies``, the application also identifies callers."""
    known = set(rules.tiers) if identifies else {caller.tier for caller in rules.callers.every()}
    every = list({id(rule): rule for of_tier in rules.tiers.values() for rule in of_tier}.values())
    for tier in rules.tiers:
        if tier != DEFAULT_TIER and tier not in known:
            yield Oddity(tier, ("tier",), f"no listed caller has tier {tier}, expected such a caller, or the option identify")
    yield from _without_effect(rules, known)
    for rule in every:
        yield from _limits(rule)
        for method, wanted in rule.misspelt_methods():
            yield Oddity(rule, ("methods",), f"unusual method {method!r}, did you mean {wanted}?")
        yield from _clients(rule)
        yield from _unused(rule)
        yield from _on_error(rule)
        if rule.key_asks("caller") and not (rules.callers or identifies):
            yield Oddity(rule, ("key",), "counts by caller, but no callers are listed, expected callers")
    yield from _callers(rules, callers)
    yield from _inventable(rules, identifies=identifies)
    if not identifies and all(caller.priority != "high" for caller in rules.callers.every()):
        high = {rule.name for rule in every if rule.priority == "high"}
        for rule in [rule for rule in every if rule.reserve and rule.name not in high]:
            yield Oddity(rule, ("reserve",), "no listed caller has high priority, so the reserve is never used")


def _without_effect(rules: RuleSet, known: set[str]) -> Iterator[Oddity]:
    for find, does in ((shadowed, "exempts"), (denied, "denies"), (replaced, "replaces it for")):
        for rule, other in find(rules, known):
            yield Oddity(rule, (), f"never applies: {other.name} {does} every request that it matches")
    told = set()
    for tier, of_tier in rules.tiers.items():
        for rule, other in idle_rules(of_tier):
            if id(rule) not in told:
                told.add(id(rule))
                message = f"never refuses, because {other.name} counts its requests by the same key and always refuses first"
                yield Oddity(rule, (), message if len(rules.tiers) == 1 else f"in tier {tier}, {message}")


Find = Callable[[Rule, str], Sequence[Rule]]
"""Returns rules that may cover a rule, in the order of the tier."""


def shadowed(rules: RuleSet, known: Collection[str]) -> Iterator[tuple[Rule, Rule]]:
    """Yield rules whose requests are exempt in all tiers, each with the first exempting rule."""

    def finder(of_tier: Sequence[Rule]) -> Find:
        exempting = Coverage([rule for rule in of_tier if rule.exempt])
        return lambda rule, path: [] if rule.exempt else exempting.around(rule, path)

    return _switched_off(rules, known, finder)


def denied(rules: RuleSet, known: Collection[str]) -> Iterator[tuple[Rule, Rule]]:
    def finder(of_tier: Sequence[Rule]) -> Find:
        denying = Coverage([rule for rule in of_tier if rule.deny and not rule.shadow])
        return lambda rule, path: denying.around(rule, path) if rule.has_limits else []

    return _switched_off(rules, known, finder)


def replaced(rules: RuleSet, known: Collection[str]) -> Iterator[tuple[Rule, Rule]]:
    """Yield rules that others replace in all tiers, each with the first rule that replaces it."""
    replacing = _by_replaced([rule for of_tier in rules.tiers.values() for rule in of_tier])

    def is_replaced(rule: Rule) -> bool:
        others = [*replacing.get(rule.name, ()), *(replacing.get(EVERY, ()) if rule.has_limits else ())]
        return any(other is not rule for other in others)

    def finder(of_tier: Sequence[Rule]) -> Find:
        certain = [rule for rule in of_tier if rule.replaces and not is_replaced(rule)]
        by_name = _by_replaced(certain)
        every = Coverage([rule for rule in certain if EVERY in rule.replaces])
        places = {id(rule): place for place, rule in enumerate(certain)}

        def find(rule: Rule, path: str) -> list[Rule]:
            found = [*by_name.get(rule.name, ()), *(every.around(rule, path) if rule.has_limits else ())]
            return sorted([other for other in found if other is not rule], key=lambda other: places[id(other)])

        return find

    return _switched_off(rules, known, finder)


def _by_replaced(rules: Iterable[Rule]) -> dict[str, list[Rule]]:
    by_name: dict[str, list[Rule]] = {}
    for name, rule in [(name, each) for each in rules for name in each.replaces]:
        by_name.setdefault(name, []).append(rule)
    return by_name


def _switched_off(
    rules: RuleSet, known: Collection[str], finder: Callable[[Sequence[Rule]], Find]
) -> Iterator[tuple[Rule, Rule]]:
    found: dict[int, tuple[Rule, list[Rule | None]]] = {}
    for tier, of_tier in rules.tiers.items():
        if tier == DEFAULT_TIER or tier in known:
            find = finder(of_tier)
            for rule in of_tier:
                found.setdefault(id(rule), (rule, []))[1].append(_shadow_of(rule, find))
    for rule, by in found.values():
        if by[0] is not None and None not in by:
            yield rule, by[0]


def admits_clients_of(rule: Rule, other: Rule) -> bool:
    """True if ``rule`` matches all clients of ``other``."""
    return not rule.clients or (bool(other.clients) and rule.networks.cover(other.networks))


def _shadow_of(rule: Rule, find: Find) -> Rule | None:
    first = None
    for path in rule.paths:
        others = [other for other in find(rule, path) if not (other.when or other.exclude) and admits_clients_of(other, rule)]
        shadow = _shadow_at(segments(path), rule, others)
        if shadow is None:
            return None
        first = first or shadow
    return first


def _shadow_at(pattern: Sequence[str], rule: Rule, others: Sequence[Rule]) -> Rule | None:
    around = [other for other in others if any(covers(segments(path), pattern) for path in other.paths)]
    for other in around:
        if other.methods is None:
            return other
    covered = [next((other for other in around if other.applies_to(method)), None) for method in rule.methods or ()]
    return covered[0] if covered and None not in covered else None


def _limits(rule: Rule) -> Iterator[Oddity]:
    limits, fields = rule.every_limit, rule.limit_fields
    # Limits of different costs cannot be compared.
    for place, other in () if rule.own_costs else idle_limits(limits):
        message = f"never refuses, because {other} always refuses first"
        yield Oddity(rule, fields[place], f"{limits[place]} {message}" if limits[place] != other else f"duplicate {other}")
    for limit, field in zip(limits, fields):
        most = most_within(limit.period, limits) if limit.period else 0
        if limit.burst > limit.count and most >= 2 * limit.count and ALGORITHMS[limit.algorithm] is gcra:
            message = f"{limit} admits {most} within one period, at least twice its count, expected at most burst {limit.count}"
            yield Oddity(rule, field, message)


def _clients(rule: Rule) -> Iterator[Oddity]:
    for place, text in enumerate(rule.clients):
        network = ip_network(text)
        nobody = network.is_multicast or (network.is_unspecified and network.num_addresses == 1)
        if nobody or (isinstance(network, IPv4Network) and network.subnet_of(_RESERVED)):
            yield Oddity(rule, ("clients", place), f"{text} can't be a client's address, expected addresses that clients use")


def _unused(rule: Rule) -> Iterator[Oddity]:
    if rule.has_limits:
        unused, why = ({"on_error", "ban"} if rule.shadow else set()), "is in shadow mode, which refuses nothing"
    else:
        # An exempt rule never refuses. A key or cost may make the rule read the body, for its condition.
        unused = {*NEED_COUNTS, *(["shadow"] if rule.exempt else [])} - ({"key", "cost"} if rule.reads_body else set())
        why = "has no limits"
    for field in DEFAULTS:
        if field in unused and getattr(rule, field) != DEFAULTS[field]:
            yield Oddity(rule, (field,), f"has no effect because the rule {why}, expected none")


def _on_error(rule: Rule) -> Iterator[Oddity]:
    if rule.on_error == "local" and rule.has_limits and not rule.shadow and isinstance(rule.cost, int):
        tight = next((limit for limit in rule.every_limit if limit.period and 0 < limit.burst < 2 * max(1, rule.cost)), None)
        if tight is not None:
            message = f"each process admits a request under {tight} while the store fails, expected closed if one is too many"
            yield Oddity(rule, ("on_error",), message)


def _callers(rules: RuleSet, callers: Sequence[KnownCaller]) -> Iterator[Oddity]:
    for caller in callers:
        of_tier = {rule.name: rule for rule in rules.tiers.get(caller.tier or DEFAULT_TIER, ())}
        for name, limits in caller.limits.items():
            cost = of_tier[name].cost
            for limit in limits:
                if isinstance(cost, int) and limit.period and cost > limit.most > 0:
                    message = f"cost {cost} of rule {name!r} exceeds {limit}, expected a limit of at least the cost"
                    yield Oddity(caller, ("limits", name), message)


def _inventable(rules: RuleSet, *, identifies: bool) -> Iterator[Oddity]:
    told = set()
    for of_tier in rules.tiers.values():
        counting = [rule for rule in of_tier if not rule.shadow and rule.has_limits and rule.has_counts]
        bounding = Coverage([rule for rule in counting if not _invented(rule, rules, identifies)])
        for rule in (rule for rule in of_tier if rule.has_limits and not rule.clients and id(rule) not in told):
            for place, label in _invented(rule, rules, identifies):
                if not any(is_for_all_of(other, rule) for other in bounding.covering(rule)):
                    told.add(id(rule))
                    code = f" ({Diagnosis.UNLISTED_KEYS.code})" if label == "api_key" else ""
                    expected = "callers with their keys" if label == "api_key" else "an additional rule by ip, or key: [caller]"
                    message = f"clients can invent {label} values, and each value has its own limit, expected {expected}{code}"
                    yield Oddity(rule, ("key", place), message)


def _invented(rule: Rule, rules: RuleSet, identifies: bool) -> list[tuple[int, str]]:  # noqa: FBT001
    vouched = rules.callers.list_keys or identifies
    found = []
    for place, part in enumerate(rule.key):
        for label in check_part(part):
            if label == "host" or label.startswith(("header:", "json:")) or (label == "api_key" and not vouched):
                found.append((place, label))
                break
    return found


_AT_A_BORDER = ("fixed_window", "sliding_window")
"""Algorithms that can admit twice the count around a boundary."""
MOST_COMPARED = 100
_FIXED_LENGTHS = (None, *ALIGNED)
"""Values of ``align`` for windows of equal length. Days in a time zone differ in length."""


def idle_limits(limits: Sequence[Limit]) -> Iterator[tuple[int, Limit]]:
    """Yield indices of limits that never refuse, each with a limit that refuses first."""
    for place, limit in enumerate(limits):
        for other_place, other in enumerate(limits):
            if other_place != place and is_tighter(other, limit) and (other_place < place or not is_tighter(limit, other)):
                yield place, other
                break


def is_tighter(limit: Limit, other: Limit) -> bool:
    """True if ``limit`` refuses every request that ``other`` refuses, given the same requests and costs.

    A faster bucket never has more debt, so with at least the same burst it has room.
    """
    if not (limit.count and other.count and limit.period and other.period):
        return not limit.count or (not (limit.period or other.period) and limit.burst <= other.burst)
    if limit.borrow or other.borrow or limit.warm_up or other.warm_up:
        return False
    if _window(limit) == _window(other):
        return limit.count <= other.count and limit.burst <= other.burst
    if any(each.align not in _FIXED_LENGTHS or each.months for each in (limit, other)):
        return False
    if ALGORITHMS[other.algorithm] is gcra:
        at_once = limit.burst if ALGORITHMS[limit.algorithm] is gcra else limit.count
        if limit.algorithm in _AT_A_BORDER:
            at_once *= 2
        return at_once <= other.burst and limit.count * other.period <= other.count * limit.period
    return other.algorithm != "sliding_window" and most_within(other.period, [limit]) <= other.count


def _window(limit: Limit) -> tuple[str, int, int, str | None]:
    return limit.algorithm, limit.period, limit.months, limit.align


def idle_rules(of_tier: Sequence[Rule]) -> Iterator[tuple[Rule, Rule]]:
    """Yield rules of a tier that never refuse, each with a rule that refuses first."""
    compared = [rule for rule in of_tier if _is_compared(rule)]
    places = {id(rule): place for place, rule in enumerate(compared)}
    coverage = Coverage([rule for rule in compared if not rule.shadow], _kind)
    ranked: dict[int, _Ranked] = {}
    for rule in compared:
        if rule.adaptive:  # it may refuse when other limits admit
            continue
        for group in coverage.groups(rule):
            if id(group) not in ranked:
                ranked[id(group)] = _Ranked(group)
            nearest = islice(ranked[id(group)].tighter(rule), MOST_COMPARED)
            other = next((other for other in nearest if _goes_before(other, rule, places)), None)
            if other is not None:
                yield rule, other
                break


def _is_compared(rule: Rule) -> bool:
    is_fixed = rule.has_limits and bool(rule.every_limit) and rule.limits_by is None and not rule.own_costs
    return is_fixed and not (rule.replaces or rule.charge_if or rule.ban or rule.max_delay or callable(rule.cost))


def _kind(rule: Rule) -> tuple[object, ...]:
    return rule.key, rule.cost, rule.per, rule.reserve


def _goes_before(other: Rule, rule: Rule, places: Mapping[int, int]) -> bool:
    if other is rule or not _precedes(other, rule):
        return False
    return places[id(other)] < places[id(rule)] or rule.shadow or other.adaptive is not None or not _precedes(rule, other)


class _Ranked:
    def __init__(self, rules: Sequence[Rule]) -> None:
        sorts: dict[_Sorts, list[Rule]] = {}
        for rule in rules:
            sorts.setdefault(_sorts(rule), []).append(rule)
        self._by_sorts = {each: _ByTightness(of_sorts) for each, of_sorts in sorts.items()}

    def tighter(self, rule: Rule) -> Iterator[Rule]:
        needed = _sorts(rule)
        if needed in self._by_sorts:
            yield from self._by_sorts[needed].tighter(rule)
        for sorts, ranked in self._by_sorts.items():
            if needed < sorts:
                yield from ranked.tighter(rule)


_Sorts = frozenset[object]


def _sorts(rule: Rule) -> _Sorts:
    """Return the kinds of a rule's limits. Sliding windows and limits in flight are only compared with limits of their kind."""
    limits = [limit for limit in rule.every_limit if not limit.period or limit.algorithm == "sliding_window"]
    return frozenset([_window(limit) if limit.period else None for limit in limits])


class _ByTightness:
    """Rules in the order of rate and burst. A tighter rule has neither a higher rate nor a higher burst."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = sorted(rules, key=lambda rule: (*_tightness(rule), _places(rule)))
        self._keys = [_tightness(rule) for rule in self._rules]
        self._least = list(accumulate([burst for _, burst in self._keys], min))

    def tighter(self, rule: Rule) -> Iterator[Rule]:
        if not any(limit.period for limit in rule.every_limit):  # rules with a rate may also have its limits
            yield from self._rules
            return
        key = _tightness(rule)
        end = bisect_left(self._keys, key)
        if end and self._least[end - 1] <= key[1]:
            yield from (self._rules[place] for place in range(end) if self._keys[place][1] <= key[1])
        yield from (self._rules[place] for place in range(end, bisect_right(self._keys, key)))


def _tightness(rule: Rule) -> tuple[Fraction | float, float]:
    rates = [Fraction(limit.count, limit.period) for limit in rule.every_limit if limit.period]
    bursts = [limit.burst for limit in rule.every_limit if limit.period]
    return (min(rates), min(bursts)) if rates else (inf, inf)


def _places(rule: Rule) -> float:
    return min([limit.burst for limit in rule.every_limit if not limit.period], default=inf)


def _precedes(rule: Rule, other: Rule) -> bool:
    if len(rule.paths) > 1 and rule.key_asks("path"):  # it may count in several buckets what the other counts in one
        return False
    tighter = all(any(is_tighter(limit, each) for limit in rule.every_limit) for each in other.every_limit)
    return tighter and is_for_all_of(rule, other)


def is_for_all_of(rule: Rule, other: Rule) -> bool:
    """True if ``rule`` certainly matches every request of ``other``."""
    if rule.when is not None or (rule.exclude and rule.exclude != other.exclude):
        return False
    if not admits_clients_of(rule, other):
        return False
    if rule.methods is not None and (other.methods is None or not other.methods <= rule.methods):
        return False
    around = {segments(path) for path in rule.paths}
    patterns = [each for each in around if ANY in each or REST in each]
    return all(each in around or any(covers(pattern, each) for pattern in patterns) for each in map(segments, other.paths))


_Network = tuple[int, int, int]
_Methods = frozenset[str] | None


class Coverage:
    """Index of rules by their requests, so that only a few of thousands are compared.

    Rules with ``when`` are left out, because their requests are unknown. Only rules of the same ``kind`` are found.
    """

    def __init__(self, rules: Iterable[Rule], kind: Callable[[Rule], Hashable] = lambda _: None) -> None:
        self._kind = kind
        self._root = _Node()
        self._lengths: set[tuple[int, int]] = set()
        self._places: dict[int, int] = {}
        for place, rule in enumerate(rules):
            if rule.when is None:
                self._places[id(rule)] = place
                self._add(rule)

    def _add(self, rule: Rule) -> None:
        networks = [_prefix(network, network.prefixlen) for network in _networks(rule)]
        self._lengths.update((version, length) for version, length, _ in networks)
        for path in {segments(path) for path in rule.paths}:
            node = self._root.below(path)
            for network in networks or (None,):
                groups = node.groups.setdefault((self._kind(rule), network, rule.exclude), {})
                groups.setdefault(rule.methods, _Group()).add(rule)

    def around(self, rule: Rule, path: str) -> list[Rule]:
        """Return rules for all clients of ``rule`` at ``path``, but only one rule for the same clients."""
        groups = self._fewest(rule, [path])
        found = {id(other): other for _, group in groups for other in group.telling_there(rule)}
        return sorted(found.values(), key=lambda other: self._places[id(other)])

    def covering(self, rule: Rule) -> Iterator[Rule]:
        """Yield rules for all requests of ``rule``, but only one rule for the same requests."""
        for group in self._covering(rule):
            yield from group.telling(rule)

    def groups(self, rule: Rule) -> Iterator[list[Rule]]:
        """Yield all rules for the requests of ``rule``, in groups, which are always the same objects."""
        for group in self._covering(rule):
            yield group.rules

    def _covering(self, rule: Rule) -> Iterator[_Group]:
        for methods, group in self._fewest(rule, rule.paths):
            if methods is None or (rule.methods is not None and rule.methods <= methods):
                yield group

    def _fewest(self, rule: Rule, paths: Sequence[str]) -> Sequence[tuple[_Methods, _Group]]:
        """Return the matches of the pair of method and path that has the fewest: a covering rule covers every pair."""
        fewest: Sequence[tuple[_Methods, _Group]] = ()
        least = -1
        for network in tuple(_networks(rule)) or (None,):
            for path in paths:
                found = list(self._groups(rule, path, network))
                number = sum([len(group.rules) for _, group in found])
                if least < 0 or number < least:
                    fewest, least = found, number
        return fewest

    def _groups(self, rule: Rule, path: str, within: IPv4Network | IPv6Network | None) -> Iterator[tuple[_Methods, _Group]]:
        networks: list[_Network | None] = [None]
        if within is not None:
            fitting = [each for version, each in self._lengths if version == within.version and each <= within.prefixlen]
            networks += [_prefix(within, length) for length in fitting]
        kind = self._kind(rule)
        for node in self._root.around(segments(path)):
            for network in networks:
                for exclude in {(), rule.exclude}:
                    yield from node.groups.get((kind, network, exclude), {}).items()


class _Group:
    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self._by_clients: dict[Hashable, list[Rule]] = {}
        self._by_requests: dict[Hashable, list[Rule]] = {}

    def add(self, rule: Rule) -> None:
        self.rules.append(rule)
        for told, requests in ((self._by_clients, rule.clients), (self._by_requests, (rule.paths, rule.clients))):
            same = told.setdefault(requests, [])
            if len(same) < _ENOUGH:
                same.append(rule)

    def telling_there(self, rule: Rule) -> Iterator[Rule]:
        return _one_of_each(self._by_clients, rule)

    def telling(self, rule: Rule) -> Iterator[Rule]:
        return _one_of_each(self._by_requests, rule)


_ENOUGH = 2
"""Rules to collect per path: one of them differs from the rule that is compared."""


def _one_of_each(told: dict[Hashable, list[Rule]], rule: Rule) -> Iterator[Rule]:
    for same in told.values():
        yield from [other for other in same if other is not rule][:1]


class _Node:
    def __init__(self) -> None:
        self.groups: dict[Any, dict[_Methods, _Group]] = {}
        self.children: dict[str, _Node] = {}

    def below(self, path: tuple[str, ...]) -> _Node:
        node = self
        for segment in path:
            node = node.children.setdefault(segment, _Node())
        return node

    def around(self, path: tuple[str, ...]) -> Iterator[_Node]:
        """Yield the nodes of covering patterns, see `limitgate.http.paths.covers`."""
        nodes = [self]
        for segment in path:
            yield from (node.children[REST] for node in nodes if REST in node.children)
            if segment == REST:
                return
            wanted = {segment, ANY}
            nodes = [node.children[each] for node in nodes for each in wanted if each in node.children]
        for node in nodes:
            yield node
            if REST in node.children:
                yield node.children[REST]


def _networks(rule: Rule) -> Iterator[IPv4Network | IPv6Network]:
    networks = [ip_network(text) for text in rule.clients]
    for version in (4, 6):
        yield from collapse_addresses([each for each in networks if each.version == version])  # type: ignore[type-var]


def _prefix(network: IPv4Network | IPv6Network, length: int) -> _Network:
    return network.version, length, int(network.network_address) >> (network.max_prefixlen - length)
