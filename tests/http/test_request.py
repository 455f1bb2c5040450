from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any
from urllib.parse import parse_qs, quote_from_bytes, unquote_to_bytes, urlencode

import pytest
from hypothesis import assume, given, strategies as st

from limitgate.errors import HeadersTooLargeError
from limitgate.http.paths import interpretations
from limitgate.http.request import (
    LONGEST_VALUE,
    MOST_FIELDS,
    MOST_LINES,
    ASGIRequest,
    HeaderNames,
    Query,
    Request,
    WSGIRequest,
)


def through_asgi(
    method: str = "GET",
    target: bytes = b"/",
    headers: tuple[tuple[str, str], ...] = (),
    peer: str | None = "192.0.2.1",
    mount: str = "",
) -> ASGIRequest:
    """A request as an ASGI server hands it over: the path decoded, with the mount point in it."""
    path, _, query = target.partition(b"?")
    return ASGIRequest(
        {
            "type": "http",
            "method": method,
            "root_path": mount,
            "path": mount + unquote_to_bytes(path).decode("utf-8", "replace"),
            "query_string": query,
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
            "client": None if peer is None else (peer, 4711),
        }
    )


def through_wsgi(
    method: str = "GET",
    target: bytes = b"/",
    headers: tuple[tuple[str, str], ...] = (),
    peer: str | None = "192.0.2.1",
    mount: str = "",
) -> WSGIRequest:
    """The same request as a WSGI server hands it over: bytes as latin-1, the mount point apart, header lines joined."""
    path, _, query = target.partition(b"?")
    environ = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": mount,
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query.decode("latin-1"),
        "REMOTE_ADDR": peer or "",
        "wsgi.url_scheme": "http",
    }
    for name, value in headers:
        variable = name.upper().replace("-", "_")
        if variable not in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            variable = f"HTTP_{variable}"
        environ[variable] = f"{environ[variable]}, {value}" if variable in environ else value
    return WSGIRequest(environ)


DOORS = pytest.mark.parametrize("arrive", [through_asgi, through_wsgi])


def seen(request: Request) -> dict[str, Any]:
    """Everything that rules and keys look at."""
    return {
        "method": request.method,
        "class": request.method_class,
        "path": request.path,
        "paths": interpretations(request.sent, request.root),
        "query": str(request.query),
        "headers": dict(request.headers),
        "peer": request.peer,
        "preflight": request.is_preflight,
        "user": request.user,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"method": "POST", "target": b"/login"},
        {"method": "head", "target": b"/"},
        {"target": b"//login/;x/../y"},
        {"target": b"/caf%C3%A9"},
        {"target": b"/%ff%00%0a"},
        {"target": b"/a%2Fb"},
        {"target": b"/%2569"},
        {"target": b"/x?a=1&a=2"},
        {"target": b"/v", "mount": "/api"},
        {"headers": (("X-Api-Key", "k"), ("Accept", "a"), ("Accept", "b"))},
        {"headers": (("Content-Type", "text/plain"), ("Content-Length", "3"))},
        {"headers": (("X-Latin", "\u00e9\u00ff"),)},
        {"method": "OPTIONS", "headers": (("Origin", "https://a"), ("Access-Control-Request-Method", "PUT"))},
        {"peer": None},
        {"peer": "2001:db8::1"},
    ],
)
def test_a_request_looks_the_same_through_both_doors(arguments: dict[str, Any]) -> None:
    """Nothing behind the neutral view can tell whether a request came through ASGI or WSGI."""
    assert seen(through_asgi(**arguments)) == seen(through_wsgi(**arguments))


@given(
    st.sampled_from(["GET", "HEAD", "post", "OPTIONS", "PURGE"]),
    st.binary(max_size=20).map(lambda raw: b"/" + quote_from_bytes(raw, safe="/;.").encode()),
    st.dictionaries(st.text(alphabet="ABCxyz-", min_size=1), st.text(alphabet=[chr(n) for n in range(32, 256)]), max_size=5),
    st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=3),
    st.sampled_from(["", "/v1"]),
)
def test_any_request_looks_the_same_through_both_doors_property(
    method: str, path: bytes, headers: dict[str, str], query: list[tuple[str, str]], mount: str
) -> None:
    """Whatever bytes a request is made of, both doors see the same."""
    different = {name.lower(): value for name, value in headers.items()}
    arguments = {
        "method": method,
        "target": path + b"?" + urlencode(query).encode(),
        "headers": tuple(different.items()),
        "mount": mount,
    }
    one, other = through_asgi(**arguments), through_wsgi(**arguments)
    assert seen(one) == seen(other)
    for name, _ in query:
        assert one.query.get(name) == other.query.get(name) == dict(reversed(query))[name]


