"""A request, independent of ASGI and WSGI."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import compress
from operator import itemgetter
from typing import Any, NoReturn, Self, overload
from urllib.parse import unquote

from limitgate.errors import BodyError, ConfigError, HeadersTooLargeError
from limitgate.http.body import UNREAD, declared_length, parsed, read_input, text_at, too_large
from limitgate.http.paths import first_interpretation
from limitgate.limits.decision import FinalCosts
from limitgate.messages.text import lacking

Scope = MutableMapping[str, Any]
Environ = MutableMapping[str, Any]

_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"})


MOST_LINES = 1000
"""Maximum of header lines. Servers and proxies allow 100, or 32 KB."""
LONGEST_VALUE = 16_384
"""Maximum of characters in a key."""
LONGEST_NAME = 256
"""Maximum of characters in rules."""
LONGEST_QUERY = 65_536
"""Characters of a query beyond `MOST_FIELDS`."""
MOST_FIELDS, MOST_ESCAPES = 2048, 1000
"""Query fields, and escapes in a malformed value."""
_NEEDS_ESCAPES = re.compile(r"[^A-Za-z0-9_.~-]|\A\Z")
_UNPREFIXED = ("CONTENT_TYPE", "CONTENT_LENGTH")


class HeaderNames:
    """Header names to find, in ASGI and WSGI form."""

    __slots__ = ("raw", "text", "variables")

    def __init__(self, names: Iterable[str]) -> None:
        self.text: frozenset[str] = frozenset(map(str.lower, names))
        self.raw: frozenset[bytes] = frozenset(map(_raw, self.text))
        plain = [name.upper().replace("-", "_") for name in self.text if "_" not in name]
        self.variables: frozenset[str] = frozenset([f"HTTP_{name}" for name in plain]) | set(_UNPREFIXED).intersection(plain)


class Headers(Mapping[str, str]):
    """Request headers by case-insensitive name; repeated ones are joined by ``", "`` (RFC 9110 section 5.3).

    A lookup reads one header; iteration reads all.
    """

    __slots__ = ("_every",)
    _every: dict[str, str] | None

    def __getitem__(self, name: str) -> str:
        name = name.lower()
        if self._every is not None:
            return self._every[name]
        lines = self._raw_lines_of(name)
        if not lines:
            raise KeyError(name)
        return self._joined(lines)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._raw_lines_of(name.lower()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def have_any(self, names: HeaderNames) -> bool:
        return not names.text.isdisjoint(self._read())

    def identity(self, name: str) -> str:
        """Return a header without white space, empty if absent. Raises `HeadersTooLargeError` beyond `LONGEST_VALUE`."""
        lines = self._raw_lines_of(name)
        if not lines:
            return ""
        if sum(map(len, lines)) > LONGEST_VALUE:
            raise value_too_long()
        return self._joined(lines).strip()

    def start(self, name: str, most: int) -> str:
        """Return the first ``most`` characters of the first line."""
        lines = self._raw_lines_of(name)
        return self._decoded(lines[0][:most]) if lines else ""

    def end(self, name: str, most: int) -> str:
        lines = self._raw_lines_of(name)
        return self._decoded(lines[-1][-most:]) if lines else ""

    def _raw_lines_of(self, name: str) -> Sequence[Any]:
        raise NotImplementedError

    def _joined(self, lines: Sequence[Any]) -> str:
        raise NotImplementedError

    def _decoded(self, line: Any) -> str:
        raise NotImplementedError

    def _read(self) -> dict[str, str]:
        if self._every is None:
            self._every = self._all()
        return self._every

    def _all(self) -> dict[str, str]:
        raise NotImplementedError


_NAME, _VALUE = itemgetter(0), itemgetter(1)


class ASGIHeaders(Headers):
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
        if self._names is None:
            self._names = self._read_names()
        return not names.raw.isdisjoint(self._names)

    def end(self, name: str, most: int) -> str:
        names, sought = self._names, name.encode("latin-1", "replace")
        if names is None:
            self._names = names = self._read_names()
        if names.count(sought) == 1:
            return self._lines[names.index(sought)][1][-most:].decode("latin-1")
        ends: list[bytes] = []
        left = most
        for line in reversed(self._raw_lines_of(name)):
            ends.append(line[-most:])
            left -= len(line) + 2
            if left <= -2:
                break
        return b", ".join(reversed(ends))[-most:].decode("latin-1")

    def _joined(self, lines: Sequence[bytes]) -> str:
        return b", ".join(lines).decode("latin-1")

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
        """Return the names in lower case, which some servers don't send."""
        if len(self._lines) > MOST_LINES:
            raise too_many_lines()
        names = [*map(_NAME, self._lines)]
        joined = b"".join(names)
        if len(joined) > LONGEST_VALUE:  # lower() would take too long
            names = [name if len(name) <= LONGEST_NAME else b"" for name in names]
            joined = b"".join(names)
        return names if joined == joined.lower() else [name.lower() for name in names]


