"""Limits as dependencies of FastAPI: charged together with all others or not at all, by what other dependencies found out."""

import asyncio
import contextlib
import dataclasses
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Annotated, Any

import pydantic
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Security, WebSocket
from fastapi.responses import JSONResponse
from fastapi.security import SecurityScopes
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser, UnauthenticatedUser
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

from limitgate import (
    Caller,
    ConfigError,
    Decision,
    Limit,
    LimitGate,
    MemoryStore,
    RateLimited,
    Rule,
    StoreError,
    exempt,
    limit,
    open_store,
)
from limitgate.fastapi import RateLimit
from tests.support.clock import Clock
from tests.support.doors import PEER, Wire, asgi_reply, handshake, http_scope
from tests.support.fastapi_doors import Denied, client, gated, refused_by, statuses, used
from tests.support.redis_server import RedisServer

Dependency = Callable[..., Any]


def one(*dependencies: Any, **more: Any) -> FastAPI:
    """An application with one route, ``/hello``, that has these dependencies."""
    app = FastAPI(**more)

    @app.get("/hello", dependencies=[Depends(dependency) for dependency in dependencies])
    async def hello() -> dict[str, str]:
        return {"message": "hello"}

    return app


async def current_user(x_user: Annotated[str | None, Header()] = None) -> str | None:
    return x_user


def as_user(name: str) -> dict[str, Any]:
    return {"headers": {"X-User": name}}


# --- together or not at all -------------------------------------------------------------------------------------------

EVERYWHERE = ("rule", "decorator", "app", "include", "router", "first", "second")
"""Limits in every place there is, in the order in which they are asked."""


def full_house(tight: str = "", **options: Any) -> tuple[FastAPI, Any]:
    """An application limited in every place; ``tight`` names the limit that admits only two. ``/free`` has only the rule."""

    def of(name: str, **more: Any) -> RateLimit:
        return RateLimit(limits[name], name=name, **more)

    limits = {name: "2/day" if name == tight else "50/day" for name in EVERYWHERE}
    app, router = FastAPI(), APIRouter(dependencies=[Depends(of("router"))])

    @router.get("/hello", dependencies=[Depends(of("first", key=[current_user]))])
    @limit(limits["decorator"], name="decorator")
    async def hello(decision: Annotated[Decision | None, Depends(of("second"))]) -> list[str | None]:
        return [window.rule for window in decision.windows] if decision else []

    outer = FastAPI(dependencies=[Depends(of("app"))])
    outer.include_router(router, prefix="/api", dependencies=[Depends(of("include"))])
    app.mount("/v1", outer)
    app.get("/free")(lambda: "free")
    return app, gated(app, Rule("rule", limits["rule"]), **options)


def test_all_limits_are_charged_together() -> None:
    """One request is charged once to rules, decorators and the dependencies of app, router and route, and is told of all."""
    app, store = full_house()
    reply = client(app).get("/v1/api/hello")
    assert used(store) == dict.fromkeys(EVERYWHERE, 1)
    assert reply.json() == list(EVERYWHERE)
    assert [reply.headers[f"x-ratelimit-{part}"] for part in ("limit", "remaining")] == ["50", "49"]


@pytest.mark.parametrize("tight", EVERYWHERE)
def test_whichever_refuses_the_others_have_their_share_back(tight: str) -> None:
    """A request that one limit refuses is charged to none, wherever that limit stands, exactly."""
    app, store = full_house(tight)
    replies = [client(app).get("/v1/api/hello") for _ in range(5)]
    assert [reply.status_code for reply in replies] == [200, 200, 429, 429, 429]
    assert used(store) == dict.fromkeys(EVERYWHERE, 2)
    assert refused_by(replies[-1]) == [tight]
    assert replies[-1].headers["x-ratelimit-limit"] == "2"
    assert replies[-1].headers["retry-after"] == "43200"


@pytest.mark.parametrize("tight", ["include", "second"])
def test_on_redis_a_crowd_is_charged_for_those_that_pass(redis_server: RedisServer, tight: str) -> None:
    """Of twenty requests at once those pass that fit; buckets in Redis hold these and no others."""
    store = open_store(redis_server.url)
    app, _ = full_house(tight, store=store, key_prefix=f"crowd-{tight}", timeout=10)

    async def crowd() -> None:
        replies = await asyncio.gather(*[asgi_reply(app, "/v1/api/hello") for _ in range(20)])
        assert sorted(reply.status for reply in replies) == [200] * 2 + [429] * 18
        assert (await asgi_reply(app, "/free")).rate["x-ratelimit-remaining"] == "47"
        await store.aclose()

    asyncio.run(crowd())


def test_the_decision_in_the_scope_is_about_all_limits() -> None:
    """``request.scope["limitgate"]`` is the decision of rules first, of rules and dependencies when these have run."""
    seen: list[Any] = []

    def look(request: Request) -> None:
        seen.append(request.scope["limitgate"])

    app = one(look, RateLimit("5/minute"))
    app.get("/look", dependencies=[Depends(RateLimit("5/minute")), Depends(look)])(lambda: "seen")
    gated(app, Rule("rule", "9/minute"))
    assert statuses(app, "/hello", "/look") == [200, 200]
    assert [decision.limit for decision in seen] == [9, 5]


def test_a_refused_request_runs_nothing_that_comes_later() -> None:
    """Neither the endpoint nor dependencies behind the one that refuses are run; none at all where a rule refuses."""
    ran: list[str] = []

    def note(what: str) -> Dependency:
        return lambda: ran.append(what)

    app = one(note("before"), RateLimit("1/minute"), note("after"))
    gated(app, Rule("rule", "2/minute"))
    assert statuses(app, *["/hello"] * 2) == [200, 429]
    assert ran == ["before", "after", "before"]
    app = one(note("never"))
    gated(app, Rule("rule", "1/minute", cost=1, path="/hello"))
    assert statuses(app, *["/hello"] * 2) == [200, 429]
    assert ran[3:] == ["never"]


