from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

import pytest
from hypothesis import example, given, strategies as st

from limitgate import Caller, LimitGate, LimitGateWSGI, Rule
from limitgate.errors import ConfigError, HeadersTooLargeError
from limitgate.http.client_ip import _PROXIES, TrustedProxies, canonical, grouped
from limitgate.http.request import ASGIRequest, WSGIRequest

PRIVATE = ("10.0.0.0/8", "fd00::/8")
PROXY = "10.0.0.1"


def asked(*headers: tuple[str, str | bytes], peer: str | None = PROXY) -> ASGIRequest:
    """A request with these header lines, from this peer."""
    raw = [(name.encode(), value if isinstance(value, bytes) else value.encode("latin-1")) for name, value in headers]
    return ASGIRequest({"type": "http", "path": "/", "headers": raw, "client": None if peer is None else (peer, 4711)})


def client_of(
    *values: str | bytes, peer: str | None = PROXY, trusted: Sequence[str] = PRIVATE, header: str = "x-forwarded-for"
) -> str | None:
    """The client of a request with these lines of the forwarding header."""
    return TrustedProxies(trusted, header).client(asked(*[(header, value) for value in values], peer=peer))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("192.0.2.1", "192.0.2.1"),
        (" 192.0.2.1\t", "192.0.2.1"),
        (" " * 200 + "192.0.2.1", "192.0.2.1"),
        ("192.0.2.1:8080", "192.0.2.1"),
        ("192.0.2.1:0", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::1"),
        ("2001:DB8:0:0::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("[fe80::1%eth0]:443", "fe80::1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::ffff:c000:201", "192.0.2.1"),
        ("[::ffff:192.0.2.1]:80", "192.0.2.1"),
        ("64:ff9b::192.0.2.1", "192.0.2.1"),
        ("64:ff9b::c000:201", "192.0.2.1"),
        ("64:ff9b:1::c000:201", "64:ff9b:1::c000:201"),
        ("::1", "::1"),
        ("::", "::"),
    ],
)
def test_an_address_is_read_in_every_form_that_proxies_write(text: str, expected: str) -> None:
    """Ports, brackets and zones go, and IPv4 inside IPv6 is IPv4."""
    assert str(canonical(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "unknown",
        "_hidden",
        "localhost",
        "example.com:80",
        "1.2.3",
        "1.2.3.4.5",
        "256.1.1.1",
        "01.2.3.4",
        "1.2.3.4:",
        "1.2.3.4:http",
        "1.2.3.4:123456",
        "1.2.3.4/32",
        "1.2.3.4 5.6.7.8",
        "1.2.3.4\x00",
        "http://1.2.3.4",
        "0x7f000001",
        "2130706433",
        "\u0661.\u0662.\u0663.\u0664",
        "-1.2.3.4",
        ":",
        "[]",
        "[::1",
        "::1]",
        "[::1]x",
        "[::1]:",
        "[::1]:x",
        "1:2:3:4:5:6:7:8:9",
        "2001:db8::1::2",
        "::ffff:1.2.3",
        '"1.2.3.4"',
        "1" * 101,
        " " * 200 + "1" * 101,
    ],
)
def test_address_invalid_is_none(text: str) -> None:
    """Names, numbers, halves of addresses and overlong text are no address."""
    assert canonical(text) is None


ipv6 = st.lists(st.sampled_from([0, 0, 0, 1, 0xAB, 0xFFFF]) | st.integers(0, 0xFFFF), min_size=8, max_size=8).map(
    lambda groups: IPv6Address(struct.pack("!8H", *groups))
)
inside = st.integers(0, 2**32 - 1).flatmap(
    lambda number: st.sampled_from([IPv6Address(0xFFFF << 32 | number), IPv6Address((0x64FF9B << 96) + number)])
)
written = st.one_of(
    st.one_of(st.ip_addresses(v=4), ipv6, inside).flatmap(
        lambda address: st.sampled_from([str(address), address.exploded, str(address).upper(), f" {address}\t", f"[{address}]"])
    ),
    st.text("0123456789abcdefF:.%[] \n\0\u0661", max_size=45),
    st.lists(st.sampled_from(["0", "1", "01", "25", "255", "256", "300", ".", ".", "::", ":"]), max_size=9).map("".join),
)


