"""`LimitGateMiddleware` in a Django project: under WSGI and under ASGI, each in threads and on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import io
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.exceptions import PermissionDenied
from django.http import FileResponse, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse, StreamingHttpResponse
from django.template.response import TemplateResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.urls import path
from django.views import View

from limitgate import Caller, ConfigError, LimitGate, LimitGateWSGI, MemoryStore, Rule, StoreError, limit
from limitgate.django import LimitGateMiddleware
from limitgate.stores import open_store, open_sync_store
from tests.support import django_app
from tests.support.clock import Clock
from tests.support.django_app import CHANGING, WAYS, Changing, Project, Way, hello, rate
from tests.support.doors import PATIENCE, WSGISite, threaded_wsgi, uvicorn_process
from tests.support.redis_server import RedisServer
from tests.support.versions import needs

Open = Callable[..., Project]
LIMITED = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"]
HELLO = path("hello", hello)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def project(way: Way) -> Iterator[Open]:
    """Opens projects whose requests come one way."""
    with contextlib.ExitStack() as opened:
        yield lambda *patterns, **options: opened.enter_context(way.project(*patterns, **options))


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Any], object]], None]]:
    """Tells the middleware before the gate what to do to each request."""
    return lambda change: monkeypatch.setattr(Changing, "change", staticmethod(change))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_a_refusal_is_as_everywhere(project: Open, method: str) -> None:
    """Status, fields and body of a refusal are those of the other doors and nothing else, ``Retry-After`` among them."""
    rules = [Rule("api", "2/minute burst 1", "1000/day")]
    secret = "one key for all ids"
    it = project(HELLO, rules=rules, store=MemoryStore(Clock()), secret=secret)
    other = WSGISite(*rules, store=MemoryStore(Clock()), secret=secret)
    here = {"method": method, "peer": "127.0.0.1"}
    assert [it.ask("/hello", method).status_code, other.ask(**here).status] == [200, 200]
    refused, told = it.ask("/hello", method), other.ask(**here)
    assert (refused.status_code, refused.reason_phrase) == (429, "Too Many Requests")
    assert refused.body == told.body
    assert (refused.body == b"") is (method == "HEAD")
    assert {name.lower(): value for name, value in refused.items()} == dict(told.headers)
    assert told.wait == 30


def test_who_waits_as_told_gets_through(project: Open) -> None:
    """``Retry-After`` is there and enough: a second earlier is refused, then admitted."""
    clock = Clock()
    it = project(HELLO, rules=[Rule("api", "1 per 90 seconds")], store=MemoryStore(clock))
    assert it.statuses("/hello", "/hello") == [200, 429]
    wait = int(it.ask("/hello")["Retry-After"])
    clock.advance(wait - 1)
    assert it.statuses("/hello") == [429]
    clock.advance(1)
    assert it.statuses("/hello") == [200]


def test_several_limits_all_or_nothing(project: Open) -> None:
    """Several rules and windows decide together: what one refuses is charged to none of them."""
    clock = Clock()
    rules = [Rule("burst", "1/second"), Rule("day", "3/day"), Rule("posts", "9/day", methods=["POST"])]
    it = project(HELLO, rules=rules, store=MemoryStore(clock))
    found = []
    for _ in range(3):
        found.append(it.statuses(*["/hello"] * 4))
        clock.advance(1)
    assert found == [[200, 429, 429, 429]] * 3
    assert it.ask("/hello").json()["violated-policies"] == ["day"]
    assert it.ask("/hello", "POST").json()["violated-policies"] == ["day"]


def test_a_view_is_not_run_when_refused(project: Open) -> None:
    """Neither the view nor the middleware behind the gate sees a refused request."""
    ran = []
    it = project(path("", lambda request: ran.append(request) or HttpResponse()), rules=[Rule("api", "1/day")])
    assert it.statuses("/", "/", "/") == [200, 429, 429]
    assert len(ran) == 1


# --- on_denied --------------------------------------------------------------------------------------------------------


def denied(request: Any) -> HttpResponse:
    return HttpResponse(f"calm down, {request.limitgate.rule}", status=420)


async def adenied(request: Any) -> HttpResponse:
    await asyncio.sleep(0)
    return denied(request)


class Denied(View):
    async def get(self, request: Any) -> HttpResponse:
        return denied(request)


def denied_by_template(request: Any) -> TemplateResponse:
    return TemplateResponse(request, "hello.html", {"name": "calm down, api"}, status=420)


async def adenied_by_template(request: Any) -> TemplateResponse:
    return denied_by_template(request)


@pytest.mark.parametrize(
    "view",
    [denied, adenied, Denied.as_view(), denied_by_template, adenied_by_template, f"{__name__}.denied", f"{__name__}:adenied"],
    ids=lambda view: getattr(view, "__name__", view),
)
def test_on_denied_is_a_view(project: Open, view: Any) -> None:
    """A view of whatever kind, or its name, makes the refusal; it gets the rate fields, and ``Retry-After`` if it set none."""
    it = project(HELLO, rules=[Rule("api", "1/minute")], on_denied=view)
    admitted, refused = it.ask("/hello"), it.ask("/hello")
    assert (admitted.status_code, admitted.body) == (200, b"hello")
    assert refused.status_code == 420
    assert refused.body.endswith(b"calm down, api")
    assert refused["Retry-After"] == "60"
    assert list(rate(refused)) == LIMITED


def test_on_denied_may_say_when_to_come_back(project: Open) -> None:
    """A ``Retry-After`` of its own stays."""
    it = project(
        HELLO, rules=[Rule("api", "1/minute")], on_denied=lambda _: HttpResponse(status=429, headers={"retry-after": "99"})
    )
    it.ask("/hello")
    assert it.ask("/hello")["Retry-After"] == "99"


def test_on_denied_may_raise(project: Open) -> None:
    """What it raises becomes the response that Django makes of it."""

    def forbid(request: Any) -> HttpResponse:
        raise PermissionDenied

    it = project(HELLO, rules=[Rule("api", "1/minute")], on_denied=forbid)
    assert it.statuses("/hello", "/hello") == [200, 403]


def test_on_denied_is_not_asked_about_a_503(project: Open) -> None:
    """Where the store fails and the rule is closed, the answer is the 503 of everywhere."""
    it = project(HELLO, rules=[Rule("api", "1/day")], store=Broken(), on_error="closed", on_denied=denied)
    response = it.ask("/hello")
    assert (response.status_code, response["Retry-After"], rate(response)) == (503, "1", {})
    assert response.json()["type"].endswith("#temporary-reduced-capacity")


# --- fields on every response -----------------------------------------------------------------------------------------


async def words() -> AsyncIterator[bytes]:
    for word in (b"one ", b"two"):
        yield word


def failing(request: Any) -> HttpResponse:
    raise ValueError("the view's own")


RESPONSES: dict[str, tuple[Callable[[Any], Any], int, bytes]] = {
    "plain": (hello, 200, b"hello"),
    "json": (lambda _: JsonResponse({"a": 1}), 200, b'{"a": 1}'),
    "list": (lambda _: JsonResponse([1], safe=False), 200, b"[1]"),
    "stream": (lambda _: StreamingHttpResponse([b"one ", b"two"]), 200, b"one two"),
    "file": (lambda _: FileResponse(io.BytesIO(b"file")), 200, b"file"),
    "template": (lambda request: TemplateResponse(request, "hello.html", {"name": "you"}), 200, b"hello you"),
    "redirect": (lambda _: HttpResponseRedirect("/elsewhere"), 302, b""),
    "forbidden": (lambda _: (_ for _ in ()).throw(PermissionDenied()), 403, b""),
    "error": (failing, 500, b""),
    "own fields": (lambda _: HttpResponse("x", headers={"X-RateLimit-Limit": "mine", "X-Own": "1"}), 200, b"x"),
}


@pytest.mark.parametrize("kind", RESPONSES)
def test_every_response_has_the_fields(project: Open, kind: str) -> None:
    """Whatever a view returns or raises goes out with the rate fields, each of them once, and otherwise as it was."""
    view, status, body = RESPONSES[kind]
    it = project(path("it", view), rules=[Rule("api", "9/minute")], headers=["x-ratelimit", "draft-11"])
    it.client.raise_request_exception = False
    response = it.ask("/it")
    assert response.status_code == status
    assert body in response.body
    assert list(rate(response)) == [*LIMITED, "ratelimit-policy", "ratelimit"]
    assert (rate(response)["x-ratelimit-limit"], rate(response)["ratelimit"]) == ("9", '"api";r=8;t=7')
    assert response.get("X-Own") == ("1" if kind == "own fields" else None)


def test_an_async_stream_has_the_fields() -> None:
    """Under ASGI an asynchronous stream is passed on as it is, with the fields."""
    with WAYS["asgi"].project(path("it", lambda _: StreamingHttpResponse(words())), rules=[Rule("api", "9/minute")]) as it:
        response = it.ask("/it")
    assert response.is_async
    assert response.body == b"one two"
    assert rate(response)["x-ratelimit-remaining"] == "8"


def test_a_path_that_does_not_exist_is_limited(project: Open) -> None:
    """A 404 counts, and has the fields."""
    it = project(HELLO, rules=[Rule("api", "2/minute")])
    assert it.statuses("/nowhere", "/else", "/hello") == [404, 404, 429]


# --- the decision -----------------------------------------------------------------------------------------------------


def decisions(request: Any) -> HttpResponse:
    found = [request.limitgate, (request.scope if hasattr(request, "scope") else request.environ)["limitgate"]]
    return JsonResponse([decision and decision.remaining for decision in found], safe=False)


def test_the_decision_is_on_the_request(project: Open) -> None:
    """A view finds it at ``request.limitgate``, and where it is without Django; None where no rule applies."""
    it = project(path("api/x", decisions), path("free", decisions), rules=[Rule("api", "9/minute", path="/api/**")])
    assert it.ask("/api/x").json() == [8, 8]
    free = it.ask("/free")
    assert (free.json(), rate(free)) == ([None, None], {})


def test_the_servers_scope_is_left_alone(project: Open) -> None:
    """The decision goes into a scope of the request's own, whichever mode the middleware was made for."""

    async def view(request: Any) -> HttpResponse:
        return hello(request)

    project(rules=[Rule("api", "9/minute")])
    request = AsyncRequestFactory().get("/hello")
    scope = request.scope
    assert rate(asyncio.run(LimitGateMiddleware(view)(request)))["x-ratelimit-remaining"] == "8"
    assert request.scope["limitgate"] is request.limitgate
    assert "limitgate" not in scope


