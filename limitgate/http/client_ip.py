"""Address of the client behind trusted proxies, and the network that it is counted as."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, collapse_addresses, ip_address, ip_network

from limitgate.diagnostics import Diagnosis, Once
from limitgate.errors import ConfigError
from limitgate.http.request import Request

MAX_HOPS = 32
"""Elements of a forwarding header that are looked at, from the right."""
MAX_LENGTH = 100
"""Characters of an address with everything around it; anything longer is none."""
MOST_CHARACTERS = 2048
"""Characters of ``Forwarded`` that are looked at, from the right: an element that begins further to the left is none."""
REMEMBERED, SHORT = 16_384, 64
"""Addresses whose canonical form is cached, and the characters of one: IPv6 with a port takes 53."""
UNIX = "unix"
"""Word for a peer on a unix socket in a list of trusted proxies."""

_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052 section 2.1
_PUBLIC: dict[str, tuple[IPv4Network | IPv6Network, ...]] = {
    "IPv4": tuple(map(IPv4Network, ("1.0.0.0/8", "8.0.0.0/7", "64.0.0.0/3", "128.0.0.0/3", "208.0.0.0/4"))),
    "IPv6": (IPv6Network("2000::/3"),),
}
"""Sample of public addresses from all over the internet: a list that covers these trusts everybody."""
_LOOKS = 1000
"""Requests of untrusted peers in which a forwarding header is looked for."""
_BRACKETED = re.compile(r"\[([^\]]*)\](?::[0-9]{1,5})?\Z")
_V4_WITH_PORT = re.compile(r"([0-9.]+):[0-9]{1,5}\Z", re.ASCII)
_PAIR = re.compile(r"\s*([^\s;=\",]+)=(?:([^\s;,\"]*)|\"((?:[^\"\\]|\\.)*)\")\s*(?:;|\Z)")
"""A forwarded-pair: a name, and a token or a quoted string (RFC 7239 section 4, RFC 9110 section 5.6.4)."""


def canonical(text: str) -> IPv4Address | IPv6Address | None:
    """Extract the address from ``text``, without port, brackets and zone; IPv4 inside IPv6 as IPv4. None if there is none.

    The forms are those of RFC 7239 section 6, with or without a port, since some proxies append one.
    """
    if len(text) > MAX_LENGTH:
        return None
    text = text.strip()
    return _remembered(text) if len(text) <= SHORT else _parsed(text)


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    if bracketed := _BRACKETED.match(text):
        text = bracketed[1]
    elif with_port := _V4_WITH_PORT.match(text):
        text = with_port[1]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


_remembered = lru_cache(maxsize=REMEMBERED)(_parsed)


def spelled(text: str) -> str:
    """Canonical spelling of an address; anything else unchanged."""
    return _spelled(text) if len(text) <= SHORT else _spelled.__wrapped__(text)


def grouped(client: str, ipv6_prefix: int) -> str:
    """Name that a client is counted under: its IPv4 address, or its IPv6 network of ``ipv6_prefix`` bits."""
    group = _grouped if len(client) <= SHORT else _grouped.__wrapped__
    return group(client, ipv6_prefix)


@lru_cache(maxsize=REMEMBERED)
def _spelled(text: str) -> str:
    address = canonical(text)
    return text if address is None else str(address)


@lru_cache(maxsize=REMEMBERED)
def _grouped(client: str, ipv6_prefix: int) -> str:
    address = canonical(client)
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address, ipv6_prefix), strict=False))
    return client if address is None else str(address)


class TrustedProxies:
    """Proxies whose forwarding header is believed, and the name of that header.

    ``trusted`` holds addresses, CIDRs and the word ``unix``; ``header`` is ``x-forwarded-for`` (or another header that
    holds addresses), or ``forwarded`` for RFC 7239. Raises `ConfigError` for anything else.
    """

    def __init__(self, trusted: Sequence[str], header: str) -> None:
        self._unix = UNIX in trusted
        self._networks = [_network(entry) for entry in trusted if entry != UNIX]
        self._ranges = {version: _Ranges(self._networks, version) for version in (4, 6)}
        self._header = header.lower()
        self._looks = _LOOKS
        self.take_peers = False
        """True if peers are the clients, and requests are not looked at any more for a header that should be believed."""
        self._unbelieved = Once(Diagnosis.UNTRUSTED_FORWARDING)

    @property
    def trust_anybody(self) -> bool:
        """True if there is a peer whose headers are believed."""
        return self._unix or bool(self._networks)

    @property
    def trust_everybody(self) -> list[str]:
        """IP versions of which every public address is trusted: ``IPv4``, ``IPv6``."""
        return [name for name, public in _PUBLIC.items() if all(self._cover(network) for network in public)]

    def trust(self, peer: str | None) -> bool:
        """True if the headers of this peer are believed. A peer without an address is one on a unix socket."""
        if peer is None:
            return self._unix
        return bool(self._networks) and self._trusted(canonical(peer))

    def client(self, request: Request) -> str | None:
        """Find the client's address: the first from the right, beginning with the peer, that is no trusted proxy.

        An element that is no address stops the walk at the last good hop. If every hop is trusted, it is the leftmost.
        """
        client = None if request.peer is None else spelled(request.peer)
        if not self.trust(request.peer):
            if self._looks:
                self._look_at(request, client)
            return client
        for element in _elements(request, self._header):
            address = canonical(element)
            if address is None:
                break
            client = str(address)
            if not self._trusted(address):
                break
        return client

    def _look_at(self, request: Request, peer: str | None) -> None:
        """Report a forwarding header that is not believed (LG006). A proxy writes it into all requests; the first ones suffice.

        A header that contains the peer itself is not reported: the server has resolved it already.
        """
        self._looks -= 1
        self.take_peers = not (self._looks or self.trust_anybody)
        for header in dict.fromkeys((self._header, "x-forwarded-for", "forwarded")):
            if header in request.headers and request.headers.end(header, 1):
                if peer is None or canonical(peer) not in map(canonical, _elements(request, header)):
                    self._looks = 0
                    self.take_peers = not self.trust_anybody
                    self._unbelieved.log(header)
                return

    def _cover(self, network: IPv4Network | IPv6Network) -> bool:
        """True if all addresses of a network are trusted."""
        same = [trusted for trusted in self._networks if trusted.version == network.version]
        return any(network.subnet_of(trusted) for trusted in collapse_addresses(same))  # type: ignore[arg-type, type-var]

    def _trusted(self, address: IPv4Address | IPv6Address | None) -> bool:
        return address is not None and address in self._ranges[address.version]


class _Ranges:
    """Addresses of all networks of one IP version; a lookup is a binary search."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, networks: Iterable[IPv4Network | IPv6Network], version: int) -> None:
        same = sorted(collapse_addresses(network for network in networks if network.version == version))  # type: ignore[type-var]
        self._firsts = [int(network.network_address) for network in same]
        self._lasts = [int(network.broadcast_address) for network in same]

    def __contains__(self, address: IPv4Address | IPv6Address) -> bool:
        number = int(address)
        place = bisect_right(self._firsts, number) - 1
        return place >= 0 and number <= self._lasts[place]


