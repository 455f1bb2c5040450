"""Review of a rule set for ``limitgate check``. Pure.

`lint` and `idle` find the facts; this module words the advice. At run time a service uses only `lint.overshooting`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from ipaddress import IPv4Network, ip_network
from itertools import chain
from typing import NamedTuple

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.errors import Field
from limitgate.limits.bucket import RESERVES
from limitgate.messages.diagnostics import Diagnosis
from limitgate.rules.callers import DEFAULT_TIER, KnownCaller
from limitgate.rules.options import check_part
from limitgate.rules.review import lint
from limitgate.rules.review.coverage import Coverage
from limitgate.rules.review.idle import idle_limits, idle_rules, is_for_all_of
from limitgate.rules.rule import EVERY, Rule, RuleSet

_RESERVED = IPv4Network("240.0.0.0/4")


class Oddity(NamedTuple):
    """A suspicious field of a rule, caller or tier."""

    about: Rule | KnownCaller | str
    field: Field
    message: str


def review(rules: RuleSet, callers: Sequence[KnownCaller] = (), *, identifies: bool = False) -> Iterator[Oddity]:
    """Yield what is suspicious about rules and their listed callers.

    ``identifies`` is true if the application also identifies callers with ``identify``.
    """
    known = set(rules.tiers) if identifies else rules.callers.tiers()
    every = list({id(rule): rule for of_tier in rules.tiers.values() for rule in of_tier}.values())
    for tier in lint.tiers_of_nobody(rules, known):
        yield Oddity(tier, ("tier",), f"no listed caller has tier {tier}, expected one, or identify")
    yield from _without_effect(rules, known)
    for rule in every:
        yield from chain(_limits(rule), _methods(rule), _clients(rule), _on_error(rule), _ban(rule))
        if rule.key_asks("caller") and not (rules.callers or identifies):
            yield Oddity(rule, ("key",), "counts by caller, but no callers are listed, expected some")
    yield from _callers(rules, callers)
    yield from _inventable(rules, identifies=identifies)
    priorities = RESERVES.keys() if identifies else rules.callers.priorities()
    nobody = lint.reserves_of_nobody(rules, priorities)
    for rule in (rule for rule in every if rule.name in nobody and rule.reserve):
        message = "no listed caller has high priority, so the reserve is never used"
        yield Oddity(rule, ("reserve",), message)


def _without_effect(rules: RuleSet, known: set[str]) -> Iterator[Oddity]:
    for rule, other in lint.shadowed(rules, known, lambda exempt: Coverage(exempt).around):
        message = f"never applies: {other.name} exempts every request that it matches"
        yield Oddity(rule, (), message)
    for rule, other in denied(rules, known):
        yield Oddity(rule, (), f"never applies: {other.name} denies every request that it matches")
    for rule, other in replaced(rules, known):
        yield Oddity(rule, (), f"never applies: {other.name} replaces it for every request that it matches")
    told = set()
    for tier, of_tier in rules.tiers.items():
        for rule, other in idle_rules(of_tier):
            if id(rule) not in told:
                told.add(id(rule))
                message = f"never refuses, because {other.name} counts its requests by the same key and always refuses first"
                yield Oddity(rule, (), message if len(rules.tiers) == 1 else f"in tier {tier}, {message}")


def denied(rules: RuleSet, known: Collection[str]) -> Iterator[tuple[Rule, Rule]]:
    """`lint.shadowed`, for rules that deny."""

    def finder(of_tier: Sequence[Rule]) -> lint.Find:
        denying = Coverage([rule for rule in of_tier if rule.deny and not rule.shadow])
        return lambda rule, path: denying.around(rule, path) if rule.has_limits else []

    return lint.switched_off(rules, known, finder)


def replaced(rules: RuleSet, known: Collection[str]) -> Iterator[tuple[Rule, Rule]]:
    """`lint.shadowed`, for rules that replace others and are not replaced."""
    replacing = _Replacing([rule for of_tier in rules.tiers.values() for rule in of_tier if rule.replaces])

    def finder(of_tier: Sequence[Rule]) -> lint.Find:
        certain = [rule for rule in of_tier if rule.replaces and not replacing.replace(rule)]
        by_name = _Replacing(certain).by_name
        every = Coverage([rule for rule in certain if EVERY in rule.replaces])
        places = {id(rule): place for place, rule in enumerate(certain)}

        def find(rule: Rule, path: str) -> list[Rule]:
            found = [*by_name.get(rule.name, ()), *(every.around(rule, path) if rule.has_limits else ())]
            return sorted([other for other in found if other is not rule], key=lambda other: places[id(other)])

        return find

    return lint.switched_off(rules, known, finder)


class _Replacing:
    def __init__(self, rules: Sequence[Rule]) -> None:
        self.by_name: dict[str, list[Rule]] = {}
        for rule in rules:
            for name in rule.replaces:
                self.by_name.setdefault(name, []).append(rule)

    def replace(self, rule: Rule) -> bool:
        every = self.by_name.get(EVERY, ()) if rule.has_limits else ()
        return any(other is not rule for other in chain(self.by_name.get(rule.name, ()), every))


def _limits(rule: Rule) -> Iterator[Oddity]:
    limits, fields = rule.every_limit, rule.limit_fields
    for place, other in idle_limits(limits):
        message = f"never refuses, because {other} always refuses first"
        yield Oddity(rule, fields[place], f"{limits[place]} {message}" if limits[place] != other else f"duplicate {other}")
    for limit, field in zip(limits, fields):
        most = lint.most_within(limit.period, limits) if limit.period else 0
        if limit.burst > limit.count and most >= 2 * limit.count and ALGORITHMS[limit.algorithm] is gcra:
            message = f"{limit} admits {most} within one period, at least twice its count, expected at most burst {limit.count}"
            yield Oddity(rule, field, message)


def _methods(rule: Rule) -> Iterator[Oddity]:
    for method, wanted in rule.misspelt_methods():
        message = f"unusual method {method!r}, did you mean {wanted}?"
        yield Oddity(rule, ("methods",), message)


def _clients(rule: Rule) -> Iterator[Oddity]:
    for place, text in enumerate(rule.clients):
        network = ip_network(text)
        nobody = network.is_multicast or (network.is_unspecified and network.num_addresses == 1)
        if nobody or (isinstance(network, IPv4Network) and network.subnet_of(_RESERVED)):
            yield Oddity(rule, ("clients", place), f"{text} can't be a client's address, expected addresses that clients use")


def _on_error(rule: Rule) -> Iterator[Oddity]:
    if rule.on_error is None:
        return
    if rule.shadow or not rule.has_limits:
        what = "is in shadow mode" if rule.shadow else "has no limits"
        yield Oddity(rule, ("on_error",), f"has no effect because the rule {what}, expected none")
    elif rule.on_error == "local" and isinstance(rule.cost, int):
        tight = next((limit for limit in rule.every_limit if limit.period and 0 < limit.burst < 2 * max(1, rule.cost)), None)
        if tight is not None:
            message = f"each process admits a request under {tight} while the store fails, expected closed if one is too many"
            yield Oddity(rule, ("on_error",), message)


def _ban(rule: Rule) -> Iterator[Oddity]:
    if rule.ban is not None and rule.shadow:
        yield Oddity(rule, ("ban",), "has no effect because the rule is in shadow mode, which bans no client, expected none")


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
        bounding = Coverage(
            [rule for rule in of_tier if not rule.shadow and _counts(rule) and not _invented(rule, rules, identifies)]
        )
        for rule in (rule for rule in of_tier if rule.has_limits and not rule.clients and id(rule) not in told):
            for place, label in _invented(rule, rules, identifies):
                if not any(is_for_all_of(other, rule) for other in bounding.covering(rule)):
                    told.add(id(rule))
                    code = f" ({Diagnosis.UNLISTED_KEYS.code})" if label == "api_key" else ""
                    expected = "callers with their keys" if label == "api_key" else "an additional rule by ip, or key: [caller]"
                    message = f"clients can invent {label} values, and each value has its own limit, expected {expected}{code}"
                    yield Oddity(rule, ("key", place), message)


def _counts(rule: Rule) -> bool:
    return rule.has_limits and rule.has_counts


def _invented(rule: Rule, rules: RuleSet, identifies: bool) -> list[tuple[int, str]]:  # noqa: FBT001
    vouched = rules.callers.list_keys or identifies
    found = []
    for place, part in enumerate(rule.key):
        for label in check_part(part):
            if label == "host" or label.startswith("header:") or (label == "api_key" and not vouched):
                found.append((place, label))
                break
    return found
