"""Lists of trusted proxies that have names, and lists in files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import ip_network
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

import limitgate.flask
from limitgate import ConfigError, LimitGateWSGI, Rule
from limitgate.http.client_ip import TrustedProxies, proxy_entries, proxy_lists
from tests.support.doors import wsgi_reply

CLIENT = "203.0.113.7"
TOLD = {"x-forwarded-for": CLIENT}


def trusts(*entries: str) -> Callable[[str], bool]:
    return TrustedProxies(entries, "x-forwarded-for").trust


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        (
            "cloudflare",
            ["104.16.0.1", "172.71.255.255", "2606:4700::1", "::ffff:104.16.0.1"],
            ["104.32.0.1", "1.1.1.1", "10.0.0.1"],
        ),
        ("fastly", ["151.101.1.1", "2a04:4e42::1"], ["151.102.0.1", "104.16.0.1"]),
        ("google-front-end", ["35.191.0.1", "130.211.3.255"], ["130.211.4.0", "35.190.0.1"]),
        ("private", ["10.1.2.3", "172.31.0.1", "192.168.1.1", "fd00::1"], ["172.32.0.1", "100.64.0.1", "127.0.0.1", "fe80::1"]),
        ("loopback", ["127.0.0.1", "127.9.9.9", "::1"], ["10.0.0.1", "::2"]),
        ("link-local", ["169.254.1.1", "fe80::1"], ["169.253.0.1", "10.0.0.1"]),
        ("shared", ["100.64.0.1", "100.127.255.255"], ["100.128.0.0", "10.0.0.1"]),
    ],
)
def test_trusted_proxies_with_a_list_name_trusts_its_networks(name: str, inside: Sequence[str], outside: Sequence[str]) -> None:
    """What is in each, and what is not."""
    trust = trusts(name)
    assert [address for address in inside if not trust(address)] == []
    assert [address for address in outside if trust(address)] == []


def test_no_list_is_wider_than_it_says() -> None:
    """Each line is a network, none is in a list twice, and no list is of everybody."""
    assert proxy_lists() == ("cloudflare", "fastly", "google-front-end", "link-local", "loopback", "private", "shared")
    for name in proxy_lists():
        networks = sorted((ip_network(entry) for entry, _ in proxy_entries(name)), key=lambda each: (each.version, each))
        assert not any(one.version == other.version and one.overlaps(other) for one, other in pairwise(networks))
        assert all(network.is_private or network.prefixlen >= (10 if network.version == 4 else 29) for network in networks)
    assert not TrustedProxies(proxy_lists(), "x-forwarded-for").trust_everybody


def test_names_stand_beside_addresses() -> None:
    """All kinds of entries in one list."""
    trust = trusts("cloudflare", "192.0.2.1", "10.0.0.0/8", "loopback", "unix")
    assert all(map(trust, ("104.16.0.1", "192.0.2.1", "10.1.1.1", "::1")))
    assert TrustedProxies(["loopback", "unix"], "x-forwarded-for").trust(None)
    assert not trust("192.0.2.2")


def test_trusted_proxies_with_a_file_trusts_its_networks(tmp_path: Path) -> None:
    """A file takes the place of a list that has changed: what providers publish, with comments if it has some."""
    path = tmp_path / "cloudflare.txt"
    path.write_text("# of today\n\n203.0.113.0/24\r\n  2001:db8::/32   # IPv6\n192.0.2.1")
    trust = trusts(f"file:{path}", "10.0.0.0/8")
    assert all(map(trust, ("203.0.113.9", "2001:db8::9", "192.0.2.1", "10.0.0.1")))
    assert not trust("104.16.0.1")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"10.0.0.0/8\nnowhere\n", r"list\.txt:2: 'nowhere' is not an address or CIDR, expected for example"),
        (
            b"10.0.0.0/8 # inside\n10.0.0.1/8\n",
            r"list\.txt:2: '10.0.0.1/8' is not an address or CIDR, expected '10.0.0.0/8', without",
        ),
        (b"cloudflare\n", r"list\.txt:1: 'cloudflare' is not an address or CIDR"),
        (b"", "lists nothing, expected addresses and CIDRs, one per line"),
        (b"# nothing\n\n", "lists nothing"),
        (b"\xff\xfe", r"cannot be read .*, expected a file of addresses and CIDRs"),
    ],
)
def test_proxy_list_file_with_an_invalid_line_is_refused(tmp_path: Path, text: bytes, complaint: str) -> None:
    """It is told by file and line; a file without entries is no way to trust nobody."""
    path = tmp_path / "list.txt"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=complaint):
        trusts("10.0.0.0/8", f"file:{path}")


@pytest.mark.parametrize("path", ["", "/nowhere/list.txt", ".", "a\0b"])
def test_proxy_list_file_that_is_missing_is_refused(path: str) -> None:
    """Nobody is trusted by mistake, and everybody's requests come from the proxy then: it is an error at start."""
    with pytest.raises(ConfigError, match="cannot be read"):
        trusts(f"file:{path}")


@pytest.mark.parametrize(
    ("entry", "guess"),
    [
        ("cloudflair", "cloudflare"),
        ("Cloudflare", "cloudflare"),
        ("link_local", "link-local"),
        ("priv", "private"),
        ("aws", None),
    ],
)
def test_trusted_proxies_with_a_misspelt_list_suggests_the_name(entry: str, guess: str | None) -> None:
    """The names there are, and which was probably meant."""
    with pytest.raises(ConfigError, match=r"one of the lists cloudflare, fastly, .*, private, shared") as caught:
        trusts(entry)
    end = f"; did you mean {guess!r}?" if guess else "LimitGate has no list of aws, so save its ranges to a file"
    assert str(caught.value).endswith(end)


@pytest.mark.parametrize("value", ["loopback,10.0.0.0/8", '["loopback", "10.0.0.0/8"]'])
def test_names_in_a_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """They are given as addresses are."""

    def answer(_: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("content-type", "text/plain")])
        return [b""]

    monkeypatch.setenv("LIMITGATE_TRUSTED_PROXIES", value)
    app = LimitGateWSGI(answer, rules=[Rule("all", "1/minute")])
    for peer in ("127.0.0.1", "10.0.0.9"):
        assert wsgi_reply(app, headers=TOLD, REMOTE_ADDR=peer).status == (200 if peer == "127.0.0.1" else 429)
    assert wsgi_reply(app, headers=TOLD, REMOTE_ADDR="192.0.2.1").status == 200


def test_names_in_the_settings_of_flask() -> None:
    """As an option, and in ``app.config``."""
    for options, config in (({"trusted_proxies": ["cloudflare"]}, {}), ({}, {"LIMITGATE_TRUSTED_PROXIES": ["cloudflare"]})):
        app = Flask(__name__)
        app.config.update(config)
        app.add_url_rule("/", view_func=lambda: "hello")
        limitgate.flask.LimitGate(app, rules=[Rule("all", "1/minute")], **options)
        ask = app.test_client().get
        for peer, status in (("104.16.0.1", 200), ("172.64.0.1", 429), ("192.0.2.1", 200)):
            assert ask("/", headers=TOLD, environ_base={"REMOTE_ADDR": peer}).status_code == status