def too_many_lines() -> HeadersTooLargeError:
    return HeadersTooLargeError(f"The request has more than {MOST_LINES:,} header fields.")


def value_too_long() -> HeadersTooLargeError:
    return HeadersTooLargeError(f"A header field that a limit counts by has more than {LONGEST_VALUE:,} characters.")


class TextHeaders(Headers):
    """Headers that a server or framework has already joined."""

    __slots__ = ()

    def __init__(self, every: dict[str, str]) -> None:
        self._every = every

    def _raw_lines_of(self, name: str) -> Sequence[str]:
        value = self._read().get(name)
        return () if value is None else (value,)

    def _joined(self, lines: Sequence[str]) -> str:
        return ", ".join(lines)

    def _decoded(self, line: str) -> str:
        return line


class WSGIHeaders(TextHeaders):
    __slots__ = ("_environ",)

    def __init__(self, environ: Environ) -> None:
        self._every = None
        self._environ = environ

    def have_any(self, names: HeaderNames) -> bool:
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
    """The query string, parsed on first use."""

    __slots__ = ("_end", "_known", "_text")
    _known: dict[str, str | None]
    _text: str
    _end: int

    def __new__(cls, text: str) -> Self:
        """Create a query from its text."""
        query = super().__new__(cls, text)
        query._known = {}
        query._end = -1
        return query

    @overload
    def get(self, name: str, default: str) -> str: ...

    @overload
    def get(self, name: str, default: None = None) -> str | None: ...

    def get(self, name: str, default: str | None = None) -> str | None:
        """Return the first value of ``name``, decoded, or ``default``.

        Raises `ValueError` if the name may be escaped beyond `MOST_FIELDS`, or if a value has a malformed escape among more
        than `MOST_ESCAPES`.
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
    if text.count("&") <= MOST_FIELDS:
        return len(text)
    return len(text) - len(text.split("&", MOST_FIELDS + 1)[-1]) - 1


def _find_as_written(name: str, text: str, start: int) -> int:
    """Return the end of an unescaped name, or -1. Raises `ValueError` if escapes may hide it."""
    if _NEEDS_ESCAPES.search(name) or len(text) > LONGEST_QUERY or text.find("%", start) >= 0:
        raise ValueError(f"the query has more than {MOST_FIELDS} fields, any of which may have the name, expected fewer")
    found = [at for end in "=&" if (at := f"{text}&".find(f"&{name}{end}", start)) >= 0]
    return min(found) + 1 + len(name) if found else -1


@lru_cache(maxsize=256)
def _field_named(name: str) -> re.Pattern[str]:
    spelled = "".join(f"(?:{_raw_in_query(character)}{_escaped(character)})" for character in name)
    return re.compile(f"&{spelled}(?=[=&]|\\Z)" if name else "&(?==)")


def _raw_in_query(character: str) -> str:
    return "" if character in "&=+" else "[+ ]|" if character == " " else f"{re.escape(character)}|"


def _escaped(character: str) -> str:
    return "".join(f"%(?i:{byte:02x})" for byte in character.encode("utf-8", "surrogatepass"))


def _unescaped(text: str) -> str:
    """Decode like `urllib.parse.parse_qs`. Raises `ValueError` if one of many escapes is malformed."""
    text = text.replace("+", " ")
    if "%" in text and text.isascii():
        with suppress(UnicodeDecodeError):  # fails for malformed escapes
            decoded = text.encode().replace(b"\\", b"\\x5c").replace(b"%", b"\\x").decode("unicode_escape")
            return decoded.encode("latin-1").decode("utf-8", "replace")
    if text.count("%") > MOST_ESCAPES:
        raise ValueError(f"a value in the query has more than {MOST_ESCAPES} escapes, some malformed, expected fewer")
    return unquote(text)


def _raw(name: str) -> bytes:
    return name.encode("latin-1", "replace")


class Wanted(BaseException):
    """Raised if part of the request must be read first. Not an `Exception`, so that application code doesn't catch it."""