def test_the_cost_of_a_request() -> None:
    """``cost`` is a number or asks the request, as on rules."""
    app = one(RateLimit("9/minute", name="three", cost=3), RateLimit("9/minute", name="asks", cost=lambda r: len(r.path)))
    store = gated(app)
    assert statuses(app, *["/hello"] * 2) == [200, 429]
    assert used(store) == {"three": 3, "asks": 6}


def test_how_requests_are_counted() -> None:
    """``algorithm`` and ``align`` are for the limits of a dependency, as on rules."""
    window = RateLimit("2/day", name="window", algorithm="fixed_window", align="Europe/Berlin")
    assert window.rule.every_limit == (Limit("2/day", algorithm="fixed_window", align="Europe/Berlin"),)
    app = one(RateLimit("9/minute", name="log", algorithm="sliding_log"), window)
    gated(app)
    assert statuses(app, *["/hello"] * 3) == [200, 200, 429]
    assert refused_by(client(app).get("/hello")) == ["window"]


def test_methods() -> None:
    """A limit for some methods lets others pass uncharged."""
    app = FastAPI(dependencies=[Depends(RateLimit("1/minute", name="posts", methods=["post"]))])
    app.api_route("/hello", methods=["GET", "POST"])(lambda: "hello")
    store = gated(app)
    assert statuses(app, *["/hello"] * 2) == [200, 200]
    assert used(store) == {}
    assert statuses(app, *["/hello"] * 2, method="POST") == [200, 429]


def test_shadow_never_refuses() -> None:
    """A limit in shadow lets everything pass and says that it would not have."""
    app = FastAPI()
    limited = Depends(RateLimit("1/minute", name="shady", shadow=True))
    app.get("/hello")(lambda decision=limited: [decision.allowed, decision.shadow])
    gated(app, Rule("rule", "9/minute"))
    assert [client(app).get("/hello").json() for _ in range(2)] == [[True, False], [True, True]]


def test_asked_by_the_endpoint() -> None:
    """A limit may be called in an endpoint, too, where only some requests are to be limited; the rest is as ever."""
    it = RateLimit("1/minute", name="it")
    app = FastAPI()

    @app.get("/hello")
    async def hello(request: Request, fresh: bool = False) -> int | None:  # noqa: FBT001, FBT002
        decision = await it(request) if fresh else None
        return decision and decision.remaining

    store = gated(app, Rule("rule", "9/minute"))
    assert client(app).get("/hello?fresh=true").json() == 0
    assert statuses(app, "/hello", "/hello?fresh=true", "/hello") == [200, 429, 200]
    assert used(store) == {"rule": 3, "it": 1}


def test_asked_by_the_endpoint_without_its_parts() -> None:
    """A limit with dependencies in its key can be asked by FastAPI only, and says so."""
    it = RateLimit("1/minute", name="it", key=[current_user])
    app = FastAPI()

    @app.get("/mine")
    async def mine(request: Request) -> None:
        await it(request)

    gated(app)
    with pytest.raises(TypeError, match="it was called without current_user, expected Depends"):
        client(app).get("/mine")


# --- whom it limits ---------------------------------------------------------------------------------------------------


def read_user(x_user: Annotated[str | None, Header()] = None) -> str | None:
    return x_user


async def open_user(x_user: Annotated[str | None, Header()] = None) -> AsyncIterator[str | None]:
    yield x_user


def open_user_plainly(x_user: Annotated[str | None, Header()] = None) -> Iterator[str | None]:
    yield x_user


class HeaderUser:
    def __init__(self, x_user: Annotated[str | None, Header()] = None) -> None:
        self.id = x_user


class ReadsHeader:
    def __call__(self, x_user: Annotated[str | None, Header()] = None) -> str | None:
        return x_user

    async def method(self, x_user: Annotated[str | None, Header()] = None) -> str | None:
        return x_user


def nested_user(user: Annotated[str | None, Depends(current_user)]) -> str | None:
    return user