@DOORS
@pytest.mark.parametrize(
    ("method", "expected", "kind"),
    [
        ("GET", "GET", "GET"),
        ("get", "GET", "GET"),
        ("HEAD", "GET", "GET"),
        ("head", "GET", "GET"),
        ("POST", "POST", "POST"),
        ("post", "POST", "POST"),
        ("Delete", "DELETE", "DELETE"),
        ("OPTIONS", "OPTIONS", "OPTIONS"),
        ("PURGE", "PURGE", "other"),
        ("X" * 500, "X" * 500, "other"),
    ],
)
def test_methods_are_upper_case_and_head_is_get(arrive, method: str, expected: str, kind: str) -> None:
    """HEAD counts as GET, case does not matter, and methods that HTTP does not define are all of one class."""
    request = arrive(method=method)
    assert (request.method, request.method_class) == (expected, kind)


def test_a_websocket_handshake_is_a_get() -> None:
    """A handshake has no method of its own in ASGI; on the wire it is a GET."""
    request = ASGIRequest({"type": "websocket", "path": "/ws", "query_string": b"", "headers": [], "client": ("192.0.2.1", 1)})
    assert (request.method, request.path, request.is_preflight) == ("GET", "/ws", False)


ORIGIN, ASKS = ("Origin", "https://app.example"), ("Access-Control-Request-Method", "POST")


@DOORS
@pytest.mark.parametrize(
    ("method", "headers", "expected"),
    [
        ("OPTIONS", (ORIGIN, ASKS), True),
        ("options", (ORIGIN, ASKS), True),
        ("OPTIONS", (("Origin", "null"), ASKS), True),
        ("OPTIONS", (ORIGIN,), False),
        ("OPTIONS", (ASKS,), False),
        ("OPTIONS", (), False),
        ("OPTIONS", (("Origin", ""), ASKS), False),
        ("OPTIONS", (ORIGIN, ("Access-Control-Request-Method", "")), False),
        ("OPTIONS", (ORIGIN, ("Access-Control-Request-Headers", "x-a")), False),
        ("GET", (ORIGIN, ASKS), False),
        ("HEAD", (ORIGIN, ASKS), False),
        ("POST", (ORIGIN, ASKS), False),
    ],
)
def test_a_preflight_is_options_with_both_headers(
    arrive, method: str, headers: tuple[tuple[str, str], ...], expected: object
) -> None:
    """Only OPTIONS with Origin and Access-Control-Request-Method asks for permission."""
    assert arrive(method=method, headers=headers).is_preflight is expected


@DOORS
@pytest.mark.parametrize(
    ("query", "name", "expected"),
    [
        ("a=1", "a", "1"),
        ("a=1&a=2", "a", "1"),
        ("b=2&a=1", "a", "1"),
        ("a=", "a", ""),
        ("a=%20x+y", "a", " x y"),
        ("a=caf%C3%A9", "a", "caf\u00e9"),
        ("a=%ff", "a", "\ufffd"),
        ("", "a", None),
        ("b=1", "a", None),
        ("A=1", "a", None),
        ("&&=&", "a", None),
    ],
)
def test_a_query_parameter_is_its_first_value_decoded(arrive, query: str, name: str, expected: str | None) -> None:
    """The query is there as sent, and each parameter by name."""
    request = arrive(target=f"/x?{query}".encode())
    assert request.query == query
    assert request.query.get(name) == expected
    assert request.query.get(name, "else") == ("else" if expected is None else expected)


