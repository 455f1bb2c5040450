"""Envoy's rate limit service, asked by Envoy itself and with the messages of xds-protos."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from limitgate import LimitGate, MemoryStore, Request, Rule
from limitgate.forward import ForwardGate
from limitgate.forward.served import Served
from tests.attacks.path_fuzz import RULES as OF_PATHS
from tests.command.verbs.test_serve import serving as served
from tests.forward.test_proxies import CLIENT, FIELDS, PATHS, Raw, patient, raw_paths
from tests.support.doors import PATIENCE
from tests.support.proxies import RATE_LIMIT, missing, on_thread, running
from tests.support.redis_server import RedisServer, free_port

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'limitgate[envoy]'")
rls = pytest.importorskip("envoy.service.ratelimit.v3.rls_pb2", reason="xds-protos is not installed: scripts/ensure-proxies")

METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
OK, OVER = rls.RateLimitResponse.OK, rls.RateLimitResponse.OVER_LIMIT
LOGIN = Rule("login", "3/minute", path="/login", methods=["POST"])
ENTRIES = {"path": "/login?x=1", "method": "POST", "host": "a.test", "remote_address": "192.0.2.7"}


class Client:
    """A client as Envoy is one."""

    def __init__(self, port: int) -> None:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.close = channel.close
        self._call = channel.unary_unary(
            METHOD,
            request_serializer=rls.RateLimitRequest.SerializeToString,
            response_deserializer=rls.RateLimitResponse.FromString,
        )

    def ask(self, *descriptors: dict[str, str], hits: int = 0, hits_of: Sequence[int | None] = ()) -> Any:
        """Ask about one request."""
        request = rls.RateLimitRequest(domain="limitgate", hits_addend=hits)
        for place, entries in enumerate(descriptors):
            descriptor = request.descriptors.add()
            for key, value in entries.items():
                descriptor.entries.add(key=key, value=value)
            if place < len(hits_of) and hits_of[place] is not None:
                descriptor.hits_addend.value = hits_of[place]
        return self._call(request, timeout=PATIENCE, wait_for_ready=True)


@contextlib.contextmanager
def serving(*rules: Rule, seen: list[Request] | None = None, **options: Any) -> Iterator[Client]:
    """A client of a gate."""
    port = free_port()
    options = {"trusted_proxies": ["127.0.0.1"], "store": MemoryStore(), "refusal_logs": 0} | options
    gate = ForwardGate(rules=[*rules], identify=None if seen is None else seen.append, **options)
    with on_thread(Served(gate, f"127.0.0.1:{port}"), lifespan="on"), contextlib.closing(Client(port)) as client:
        yield client


def test_a_request_is_described_by_entries() -> None:
    seen: list[Request] = []
    with serving(LOGIN, seen=seen) as client:
        client.ask({**ENTRIES, "header:X-Tenant": "t", "api_key": "k", "generic_key": "ignored"})
    (request,) = seen
    assert (request.path, request.method, request.client) == ("/login", "POST", "192.0.2.7")
    assert [request.headers.get(name) for name in ("host", "x-tenant", "x-api-key")] == ["a.test", "t", "k"]
    assert request.query.get("x") == "1"


def test_statuses_and_the_refusal() -> None:
    """One status for each descriptor. The refusal is the middleware's."""
    with serving(LOGIN) as client:
        answers = [client.ask(ENTRIES, {"generic_key": "a"}) for _ in range(4)]
    assert [answer.overall_code for answer in answers] == [OK, OK, OK, OVER]
    assert [[status.code for status in answer.statuses] for answer in answers] == [[OK] * 2] * 3 + [[OVER] * 2]
    assert [answer.statuses[0].limit_remaining for answer in answers] == [2, 1, 0, 0]
    limit = answers[0].statuses[1].current_limit
    assert (limit.requests_per_unit, limit.unit, limit.name) == (3, rls.RateLimitResponse.RateLimit.MINUTE, "login")
    assert 0 < answers[0].statuses[0].duration_until_reset.ToSeconds() <= 60
    headers = {header.key: header.value for header in answers[3].response_headers_to_add}
    assert headers.keys() >= FIELDS | {"retry-after", "content-type"}
    assert b'"violated-policies": ["login"]' in answers[3].raw_body
    assert answers[0].raw_body == b""
    assert {header.key for header in answers[0].response_headers_to_add} == FIELDS


