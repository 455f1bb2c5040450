from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from limitgate import Caller, Limit, Rule, RuleSet
from limitgate.errors import ConfigError
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.request import ASGIRequest
from limitgate.rules.callers import Callers, KnownCaller
from tests.support.doors import ASGISite, Site, WSGISite

PROXIES = TrustedProxies(["10.0.0.0/8", "unix"], "x-forwarded-for")


def digest_of(api_key: str) -> str:
    """An API key as it stands in a rule file."""
    return f"sha256:{hashlib.sha256(api_key.encode()).hexdigest()}"


def request(peer: str | None = "10.0.0.1", **headers: str) -> ASGIRequest:
    """A request with these headers, underscores for hyphens."""
    raw = [(name.replace("_", "-").lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    client = None if peer is None else (peer, 4711)
    made = ASGIRequest({"type": "http", "method": "GET", "path": "/", "headers": raw, "client": client})
    made.resolve_client = PROXIES.client
    return made


LISTED = Callers(
    [
        KnownCaller(id="acme", api_key=digest_of("acme-key"), tier="vip"),
        KnownCaller(id="acme", api_key=digest_of("acme-next-key"), tier="vip"),
        KnownCaller(id="small", api_key=digest_of("small-key")),
        KnownCaller(id="shouting", api_key=digest_of("shouting-key").upper().replace("SHA", "sha")),
        KnownCaller(id="billing", header={"X-Caller": "billing"}, tier="internal"),
        KnownCaller(id="batch", header={"X-Caller": "batch", "X-Zone": "eu"}),
        KnownCaller(id="both", api_key=digest_of("both-key"), header={"X-Caller": "both"}),
    ]
)


@pytest.mark.parametrize(
    ("api_key", "expected"),
    [
        ("acme-key", Caller("acme", "vip")),
        ("acme-next-key", Caller("acme", "vip")),
        ("small-key", Caller("small", "default")),
        ("shouting-key", Caller("shouting")),
        ("both-key", Caller("both")),
        ("ACME-KEY", None),
        ("acme-key ", None),
        ("acme", None),
        ("", None),
        (digest_of("acme-key"), None),
        (digest_of("acme-key").removeprefix("sha256:"), None),
        ("billing", None),
        ("\ud800", None),
    ],
)
def test_a_caller_is_known_by_its_api_key(api_key: str, expected: Caller | None) -> None:
    """Whoever shows the key behind a listed digest is that caller; the digest itself opens nothing."""
    assert LISTED.with_key(api_key) == expected


@given(st.lists(st.text(), unique=True, min_size=1, max_size=20), st.text())
def test_exactly_the_listed_keys_are_known_property(keys: list[str], other: str) -> None:
    """Every listed key finds its own caller, and no other key finds any."""
    callers = Callers([KnownCaller(id=str(place), api_key=digest_of(key)) for place, key in enumerate(keys)])
    for place, key in enumerate(keys):
        assert callers.with_key(key) == Caller(str(place))
    assert (callers.with_key(other) is not None) is (other in keys)


def test_keys_whose_digests_begin_alike_are_told_apart() -> None:
    """However much of a digest two callers have in common, the whole of it decides."""
    true = digest_of("the-key")
    alike = true[:-1] + ("0" if true[-1] != "0" else "1")
    assert Callers([KnownCaller(id="a", api_key=alike)]).with_key("the-key") is None
    both = Callers([KnownCaller(id="a", api_key=alike), KnownCaller(id="b", api_key=true)])
    assert both.with_key("the-key") == Caller("b")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"X_Caller": "billing"}, Caller("billing", "internal")),
        ({"x_caller": "billing"}, Caller("billing", "internal")),
        ({"X_Caller": "batch", "X_Zone": "eu"}, Caller("batch")),
        ({"X_Caller": "both"}, Caller("both")),
        ({"X_Caller": "batch"}, None),
        ({"X_Caller": "batch", "X_Zone": "us"}, None),
        ({"X_Zone": "eu"}, None),
        ({"X_Caller": "Billing"}, None),
        ({"X_Caller": "billing, billing"}, None),
        ({"X_Caller": ""}, None),
        ({"X_Caller": "\u00e9"}, None),
        ({}, None),
    ],
)
def test_a_caller_is_known_by_all_of_its_headers(headers: dict[str, str], expected: Caller | None) -> None:
    """A trusted peer names a caller by every header that is listed for it."""
    assert LISTED.with_headers(request(**headers), PROXIES) == expected
    assert LISTED.with_headers(request(peer=None, **headers), PROXIES) == expected


@pytest.mark.parametrize("peer", ["192.0.2.1", "::1", "11.0.0.1", "testclient", None])
def test_header_of_an_untrusted_client_identifies_no_caller(peer: str | None) -> None:
    """Headers that any client could send are not believed, wherever they claim to come from."""
    forged = request(peer=peer, X_Caller="billing", X_Forwarded_For="10.0.0.1")
    assert LISTED.with_headers(forged, TrustedProxies(["10.0.0.0/8"], "x-forwarded-for")) is None
    assert LISTED.with_headers(forged, TrustedProxies([], "x-forwarded-for")) is None


