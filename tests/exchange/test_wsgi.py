"""The WSGI door to the letter of PEP 3333: what goes through it comes out as it went in."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.util import FileWrapper

import pytest

from limitgate import LimitGateWSGI, MemoryStore, Rule
from tests.support.clock import Clock
from tests.support.doors import run_wsgi, validated, wsgi_environ, wsgi_reply

RATE = ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"]
PLAIN = ("Content-Type", "text/plain")


def gated(app: Any, *rules: Rule, **options: Any) -> LimitGateWSGI:
    options.setdefault("store", MemoryStore(Clock()))
    return LimitGateWSGI(app, rules=rules or [Rule("api", "2/minute")], **options)


class Server:
    """A server's ``start_response``: keeps each call as it was made, and what is written."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.written: list[bytes] = []

    def __call__(self, *args: Any) -> Callable[[bytes], object]:
        self.calls.append(args)
        return self.written.append

    @property
    def names(self) -> list[str]:
        """The field names of the last call."""
        return [name for name, _ in self.calls[-1][1]]


def hello(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [PLAIN])
    return [b"hello"]


# --- start_response ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [(), (None,)])
def test_start_response_is_called_as_the_app_called_it(args: tuple[Any, ...]) -> None:
    """Status and arguments are passed on by position, as many as there were, the rate fields behind the app's own."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("299 So So", [PLAIN], *args)
        return []

    server = Server()
    gated(app)(wsgi_environ(), server)
    ((status, headers, *rest),) = server.calls
    assert (status, tuple(rest)) == ("299 So So", args)
    assert headers[0] == PLAIN
    assert server.names == ["Content-Type", *RATE]


def test_headers_are_a_real_list_of_native_strings() -> None:
    """The list is a list, its items tuples, names and values ``str`` without control characters, allowed and refused."""
    gate = gated(hello, Rule("api", "1/minute"), headers=["x-ratelimit", "x-ratelimit-windows", "draft-11"])
    for _ in range(2):
        server = Server()
        gate(wsgi_environ(), server)
        status, headers = server.calls[0][:2]
        assert type(status) is str
        assert type(headers) is list
        assert {type(line) for line in headers} == {tuple}
        for name, value in headers:
            assert type(name) is type(value) is str
            assert (name + value).isprintable()
            assert (name + value).isascii()


def test_the_apps_own_list_is_left_alone() -> None:
    """An application that keeps one list of headers for ever does not find it grown."""
    own = [PLAIN]

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", own)
        return []

    gate, server = gated(app, Rule("api", "9/minute")), Server()
    for _ in range(3):
        gate(wsgi_environ(), server)
    assert own == [PLAIN]
    assert [len(call[1]) for call in server.calls] == [4, 4, 4]


def test_start_response_may_come_late() -> None:
    """An application that calls ``start_response`` only when it is iterated is not hurried, and gets its rate fields."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [PLAIN])
        yield b"hello"

    server = Server()
    chunks = gated(app)(wsgi_environ(), server)
    assert server.calls == []
    assert list(chunks) == [b"hello"]
    assert server.names == ["Content-Type", *RATE]
    assert wsgi_reply(gated(app)).rate["x-ratelimit-remaining"] == "1"


def test_write_is_the_servers_own() -> None:
    """What ``start_response`` returns is the server's ``write``, and what is written comes before what is returned."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        write = start_response("200 OK", [PLAIN])
        write(b"one ")
        write(b"two ")
        return [b"three"]

    server = Server()
    gated(app)(wsgi_environ(), server)
    assert server.written == [b"one ", b"two "]
    assert wsgi_reply(gated(validated(app))).body == b"one two three"


def failing(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [PLAIN, ("X-First", "1")])
    try:
        int("half way")
    except ValueError:
        start_response("500 Oops", [PLAIN], sys.exc_info())
    return [b"sorry"]


def test_exc_info_is_passed_through() -> None:
    """A second call with ``exc_info`` replaces the first: its own headers, and the rate fields once."""
    server = Server()
    gated(failing)(wsgi_environ(), server)
    (_, second) = server.calls
    assert second[0] == "500 Oops"
    assert server.names == ["Content-Type", *RATE]
    assert second[2][0] is ValueError
    assert "half way" in str(second[2][1])
    reply = wsgi_reply(gated(validated(failing)))
    assert (reply.status, reply.body) == (500, b"sorry")
    assert reply.rate["x-ratelimit-remaining"] == "1"


def test_what_start_response_raises_reaches_the_app() -> None:
    """A server that has sent its headers raises the application's error again, through the gate."""

    def sent_already(status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], object]:
        if exc_info:
            raise exc_info[1]
        return bytes

    with pytest.raises(ValueError, match="half way"):
        gated(failing)(wsgi_environ(), sent_already)


def test_without_a_decision_start_response_is_the_servers_own() -> None:
    """Where no rule applies nothing stands between the application and the server."""
    handed = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        handed.append(start_response)
        return hello(environ, start_response)

    server = Server()
    gated(app, Rule("login", "1/minute", path="/login"))(wsgi_environ(), server)
    assert handed == [server]