@DOORS
def test_headers_are_found_in_any_case(arrive) -> None:
    """Header names are the same in upper and lower case, and a missing header is told from an empty one."""
    headers = arrive(headers=(("X-Api-Key", "k"), ("X-Empty", ""))).headers
    assert headers["x-api-key"] == headers["X-API-KEY"] == headers.get("X-Api-Key") == "k"
    assert "X-API-key" in headers
    assert headers["x-empty"] == ""
    assert "x-missing" not in headers
    assert headers.get("x-missing") is None
    assert headers.get("x-missing", "else") == "else"
    assert sorted(headers) == ["x-api-key", "x-empty"]
    assert len(headers) == 2
    with pytest.raises(KeyError):
        headers["x-missing"]


@DOORS
def test_repeated_header_lines_are_joined_in_order(arrive) -> None:
    """Several lines of one header are one value, as HTTP has it."""
    assert arrive(headers=(("X-A", "1"), ("X-B", "0"), ("x-a", "2"), ("X-A", "3"))).headers["x-a"] == "1, 2, 3"


def test_an_underscore_is_no_hyphen_in_asgi() -> None:
    """A header that a client spells with underscores is another header."""
    request = through_asgi(headers=(("X_Forwarded_For", "1.2.3.4"),))
    assert request.headers.get("x-forwarded-for") is None


def test_environ_entries_other_than_headers_are_not_headers() -> None:
    """Of a WSGI environ, the server's own entries and entries that are no text are no headers."""
    environ = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": "/",
        "SERVER_NAME": "x",
        "CONTENT_TYPE": "",
        "CONTENT_LENGTH": "",
        "HTTPS": "on",
        "HTTP_X_A": "1",
        "HTTP_OBJECT": object(),
        "wsgi.input": object(),
    }
    assert dict(WSGIRequest(environ).headers) == {"x-a": "1"}


@pytest.mark.parametrize(
    ("native", "expected"),
    [
        ("/caf\u00c3\u00a9", "/caf\u00e9"),
        ("/\u00e4\u00b8\u00ad", "/\u4e2d"),
        ("/\u00ff", "/\ufffd"),
        ("/\u00f0\u009f\u0098\u0080", "/\U0001f600"),
        ("", "/"),
    ],
)
def test_the_bytes_of_path_info_are_utf_8(native: str, expected: str) -> None:
    """A WSGI server hands the path's bytes over as latin-1; what is matched is the text they spell."""
    assert interpretations(WSGIRequest({"REQUEST_METHOD": "GET", "PATH_INFO": native}).sent)[-1] == expected


@DOORS
@pytest.mark.parametrize(
    ("mount", "target", "expected"),
    [
        ("", b"/login", "/login"),
        ("/v1", b"/login", "/login"),
        ("/v1", b"", "/"),
        ("/v1", b"/", "/"),
        ("/v1", b"/v1/x", "/v1/x"),
    ],
)
def test_the_path_is_the_one_below_the_mount_point(arrive, mount: str, target: bytes, expected: str) -> None:
    """root_path and SCRIPT_NAME are no part of what rules are matched with."""
    assert arrive(target=target, mount=mount).path == expected


@pytest.mark.parametrize("scope", [{}, {"client": None}, {"client": ("", 0)}, {"client": ["", None]}, {"client": ()}])
def test_a_scope_may_know_no_peer(scope: dict[str, Any]) -> None:
    """Behind a unix socket a request has no peer address, and none is made up."""
    request = ASGIRequest({"type": "http", "method": "GET", "path": "/", "headers": [], **scope})
    assert request.peer is None
    assert request.client is None


@pytest.mark.parametrize("environ", [{}, {"REMOTE_ADDR": ""}])
def test_an_environ_may_know_no_peer(environ: dict[str, Any]) -> None:
    """Behind a unix socket a request has no peer address, and none is made up."""
    request = WSGIRequest({"REQUEST_METHOD": "GET", "PATH_INFO": "/", **environ})
    assert request.peer is None
    assert request.client is None


@DOORS
def test_the_client_is_resolved_once(arrive) -> None:
    """However often the client is asked for, its headers are read once."""
    asked = []

    def resolve(request: Request) -> str:
        asked.append(request.peer)
        return "203.0.113.9"

    request = arrive()
    request.resolve_client = resolve
    assert asked == []
    assert [request.client, request.client] == ["203.0.113.9"] * 2
    assert asked == ["192.0.2.1"]


