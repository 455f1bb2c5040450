"""Neutral view of a request, made from an ASGI scope or a WSGI environ. Code behind it does not know which."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import compress
from operator import itemgetter
from typing import Any, NoReturn, Self, overload
from urllib.parse import unquote

from limitgate.errors import ConfigError, HeadersTooLargeError
from limitgate.http.paths import first_interpretation
from limitgate.limits.decision import FinalCosts
from limitgate.messages.suggestions import lacking

Scope = MutableMapping[str, Any]
Environ = MutableMapping[str, Any]

_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"})


MOST_LINES = 1000
"""Most header lines of a request whose headers are read; common servers and proxies take 100, or 32 KB."""
LONGEST_VALUE = 16_384
"""Most characters of a header that a key or a caller goes by; hardly any server takes a longer one."""
LONGEST_NAME = 256
"""Most characters of a name that is looked for, as rules name headers."""
LONGEST_QUERY = 65_536
"""Most characters of a query of very many fields that is still searched to its end; hardly any server takes more."""
MOST_FIELDS, MOST_ESCAPES = 2048, 1000
"""Most fields of a query that are read, and most escapes of a value with a malformed one."""
_NEEDS_ESCAPES = re.compile(r"[^A-Za-z0-9_.~-]|\A\Z")
_UNPREFIXED = ("CONTENT_TYPE", "CONTENT_LENGTH")
"""Headers whose WSGI variables have no prefix."""


class HeaderNames:
    """Names of headers to look for, as ASGI and as WSGI have them."""

    __slots__ = ("raw", "text", "variables")

    def __init__(self, names: Iterable[str]) -> None:
        self.text = frozenset(map(str.lower, names))
        self.raw = frozenset(map(_raw, self.text))
        plain = [name.upper().replace("-", "_") for name in self.text if "_" not in name]
        self.variables = frozenset([f"HTTP_{name}" for name in plain]) | set(_UNPREFIXED).intersection(plain)


class Headers(Mapping[str, str]):
    """Request headers by case-insensitive name. Several lines of one name are joined by ``", "`` (RFC 9110 section 5.3).

    A lookup reads one header; iteration reads all.
    """

    __slots__ = ("_every",)
    _every: dict[str, str] | None

    def __getitem__(self, name: str) -> str:
        name = name.lower()
        if self._every is not None:
            return self._every[name]
        lines = self._lines_of(name)
        if not lines:
            raise KeyError(name)
        return ", ".join(lines)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._raw_lines_of(name.lower()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def have_any(self, names: HeaderNames) -> bool:
        """True if there is a header of one of these names."""
        return not names.text.isdisjoint(self._read())

    def identity(self, name: str) -> str:
        """A header without white space around it, empty if it is absent.

        Raises `HeadersTooLargeError` if it is longer than `LONGEST_VALUE`.
        """
        lines = self._raw_lines_of(name)
        if not lines:
            return ""
        if sum(map(len, lines)) > LONGEST_VALUE:
            raise value_too_long()
        return ", ".join(map(self._decoded, lines)).strip()

    def start(self, name: str, most: int) -> str:
        """The first ``most`` characters of a header's first line, empty if it is absent."""
        lines = self._raw_lines_of(name)
        return self._decoded(lines[0][:most]) if lines else ""

    def end(self, name: str, most: int) -> str:
        """The last ``most`` characters of a header, empty if it is absent."""
        lines = self._raw_lines_of(name)
        return self._decoded(lines[-1][-most:]) if lines else ""

    def _lines_of(self, name: str) -> list[str]:
        return [self._decoded(line) for line in self._raw_lines_of(name)]

    def _raw_lines_of(self, name: str) -> Sequence[Any]:
        """The values of the lines of one name in lower case, as the server gives them."""
        raise NotImplementedError

    def _decoded(self, line: Any) -> str:
        """A value as text."""
        raise NotImplementedError

    def _read(self) -> dict[str, str]:
        if self._every is None:
            self._every = self._all()
        return self._every

    def _all(self) -> dict[str, str]:
        raise NotImplementedError


_NAME, _VALUE = itemgetter(0), itemgetter(1)
"""Name and value of a header line."""


