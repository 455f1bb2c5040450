"""The headers in which each proxy describes a request. Pure.

Proxies pass on each other's headers, so a client could forge them. The path of the subrequest declares the dialect, because
only the proxy's configuration chooses it. Headers of other dialects are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from limitgate.http.request import Scope
from limitgate.messages.diagnostics import Diagnosis
from limitgate.messages.text import listed

FORWARDED_FOR = "x-forwarded-for"
ANY_METHOD = ""
"""Unknown method."""

_FAMILIES = (b"x-forwarded-", b"x-original-", b"x-limitgate-")
_DROPPED = frozenset({b"forwarded", b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"host"})
"""Headers that don't belong to the described request."""
_KEPT = FORWARDED_FOR.encode()
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110 section 5.6.2."""
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")

Header = tuple[bytes, bytes]


class Dialect(NamedTuple):
    """The headers of a proxy. Several headers for the same part must agree."""

    name: str
    """First segment of a subrequest's path."""
    methods: Sequence[bytes]
    """Headers with the method; if empty, that of the subrequest."""
    uris: Sequence[bytes]
    """Headers with the URI; if empty, the rest of the subrequest's path."""
    host: bytes = b"host"

    @property
    def place(self) -> str:
        return f"/{self.name}" if self.name else "an undeclared path"


NGINX = Dialect("nginx", (b"x-original-method",), (b"x-original-uri",))
ENVOY = Dialect("envoy", (), ())
UNDECLARED = Dialect("", (b"x-forwarded-method", b"x-original-method"), (b"x-forwarded-uri", b"x-original-uri"))
_DECLARED = (
    NGINX,
    Dialect("caddy", (b"x-forwarded-method",), (b"x-forwarded-uri",), b"x-forwarded-host"),
    Dialect("traefik", (b"x-forwarded-method",), (b"x-forwarded-uri",), b"x-forwarded-host"),
    ENVOY,
    Dialect("haproxy", (b"x-original-method",), (b"x-original-uri",)),
)
DIALECTS = {dialect.name.encode(): dialect for dialect in _DECLARED}
PLACES = listed([dialect.place for dialect in _DECLARED])


class UndescribedError(Exception):
    """The subrequest doesn't describe a request. ``detail`` has no client data.

    If the client caused the error, ``diagnosis`` is None.
    """

    def __init__(self, diagnosis: Diagnosis | None, *values: str, detail: str) -> None:
        super().__init__(detail)
        self.diagnosis = diagnosis
        self.values = values
        self.detail = detail


def declared(scope: Scope) -> tuple[Dialect, bytes]:
    """Return a subrequest's dialect, and its target after the first segment."""
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
    root = scope.get("root_path", "").encode()
    path = raw[len(root) :] if root and raw.startswith(root) else raw
    name, slash, rest = path[1:].partition(b"/")
    # OPTIONS * (RFC 9112 section 3.2.4), which Envoy appends to its prefix.
    if name == b"envoy*":
        return ENVOY, b"*"
    dialect = DIALECTS.get(name, UNDECLARED)
    query = scope.get("query_string")
    return dialect, slash + rest + (b"?" + query if query else b"")


def described(scope: Scope, dialect: Dialect, rest: bytes) -> Scope:
    """Return the scope of the described request. ``rest`` is the target after the dialect.

    The method is `ANY_METHOD` if unknown. HEAD in a header becomes GET, because the subrequest's method decides whether the
    response has a body. Raises `UndescribedError`.
    """
    lines = scope["headers"]
    target = _only(lines, dialect, dialect.uris) if dialect.uris else rest
    if not target:
        uris = listed([name.decode() for name in dialect.uris], " or ") or f"a path below {dialect.place}"
        expected = uris if dialect.name else f"one of the paths {PLACES}, or {uris}"
        raise UndescribedError(
            Diagnosis.NO_URI, dialect.place, expected, detail=f"The proxy names no URI at {dialect.place}; expected {expected}."
        )
    if dialect.methods:
        named = _only(lines, dialect, dialect.methods)
        method = b"GET" if named == b"HEAD" else named or ANY_METHOD.encode()
    else:
        method = scope["method"].encode("latin-1", "replace")
    if method and not _TOKEN.fullmatch(method):
        raise UndescribedError(None, detail="The method is not a token, expected one such as GET.")
    path, query, host = split(target)
    if host is None:
        host = next((value for name, value in lines if name == dialect.host), None)
    headers = [*_kept(lines)]
    if host is not None:
        headers.append((b"host", host))
    return {
        **{name: scope[name] for name in ("asgi", "client", "server", "scheme", "extensions", "state") if name in scope},
        "type": "http",
        "http_version": scope.get("http_version", "1.1"),
        "method": method.decode("latin-1"),
        "path": path,
        "raw_path": target.partition(b"?")[0],
        "query_string": query,
        "root_path": "",
        "headers": headers,
    }


def as_itself(scope: Scope) -> Scope:
    """Return an untrusted peer's subrequest, without headers that describe a request."""
    own = [line for line in scope["headers"] if line[0] == b"host"]
    headers = [*[line for line in _kept(scope["headers"]) if line[0] != _KEPT], *own[:1]]
    return {**scope, "headers": headers}


def _kept(lines: Sequence[Header]) -> Iterator[Header]:
    for line in lines:
        name = line[0]
        if name == _KEPT or not (name in _DROPPED or name.startswith(_FAMILIES)):
            yield line


def _only(lines: Sequence[Header], dialect: Dialect, names: Sequence[bytes]) -> bytes | None:
    found = [line for line in lines if line[0] in names]
    if not found:
        return None
    if any(value != found[0][1] for _, value in found):
        families = listed(sorted({name.decode() for name, _ in found}), " and ")
        told = f"{families} disagree" if len({name for name, _ in found}) > 1 else f"{families} occurs twice"
        raise UndescribedError(
            Diagnosis.DISAGREEING,
            dialect.place,
            told,
            PLACES,
            detail=f"{told}; expected one value, or one of the paths {PLACES}.",
        )
    return found[0][1]


def split(target: bytes) -> tuple[str, bytes, bytes | None]:
    """Return decoded path, query and host of a request target (RFC 9112 section 3.2)."""
    host = None
    if not target.startswith(b"/") and (absolute := _ABSOLUTE.match(target)):
        host, target = absolute[1].rpartition(b"@")[2], target[absolute.end() :]
    target = target.partition(b"#")[0]
    raw, _, query = target.partition(b"?")
    decoded = unquote_to_bytes(raw) if b"%" in raw else raw
    return decoded.decode("utf-8", "replace") or "/", query, host