@given(written, st.integers(0, 128))
@example("255.255.255.255", 64)
@example("1.2.3.04", 64)
@example("1.2.3.256", 64)
def test_address_parsed_fast_equals_that_of_ipaddress(text: str, prefix: int) -> None:
    """Property: spellings and networks are those of `ipaddress`, whatever text comes."""
    address = canonical(text)
    assert client_of(peer=text, trusted=()) == ((text or None) if address is None else str(address))
    if isinstance(address, IPv6Address):
        assert grouped(text, prefix) == str(IPv6Network((address, prefix), strict=False))
    else:
        assert grouped(text, prefix) == (text if address is None else str(address))
    for network in ("192.0.0.0/2", "2000::/3", "::/1"):
        expected = address is not None and address in ip_network(network)
        assert TrustedProxies([network], "x-forwarded-for").trust(text) is expected


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("64:ff9b::192.0.2.1", "192.0.2.1"),
        ("2001:DB8::1", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("testclient", "testclient"),
        (None, None),
    ],
)
def test_without_a_proxy_the_peer_is_the_client(peer: str | None, expected: str | None) -> None:
    """The client is whoever opened the connection, spelled in one way; without an address it has none."""
    assert client_of(peer=peer) == expected


FORGED = (
    "x-forwarded-for",
    "x_forwarded_for",
    "forwarded",
    "x-real-ip",
    "cf-connecting-ip",
    "true-client-ip",
    "x-client-ip",
    "fly-client-ip",
    "client-ip",
    "via",
)


@given(
    st.lists(st.tuples(st.sampled_from(FORGED), st.one_of(st.binary(), st.sampled_from([b"1.2.3.4", b"for=1.2.3.4"])))),
    st.sampled_from(["x-forwarded-for", "forwarded", "x-real-ip"]),
    st.sampled_from([(), PRIVATE, ("unix",)]),
)
def test_forwarding_header_from_an_untrusted_peer_is_ignored_property(
    headers: list[tuple[str, bytes]], header: str, trusted: tuple[str, ...]
) -> None:
    """Whatever headers an untrusted peer sends, its own address is the client's."""
    assert TrustedProxies(trusted, header).client(asked(*headers, peer="203.0.113.9")) == "203.0.113.9"


@pytest.mark.parametrize("peer", ["10.0.0.1", "::ffff:10.0.0.1", "fd00::1", "fd00::1%eth0"])
def test_a_trusted_proxy_is_known_in_every_spelling(peer: str) -> None:
    """A proxy is trusted however the server spells its address."""
    assert client_of("192.0.2.1", peer=peer) == "192.0.2.1"


@pytest.mark.parametrize(
    ("entry", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.0/8", "10.9.9.9"),
        ("0.0.0.0/0", "10.9.9.9"),
        ("::1", "::1"),
        ("fd00::/8", "fd12::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.0/104", "10.9.9.9"),
        ("::ffff:10.0.0.0/104", "::ffff:10.9.9.9"),
        ("64:ff9b::10.0.0.1", "64:ff9b::10.0.0.1"),
        ("64:ff9b::/64", "64:ff9b::1:0:0:1"),
        ("::/0", "2001:db8::1"),
    ],
)
def test_a_network_is_trusted_however_it_is_written(entry: str, peer: str) -> None:
    """An address or CIDR of trusted_proxies covers the peers that are in it."""
    assert TrustedProxies([entry], "x-forwarded-for").trust(peer)


@pytest.mark.parametrize(
    ("entry", "peer"),
    [
        ("10.0.0.1", "10.0.0.2"),
        ("10.0.0.0/8", "11.0.0.1"),
        ("10.0.0.0/8", "::a00:1"),
        ("10.0.0.0/8", "testclient"),
        ("10.0.0.0/8", None),
        ("::ffff:10.0.0.0/104", "11.0.0.1"),
        ("unix", "10.0.0.1"),
        ("unix", "unix"),
    ],
)
def test_peer_outside_the_trusted_networks_is_untrusted(entry: str, peer: str | None) -> None:
    """A peer outside of the listed networks is not believed."""
    assert not TrustedProxies([entry], "x-forwarded-for").trust(peer)