class ASGIHeaders(Headers):
    """Headers of an ASGI scope: pairs of bytes."""

    __slots__ = ("_lines", "_names")

    def __init__(self, lines: Sequence[Sequence[bytes]]) -> None:
        self._every = None
        self._lines = lines
        self._names: list[bytes] | None = None

    def _raw_lines_of(self, name: str) -> Sequence[bytes]:
        names, sought = self._names, name.encode("latin-1", "replace")
        if names is None:
            self._names = names = self._read_names()
        found = names.count(sought)
        if found == 1:
            return (self._lines[names.index(sought)][1],)
        if not found:
            return ()
        return [*compress(map(_VALUE, self._lines), map(sought.__eq__, names))]

    def have_any(self, names: HeaderNames) -> bool:
        """True if there is a header of one of these names."""
        if self._names is None:
            self._names = self._read_names()
        return not names.raw.isdisjoint(self._names)

    def end(self, name: str, most: int) -> str:
        """The last ``most`` characters of a header, empty if it is absent."""
        names, sought = self._names, name.encode("latin-1", "replace")
        if names is None:
            self._names = names = self._read_names()
        if names.count(sought) == 1:  # almost all requests
            return self._lines[names.index(sought)][1][-most:].decode("latin-1")
        ends: list[bytes] = []
        left = most
        for line in reversed(self._raw_lines_of(name)):
            ends.append(line[-most:])
            left -= len(line) + 2
            if left <= -2:
                break
        return b", ".join(reversed(ends))[-most:].decode("latin-1")

    def _decoded(self, line: bytes) -> str:
        return line.decode("latin-1")

    def _all(self) -> dict[str, str]:
        if len(self._lines) > MOST_LINES:
            raise too_many_lines()
        lines: dict[str, list[str]] = {}
        for name, value in self._lines:
            lines.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        return {name: ", ".join(values) for name, values in lines.items()}

    def _read_names(self) -> list[bytes]:
        """The names of the lines, in lower case, which not every server gives them in."""
        if len(self._lines) > MOST_LINES:
            raise too_many_lines()
        names = [*map(_NAME, self._lines)]
        joined = b"".join(names)
        if len(joined) > LONGEST_VALUE:  # lower() would take too long
            names = [name if len(name) <= LONGEST_NAME else b"" for name in names]
            joined = b"".join(names)
        return names if joined == joined.lower() else [name.lower() for name in names]


def too_many_lines() -> HeadersTooLargeError:
    """The error for a request of more than `MOST_LINES`."""
    return HeadersTooLargeError(f"The request has more than {MOST_LINES:,} header fields.")


def value_too_long() -> HeadersTooLargeError:
    """The error for a header of more than `LONGEST_VALUE` that a key or a caller goes by."""
    return HeadersTooLargeError(f"A header field that limits go by has more than {LONGEST_VALUE:,} characters.")


class TextHeaders(Headers):
    """Headers by name that a server or framework has joined already."""

    __slots__ = ()

    def __init__(self, every: dict[str, str]) -> None:
        self._every = every

    def _raw_lines_of(self, name: str) -> Sequence[str]:
        value = self._read().get(name)
        return () if value is None else (value,)

    def _decoded(self, line: str) -> str:
        return line


class WSGIHeaders(TextHeaders):
    """Headers of a WSGI environ, whose server has joined repeated lines already."""

    __slots__ = ("_environ",)

    def __init__(self, environ: Environ) -> None:
        self._every = None
        self._environ = environ

    def have_any(self, names: HeaderNames) -> bool:
        """True if there is a header of one of these names, or an empty one."""
        return not self._environ.keys().isdisjoint(names.variables)

    def _raw_lines_of(self, name: str) -> Sequence[str]:
        if "_" in name:
            return ()
        variable = name.upper().replace("-", "_")
        value = self._environ.get(variable) if variable in _UNPREFIXED else None
        value = value or self._environ.get(f"HTTP_{variable}")
        return (value,) if isinstance(value, str) else ()

    def _all(self) -> dict[str, str]:
        lines = {
            name[5:].replace("_", "-").lower(): value
            for name, value in self._environ.items()
            if name.startswith("HTTP_") and isinstance(value, str)
        }
        for name in _UNPREFIXED:
            if self._environ.get(name):
                lines[name.replace("_", "-").lower()] = self._environ[name]
        return lines