PARTS = {
    "async function": current_user,
    "function": read_user,
    "async generator": open_user,
    "generator": open_user_plainly,
    "class": HeaderUser,
    "object": ReadsHeader(),
    "method": ReadsHeader().method,
    "with a dependency": nested_user,
    "Depends": Depends(current_user),
    "Security": Security(read_user, scopes=["me"]),
    "Annotated": Annotated[str, Depends(current_user)],
    "Annotated class": Annotated[HeaderUser, Depends()],
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_every_kind_of_dependency_may_be_a_part_of_the_key(part: Any) -> None:
    """What a dependency gives tells the buckets apart, however it is written."""
    app = one(RateLimit("1/minute", key=[part]))
    gated(app)
    assert [statuses(app, "/hello", **as_user(name)) for name in ("ann", "bob", "ann", "bob")] == [[200], [200], [429], [429]]


@dataclasses.dataclass
class Row:
    id: Any


class Model(pydantic.BaseModel):
    id: int
    name: str = ""


class Person:
    def __init__(self, identity: str = "", *, authenticated: bool = True) -> None:
        self.identity, self.is_authenticated = identity, authenticated


@pytest.mark.parametrize(
    ("ann", "bob"),
    [
        ("ann", "bob"),
        (1, 2),
        (0, 1),
        (uuid.UUID(int=1), uuid.UUID(int=2)),
        (Row(1), Row(2)),
        (Row(0), Row(uuid.UUID(int=1))),
        (Model(id=1, name="same"), Model(id=2, name="same")),
        ({"sub": "ann", "name": "same"}, {"sub": "bob", "name": "same"}),
        (("acme", "ann"), ("acme", "bob")),
        (SimpleNamespace(email="ann@shop.example"), SimpleNamespace(email="bob@shop.example")),
        (Person("ann"), Person("bob")),
        (SimpleUser("ann"), SimpleUser("bob")),
        ("a" * 100_000, "a" * 100_001),
        ("ann\x00", "ann"),
        ("\ud800", "\ud801"),
        ("1:x,", "1:y,"),
        ("ann", None),
        (PEER, None),
        (Person("ann"), Person("ann", authenticated=False)),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_what_tells_users_apart(ann: Any, bob: Any) -> None:
    """Text, numbers, UUIDs and objects with an id each have a bucket of their own, made anew or not."""
    people = {"ann": ann, "bob": bob}

    def who(request: Request) -> Any:
        return people[request.headers["x-user"]]

    app = one(RateLimit("1/minute", key=[who]))
    gated(app)
    assert [statuses(app, "/hello", **as_user(name)) for name in ("ann", "bob", "ann", "bob")] == [[200], [200], [429], [429]]


@pytest.mark.parametrize("absent", [None, "", False, {}, Person(authenticated=False), UnauthenticatedUser()], ids=type)
def test_who_is_not_there_is_told_apart_by_address(absent: Any) -> None:
    """Where a dependency gives nobody, the client's address takes its place."""
    app = one(RateLimit("1/minute", key=[lambda: absent]))
    gated(app)
    assert [client(app, peer).get("/hello").status_code for peer in (PEER, PEER, "192.0.2.2")] == [200, 429, 200]


@pytest.mark.parametrize(
    "useless", [{"name": "ann"}, ["ann"], b"ann", 1.5, object(), Row(None), Row(""), lambda: "ann"], ids=type
)
def test_what_nobody_can_be_told_apart_by_is_a_mistake(useless: Any) -> None:
    """A dependency that returns something unusable is named, with what it returned and what was expected."""

    def payload() -> Any:
        return useless

    app = one(RateLimit("1/minute", key=[payload]))
    gated(app)
    returned = f"{payload.__qualname__} returned a {type(useless).__name__}"
    expected = f"{returned}, expected text, a number, a UUID, or an object with identity, id, pk or username"
    with pytest.raises(TypeError, match=re.escape(expected)):
        client(app).get("/hello")


def test_a_part_runs_once() -> None:
    """A dependency that the route and several limits need runs once for a request, as FastAPI has it."""
    ran: list[str] = []

    def user(x_user: Annotated[str, Header()]) -> str:
        ran.append(x_user)
        return x_user

    app = FastAPI(dependencies=[Depends(RateLimit("9/minute", name=name, key=[user])) for name in ("one", "two")])
    who = Depends(user)
    app.get("/hello")(lambda who=who: who)
    store = gated(app)
    assert client(app).get("/hello", **as_user("ann")).json() == "ann"
    assert ran == ["ann"]
    assert used(store) == {"one": 1, "two": 1}


def test_several_parts() -> None:
    """Further dependencies and parts that rules know stand beside each other, each telling apart."""
    app = one(RateLimit("1/minute", key=["ip", read_user, "header:x-team", current_user]))
    gated(app)
    asked = [("ann", "a", PEER), ("ann", "b", PEER), ("bob", "a", PEER), ("ann", "a", "192.0.2.2"), ("ann", "a", PEER)]
    replies = [client(app, ip).get("/hello", headers={"X-User": user, "X-Team": team}) for user, team, ip in asked]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 200, 429]


def test_a_user_has_one_limit_wherever_it_calls_from() -> None:
    """Where the key is a dependency alone, nothing else tells the buckets apart."""
    app = one(RateLimit("1/minute", key=[current_user]))
    gated(app)
    assert [client(app, peer).get("/hello", **as_user("ann")).status_code for peer in (PEER, "192.0.2.2")] == [200, 429]


def test_values_do_not_run_into_each_other() -> None:
    """Two dependencies whose values are the same text, cut elsewhere, are two buckets."""

    def first(cut: int) -> str:
        return "abc"[:cut]

    def second(cut: int) -> str:
        return "abc"[cut:]

    app = one(RateLimit("1/minute", key=[first, second]))
    gated(app)
    assert statuses(app, *[f"/hello?cut={cut}" for cut in (1, 2, 1)]) == [200, 200, 429]


def test_who_is_turned_away_before_is_not_charged() -> None:
    """An error in a part, such as a 401, is answered as ever; the limit itself was not reached, the rules were."""

    def user() -> None:
        raise HTTPException(401, "who are you?")

    app = one(RateLimit("1/minute", name="users", key=[user]))
    store = gated(app, Rule("rule", "9/minute"))
    assert statuses(app, *["/hello"] * 3) == [401] * 3
    assert used(store) == {"rule": 3}


def test_the_user_of_an_authentication_inside_the_gate() -> None:
    """The part ``user`` is whoever is known when the dependency runs, even where the middleware came too early for it."""

    class Backend(AuthenticationBackend):
        async def authenticate(self, connection: Any) -> Any:
            return AuthCredentials(), SimpleUser(connection.headers["x-user"])

    app = one(RateLimit("1/minute", key=["user"]))
    app.add_middleware(AuthenticationMiddleware, backend=Backend())
    gated(app, Rule("rule", "9/minute", key=["user"]))
    assert [statuses(app, "/hello", **as_user(name)) for name in ("ann", "bob", "ann", "bob")] == [[200], [200], [429], [429]]


def test_the_caller_that_identify_has_found() -> None:
    """A dependency goes by the caller that ``identify`` has named when the request came, and does not ask again."""
    asked: list[str] = []

    async def identify(request: Any) -> Caller | None:
        asked.append(request.path)
        return Caller(request.headers["x-user"], tier="paid")

    app = one(RateLimit("1/minute", key=["caller", "tier"]))
    gated(app, identify=identify)
    assert [statuses(app, "/hello", **as_user(name)) for name in ("ann", "bob", "ann", "bob")] == [[200], [200], [429], [429]]
    assert len(asked) == 4


def test_dependencies_replaced_for_a_test() -> None:
    """``dependency_overrides`` puts another user in place of the real one, or nothing in place of the limit."""
    limited = RateLimit("1/minute", key=[current_user])
    app = one(limited)
    gated(app)
    app.dependency_overrides[current_user] = lambda: "ann"
    assert [statuses(app, "/hello", **as_user(name)) for name in ("ann", "bob")] == [[200], [429]]
    app.dependency_overrides = {limited: lambda: None}
    assert statuses(app, *["/hello"] * 3) == [200] * 3


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (current_user, r"key is <function current_user.*expected a list"),
        (Depends(current_user), "expected a list"),
        (HeaderUser, "expected a list"),
        ("ip", "key: expected a list"),
        ([], "key: expected at least one entry, or omit the field"),
        (["user_id"], "key part 'user_id' is unknown"),
        ([current_user, "user_id"], "key part 'user_id' is unknown"),
        ([5], r"key\[0\]: expected text"),
        ([Annotated[str, Header()]], "not a dependency, expected Annotated"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", ascii(value))[:30],
)
def test_mistakes_in_a_key(key: Any, expected: str) -> None:
    """A key that makes no sense is told where the limit is made."""
    with pytest.raises(ConfigError, match=expected):
        RateLimit("1/minute", key=key)


@pytest.mark.parametrize(
    ("limits", "options", "expected"),
    [
        ((), {}, "no limit"),
        (("often",), {}, "expected for example '100/minute'"),
        (("5/minute",), {"cost": 6}, "cost 6 exceeds"),
        (("5/minute",), {"name": "a b"}, "name"),
        (("5/minute",), {"on_error": "sometimes"}, "on_error"),
        (("5/minute",), {"charge_if": {"status": [99]}}, "charge_if"),
        (("5/minute",), {"methods": []}, "methods"),
    ],
)
def test_mistakes_in_a_limit(limits: Any, options: Any, expected: str) -> None:
    """What a rule would not take, a dependency does not take either."""
    with pytest.raises(ConfigError, match=expected):
        RateLimit(*limits, **options)


# --- where it stands --------------------------------------------------------------------------------------------------


def test_one_limit_in_several_places_is_charged_once() -> None:
    """The same limit on app, router and route counts a request once, whatever scopes stand above it, and asked twice, too."""
    it = RateLimit("9/minute", name="it", key=[current_user])
    app, router = FastAPI(dependencies=[Depends(it)]), APIRouter(dependencies=[Depends(it)])

    def item(security: SecurityScopes, decision: Annotated[Decision | None, Depends(it)]) -> Decision | None:
        return decision if security.scopes else None

    @router.get("/hello", dependencies=[Depends(it, use_cache=False)])
    def hello(
        mine: Annotated[Decision | None, Depends(it)], theirs: Annotated[Decision | None, Security(item, scopes=["items"])]
    ) -> list[Any]:
        return [mine and mine.remaining, theirs and theirs.remaining]

    app.include_router(router, dependencies=[Security(it, scopes=["all"])])
    store = gated(app)
    assert client(app).get("/hello").json() == [8, 8]
    assert used(store) == {"it": 1}


def of_two_routes(key: list[Any]) -> APIRouter:
    """A router with a limit on all of it."""
    router = APIRouter(prefix="/things", dependencies=[Depends(RateLimit("2/minute", name="things", key=key))])
    router.get("/a/{id}")(lambda id: id)  # noqa: A006
    router.get("/b/{id}")(lambda id: id)  # noqa: A006
    return router


def test_all_routes_of_a_router_share_its_limit() -> None:
    """A limit that is given to a router is one, however many routes and prefixes it has."""
    app, router = FastAPI(), of_two_routes(["ip"])
    app.include_router(router, prefix="/v1")
    app.include_router(router, prefix="/v2")
    gated(app)
    assert statuses(app, "/v1/things/a/1", "/v2/things/b/2", "/v1/things/b/1", "/v2/things/a/1") == [200, 200, 429, 429]


def test_by_path_each_route_has_a_limit_of_its_own() -> None:
    """With the part ``path`` it goes by template: all prefixes are part of it, the ids are not."""
    app, outer, router = FastAPI(), APIRouter(prefix="/outer"), of_two_routes(["path", "ip"])
    outer.include_router(router, prefix="/{tenant}")
    app.include_router(outer, prefix="/v1")
    app.include_router(outer, prefix="/v2")
    sub = FastAPI()
    sub.include_router(outer)
    app.mount("/v3", sub)
    gated(app)
    for prefix in ("/v1/outer/x", "/v2/outer/x", "/v3/outer/x"):
        assert statuses(app, *[f"{prefix}/things/a/{number}" for number in range(3)]) == [200, 200, 429]
        assert statuses(app, f"{prefix}/things/b/1") == [200]
    assert statuses(app, "/v1/outer/other-tenant/things/a/9") == [429]


def mounted(answers: Any) -> FastAPI:
    """An application in which another one with handlers of its own is mounted, the limit inside."""
    sub = one(RateLimit("1/minute", name="sub"), exception_handlers={HTTPException: answers, RateLimited: answers})
    app = FastAPI()
    app.mount("/sub", sub)
    return app


def handled(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"my": "answer"}, 418, {"X-Mine": "1"})


async def breaks(request: Request, error: Exception) -> None:
    raise RuntimeError("my handler is broken") from error


def of_an_application(answers: Any) -> FastAPI:
    return one(RateLimit("1/minute", name="sub"), exception_handlers={HTTPException: answers, Exception: answers})


def of_starlette(answers: Any) -> Any:
    return FastAPI(routes=[Mount("/sub", app=Starlette(routes=[Mount("/", app=mounted(answers))]))])


@pytest.mark.parametrize(
    ("build", "path", "answers"),
    [
        (mounted, "/sub/hello", breaks),
        (of_an_application, "/hello", handled),
        (of_an_application, "/hello", breaks),
        (of_starlette, "/sub/sub/hello", breaks),
    ],
)
def test_the_gate_answers_where_no_handler_of_refusals_does(build: Any, path: str, answers: Any) -> None:
    """What handlers of all HTTP errors, or of all errors, answer is not sent; a handler of refusals may break."""
    app = build(answers)
    gated(app)
    assert statuses(app, path) == [200]
    refused = client(app, raise_server_exceptions=False).get(path)
    assert refused_by(refused) == ["sub"]
    assert "x-mine" not in refused.headers
    assert refused.headers["retry-after"] == "60"
    assert refused.headers["x-ratelimit-remaining"] == "0"


@pytest.mark.parametrize(("build", "path"), [(mounted, "/sub/hello"), (of_starlette, "/sub/sub/hello")])
def test_a_handler_of_refusals_answers(build: Any, path: str) -> None:
    """Also by another status, and where it belongs to an application that is mounted in the one with the gate."""
    app = build(handled)
    gated(app)
    assert statuses(app, path) == [200]
    refused = client(app).get(path)
    assert (refused.status_code, refused.json(), refused.headers["x-mine"]) == (418, {"my": "answer"}, "1")
    assert (refused.headers["retry-after"], refused.headers["x-ratelimit-remaining"]) == ("60", "0")


def test_what_a_handler_sees() -> None:
    """The error is an HTTPException with the status and Retry-After, and a RateLimited with the decision."""
    seen: list[Any] = []

    def note(request: Request, error: Any) -> JSONResponse:
        seen.append(error)
        return JSONResponse({})

    app = one(RateLimit("1/minute"), exception_handlers={HTTPException: note})
    gated(app)
    assert statuses(app, "/hello", "/hello") == [200, 429]
    assert (seen[0].status_code, seen[0].headers, seen[0].detail) == (429, {"Retry-After": "60"}, "Too Many Requests")
    assert isinstance(seen[0], RateLimited)
    assert not seen[0].decision.allowed
    assert seen[0].decision.retry_after == 60


def test_on_denied_answers() -> None:
    """The refusal of a dependency is made by ``on_denied``, which finds the decision, and has the rate fields added."""

    async def sorry(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(f"sorry, {scope['limitgate'].rule}", 420)(scope, receive, send)

    app = one(RateLimit("1/minute", name="it"))
    gated(app, on_denied=sorry)
    refused = [client(app).get("/hello") for _ in range(2)][1]
    assert (refused.status_code, refused.text) == (420, "sorry, it")
    assert (refused.headers["retry-after"], refused.headers["x-ratelimit-remaining"]) == ("60", "0")


async def passes_on(request: Request, call_next: Any) -> Any:
    response = await call_next(request)
    response.headers["X-Passed"] = "1"
    return response


@pytest.mark.parametrize("around", [True, False])
def test_other_middleware(*, around: bool) -> None:
    """Around the gate, other middleware sees the refusal; inside of it, its work on what was not sent is lost."""
    app = one(RateLimit("1/minute", name="it"))

    def others() -> None:
        app.add_middleware(BaseHTTPMiddleware, dispatch=passes_on)
        app.add_middleware(GZipMiddleware, minimum_size=1)

    if not around:
        others()
    store = gated(app, Rule("rule", "9/minute"))
    if around:
        others()
    admitted, refused = [client(app).get("/hello") for _ in range(2)]
    assert admitted.json() == {"message": "hello"}
    assert (admitted.headers["x-passed"], admitted.headers["content-encoding"]) == ("1", "gzip")
    assert admitted.headers["x-ratelimit-remaining"] == "0"
    assert refused_by(refused) == ["it"]
    assert ("x-passed" in refused.headers, "content-encoding" in refused.headers) == (around, around)
    assert used(store) == {"it": 1, "rule": 1}


def test_open_dependencies_are_closed_when_a_later_one_refuses() -> None:
    """Dependencies that yield are left in turn, and see why: the error is raised where they stand."""
    seen: list[Any] = []

    async def session() -> AsyncIterator[str]:
        seen.append("open")
        try:
            yield "session"
        except HTTPException as error:
            seen.append(error.status_code)
            raise
        finally:
            seen.append("closed")

    def user(session: Annotated[str, Depends(session)]) -> Iterator[str]:
        seen.append("user")
        yield "ann"
        seen.append("not reached when refused")

    app = one(RateLimit("1/minute", key=[user]))
    gated(app)
    assert statuses(app, "/hello") == [200]
    assert seen == ["open", "user", "not reached when refused", "closed"]
    del seen[:]
    assert statuses(app, "/hello") == [429]
    assert seen == ["open", "user", 429, "closed"]


def test_a_dependency_that_swallows_the_refusal() -> None:
    """One that yields and keeps the error to itself, which FastAPI forbids, does not keep the refusal from the client."""

    def swallows() -> Iterator[None]:
        with contextlib.suppress(HTTPException):
            yield

    app = one(swallows, RateLimit("1/minute", name="it"))
    gated(app)
    assert statuses(app, "/hello") == [200]
    assert refused_by(client(app, raise_server_exceptions=False).get("/hello")) == ["it"]


# --- WebSockets -------------------------------------------------------------------------------------------------------


def chat() -> FastAPI:
    """An application with a WebSocket that has a limit for each user, and one on its router."""
    app, router = FastAPI(), APIRouter(dependencies=[Depends(RateLimit("9/minute", name="router"))])

    @router.websocket("/chat")
    async def endpoint(
        socket: WebSocket,
        decision: Annotated[Decision | None, Depends(RateLimit("1/minute", name="chat", key=[current_user]))],
    ) -> None:
        await socket.accept()
        await socket.send_text(str(decision and decision.remaining))
        await socket.close()

    app.include_router(router, prefix="/api")
    return app


def test_a_websocket_is_refused_before_it_is_accepted() -> None:
    """With the whole answer where the server can send it, else by close code 1013; the other limits have their share back."""
    app = chat()
    store = gated(app, Rule("rule", "9/minute"))

    def ask(*, denial: bool, user: str = "ann") -> Any:
        return asyncio.run(handshake(app, "/api/chat", {"X-User": user}, denial=denial))

    accepted = ask(denial=True)
    assert (accepted.status, accepted.rate["x-ratelimit-remaining"]) == (101, "0")
    refused = ask(denial=True)
    assert (refused.status, refused.json()["violated-policies"], refused.wait) == (429, ["chat"], 60)
    assert ask(denial=False).status == 1013
    assert ask(denial=False, user="bob").status == 101
    assert used(store) == {"chat": 2, "router": 2, "rule": 2}


def test_a_websocket_through_fastapis_client() -> None:
    """The same with FastAPI's own client."""
    app = chat()
    gated(app)
    with client(app).websocket_connect("/api/chat") as socket:
        assert socket.receive_text() == "0"
    with pytest.raises(Denied) as raised, client(app).websocket_connect("/api/chat"):
        pass
    assert refused_by(raised.value) == ["chat"]


def test_messages_are_counted_beside_a_dependency() -> None:
    """``per="message"`` on the endpoint counts what is sent, while the dependency has counted the handshake."""
    app = FastAPI()

    @app.websocket("/echo")
    @limit("2/minute", name="messages", per="message")
    async def echo(socket: WebSocket, decision: Annotated[Any, Depends(RateLimit("9/minute", name="handshakes"))]) -> None:
        await socket.accept()
        async for text in socket.iter_text():
            await socket.send_text(text)

    store = gated(app)
    with client(app).websocket_connect("/echo") as socket:
        for text in ("one", "two"):
            socket.send_text(text)
            assert socket.receive_text() == text
        socket.send_text("three")
        assert socket.receive() == {"type": "websocket.close", "code": 1013, "reason": "Too Many Requests"}
    assert used(store) == {"handshakes": 1, "messages": 2}


# --- what is not counted ----------------------------------------------------------------------------------------------


class Greeting(pydantic.BaseModel):
    words: str


def greets() -> tuple[FastAPI, MemoryStore]:
    app = FastAPI()

    @app.post("/greet", dependencies=[Depends(RateLimit("9/minute", name="dependency"))])
    async def greet(greeting: Greeting) -> Greeting:
        return greeting

    return app, gated(app, Rule("rule", "9/minute"))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reached"),
    [
        ("POST", "/greet", b'{"words": "hello"}', 200, True),
        ("POST", "/greet", b'{"words": 5}', 422, True),
        ("POST", "/greet", b"{nonsense", 422, False),
        ("GET", "/greet", b"", 405, False),
        ("POST", "/nowhere", b"{}", 404, False),
        ("POST", "/greet/", b"{}", 307, False),
    ],
)
def test_what_fastapi_turns_away_itself(method: str, path: str, body: bytes, status: int, *, reached: bool) -> None:
    """Where FastAPI answers before it runs dependencies, rules have counted and a dependency has not."""
    app, store = greets()
    headers = {"Content-Type": "application/json"}
    reply = client(app, follow_redirects=False).request(method, path, content=body, headers=headers)
    assert reply.status_code == status
    assert used(store) == ({"rule": 1, "dependency": 1} if reached else {"rule": 1})
    assert reply.headers["x-ratelimit-remaining"] == "8"


def test_preflights_are_not_counted() -> None:
    """A browser's question before the request proper costs nothing, in dependencies as in rules."""
    it = Depends(RateLimit("1/minute"))
    app = FastAPI(dependencies=[it])
    app.options("/hello")(lambda decision=it: str(decision))
    store = gated(app, Rule("rule", "1/minute"))
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "GET"}
    assert client(app).options("/hello", headers=headers).json() == "None"
    assert used(store) == {}