@pytest.mark.parametrize(
    "entry",
    ["", "*", "all", "10.0.0.0/33", "10.0.0.1/8", "10.0.0", "[::1]", "::1/129", "10.0.0.1:80", "10.0.0.1,10.0.0.2", "UNIX"],
)
def test_trusted_proxies_with_an_invalid_network_is_refused(entry: str) -> None:
    """An entry that is no address or CIDR is refused at start-up, named and with what was expected."""
    with pytest.raises(ConfigError, match=r"is not an address or CIDR, expected") as caught:
        TrustedProxies([entry], "x-forwarded-for")
    assert repr(entry) in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], PROXY),
        ([""], PROXY),
        (["192.0.2.1"], "192.0.2.1"),
        (["192.0.2.1:8080"], "192.0.2.1"),
        (["[2001:db8::1]:8080"], "2001:db8::1"),
        (["::ffff:192.0.2.1"], "192.0.2.1"),
        (["1.1.1.1, 192.0.2.1"], "192.0.2.1"),
        (["1.1.1.1,192.0.2.1"], "192.0.2.1"),
        (["1.1.1.1 ,\t192.0.2.1 "], "192.0.2.1"),
        (["1.1.1.1, 192.0.2.1, 10.0.0.2"], "192.0.2.1"),
        (["1.1.1.1, 192.0.2.1, 10.0.0.3, 10.0.0.2"], "192.0.2.1"),
        (["1.1.1.1, 192.0.2.1, ::ffff:10.0.0.2"], "192.0.2.1"),
        (["1.1.1.1, 10.0.0.9, 192.0.2.1, 10.0.0.2"], "192.0.2.1"),
        # all trusted: the leftmost
        (["10.0.0.9, 10.0.0.3, 10.0.0.2"], "10.0.0.9"),
        (["10.0.0.9"], "10.0.0.9"),
        # an invalid element stops the walk at the last good hop
        (["192.0.2.1, unknown"], PROXY),
        (["192.0.2.1, unknown, 10.0.0.2"], "10.0.0.2"),
        (["192.0.2.1, _hidden, 10.0.0.2"], "10.0.0.2"),
        (["192.0.2.1, 10.0.0.3x, 10.0.0.2"], "10.0.0.2"),
        (["192.0.2.1, , 10.0.0.2"], "10.0.0.2"),
        (["unknown, 192.0.2.1"], "192.0.2.1"),
        (["nonsense"], PROXY),
        (['"192.0.2.1"'], PROXY),
        # several lines of the one header are one list
        (["1.1.1.1", "192.0.2.1"], "192.0.2.1"),
        (["192.0.2.1", "10.0.0.2"], "192.0.2.1"),
        (["1.1.1.1, 192.0.2.1", "10.0.0.3, 10.0.0.2"], "192.0.2.1"),
        (["192.0.2.1", "unknown"], PROXY),
    ],
)
def test_client_is_the_first_untrusted_address_from_the_right(lines: list[str], expected: str) -> None:
    """Behind trusted proxies the client is the first address from the right that is no proxy."""
    assert client_of(*lines) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], PROXY),
        ([""], PROXY),
        (["for=192.0.2.1"], "192.0.2.1"),
        (["For=192.0.2.1"], "192.0.2.1"),
        (["FOR=192.0.2.1;Proto=https"], "192.0.2.1"),
        (['for="192.0.2.1"'], "192.0.2.1"),
        (['for="192.0.2.1:4711"'], "192.0.2.1"),
        (['for="[2001:db8::1]"'], "2001:db8::1"),
        (['for="[2001:db8::1]:4711"'], "2001:db8::1"),
        (['for="[::ffff:192.0.2.1]"'], "192.0.2.1"),
        (["proto=https;for=192.0.2.1;by=203.0.113.43"], "192.0.2.1"),
        (["proto=https; for=192.0.2.1 ; by=203.0.113.43"], "192.0.2.1"),
        (['for="[2001:db8::1]:4711";proto=https;by=203.0.113.43, for=192.0.2.43'], "192.0.2.43"),
        (["for=1.1.1.1, for=192.0.2.1, for=10.0.0.2"], "192.0.2.1"),
        (["for=1.1.1.1,for=192.0.2.1,for=10.0.0.2"], "192.0.2.1"),
        (["for=10.0.0.9, for=10.0.0.2"], "10.0.0.9"),
        (["for=1.1.1.1", "for=192.0.2.1"], "192.0.2.1"),
        # commas, semicolons and equals signs inside of quotes
        (['for=192.0.2.1;host="a,b"'], "192.0.2.1"),
        (['host="a,b";for=192.0.2.1'], "192.0.2.1"),
        (['for=192.0.2.1;host="a,for=1.1.1.1"'], "192.0.2.1"),
        (['for=192.0.2.1;host="a;for=1.1.1.1"'], "192.0.2.1"),
        (['host="for=1.1.1.1, for=2.2.2.2";for=192.0.2.1, for=10.0.0.2'], "192.0.2.1"),
        (['for=192.0.2.1;host="a\\"b"'], "192.0.2.1"),
        (['for=192.0.2.1;host="a\\",b"'], "192.0.2.1"),
        (['for=192.0.2.1;host="a,\\"b"'], "192.0.2.1"),
        (['for=192.0.2.1;host="\\"a,\\"", for=10.0.0.2'], "192.0.2.1"),
        # nodes that are no address, elements that name none
        (["for=192.0.2.1, for=unknown"], PROXY),
        (["for=192.0.2.1, for=unknown, for=10.0.0.2"], "10.0.0.2"),
        (["for=192.0.2.1, for=_SEVKISEK, for=10.0.0.2"], "10.0.0.2"),
        (['for=192.0.2.1, for="_gazonk", for=10.0.0.2'], "10.0.0.2"),
        (["for=192.0.2.1, proto=https, for=10.0.0.2"], "10.0.0.2"),
        (["for=192.0.2.1, by=10.0.0.2"], PROXY),
        (["for=1.1.1.1;for=192.0.2.1"], PROXY),
        (["for=192.0.2.1;for=192.0.2.1, for=10.0.0.2"], "10.0.0.2"),
        (["192.0.2.1"], PROXY),
        (["xfor=192.0.2.1"], PROXY),
        (["for="], PROXY),
        (['for=""'], PROXY),
        (['for="192.0.2.1'], PROXY),
        (['for=192.0.2.1"'], PROXY),
        # what a client wrote to the left stays to the left
        (['for="1.1.1.1, for=192.0.2.1'], "192.0.2.1"),
        (['", for=192.0.2.1'], "192.0.2.1"),
        (['for=1.1.1.1;host=", for=192.0.2.1'], "192.0.2.1"),
        (['for="1.1.1.1\\", for=192.0.2.1'], "192.0.2.1"),
        (['for="', 'for="[2001:db8::1]"'], "2001:db8::1"),
        (['for="1.1.1.1, for="[2001:db8::1]", for=10.0.0.2'], "2001:db8::1"),
        (['"""""', "for=192.0.2.1", "for=10.0.0.2"], "192.0.2.1"),
    ],
)
def test_forwarded_is_read_as_rfc_7239_has_it(lines: list[str], expected: str) -> None:
    """Of a Forwarded header the for parameters count, quoted or not; what a client wrote hides nothing that a proxy did."""
    assert client_of(*lines, header="forwarded") == expected