def test_all_descriptors_are_one_request() -> None:
    """They are charged once, and of two entries for one thing the first counts."""
    entries = [{key: value} for key, value in ENTRIES.items()]
    with serving(LOGIN) as client:
        assert client.ask(*entries, {"path": "/free"}, {"remote_address": "192.0.2.8"}).statuses[0].limit_remaining == 2
        assert client.ask(ENTRIES).statuses[0].limit_remaining == 1


@pytest.mark.parametrize("is_redis", [False, True])
def test_hits_are_the_cost(*, is_redis: bool, request: pytest.FixtureRequest) -> None:
    """Whatever the rule's own; more than fit are refused and uncharged, 0 of a descriptor charges nothing."""
    store: Any = MemoryStore(clock=lambda: 1_700_000_000_000_000)
    if is_redis:
        server: RedisServer = request.getfixturevalue("redis_server")
        store = server.url
    with serving(Rule("a", "100/day", cost=7), store=store, key_prefix="hits", timeout=PATIENCE) as client:

        def left(**hits: Any) -> int:
            return client.ask(ENTRIES, **hits).statuses[0].limit_remaining

        assert left() == 93
        assert left(hits=10) == 83
        assert left(hits=10, hits_of=[3]) == 80
        assert left(hits_of=[0]) == 80
        for hits in (81, 101, 2**32 - 1):
            answer = client.ask(ENTRIES, hits=hits)
            assert (answer.overall_code, answer.statuses[0].limit_remaining) == (OVER, 80)
        assert client.ask(ENTRIES, hits_of=[2**64 - 1]).overall_code == OVER
        assert left(hits=80) == 0


def test_costs_of_limits_are_replaced() -> None:
    """Also in a rule whose limits have costs of their own, or whose cost is a callable."""
    rules = [Rule("a", limits=["1000/day", {"limit": "500/day", "cost": 9}]), Rule("b", "300/day", cost=lambda _: 5)]
    with serving(*rules, store=MemoryStore(clock=lambda: 1_700_000_000_000_000)) as client:
        assert client.ask(ENTRIES, hits=20).statuses[0].limit_remaining == 280
        assert client.ask(ENTRIES).statuses[0].limit_remaining == 275


def test_figures_beyond_the_protocol_are_cut() -> None:
    with serving(Rule("most", "20000000000000/366 days")) as client:
        status = client.ask(ENTRIES).statuses[0]
        assert (status.current_limit.requests_per_unit, status.limit_remaining) == (2**32 - 1, 2**32 - 1)
        assert status.current_limit.unit == rls.RateLimitResponse.RateLimit.UNKNOWN


def test_an_untrusted_peer_is_the_client(caplog: pytest.LogCaptureFixture) -> None:
    """The log says so once, and names the entry."""
    seen: list[Request] = []
    with serving(LOGIN, seen=seen, trusted_proxies=[]) as client:
        client.ask(ENTRIES)
        client.ask({"header:x-forwarded-for": "192.0.2.9"})
    assert [request.client for request in seen] == ["127.0.0.1"] * 2
    (told,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("LG")]
    assert told.startswith("LG006 a request carried the entry remote_address, which was ignored because its peer is not in")


def test_nothing_is_described(caplog: pytest.LogCaptureFixture) -> None:
    """Every rule for / applies, and the log says so. A descriptor may be empty, and so may the request."""
    with serving(Rule("all", "100/day", methods=["POST"])) as client:
        assert client.ask().overall_code == OK
        assert client.ask({}).statuses[0].limit_remaining == 98
        for path in ("", "*", "http://h/login", "\x00", "/" + "a" * 70_000, "/é%ff"):
            assert client.ask({"path": path, "remote_address": "no address", "header:": "x"}).overall_code == OK
    codes = [record.getMessage()[:5] for record in caplog.records if record.name == "limitgate"]
    assert sorted(code for code in codes if code.startswith("LG")) == ["LG081", "LG083"]