def test_a_body_is_read_once() -> None:
    """The limit leaves the body alone: the route gets all of it, in as many pieces as were sent, and nothing is asked twice."""
    app = FastAPI()

    @app.post("/size", dependencies=[Depends(RateLimit("9/minute", key=[current_user]))])
    async def size(request: Request) -> int:
        return sum([len(chunk) async for chunk in request.stream()])

    gated(app, Rule("rule", "9/minute"))
    pieces = [{"type": "http.request", "body": b"x" * 1000, "more_body": number < 2} for number in range(3)]
    wire = asyncio.run(Wire(*pieces).call(app, http_scope("/size", "POST")))
    assert (wire.reply().body, wire.received) == (b"3000", 3)


def test_exempt_requests_are_not_counted() -> None:
    """What a rule or the decorator exempts, dependencies do not count either: there is no decision."""
    it = Depends(RateLimit("1/minute"))
    app = FastAPI(dependencies=[it])
    app.get("/healthz")(lambda decision=it: str(decision))
    app.get("/ping")(exempt(lambda decision=it: str(decision)))
    store = gated(app, Rule("health", path="/healthz", exempt=True), Rule("rule", "9/minute"))
    assert [client(app).get(path).json() for path in ("/healthz", "/ping")] == ["None", "None"]
    assert used(store) == {}


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_without_a_gate() -> None:
    """A limit without the middleware is a mistake that is told, not a limit that is none."""
    app = one(RateLimit("1/minute", name="it"))
    with pytest.raises(ConfigError, match=r"it is limited, but no LimitGate has checked.*add_middleware\(LimitGate"):
        client(app).get("/hello")