def test_the_frameworks_own_view_is_at_hand() -> None:
    """A callable that needs more finds the scope or the environ, whichever there is."""
    one, other = through_asgi(), through_wsgi()
    assert one.scope["type"] == "http"
    assert one.environ is None
    assert other.environ["REQUEST_METHOD"] == "GET"
    assert other.scope is None


def test_user_is_read_from_the_authentication_layer() -> None:
    """The user is scope["user"] or REMOTE_USER, None where there is nobody."""
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    assert ASGIRequest(scope).user is None
    assert ASGIRequest({**scope, "user": "ada"}).user == "ada"
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/"}
    assert WSGIRequest(environ).user is None
    assert WSGIRequest({**environ, "REMOTE_USER": ""}).user is None
    assert WSGIRequest({**environ, "REMOTE_USER": "ada"}).user == "ada"


def test_a_path_that_is_no_native_string_is_left_alone() -> None:
    """A server or middleware that hands on text instead of bytes as latin-1 causes no error."""
    assert WSGIRequest({"REQUEST_METHOD": "GET", "PATH_INFO": "/\u0436/x"}).path == "/\u0436/x"


def test_request_with_too_many_header_lines_hides_no_header() -> None:
    """A thousand header lines are read; with one more whoever asks for a header gets an error, whichever it is."""
    for count in (MOST_LINES, MOST_LINES + 1):
        headers = [(b"a", b"")] * (count - 1) + [(b"x-api-key", b"k")]
        request = ASGIRequest({"type": "http", "method": "GET", "path": "/", "headers": headers})
        assert request.has_too_many_lines is (count > MOST_LINES)
        asked: list[Callable[[], object]] = [
            lambda headers=request.headers: headers.get("x-api-key"),
            lambda headers=request.headers: headers.identity("x-api-key"),
            lambda headers=request.headers: dict(headers)["x-api-key"],
            lambda headers=request.headers: headers.have_any(HeaderNames(["x-api-key"])) and "k",
            lambda headers=request.headers: "x-api-key" in headers and "k",
            lambda headers=request.headers: headers.end("x-api-key", 9),
        ]
        for ask in asked:
            if count <= MOST_LINES:
                assert ask() == "k"
            else:
                with pytest.raises(HeadersTooLargeError, match="more than 1,000 header fields"):
                    ask()


@pytest.mark.parametrize("name", ["X-Api-Key", "x-api-key"])
def test_long_names_hide_no_others(name: str) -> None:
    """Names that are too long to be looked for cost next to nothing, and change nothing about the others."""
    headers = [(b"A" * 100_000, b""), (name.encode(), b"k"), (b"B" * 100, b"b"), *[(b"c" * 200, b"")] * 100]
    request = ASGIRequest({"type": "http", "method": "GET", "path": "/", "headers": headers})
    assert (request.headers["x-api-key"], request.headers["b" * 100], len(request.headers)) == ("k", "b", 4)


@DOORS
def test_header_in_a_key_beyond_the_longest_length_is_refused(arrive) -> None:
    """A header beyond 16,384 characters, in one line or in several, is no identity, and not absent either."""
    for value in ("x" * LONGEST_VALUE, "x" * LONGEST_VALUE + "y"):
        request = arrive(headers=(("X-A", value),))
        assert request.headers["x-a"] == value
        if len(value) <= LONGEST_VALUE:
            assert request.headers.identity("x-a") == value
        else:
            with pytest.raises(HeadersTooLargeError, match="more than 16,384 characters"):
                request.headers.identity("x-a")
        assert request.headers.start("x-a", 9) == "x" * 9
    with pytest.raises(HeadersTooLargeError):
        arrive(headers=(("X-A", "x" * 9000), ("X-A", "x" * 9000))).headers.identity("x-a")
    assert arrive(headers=(("X-A", " 1"), ("X-A", "2 "))).headers.identity("x-a") == "1, 2 ".strip()
    assert arrive().headers.identity("x-a") == arrive().headers.start("x-a", 9) == ""


