"""Everything that reads a client's bytes, each as a function of one byte string that asserts what has to hold of it.

`PARSERS` is what all fuzzers drive: Hypothesis, ``tests.attacks.fuzz`` and ``tests.attacks.atheris_fuzz``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Coroutine
from typing import Any

import flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from limitgate import Caller, LimitGate, LimitGateWSGI, MemoryStore, Rule, RuleSet
from limitgate.errors import HeadersTooLargeError
from limitgate.gate.planning.identity import Identities, Subject
from limitgate.http import client_ip as client_module
from limitgate.http.client_ip import MAX_HOPS, TrustedProxies, canonical, grouped
from limitgate.http.paths import PathIndex, interpretations, segments
from limitgate.http.request import ASGIRequest, Request, WSGIRequest
from limitgate.keys import Key
from limitgate.limits.plan import check_cost
from limitgate.routes.flask import wsgi_routes
from limitgate.routes.starlette import asgi_routes
from limitgate.rules.callers import Callers, KnownCaller

MOST_INTERPRETATIONS = 17
"""Of a path: three for each of the ways in which something may be taken off that is a mount point or a host."""
Parser = Callable[[bytes], None]
PEERS = ("10.0.0.1", "203.0.113.9", "::ffff:10.0.0.1", "2001:db8::1", "testclient", "", None)
TRUSTED = ("10.0.0.0/8", "fd00::/8", "unix")
PARTS = ("ip", "api_key|ip", "header:x-a", "host", "user", "caller", "method", "path", "tier", "global")
HEX = frozenset("0123456789abcdef")


def _text(data: bytes) -> str:
    return data.decode("latin-1")


def _split(data: bytes, count: int) -> list[bytes]:
    """Several byte strings out of one: separated by bytes that are no valid UTF-8, as many as are wanted."""
    parts = data.split(b"\xfe", count - 1)
    return [*parts, *([b""] * (count - len(parts)))]


def _lines(data: bytes) -> list[tuple[bytes, bytes]]:
    """Header lines as a server hands them over; names that matter are near."""
    names = (b"x-forwarded-for", b"forwarded", b"host", b"x-api-key", b"authorization", b"x-a", b"origin", b"content-length")
    found = []
    for line in data.split(b"\n")[:50]:
        name, colon, value = line.partition(b":")
        found.append((name.lower(), value.strip(b" \t")) if colon else (names[len(line) % len(names)], line))
    return found


def scope_of(data: bytes) -> dict[str, Any]:
    """An ASGI scope out of bytes."""
    method, path, query, head = _split(data, 4) if b"\xfe" in data else (b"GET", data, data, data)
    choice = sum(data[:8])
    return {
        "type": "websocket" if choice % 7 == 0 else "http",
        "method": _text(method[:20]) or "GET",
        "path": path.decode("utf-8", "replace") if choice % 4 else "/" + path.decode("utf-8", "surrogateescape"),
        "raw_path": path,
        "root_path": ("", "", "", "/v1", "/;", "/x/")[choice % 6],
        "query_string": query,
        "headers": _lines(head),
        "client": None if (peer := PEERS[choice % 7]) is None else (peer, choice),
        "user": (None, "ada", "")[choice % 3],
    }


def environ_of(data: bytes) -> dict[str, Any]:
    """A WSGI environ out of bytes."""
    scope = scope_of(data)
    environ = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": scope["root_path"],
        "PATH_INFO": _text(scope["raw_path"]),
        "QUERY_STRING": _text(scope["query_string"]),
        "SERVER_NAME": "testserver",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "REMOTE_ADDR": scope["client"][0] if scope["client"] else "",
        "REMOTE_USER": scope["user"] or "",
    }
    for name, value in scope["headers"]:
        environ["HTTP_" + _text(name).upper().replace("-", "_")] = _text(value)
    return environ


def _fields(request: Request, size: int) -> None:
    """What holds of every request: text of bounded length everywhere."""
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in request.headers.items())
    assert sum(map(len, request.headers.values())) <= 2 * size + 4
    assert all(
        request.headers.get(name.upper()) == value for name, value in request.headers.items() if name.upper().lower() == name
    )
    assert request.path.startswith("/")
    assert len(interpretations(request.sent, request.root)) <= MOST_INTERPRETATIONS
    assert request.method_class in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "other")
    assert isinstance(request.is_preflight, bool)
    found = request.query.get("a", "")
    assert found is not None
    assert len(found) <= size + 1


def fuzz_scope(data: bytes) -> None:
    """A request out of an ASGI scope."""
    _fields(ASGIRequest(scope_of(data)), len(data))


def fuzz_environ(data: bytes) -> None:
    """A request out of a WSGI environ."""
    _fields(WSGIRequest(environ_of(data)), len(data))


def fuzz_address(data: bytes) -> None:
    """An address: parsing its own spelling gives itself, and its group is stable."""
    text = _text(data)
    address = canonical(text)
    if address is None:
        assert grouped(text, 64) == text
        return
    assert canonical(str(address)) == address
    assert canonical(f"[{address}]:80") == address
    group = grouped(text, 64)
    assert group == grouped(str(address), 64)
    assert len(group) < 50
    assert grouped(f"::ffff:{address}", 64) == group or ":" in str(address)


_PROXIES = {header: TrustedProxies(TRUSTED, header) for header in ("x-forwarded-for", "forwarded")}


def fuzz_client(data: bytes) -> None:
    """The client behind proxies: an address or the peer; and what a proxy appends is never hidden."""
    lines = data.split(b"\n")[:20]
    for header, proxies in _PROXIES.items():
        raw = [(header.encode(), line) for line in lines]
        for peer in PEERS:
            scope = {"path": "/", "headers": raw, "client": None if peer is None else (peer, 1)}
            with contextlib.suppress(HeadersTooLargeError):
                client = proxies.client(ASGIRequest(scope))
                assert client in (peer or None, "10.0.0.1") or str(canonical(client or "")) == client
        own = b"for=203.0.113.9;proto=https" if header == "forwarded" else b"203.0.113.9"
        appended = {"path": "/", "headers": [*raw, (header.encode(), own)], "client": ("10.0.0.1", 1)}
        assert proxies.client(ASGIRequest(appended)) == "203.0.113.9"
        joined = {"path": "/", "headers": [(header.encode(), data + b", " + own)], "client": ("10.0.0.1", 1)}
        assert proxies.client(ASGIRequest(joined)) == "203.0.113.9"
        elements = client_module._elements(ASGIRequest({"path": "/", "headers": raw}), header)
        with contextlib.suppress(HeadersTooLargeError):
            assert len(list(elements)) <= MAX_HOPS


_PATTERNS = ("/login", "/items/{id}", "/api/**", "/a/b", "/**", "/", "/v1/{a}/**")
_INDEX: PathIndex[str] = PathIndex()
for _pattern in _PATTERNS:
    _INDEX.add(segments(_pattern), _pattern)


def fuzz_path(data: bytes) -> None:
    """A path: few interpretations, no longer than it is, each a path; the first has nothing left to clean."""
    path, root = (part.decode("utf-8", "replace") for part in _split(data, 2))
    found = interpretations(path, root)
    assert 1 <= len(found) <= MOST_INTERPRETATIONS
    assert len(set(found)) == len(found) or not path.startswith("/")
    for interpretation in found:
        assert interpretation.startswith("/")
        assert len(interpretation) <= len(path) + 1
        patterns = _INDEX.find(interpretation)
        assert "/**" in patterns
        assert len(patterns) <= len(_PATTERNS)
    if not root:
        assert interpretations(found[0]) == (found[0],)


_CALLERS = Callers(
    [
        KnownCaller(id="acme", api_key=f"sha256:{hashlib.sha256(b'demo-vip-key').hexdigest()}", tier="vip"),
        KnownCaller(id="billing", header={"X-A": "billing"}),
    ]
)


def _identities(header: str, *, listed: bool) -> Identities:
    callers = _CALLERS if listed else Callers()
    proxies = _PROXIES["x-forwarded-for"]
    return Identities(callers, proxies, ("default", "vip"), identifies=False, api_key_header=header, ipv6_prefix=64)


_IDENTITIES = [_identities(header, listed=listed) for header in ("x-api-key", "authorization") for listed in (True, False)]
_KEYS = [Key(PARTS, "rule a", "/**"), Key(PARTS, "rule a", "/**", b"0123456789abcdef")]


def _subject(data: bytes, identities: Identities) -> Subject:
    request = ASGIRequest(scope_of(data)) if len(data) % 2 else WSGIRequest(environ_of(data))
    request.resolve_client = _PROXIES["x-forwarded-for"].client
    return identities.subject(request, None)


def fuzz_key(data: bytes) -> None:
    """A key: 32 hex digits out of a text of bounded length, the same each time."""
    subject = _subject(data, _IDENTITIES[len(data) % 4])
    try:
        subject.address()
    except HeadersTooLargeError:  # no request with such headers has a key
        return
    for key in _KEYS:
        text = key.text(subject)
        assert len(text) < 240 * len(PARTS)
        digest = key.digest(text)
        assert len(digest) == 32
        assert set(digest) <= HEX
        assert key.digest(text) == digest


def fuzz_values(data: bytes) -> None:
    """Two lists of values are one bucket only if they are the same values."""
    one, other = (_split(part, 2) for part in _split(data, 2))

    def bucket(values: list[bytes]) -> str:
        raw = [(name, value) for name, value in zip((b"x-a", b"x-b"), values)]
        request = ASGIRequest({"path": "/", "headers": raw, "client": ("203.0.113.9", 1)})
        request.resolve_client = lambda request: request.peer
        return _PAIR.digest(_PAIR.text(Subject(request, None, "default", _IDENTITIES[0])))

    same = [_text(value).strip() for value in one] == [_text(value).strip() for value in other]
    assert (bucket(one) == bucket(other)) is same


_PAIR = Key(("header:x-a", "header:x-b"), "rule a")


def fuzz_identity(data: bytes) -> None:
    """Who asks: nobody becomes a listed caller by anything but its key, or its header from a trusted peer."""
    for identities in _IDENTITIES:
        subject = _subject(data, identities)
        if subject.caller is not None:
            assert subject.caller in (Caller("acme", "vip"), Caller("billing"))
            assert b"demo-vip-key" in data or b"billing" in data
        assert subject.tier in ("default", "vip")
        key = subject.api_key()
        assert key is None or len(key) <= max(64, 2 * len(data))


def _cost(request: Request) -> Any:
    size = request.headers.get("content-length", "1")
    return min(int(size), 3) if size.isascii() and size.isdigit() and len(size) < 9 else 1


def fuzz_cost(data: bytes) -> None:
    """What a callable makes of a request is a cost, or is refused as none."""
    assert 0 <= check_cost(_cost(ASGIRequest(scope_of(data)))) <= 3
    for nonsense in (data, _text(data), float(len(data)), -len(data) - 1, None, bool(data)):
        try:
            check_cost(nonsense)
        except (TypeError, ValueError) as error:
            assert len(str(error)) < 200  # noqa: PT017 - it is about the text
        else:
            raise AssertionError(nonsense)


_ran: list[str] = []
"""The templates of the handlers that ran."""


def _asgi_handler(template: str) -> Any:
    async def handler(_: Any) -> PlainTextResponse:
        _ran.append(template)
        return PlainTextResponse("hello")

    return handler


def _starlette() -> Starlette:
    def inner(prefix: str) -> list[Any]:
        paths = ("/login", "/items/{id:int}", "/f/{rest:path}")
        return [Route(path, _asgi_handler(prefix + path)) for path in paths]

    alone = ("/u/{a:uuid}/{b:float}", "/{x}/{y}/z")
    return Starlette(
        routes=[
            *inner(""),
            *[Route(path, _asgi_handler(path)) for path in alone],
            Mount("/v1", routes=inner("/v1")),
            Mount("/of/{who}", routes=inner("/of/{who}")),
            Host("{sub}.example", app=Mount("/sub", routes=inner("/sub"))),
            Mount("", routes=[Route("/last/{x}", _asgi_handler("/last/{x}"))]),
        ]
    )


def _flask(prefix: str) -> flask.Flask:
    app = flask.Flask("fuzzed")
    for path in ("/", "/login", "/items/<int:id>", "/f/<path:rest>", "/u/<uuid:a>/<float:b>", "/any/<any(a, b):c>"):

        def view(*, path: str = path, **_: Any) -> str:
            _ran.append(prefix + path)
            return "hello"

        app.add_url_rule(path, path, view)
    return app


_STARLETTE = _starlette()
_FLASK = DispatcherMiddleware(_flask(""), {"/v1": _flask("/v1"), "/v1/deep": _flask("/v1/deep")})
_STARLETTE_ROUTES, _FLASK_ROUTES = asgi_routes(_STARLETTE), wsgi_routes(_FLASK)


async def _receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b""}


async def _send(_: Any) -> None:
    pass


def fuzz_starlette_routes(data: bytes) -> None:
    """The route of a path among Starlette's: if a handler runs, its route was known."""
    scope = scope_of(data) | {"type": "http", "http_version": "1.1", "scheme": "http", "server": None}
    route = _STARLETTE_ROUTES.find(ASGIRequest(scope))
    _ran.clear()
    with contextlib.suppress(ValueError):  # a number that Python does not convert
        completed(_STARLETTE(scope, _receive, _send))
    assert not _ran or (route is not None and [route.template] == _ran)