@pytest.mark.parametrize("peer", ["10.0.0.1", None])
@pytest.mark.parametrize("forwarded", ["192.0.2.1", "10.0.0.2, 192.0.2.1", "192.0.2.1, 10.0.0.2"])
def test_a_trusted_peer_passes_on_what_a_stranger_says(peer: str | None, forwarded: str) -> None:
    """Behind a trusted proxy the header of a stranger is not believed, unless the proxy sets it itself."""
    asked = request(peer=peer, X_Caller="billing", X_Forwarded_For=forwarded)
    assert LISTED.with_headers(asked, PROXIES) is None
    by_proxy = Callers([KnownCaller(id="billing", header={"X-Caller": "billing"}, set_by_proxy=True)])
    assert by_proxy.with_headers(asked, PROXIES) == Caller("billing")
    assert by_proxy.with_headers(request(peer="192.0.2.1", X_Caller="billing"), PROXIES) is None


def test_a_trusted_client_behind_a_trusted_peer_is_believed() -> None:
    """A service of our own may be behind the proxy, too."""
    asked = request(X_Caller="billing", X_Forwarded_For="192.0.2.1, 10.0.0.2, 10.0.0.3")
    assert LISTED.with_headers(asked, PROXIES) is None
    asked = request(X_Caller="billing", X_Forwarded_For="10.0.0.2, 10.0.0.3")
    assert LISTED.with_headers(asked, PROXIES) == Caller("billing", "internal")


def test_set_by_proxy_needs_a_header() -> None:
    """There is nothing that a proxy could set for a caller that goes by an API key alone."""
    with pytest.raises(ValueError, match="'a' has set_by_proxy, but no header, expected"):
        KnownCaller(id="a", api_key=digest_of("a"), set_by_proxy=True)


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        ({"api_key": digest_of("k")}, {"api_key": digest_of("k")}, "api_key"),
        ({"api_key": digest_of("k")}, {"api_key": digest_of("k").upper().replace("SHA", "sha")}, "api_key"),
        ({"header": {"X-Caller": "a"}}, {"header": {"X-Caller": "a"}}, "header"),
        ({"header": {"X-Caller": "a"}}, {"header": {"x-caller": "a"}}, "header"),
        ({"header": {"A": "1", "B": "2"}}, {"header": {"B": "2", "A": "1"}}, "header"),
    ],
)
def test_callers_that_cannot_be_told_apart_are_a_mistake(one: dict[str, Any], other: dict[str, Any], field: str) -> None:
    """Two callers with the same API key or the same headers are refused, naming the later one."""
    with pytest.raises(ConfigError, match=r"'second'.*'first'.*expected") as caught:
        Callers(
            [
                KnownCaller(id="zeroth", api_key=digest_of("z")),
                KnownCaller(id="first", **one),
                KnownCaller(id="second", **other),
            ]
        )
    assert caught.value.field == ("callers", 2, field)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"header": {}},
        {"api_key": None},
        {"api_key": ""},
        {"api_key": "demo-key"},
        {"api_key": "0" * 64},
        {"api_key": "sha256:" + "0" * 63},
        {"api_key": "sha256:" + "0" * 65},
        {"api_key": "sha256:" + "g" * 64},
        {"api_key": "sha1:" + "0" * 64},
        {"api_key": digest_of("k") + "\n"},
        {"api_key": 5},
        {"header": "X-Caller"},
        {"header": {"X-Caller": 5}},
        {"header": {"X-Caller": ""}},
        {"header": {"": "x"}},
        {"header": {"X Caller": "x"}},
        {"header": {"X-Cäller": "x"}},
        {"header": {"HTTP_X_CALLER": "x"}},
        {"header": {"X-Caller": " x"}},
        {"header": {"X-Caller": "x\t"}},
        {"header": {"X-Caller": "x\ny"}},
        {"header": {"X-Caller": "x", "x-caller": "y"}},
        {"id": "", "api_key": digest_of("k")},
        {"id": 5, "api_key": digest_of("k")},
        {"id": "x" * 257, "api_key": digest_of("k")},
        {"tier": "", "api_key": digest_of("k")},
        {"key": "x", "api_key": digest_of("k")},
    ],
)
def test_a_caller_that_can_never_be_recognised_is_a_mistake(fields: dict[str, Any]) -> None:
    """A listed caller needs an id, and a key's digest or headers that can be sent."""
    with pytest.raises((ValidationError, ConfigError)):
        KnownCaller(**{"id": "a", **fields})


def test_whether_keys_are_listed_is_known() -> None:
    """Keys count as listed only where a caller has one, and callers as present where there are any."""
    assert LISTED.list_keys
    only_headers = Callers([KnownCaller(id="a", header={"X-Caller": "a"})])
    assert not only_headers.list_keys
    assert bool(only_headers)
    assert not Callers()
    assert not Callers().list_keys
    assert Callers().with_key("anything") is None
    assert Callers().with_headers(request(X_Caller="billing"), PROXIES) is None