@DOORS
@given(st.lists(st.text(alphabet="ab, \u00e9", max_size=6), max_size=6), st.integers(1, 30))
def test_the_end_of_a_header_is_that_of_its_lines_joined_property(arrive, values: list[str], most: int) -> None:
    """The end of a header is what its joined lines end with, however they are cut into lines."""
    headers = arrive(headers=tuple(("X-A", value) for value in values)).headers
    assert headers.end("x-a", most) == ", ".join(values)[-most:]


def test_names_that_a_server_did_not_lower_are_found() -> None:
    """A server or middleware that leaves header names in capitals is no way around a header that rules go by."""
    scope = {"type": "http", "path": "/", "headers": [[b"X-Api-Key", b"k"], (b"host", b"a"), (b"HOST", b"b")]}
    headers = ASGIRequest(scope).headers
    assert (headers["x-api-key"], headers["Host"], headers.identity("host")) == ("k", "a, b", "a, b")
    assert dict(headers) == {"x-api-key": "k", "host": "a, b"}


names = st.text(alphabet="ab=&%+ \u00e9\u20ac1", max_size=4)


@given(
    st.lists(st.one_of(names, st.sampled_from(["%61", "%C3%A9", "a%", "%zz", "%e9", "\\", "\\x61"])), max_size=12),
    st.lists(st.sampled_from(["&", "=", "&", ""]), max_size=12),
    names,
)
def test_a_query_is_read_as_it_is_taken_apart_property(parts: list[str], marks: list[str], name: str) -> None:
    """One parameter is what taking the whole query apart would give, however names and values are escaped."""
    assume("%" not in name)
    text = "".join(part + mark for part, mark in zip_longest(parts, marks, fillvalue="&"))
    text = text.encode("utf-8").decode("latin-1")
    expected = parse_qs(text, keep_blank_values=True).get(name, [None])[0]
    if name.isascii():
        assert Query(text).get(name) == expected


@pytest.mark.parametrize(
    "text",
    [
        "%61" * 5000 + "%c3%a9",
        "%61" * 900 + "%zz",
        "+" * 5000,
        "\u00e9" * 5000,
        "a\\b%5cn" * 500,
        "%ff" * 3000,
        "%e2%82%ac" * 3000,
    ],
)
def test_long_values_are_decoded_like_short_ones(text: str) -> None:
    """The quick way to decode a value gives what the standard library's does."""
    assert Query(f"x&a={text}&b").get("a") == parse_qs(f"a={text}")["a"][0]


def test_query_value_with_many_malformed_escapes_raises() -> None:
    """It is not taken as it was sent, which an application would decode: to ask for it is an error."""
    for text in ("%61" * 5000 + "%zz", "%61dmin" + "%zz" * 1000, "\u00e9" + "%61" * 5000):
        with pytest.raises(ValueError, match="more than 1000 escapes"):
            Query(f"a={text}").get("a")
    assert Query("a=%61dmin" + "%zz" * 999).get("a") == "admin" + "%zz" * 999
    assert Query("b=" + "%zz" * 5000 + "&a=1").get("a") == "1"


def test_query_parameter_after_many_fields_is_found_or_raises() -> None:
    """Behind 2,048 fields a parameter is found as it is written; where one may hide in escapes, that is an error."""
    crowd = "a=1&" * MOST_FIELDS
    assert Query(f"n=7&{crowd}%6e=8").get("n") == "7"
    assert Query(f"{crowd}n=7&n=8").get("n") == "7"
    assert Query(f"{crowd}n").get("n") == ""
    assert Query(f"{crowd}nn=7").get("n", "none") == "none"
    for hidden in (f"{crowd}%6e=7", f"{crowd}n=7&%20"):
        with pytest.raises(ValueError, match="more than 2048 fields"):
            Query(hidden).get("n")
    with pytest.raises(ValueError, match="more than 2048 fields"):
        Query(f"{crowd}a+b=7").get("a b")


@DOORS
def test_a_query_is_taken_apart_once(arrive) -> None:
    """However often a parameter is asked for, the query is searched once for it."""
    request = arrive(target=b"/?a=1")
    assert request.query is request.query
    assert request.query.get("a") is request.query.get("a")
