"""Finds the rules that may be for every request that another one is for, so that of thousands only few are compared. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network
from typing import Any

from limitgate.http.paths import ANY, REST, segments
from limitgate.rules.rule import Rule

_Network = tuple[int, int, int]
"""IP version, length of a prefix, and the prefix."""
_Methods = frozenset[str] | None


class Coverage:
    """Rules by what they would have to be for. Those with ``when`` are left out, as nobody knows what they are for.

    Only rules of the same ``kind`` as another one are found for it.
    """

    def __init__(self, rules: Iterable[Rule], kind: Callable[[Rule], Hashable] = lambda _: None) -> None:
        self._kind = kind
        self._root = _Node()
        self._lengths: set[tuple[int, int]] = set()
        """IP versions with the lengths of prefixes that there are."""
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
        """The rules that may be for all clients of another one at one of its paths, in their order.

        Of those that are for the same requests there one is enough.
        """
        groups = self._fewest(rule, [path])
        found = {id(other): other for _, group in groups for other in group.telling_there(rule)}
        return sorted(found.values(), key=lambda other: self._places[id(other)])

    def covering(self, rule: Rule) -> Iterator[Rule]:
        """The rules that may be for all requests of another one. Of those that are for the same ones one is enough."""
        for group in self._covering(rule):
            yield from group.telling(rule)

    def groups(self, rule: Rule) -> Iterator[list[Rule]]:
        """All rules that may be for all requests of another one, in groups that are the same objects each time."""
        for group in self._covering(rule):
            yield group.rules

    def _covering(self, rule: Rule) -> Iterator[_Group]:
        for methods, group in self._fewest(rule, rule.paths):
            if methods is None or (rule.methods is not None and rule.methods <= methods):
                yield group

    def _fewest(self, rule: Rule, paths: Sequence[str]) -> Sequence[tuple[_Methods, _Group]]:
        """Groups of rules, with their methods, among which are all that cover some paths of another one and all its clients.

        Each such rule covers every path and every network, so those will do that cover the one which the fewest cover.
        """
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
        """Groups of rules, with their methods, that cover a path of another one, for clients within a network of it."""
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
    """Rules of the same pattern, network, methods and exclusions."""

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
        """The rules, but one only of those that are for the same requests at the pattern; another one itself left out."""
        return _one_of_each(self._by_clients, rule)

    def telling(self, rule: Rule) -> Iterator[Rule]:
        """The rules, but one only of those that are for the same requests; another one itself left out."""
        return _one_of_each(self._by_requests, rule)


_ENOUGH = 2
"""Rules for the same requests that are told apart: one of them may be the one that others are looked for."""


def _one_of_each(told: dict[Hashable, list[Rule]], rule: Rule) -> Iterator[Rule]:
    for same in told.values():
        yield from [other for other in same if other is not rule][:1]


class _Node:
    """A place in the tree of all patterns."""

    def __init__(self) -> None:
        self.groups: dict[Any, dict[_Methods, _Group]] = {}
        """Rules whose pattern ends here."""
        self.children: dict[str, _Node] = {}

    def below(self, path: tuple[str, ...]) -> _Node:
        """The place of a pattern, which is there from now on."""
        node = self
        for segment in path:
            node = node.children.setdefault(segment, _Node())
        return node

    def around(self, path: tuple[str, ...]) -> Iterator[_Node]:
        """The places of all patterns that cover this one, see `limitgate.http.paths.covers`."""
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
    """The networks of a rule's clients, as few as they can be: so one that lies within them all lies within one."""
    networks = [ip_network(text) for text in rule.clients]
    for version in (4, 6):
        yield from collapse_addresses([each for each in networks if each.version == version])  # type: ignore[type-var]


def _prefix(network: IPv4Network | IPv6Network, length: int) -> _Network:
    return network.version, length, int(network.network_address) >> (network.max_prefixlen - length)
