"""One client's bucket of a rule under Django: bans, resets and what is left, of rules, decorators and throttles alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from django.http import HttpResponse
from django.urls import path

from limitgate import AsyncRedisStore, Caller, Limiter, MemoryStore, RedisStore, Rule, limit
from tests.support.clock import Clock
from tests.support.django_app import CHANGING, WAYS, AnonymousUser, Changing, Project, Way, hello
from tests.support.redis_server import RedisServer

# isort: split
from limitgate.django.rest import UserRateThrottle
from tests.integrations.test_django_rest import Twice, view

HERE, ELSEWHERE = "127.0.0.1", "192.0.2.9"


class Known:
    """A user as an authentication layer leaves it."""

    is_authenticated = True

    def __init__(self, pk: int) -> None:
        self.pk = pk


class PerUser(UserRateThrottle):
    THROTTLE_RATES = {"user": "9/minute"}  # noqa: RUF012 - as REST framework has it


def item(request: Any, number: int) -> HttpResponse:
    return HttpResponse(f"hello {number}")


@limit("9/minute", name="decorated", key=["ip"])
def decorated(request: Any) -> HttpResponse:
    return HttpResponse("hello")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def from_elsewhere(request: Any) -> None:
    """Another client, whom a proxy of ours names."""
    request.META["REMOTE_ADDR"] = request.headers.get("X-Peer", HERE)
    user = request.headers.get("X-User")
    request.user = Known(int(user)) if user else AnonymousUser()


BY_ROUTE = Rule("route", "9/minute", path="/items/**", key=["path", "ip"])
BY_USER = Rule("user", "9/minute", key=["user"])
BY_CALLER = Rule("caller", "9/minute", "99/day", key=["caller|ip"])
BY_NAME = Rule("plan", "9/minute", key=["caller"])
ACME = Caller("acme", limits={"plan": "5/minute"})
TOKEN = {"Authorization": "ann"}


class Case(NamedTuple):
    """A limit, and who is banned from it."""

    rule: Any
    where: str
    bucket: dict[str, Any]
    banned: dict[str, str]
    """Headers of whoever is banned."""
    other: dict[str, str]
    """Headers of somebody else."""


CASES = {
    "rule": Case(Rule("all", "9/minute"), "/hello", {"ip": HERE}, {}, {"X-Peer": ELSEWHERE}),
    "route": Case(BY_ROUTE, "/items/7/", {"path": "/items/<int:number>/", "ip": HERE}, {}, {"X-Peer": ELSEWHERE}),
    "user": Case(BY_USER, "/hello", {"user": Known(7)}, {"X-User": "7"}, {"X-User": "8"}),
    "caller": Case(BY_CALLER, "/hello", {"caller": "acme"}, {"X-Caller": "acme"}, {"X-Caller": "other"}),
    "caller's limits": Case(BY_NAME, "/hello", {"caller": ACME}, {"X-Caller": "acme"}, {"X-Caller": "other"}),
    "decorator": Case(decorated, "/decorated", {"ip": HERE}, {}, {"X-Peer": ELSEWHERE}),
    "throttle": Case(Twice, "/throttled", {"user": "ann"}, TOKEN, {"Authorization": "bob"}),
    "throttle by rate": Case(PerUser, "/by-rate", {"user": "ann"}, TOKEN, {"Authorization": "bob"}),
}


def identify(request: Any) -> Caller | None:
    name = request.headers.get("X-Caller")
    return ACME if name == "acme" else Caller(name) if name else None


def site(opened: contextlib.ExitStack, way: Way, rule: Any, store: Any, **options: Any) -> Project:
    it = way.project(
        path("hello", hello),
        path("decorated", decorated),
        path("throttled", view(Twice)),
        path("by-rate", view(PerUser)),
        path("items/<int:number>/", item),
        rules=[rule] if isinstance(rule, Rule) else [],
        store=store,
        identify=identify,
        before=(CHANGING,),
        **options,
    )
    return opened.enter_context(it)


@pytest.fixture(autouse=True)
def _named_by_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changing, "change", staticmethod(from_elsewhere))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_ban_is_heeded(opened: contextlib.ExitStack, way: Way, case: Case) -> None:
    """Whoever is banned is refused until it ends or somebody pardons; others are not."""
    rule, where, parts, banned, other = case
    store = MemoryStore(Clock())
    it = site(opened, way, rule, store)
    bucket = Limiter(store).bucket(rule, **parts)
    left = bucket.peek().remaining
    assert it.ask(where, headers=banned).status_code == 200
    assert bucket.peek().remaining == left - 1
    bucket.ban(90)
    refused = it.ask(where, headers=banned)
    assert (refused.status_code, refused["Retry-After"]) == (429, "90")
    assert it.ask(where, headers=other).status_code == 200
    bucket.ban()  # without an end, so nothing says when to come back
    refused = it.ask(where, headers=banned)
    assert (refused.status_code, refused.get("Retry-After")) == (429, None)
    assert b"Expected available" not in refused.content
    bucket.pardon()
    assert it.ask(where, headers=banned).status_code == 200
    assert bucket.reset().remaining == left


@pytest.mark.parametrize("kind", ["rule", "user", "decorator", "throttle"])
def test_a_ban_holds_while_redis_is_gone(opened: contextlib.ExitStack, way: Way, own_redis: RedisServer, kind: str) -> None:
    """Under ``local``, as far as the store of this process has seen it."""
    rule, where, parts, banned, other = CASES[kind]
    store: Any = (AsyncRedisStore if way.awaits else RedisStore)(own_redis.url, local_refusals=False)
    it = site(opened, way, rule, store, on_error="local", timeout=5)
    with Limiter(own_redis.url, timeout=5) as limiter:
        limiter.bucket(rule, **parts).ban(3600)
    assert it.ask(where, headers=banned).status_code == 429
    own_redis.stop()
    assert it.ask(where, headers=banned).status_code == 429
    assert it.ask(where, headers=other).status_code == 200
    if not way.awaits:
        store.close()
