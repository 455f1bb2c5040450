from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest

from limitgate import Rule, RuleSet
from limitgate.rules import callers
from limitgate.rules.callers import KnownCaller
from tests.support.doors import SITES, Site

KEY = "a-long-and-random-key-4711"
DIGEST = hashlib.sha256(KEY.encode()).digest()


class Spy:
    """Stands for the module hmac; keeps what was compared."""

    def __init__(self) -> None:
        self.compared: list[tuple[Any, Any]] = []

    def compare_digest(self, one: Any, other: Any) -> bool:
        self.compared.append((one, other))
        return hmac.compare_digest(one, other)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    found = Spy()
    monkeypatch.setattr(callers, "hmac", found)
    return found


def listed(digest: bytes) -> RuleSet:
    known = [KnownCaller(id="acme", api_key=f"sha256:{digest.hex()}", tier="vip"), KnownCaller(id="x", header={"X-A": KEY})]
    return RuleSet([Rule("all", "100/day"), Rule("all", "100/day", key=["api_key"], tier="vip")], known)


@pytest.mark.parametrize("door", SITES)
def test_keys_are_compared_as_whole_digests(door: type[Site], spy: Spy) -> None:
    """Whatever is sent is compared as 32 bytes of SHA-256, in constant time, never itself."""
    with door(rules=listed(DIGEST)) as site:
        for key in (KEY, KEY[:-1], "b" + KEY[1:], KEY[:10], "", "x" * 5000, "\xe9"):
            site.ask(headers={"X-API-Key": key})
    assert spy.compared
    for one, other in spy.compared:
        assert (type(one), len(one)) == (type(other), len(other)) == (bytes, 32)
        assert KEY.encode() not in one + other


@pytest.mark.parametrize("door", SITES)
def test_how_much_of_a_key_is_right_makes_no_difference(door: type[Site], spy: Spy) -> None:
    """A key that is wrong in its last letter is compared as often as one that is wrong in its first: not at all."""
    with door(rules=listed(DIGEST)) as site:
        for wrong in (KEY[:-1] + "x", "x" + KEY[1:], KEY + "x", "x", KEY[:13]):
            site.ask(headers={"X-API-Key": wrong})
    assert spy.compared == []


@pytest.mark.parametrize("door", SITES)
def test_digests_that_begin_alike_are_compared_to_their_end(door: type[Site], spy: Spy) -> None:
    """A listed digest that begins like the sent key's is compared whole, and refused if only its end differs."""
    almost = DIGEST[:31] + bytes([DIGEST[31] ^ 1])
    with door(rules=listed(almost)) as site:
        assert site.ask(headers={"X-API-Key": KEY}).status == 200
        assert site.seen[0].rule == "all"
    assert [pair for pair in spy.compared if set(pair) == {almost, DIGEST}]


@pytest.mark.parametrize("door", SITES)
def test_secret_headers_are_compared_in_constant_time(door: type[Site], spy: Spy) -> None:
    """A header that names a caller is compared in constant time as well, and only for a trusted peer."""
    with door(rules=listed(DIGEST), trusted_proxies=["192.0.2.1"]) as site:
        site.ask(headers={"X-A": KEY[:-1] + "x"}, peer="198.51.100.7")
        assert spy.compared == []
        site.ask(headers={"X-A": KEY[:-1] + "x"}, peer="192.0.2.1")
    assert spy.compared == [((KEY[:-1] + "x").encode(), KEY.encode())]