class UserWanted(Wanted): ...


class BodyWanted(Wanted):
    """Raised if the body must be read first, for ``compiled_rules`` if known."""

    def __init__(self, compiled_rules: Sequence[Any] = ()) -> None:
        super().__init__()
        self.compiled_rules = compiled_rules


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
        "params": _QUERY,
        "path_params": _FRAMEWORKS,
        "query_params": f"{_QUERY}; {_FRAMEWORKS}",
        "query_string": _QUERY,
        "remote_addr": f"client, the address behind trusted proxies; {_FRAMEWORKS}",
        "route": _FRAMEWORKS,
        "session": _FRAMEWORKS,
        "state": _FRAMEWORKS,
        "tier": "caller.tier, if request.caller is not None",
        "url": _FRAMEWORKS,
        "user_id": "user, or caller.id, if request.caller is not None",
    },
)
class Request:
    """A request in rules, keys, ``identify`` and ``cost``.

    ``method`` is in upper case, GET for HEAD and WebSocket handshakes. ``path`` is below the mount point, normalized.
    ``client`` is the address behind trusted proxies, or None.
    """

    sent_method: str
    """The method as sent, because routers may distinguish HEAD."""
    sent: str
    """Decoded path as sent."""
    root: str = ""
    """Mount point, which ``sent`` may include."""
    peer: str | None
    """Address of the connection's peer."""
    scope: Scope | None = None
    """None under WSGI."""
    environ: Environ | None = None
    """None under ASGI."""
    is_outermost: bool = False
    """True for HTTP without an outer gate and with at most `MOST_LINES` header lines."""
    leaves_out_shadows: bool = False
    """True if shadow rules don't apply, because headers are unreadable."""
    awaits: bool = False
    """True on an event loop."""
    caller: Any = None
    """Set when ``identify`` has returned."""
    given_limits: dict[int, Any] | None = None
    """Limits from run time, by rule id."""
    given_values: dict[str, Sequence[Any]] | None = None
    """Values of dependencies in keys, by rule."""
    met: dict[int, bool] | None = None
    """Results of ``when`` by rule id."""
    document: Any = UNREAD
    """Parsed JSON; None without a body, `UNREAD` before it is read."""
    raw_body: bytes = b""
    """Body for `limitgate.llm.costs`."""
    estimate: Any = None
    """Estimated tokens; None until needed."""
    source: Callable[[int], Awaitable[bytes]] | None = None
    """Reads up to this many bytes. The application can read them again."""
    cost: int | None = None
    """Replaces every rule's cost in a described request."""
    is_over = False
    _shows_json = False
    resolve_client: Callable[[Request], str | None] | None = None
    """Computes ``client`` on first use."""
    _headers: Headers | None = None
    _client: str | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> NoReturn:
        """Raise `ConfigError`, because FastAPI endpoints need FastAPI's request."""
        raise ConfigError("limitgate.Request is the request of rules and identify, expected fastapi.Request in an endpoint")

    @cached_property
    def method(self) -> str:
        """Upper case; GET for HEAD and WebSockets."""
        method = self.sent_method
        if method not in _METHODS:  # no copy of the common ones, because caches keep them
            method = method.upper()
        return "GET" if method == "HEAD" else method

    @cached_property
    def path(self) -> str:
        """The normalized path below the mount point."""
        return first_interpretation(self.sent, self.root)

    @property
    def headers(self) -> Headers:
        return self.opened_headers()

    @property
    def client(self) -> str | None:
        """The client's address, without port or zone."""
        return self.resolved_client()

    def opened_headers(self) -> Headers:
        """`headers`, three times as fast."""
        headers = self._headers
        if headers is None:
            self._headers = headers = self._open_headers()
        return headers

    def resolved_client(self) -> str | None:
        """`client`, three times as fast."""
        resolve = self.resolve_client
        if resolve is not None:
            self._client = resolve(self)
            self.resolve_client = None
        return self._client

    @property
    def json(self) -> Any:
        """The parsed JSON body, None without one. Raises `ConfigError` without the option ``body``."""
        if not self._shows_json:
            raise ConfigError("request.json needs a rule that reads the body, expected body=True on the rule")
        return self.document

    def with_json(self) -> Self:
        """Return this request with `json`, for callables of a rule with ``body``. Raises `BodyWanted`."""
        if self.document is UNREAD:
            raise BodyWanted
        shown = object.__new__(type(self))
        shown.__dict__.update(self.__dict__, _shows_json=True)
        return shown

    def json_text(self, tokens: tuple[str, ...]) -> str | None:
        """Return the text at a JSON pointer. Raises `BodyWanted`."""
        if self.document is UNREAD:
            raise BodyWanted
        return text_at(self.document, tokens)

    async def read_body(self, most: int) -> None:
        """Read at most ``most`` bytes for `json`. Raises `BodyError`; `json` is then None."""
        try:
            self.raw_body = await self._read_body(most) if self._has_body(most) else b""
            self.document = parsed(self.raw_body)
        except BodyError:
            self.document = None
            raise

    def read_body_here(self, most: int) -> None:
        """`read_body` in a thread."""
        try:
            self.raw_body = self._read_body_here(most) if self._has_body(most) else b""
            self.document = parsed(self.raw_body)
        except BodyError:
            self.document = None
            raise

    def _has_body(self, most: int) -> bool:
        if self.is_websocket:
            return False
        if (declared_length(self.opened_headers().get("content-length")) or 0) > most:
            raise too_large(most)
        return True

    async def _read_body(self, most: int) -> bytes:
        if self.source is None:
            raise RuntimeError("the body was needed where nothing can read it, expected a rule that applies in the gate")
        return await self.source(most)

    def _read_body_here(self, most: int) -> bytes:
        raise NotImplementedError

    @property
    def reads_here(self) -> bool:
        return self.environ is not None

    def open_settlement(self) -> FinalCosts:
        """Return the final costs for `limitgate.Decision.settle`, created on first use. Thread-safe."""
        settlement: FinalCosts = self.__dict__.setdefault("settlement", FinalCosts())
        if self.is_over:
            settlement.is_over = True
        return settlement

    @property
    def method_class(self) -> str:
        """The method, or ``other`` if unknown. All invented methods share a bucket."""
        return self.method if self.method in _METHODS else "other"

    @property
    def has_too_many_lines(self) -> bool:
        """True if there are more than `MOST_LINES` header lines. Always False under WSGI, where servers join lines."""
        return self.scope is not None and len(self.scope.get("headers", ())) > MOST_LINES

    def check_lines(self) -> None:
        """Raise `HeadersTooLargeError` for too many header lines."""
        if self.has_too_many_lines:
            raise too_many_lines()

    @property
    def is_preflight(self) -> bool:
        """True for a CORS-preflight request (Fetch standard)."""
        if self.method != "OPTIONS":
            return False
        return bool(self.headers.get("origin") and self.headers.get("access-control-request-method"))

    @property
    def is_websocket(self) -> bool:
        return self.scope is not None and self.scope.get("type") == "websocket"

    @property
    def passed_a_gate(self) -> bool:
        """True if an outer gate has decided this request."""
        return "limitgate" in (self.scope or self.environ or ())

    @cached_property
    def query(self) -> Query:
        raise NotImplementedError

    @property
    def user(self) -> Any:
        """The authenticated user. Raises `UserWanted` before `find_user`."""
        raise NotImplementedError

    async def find_user(self) -> None:
        """Load `user` if that needs ``await``."""

    def find_user_here(self) -> None:
        """`find_user` in a thread."""

    def _open_headers(self) -> Headers:
        return TextHeaders(self._read_headers())

    def _read_headers(self) -> dict[str, str]:
        raise NotImplementedError


