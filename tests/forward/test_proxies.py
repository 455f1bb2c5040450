"""Each proxy, as a real process with the configuration from deploy/, asks the gate what the middleware would decide."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from limitgate import LimitGate, MemoryStore, Request, Rule
from limitgate.forward import ForwardGate
from tests.attacks.mutations import mutated
from tests.attacks.path_fuzz import RAW, RULES as OF_PATHS
from tests.support.doors import PATIENCE
from tests.support.effort import EXAMPLES, FUZZED
from tests.support.proxies import NAMES, Proxy, ask, missing, on_thread, running

RULES = [
    *OF_PATHS,
    Rule("few", "2/day", path="/few/**", methods=["POST"], key=["path", "ip"]),
    Rule("forged", "1000000/day", path="/forged/**", key=["path", "ip", "method", "host", "header:x-tenant"]),
    Rule("probes", "1000000/day", path="/probes"),
    Rule("none", "0/day", path="/none"),
]
CLIENT, OTHER, KEPT, PIPELINED = [f"127.0.0.{number}" for number in range(2, 6)]
"""Clients, most of a test of their own. The proxy itself asks from 127.0.0.1."""
OPEN = ("nginx", "envoy", "haproxy")
"""Proxies that pass requests on while the gate is away."""
PATHS = 10_000 if FUZZED else 4 * EXAMPLES
FORGERIES = 1_000 if FUZZED else EXAMPLES
REFUSALS = 1_000 if FUZZED else EXAMPLES
FIELDS = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}
SEED = 39


def patient(text: str) -> str:
    """A configuration whose proxy waits for the gate on a busy machine."""
    return re.sub(
        r"\b(?:1[05]0ms|0\.25s|0\.1s)|(?<=timeout_ms = )250", lambda found: "20000" if found[0] == "250" else "20s", text
    )


class Watched:
    """An application, and what it was asked and answered."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.asked: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append({**scope})

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.answers.append({"status": message["status"], **dict(message["headers"])})
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            self.errors.append(error)
            raise


@dataclass
class Site:
    """A proxy between clients and an application, with its gate."""

    proxy: Proxy
    gate: Watched
    application: Watched
    described: list[Request] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)


@contextlib.contextmanager
def standing(name: str, change: Callable[[str], str] = patient, **options: Any) -> Iterator[Site]:
    """A site, whose clock stands still. Its application limits by the same rules, in a store of its own."""
    described: list[Request] = []
    received: list[bytes] = []

    def identify(request: Request) -> None:
        described.append(request)

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        received.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    same: dict[str, Any] = {"rules": RULES, "trusted_proxies": ["127.0.0.1"], "identify": identify, "refusal_logs": 0}
    same |= {"header_names": {"RateLimit-Policy": "X-Policy"}, "headers": ["draft-11", "x-ratelimit"]} | options
    gate = Watched(ForwardGate(**({"store": MemoryStore(clock=lambda: 1_700_000_000_000_000)} | same)))
    application = Watched(LimitGate(echo, **(same | {"rules": OF_PATHS, "identify": None, "store": MemoryStore()})))
    with on_thread(application) as behind, on_thread(gate) as asked, running(name, behind, asked, change) as proxy:
        gate.asked.clear()
        yield Site(proxy, gate, application, described, received)


@pytest.fixture(scope="module", params=NAMES)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """One after the other."""
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    with standing(request.param) as stands:
        yield stands
    assert not stands.gate.errors
    assert all(answer["status"] < 500 for answer in stands.gate.answers)


def test_a_refusal_arrives_whole(site: Site) -> None:
    """Status, body, Retry-After and rate fields; the client, the method and the path are those of the request."""
    first, second, refused = [site.proxy.ask("/few/a?x=1", "POST", CLIENT, body=b"hello") for _ in range(3)]
    assert (first.status, second.status) == (200, 200)
    assert site.received[-2:] == [b"hello", b"hello"]
    assert refused.status == 429
    problem = json.loads(refused.body)
    assert problem["status"] == 429
    assert problem["violated-policies"] == ["few"]
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["cache-control"] == "no-store"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-ratelimit-limit"] == "2"
    assert refused.headers.keys() >= FIELDS
    assert site.proxy.ask("/few/a", "POST", OTHER).status == 200
    assert site.proxy.ask("/few/a", "GET", CLIENT).status == 200
    assert site.proxy.ask("/other", "POST", CLIENT).status == 200