def test_the_store_is_away() -> None:
    away = "redis://127.0.0.1:1"
    with serving(LOGIN, store=away) as client:
        assert client.ask(ENTRIES).overall_code == OK
    with serving(LOGIN, store=away, on_error="closed") as client:
        answer = client.ask(ENTRIES)
        assert answer.overall_code == OVER
        assert b"temporary-reduced-capacity" in answer.raw_body


@pytest.mark.parametrize("on_socket", [False, True])
def test_the_command_trusts_this_machine(tmp_path: Path, *, on_socket: bool) -> None:
    """Also if subrequests come on a unix socket: the gRPC service listens on loopback."""
    rules, port = tmp_path / "config", free_port()
    rules.mkdir()
    (rules / "default.yaml").write_text("rules: [{name: all, qpd: 1}]")
    place = ["--uds", str(tmp_path / "gate.sock")] if on_socket else []
    with served(rules, "--grpc", str(port), *place) as command, contextlib.closing(Client(port)) as client:
        asked = [client.ask({"path": "/", "method": "GET", "remote_address": f"192.0.2.{each}"}) for each in (1, 2, 1)]
        log = command.log.read_text()
    assert [answer.overall_code for answer in asked] == [OK, OK, OVER]
    assert f"trusted proxies {'unix, ' if on_socket else ''}127.0.0.1, ::1" in log
    assert "LG006" not in log


@pytest.mark.skipif(missing("envoy") is not None, reason=missing("envoy") or "")
def test_envoy_itself() -> None:
    """A refusal arrives whole, and each path meets the rules that it meets in the application's middleware."""
    port = free_port()
    options: dict[str, Any] = {"headers": ["draft-11", "x-ratelimit"], "header_names": {"RateLimit-Policy": "X-Policy"}}
    options |= {"trusted_proxies": ["127.0.0.1"], "refusal_logs": 0}
    gate = ForwardGate(rules=[*OF_PATHS, Rule("few", "2/day", path="/few", methods=["POST"])], store=MemoryStore(), **options)
    application = LimitGate(_ok, rules=OF_PATHS, store=MemoryStore(), **options)
    with (
        on_thread(application) as behind,
        on_thread(Served(gate, f"127.0.0.1:{port}"), lifespan="on"),
        running("envoy", behind, port, patient, RATE_LIMIT) as proxy,
    ):
        replies = [proxy.ask("/few", "POST", CLIENT, headers={"X-Forwarded-For": f"192.0.2.{n}"}) for n in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert replies[0].headers["x-ratelimit-remaining"] == "1"
        assert replies[2].headers["content-type"] == "application/problem+json"
        assert replies[2].headers.keys() >= FIELDS | {"retry-after"}
        assert b"quota-exceeded" in replies[2].body
        compared = 0
        with contextlib.closing(Policies(proxy.port)) as client:
            for path in raw_paths(PATHS // 2):
                if (client.get(path)) == 200:
                    policies = client.policies
                    compared += bool(policies)
                    assert len(policies) in (0, 2), path
                    assert len(set(policies)) <= 1, path
        assert compared > PATHS / 40


class Policies(Raw):
    """Keeps what both gates say."""

    policies: list[str]

    def note(self, response: Any) -> None:
        self.policies = [value for name, value in response.getheaders() if name.lower() == "x-policy"]


async def _ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.skipif(missing("envoy") is not None, reason=missing("envoy") or "")
def test_the_service_is_away() -> None:
    """Nobody listens, and then somebody who never answers."""
    with socket.socket() as silent, on_thread(_ok) as behind:
        silent.bind(("127.0.0.1", 0))
        with running("envoy", behind, silent.getsockname()[1], main=RATE_LIMIT) as proxy:
            assert proxy.ask("/", source=CLIENT).status == 200
            silent.listen()
            assert proxy.ask("/", source=CLIENT).status == 200