@pytest.mark.parametrize("factory", [RequestFactory().get, AsyncRequestFactory().get, lambda _: HttpRequest()])
def test_any_request_of_djangos(factory: Callable[[str], Any]) -> None:
    """A middleware in threads takes requests of either handler, and bare ones."""
    with WAYS["wsgi"].project(rules=[Rule("api", "1/minute", key=["ip", "host", "header:x-a", "user", "method"])]):
        gate = LimitGateMiddleware(hello)
        assert [gate(factory("/hello")).status_code for _ in range(2)] == [200, 429]


# --- stores -----------------------------------------------------------------------------------------------------------


class Broken:
    """A store that is down."""

    def spend(self, plan: Any, timeout: float) -> Any:
        raise StoreError("down")

    async def aspend(self, plan: Any, timeout: float) -> Any:
        raise StoreError("down")

    def close(self) -> None:
        """Nothing to let go of."""

    async def aclose(self) -> None:
        """Nothing to let go of."""


class Watched(MemoryStore):
    """Keeps whether it was asked as a thread or an event loop should ask."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.asked: list[str] = []

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise AssertionError("a sync call in an event loop")
        self.asked.append("spend")
        return super().spend(plan, timeout)

    async def aspend(self, plan: Any, timeout: float = 0) -> Any:
        self.asked.append("aspend")
        return await asyncio.to_thread(super().spend, plan, timeout)


async def ahello(request: Any) -> HttpResponse:
    await asyncio.sleep(0)
    return hello(request)


def test_no_sync_call_in_an_event_loop(way: Way, project: Open) -> None:
    """Plain and async views work each way, and the store is asked the way that fits: never by a sync call in an event loop."""
    store = Watched()
    limited = [path("plain", limit("2/day")(hello)), path("async", limit("2/day")(ahello))]
    it = project(*limited, rules=[Rule("api", "9/day")], store=store)
    assert it.statuses(*["/plain", "/async"] * 3) == [200, 200, 200, 200, 429, 429]
    assert store.asked == ["aspend" if way.awaits else "spend"] * 6


@pytest.mark.parametrize(("on_error", "statuses"), [("open", [200] * 3), ("closed", [503] * 3), ("local", [200, 429, 429])])
def test_redis_is_down(project: Open, on_error: str, statuses: list[int]) -> None:
    """While nobody listens at the store's address ``on_error`` decides: ``open`` lets requests pass, without the fields."""
    it = project(HELLO, rules=[Rule("api", "1/day")], store="redis://127.0.0.1:1/0", on_error=on_error, timeout=5)
    found = [it.ask("/hello") for _ in range(3)]
    assert [response.status_code for response in found] == statuses
    assert [bool(rate(response)) for response in found] == [on_error == "local"] * 3