@pytest.mark.parametrize("with_gate", [True, False])
def test_switched_off(monkeypatch: pytest.MonkeyPatch, *, with_gate: bool) -> None:
    """``LIMITGATE_ENABLED=false`` switches dependencies off, with the middleware and without."""
    monkeypatch.setenv("LIMITGATE_ENABLED", "false")
    app, it = FastAPI(), Depends(RateLimit("1/minute"))
    app.get("/hello")(lambda decision=it: str(decision))
    if with_gate:
        gated(app, Rule("rule", "1/minute"))
    replies = [client(app).get("/hello") for _ in range(3)]
    assert [(reply.status_code, reply.json()) for reply in replies] == [(200, "None")] * 3
    assert not any("ratelimit" in name for reply in replies for name in reply.headers)


class Failing(MemoryStore):
    """A store that stops answering when it is told to."""

    down = False

    async def aspend(self, plan: Any, timeout: float = 0) -> Any:
        if self.down:
            raise StoreError("out of order")
        return self.spend(plan)


@pytest.mark.parametrize(
    ("policy", "replies"), [("open", [200, 200, 200]), ("closed", [503, 503, 503]), ("local", [200, 429, 429])]
)
@pytest.mark.parametrize("own", [True, False])
def test_when_the_store_fails(policy: Any, replies: list[int], *, own: bool) -> None:
    """``on_error`` decides, that of the limit or that of the gate, as for rules."""
    store = Failing(Clock())
    app = one(RateLimit("1/minute", name="it", on_error=policy if own else None))
    gated(app, store=store, on_error="open" if own else policy)
    store.down = True
    found = [client(app).get("/hello") for _ in range(3)]
    assert [reply.status_code for reply in found] == replies
    if policy == "closed":
        assert found[0].json()["type"].endswith("#temporary-reduced-capacity")
        assert found[0].headers["retry-after"] == "1"
    assert ("x-ratelimit-limit" in found[0].headers) is (policy == "local")


