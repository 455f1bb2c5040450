"""The URL of a Redis store: its servers, database and logins.

    redis://user:password@host:6379/DB?options                     one server; rediss:// with TLS
    unix://user:password@/path/to/redis.sock?db=DB                 one server, by its socket
    redis+cluster://user:password@h1:7000,h2:7000/?options         any nodes of a Redis Cluster; it names the others
    redis+sentinel://user:password@h1:26379,h2:26379/NAME/DB       the master NAME, as the first Sentinel that answers has it

With ``rediss+`` all of them are spoken to with TLS. The user and password are those of the servers that hold the buckets;
Sentinels get the options ``sentinel_username`` and ``sentinel_password``. The other options are those of redis-py that have an
effect here. A URL is checked before redis-py reads it, which takes what it does not understand for something else: ``/zero``
for database 0. No message repeats what may be a part of a password. Pure: no connection.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from limitgate.errors import ConfigError
from limitgate.messages.suggestions import expected_of, meant

SINGLE = ("redis", "rediss", "unix")
SEVERAL = ("redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")

_URL = re.compile(r"(?P<login>[^/?#@]*@|)(?P<servers>[^/?#@]*)(?P<path>[^?#]*)\??(?P<options>[^#]*)(?:#.*)?")
_SERVER = re.compile(r"(?P<host>[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")
_EXPECTED = "expected for example redis+cluster://h1:7000,h2:7000 or redis+sentinel://h1:26379,h2:26379/mymaster"
_SINGLE_EXPECTED = "expected for example redis://localhost:6379/0 or redis://user:password@localhost:6379/0"
_SOCKET_EXPECTED = "expected for example unix:///run/redis.sock?db=0"
_ENCODED = "(in a user or password % is %25, / is %2F, ? is %3F, # is %23, @ is %40)"
_UNEXPANDED = re.compile(r"[${}<>]")
"""Characters of a variable in a template that nobody has filled in; no host has them."""

_TIMEOUT = "how long requests wait is LimitGate's own option timeout"
_RETRY = "a call on a lost connection is sent once more, and then on_error decides"
_WITHOUT_EFFECT = {
    "decode_responses": "LimitGate alone reads what Redis answers",
    "health_check_interval": "a connection that was dropped while it lay idle is noticed and replaced in any case",
    "legacy_responses": "LimitGate alone reads what Redis answers",
    "max_connections": "an event loop has one connection to a server, and threads have as many as ask at the same time",
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
"""Options that redis-py has and that would do nothing, each with what there is instead."""

Address = tuple[str, int]
"""A server's host and port."""


class StoreUrl(NamedTuple):
    """A store URL that was read."""

    url: str
    """URL of a single server with the options of all connections, for redis-py."""
    nodes: tuple[Address, ...] = ()
    """Nodes of a cluster."""
    sentinels: tuple[Address, ...] = ()
    master: str = ""
    """The name that Sentinels know the master by."""
    login: tuple[str | None, str | None] = None, None
    """User and password for Sentinels."""


def parse_address(host: Any, port: Any) -> Address:
    """An address in a server's reply, text or bytes. Raises `TypeError` or `ValueError` if it is none."""
    address = host.decode() if isinstance(host, bytes) else host, int(port)
    if not (isinstance(address[0], str) and 0 < address[1] < 65536):
        raise ValueError(f"{address!r:.80} is no host with a port")
    return address


def scheme_of(url: str) -> str:
    """The scheme of a store URL. Raises `ConfigError` for one that is unknown."""
    if not isinstance(url, str):
        raise ConfigError(f"store: an object of {type(url).__qualname__}, expected a URL such as redis://localhost:6379/0")
    scheme, mark, _ = url.partition("://")
    if not mark or scheme not in (*SINGLE, *SEVERAL, "memory"):
        known = "memory://, redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://"
        if not url:
            raise ConfigError(f"store: empty, expected {known}")
        if url[0] in "\"'":
            raise ConfigError("store: the URL is in quotes, expected it without them, such as redis://localhost:6379/0")
        near = meant(scheme.strip(), [*SINGLE, *SEVERAL, "memory"]) if mark else None
        wrong = f"scheme {scheme[:20]!r} is unknown" if mark else "no scheme, which a URL such as redis://localhost:6379/0 has"
        raise ConfigError(f"store: {wrong}, {f'did you mean {near}://? ' if near else ''}expected {known}")
    if scheme == "memory" and url != "memory://":
        raise ConfigError("store: expected memory:// with nothing behind it")
    return scheme


def check_readable(url: str) -> None:
    """Raise a `ConfigError` that repeats nothing of the URL, where what should be a port may be half a password."""
    try:
        urlsplit(url).port  # noqa: B018 - read to see whether it can be
    except ValueError:
        pass
    else:
        return
    raise ConfigError("store: host and port cannot be read, expected a URL that redis-py understands")  # without that context


