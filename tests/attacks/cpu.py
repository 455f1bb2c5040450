"""What a request costs at most: ``python -m tests.attacks.cpu --seconds 300 [--seed N]`` looks for the one that costs most.

Inputs are as large as a server accepts and made of a beginning, a piece that is repeated, and an end. A hill climber changes
one of these at a time and keeps what costs more CPU. Measured is all that LimitGate does about one request, with a store in
memory: address, caller, path, route, keys, plan, decision.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from limitgate import Caller, LimitGate, LimitGateWSGI, MemoryStore, Rule, RuleSet, limit
from limitgate.http.request import ASGIRequest, Request, WSGIRequest
from limitgate.rules.callers import KnownCaller

BAR = 1.0
"""Milliseconds of CPU that one request is to cost at most."""
ALARM = 10 * BAR
"""What is a finding: a machine may be slow and busy, and a framework's own expressions grow with what only h11 takes."""
LISTED = "sha256:" + "0f" * 32


class Server(NamedTuple):
    """What a server accepts, found by trying (uvicorn 0.54, httptools 0.9, gunicorn 27, hypercorn 0.18)."""

    target: int
    """Bytes of the longest request target."""
    head: int
    """Bytes of all header lines."""
    lines: int
    """Header lines."""
    line: int
    """Bytes of one header line."""


SERVERS = {
    "uvicorn, h11": Server(262_144, 262_144, 262_144, 262_144),  # 16 KB by option, but what comes in one read is not counted
    "uvicorn, httptools": Server(65_535, 4_000_000, 1_000_000, 4_000_000),  # there is no limit on headers
    "hypercorn": Server(65_500, 65_500, 16_000, 65_500),
    "gunicorn": Server(4_094, 819_000, 100, 8_190),
}