def _elements(request: Request, header: str) -> Iterator[str]:
    """The elements of a request's forwarding header, from the right."""
    if header == "forwarded":
        return _forwarded(request.headers.relayed_end(header, MOST_CHARACTERS + 1))
    return _addresses(request.headers.relayed_end(header, MAX_HOPS * (MAX_LENGTH + 1)))


def _network(entry: str) -> IPv4Network | IPv6Network:
    try:
        network = ip_network(entry)
    except ValueError as error:
        raise ConfigError(
            f"trusted_proxies: {entry!r} is no address or CIDR ({error}), expected for example '10.0.0.0/8', '::1' or {UNIX!r}"
        ) from error
    inside = network.prefixlen >= 96 and canonical(str(network.network_address))
    return IPv4Network((inside, network.prefixlen - 96)) if network.version == 6 and inside and inside.version == 4 else network


def _addresses(value: str) -> Iterator[str]:
    """The elements of an X-Forwarded-For style header, from the right."""
    for _ in range(MAX_HOPS):
        value, comma, element = value.rpartition(",")
        yield element
        if not comma:
            return


def _forwarded(value: str) -> Iterator[str]:
    """The nodes of a Forwarded header (RFC 7239 section 4) from the right; an empty one where an element names none.

    Reading from the right keeps what the nearest proxy wrote apart from whatever a client put to the left of it,
    unbalanced quotes included.
    """
    is_cut = len(value) > MOST_CHARACTERS
    for _ in range(MAX_HOPS):
        comma = _last_comma(value)
        yield "" if is_cut and comma < 0 else _node(value[comma + 1 :])
        if comma < 0:
            return
        value = value[:comma]


def _node(element: str) -> str:
    """Value of ``for`` in a forwarded-element; empty if it does not occur exactly once or the element is malformed."""
    nodes, at = [], 0
    while at < len(element):
        pair = _PAIR.match(element, at)
        if pair is None:
            return ""
        if pair[1].lower() == "for":
            nodes.append(pair[2] if pair[2] is not None else re.sub(r"\\(.)", r"\1", pair[3]))
        at = pair.end()
    return nodes[0] if len(nodes) == 1 else ""


def _last_comma(value: str) -> int:
    """Index of the last comma outside of quotes, -1 if there is none."""
    end, quotes = len(value), 0
    while (comma := value.rfind(",", 0, end)) >= 0:
        quotes += _quotes(value, comma, end)
        if quotes % 2 == 0:
            return comma
        end = comma
    return -1


def _quotes(value: str, start: int, end: int) -> int:
    """Number of quotes between a comma and another index, escaped ones not counted (RFC 9110 section 5.6.4)."""
    if value.find("\\", start, end) >= 0:
        return value[start:end].replace("\\\\", "").replace('\\"', "").count('"')
    return value.count('"', start, end)