def test_a_refused_head_has_no_body(site: Site) -> None:
    """The connection shows it: what follows is the next response."""
    with contextlib.closing(site.proxy.connection(CLIENT)) as connection:
        replies = [ask(connection, "/none", "HEAD") for _ in range(3)]
        assert [(reply.status, reply.body) for reply in replies] == [(429, b"")] * 3
        assert ask(connection, "/probes", "HEAD").status == 200
    assert site.described[-1].method == "GET"


def test_rate_fields_of_admitted_requests_arrive(site: Site) -> None:
    reply = site.proxy.ask("/probes", source=CLIENT)
    assert reply.status == 200
    if site.proxy.name == "traefik":
        assert "x-ratelimit-limit" not in reply.headers or reply.headers["x-ratelimit-limit"] != "1000000"
    else:
        assert reply.headers["x-ratelimit-limit"] == "1000000"


def forged(chosen: random.Random) -> list[tuple[str, str]]:
    """Fields that a client invents."""
    values = {
        "X-Forwarded-": ["For", "Uri", "Method", "Host", "Proto", "Port", "Prefix", "Server"],
        "X-Original-": ["URI", "URL", "Method", "For", "Host"],
        "X-LimitGate-": ["Status", "Body", "Answered", "Client"],
        "": ["Forwarded", "X-Request-ID", "X-Real-IP"],
    }
    names = [prefix + name for prefix, every in values.items() for name in every]
    said = [
        "/free",
        "//free",
        "*",
        "",
        "GET",
        "DELETE",
        "203.0.113.9",
        "for=203.0.113.9",
        "203.0.113.9, 127.0.0.1",
        "429",
        "200",
    ]
    said += ["a" * 32, "127.0.0.1", "unix", "https", "example.com", "http://example.com/free", "GET /free", "p\\x0aost"]
    fields = [(chosen.choice(names), chosen.choice(said)) for _ in range(chosen.randrange(1, 7))]
    return [(chosen.choice((name, name.lower(), name.replace("-", "_"))), value) for name, value in fields]


def test_forged_fields_change_nothing(site: Site) -> None:
    """Neither client, method, path nor bucket: each request takes one from the same bucket."""
    chosen = random.Random(SEED)
    site.proxy.ask("/forged/x", "PUT", CLIENT)
    left = int(site.gate.answers[-1][b"x-ratelimit-remaining"])
    with contextlib.closing(site.proxy.connection(CLIENT)) as connection:
        for number in range(1, FORGERIES + 1):
            fields = forged(chosen)
            connection.putrequest("PUT", "/forged/x")
            for name, value in fields:
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            response.read()
            assert response.status == 200, fields
            request = site.described[-1]
            assert (request.client, request.method, request.path) == (CLIENT, "PUT", "/forged/x"), fields
            assert int(site.gate.answers[-1][b"x-ratelimit-remaining"]) == left - number, fields


def raw_paths(count: int) -> Iterator[bytes]:
    """Spellings of `tests.attacks`, and mutations of them, that are one line."""
    chosen = random.Random(SEED)
    for number in range(count):
        data = chosen.choice(RAW) if number % 3 == 0 else mutated(chosen, RAW)
        path = re.sub(rb"[\r\n ]", b"", data)[:700]
        yield path if path.startswith(b"/") or chosen.random() < 0.1 else b"/" + path


def test_the_same_rules_as_in_the_middleware(site: Site) -> None:
    """Whatever reaches the application has passed the gate, under the rules that the middleware there finds."""
    compared = 0
    with contextlib.closing(Raw(site.proxy.port)) as client:
        for path in raw_paths(PATHS):
            before, behind = len(site.gate.answers), len(site.application.answers)
            client.get(path)
            asked, reached = site.gate.answers[before:], site.application.answers[behind:]
            assert len(reached) <= 1
            if reached:
                assert len(asked) == 1, path
                assert asked[0].get(b"x-policy") == reached[0].get(b"x-policy"), path
                compared += b"x-policy" in reached[0]
    assert compared > PATHS / 20


