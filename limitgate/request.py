"""A neutral view of a request, made from an ASGI scope or a WSGI environ. Nothing behind it knows which it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs

from limitgate.paths import readings

Scope = MutableMapping[str, Any]
Environ = MutableMapping[str, Any]

_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"})


class Headers(Mapping[str, str]):
    """Request headers by case-insensitive name. Several lines of one name are joined by ``", "`` (RFC 9110 section 5.3)."""

    __slots__ = ("_lines",)

    def __init__(self, lines: dict[str, str]) -> None:
        self._lines = lines

    def __getitem__(self, name: str) -> str:
        return self._lines[name.lower()]

    def __iter__(self) -> Any:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


class Query(str):
    """The query string as sent. ``.get(name)`` gives the first value of a parameter, decoded."""

    __slots__ = ()

    def get(self, name: str, default: str | None = None) -> str | None:
        """The first value of the parameter ``name``, ``default`` if there is none."""
        return parse_qs(self, keep_blank_values=True).get(name, [default])[0]


class Request:
    """What rules, keys, ``identify`` and ``cost`` may look at.

    ``method`` is in upper case; HEAD and a WebSocket handshake count as GET. ``path`` is the path below the mount point,
    cleaned. ``client`` is the client's address behind trusted proxies, None if there is none.
    """

    method: str
    sent: str
    """The path as it was sent, decoded."""
    root: str = ""
    """The mount point, where ``sent`` may begin with it."""
    peer: str | None
    """The address of whoever opened the connection, as the server gives it."""
    scope: Scope | None = None
    """The ASGI scope, None under WSGI."""
    environ: Environ | None = None
    """The WSGI environ, None under ASGI."""
    _headers: Headers | None = None
    _client: str | None = None
    _resolve: Callable[[Request], str | None] | None = None

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The readings of the path that patterns are tried on; the first is `path`."""
        return readings(self.sent, self.root)

    @property
    def path(self) -> str:
        """The path as rules see it first: below the mount point, cleaned."""
        return self.paths[0]

    @property
    def headers(self) -> Headers:
        """The request's headers."""
        if self._headers is None:
            self._headers = Headers(self._read_headers())
        return self._headers

    @property
    def client(self) -> str | None:
        """The address of the client, without port or zone."""
        if self._resolve is not None:
            self._client, self._resolve = self._resolve(self), None
        return self._client

    def resolve_client_with(self, resolve: Callable[[Request], str | None]) -> None:
        """Have ``client`` found by ``resolve`` when it is first asked for."""
        self._resolve = resolve

    @property
    def method_class(self) -> str:
        """The method, or ``other`` for one that HTTP does not define: invented methods are all one."""
        return self.method if self.method in _METHODS else "other"

    @property
    def is_preflight(self) -> bool:
        """Whether a browser asks for permission to send the real request (Fetch standard, CORS-preflight request)."""
        if self.method != "OPTIONS":
            return False
        return bool(self.headers.get("origin") and self.headers.get("access-control-request-method"))

    @property
    def is_websocket(self) -> bool:
        """Whether this is the handshake of a WebSocket."""
        return self.scope is not None and self.scope["type"] == "websocket"

    @property
    def passed_a_gate(self) -> bool:
        """Whether a gate around this one has decided about this very request."""
        return "limitgate" in (self.scope or self.environ or ())

    @property
    def query(self) -> Query:
        """The query string."""
        raise NotImplementedError

    @property
    def user(self) -> Any:
        """Whoever an authentication layer outside of this one has put there, None if nobody."""
        raise NotImplementedError

    def _read_headers(self) -> dict[str, str]:
        raise NotImplementedError


class ASGIRequest(Request):
    """A request seen through an ASGI ``http`` or ``websocket`` scope."""

    scope: Scope

    def __init__(self, scope: Scope) -> None:
        client = scope.get("client")
        self.scope = scope
        self.method = _method(scope.get("method", "GET"))
        self.sent = scope["path"]
        self.root = scope.get("root_path", "")
        self.peer = (client[0] or None) if client else None

    @property
    def query(self) -> Query:
        """The query string."""
        return Query(self.scope.get("query_string", b"").decode("latin-1"))

    @property
    def user(self) -> Any:
        """``scope["user"]``, set by Starlette's AuthenticationMiddleware and its like."""
        return self.scope.get("user")

    def _read_headers(self) -> dict[str, str]:
        lines: dict[str, str] = {}
        repeated: dict[str, list[str]] = {}
        for raw_name, raw_value in self.scope["headers"]:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            if name not in lines:
                lines[name] = value
            elif name in repeated:
                repeated[name].append(value)
            else:
                repeated[name] = [lines[name], value]
        for name, values in repeated.items():
            lines[name] = ", ".join(values)
        return lines


class WSGIRequest(Request):
    """A request seen through a WSGI environ (PEP 3333). Its server has joined repeated header lines already."""

    environ: Environ

    def __init__(self, environ: Environ) -> None:
        self.environ = environ
        self.method = _method(environ["REQUEST_METHOD"])
        self.sent = _text(environ.get("PATH_INFO", ""))
        self.peer = environ.get("REMOTE_ADDR") or None

    @property
    def query(self) -> Query:
        """The query string."""
        return Query(self.environ.get("QUERY_STRING", ""))

    @property
    def user(self) -> Any:
        """``REMOTE_USER``, set by the server or an authentication layer."""
        return self.environ.get("REMOTE_USER") or None

    def _read_headers(self) -> dict[str, str]:
        lines = {
            name[5:].replace("_", "-").lower(): value
            for name, value in self.environ.items()
            if name.startswith("HTTP_") and isinstance(value, str)
        }
        for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            if self.environ.get(name):
                lines[name.replace("_", "-").lower()] = self.environ[name]
        return lines


def _method(method: str) -> str:
    method = method.upper()
    return "GET" if method == "HEAD" else method


def _text(native: str) -> str:
    """A WSGI native string holds bytes as latin-1; the path behind them is UTF-8. What is not native is left alone."""
    try:
        return native.encode("latin-1").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return native
