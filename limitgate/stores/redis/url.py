"""Parses the URL of a Redis store.

redis://user:password@host:6379/DB?options                     one server; rediss:// with TLS
unix://user:password@/path/to/redis.sock?db=DB                 one server, by its socket
redis+cluster://user:password@h1:7000,h2:7000/?options         any nodes of a Redis Cluster
redis+sentinel://user:password@h1:26379,h2:26379/NAME/DB       the master NAME, from the first Sentinel that answers

``rediss+`` uses TLS. ``sentinel_username`` and ``sentinel_password`` are for Sentinels, other logins for servers. Other options
are redis-py's. Messages never repeat parts of a password.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from limitgate.errors import ConfigError
from limitgate.messages.text import expected_of, meant

SINGLE = ("redis", "rediss", "unix")
SEVERAL = ("redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")

_URL = re.compile(r"(?P<login>[^/?@]*@|)(?P<servers>[^/?@]*)(?P<path>[^?]*)\??(?P<options>.*)")
_SERVER = re.compile(r"(?P<host>[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")
_EXPECTED = "expected for example redis+cluster://h1:7000,h2:7000 or redis+sentinel://h1:26379,h2:26379/mymaster"
_SINGLE_EXPECTED = "expected for example redis://localhost:6379/0 or redis://user:password@localhost:6379/0"
_SOCKET_EXPECTED = "expected for example unix:///run/redis.sock?db=0"
_ENCODED = "(in a user or password % is %25, / is %2F, ? is %3F, # is %23, @ is %40)"
_FOR_TLS = re.compile("ss|tls|keys")
_UNEXPANDED = re.compile(r"[${}<>]")

_TIMEOUT = "LimitGate's option timeout limits how long requests wait"
_RETRY = "LimitGate resends a call on a lost connection once, then on_error decides"
_WITHOUT_EFFECT = {
    "decode_responses": "only LimitGate reads Redis' replies",
    "health_check_interval": "LimitGate always detects and replaces dropped idle connections",
    "legacy_responses": "only LimitGate reads Redis' replies",
    "max_connections": "an event loop uses one connection per server, threads use one per concurrent call",
    "retry": _RETRY,
    "retry_on_error": _RETRY,
    "retry_on_timeout": _RETRY,
    "socket_connect_timeout": _TIMEOUT,
    "socket_keepalive_options": "LimitGate sets them itself",
    "socket_read_size": "LimitGate reads from the socket itself",
    "socket_timeout": _TIMEOUT,
    "socket_type": "Redis has connections of one type",
    "timeout": _TIMEOUT,
}
"""Options without effect, and why."""

Address = tuple[str, int]


class StoreUrl(NamedTuple):
    url: str
    nodes: tuple[Address, ...] = ()
    sentinels: tuple[Address, ...] = ()
    master: str = ""
    """Name of the master in Sentinel."""
    login: tuple[str | None, str | None] = None, None
    """Login for Sentinels."""


def parse_address(host: Any, port: Any) -> Address:
    """Parse the address in a server's reply. Raises `TypeError` or `ValueError`."""
    address = host.decode() if isinstance(host, bytes) else host, int(port)
    if not (isinstance(address[0], str) and 0 < address[1] < 65536):
        raise ValueError(f"{address!r:.80} is not a host with a port")
    return address


def scheme_of(url: str) -> str:
    if not isinstance(url, str):
        raise ConfigError(f"store: an object of {type(url).__qualname__}, expected a URL such as redis://localhost:6379/0")
    scheme, mark, _ = url.partition("://")
    if not mark or scheme not in (*SINGLE, *SEVERAL, "memory"):
        known = "memory://, redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://"
        if not url:
            raise ConfigError(f"store: empty, expected {known}")
        if url[0] in "\"'":
            raise ConfigError("store: the URL has quotes around it, expected none, for example redis://localhost:6379/0")
        near = meant(scheme.strip(), [*SINGLE, *SEVERAL, "memory"]) if mark else None
        if near and not _FOR_TLS.search(scheme.lower()):
            near = near.replace("rediss", "redis")
        wrong = f"scheme {scheme[:20]!r} is unknown" if mark else "no scheme"
        raise ConfigError(f"store: {wrong}, {f'did you mean {near}://? ' if near else ''}expected {known}")
    if scheme == "memory" and url != "memory://":
        raise ConfigError("store: expected memory:// without anything after it")
    return scheme


def check_readable(url: str) -> None:
    """Raise a `ConfigError` for an unreadable URL. It doesn't show the URL."""
    try:
        urlsplit(url).port  # noqa: B018 - raises ValueError
    except ValueError:
        pass
    else:
        return
    # Raised here to avoid the ValueError as context.
    raise ConfigError("store: host and port cannot be read, expected a URL that redis-py understands")


def read_url(url: str) -> StoreUrl:
    scheme = scheme_of(url)
    if re.search(r"\s", url):
        raise ConfigError("store: the URL contains a space or a line break, expected none (%20 is a space)")
    if "#" in url:
        raise ConfigError(f"store: the URL contains a #, expected none {_ENCODED}")
    if scheme not in SEVERAL:
        return _read_single(scheme, url)
    scheme, _, kind = scheme.partition("+")
    parts = _URL.fullmatch(url.partition("://")[2])
    if parts is None:
        raise ConfigError(f"store: the login contains an @ (write %40) or is not in front of all servers; {_EXPECTED}")
    options = dict(parse_qsl(parts["options"], keep_blank_values=True))
    if kind == "cluster":
        nodes = _servers(parts["servers"], 6379)
        return StoreUrl(_single(scheme, parts["login"], nodes[0], parts["path"], options), nodes)
    name, _, database = parts["path"].removeprefix("/").partition("/")
    if not name:
        raise ConfigError(f"store: the master's name is missing, {_EXPECTED}")
    sentinels = _servers(parts["servers"], 26379)
    own = options.pop("sentinel_username", None) or None, options.pop("sentinel_password", None) or None
    return StoreUrl(_single(scheme, parts["login"], sentinels[0], f"/{database}", options), (), sentinels, unquote(name), own)