@pytest.mark.parametrize("spelling", ["x-forwarded-for", "X-Forwarded-For", "X-FORWARDED-FOR"])
def test_the_header_may_be_configured_in_any_case(spelling: str) -> None:
    """Header names are the same in upper and lower case."""
    request = asked(("x-forwarded-for", "192.0.2.1"))
    assert TrustedProxies(PRIVATE, spelling).client(request) == "192.0.2.1"


@pytest.mark.parametrize("name", ["x_forwarded_for", "forwarded", "x-real-ip", "x-forwarded-host", "xx-forwarded-for"])
def test_only_the_one_configured_header_is_read(name: str) -> None:
    """Even a trusted proxy passes on headers that a client forged, so no other header is looked at."""
    assert TrustedProxies(PRIVATE, "x-forwarded-for").client(asked((name, "192.0.2.1"))) == PROXY
    both = asked((name, "203.0.113.9"), ("x-forwarded-for", "192.0.2.1"))
    assert TrustedProxies(PRIVATE, "x-forwarded-for").client(both) == "192.0.2.1"


def test_another_header_of_one_address_can_be_named() -> None:
    """A header that a proxy sets with the client's address alone works as well."""
    assert client_of("192.0.2.1", header="cf-connecting-ip") == "192.0.2.1"