def test_real_redis(project: Open, way: Way, redis_server: RedisServer) -> None:
    """On a real Redis each way counts, exactly."""
    store: Any = (open_store if way.awaits else open_sync_store)(redis_server.url)
    options = {"store": store, "key_prefix": uuid.uuid4().hex, "timeout": 10, "on_error": "closed"}
    it = project(HELLO, rules=[Rule("api", "3/day")], **options)
    assert it.statuses(*["/hello"] * 5) == [200, 200, 200, 429, 429]
    if not way.awaits:  # else each event loop has closed its connection
        store.close()


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_in_upper_and_lower_case(project: Open) -> None:
    """Options have the names of `Settings`, in whichever case."""
    options = {"RULES": [Rule("api", "9/minute")], "store": MemoryStore(Clock()), "HEADERS": ["draft-11"]}
    it = project(HELLO, LIMITGATE=options)
    assert rate(it.ask("/hello")) == {"ratelimit-policy": '"api";q=9;w=60', "ratelimit": '"api";r=8;t=7'}


@pytest.mark.parametrize("folder", [str, Path])
def test_rules_from_a_folder(project: Open, tmp_path: Path, folder: type) -> None:
    """``RULES`` is a path in either way of writing it."""
    (tmp_path / "default.yaml").write_text("rules: [{name: api, qpm: 2}]")
    assert rate(project(HELLO, LIMITGATE={"RULES": folder(tmp_path)}).ask("/hello"))["x-ratelimit-limit"] == "2"