def fuzz_flask_routes(data: bytes) -> None:
    """The route of a path among Flask's, behind a dispatcher: if a view runs, its rule was known."""
    environ = environ_of(data) | {"wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO(), "REQUEST_METHOD": "GET"}
    route = _FLASK_ROUTES.find(WSGIRequest(dict(environ)))
    _ran.clear()
    list(_FLASK(environ, lambda *_: lambda _: None))
    assert not _ran or (route is not None and [route.template] == _ran)


def _rules() -> RuleSet:
    """Rules of every kind; only what is known of the application may turn up in an answer."""
    limits = [Rule(f"part-{place}", "2/day", key=[part]) for place, part in enumerate(PARTS)]
    more = [
        Rule("login", "1/day", path="/login", methods=["POST"]),
        Rule("health", path="/healthz", exempt=True),
        Rule("costly", "5/day", cost=_cost, path="/items/**"),
        Rule("vip", "2/day", key=["api_key"], tier="vip"),
    ]
    known = [KnownCaller(id="acme", api_key=f"sha256:{hashlib.sha256(b'demo-vip-key').hexdigest()}", tier="vip")]
    return RuleSet([*limits, *more], known)


def _gates() -> tuple[Any, Any]:
    options: dict[str, Any] = {"rules": _rules(), "trusted_proxies": TRUSTED, "headers": ("x-ratelimit", "draft-11")}
    stores = [MemoryStore(max_buckets=1000) for _ in range(2)]
    asgi = LimitGate(_STARLETTE, store=stores[0], **options)
    return asgi, LimitGateWSGI(_FLASK, store=stores[1], **options)


_ASGI, _WSGI = _gates()
_NAMES = frozenset(rule.name for of_tier in _rules().tiers.values() for rule in of_tier)


def _decided(answer: Any) -> None:
    """What holds of every answer: its fields can be sent, and name nothing but rules."""
    if answer.refusal is not None:
        assert answer.refusal.status in (429, 431)
        assert set(answer.decision.refusing) <= _NAMES
        assert len(answer.refusal.body) < 1000
    for name, value in answer.fields:
        assert name.isascii()
        assert value.isascii()
        assert value.isprintable()
        assert len(value) < 2000


def fuzz_wsgi_gate(data: bytes) -> None:
    """A whole decision about a WSGI request."""
    _decided(_WSGI.gate.check(WSGIRequest(environ_of(data))))
    assert len(_WSGI.gate.store) <= 1000


def fuzz_asgi_gate(data: bytes) -> None:
    """A whole decision about an ASGI request."""
    _decided(completed(_ASGI.gate.acheck(ASGIRequest(scope_of(data)))))
    assert len(_ASGI.gate.store) <= 1000


def completed(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for; without an event loop, for speed."""
    try:
        coroutine.send(None)
    except StopIteration as stopped:
        return stopped.value
    coroutine.close()
    raise AssertionError("it waited")


PARSERS: dict[str, Parser] = {name: parser for name, parser in list(globals().items()) if name.startswith("fuzz_")}