@pytest.mark.parametrize(
    ("trusted", "lines", "expected"),
    [
        ((), ["192.0.2.1"], None),
        (PRIVATE, ["192.0.2.1"], None),
        (("unix",), ["192.0.2.1"], "192.0.2.1"),
        (("unix",), [], None),
        (("unix",), ["unknown"], None),
        (("unix", *PRIVATE), ["192.0.2.1, 10.0.0.2"], "192.0.2.1"),
    ],
)
@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_a_peer_on_a_unix_socket_is_believed_when_unix_is_trusted(
    door: str, trusted: tuple[str, ...], lines: list[str], expected: str | None
) -> None:
    """A peer without an address is a proxy only if the word unix stands in trusted_proxies, and never 127.0.0.1."""
    if door == "asgi":
        request = asked(*[("x-forwarded-for", line) for line in lines], peer=None)
    else:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": ""}
        request = WSGIRequest(environ | ({"HTTP_X_FORWARDED_FOR": lines[0]} if lines else {}))
    assert TrustedProxies(trusted, "x-forwarded-for").client(request) == expected


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded"])
def test_a_long_chain_is_not_walked_to_its_end(header: str) -> None:
    """32 elements are looked at from the right, and no more: whoever stands further to the left is not taken for the last."""
    element = "for={}" if header == "forwarded" else "{}"
    hops = [element.format(f"10.0.1.{place}") for place in range(40)]
    assert client_of(", ".join(hops[:32]), header=header) == "10.0.1.0"
    for chain in (hops, [element.format("192.0.2.1"), *hops[:32]]):
        with pytest.raises(HeadersTooLargeError, match="last 32 elements"):
            client_of(", ".join(chain), header=header)
    within = [element.format("192.0.2.1"), *hops[:31]]
    assert client_of(", ".join(within), header=header) == "192.0.2.1"


addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(st.lists(st.binary(max_size=60), max_size=3), addresses)
@example([b'for="'], "192.0.2.1")
@example([b"\\"], "2001:db8::1")
def test_a_client_behind_a_proxy_cannot_choose_its_address_property(forged: list[bytes], address: str) -> None:
    """Whatever a client writes into the header, the address that the trusted proxy appended is the client."""
    true = canonical(address)
    if TrustedProxies(PRIVATE, "forwarded").trust(address):
        return
    node = f'"[{address}]"' if ":" in address else address
    for header, appended in (("x-forwarded-for", address), ("forwarded", f"proto=https;for={node}")):
        assert client_of(*forged, appended, header=header) == str(true)
        assert client_of(b", ".join([*forged, appended.encode()]), header=header) == str(true)
        assert client_of(*forged, appended, b"for=10.0.0.7" if header == "forwarded" else b"10.0.0.7", header=header) == str(
            true
        )


tricky = st.lists(
    st.sampled_from([b"for=", b'"', b",", b";", b"=", b"\\", b" ", b"10.0.0.2", b"1.2.3.4", b"[::1]", b"_x", b"host", b"\xff"]),
    max_size=30,
).map(b"".join)


@given(
    st.lists(st.one_of(st.binary(max_size=200), tricky), max_size=4),
    st.sampled_from(["x-forwarded-for", "forwarded"]),
    st.one_of(st.just(PROXY), st.none(), st.text(max_size=20), addresses),
    st.sampled_from([(), PRIVATE, ("unix",), ("0.0.0.0/0", "::/0", "unix")]),
)
def test_no_header_makes_the_search_fail_fuzz(
    values: list[bytes], header: str, peer: str | None, trusted: tuple[str, ...]
) -> None:
    """Any bytes in the header give an address, or the peer as it is."""
    client = client_of(*values, peer=peer, trusted=trusted, header=header)
    assert client == (peer or None) or str(canonical(client)) == client


