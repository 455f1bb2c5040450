"""The client's address behind trusted proxies, and its network."""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, collapse_addresses, ip_address, ip_network
from itertools import repeat
from pathlib import Path
from socket import AF_INET, AF_INET6, inet_pton
from typing import NamedTuple

from limitgate.errors import ConfigError, HeadersTooLargeError
from limitgate.http.request import Request
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.messages.text import listed, meant

MAX_HOPS = 32
"""Maximum of elements in a forwarding header."""
MOST_CHARACTERS = 2048
"""Maximum of characters in a forwarding header."""
MAX_LENGTH = 100
"""Longest address with port, brackets and zone."""
REMEMBERED, SHORT = 4096, 64
"""Address cache: size, and longest text."""
UNIX = "unix"
"""The entry of ``trusted_proxies`` for a unix socket."""

_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052 section 2.1
_PUBLIC: dict[str, tuple[IPv4Network | IPv6Network, ...]] = {
    "IPv4": tuple(map(IPv4Network, ("1.0.0.0/8", "8.0.0.0/7", "64.0.0.0/3", "128.0.0.0/3", "208.0.0.0/4"))),
    "IPv6": (IPv6Network("2000::/3"),),
}
"""Networks of public addresses. Trusting them trusts every client."""
_PROXIES = 1024
_BRACKETED = re.compile(r"\[([^\]]*)\](?::[0-9]{1,5})?\Z")
_DIGITS_OF_IPV6 = re.compile("[0-9A-Fa-f:]+")
_IPV4_INSIDE = (0xFFFF, int(_NAT64.network_address) >> 32)
_LISTS = {
    "internal": "private",
    "intranet": "private",
    "lan": "private",
    "local": "loopback",
    "localhost": "loopback",
    "rfc1918": "private",
}
"""Lists that users probably mean by these names."""
_UNLISTED = frozenset({"akamai", "aws", "azure", "bunny", "cloudfront", "imperva", "incapsula", "sucuri"})
_GROUPS = struct.Struct("!8H")
_ZEROS = [":0" * groups + ":" for groups in range(8, 1, -1)]
"""Longest first; single groups stay (RFC 5952)."""
_V4_WITH_PORT = re.compile(r"([0-9.]+):[0-9]{1,5}\Z", re.ASCII)
_PAIR = re.compile(r"\s*([^\s;=\",]+)=(?:([^\s;,\"]*)|\"((?:[^\"\\]|\\.)*)\")\s*(?:;|\Z)")
"""RFC 7239 section 4, RFC 9110 section 5.6.4."""