class Query(str):
    """The query string as sent. ``.get(name)`` gives the first value of a parameter, decoded."""

    __slots__ = ("_end", "_known", "_text")
    _known: dict[str, str | None]
    _text: str
    """Every field with an ampersand before it."""
    _end: int
    """End of the first `MOST_FIELDS` fields."""

    def __new__(cls, text: str) -> Self:
        """Make a query whose fields are parsed on first use."""
        query = super().__new__(cls, text)
        query._known = {}
        query._end = -1
        return query

    @overload
    def get(self, name: str, default: str) -> str: ...

    @overload
    def get(self, name: str, default: None = None) -> str | None: ...

    def get(self, name: str, default: str | None = None) -> str | None:
        """First value of the parameter ``name``, ``default`` if there is none.

        Raises `ValueError` if it is not among the first `MOST_FIELDS` fields, and escapes may hide it among the others; and if
        its value has more than `MOST_ESCAPES` escapes, some of them malformed.
        """
        if name not in self._known:
            self._known[name] = self._first(name)
        value = self._known[name]
        return default if value is None else value

    def _first(self, name: str) -> str | None:
        if self._end < 0:
            self._text = f"&{self}"
            self._end = _end_of_fields(self._text)
        text, end = self._text, self._end
        match = _field_named(name).search(text, 0, end)
        if match is not None:
            start = match.end()
        elif end == len(text) or (start := _find_as_written(name, text, end)) < 0:
            return None
        after = text.find("&", start)
        return _unescaped(text[start : len(text) if after < 0 else after].removeprefix("="))


def _end_of_fields(text: str) -> int:
    """Index of the end of the first `MOST_FIELDS` fields of a query."""
    if text.count("&") <= MOST_FIELDS:
        return len(text)
    return len(text) - len(text.split("&", MOST_FIELDS + 1)[-1]) - 1


def _find_as_written(name: str, text: str, start: int) -> int:
    """Find the end of a field's name in a query from ``start`` on, -1 if absent. Raises `ValueError` if escapes may hide it."""
    if _NEEDS_ESCAPES.search(name) or len(text) > LONGEST_QUERY or text.find("%", start) >= 0:
        raise ValueError(f"the query has more than {MOST_FIELDS} fields, any of which may be the one, expected fewer")
    found = [at for end in "=&" if (at := f"{text}&".find(f"&{name}{end}", start)) >= 0]
    return min(found) + 1 + len(name) if found else -1


@lru_cache(maxsize=256)
def _field_named(name: str) -> re.Pattern[str]:
    """Regular expression for the start of a query's field of this name, each of its characters escaped or not."""
    spelled = "".join(f"(?:{_raw_in_query(character)}{_escaped(character)})" for character in name)
    return re.compile(f"&{spelled}(?=[=&]|\\Z)" if name else "&(?==)")


def _raw_in_query(character: str) -> str:
    """Regular expression for an unescaped character, and a bar; empty for one that has a meaning in queries."""
    return "" if character in "&=+" else "[+ ]|" if character == " " else f"{re.escape(character)}|"


def _escaped(character: str) -> str:
    """Regular expression for a character's UTF-8 in escapes (RFC 3986 section 2.1)."""
    return "".join(f"%(?i:{byte:02x})" for byte in character.encode("utf-8", "surrogatepass"))


def _unescaped(text: str) -> str:
    """Decode a query's value like `urllib.parse.parse_qs`. Raises `ValueError` for many escapes, some of them malformed."""
    text = text.replace("+", " ")
    if "%" in text and text.isascii():
        with suppress(UnicodeDecodeError):  # in C, which fails where an escape is malformed
            decoded = text.encode().replace(b"\\", b"\\x5c").replace(b"%", b"\\x").decode("unicode_escape")
            return decoded.encode("latin-1").decode("utf-8", "replace")
    if text.count("%") > MOST_ESCAPES:
        raise ValueError(f"a value in the query has more than {MOST_ESCAPES} escapes, some malformed, expected fewer")
    return unquote(text)


def _raw(name: str) -> bytes:
    """Name of a header in ASGI's form; characters outside of latin-1 become a question mark, which no name has."""
    return name.encode("latin-1", "replace")


class UserWanted(BaseException):
    """Raised for a user whom `Request.find_user` has yet to look up. No `Exception`, so that nobody else catches it."""


_HERE = "method, path, headers, client, query, caller, scope or environ"
_FRAMEWORKS = (
    f"{_HERE}; the framework's own has the rest: starlette.requests.Request(request.scope), werkzeug.Request(request.environ)"
)
_HEADER = "request.headers.get('authorization'), with any header's name"
_QUERY = "request.query.get('page'), with any field's name"