@pytest.mark.parametrize(
    ("policy", "status", "charged"), [("open", 200, {"rule": 2}), ("closed", 503, {"rule": 2}), ("local", 429, {"rule": 2})]
)
def test_when_the_store_fails_between_rule_and_dependency(policy: Any, status: int, charged: Any) -> None:
    """What was decided while the store answered stands; what it can no longer be told to give back is counted as such."""
    store = Failing(Clock())

    def fails() -> None:
        store.down = True

    app = one(fails, RateLimit("1/minute", name="it", on_error=policy))
    gated(app, Rule("rule", "9/minute"), store=store)
    for _ in range(2):
        store.down = False
        reply = client(app).get("/hello")
    assert reply.status_code == status
    assert used(store) == charged


def test_with_redis_away() -> None:
    """On a server that is not there the limit of this process holds, and everybody is answered."""
    app = one(RateLimit("2/minute", name="it", on_error="local"))
    app.add_middleware(LimitGate, rules=[Rule("rule", "9/minute")], store="redis://127.0.0.1:1")
    with client(app) as it:
        assert [it.get("/hello").status_code for _ in range(4)] == [200, 200, 429, 429]


def test_two_gates() -> None:
    """The inner one of two gates weighs the dependency and gives back what it took itself; the outer has its own count."""
    app = one(RateLimit("1/minute", name="it"))
    inner = gated(app, Rule("inner", "9/minute"))
    outer = gated(app, Rule("outer", "9/minute"), headers=[])
    assert statuses(app, "/hello", "/hello") == [200, 429]
    assert used(inner) == {"inner": 1, "it": 1}
    assert used(outer) == {"outer": 2}