SIZE = 64 * 1024


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded"])
@pytest.mark.parametrize(
    "unit",
    [
        ",",
        '"',
        ',"',
        '"",',
        '\\",',
        ";",
        "=",
        " ",
        ", ",
        " ;",
        "a",
        "a=",
        "a=b;",
        'a="b";',
        'a="b,c";',
        "for=",
        "for=a;",
        "for=a ; ",
        'for="a";',
        'for="a,',
        "for=10.0.0.2;",
        "for=10.0.0.2,",
        "10.0.0.2,",
        "[",
        "[::1],",
        ":",
        "1.",
    ],
)
def test_an_adversarial_header_is_bounded_work(header: str, unit: str) -> None:
    """A header as long as servers let through, made to be hard to read, is read in well under a second."""
    for end in ("", "!", '"', '="', "for=10.0.0.2"):
        value = unit * (SIZE // len(unit)) + end
        began = time.thread_time()
        with contextlib.suppress(HeadersTooLargeError):
            client_of(value, header=header)
        assert time.thread_time() - began < 1


@pytest.mark.parametrize(
    ("client", "prefix", "expected"),
    [
        ("192.0.2.1", 64, "192.0.2.1"),
        ("192.0.2.1", 32, "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", 64, "2001:db8:1:2::/64"),
        ("2001:db8:1:2:3:4:5:6", 128, "2001:db8:1:2:3:4:5:6/128"),
        ("2001:db8:1:2:3:4:5:6", 56, "2001:db8:1::/56"),
        ("2001:db8:1:2:3:4:5:6", 48, "2001:db8:1::/48"),
        ("2001:db8:1:2:3:4:5:6", 32, "2001:db8::/32"),
        ("fe80::1%eth0", 64, "fe80::/64"),
        ("::ffff:192.0.2.1", 64, "192.0.2.1"),
        ("::ffff:192.0.2.2", 64, "192.0.2.2"),
        ("64:ff9b::192.0.2.1", 64, "192.0.2.1"),
        ("testclient", 64, "testclient"),
    ],
)
def test_a_client_is_counted_as_its_network(client: str, prefix: int, expected: str) -> None:
    """IPv6 clients are one per network of the prefix, IPv4 clients each for themselves, in IPv6 clothes too."""
    assert grouped(client, prefix) == expected


@given(st.ip_addresses(v=6), st.integers(0, 127), st.integers(32, 128))
def test_clients_are_together_exactly_within_a_network_property(address: IPv6Address, bit: int, prefix: int) -> None:
    """An address that differs in one bit is the same client if the bit is behind the prefix, another if it is in it."""
    other = IPv6Address(int(address) ^ (1 << (127 - bit)))
    if any(isinstance(canonical(str(one)), IPv4Address) for one in (address, other)):
        return
    assert (grouped(str(address), prefix) == grouped(str(other), prefix)) is (bit >= prefix)
    assert address in IPv6Network(grouped(str(address), prefix))


@given(st.ip_addresses(v=4), st.ip_addresses(v=4), st.sampled_from(["::ffff:{}", "64:ff9b::{}"]), st.integers(32, 128))
def test_ipv4_clients_are_never_pooled_property(one: IPv4Address, other: IPv4Address, form: str, prefix: int) -> None:
    """Two IPv4 clients that arrive as IPv6 are two clients, each the same as if it had arrived as IPv4."""
    assert grouped(form.format(one), prefix) == str(one)
    assert (grouped(form.format(one), prefix) == grouped(form.format(other), prefix)) is (one == other)


def _through_asgi(identify: object) -> None:
    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b""}

    async def send(_: object) -> None:
        pass

    gate = LimitGate(app, rules=[Rule("all", "5/second")], identify=identify, trusted_proxies=PRIVATE, store="memory://")
    asyncio.run(gate(asked(("x-forwarded-for", "192.0.2.1")).scope | {"method": "GET"}, receive, send))


def _through_wsgi(identify: object) -> None:
    def app(environ, start_response) -> list[bytes]:
        start_response("204 No Content", [])
        return []

    gate = LimitGateWSGI(app, rules=[Rule("all", "5/second")], identify=identify, trusted_proxies=PRIVATE, store="memory://")
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": PROXY, "HTTP_X_FORWARDED_FOR": "192.0.2.1"}
    gate(environ, lambda *_: lambda _: None)


def test_address_cache_keeps_only_proxies() -> None:
    """A peer that is trusted is read once, however it is spelled; others are not remembered, and of many proxies only some."""
    proxies = TrustedProxies(["10.0.0.0/8"], "x-forwarded-for")
    asked = [("10.0.0.1", "203.0.113.9"), ("::ffff:10.0.0.2", "203.0.113.9"), ("192.0.2.1", "192.0.2.1"), ("what", "what")]
    for peer, expected in 2 * asked:
        scope = {"path": "/", "headers": [(b"x-forwarded-for", b"203.0.113.9")], "client": (peer, 1)}
        assert proxies.client(ASGIRequest(scope)) == expected
        assert proxies.trust(peer) is (peer != expected)
    assert proxies._met == {"10.0.0.1": "10.0.0.1", "::ffff:10.0.0.2": "10.0.0.2"}
    for number in range(5000):
        peer = f"10.1.{number >> 8}.{number & 255}"
        assert proxies.client(ASGIRequest({"path": "/", "headers": [], "client": (peer, 1)})) == peer
        assert len(proxies._met) <= _PROXIES