@lacking(
    "a request",
    {
        "GET": _QUERY,
        "META": _FRAMEWORKS,
        "api_key": _HEADER,
        "app": _FRAMEWORKS,
        "args": f"{_QUERY}; {_FRAMEWORKS}",
        "auth": _HEADER,
        "authorization": _HEADER,
        "body": _FRAMEWORKS,
        "client_ip": "client, the address behind trusted proxies",
        "cookies": _FRAMEWORKS,
        "data": _FRAMEWORKS,
        "endpoint": _FRAMEWORKS,
        "form": _FRAMEWORKS,
        "header": _HEADER,
        "ip": "client, the address behind trusted proxies",
        "json": _FRAMEWORKS,
        "params": _QUERY,
        "path_params": _FRAMEWORKS,
        "query_params": f"{_QUERY}; {_FRAMEWORKS}",
        "query_string": _QUERY,
        "remote_addr": f"client, the address behind trusted proxies; {_FRAMEWORKS}",
        "route": _FRAMEWORKS,
        "session": _FRAMEWORKS,
        "state": _FRAMEWORKS,
        "tier": "caller.tier, where request.caller is not None",
        "url": _FRAMEWORKS,
        "user_id": "user, or caller.id where request.caller is not None",
    },
)
class Request:
    """A request, as rules, keys, ``identify`` and ``cost`` see it.

    ``method`` is in upper case; HEAD and a WebSocket handshake count as GET. ``path`` is the path below the mount point,
    normalized. ``client`` is the client's address behind trusted proxies, None if there is none.
    """

    method: str
    """The method in upper case; HEAD and a WebSocket handshake count as GET."""
    sent_method: str
    """The method as it was sent: routers may tell HEAD from GET."""
    sent: str
    """The path as it was sent, decoded."""
    root: str = ""
    """The mount point, where ``sent`` may begin with it."""
    peer: str | None
    """Address of the peer that opened the connection, as the server gives it."""
    scope: Scope | None = None
    """The ASGI scope, None under WSGI."""
    environ: Environ | None = None
    """The WSGI environ, None under ASGI."""
    is_outermost: bool = False
    """True for an HTTP request with a readable number of header lines, unless an outer gate has decided about it."""
    awaits: bool = False
    """True if it is handled on an event loop."""
    caller: Any = None
    """The `limitgate.Caller` that was identified, None if nobody was; known to callables of rules, not to ``identify``."""
    given_limits: dict[int, Any] | None = None
    """Limits that callables have given for this request, by the ids of rules: each is asked once."""
    met: dict[int, bool] | None = None
    """Whether this request meets the conditions of rules, by their ids: each is asked once."""
    is_over = False
    """True if its response is over, and nothing is to be heard of it."""
    resolve_client: Callable[[Request], str | None] | None = None
    """Computes ``client`` on first use; None once it has."""
    _headers: Headers | None = None
    _client: str | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> NoReturn:
        """Say that endpoints of FastAPI have a request of FastAPI's. Raises `ConfigError`."""
        raise ConfigError("limitgate.Request is the request of rules and identify, expected fastapi.Request in an endpoint")

    @cached_property
    def path(self) -> str:
        """Path below the mount point, normalized."""
        return first_interpretation(self.sent, self.root)

    @property
    def headers(self) -> Headers:
        """The request's headers."""
        return self.opened_headers()

    @property
    def client(self) -> str | None:
        """The address of the client, without port or zone."""
        return self.resolved_client()

    def opened_headers(self) -> Headers:
        """`headers`, in a third of the time that a property takes."""
        headers = self._headers
        if headers is None:
            self._headers = headers = self._open_headers()
        return headers

    def resolved_client(self) -> str | None:
        """`client`, in a third of the time that a property takes."""
        resolve = self.resolve_client
        if resolve is not None:
            self._client = resolve(self)
            self.resolve_client = None
        return self._client

    def open_settlement(self) -> FinalCosts:
        """What `limitgate.Decision.settle` is told of it, made when it is first asked for. Safe under threads."""
        settlement: FinalCosts = self.__dict__.setdefault("settlement", FinalCosts())
        if self.is_over:
            settlement.is_over = True
        return settlement

    @property
    def method_class(self) -> str:
        """The method, or ``other`` for one that HTTP does not define, so that inventing methods opens no buckets."""
        return self.method if self.method in _METHODS else "other"

    @property
    def has_too_many_lines(self) -> bool:
        """True for more than `MOST_LINES` header lines. Under WSGI they are joined, and their number costs nothing."""
        return self.scope is not None and len(self.scope.get("headers", ())) > MOST_LINES

    def check_lines(self) -> None:
        """Raise `HeadersTooLargeError` for too many header lines."""
        if self.has_too_many_lines:
            raise too_many_lines()

    @property
    def is_preflight(self) -> bool:
        """True if a browser asks for permission to send the real request (Fetch standard, CORS-preflight request)."""
        if self.method != "OPTIONS":
            return False
        return bool(self.headers.get("origin") and self.headers.get("access-control-request-method"))

    @property
    def is_websocket(self) -> bool:
        """True if this is the handshake of a WebSocket."""
        return self.scope is not None and self.scope.get("type") == "websocket"

    @property
    def passed_a_gate(self) -> bool:
        """True if a gate around this one has decided about this very request."""
        return "limitgate" in (self.scope or self.environ or ())

    @cached_property
    def query(self) -> Query:
        """The query string."""
        raise NotImplementedError

    @property
    def user(self) -> Any:
        """User set by an authentication layer outside of this one, None if there is none.

        Raises `UserWanted` where `find_user` has to be awaited first.
        """
        raise NotImplementedError

    async def find_user(self) -> None:
        """Look up the user where that has to be awaited, so that `user` knows it."""

    def find_user_here(self) -> None:
        """`find_user`, in a thread that may block."""

    def _open_headers(self) -> Headers:
        return TextHeaders(self._read_headers())

    def _read_headers(self) -> dict[str, str]:
        raise NotImplementedError


