"""Index of rules by the requests they cover, so that few of thousands are compared. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network
from typing import Any

from limitgate.http.paths import ANY, REST, segments
from limitgate.rules.rule import Rule

_Network = tuple[int, int, int]
_Methods = frozenset[str] | None


class Coverage:
    """Index of rules by the requests they match. Excludes rules with ``when``, whose requests are unknown.

    Searches return only rules of the same ``kind``.
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
        """Return the rules that may match all clients of ``rule`` at one of its paths, in order.

        Further rules for the same requests are omitted.
        """
        groups = self._fewest(rule, [path])
        found = {id(other): other for _, group in groups for other in group.telling_there(rule)}
        return sorted(found.values(), key=lambda other: self._places[id(other)])

    def covering(self, rule: Rule) -> Iterator[Rule]:
        """Yield the rules that may match all requests of ``rule``. Further rules for the same requests are omitted."""
        for group in self._covering(rule):
            yield from group.telling(rule)

    def groups(self, rule: Rule) -> Iterator[list[Rule]]:
        """Yield all rules that may match all requests of ``rule``, in groups that are the same objects each time."""
        for group in self._covering(rule):
            yield group.rules

    def _covering(self, rule: Rule) -> Iterator[_Group]:
        for methods, group in self._fewest(rule, rule.paths):
            if methods is None or (rule.methods is not None and rule.methods <= methods):
                yield group

    def _fewest(self, rule: Rule, paths: Sequence[str]) -> Sequence[tuple[_Methods, _Group]]:
        """Return the smallest set of groups that contains all rules that cover ``rule``.

        A covering rule covers every path and network, so it is enough to search the pair with the fewest matches.
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
        """Omit ``rule`` and further rules for the same clients."""
        return _one_of_each(self._by_clients, rule)

    def telling(self, rule: Rule) -> Iterator[Rule]:
        """Omit ``rule`` and further rules for the same requests."""
        return _one_of_each(self._by_requests, rule)


_ENOUGH = 2
"""Rules kept for the same requests. One may be the rule in question."""


def _one_of_each(told: dict[Hashable, list[Rule]], rule: Rule) -> Iterator[Rule]:
    for same in told.values():
        yield from [other for other in same if other is not rule][:1]


class _Node:
    def __init__(self) -> None:
        self.groups: dict[Any, dict[_Methods, _Group]] = {}
        """Rules whose pattern ends here."""
        self.children: dict[str, _Node] = {}

    def below(self, path: tuple[str, ...]) -> _Node:
        node = self
        for segment in path:
            node = node.children.setdefault(segment, _Node())
        return node

    def around(self, path: tuple[str, ...]) -> Iterator[_Node]:
        """Nodes of patterns that cover this one. See `limitgate.http.paths.covers`."""
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
    """Collapsed, so that a network within all of them is within one."""
    networks = [ip_network(text) for text in rule.clients]
    for version in (4, 6):
        yield from collapse_addresses([each for each in networks if each.version == version])  # type: ignore[type-var]


def _prefix(network: IPv4Network | IPv6Network, length: int) -> _Network:
    return network.version, length, int(network.network_address) >> (network.max_prefixlen - length)