@pytest.mark.parametrize("through", [_through_asgi, _through_wsgi])
def test_identify_gets_the_resolved_client_address(through) -> None:
    """The request that identify gets knows the client behind the trusted proxies already."""
    told: list[str | None] = []

    def identify(request) -> Caller | None:
        told.append(request.client)
        return None

    through(identify)
    assert told == ["192.0.2.1"]


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("x-forwarded-for", "198.51.100.7, " * 50_000 + "203.0.113.9", "203.0.113.9"),
        ("x-forwarded-for", "198.51.100.7, " + "10.0.0.1, " * 50_000 + "10.0.0.2", None),
        ("x-forwarded-for", "198.51.100.7," + " " * 90 + "10.0.0.1", "198.51.100.7"),
        ("x-forwarded-for", "198.51.100.7," + " " * 1900 + "10.0.0.1", "198.51.100.7"),
        ("x-forwarded-for", "198.51.100.7," + " " * 5000 + "10.0.0.1", None),
        ("x-forwarded-for", "198.51.100.7," + "1" * 2000 + "10.0.0.1", "10.0.0.9"),
        ("x-forwarded-for", " " * 5000 + "203.0.113.9", None),
        ("forwarded", "for=198.51.100.7, " * 50_000 + "for=203.0.113.9", "203.0.113.9"),
        ("forwarded", 'for="' * 50_000 + ", for=203.0.113.9", "203.0.113.9"),
        ("forwarded", "for=203.0.113.9;host=" + "h" * 2000 + ", for=10.0.0.1", "203.0.113.9"),
        ("forwarded", "for=203.0.113.9;host=" + "h" * 2020 + ", for=10.0.0.1", None),
        ("forwarded", "for=203.0.113.9;host=" + "h" * 5000, None),
    ],
)
def test_of_a_long_header_only_its_end_is_read(header: str, value: str, expected: str | None) -> None:
    """However long a client has made a forwarding header, what proxies appended counts; a proxy does not stand for the rest."""
    proxies = TrustedProxies(["10.0.0.0/8"], header)
    for lines in ([value], ["198.51.100.8", value], value.rsplit(", ", 1)):
        scope = {"path": "/", "headers": [(header.encode(), line.encode()) for line in lines], "client": ("10.0.0.9", 1)}
        if expected is not None:
            assert proxies.client(ASGIRequest(scope)) == expected
            continue
        with pytest.raises(HeadersTooLargeError):
            proxies.client(ASGIRequest(scope))
        assert proxies.hops(ASGIRequest(scope))[-1].address is None


def test_a_proxys_line_is_found_among_all_that_are_read() -> None:
    """A client cannot crowd out what its proxy says by header lines."""
    proxies = TrustedProxies(["10.0.0.0/8"], "x-forwarded-for")
    forged, own = (b"x-forwarded-for", b"198.51.100.7"), (b"x-forwarded-for", b"203.0.113.9")
    for forging in (100, 999 - 2 * 400):
        headers = [forged] * forging + [(b"a", b"")] * 400 + [own] + [(b"b", b"")] * 400
        assert proxies.client(ASGIRequest({"path": "/", "headers": headers, "client": ("10.0.0.9", 1)})) == "203.0.113.9"
    request = ASGIRequest({"path": "/", "headers": [(b"a", b""), *headers], "client": ("10.0.0.9", 1)})
    assert request.has_too_many_lines
    with pytest.raises(HeadersTooLargeError):
        proxies.client(request)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 32)), max_size=20), st.integers(0, 2**32 - 1))
def test_many_networks_trust_the_same_addresses_as_each_alone_property(drawn: list[tuple[int, int]], number: int) -> None:
    """An address is trusted if any of the networks has it, overlapping ones and neighbours included."""
    networks = [IPv4Network((first, bits), strict=False) for first, bits in drawn]
    proxies = TrustedProxies([str(network) for network in networks], "x-forwarded-for")
    for address in (IPv4Address(number), *(network[place] for network in networks for place in (0, -1))):
        assert proxies.trust(str(address)) is any(address in network for network in networks)
    assert not proxies.trust("2001:db8::1")