class ASGIRequest(Request):
    """A request seen through an ASGI ``http`` or ``websocket`` scope."""

    scope: Scope
    awaits = True

    def __init__(self, scope: Scope) -> None:
        method, client = scope.get("method", "GET"), scope.get("client")  # WebSockets have no method
        self.scope = scope
        self.sent_method = method
        self.method = method if method in _METHODS else _method(method)
        self.sent = scope["path"]
        self.root = scope.get("root_path", "")
        self.peer = (client[0] or None) if client else None
        try:
            self.is_outermost = len(scope["headers"]) <= MOST_LINES and scope["type"] == "http" and "limitgate" not in scope
        except (KeyError, TypeError):  # there is no type, or no list: any iterable will do (ASGI, HTTP connection scope)
            scope["headers"] = [*scope.get("headers", ())]
            self.is_outermost = not self.has_too_many_lines and "limitgate" not in scope and scope.get("type") == "http"

    @cached_property
    def query(self) -> Query:
        """The query string."""
        return Query(self.scope.get("query_string", b"").decode("latin-1"))

    @property
    def user(self) -> Any:
        """``scope["user"]``, set by Starlette's AuthenticationMiddleware and its like."""
        return self.scope.get("user")

    def _open_headers(self) -> Headers:
        return ASGIHeaders(self.scope["headers"])


class WSGIRequest(Request):
    """A request seen through a WSGI environ (PEP 3333). Its server has joined repeated header lines already."""

    environ: Environ

    def __init__(self, environ: Environ) -> None:
        method = environ["REQUEST_METHOD"]
        self.environ = environ
        self.sent_method = method
        self.method = method if method in _METHODS else _method(method)
        path = environ.get("PATH_INFO", "")
        self.sent = path if path.isascii() else _text(path)
        self.peer = environ.get("REMOTE_ADDR") or None
        self.is_outermost = "limitgate" not in environ

    @cached_property
    def query(self) -> Query:
        """The query string."""
        return Query(self.environ.get("QUERY_STRING", ""))

    @property
    def user(self) -> Any:
        """``REMOTE_USER``, set by the server or an authentication layer."""
        return self.environ.get("REMOTE_USER") or None

    def _open_headers(self) -> Headers:
        return WSGIHeaders(self.environ)


def _method(method: str) -> str:
    method = method.upper()
    return "GET" if method == "HEAD" else method


def _text(native: str) -> str:
    """Decode a WSGI native string, which holds the UTF-8 bytes of a path as latin-1. Other text is left as it is."""
    try:
        return native.encode("latin-1").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return native


class DescribedRequest(Request):
    """A request known by its parts: the path decoded, ``headers`` by lower-case name, ``peer`` who sent it, its ``user``."""

    is_outermost = True

    def __init__(
        self, method: str, path: str, peer: str | None = None, headers: Mapping[str, str] | None = None, user: object = None
    ) -> None:
        self.sent_method = method
        self.method = "GET" if method == "HEAD" else method
        self.sent = path
        self.peer = peer
        self._described = headers
        self._user = user

    @classmethod
    def of_client(cls, client: str | None, method: str, headers: Mapping[str, str], user: object) -> DescribedRequest:
        """Describe a request of a client, behind whatever proxies, whose path does not matter."""
        request = cls(method, "/", None, headers, user)
        request._client = client
        return request

    @cached_property
    def query(self) -> Query:
        """Nothing: rules in files do not look at the query."""
        return Query("")

    @property
    def user(self) -> Any:
        """The user, None if nobody is known."""
        return self._user

    def _read_headers(self) -> dict[str, str]:
        return dict(self._described or ())