# --- the iterable -----------------------------------------------------------------------------------------------------


class Body:
    """An iterable with a length and a ``close``."""

    def __init__(self) -> None:
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return iter([b"hello"])

    def __len__(self) -> int:
        return 1

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("make", [Body, lambda: [b"a", b"b"], lambda: (b"a",), lambda: FileWrapper(io.BytesIO(b"file"))])
def test_the_iterable_is_returned_as_it_is(make: Callable[[], Iterable[bytes]]) -> None:
    """The server gets the very object that the application returned, so its length and ``wsgi.file_wrapper`` still count."""
    body = make()

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [PLAIN])
        return body

    gate = gated(app, Rule("api", "1/minute"), on_denied=app)
    environ = wsgi_environ() | {"wsgi.file_wrapper": FileWrapper}
    assert gate(dict(environ), Server()) is body
    assert gate(environ, Server()) is body


def test_close_reaches_the_apps_iterable() -> None:
    """When the server closes, the application's iterable is closed, once, also when it was not read to its end."""
    body = Body()

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [PLAIN])
        return body

    run_wsgi(gated(app), wsgi_environ())
    assert body.closed == 1
    gated(app)(wsgi_environ(), Server()).close()
    assert body.closed == 2


def test_chunks_arrive_one_by_one() -> None:
    """Nothing is read ahead of the server."""
    made = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [PLAIN])
        for number in range(3):
            made.append(number)
            yield b"%d" % number

    chunks = iter(gated(app)(wsgi_environ(), Server()))
    assert made == []
    assert (next(chunks), made) == (b"0", [0])
    assert (next(chunks), made) == (b"1", [0, 1])


# --- environ ----------------------------------------------------------------------------------------------------------


def test_the_environ_is_the_servers_own() -> None:
    """The application gets the server's dictionary, with decision, exchange and outcome in it."""
    handed = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        handed.append(environ)
        return hello(environ, start_response)

    environ = wsgi_environ("/x?y=1", headers={"X-One": "1"})
    before = dict(environ)
    gated(app)(environ, Server())
    assert handed[0] is environ
    assert environ.pop("limitgate").allowed
    environ.pop("limitgate.exchange")
    assert environ.pop("limitgate.outcome") == "admitted"
    assert environ == before


def test_a_refusal_leaves_its_decision_in_the_environ() -> None:
    """What stands around the gate can see why it refused."""
    gate = gated(hello, Rule("api", "1/minute"))
    gate(wsgi_environ(), Server())
    environ = wsgi_environ()
    gate(environ, Server())
    assert (environ["limitgate"].allowed, environ["limitgate"].rule) == (False, "api")


def test_applications_that_are_tried_one_after_the_other() -> None:
    """Where one that has a gate of its own does not know the path, another one answers: all that was charged is told."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"hello"]

    def cascade(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        tried[0](environ, lambda *_: None)
        return tried[1](environ, start_response)

    options: dict[str, Any] = {"store": MemoryStore(Clock()), "headers": ["draft-11"]}
    tried = [LimitGateWSGI(app, rules=[Rule(name, "5/minute")], **options) for name in ("one", "two")]
    gate = LimitGateWSGI(cascade, rules=[Rule("outer", "7/minute")], **options)
    assert wsgi_reply(gate).rate["ratelimit"] == '"outer";r=6;t=9, "one";r=4;t=12, "two";r=4;t=12'
    gate = LimitGateWSGI(cascade, rules=[Rule("outer", exempt=True)])
    assert wsgi_reply(gate).rate["ratelimit"] == '"two";r=3;t=24'


def test_chunks_that_come_late_through_two_gates() -> None:
    """An application that starts its response with its first chunk, and settles its cost with its last."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        yield b"hello"
        environ["limitgate"].settle(5)

    options: dict[str, Any] = {"store": MemoryStore(Clock()), "headers": ["draft-11"]}
    inner = LimitGateWSGI(app, rules=[Rule("inner", "9/minute", cost=2)], **options)
    gate = LimitGateWSGI(inner, rules=[Rule("outer", "9/minute", cost=3), Rule("each", "9/minute")], **options)
    assert wsgi_reply(gate).rate["ratelimit"] == '"outer";r=6;t=20, "each";r=8;t=7, "inner";r=7;t=14'
    assert wsgi_reply(gate).rate["ratelimit"] == '"outer";r=1;t=54, "each";r=7;t=14, "inner";r=2;t=47'


def test_a_decision_of_somebody_else_is_not_believed() -> None:
    """Whatever stood in the environ before, the application finds this gate's decision, or None."""
    environ = wsgi_environ(limitgate="stale")
    gated(hello, Rule("login", "1/minute", path="/login"))(environ, Server())
    assert environ["limitgate"] is None