# --- outcome and cost -------------------------------------------------------------------------------------------------


def test_only_some_outcomes_are_charged() -> None:
    """``charge_if`` counts the statuses that it names, those of dependencies and validation among them."""

    def user(password: str) -> str:
        if password != "right":
            raise HTTPException(401)
        return "ann"

    app = FastAPI()
    failures = RateLimit("2/minute", name="failures", charge_if={"status": [401, 422]})
    app.post("/login", dependencies=[Depends(failures), Depends(user)])(lambda: "welcome")
    store = gated(app)
    right, wrong = "/login?password=right", "/login?password=wrong"
    assert statuses(app, right, right, right, wrong, right, method="POST") == [200, 200, 200, 401, 200]
    assert used(store) == {"failures": 1}
    assert statuses(app, "/login", right, method="POST") == [422, 429]


def test_a_cost_that_is_known_afterwards() -> None:
    """The decision that the dependency gives takes the real cost, for the rule that has one."""
    app = FastAPI()
    tokens = RateLimit("1000/minute", name="tokens", key=[current_user], cost=10)

    @app.get("/complete")
    async def complete(used: int, decision: Annotated[Decision, Depends(tokens)]) -> int:
        decision.settle(used)
        return decision.remaining

    store = gated(app, Rule("requests", "9/minute"))
    assert client(app).get("/complete?used=17").json() == 8
    assert used(store) == {"requests": 1, "tokens": 17}
    client(app).get("/complete?used=3")
    assert used(store) == {"requests": 2, "tokens": 20}


