from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, example, given, strategies as st
from starlette.authentication import BaseUser, SimpleUser, UnauthenticatedUser

from limitgate import Caller, Rule
from limitgate.errors import ConfigError, HeadersTooLargeError
from limitgate.gate.planning.identity import Subject
from limitgate.http.request import LONGEST_VALUE, ASGIRequest, WSGIRequest
from limitgate.keys import Key
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.rules.options import PARTS

ADDRESS = "192.0.2.1"


class Known:
    """Identities that have made up their mind about the API key."""

    def __init__(self, api_key: str | None = None, ipv6_prefix: int = 64) -> None:
        self._api_key = api_key
        self.no_id = Once(Diagnosis.USER_WITHOUT_ID)
        self.ipv6_prefix = ipv6_prefix

    def api_key(self, _: Subject) -> str | None:
        return self._api_key


def subject(
    *,
    headers: dict[str, str | bytes] | None = None,
    client: str | None = ADDRESS,
    caller: Caller | None = None,
    tier: str = "default",
    api_key: str | None = None,
    method: str = "GET",
    path: str = "/",
    user: Any = None,
    route: str | None = None,
    ipv6_prefix: int = 64,
) -> Subject:
    """Who asks for what, as the planner would describe it."""
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [
            (name.lower().encode(), value if isinstance(value, bytes) else value.encode("latin-1"))
            for name, value in (headers or {}).items()
        ],
        "client": None if client is None else (client, 4711),
        "user": user,
    }
    request = ASGIRequest(scope)
    request.resolve_client = lambda request: request.peer
    found = Subject(request, caller, tier, Known(api_key, ipv6_prefix))
    found.route = route
    return found


def bucket(*parts: str, owner: str = "rule", pattern: str = "/**", secret: bytes = b"", **asks: Any) -> str:
    """The bucket that a key of these parts gives to a subject."""
    key = Key(parts, owner, pattern, secret)
    return key.digest(key.text(subject(**asks)))