def test_a_caller_is_a_value() -> None:
    """Callers of equal id and tier are equal, and nobody changes one on its way."""
    assert Caller("acme") == Caller("acme", "default") == Caller(id="acme", tier="default")
    assert Caller("acme") != Caller("acme", "vip")
    assert len({Caller("acme"), Caller("acme")}) == 1
    with pytest.raises(AttributeError):
        Caller("acme").tier = "vip"


@pytest.mark.parametrize("key", ["\u00e9" * 16_000, "x" * 16_000 + "\u20ac", "\ud800" * 16_000, "\xff", "\u0100"])
def test_a_key_is_taken_as_the_bytes_that_it_may_be(key: str) -> None:
    """A key beyond ASCII is what its UTF-8 is, or its latin-1 if it has one, and nothing else."""
    spelled = [key.encode("utf-8", "surrogatepass"), *([key.encode("latin-1")] if max(key) <= "\xff" else [])]
    for sent in spelled:
        callers = Callers([KnownCaller(id="acme", api_key=f"sha256:{hashlib.sha256(sent).hexdigest()}")])
        assert callers.with_key(key) == Caller("acme")
    assert callers.with_key(key + "x") is None


@pytest.mark.parametrize("door", [ASGISite, WSGISite])
def test_a_header_is_taken_as_the_bytes_that_it_may_be(door: type[Site]) -> None:
    """A value beyond ASCII is what its UTF-8 is, or its latin-1 if it has one, however long."""
    for value in ("\u00fc", "\u65e5\u672c", "\u20ac" * 256):
        callers = [KnownCaller(id="far", header={"X-Caller": value}, tier="far")]
        rules = RuleSet([Rule("a", "1/day"), Rule("a", "9/day", tier="far")], callers)
        spelled = [value.encode(), *([value.encode("latin-1")] if max(value) <= "\xff" else []), value.encode() + b"x"]
        with door(rules=rules, trusted_proxies=["10.0.0.0/8"]) as site:
            sent = [site.ask(peer="10.0.0.1", headers={"X-Caller": each.decode("latin-1")}) for each in spelled]
        assert [reply.headers["x-ratelimit-limit"] for reply in sent] == ["9"] * (len(spelled) - 1) + ["1"]


def test_header_longer_than_a_listed_one_identifies_no_caller() -> None:
    """A listed header has up to 256 characters, so a longer one is not compared, and does not count by its end."""
    value = "b" * 256
    callers = Callers([KnownCaller(id="billing", header={"X-Caller": value})])
    proxies = TrustedProxies(["10.0.0.0/8"], "x-forwarded-for")

    def named(sent: bytes) -> Caller | None:
        scope = {"path": "/", "headers": [(b"x-caller", sent)], "client": ("10.0.0.1", 1)}
        asked = ASGIRequest(scope)
        asked.resolve_client = proxies.client
        return callers.with_headers(asked, proxies)

    assert named(value.encode()) == Caller("billing")
    assert named(b"x" * 5000 + value.encode()) is None
    assert named(b"b" + value.encode()) is None


def test_caller_with_limits_as_third_argument_is_accepted() -> None:
    """As ``identify`` has them at hand: who, of which tier, with which limits."""
    assert Caller("acme", "vip", {"api": "5/minute"}) == Caller("acme", tier="vip", limits={"api": "5/minute"})


@pytest.mark.parametrize("rule", [5, None, b"api", ("api",)])
def test_own_limits_are_for_rules_by_name(rule: Any) -> None:
    """Limits under another key would be ignored."""
    with pytest.raises(TypeError, match=r"the limits of a Caller are for .*, expected the name of a rule"):
        Caller("acme", limits={rule: "1/minute"})


@pytest.mark.parametrize("given", [0, 5, True, 1.5, b"5/s", ["5/s", 0], [None], (5, "s"), object(), {"5/s"}])
def test_a_callers_limits_are_limits(given: Any) -> None:
    """A number would leave the caller with the limits of the rule."""
    with pytest.raises(TypeError, match=r"the limits of a Caller for 'api' contain .*, expected text such as '500/minute'"):
        Caller("acme", limits={"api": given})


@pytest.mark.parametrize("given", [[], ()])
def test_a_callers_limits_are_not_empty(given: Any) -> None:
    with pytest.raises(ConfigError, match="for 'api' are empty, expected limits, or None for no limit"):
        Caller("acme", limits={"api": given})


@pytest.mark.parametrize("given", ["5/s", Limit("5/s"), ["5/s", Limit("9/day")], ("5/s",), None, "0/day"])
def test_what_a_callers_limits_may_be(given: Any) -> None:
    assert Caller("acme", limits={"api": given}).limits["api"] == given


@pytest.mark.parametrize("door", [ASGISite, WSGISite])
def test_caller_with_invalid_limits_is_refused(door: type[Site]) -> None:
    """The request fails, as with any error of `identify`; it never passes under other limits."""
    limits: Any = {"api": 0}
    with (
        door(Rule("api", "100/minute"), identify=lambda _: Caller("acme", limits=limits)) as site,
        pytest.raises(TypeError, match="the limits of a Caller"),
    ):
        site.ask()