class ASGIRequest(Request):
    scope: Scope
    awaits = True

    def __init__(self, scope: Scope) -> None:
        try:
            method, client, root = scope["method"], scope["client"], scope["root_path"]
        except KeyError:  # WebSockets have no method, the others are optional
            method, client, root = scope.get("method", "GET"), scope.get("client"), scope.get("root_path", "")
        self.scope = scope
        self.sent_method = method
        # Faster than a default.
        self.cost: int | None = None
        self.sent: str = scope["path"]
        self.root = root
        self.peer: str | None = (client[0] or None) if client else None
        try:
            self.is_outermost: bool = (
                len(scope["headers"]) <= MOST_LINES and scope["type"] == "http" and "limitgate" not in scope
            )
        except (KeyError, TypeError):  # ASGI allows a scope without type, and any iterable of headers
            scope["headers"] = [*scope.get("headers", ())]
            self.is_outermost = not self.has_too_many_lines and "limitgate" not in scope and scope.get("type") == "http"

    @cached_property
    def query(self) -> Query:
        return Query(self.scope.get("query_string", b"").decode("latin-1"))

    @property
    def user(self) -> Any:
        """``scope["user"]``, for example from Starlette's AuthenticationMiddleware."""
        return self.scope.get("user")

    def _open_headers(self) -> Headers:
        return ASGIHeaders(self.scope["headers"])