def read_url(url: str) -> StoreUrl:
    """Read a store URL. Raises `ConfigError`."""
    scheme = scheme_of(url)
    if re.search(r"\s", url):
        raise ConfigError("store: the URL has a blank or a line break in it, expected none, %20 where one is meant")
    if scheme not in SEVERAL:
        return _read_single(scheme, url)
    scheme, _, kind = scheme.partition("+")
    parts = _URL.fullmatch(url.partition("://")[2])
    if parts is None:
        raise ConfigError(f"store: user and password stand once, before all servers, and an @ in them is %40; {_EXPECTED}")
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
    """Check the URL of a single server. Raises `ConfigError`."""
    netloc, rest = re.fullmatch(r"([^/?#]*)(.*)", url.partition("://")[2]).groups()  # type: ignore[union-attr]
    login, _, server = netloc.rpartition("@")
    path, _, listed = rest.partition("#")[0].partition("?")
    if "@" in rest.partition("?")[0] or "@" in rest.partition("#")[2]:
        raise ConfigError(f"store: an @ behind the host, {_SINGLE_EXPECTED} {_ENCODED}")
    options = dict(parse_qsl(listed, keep_blank_values=True))
    if login and ":" not in login and "password" not in options:
        raise ConfigError("store: a user without a password, expected a colon before a password: redis://:password@host:6379/0")
    if scheme == "unix":
        if server or len(path) < 2:
            raise ConfigError(f"store: no path of a socket with three slashes before it, {_SOCKET_EXPECTED} {_ENCODED}")
    else:
        _check_server(server)
        if not re.fullmatch("/?[0-9]*", path):
            raise ConfigError(f"store: what stands behind the host is no database, a number is: {_SINGLE_EXPECTED}")
    database = options.get("db", "0")
    if not re.fullmatch("[0-9]+", database):
        raise ConfigError("store: option db is no database, expected a number, for example db=0")
    if path.strip("/") and scheme != "unix" and "db" in options and int(database) != int(path.strip("/")):
        raise ConfigError("store: the path and option db name different databases, expected one of them")
    return StoreUrl(url)


def _check_server(server: str) -> None:
    """Check the one host of a URL, and its port. Raises `ConfigError` that repeats neither: it may be half a password."""
    if not server or server.startswith(":"):
        raise ConfigError(f"store: no host, {_SINGLE_EXPECTED}")
    if _UNEXPANDED.search(server):
        raise ConfigError(f"store: the host holds a variable that was not filled in, {_SINGLE_EXPECTED}")
    if "," in server:
        raise ConfigError(f"store: several hosts, {_EXPECTED}")
    match = _SERVER.fullmatch(server)
    if match is None:
        raise ConfigError(f"store: host and port cannot be read, {_SINGLE_EXPECTED} {_ENCODED}")
    if not 0 < int(match["port"] or 6379) < 65536:
        raise ConfigError(f"store: there is no such port, expected one of 1 to 65535 {_ENCODED}")


def check_effects(url: str) -> None:
    """Raise a `ConfigError` for an option of a URL of a single server that redis-py takes, but that would do nothing."""
    for name, _ in parse_qsl(_listed(url), keep_blank_values=True):
        if name in _WITHOUT_EFFECT:
            raise ConfigError(f"store: option {name!r} would do nothing, expected a URL without it: {_WITHOUT_EFFECT[name]}")


def check_options(url: str, known: Collection[str]) -> None:
    """Check the names of the options of a URL of a single server. Raises `ConfigError` for one that is not ``known``."""
    listed = _listed(url)
    for name, _ in parse_qsl(listed, keep_blank_values=True):
        if name in known:
            continue
        if name.startswith("ssl_") and not url.startswith("rediss"):
            raise ConfigError(f"store: option {name[:40]} is of TLS, expected rediss:// as the beginning, or no such option")
        if name == "socket_keepalive":
            raise ConfigError("store: option socket_keepalive is of TCP, expected a URL without it for a unix socket")
        named = "" if "@" in listed else f" {name[:40]!r}"  # else it may be the rest of a password
        near = meant(name, known)
        if near in _WITHOUT_EFFECT:
            cure = f"did you mean {near!r}? It would do nothing, expected a URL without it: {_WITHOUT_EFFECT[near]}"
        else:
            cure = expected_of(name, sorted(set(known) - _WITHOUT_EFFECT.keys()))
        raise ConfigError(f"store: unknown option{named}, {cure}")


def _listed(url: str) -> str:
    """The options of a URL of a single server, as they are spelled."""
    return url.partition("#")[0].partition("?")[2]


def shown(store: object) -> str:
    """A store as log lines show it: a URL without user, password and options, of any other store its class."""
    if not isinstance(store, str):
        return type(store).__name__
    scheme, mark, rest = store.partition("://")
    netloc, path = re.fullmatch(r"([^/?#]*)([^?#]*).*", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{scheme}{mark}{netloc.rpartition('@')[2]}{path}"


def _single(scheme: str, login: str, server: Address, path: str, options: Mapping[str, str]) -> str:
    """The URL of a single server. Raises `ConfigError` if what should be its database is none."""
    if not re.fullmatch("/?[0-9]*", path):
        raise ConfigError("store: what stands last before the options is no database, expected a number")
    return f"{scheme}://{login}{format_address(server)}{path}{'?' * bool(options)}{urlencode(options)}"


def _servers(listed: str, port: int) -> tuple[Address, ...]:
    servers = []
    for place, entry in enumerate(listed.split(","), 1):
        match = _SERVER.fullmatch(entry)
        if match is None or not 0 < int(match["port"] or port) < 65536:
            raise ConfigError(f"store: server {place} is no host with a port, {_EXPECTED}")  # it may be half a password
        servers.append((match["host"].strip("[]"), int(match["port"] or port)))
    return tuple(servers)


def format_address(address: Address) -> str:
    """Spell an address as in a URL."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server_name(address: Address | None) -> str:
    """Name for log lines of a node of a cluster, or of the server that a URL leads to."""
    return "Redis" if address is None else f"the Redis node {format_address(address)}"


def sentinel_name(address: Address) -> str:
    """Name for log lines of a Sentinel."""
    return f"the Sentinel at {format_address(address)}"
