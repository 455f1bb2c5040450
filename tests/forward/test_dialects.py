"""What each proxy's subrequest says about a request."""

from __future__ import annotations

from typing import Any

import pytest

from limitgate.forward.dialects import ANY_METHOD, DIALECTS, ENVOY, UNDECLARED, UndescribedError, declared, described, split
from tests.support.doors import http_scope

FAMILIES = {
    "x-original-method": "DELETE",
    "x-original-uri": "/original",
    "x-forwarded-method": "PATCH",
    "x-forwarded-uri": "/forwarded",
    "x-forwarded-host": "forwarded.test",
    "x-forwarded-proto": "gopher",
    "forwarded": "for=192.0.2.66",
    "x-limitgate-status": "200",
}
"""A header of every family."""


def request_of(place: str, **options: Any) -> Any:
    """The described request."""
    scope = http_scope(place, **options)
    return described(scope, *declared(scope))


@pytest.mark.parametrize(
    ("dialect", "method", "path", "host"),
    [
        ("nginx", "DELETE", "/original", b"testserver"),
        ("haproxy", "DELETE", "/original", b"testserver"),
        ("caddy", "PATCH", "/forwarded", b"forwarded.test"),
        ("traefik", "PATCH", "/forwarded", b"forwarded.test"),
    ],
)
def test_each_dialect_has_its_own_family(dialect: str, method: str, path: str, host: bytes) -> None:
    """The other families are dropped, so that rules can't count by them either."""
    request = request_of(f"/{dialect}?from=client", headers={**FAMILIES, "x-forwarded-for": "192.0.2.7", "x-api-key": "k"})
    assert (request["method"], request["path"], request["query_string"]) == (method, path, b"")
    assert dict(request["headers"]) == {b"host": host, b"x-forwarded-for": b"192.0.2.7", b"x-api-key": b"k"}


def test_envoy_asks_by_its_request_line() -> None:
    request = request_of("/envoy/a//b%2Fc;p/../d?q=1", method="PUT", headers=FAMILIES)
    assert (request["method"], request["path"], request["query_string"]) == ("PUT", "/a//b/c;p/../d", b"q=1")
    assert request["raw_path"] == b"/a//b%2Fc;p/../d"
    assert dict(request["headers"]) == {b"host": b"testserver"}


def test_envoy_asks_about_the_server_as_a_whole() -> None:
    """It appends the asterisk of OPTIONS to its prefix."""
    assert declared(http_scope("/envoy*", method="OPTIONS")) == (ENVOY, b"*")
    assert request_of("/envoy*", method="OPTIONS")["path"] == "*"


def test_the_first_segment_declares_the_dialect() -> None:
    assert {declared(http_scope(f"/{name.decode()}/deeper"))[0] for name in DIALECTS} == set(DIALECTS.values())
    for path in ("/", "/nginxx", "/x/nginx", "//nginx", "/NGINX", "/nginx%2F", "/.nginx"):
        assert declared(http_scope(path))[0] is UNDECLARED
    assert declared(http_scope("/mounted/nginx", root_path="/mounted"))[0].name == "nginx"


def test_without_a_dialect_both_families_count() -> None:
    for family in ("forwarded", "original"):
        request = request_of("/", headers={f"x-{family}-uri": "/a", f"x-{family}-method": "PUT"})
        assert (request["method"], request["path"]) == ("PUT", "/a")
    both = {
        f"x-{family}-{what}": value
        for family in ("forwarded", "original")
        for what, value in (("uri", "/a"), ("method", "PUT"))
    }
    assert request_of("/", headers=both)["path"] == "/a"


@pytest.mark.parametrize(
    ("place", "headers", "words"),
    [
        ("/", {"x-forwarded-uri": "/a", "x-original-uri": "/b"}, "x-forwarded-uri and x-original-uri disagree"),
        ("/", {"x-forwarded-uri": "/a", "x-forwarded-method": "A", "x-original-method": "B"}, "disagree"),
        ("/nginx", [("x-original-uri", "/a"), ("x-original-uri", "/b")], "x-original-uri occurs twice"),
        ("/nginx", {"x-forwarded-uri": "/a"}, "expected x-original-uri"),
        ("/nginx", {"x-original-uri": ""}, "expected x-original-uri"),
        ("/caddy", {"x-original-uri": "/a"}, "expected x-forwarded-uri"),
        ("/envoy", {"x-original-uri": "/a"}, "expected a path below /envoy"),
        ("/", {}, "/nginx, /caddy, /traefik, /envoy, /haproxy"),
        ("/nginx", {"x-original-uri": "/a", "x-original-method": "G@T"}, "not a token"),
        ("/nginx", {"x-original-uri": "/a", "x-original-method": "GET /"}, "not a token"),
        ("/caddy", {"x-forwarded-uri": "/a", "x-forwarded-method": "GÉT"}, "not a token"),
    ],
)
def test_what_describes_no_request(place: str, headers: Any, words: str) -> None:
    with pytest.raises(UndescribedError) as raised:
        request_of(place, headers=headers)
    assert words in raised.value.detail


def test_a_method_that_is_not_named() -> None:
    """An empty one is as good as none. The method of the subrequest is the proxy's own, except behind Envoy."""
    assert request_of("/nginx", headers={"x-original-uri": "/"})["method"] == ANY_METHOD
    assert request_of("/nginx", headers={"x-original-uri": "/", "x-original-method": ""})["method"] == ANY_METHOD
    assert request_of("/nginx", method="HEAD", headers={"x-original-uri": "/"})["method"] == ANY_METHOD
    for place in ("/nginx", "/haproxy", "/check"):
        assert request_of(place, method="POST", headers={"x-original-uri": "/"})["method"] == ANY_METHOD
    assert request_of("/envoy/", method="POST", headers={"x-original-method": "GET"})["method"] == "POST"


def test_head_is_described_as_get() -> None:
    """But not if the subrequest is a HEAD itself, whose response has no body."""
    assert request_of("/envoy/", method="HEAD")["method"] == "HEAD"
    assert request_of("/nginx", headers={"x-original-uri": "/", "x-original-method": "HEAD"})["method"] == "GET"


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        (b"/a?b", ("/a", b"b", None)),
        (b"/a%20b", ("/a b", b"", None)),
        (b"/%ff\xfe", ("/\ufffd\ufffd", b"", None)),
        (b"/a%00", ("/a\x00", b"", None)),
        (b"/a#x?y", ("/a", b"", None)),
        (b"/a?b?c", ("/a", b"b?c", None)),
        (b"http://h.test:8/a?b", ("/a", b"b", b"h.test:8")),
        (b"http://u:p@h.test", ("/", b"", b"h.test")),
        (b"HTTP://h.test?b", ("/", b"b", b"h.test")),
        (b"*", ("*", b"", None)),
        (b"h.test:443", ("h.test:443", b"", None)),
        (b"//h.test/a", ("//h.test/a", b"", None)),
        (b"?b", ("/", b"b", None)),
    ],
)
def test_targets(target: bytes, parts: tuple[str, bytes, bytes | None]) -> None:
    assert split(target) == parts