class WSGIRequest(Request):
    environ: Environ

    def __init__(self, environ: Environ) -> None:
        self.environ = environ
        self.sent_method: str = environ["REQUEST_METHOD"]
        self.cost: int | None = None
        path = environ.get("PATH_INFO", "")
        self.sent: str = path if path.isascii() else _text(path)
        self.peer: str | None = environ.get("REMOTE_ADDR") or None
        self.is_outermost: bool = "limitgate" not in environ

    @cached_property
    def query(self) -> Query:
        return Query(self.environ.get("QUERY_STRING", ""))

    @property
    def user(self) -> Any:
        """``REMOTE_USER``."""
        return self.environ.get("REMOTE_USER") or None

    def _open_headers(self) -> Headers:
        return WSGIHeaders(self.environ)

    def _read_body_here(self, most: int) -> bytes:
        return read_input(self.environ, most)


def _text(native: str) -> str:
    try:
        return native.encode("latin-1").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return native


class DescribedRequest(Request):
    """A request from decoded ``path``, ``headers`` by lower-case name, ``peer`` and ``user``."""

    is_outermost = True
    document: Any = None

    def __init__(
        self, method: str, path: str, peer: str | None = None, headers: Mapping[str, str] | None = None, user: object = None
    ) -> None:
        self.sent_method = method
        self.method: str = "GET" if method == "HEAD" else method
        self.sent = path
        self.peer = peer
        self._described = headers
        self._user = user

    @classmethod
    def of_client(cls, client: str | None, method: str, headers: Mapping[str, str], user: object) -> DescribedRequest:
        request = cls(method, "/", None, headers, user)
        request._client = client
        return request

    @cached_property
    def query(self) -> Query:
        return Query("")

    @property
    def user(self) -> Any:
        return self._user

    def _read_headers(self) -> dict[str, str]:
        return dict(self._described or ())


REQUEST_START = "x-request-start"
OLDEST_START_S = 60.0
"""Longest plausible wait in seconds, because servers time out earlier."""
_LONGEST_TIME = 64
"""Maximum of characters to read, from the right."""
_REQUEST_START = re.compile(r"\s*(?:t\s*=\s*)?([0-9]{9,19}(?:\.[0-9]{1,9})?)\s*", re.ASCII)
_PER_SECOND = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))


def waited_s(request: Request, now: float) -> float | None:
    """Return the seconds from a proxy's timestamp to ``now`` (Unix s); None if implausible.

    Reads ``t=1700000000.123`` (nginx: ``t=${msec}``) in s, ms (Heroku), µs (Apache: ``t=%t``) or ns. The last value counts.
    """
    match = _REQUEST_START.fullmatch(request.headers.end(REQUEST_START, _LONGEST_TIME).rpartition(",")[2])
    if match is None:
        return None
    number = float(match[1])
    waited = now - number / next((each for least, each in _PER_SECOND if number >= least), 1)
    return waited if 0 <= waited <= OLDEST_START_S else None