@pytest.mark.parametrize("given", [None, {}])
def test_what_is_missing_comes_from_the_environment(
    project: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    """Options that ``LIMITGATE`` does not have are those of ``LIMITGATE_*``, as everywhere."""
    (tmp_path / "rules.yaml").write_text("rules: [{name: api, qpm: 2}]")
    monkeypatch.setenv("LIMITGATE_RULES", str(tmp_path / "rules.yaml"))
    monkeypatch.setenv("LIMITGATE_HEADERS", "draft-11")
    assert rate(project(HELLO, LIMITGATE=given).ask("/hello"))["ratelimit-policy"] == '"api";q=2;w=60'


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["rules"], "LIMITGATE is a list, expected a dict"),
        ({"RULES": [], "LIMITS": 3}, "unknown option 'LIMITS', did you mean 'rules'. expected one of api_key_header"),
        ({"RULES": [], 7: 3}, "unknown option 7"),
        ({"RULES": [], "rules": []}, "'rules' is set twice"),
        ({"RULES": [], "TIMEOUT": -1}, "timeout: expected"),
        ({"RULES": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({}, "rules are missing"),
        ({"RULES": [], "STORE": "postgres://"}, "store"),
        ({"RULES": [], "STORE": 5}, "store"),
        ({"RULES": [], "ON_DENIED": "no.such.module.view"}, "on_denied"),
    ],
    ids=str,
)
def test_mistakes_are_told_at_the_start(way: Way, given: Any, told: str) -> None:
    """A mistake in ``LIMITGATE`` is a `ConfigError` when Django loads its middleware."""
    with way.project(HELLO, LIMITGATE=given) as it, pytest.raises(ConfigError, match=told):
        it.ask("/hello")


def test_switched_off(project: Open) -> None:
    """With ``ENABLED`` false nothing is limited, rules need not be there, and decorated views run."""
    it = project(path("hello", limit("1/day")(hello)), path("d", decisions), LIMITGATE={"ENABLED": False})
    assert it.statuses("/hello", "/hello") == [200, 200]
    assert rate(it.ask("/hello")) == {}
    assert it.ask("/d").json() == [None, None]