# --- names ------------------------------------------------------------------------------------------------------------


def test_default_names() -> None:
    """A limit without a name is called by what it limits and digits of its module; the same again is numbered, others stay."""
    shop = {"__name__": "shop.limits", "RateLimit": RateLimit, "user": current_user}
    first = eval('RateLimit("7/minute burst 3")', shop).rule.name
    other = eval('RateLimit("7 per 7 seconds", qpd=77)', shop).rule.name
    again = eval('RateLimit("7/minute burst 3", key=["ip", user])', shop).rule.name
    assert re.fullmatch(r"7-per-minute-burst-3-[0-9a-f]{6}", first)
    assert re.fullmatch(r"7-per-7-seconds.77-per-day-[0-9a-f]{6}", other)
    assert again == f"{first}-2"
    elsewhere = eval('RateLimit("7/minute burst 3")', shop | {"__name__": "shop.others"}).rule.name
    assert elsewhere.startswith("7-per-minute-burst-3-")
    assert elsewhere[:27] != first


def test_names_are_those_of_the_policies() -> None:
    """A name that was given is what a refusal says; limits of one name share their buckets."""
    app = FastAPI()
    for path in ("/a", "/b"):
        app.get(path, dependencies=[Depends(RateLimit("1/minute", name="shared"))])(lambda: "hello")
    gated(app)
    assert statuses(app, "/a") == [200]
    assert refused_by(client(app).get("/b")) == ["shared"]


def test_a_dependency_that_is_named_like_a_rule() -> None:
    """Each has a policy of its own in the response."""
    app = FastAPI()
    app.get("/hello", dependencies=[Depends(RateLimit("7/minute", name="same"))])(lambda: "hello")
    gated(app, Rule("same", "9/minute"), headers=["draft-11"])
    assert client(app).get("/hello").headers["ratelimit-policy"] == '"same";q=9;w=60, "same-2";q=7;w=60'


def test_a_mounted_application_with_a_gate_of_its_own() -> None:
    """Its dependencies are weighed by its own gate; they give, and responses tell, what both gates have decided."""
    app, mounted, given = FastAPI(), FastAPI(), []

    @mounted.get("/hello")
    def hello(request: Request, decision: Annotated[Any, Depends(RateLimit("2/minute", name="late"))]) -> None:
        given.append(decision)
        assert request.scope["limitgate"] == decision

    app.mount("/in", mounted)
    gated(mounted, Rule("inner", "9/minute"), headers=["draft-11"])
    store = gated(app, Rule("outer", "9/minute"), headers=["draft-11"])
    replies = [client(app).get("/in/hello") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[1].headers.get_list("ratelimit") == ['"outer";r=7;t=14, "inner";r=7;t=14, "late";r=0;t=60']
    assert replies[2].headers.get_list("ratelimit") == ['"outer";r=6;t=20, "late";r=0;t=30']
    assert replies[2].headers.get_list("retry-after") == ["30"]
    assert refused_by(replies[2]) == ["late"]
    assert [window.rule for window in given[0].windows] == ["outer", "inner", "late"]
    assert used(store) == {"outer": 3}


def test_a_name_too_long() -> None:
    """However much is limited, the name that is made of it is one that a limit may have."""
    limits = [f"{count}/minute" for count in range(1, 60)]
    assert len(RateLimit(*limits).rule.name) <= 64


def test_a_limit_is_made_once() -> None:
    """One that were made for each request would limit nothing, each having a bucket of its own; so it is a mistake."""
    app = FastAPI()

    @app.get("/hello")
    async def hello(request: Request) -> None:
        await RateLimit("1/hour")(request)

    gated(app)
    with pytest.raises(ConfigError, match="during a request, expected one for all requests"):
        client(app).get("/hello")


@dataclasses.dataclass
class Member:
    """Somebody whom an application has looked up."""

    id: str


def tenant(x_tenant: Annotated[str, Header()]) -> str:
    return x_tenant


def member(x_tenant: Annotated[str, Header()]) -> Member:
    return Member(x_tenant)


@pytest.mark.parametrize(
    ("part", "options", "opened"),
    [
        (tenant, {}, 3 + 1),
        (tenant, {"new_buckets": 0}, 9),
        (tenant, {"trusted_proxies": [PEER]}, 9),
        (tenant, {"identify": lambda _: Caller("gateway")}, 9),
        (member, {}, 9),
    ],
    ids=["text", "any number", "trusted", "identified", "object"],
)
def test_what_a_dependency_takes_from_the_client_is_capped(part: Any, options: dict[str, Any], opened: int) -> None:
    """By text that a dependency gives, a source opens no more buckets than by a header; by people, any number."""
    app = FastAPI(dependencies=[Depends(RateLimit("9/day", name="api", key=[part]))])
    app.get("/")(lambda: "hello")
    store = gated(app, **{"new_buckets": 4, **options})
    for number in range(9):
        assert client(app).get("/", headers={"x-tenant": f"t{number}"}).status_code == 200
    assert len(store) == opened


def test_a_limit_among_dependencies_by_itself_is_told_what_is_missing() -> None:
    """As an `AttributeError`, since it has none of the attributes of ``Depends`` for whoever looks at it otherwise."""
    with pytest.raises(AttributeError, match=r"itself, expected Depends\(RateLimit\(\.\.\.\)\)"):
        FastAPI().get("/", dependencies=[RateLimit("5/minute")])(lambda: "hello")  # type: ignore[list-item]
    assert not hasattr(RateLimit("5/minute"), "dependency")