@pytest.mark.parametrize(
    ("part", "one", "other"),
    [
        ("ip", {"client": "192.0.2.1"}, {"client": "192.0.2.2"}),
        ("ip", {"client": "2001:db8:1::1"}, {"client": "2001:db8:2::1"}),
        ("path", {"route": "/a/{id}"}, {"route": "/b/{id}"}),
        ("api_key", {"api_key": "one"}, {"api_key": "other"}),
        ("method", {"method": "GET"}, {"method": "POST"}),
        ("host", {"headers": {"host": "one.example"}}, {"headers": {"host": "other.example"}}),
        ("user", {"user": "ada"}, {"user": "bob"}),
        ("caller", {"caller": Caller("acme")}, {"caller": Caller("initech")}),
        ("tier", {"tier": "default"}, {"tier": "vip"}),
        ("header:X-Id", {"headers": {"x-id": "one"}}, {"headers": {"x-id": "other"}}),
    ],
)
def test_a_part_tells_apart_what_it_is_about(part: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Requests that differ in a part of the key have different buckets, alone and beside other parts."""
    assert bucket(part, **one) != bucket(part, **other)
    assert bucket("global", part, **one) != bucket("global", part, **other)
    assert bucket(part, **one) == bucket(part, **one)


EVERYTHING = {
    "headers": {"host": "a.example", "x-id": "1", "x-other": "2", "user-agent": "u"},
    "caller": Caller("acme", "vip"),
    "tier": "vip",
    "api_key": "k",
    "method": "PUT",
    "user": "ada",
    "route": "/a/{id}",
    "path": "/a/1",
}


@pytest.mark.parametrize(
    ("part", "same"),
    [
        ("global", {"client": "203.0.113.9"}),
        ("ip", EVERYTHING),
        ("ip", {"client": ADDRESS, "path": "/other"}),
        ("path", {"path": "/elsewhere", "client": "203.0.113.9"}),
        ("method", {"client": "203.0.113.9", "headers": {"x": "1"}}),
        ("method", {"method": "HEAD"}),
        ("tier", {"caller": Caller("acme", "vip")}),
    ],
)
def test_a_part_is_about_nothing_else(part: str, same: dict[str, Any]) -> None:
    """What no part of the key is about makes no difference."""
    assert bucket(part, **same) == bucket(part)


def test_the_raw_path_never_makes_a_bucket() -> None:
    """Where the route is not known, the rule's own pattern stands for it, so invented paths are all one."""
    one = bucket("path", "ip", pattern="/api/**", path="/api/a")
    assert one == bucket("path", "ip", pattern="/api/**", path="/api/b/c")
    assert one != bucket("path", "ip", pattern="/other/**", path="/api/a")
    assert one != bucket("path", "ip", pattern="/api/**", path="/api/a", route="/api/**")


def test_a_header_part_is_found_in_any_case() -> None:
    """A header's name is the same in upper and lower case, in the rule as in the request."""
    assert bucket("header:X-Id", headers={"x-id": "1"}) == bucket("header:x-ID", headers={"X-ID": "1"})


ABSENT = [
    ("user", {}),
    ("user", {"user": ""}),
    ("user", {"user": UnauthenticatedUser()}),
    ("caller", {}),
    ("api_key", {}),
    ("host", {}),
    ("host", {"headers": {"host": ""}}),
    ("host", {"headers": {"host": ":80"}}),
    ("header:x-id", {}),
    ("header:x-id", {"headers": {"x-id": ""}}),
    ("header:x-id", {"headers": {"x-id": " \t"}}),
    ("header:x-id", {"headers": {"x_id": "1"}}),
    ("user|caller", {}),
    ("header:a|header:b|api_key", {"headers": {"a": "", "b": " "}}),
]


@pytest.mark.parametrize(("part", "asks"), ABSENT)
def test_an_absent_part_becomes_the_clients_address(part: str, asks: dict[str, Any]) -> None:
    """Leaving something out puts a client into its own bucket, always the same, and with no stranger."""
    own = bucket(part, **asks)
    assert own == bucket(part, **asks, path="/elsewhere", method="POST")
    assert own == bucket(part, **{**asks, "client": "::ffff:192.0.2.1"})
    assert own != bucket(part, **asks, client="192.0.2.2")
    assert own != bucket(part, **asks, client=None)


@pytest.mark.parametrize("part", ["header:x-id", "host", "user", "caller", "api_key"])
@pytest.mark.parametrize("client", [ADDRESS, "2001:db8::1", "2001:db8::/64", None])
def test_an_address_in_a_value_is_not_the_address(part: str, client: str | None) -> None:
    """Nobody gets into a client's bucket by spelling its address, or by spelling what stands for an absent one."""
    left_out = bucket(part, client=client)
    for text in ("192.0.2.1", "2001:db8::1", "2001:db8::/64", "None", "nobody", "nobody,", "absent", "ip:9:192.0.2.1,", "all"):
        spelled = {
            "header:x-id": {"headers": {"x-id": text}},
            "host": {"headers": {"host": text}},
            "user": {"user": text},
            "caller": {"caller": Caller(text)},
            "api_key": {"api_key": text},
        }[part]
        assert bucket(part, **spelled, client=client) != left_out


def test_a_client_without_an_address_is_one_client_of_its_own() -> None:
    """Requests without a peer address share one bucket, which is not that of 127.0.0.1 or of any text."""
    for part in ("ip", "header:x-id", "user"):
        nobody = bucket(part, client=None)
        assert nobody == bucket(part, client=None, path="/other")
        assert nobody not in {bucket(part, client=client) for client in ("127.0.0.1", "::1", "0.0.0.0", "::", "None", "nobody")}


@pytest.mark.parametrize(
    ("part", "asks", "same_as", "then"),
    [
        ("api_key|ip", {"api_key": "k"}, "api_key", {"api_key": "k"}),
        ("api_key|ip", {"api_key": "k", "client": "192.0.2.2"}, "api_key", {"api_key": "k"}),
        ("api_key|ip", {}, "ip", {}),
        ("api_key | ip", {}, "ip", {}),
        ("user|api_key|header:x-id", {"api_key": "k", "headers": {"x-id": "1"}}, "api_key", {"api_key": "k"}),
        ("user|api_key|header:x-id", {"headers": {"x-id": "1"}}, "header:x-id", {"headers": {"x-id": "1"}}),
        ("header:x-id|global", {}, "global", {"client": "192.0.2.2"}),
        ("api_key|path", {"route": "/a"}, "path", {"route": "/a", "api_key": "k"}),
        ("api_key|path", {}, "path", {}),
    ],
)
def test_the_first_alternative_that_is_present_counts(
    part: str, asks: dict[str, Any], same_as: str, then: dict[str, Any]
) -> None:
    """Of several alternatives the first present one is the value, whatever the others are."""
    assert bucket(part, **asks) == bucket(same_as, **then)


def test_the_same_text_in_different_alternatives_is_different() -> None:
    """A value counts together with what it is, so a user cannot take the bucket of an API key."""
    part = "user|api_key|header:x-id|ip"
    found = {
        bucket(part, user=ADDRESS),
        bucket(part, api_key=ADDRESS),
        bucket(part, headers={"x-id": ADDRESS}),
        bucket(part, client=ADDRESS),
    }
    assert len(found) == 4


def test_leaving_headers_out_never_gives_a_fresh_bucket() -> None:
    """Of two headers in a key, leaving out one, the other or both gives at most one bucket each."""
    parts = ("header:a", "header:b")
    for given_headers in ({}, {"a": "1"}, {"b": "1"}):
        variants = [given_headers, given_headers | {"c": "1"}, dict.fromkeys("ab", "") | given_headers]
        assert len({bucket(*parts, headers=headers) for headers in variants}) == 1


tricky = st.one_of(
    st.text(alphabet=":,|0123456789 ipabsentx-", max_size=12),
    st.text(max_size=8),
    st.text(alphabet="e\u0301\u00e9\u200b\ud800\udfffK\u212a\uff21A", max_size=4),
    st.sampled_from(["", "nobody,", "ip:9:192.0.2.1,", "absent:9:192.0.2.1,", "user:1:a,", "1:a,caller:1:b", "all"]),
)
latin = st.one_of(
    st.text(alphabet=":,|0123456789 ipabsentx-", max_size=12),
    st.binary(max_size=8).map(lambda raw: raw.decode("latin-1")),
    st.sampled_from(["", "nobody,", "header:b:1:x,", "1:x,header:b:1:y"]),
)
values = st.tuples(latin, latin, tricky, tricky, tricky)


def _caller(text: str) -> Caller | None:
    return Caller(text) if text else None


def _bucket_of(drawn: tuple[str, ...], client: str | None) -> str:
    a, b, user, caller, api_key = drawn
    parts = ("header:a", "header:b", "user", "caller", "api_key")
    headers = {"a": a, "b": b}
    return bucket(*parts, headers=headers, user=user, caller=_caller(caller), api_key=api_key or None, client=client)


def _what_counts(drawn: tuple[str, ...]) -> tuple[str, ...]:
    """The values without what HTTP does not count as part of a header's."""
    return drawn[0].strip(), drawn[1].strip(), *drawn[2:]


@given(values, values, st.sampled_from([ADDRESS, None]))
@example(("1:x,header:b:1:y", "z", "", "", ""), ("1:x", "1:yz", "", "", ""), ADDRESS)
@example(("x,header:b:y", "z", "", "", ""), ("x", "y,header:b:z", "", "", ""), ADDRESS)
@example(("", "", "x,caller:y", "z", ""), ("", "", "x", "y,caller:z", ""), ADDRESS)
@example(("", "a", "", "", ""), ("a", "", "", "", ""), ADDRESS)
@example(("", "", "\u00e9", "", ""), ("", "", "e\u0301", "", ""), ADDRESS)
@example(("", "", "K", "", ""), ("", "", "\u212a", "", ""), ADDRESS)
@example(("", "", "a", "b", ""), ("", "", "", "a", "b"), None)
def test_different_values_never_share_a_bucket_property(
    one: tuple[str, ...], other: tuple[str, ...], client: str | None
) -> None:
    """No separator, length, look-alike or absent value makes two lists of values one bucket."""
    assume(_what_counts(one) != _what_counts(other))
    assert _bucket_of(one, client) != _bucket_of(other, client)


@given(st.lists(tricky, min_size=2, max_size=2, unique=True), st.sampled_from(["user", "caller", "api_key"]))
def test_a_value_is_not_altered_property(pair: list[str], part: str) -> None:
    """Values that differ in any character are different, and long ones are not cut."""
    one, other = (_caller(text) if part == "caller" else text for text in pair)
    padding = "x" * 1000
    assert bucket(part, **{part: one}) != bucket(part, **{part: other})
    long_one, long_other = (Caller(padding + text) if part == "caller" else padding + text for text in pair)
    assert bucket(part, **{part: long_one}) != bucket(part, **{part: long_other})


@pytest.mark.parametrize("part", ["header:x-id", "api_key", "user", "caller", "host"])
def test_a_long_value_is_short_and_itself(part: str) -> None:
    """A long value has a short text, which no shorter value can have."""
    spelled = {"api_key": "api_key", "user": "user", "caller": "caller"}.get(part)

    def text(value: str) -> str:
        if spelled is None:
            return Key((part,), "rule").text(subject(headers={part.removeprefix("header:"): value}))
        return Key((part,), "rule").text(subject(**{spelled: Caller(value) if part == "caller" else value}))

    long, other = text("x" * LONGEST_VALUE), text("x" * (LONGEST_VALUE - 1) + "y")
    assert long != other
    assert max(len(long), len(other)) < 100
    digest = long.rpartition(":")[2].removesuffix(",")
    assert text(digest) not in (long, other)
    assert text("x" * 200) == f"{part}:200:{'x' * 200},"


@pytest.mark.parametrize("secret", [b"", b"0123456789abcdef"])
def test_a_bucket_shows_nothing_of_its_values(secret: bytes) -> None:
    """What reaches the store is 32 hex digits, however long or telling the values are."""
    digest = bucket("api_key", "header:x-id", api_key="sk_live_1234", headers={"x-id": "x" * 10_000}, secret=secret)
    assert len(digest) == 32
    assert set(digest) <= set("0123456789abcdef")


def test_a_secret_changes_every_bucket() -> None:
    """With another secret the same client has another digest, so guesses cannot be checked without it."""
    digests = {bucket("ip", secret=secret) for secret in (b"", b"0123456789abcdef", b"0123456789abcdeg", b"x" * 64)}
    assert len(digests) == 4


def test_rules_do_not_share_buckets() -> None:
    """The same client under rules of different names has different buckets."""
    assert bucket("ip", owner="rule a") != bucket("ip", owner="rule b") != bucket("ip", owner="limit a")


def test_one_key_gives_what_a_fresh_one_would() -> None:
    """A key that has seen many subjects gives each the bucket that it had at first."""
    key = Key(("ip", "header:x-id"), "rule", "/**")
    everyone = [subject(client=f"10.0.{n % 7}.{n % 251}", headers={"x-id": "x" * (n % 300)}) for n in range(6000)]
    first = [key.digest(key.text(one)) for one in everyone]
    assert [key.digest(key.text(one)) for one in everyone] == first
    fresh = [Key(("ip", "header:x-id"), "rule", "/**") for _ in range(100)]
    assert first[:100] == [key.digest(key.text(one)) for key, one in zip(fresh, everyone)]


class Account(BaseUser):
    """A user as Starlette's documentation has it, told from others by identity."""

    def __init__(self, identity: Any, name: str = "same") -> None:
        self._identity, self._name = identity, name

    @property
    def is_authenticated(self) -> bool:
        return True

    @property
    def display_name(self) -> str:
        return self._name

    @property
    def identity(self) -> Any:
        return self._identity


class Named(BaseUser):
    """A user that leaves identity as Starlette's base class has it, which raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self.display_name = name

    is_authenticated = True
    display_name = ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ada", "bob"),
        (SimpleUser("ada"), SimpleUser("bob")),
        (Named("ada"), Named("bob")),
        (Account("1"), Account("2")),
        (Account(1), Account(2)),
        (Account(0), Account(1)),
        (Account(uuid.UUID(int=1)), Account(uuid.UUID(int=2))),
        (SimpleNamespace(id=1, username="x"), SimpleNamespace(id=2, username="x")),
        (SimpleNamespace(pk=1), SimpleNamespace(pk=2)),
        (SimpleNamespace(is_authenticated=True, id=1), SimpleNamespace(is_authenticated=True, id=2)),
    ],
)
def test_users_are_told_apart_by_what_their_framework_gives_them(one: Any, other: Any) -> None:
    """A user is its text, its identity or its id, wherever it comes from."""
    assert bucket("user", user=one) != bucket("user", user=other)
    assert bucket("user", user=one) == bucket("user", user=one, client="203.0.113.9")


def test_one_user_in_two_objects_is_one_user() -> None:
    """Every request brings a user object of its own; equal identities are one bucket."""
    assert bucket("user", user=Account("1", "Ada")) == bucket("user", user=Account("1", "Countess"))
    assert bucket("user", user=SimpleUser("ada")) == bucket("user", user=SimpleUser("ada"))
    assert bucket("user", user=SimpleUser("ada")) == bucket("user", user="ada")


@pytest.mark.parametrize(
    "user", [None, "", UnauthenticatedUser(), SimpleNamespace(), SimpleNamespace(is_authenticated=False, id=7), object()]
)
def test_a_user_that_is_nobody_is_absent(user: Any) -> None:
    """An anonymous user goes by the client's address, and is in no bucket with other anonymous users."""
    assert bucket("user", user=user) == bucket("user")
    assert bucket("user", user=user) != bucket("user", user=user, client="192.0.2.2")


def test_remote_user_is_the_user_in_wsgi() -> None:
    """Under WSGI the server's REMOTE_USER is the user, the same as in ASGI."""
    request = WSGIRequest({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_USER": "ada", "REMOTE_ADDR": ADDRESS})
    key = Key(("user",), "rule", "/**")
    found = key.digest(key.text(Subject(request, None, "default", Known())))
    assert found == bucket("user", user="ada")


@pytest.mark.parametrize("given_id", [42, uuid.UUID(int=7)])
def test_a_callers_id_that_is_no_text_works_or_is_refused_at_once(given_id: Any) -> None:
    """A caller made with a number or UUID counts by its text, or cannot be made; requests do not fail because of it."""
    try:
        caller = Caller(given_id)
    except (TypeError, ValueError):
        return
    assert bucket("caller", caller=caller) == bucket("caller", caller=Caller(str(given_id)))


@pytest.mark.parametrize(
    "spelling",
    [
        "shop.example",
        "SHOP.example",
        "shop.example:80",
        "Shop.Example:8080",
        "shop.example.",
        "shop.example.:443",
        " shop.example ",
        "shop.example:",
        "shop.example:x",
        "shop.example:80:80",
        "shop.example, other.example",
    ],
)
def test_a_host_is_one_however_it_is_spelled(spelling: str) -> None:
    """Case, port and a trailing dot make no other host."""
    assert bucket("host", headers={"host": spelling}) == bucket("host", headers={"host": "shop.example"})


@pytest.mark.parametrize("spelling", ["example", "shop.example.org", "xshop.example", "[::1]", "[::2]:80", "192.0.2.1:80"])
def test_other_hosts_are_others(spelling: str) -> None:
    """Hosts that only look alike are different."""
    assert bucket("host", headers={"host": spelling}) != bucket("host", headers={"host": "shop.example"})


def test_an_ipv6_host_loses_only_its_port() -> None:
    """The colons of an IPv6 host are no port."""
    assert bucket("host", headers={"host": "[::1]:8000"}) == bucket("host", headers={"host": "[::1]"})
    assert bucket("host", headers={"host": "[::1]"}) != bucket("host", headers={"host": "[::2]"})


def test_invented_methods_are_one() -> None:
    """Whoever makes methods up shares one bucket with everybody who does."""
    assert len({bucket("method", method=method) for method in ("PURGE", "X", "x" * 99, "GETT", "MKCOL")}) == 1
    assert len({bucket("method", method=method) for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "PURGE")}) == 6
    assert bucket("method", method="post") == bucket("method", method="POST")


@pytest.mark.parametrize(
    ("client", "prefix", "together"),
    [
        ("2001:db8:1:2::9", 64, True),
        ("2001:db8:1:3::1", 64, False),
        ("2001:db8:1:3::1", 48, True),
        ("2001:db8:1:2::9", 128, False),
    ],
)
def test_ipv6_clients_are_grouped_by_the_prefix(client: str, prefix: int, together: object) -> None:
    """Addresses of one network are one client, for the part ip and where the address stands in for another part."""
    for part in ("ip", "header:x-id", "user|ip"):
        one = bucket(part, client="2001:db8:1:2::1", ipv6_prefix=prefix)
        assert (one == bucket(part, client=client, ipv6_prefix=prefix)) is together


@pytest.mark.parametrize("part", [*PARTS, "header:X-Id", "header:x_y.z~", "api_key|ip", " user | ip ", "user|caller|header:a"])
def test_every_part_of_the_contract_is_known(part: str) -> None:
    """Each part, and any alternatives of them, make a rule."""
    assert Rule("r", "1/second", key=[part]).key == (part,)


@pytest.mark.parametrize(
    "part",
    [
        "",
        " ",
        "IP",
        "ipp",
        "address",
        "path:raw",
        "header",
        "header:",
        "header:a b",
        "header: a",
        "header:a:b",
        "header:\u00e9",
        "header:" + "x" * 129,
        "cookie:a",
        "ip|",
        "|ip",
        "ip||user",
        "ip,user",
    ],
)
def test_an_unknown_part_is_a_mistake(part: str) -> None:
    """A part that does not exist is refused at start-up, with the parts that do."""
    with pytest.raises(ConfigError, match="expected one of path, ip, api_key"):
        Rule("r", "1/second", key=[part])
    with pytest.raises(ConfigError, match="is unknown"):
        Key([part], "rule")


@pytest.mark.parametrize("part", ["header:x-id", "host"])
def test_a_value_that_is_too_long_is_an_error(part: str) -> None:
    """A header longer than servers take is not absent, which would count its client by address."""
    name = part.removeprefix("header:")
    with pytest.raises(HeadersTooLargeError):
        bucket(part, headers={name: "a" * (LONGEST_VALUE + 1)})
    assert bucket(part, headers={name: "a" * LONGEST_VALUE}) not in {bucket(part), bucket(part, headers={name: "a"})}


def test_a_value_is_read_once_for_all_keys() -> None:
    """Rules that go by the same header share the work of digesting it."""
    asked = subject(headers={"x-id": "a" * 10_000})
    one, other = Key(("header:x-id",), "one"), Key(("header:x-id", "ip"), "other")
    assert one.text(asked) in other.text(asked)
    asked.request.scope["headers"][0] = (b"x-id", b"changed")
    assert "digest" in other.text(asked)