def _read_single(scheme: str, url: str) -> StoreUrl:
    netloc, rest = re.fullmatch(r"([^/?]*)(.*)", url.partition("://")[2]).groups()  # type: ignore[union-attr]
    login, _, server = netloc.rpartition("@")
    path, _, listed = rest.partition("?")
    if "@" in path:
        raise ConfigError(f"store: an @ after the host, {_SINGLE_EXPECTED} {_ENCODED}")
    options = dict(parse_qsl(listed, keep_blank_values=True))
    if login and ":" not in login and "password" not in options:
        raise ConfigError("store: a user without a password, expected a colon before a password: redis://:password@host:6379/0")
    if scheme == "unix":
        if server or len(path) < 2:
            raise ConfigError(f"store: no socket path after three slashes, {_SOCKET_EXPECTED} {_ENCODED}")
    else:
        _check_server(server)
        if not re.fullmatch("/?[0-9]*", path):
            raise ConfigError(f"store: the database after the host is not a number, {_SINGLE_EXPECTED}")
    database = options.get("db", "0")
    if not re.fullmatch("[0-9]+", database):
        raise ConfigError("store: option db is not a number, expected for example db=0")
    if path.strip("/") and scheme != "unix" and "db" in options and int(database) != int(path.strip("/")):
        raise ConfigError("store: the path and option db name different databases, expected only one of them")
    return StoreUrl(url)


def _check_server(server: str) -> None:
    """Check host and port. Errors don't show them, because they may be part of a password."""
    if not server or server.startswith(":"):
        raise ConfigError(f"store: no host, {_SINGLE_EXPECTED}")
    if _UNEXPANDED.search(server):
        raise ConfigError(f"store: the host contains an unexpanded variable, {_SINGLE_EXPECTED}")
    if "," in server:
        raise ConfigError(f"store: several hosts, {_EXPECTED}")
    match = _SERVER.fullmatch(server)
    if match is None:
        raise ConfigError(f"store: host and port cannot be read, {_SINGLE_EXPECTED} {_ENCODED}")
    if not 0 < int(match["port"] or 6379) < 65536:
        raise ConfigError(f"store: the port is out of range, expected 1 to 65535 {_ENCODED}")


def check_effects(url: str) -> None:
    for name, _ in parse_qsl(_listed(url), keep_blank_values=True):
        if name in _WITHOUT_EFFECT:
            raise ConfigError(f"store: option {name!r} has no effect, expected a URL without it: {_WITHOUT_EFFECT[name]}")


def check_options(url: str, known: Collection[str]) -> None:
    listed = _listed(url)
    for name, _ in parse_qsl(listed, keep_blank_values=True):
        if name in known:
            continue
        if name.startswith("ssl_") and not url.startswith("rediss"):
            raise ConfigError(f"store: option {name[:40]} is for TLS, expected rediss:// or no such option")
        if name == "socket_keepalive":
            raise ConfigError("store: option socket_keepalive is for TCP, expected a unix socket URL without it")
        # After an @ it may be part of a password.
        named = "" if "@" in listed else f" {name[:40]!r}"
        near = meant(name, known)
        if near in _WITHOUT_EFFECT:
            cure = f"did you mean {near!r}? It has no effect, expected a URL without it: {_WITHOUT_EFFECT[near]}"
        else:
            cure = expected_of(name, sorted(set(known) - _WITHOUT_EFFECT.keys()))
        raise ConfigError(f"store: unknown option{named}, {cure}")


def _listed(url: str) -> str:
    return url.partition("?")[2]


def shown(store: object) -> str:
    """Describe a store without login and options, except the database."""
    if not isinstance(store, str):
        return type(store).__name__
    scheme, mark, rest = store.partition("://")
    netloc, path, options = re.fullmatch(r"([^/?#]*)([^?#]*)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    # After an @ it may be part of a password.
    database = None if "@" in options else re.search(r"[?&](db=[0-9]{1,9})(?:&|\Z)", options)
    return f"{scheme}{mark}{netloc.rpartition('@')[2]}{path}{f'?{database[1]}' if database else ''}"


def _single(scheme: str, login: str, server: Address, path: str, options: Mapping[str, str]) -> str:
    if not re.fullmatch("/?[0-9]*", path):
        raise ConfigError("store: the database before the options is not a number, expected one")
    return f"{scheme}://{login}{format_address(server)}{path}{'?' * bool(options)}{urlencode(options)}"


def _servers(listed: str, port: int) -> tuple[Address, ...]:
    servers = []
    for place, entry in enumerate(listed.split(","), 1):
        match = _SERVER.fullmatch(entry)
        if match is None or not 0 < int(match["port"] or port) < 65536:
            # It may be part of a password.
            raise ConfigError(f"store: server {place} is not a host with a port, {_EXPECTED}")
        servers.append((match["host"].strip("[]"), int(match["port"] or port)))
    return tuple(servers)


def format_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server_name(address: Address | None) -> str:
    return "Redis" if address is None else f"the Redis node {format_address(address)}"


def sentinel_name(address: Address) -> str:
    return f"the Sentinel at {format_address(address)}"
