"""Finds the rules that may be for every request that another one is for, so that of thousands only few are compared. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network
from typing import Any

from limitgate.gil import yield_gil
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
            yield_gil()
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
                groups.setdefault(rule.methods, []).append(rule)

    def around(self, rule: Rule) -> list[Rule]:
        """The rules that may be for a part of what another one is for, and for all of its clients, in their order.

        Of those that are for the same requests one is enough.
        """
        groups = [group for path in rule.paths for _, group in self._groups(rule, path)]
        found = {id(other): other for group in groups for other in _telling(group, rule)}
        return sorted(found.values(), key=lambda other: self._places[id(other)])

    def covering(self, rule: Rule) -> Iterator[Rule]:
        """The rules that may be for all requests of another one. Of those that are for the same one is enough."""
        for group in self.groups(rule):
            yield from _telling(group, rule)

    def groups(self, rule: Rule) -> Iterator[list[Rule]]:
        """All rules that may be for all requests of another one, in groups that are the same objects each time."""
        for methods, group in self._groups(rule, rule.paths[0]):
            if methods is None or (rule.methods is not None and rule.methods <= methods):
                yield group

    def _groups(self, rule: Rule, path: str) -> Iterator[tuple[_Methods, list[Rule]]]:
        """Groups of rules that cover a path of another one and may be for all of its clients, each with their methods."""
        first = next(_networks(rule), None)
        networks: list[_Network | None] = [None]
        if first is not None:
            fitting = [length for version, length in self._lengths if version == first.version and length <= first.prefixlen]
            networks += [_prefix(first, length) for length in fitting]
        kind = self._kind(rule)
        for node in self._root.around(segments(path)):
            for network in networks:
                for exclude in {(), rule.exclude}:
                    yield from node.groups.get((kind, network, exclude), {}).items()


class _Node:
    """A place in the tree of all patterns."""

    def __init__(self) -> None:
        self.groups: dict[Any, dict[_Methods, list[Rule]]] = {}
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


def _telling(group: list[Rule], rule: Rule) -> Iterator[Rule]:
    """The rules of a group, but one only of those that are for the same requests; itself left out."""
    is_told = False
    for other in group:
        is_simple = len(other.paths) == 1 and len(other.clients) <= 1
        if other is not rule and not (is_simple and is_told):
            is_told |= is_simple
            yield other


def _networks(rule: Rule) -> Iterator[IPv4Network | IPv6Network]:
    """The networks of a rule's clients, as few as they can be: so one that lies within them all lies within one."""
    networks = [ip_network(text) for text in rule.clients]
    for version in (4, 6):
        yield from collapse_addresses([each for each in networks if each.version == version])  # type: ignore[type-var]


def _prefix(network: IPv4Network | IPv6Network, length: int) -> _Network:
    return network.version, length, int(network.network_address) >> (network.max_prefixlen - length)