def test_nothing_passes_a_gate_that_refuses_everything() -> None:
    """Nor does a request make a proxy fail open. The application takes whatever it is sent."""
    reached: list[bytes] = []
    gate = Watched(
        ForwardGate(rules=[Rule("none", "0/day")], store=MemoryStore(), trusted_proxies=["127.0.0.1"], refusal_logs=0)
    )
    names = [name for name in NAMES if missing(name) is None]
    with accepting(reached) as behind, on_thread(gate) as asked:
        for name in names:
            with running(name, behind, asked, patient) as proxy:
                for line in [
                    *LINES,
                    *[b"GET " + path + b" HTTP/1.1\r\nHost: a.test\r\n\r\n" for path in raw_paths(PATHS // 4)],
                ]:
                    with contextlib.closing(Raw(proxy.port)) as client:
                        client.send(line)
            assert reached == []
    assert len(gate.asked) > len(names) * PATHS / 8


@contextlib.contextmanager
def accepting(reached: list[bytes]) -> Iterator[int]:
    """An application without a parser; gives its port."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            reached.append(self.rfile.readline())
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(PATIENCE)


class Raw:
    """A client that sends what it is told to, on one connection for as long as the other side keeps it."""

    def __init__(self, port: int, source: str = CLIENT) -> None:
        self._port = port
        self._source = source
        self._socket: socket.socket | None = None
        self.connections = 0

    def get(self, target: bytes) -> int | None:
        """Send a GET."""
        return self.send(b"GET " + target + b" HTTP/1.1\r\nHost: a.test\r\n\r\n")

    def send(self, request: bytes, method: str = "GET") -> int | None:
        """Return the status; None if the connection ends instead."""
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), PATIENCE, (self._source, 0))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
        response = http.client.HTTPResponse(self._socket, method=method)
        try:
            self._socket.sendall(request)
            response.begin()
            response.read()
            self.note(response)
        except (OSError, http.client.HTTPException):
            self.close()
            return None
        finally:
            response.close()
        if response.will_close:
            self.close()
        return response.status

    def note(self, response: http.client.HTTPResponse) -> None:
        """Look at a response."""

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def test_refusals_keep_the_connection(site: Site) -> None:
    assert [site.proxy.ask("/few/kept", "POST", KEPT).status for _ in range(2)] == [200, 200]
    with contextlib.closing(Raw(site.proxy.port, KEPT)) as client:
        post = b"POST /few/kept HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\r\n"
        assert [client.send(post, "POST") for _ in range(REFUSALS)] == [429] * REFUSALS
        assert client.connections == 1
    if site.proxy.name == "nginx":
        assert "error" not in site.proxy.log.read_text()


LINES = [
    b"GET http://a.test/login HTTP/1.1\r\nHost: b.test\r\n\r\n",
    b"GET http:///login HTTP/1.1\r\nHost: b.test\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"GET  HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"GET login HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"GET /a\x00b HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"GET /a%00b HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"GET /" + b"a" * 65_536 + b" HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"GET /login HTTP/1.1\r\nHost: a.test\r\nX-Long: " + b"a" * 65_536 + b"\r\n\r\n",
    b"GET /login HTTP/1.1\r\nHost: a.test\r\nX-Forwarded-For: " + b"1.2.3.4, " * 7_000 + b"\r\n\r\n",
    b"GET /login HTTP/1.1\r\nHost: a.test\r\n" + b"X-Forwarded-Uri: /a\r\nX-Original-URI: /b\r\n" * 3 + b"\r\n",
    b"GET /login HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n",
    b"GET /login HTTP/1.0\r\n\r\n",
    b"GET /login HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"get /login HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"BREW /login HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"G@T /login HTTP/1.1\r\nHost: a.test\r\n\r\n",
    (
        b"GET /login HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    ),
    b"POST /login HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"POST /login HTTP/1.1\r\nHost: a.test\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
]


def test_nothing_that_clients_send_is_an_error_of_the_gate(site: Site) -> None:
    """The fixture looks at all of its answers, too. What the proxy itself complains about doesn't reach the gate."""
    before = len(site.gate.asked)
    for line in LINES:
        with contextlib.closing(Raw(site.proxy.port)) as client:
            client.send(line, line.partition(b" ")[0].decode())
    assert len(site.gate.asked) > before
    assert all(answer["status"] in (200, 400, 403, 404, 429, 431) for answer in site.gate.answers)
    assert not site.gate.errors


def test_pipelined_requests_are_asked_about_one_by_one(site: Site) -> None:
    before = len(site.gate.answers)
    request = b"POST /few/pipelined HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", site.proxy.port), PATIENCE, (PIPELINED, 0)) as connection:
        connection.sendall(request * 3 + request.replace(b"Host:", b"Connection: close\r\nHost:"))
        data = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert re.findall(rb"HTTP/1\.1 (\d+)", data) == [b"200", b"200", b"429", b"429"]
    assert len(site.gate.answers) == before + 4