@pytest.mark.parametrize("method", ["POST", "HEAD", "GET"])
def test_a_refused_request_is_not_read(method: str) -> None:
    """A refusal is made without reading the body, satisfies the validator, and calls ``start_response`` once."""

    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} of wsgi.input was asked for")

    gate = gated(hello, Rule("api", "1/minute", methods=[method]))
    gate(wsgi_environ(method=method), Server())
    environ, server = wsgi_environ(method=method, headers={"Content-Length": "10"}), Server()
    environ["wsgi.input"] = Untouched()
    chunks = list(gate(environ, server))
    assert [call[0] for call in server.calls] == ["429 Too Many Requests"]
    assert len(b"".join(chunks)) == (0 if method == "HEAD" else int(dict(server.calls[0][1])["Content-Length"]))
    assert wsgi_reply(gate, method=method).status == 429


def test_the_status_line_of_a_503() -> None:
    """Under ``on_error: closed`` the status is ``503 Service Unavailable``."""

    class Down:
        def spend(self, plan: Any, timeout: float) -> Any:
            from limitgate import StoreError

            raise StoreError("down")

        def close(self) -> None:
            """Nothing to let go of."""

    server = Server()
    gated(hello, store=Down(), on_error="closed")(wsgi_environ(), server)
    assert server.calls[0][0] == "503 Service Unavailable"


@pytest.mark.parametrize(
    "change",
    [
        {"PATH_INFO": ""},
        {"PATH_INFO": "/\xff\xfe"},
        {"PATH_INFO": "/caf\xc3\xa9"},
        {"PATH_INFO": None},
        {"REMOTE_ADDR": None},
        {"REMOTE_ADDR": ""},
        {"REMOTE_ADDR": "not an address"},
        {"REMOTE_ADDR": "unix:"},
        {"QUERY_STRING": None},
        {"HTTP_HOST": None},
        {"HTTP_HOST": "\xff"},
        {"SCRIPT_NAME": None},
        {"CONTENT_LENGTH": ""},
        {"CONTENT_TYPE": ""},
        {"HTTP_X_NUMBER": 7},
    ],
    ids=str,
)
def test_whatever_a_server_leaves_out_or_lets_through(change: dict[str, Any]) -> None:
    """Variables that may be empty or absent, and bytes that are no text, are no reason to fail or to pass unlimited."""
    gate = gated(hello, Rule("api", "2/minute", key=["ip", "path", "host", "header:x-number", "user", "api_key"]))
    server = Server()
    for _ in range(3):
        environ = {**wsgi_environ(), **change}
        gate({name: value for name, value in environ.items() if value is not None}, server)
    assert [call[0][:3] for call in server.calls] == ["200", "200", "429"]


def test_script_name_is_not_part_of_the_path() -> None:
    """Patterns match ``PATH_INFO``, which is below the mount point already."""
    gate = gated(hello, Rule("login", "1/minute", path="/login"))
    assert wsgi_reply(gate, "/login", SCRIPT_NAME="/v1").status == 200
    assert wsgi_reply(gate, "/login", SCRIPT_NAME="/v1").status == 429
    assert wsgi_reply(gate, "/v1/login").status == 200


def test_remote_user_is_the_user() -> None:
    """``user`` in a key is whom the server has authenticated."""
    gate = gated(hello, Rule("api", "1/minute", key=["user"]))
    users = ["ann", "bob", "ann", "", None]
    assert [wsgi_reply(gate, **({"REMOTE_USER": user} if user is not None else {})).status for user in users] == [
        *[200, 200, 429],
        *[200, 429],
    ]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("moment", ["call", "started", "iteration"])
def test_exceptions_of_the_app_propagate(error: BaseException, moment: str) -> None:
    """What the application raises comes out as it is, when called and when iterated."""

    def lazy(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [PLAIN])
        yield b"one"
        raise error

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        if moment == "iteration":
            return lazy(environ, start_response)
        if moment == "started":
            start_response("200 OK", [PLAIN])
        raise error

    with pytest.raises(type(error)) as raised:
        list(gated(app)(wsgi_environ(), Server()))
    assert raised.value is error


def test_an_on_denied_in_full() -> None:
    """``on_denied`` is a whole WSGI application: it may read the body, write, and stream its answer."""

    def denied(environ: Any, start_response: Any) -> Iterator[bytes]:
        told = environ["wsgi.input"].read(4)
        write = start_response("429 Calm Down", [PLAIN])
        write(told)
        yield b" is too much for "
        yield environ["limitgate"].rule.encode()

    gate = gated(hello, Rule("api", "1/minute"), on_denied=denied)
    wsgi_reply(gate)
    refused = wsgi_reply(gate, method="POST", body=b"this")
    assert (refused.status, refused.body, refused.wait) == (429, b"this is too much for api", 60)
    head = wsgi_reply(gate, method="HEAD", body=b"this")
    assert (head.status, head.body, head.wait) == (429, b"", 60)
    assert refused.rate["x-ratelimit-remaining"] == "0"