# --- what the gate sees -----------------------------------------------------------------------------------------------


def test_rules_match_what_django_routes(way: Way) -> None:
    """Patterns match the decoded path, in any script."""
    rules = [Rule("coffee", "1/day", path="/café"), Rule("japan", "1/day", path="/日本/{id}")]
    with way.project(path("café", hello), path("日本/<int:id>", lambda request, **_: hello(request)), rules=rules):
        ask = way.handled()
        paths = ["/caf%C3%A9", "/caf%C3%A9", "/%E6%97%A5%E6%9C%AC/1", "/%E6%97%A5%E6%9C%AC/2"]
        assert [ask(each) for each in paths] == [200, 429, 200, 429]


def test_below_a_mount_point(way: Way) -> None:
    """Patterns match below ``SCRIPT_NAME`` or ``root_path``."""
    with way.project(HELLO, rules=[Rule("api", "1/day", path="/hello")]):
        ask = way.handled()
        assert [ask("/hello", mount="/v1") for _ in range(2)] == [200, 429]


def test_force_script_name(way: Way) -> None:
    """The same where the settings name the mount point, which Django's ASGI handler goes by since 5.0."""
    if way.handler != "wsgi":
        needs("django", "5.0")
    with way.project(HELLO, rules=[Rule("api", "1/day", path="/hello")], FORCE_SCRIPT_NAME="/v1"):
        ask = way.handled()
        where = "/hello" if way.handler == "wsgi" else "/v1/hello"
        assert [ask(where), ask(where)] == [200, 429]


def test_what_earlier_middleware_has_changed(project: Open, changing: Any) -> None:
    """Method, path and address are those that the middleware before the gate has left, as Django will go by them."""

    def change(request: Any) -> None:
        request.method = request.headers.get("X-Method", request.method)
        request.path_info = request.path_info.replace("/old", "/hello")
        request.META["REMOTE_ADDR"] = request.headers.get("X-Real", "192.0.2.1")

    changing(change)
    it = project(HELLO, rules=[Rule("api", "1/day", path="/hello", methods=["PUT"])], before=(CHANGING,))
    assert it.statuses("/old", "/hello") == [200, 200]
    put = {"X-Method": "PUT"}
    assert [it.ask("/old", headers=put).status_code for _ in range(2)] == [200, 429]
    assert it.ask("/old", headers={**put, "X-Real": "192.0.2.7"}).status_code == 200


def test_headers_and_proxies(project: Open) -> None:
    """Headers are read by name, the client's address behind trusted proxies only."""
    rules = [Rule("api", "1/day", key=["header:x-who", "ip"])]
    it = project(HELLO, rules=rules, trusted_proxies=["127.0.0.1"])
    sent = [{"X-Who": "a"}, {"x-who": "b"}, {"X-Who": "a"}, {"X-Who": "a", "X-Forwarded-For": "1.2.3.4"}]
    assert [it.ask("/hello", headers=headers).status_code for headers in sent] == [200, 200, 429, 200]


def test_exempt_rules_and_preflights(project: Open) -> None:
    """An exempt path has no decision and no fields; a preflight is not counted."""
    it = project(HELLO, path("ok", decisions), rules=[Rule("ok", path="/ok", exempt=True), Rule("api", "1/day")])
    assert [(it.ask("/ok").json(), rate(it.ask("/ok"))) for _ in range(2)] == [([None, None], {})] * 2
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
    assert [it.ask("/hello", "OPTIONS", headers=preflight).status_code for _ in range(3)] == [200] * 3
    assert it.statuses("/hello", "/hello") == [200, 429]


def test_identify_sees_djangos_request(way: Way, project: Open) -> None:
    """``identify`` finds Django's own request at ``request.django``, with its cookies; it may be async on an event loop."""

    def identify(request: Any) -> Caller | None:
        assert (request.path, request.method, request.query.get("q")) == ("/hello", "GET", "1")
        name = request.django.COOKIES.get("who")
        return Caller(name) if name else None

    async def aidentify(request: Any) -> Caller | None:
        await asyncio.sleep(0)
        return identify(request)

    for function in [identify, aidentify] if way.awaits else [identify]:
        it = project(HELLO, rules=[Rule("api", "1/day", key=["caller"])], identify=function)
        found = []
        for who in ("ann", "bob", "ann"):
            it.client.cookies["who"] = who
            found.append(it.ask("/hello?q=1").status_code)
        assert found == [200, 200, 429]