def canonical(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address in any form of RFC 7239 section 6. IPv4 inside IPv6 becomes IPv4. None if invalid."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return None
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


def grouped(client: str, ipv6_prefix: int) -> str:
    """Return the address, or the IPv6 network of ``ipv6_prefix`` bits."""
    if client.replace(".", "").isdecimal():  # IPv4 has only one spelling
        return client
    group = _grouped if len(client) <= SHORT else _grouped.__wrapped__
    return group(client, ipv6_prefix)


@lru_cache(maxsize=REMEMBERED)
def _grouped(client: str, ipv6_prefix: int) -> str:
    address = _read(client)
    if address is None:
        return client
    spelling, version, number = address
    others = 128 - ipv6_prefix
    return spelling if version == 4 else f"{_spelled_ipv6(number >> others << others)}/{ipv6_prefix}"


_Address = tuple[str, int, int]


def _read(text: str) -> _Address | None:
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return None
    try:
        # Ten times as fast as `ipaddress`, for canonical IPv4 only.
        return text, 4, int.from_bytes(inet_pton(AF_INET, text), "big")
    except (OSError, ValueError):
        return _remembered(text) if len(text) <= SHORT else _remembered.__wrapped__(text)


@lru_cache(maxsize=REMEMBERED)
def _remembered(text: str) -> _Address | None:
    if _DIGITS_OF_IPV6.fullmatch(text):
        with suppress(OSError):
            number = int.from_bytes(inet_pton(AF_INET6, text), "big")
            if number >> 32 not in _IPV4_INSIDE:
                return _spelled_ipv6(number), 6, number
    address = canonical(text)
    return None if address is None else (str(address), address.version, int(address))


def _spelled_ipv6(number: int) -> str:
    text = ":{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:".format(*_GROUPS.unpack(number.to_bytes(16, "big")))
    for zeros in _ZEROS:
        before, found, behind = text.partition(zeros)
        if found:
            return f"{before[1:]}::{behind[:-1]}"
    return text[1:-1]


class Hop(NamedTuple):
    """An address on the way, and why the search continues or stops."""

    address: str | None
    why: str


class TrustedProxies:
    """The proxies whose forwarding header is trusted. Raises `ConfigError` for invalid entries.

    ``trusted`` has addresses, CIDRs, `proxy_lists`, and ``unix``. ``header`` is ``forwarded`` (RFC 7239), ``x-forwarded-for``,
    or another header with addresses.
    """

    def __init__(self, trusted: Sequence[str], header: str) -> None:
        self._unix = UNIX in trusted
        self._networks = [network for entry in trusted if entry != UNIX for network in _listed(entry)]
        self._ranges = {version: _Ranges(self._networks, version) for version in (4, 6)}
        self._header = header.lower()
        self._met: dict[str, str] = {}
        self.take_peers: bool = not self.trust_anybody
        self.unsampled: Iterator[bool] = iter(())
        """Ends at the next search for an untrusted header, in the 1st, 2nd, 4th, 8th … request."""
        self._next_gap = 0
        self._untrusted, self._trusting = Once(Diagnosis.UNTRUSTED_FORWARDING), Once(Diagnosis.SERVER_TRUSTS_ALL)
        self.judges_server = True

    @property
    def trust_anybody(self) -> bool:
        return self._unix or bool(self._networks)

    @property
    def trust_everybody(self) -> list[str]:
        """IP versions (``IPv4``, ``IPv6``) whose public addresses are all trusted."""
        return [name for name, public in _PUBLIC.items() if all(self._cover(network) for network in public)]

    def trust(self, peer: str | None) -> bool:
        """True if a peer is trusted. A peer on a unix socket is None."""
        if peer is None:
            return self._unix
        return peer in self._met or (bool(self._networks) and self._trusted(_read(peer)))

    def client(self, request: Request) -> str | None:
        """Return the first untrusted address on the way from the peer to the client. If all are trusted, return the leftmost.

        Stops before an invalid element. Raises `HeadersTooLargeError` beyond `MAX_HOPS` or `MOST_CHARACTERS`.
        """
        peer = request.peer
        # IPv4 has only one spelling.
        if self.take_peers and peer is not None and peer.replace(".", "").isdecimal() and next(self.unsampled, False):
            return peer
        client = self._met.get(peer) if peer else None
        if client is None:
            address = None if peer is None else _read(peer)
            client = peer if address is None else address[0]
            if self.take_peers or not (self._unix if peer is None else self._trusted(address)):
                if not next(self.unsampled, False):
                    self._search(request, client)
                return client
            self._meet(peer, client)
        for element in _elements(request, self._header):
            address = _read(element)
            if address is None:
                break
            client, version, number = address
            if not self._ranges[version].hold(number):
                break
        return client

    def _meet(self, peer: str | None, address: str | None) -> None:
        if peer is not None and address is not None and len(peer) <= SHORT:
            if len(self._met) >= _PROXIES:
                self._met.clear()
            self._met[peer] = address

    def hops(self, request: Request) -> list[Hop]:
        address = None if request.peer is None else _read(request.peer)
        peer = request.peer if address is None else address[0]
        if not (self._unix if request.peer is None else self._trusted(address)):
            return [Hop(peer, "the peer; not a trusted proxy, so this is the client")]
        found = [Hop(peer, "the peer, a trusted proxy")]
        try:
            for element in _elements(request, self._header):
                address = _read(element)
                if address is None:
                    why = f"no address in {self._header}, so the hop before it is the client"
                    return [*found, Hop(element.strip()[:MAX_LENGTH], why)]
                if not self._trusted(address):
                    return [*found, Hop(address[0], f"named by {self._header}; not a trusted proxy, so this is the client")]
                found.append(Hop(address[0], f"named by {self._header}, a trusted proxy"))
        except HeadersTooLargeError as error:
            return [*found, Hop(None, str(error))]
        return [*found[:-1], found[-1]._replace(why=f"{found[-1].why}, and the last, so this is the client")]

    def _search(self, request: Request, peer: str | None) -> None:
        """Report an untrusted forwarding header (LG006).

        A sample is sufficient, because a proxy adds the header to all requests.

        If the header contains the peer, the server took the peer from the header, which any client may have sent (LG002).
        """
        self.unsampled = repeat(True, self._next_gap)
        self._next_gap = 2 * self._next_gap + 1
        headers = request.opened_headers()
        for header in dict.fromkeys((self._header, "x-forwarded-for", "forwarded")):
            if header not in headers or not headers.end(header, 1):
                continue
            forwarded: list[IPv4Address | IPv6Address | None] = []
            with suppress(HeadersTooLargeError):
                forwarded.extend(map(canonical, _elements(request, header)))
            address = None if peer is None else canonical(peer)
            if peer is None or address not in forwarded:
                self.unsampled = repeat(True)
                self._untrusted.log(header)
            elif self.judges_server and address == forwarded[-1] and _was_chosen(request, forwarded):
                self.unsampled = repeat(True)
                self._trusting.log()
            return

    def _cover(self, network: IPv4Network | IPv6Network) -> bool:
        same = [trusted for trusted in self._networks if trusted.version == network.version]
        return any(network.subnet_of(trusted) for trusted in collapse_addresses(same))  # type: ignore[arg-type, type-var]

    def _trusted(self, address: _Address | None) -> bool:
        return address is not None and self._ranges[address[1]].hold(address[2])


def _was_chosen(request: Request, forwarded: Sequence[IPv4Address | IPv6Address | None]) -> bool:
    """True if the server let the client choose its address.

    uvicorn sets port 0 if the header has no port, and never skips an untrusted public address.
    """
    scope = request.scope
    if scope is None or scope["client"][1] != 0:
        return False
    return any(address is not None and address.is_global and address != forwarded[-1] for address in forwarded[:-1])


class Networks:
    """Addresses and CIDRs of clients. Raises `ConfigError` for invalid entries."""

    __slots__ = ("_ranges",)

    def __init__(self, entries: Iterable[str]) -> None:
        networks = [_network(entry) for entry in entries]
        self._ranges = {version: _Ranges(networks, version) for version in (4, 6)}

    def hold(self, client: str | None) -> bool:
        address = None if client is None else _read(client)
        return address is not None and self._ranges[address[1]].hold(address[2])

    def cover(self, other: Networks) -> bool:
        return all(ranges.cover(other._ranges[version]) for version, ranges in self._ranges.items())


class _Ranges:
    """One IP version, searched by bisection."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, networks: Iterable[IPv4Network | IPv6Network], version: int) -> None:
        same = sorted(collapse_addresses(network for network in networks if network.version == version))  # type: ignore[type-var]
        self._firsts = [int(network.network_address) for network in same]
        self._lasts = [int(network.broadcast_address) for network in same]

    def hold(self, number: int) -> bool:
        place = bisect_right(self._firsts, number) - 1
        return place >= 0 and number <= self._lasts[place]

    def cover(self, other: _Ranges) -> bool:
        places = [bisect_right(self._firsts, first) - 1 for first in other._firsts]
        return all(place >= 0 and last <= self._lasts[place] for place, last in zip(places, other._lasts))


def _elements(request: Request, header: str) -> Iterable[str]:
    value = request.opened_headers().end(header, MOST_CHARACTERS + 1)
    if header == "forwarded":
        return map(_node, _from_the_right(value, _last_comma))
    if "," in value or len(value) > MAX_LENGTH:
        return _from_the_right(value, lambda rest: rest.rfind(","))
    return (value,)  # the usual case


def _listed(entry: str) -> Iterator[IPv4Network | IPv6Network]:
    for each, place in proxy_entries(entry):
        try:
            yield _network(each)
        except ConfigError as error:
            if place:
                raise ConfigError(f"{place}{error}") from error
            names = proxy_lists()
            probably = _LISTS.get(entry.lower()) or meant(entry, names)
            hint = f"; did you mean {probably!r}?" if probably else ""
            if entry.lower() in _UNLISTED:
                hint = f"; LimitGate has no list of {entry}, so save its ranges to a file"
            raise ConfigError(
                f"{error}, {UNIX!r} for a unix socket, '{LIST_FILE}PATH', or one of the lists {listed(names)}{hint}"
            ) from error


def _network(entry: str) -> IPv4Network | IPv6Network:
    if "%" in entry:
        raise ConfigError(f"{entry!r:.80} has a zone, expected an address or CIDR without one")
    try:
        network = ip_network(entry)
    except ValueError as error:
        raise ConfigError(f"{entry!r:.80} is not an address or CIDR, expected {_like(entry)}") from error
    inside = network.prefixlen >= 96 and canonical(str(network.network_address))
    return IPv4Network((inside, network.prefixlen - 96)) if network.version == 6 and inside and inside.version == 4 else network


def _like(entry: str) -> str:
    try:
        return f"{str(ip_network(entry, strict=False))!r}, without bits beyond the prefix"
    except ValueError:
        return "for example '10.0.0.0/8' or '::1'"


def _from_the_right(value: str, last_comma: Callable[[str], int]) -> Iterator[str]:
    """Yield elements from the right, so that the client's text on the left can't change what the nearest proxy wrote.

    A truncated element isn't skipped, because it may have text of the client.
    """
    is_cut = len(value) > MOST_CHARACTERS
    for _ in range(MAX_HOPS):
        comma = last_comma(value)
        if comma < 0 and is_cut:
            break
        yield value[comma + 1 :]
        if comma < 0:
            return
        value = value[:comma]
    raise HeadersTooLargeError(
        f"The client is not named in the last {MAX_HOPS} elements and {MOST_CHARACTERS:,} characters of the forwarding header."
    )


def _node(element: str) -> str:
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
    end, quotes, comma = len(value), 0, value.rfind(",")
    while comma >= 0:
        quotes += _quotes(value, comma, end)
        if quotes % 2 == 0:
            return comma
        end = comma
        comma = value.rfind(",", 0, max(0, value.rfind('"', 0, comma)))
    return -1


def _quotes(value: str, start: int, end: int) -> int:
    if value.find("\\", start, end) >= 0:
        return value[start:end].replace("\\\\", "").replace('\\"', "").count('"')
    return value.count('"', start, end)


LIST_FILE = "file:"
_FOLDER = Path(__file__).parent / "proxies"


@cache
def proxy_lists() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.txt")))


def proxy_entries(entry: str) -> Iterator[tuple[str, str]]:
    """Yield the addresses and CIDRs of an entry, each with its position in a list.

    Raises `ConfigError` for an unreadable or empty file.
    """
    path = (
        entry[len(LIST_FILE) :] if entry.startswith(LIST_FILE) else _FOLDER / f"{entry}.txt" if entry in proxy_lists() else None
    )
    if path is None:
        yield entry, ""
        return
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"{entry!r:.200} cannot be read ({error}), expected a file of addresses and CIDRs, one per line"
        ) from error
    found = [(line.partition("#")[0].strip(), f"{path}:{number}: ") for number, line in enumerate(lines, 1)]
    listed = [each for each in found if each[0]]
    if not listed:
        raise ConfigError(f"{entry!r:.200} lists nothing, expected addresses and CIDRs, one per line")
    yield from listed