@pytest.mark.parametrize("name", NAMES)
def test_the_gate_is_away(name: str) -> None:
    """Nobody listens, and then somebody who never answers. The shipped times hold."""
    reason = missing(name)
    if reason is not None:
        pytest.skip(reason)
    expected = range(200, 201) if name in OPEN else range(500, 505)
    application = Watched(LimitGate(_ok, rules=OF_PATHS, store="memory://"))
    with socket.socket() as silent, on_thread(application) as behind:
        silent.bind(("127.0.0.1", 0))
        with running(name, behind, silent.getsockname()[1]) as proxy:
            assert proxy.ask("/login", source=CLIENT).status in expected
            if name == "traefik":
                return
            silent.listen()
            assert proxy.ask("/login", source=CLIENT).status in expected


async def _ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("name", NAMES)
def test_the_store_is_away_and_the_rule_closes(name: str) -> None:
    """No proxy takes the refusal for a missing answer."""
    reason = missing(name)
    if reason is not None:
        pytest.skip(reason)
    rules = [Rule("closed", "5/minute", path="/closed", on_error="closed"), Rule("open", "5/minute", path="/open")]
    with standing(name, rules=rules, store="redis://127.0.0.1:1") as site:
        reply = site.proxy.ask("/closed", source=CLIENT)
        assert reply.status == (403 if name == "envoy" else 503)
        assert json.loads(reply.body)["title"] == "Temporary Reduced Capacity"
        assert reply.headers["retry-after"] == "1"
        assert site.proxy.ask("/open", source=CLIENT).status == 200


@pytest.mark.parametrize("name", OPEN)
def test_the_gate_restarts_under_load(name: str) -> None:
    """Requests pass meanwhile, and are limited again afterwards."""
    reason = missing(name)
    if reason is not None:
        pytest.skip(reason)
    gate = ForwardGate(rules=RULES, store="memory://", trusted_proxies=["127.0.0.1"], refusal_logs=0)
    application = Watched(_ok)
    with on_thread(application) as behind, contextlib.ExitStack() as first:
        port = first.enter_context(on_thread(gate))
        with running(name, behind, port) as proxy, contextlib.closing(proxy.connection(CLIENT)) as connection:
            statuses = [ask(connection, "/probes").status for _ in range(5)]
            first.close()
            statuses += [ask(connection, "/probes").status for _ in range(5)]
            with on_thread(gate, port=port):
                statuses += [ask(connection, "/probes").status for _ in range(5)]
            assert set(statuses) == {200}


def test_nginx_asks_twice_and_one_is_charged(tmp_path: Path) -> None:
    """`index` redirects internally."""
    reason = missing("nginx")
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "index.html").write_text("page")
    tmp_path.chmod(0o755)

    def with_files(text: str) -> str:
        return patient(text).replace("proxy_pass http://application;", f"root {tmp_path}; index index.html;", 1)

    rules = [Rule("all", "100/day", key=["ip"])]
    with standing("nginx", with_files, rules=rules) as site, contextlib.closing(site.proxy.connection(CLIENT)) as connection:
        replies = [ask(connection, "/") for _ in range(3)]
        assert [reply.body for reply in replies] == [b"page"] * 3
        assert len(site.gate.asked) == 6
        assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["99", "98", "97"]