class Attack(NamedTuple):
    """An input: what part of a request it is, and what that is made of."""

    kind: str
    before: bytes
    piece: bytes
    after: bytes
    size: int = 1 << 30
    """Bytes, if that is less than a server accepts."""

    def bytes_of(self, most: int) -> bytes:
        """The input with so many bytes, percent-encoded where it is a path or a query."""
        room = max(0, min(most, self.size) - len(self.before) - len(self.after))
        return self.before + self.piece * (room // max(1, len(self.piece))) + self.after


def _limited(path: str) -> Route:
    async def endpoint(_: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    return Route(path, limit("1000000/second", key=["path", "ip"])(endpoint))


def _starlette() -> Starlette:
    routes = [Route(path, lambda _: None) for path in ("/api/items/{id}", "/api/files/{rest:path}", "/login")]
    return Starlette(routes=[*routes, Mount("/v1", routes=[Route("/api/items/{id}", lambda _: None)])])


def _flask() -> Any:
    app, other = flask.Flask("priced"), flask.Flask("mounted")
    for each in (app, other):
        for path in ("/login", "/api/items/<id>", "/api/files/<path:rest>"):
            each.add_url_rule(path, path, limit("1000000/second")(lambda **_: ""))
    return DispatcherMiddleware(app, {"/v1": other})


def _quick(name: str, path: str = "/**", **options: Any) -> Rule:
    return Rule(name, "1000000/second", path=path, **options)


def _tiers() -> RuleSet:
    known = [
        KnownCaller(id="acme", api_key=LISTED, tier="vip"),
        *[KnownCaller(id=f"b{place}", header={f"X-Caller-{place}": "billing"}) for place in range(3)],
    ]
    rules = [
        _quick("api", "/api/**", key=["path", "api_key|ip"]),
        _quick("login", "/login", methods=["POST"]),
        Rule("health", path="/healthz", exempt=True),
        _quick("everything", key=["host", "header:x-id"]),
        _quick("api", "/api/**", key=["caller"], tier="vip"),
    ]
    return RuleSet(rules, known)


def _identify(request: Request) -> Caller | None:
    """A caller by what an application may look at."""
    return Caller("admin") if request.path.startswith("/admin") or request.query.get("admin") else None


def _cost(request: Request) -> int:
    return 2 if request.query.get("full") else 1


NETWORKS = tuple(f"10.{place}.0.0/16" for place in range(0, 256, 2)) + tuple(f"fd00:{place:x}::/32" for place in range(64))


@cache
def sites() -> dict[str, tuple[Any, str]]:
    """Gates with rules as people write them, and the mount point that their requests come with."""
    proxied: dict[str, Any] = {"trusted_proxies": NETWORKS, "store": MemoryStore()}
    bearer: dict[str, Any] = {"forwarded_header": "forwarded", "api_key_header": "authorization"}
    readme = [Rule("api", path="/api/**", key=["path", "ip"], qps=1_000_000)]
    callables = [_quick("all", cost=_cost), _quick("deep", "/a/{b}/c/{d}/e/f", cost=_cost)]
    marked = [_limited("/login"), _limited("/api/items/{id}"), Mount("/v1", routes=[_limited("/x/{rest:path}")])]
    asgi = {
        "readme": (LimitGate(_starlette(), rules=readme, store=MemoryStore()), ""),
        "mounted": (LimitGate(_starlette(), rules=_tiers(), store=MemoryStore(), trusted_proxies=["unix"]), "/v1"),
        "tiers": (LimitGate(_starlette(), rules=_tiers(), **proxied), ""),
        "bearer": (LimitGate(_starlette(), rules=_tiers(), **bearer, **proxied), ""),
        "unlisted": (LimitGate(_starlette(), rules=[_quick("all", key=["api_key"])], store=MemoryStore()), ""),
        "decorated": (LimitGate(Starlette(routes=marked), rules=readme, store=MemoryStore()), ""),
        "callables": (LimitGate(_starlette(), rules=callables, identify=_identify, store=MemoryStore()), "/v1"),
    }
    wsgi = {
        "flask": (LimitGateWSGI(_flask(), rules=_tiers(), **proxied), ""),
        "flask, forwarded": (LimitGateWSGI(_flask(), rules=_tiers(), **bearer, **proxied), ""),
        "flask, callables": (LimitGateWSGI(_flask(), rules=callables, identify=_identify, store=MemoryStore()), ""),
    }
    return asgi | wsgi


PEER = "10.0.0.1"
KINDS = {
    "path": "path",
    "query": "query",
    "method": "method",
    "X-Forwarded-For": "x-forwarded-for",
    "Forwarded": "forwarded",
    "API key": "x-api-key",
    "bearer token": "authorization",
    "Host": "host",
    "header as a key": "x-id",
    "caller's header": "x-caller-1",
    "many lines": "lines",
}


def head_of(attack: Attack, server: Server) -> list[tuple[bytes, bytes]]:
    """The header lines of an attack, as many and as long as the server takes."""
    name = KINDS[attack.kind].encode()
    if attack.kind == "many lines":
        line = (attack.piece.lower() or b"a", attack.before)
        count = min(server.lines - 4, attack.size, server.head // (len(line[0]) + len(line[1]) + 4))
        return [line] * count + [(b"x-forwarded-for", attack.after[:40])]
    if attack.kind in ("path", "query", "method"):
        return [(b"host", b"example")]
    per_line = min(server.line, server.head) - 20
    whole = attack.bytes_of(min(per_line, server.head))
    count = 1 if attack.kind == "Host" else min(server.lines - 5, server.head // per_line)
    lead = b"Bearer " if attack.kind == "bearer token" else b""
    return [(name, lead + whole)] * max(1, count)


def target_of(attack: Attack, server: Server) -> tuple[str, bytes, bytes]:
    """Method, path and query of an attack, not decoded."""
    whole = attack.bytes_of(server.target - 20) if attack.kind in ("path", "query", "method") else b""
    if attack.kind == "path":
        return "GET", whole, b""
    if attack.kind == "query":
        return "GET", b"/api/items/7", whole
    method = whole[: 20 if server.target < 10_000 else None].decode("latin-1") if attack.kind == "method" else "GET"
    return method, b"/api/items/7", b""


Call = Callable[[], Any]


def call_of(attack: Attack, server_name: str, site: str) -> Call:
    """What has a gate decide about an attack; a new request each time, since much is found out once."""
    server, (gated, root) = SERVERS[server_name], sites()[site]
    method, path, query = target_of(attack, server)
    headers = head_of(attack, server)
    if site.startswith("flask"):
        environ = _environ(method, path, query, headers)
        return lambda: gated.gate.check(WSGIRequest(dict(environ)))
    text = unquote_to_bytes(path).decode("utf-8", "replace")
    scope = {"type": "http", "method": method, "path": text, "root_path": root, "query_string": query, "headers": headers}
    scope["client"] = None if site == "mounted" else (PEER, 1)
    return lambda: _completed(gated.gate.acheck(ASGIRequest(dict(scope))))


def _environ(method: str, path: bytes, query: bytes, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    environ = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query.decode("latin-1"),
        "SERVER_NAME": "testserver",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(),
        "REMOTE_ADDR": PEER,
    }
    lines: dict[str, list[str]] = {}
    for name, value in headers:
        lines.setdefault("HTTP_" + name.decode("latin-1").upper().replace("-", "_"), []).append(value.decode("latin-1"))
    return environ | {name: ",".join(values) for name, values in lines.items()}


def _completed(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as stopped:
        return stopped.value
    coroutine.close()
    raise AssertionError("it waited")


def milliseconds(call: Call, times: int = 3) -> float:
    """The CPU that a call takes, the least of several times; one that raises was decided about, too."""
    least = float("inf")
    for _ in range(times):
        began = time.thread_time()
        with contextlib.suppress(ValueError):
            call()
        least = min(least, time.thread_time() - began)
    return least * 1000


TOKENS = {
    "path": b"/ // /. /.. /; /a; ; %00 %c2%80 %ff a /a /api /items . http://h/ x : /v1 %20 %e2%82%ac /login ? %2f %0a".split(),
    "query": b"& = a %61 + % full %66ull f fu admin %zz %c3%a9 ; ad%6".split(),
    "method": [b"a", b"X", b"get", b"-"],
    "lines": b'a x x-id host x-a b \xff 10.0.0.1 1 , for=1 for= " x-forwarded-for forwarded x-api-key X-Caller-1'.split(),
}
SIZES = [200, 490, 510, 999, 1_000, 2_000, 3_276, 8_000, 8_180, 16_000, 16_380, 32_000, 65_000, 1 << 30]
VALUES = [b",", b" ", b'"', b"\\", b";", b"=", b"for=", b"for=10.0.0.1,", b'for="10.0.0.1";by="', b"10.0.0.1", b", 10.2.0.1"]
VALUES += [b"a", b"\xff", b"\xe9", b":", b"[", b"]", b".", b"1", b"::", b"\t", b"fd00::1", b"%", b"'", b"K"]
PIECES = {
    "path": [b"/a;", b"/", b"/a", b"/..", b"/a/..", b"%00a", b"%c2%80a", b"a", b"/%c2%80."],
    "query": [b"&", b"a&", b"%61", b"ful&", b"a=1&", b"%66u&", b"%zz&", b"+"],
    "method": [b"a", b"X"],
    "many lines": [b"a", b"x-id", b"host", b"x-forwarded-for", b"forwarded", b"x-api-key"],
}
"""What is repeated to begin with."""
OF_VALUES = [b"a", b"\xff", b",", b'"', b'\\"', b',"', b"10.0.0.1,", b"for=10.0.0.1,", b" ", b"a "]
AROUND = {
    "path": [(b"/", b""), (b"http://h/", b""), (b"", b"/login"), (b"/v1/", b"/..")],
    "many lines": [(b"", b""), (b"1", b""), (b"10.0.0.1", b"")],
}
LINES = (999, 3_276, 1 << 30)
"""How many lines there are to begin with, of an attack by many: as many as are read, and more."""


def starts(kind: str) -> list[Attack]:
    """What the search begins with."""
    around, sizes = AROUND.get(kind, [(b"", b"")]), LINES if kind == "many lines" else (1 << 30,)
    pieces = PIECES.get(kind, OF_VALUES)
    return [Attack(kind, before, piece, after, size) for before, after in around for piece in pieces for size in sizes]


def mutated(attack: Attack, chosen: random.Random) -> Attack:
    """An attack with one of its three parts changed by a token."""
    tokens = TOKENS.get(KINDS[attack.kind], VALUES)
    if chosen.randrange(5) == 0:
        return attack._replace(size=chosen.choice(SIZES))
    place, token = chosen.choice(("before", "piece", "piece", "after")), chosen.choice(tokens)
    old: bytes = getattr(attack, place)
    at = chosen.randrange(len(old) + 1)
    new = chosen.choice((old[:at] + token + old[at:], old[:at] + token, token, old[at:] + token * chosen.choice((1, 9, 40))))
    return attack._replace(**{place: new or token})


def dearest(server: str, kind: str, tries: int, chosen: random.Random) -> tuple[float, str, Attack]:
    """The milliseconds, the site and the input of the dearest request that is found with so many tries."""
    named = [name for name in sites() if name.startswith("flask") == (server == "gunicorn")]
    found = max((milliseconds(call_of(each, server, site), 1), site, each) for site in named for each in starts(kind))
    found = (milliseconds(call_of(found[2], server, found[1])), *found[1:])
    for _ in range(tries):
        site, attack = chosen.choice((found[1], *named)), mutated(found[2], chosen)
        cost = milliseconds(call_of(attack, server, site), 1)
        if cost > found[0] and (cost := milliseconds(call_of(attack, server, site), 5)) > found[0]:
            found = cost, site, attack
    return milliseconds(call_of(found[2], server, found[1]), 9), found[1], found[2]


def table(tries: int, seed: int) -> float:
    """Print the dearest input of each kind for each server, beside what was found at first; the milliseconds of the worst."""
    print("\n| server | input | bytes | ms before | ms | found on | input |\n|---|---|---|---|---|---|---|")
    worst = 0.0
    for name, server in SERVERS.items():
        for kind, before in zip(KINDS, BEFORE[name]):
            cost, site, attack = dearest(name, kind, tries, random.Random(f"{seed} {name} {kind}"))
            parts = " ".join(repr(part[:24])[1:] for part in attack[1:4]).replace("|", "")
            size = size_of(attack, server)
            print(f"| {name} | {kind} | {size:,} | {before:.2f} | {cost:.2f} | {site} | `{parts}` |", flush=True)
            worst = max(worst, cost)
    print(f"| all | | | | {worst:.2f} | | |")
    return worst


def size_of(attack: Attack, server: Server) -> int:
    """The bytes of a request, without what is the same in all of them."""
    lines = [len(name) + len(value) + 4 for name, value in head_of(attack, server)]
    return sum(map(len, target_of(attack, server))) + sum(lines)


BEFORE = {
    "uvicorn, h11": (333.6, 603.6, 0.26, 0.13, 63.12, 29.68, 36.04, 4.69, 0.99, 0.31, 12.71),
    "uvicorn, httptools": (97.08, 149.68, 0.26, 1.32, 113.94, 334.37, 457.39, 82.84, 16.79, 3.85, 205.01),
    "hypercorn": (69.04, 105.1, 0.14, 0.11, 1.19, 5.4, 5.64, 1.56, 0.3, 0.14, 2.96),
    "gunicorn": (4.75, 8.24, 0.12, 0.09, 4.96, 65.45, 57.47, 0.22, 4, 0.71, 0.26),
}
"""Milliseconds of the dearest input of each kind that the same search found at 6a3cd37, before anything was bounded."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long to look, about")
    parser.add_argument("--seed", type=int, default=None, help="a number, to repeat a run")
    parser.add_argument("--tries", type=int, default=60, help="changes of each input in one round")
    told = parser.parse_args()
    seed = random.randrange(1 << 32) if told.seed is None else told.seed
    began, worst = time.monotonic(), 0.0
    while not worst or time.monotonic() - began < told.seconds:
        print(f"\nseed {seed}")
        worst = max(worst, table(told.tries, seed))
        seed += 1
    return int(worst > ALARM)


if __name__ == "__main__":
    sys.exit(main())