def test_behind_another_gate(way: Way) -> None:
    """Around Django a gate of the plain kind may stand: rules of both hold, and decorated views are weighed by ours."""
    seen = []

    def view(request: Any) -> HttpResponse:
        seen.append((request.limitgate.rule, request.limitgate.remaining))
        return hello(request)

    outer = {"rules": [Rule("outer", "3/day")], "store": MemoryStore(Clock())}
    with way.project(path("hello", limit("2/day", name="two")(view))):
        ask = way.handled(lambda app: (LimitGate if way.handler == "asgi" else LimitGateWSGI)(app, **outer))
        assert [ask("/hello") for _ in range(4)] == [200, 200, 429, 429]
    assert seen == [("two", 1), ("two", 0)]


@pytest.mark.parametrize("gates", [1, 2])
def test_the_fields_of_several_gates(way: Way, gates: int) -> None:
    """A gate around Django, and one or two in it: each field is there once, in refusals too, and tells of all."""
    styles = {"headers": ["x-ratelimit", "draft-11"], "store": MemoryStore(Clock())}
    with way.project(HELLO, rules=[Rule("inner", f"{2 * gates}/day")], gates=gates, **styles):
        outer = {"rules": [Rule("outer", "9/day")], **styles}
        ask = way.replied(lambda app: (LimitGate if way.handler == "asgi" else LimitGateWSGI)(app, **outer))
        replies = [ask("/hello") for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert [reply.rate["x-ratelimit-limit"] for reply in replies] == [str(2 * gates)] * 3
    assert [reply.rate["ratelimit"].count('"') for reply in replies] == [4] * 3
    assert replies[2].headers.get_list("retry-after") == [str(43200 // gates)]


def test_a_gate_that_is_switched_off_in_django(way: Way) -> None:
    """Behind a gate around Django, it is as if it were not there."""
    seen = []

    def view(request: Any) -> HttpResponse:
        seen.append(request.limitgate.rule)
        return hello(request)

    outer = {"rules": [Rule("outer", "2/day")], "store": MemoryStore(Clock())}
    with way.project(path("hello", view), rules=[Rule("inner", "1/day")], enabled=False):
        ask = way.handled(lambda app: (LimitGate if way.handler == "asgi" else LimitGateWSGI)(app, **outer))
        assert [ask("/hello") for _ in range(3)] == [200, 200, 429]
    assert seen == ["outer", "outer"]


# --- served -----------------------------------------------------------------------------------------------------------


async def crowd(urls: list[str], headers: dict[str, str]) -> Counter[int]:
    """The statuses of as many requests as there are URLs, all at once."""
    async with httpx.AsyncClient(timeout=PATIENCE, headers=headers) as client:
        replies = await asyncio.gather(*[client.get(url) for url in urls])
    return Counter(reply.status_code for reply in replies)


def test_two_servers_of_two_kinds_share_their_buckets(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real ASGI server and a real threaded WSGI server on one Redis admit together what the limits allow."""
    environment = {"LIMITGATE_STORE": redis_server.url, "LIMITGATE_KEY_PREFIX": uuid.uuid4().hex}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    who = {"X-Who": uuid.uuid4().hex}
    target = ("tests.support.django_app:asgi", tmp_path, "--factory", "--lifespan", "off")
    with threaded_wsgi(django_app.wsgi()) as wsgi, uvicorn_process(*target, **environment) as asgi:
        assert [httpx.get(f"{url}/daily", headers=who).headers["x-ratelimit-remaining"] for url in (wsgi, asgi)] == ["19", "18"]
        assert asyncio.run(crowd([f"{wsgi}/daily", f"{asgi}/daily"] * 15, who)) == {200: 18, 429: 12}
        replies = [httpx.get(f"{asgi}/stream", headers=who) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert (replies[0].text, replies[0].headers["x-ratelimit-remaining"]) == ("one two three", "1")
        refused = httpx.head(f"{wsgi}/daily", headers=who)
        assert (refused.status_code, refused.content, refused.headers["content-type"]) == (429, b"", "application/problem+json")
