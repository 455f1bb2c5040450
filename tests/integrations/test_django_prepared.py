"""Prepared plans under Django: requests that have one get what requests get that are planned anew each time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
from django.conf.urls.i18n import i18n_patterns
from django.http import HttpResponse, StreamingHttpResponse, UnreadablePostError
from django.test import override_settings
from django.urls import URLPattern, converters, include, path, re_path, register_converter
from django.urls.resolvers import RoutePattern
from django.utils.functional import lazystr
from django.views import View
from hypothesis import given, settings, strategies as st

from limitgate import MemoryStore, exempt, limit
from limitgate.django.middleware import DjangoExchange, LimitGateMiddleware
from limitgate.exchange.base import EXCHANGE, OUTCOME, Exchange
from limitgate.limits.decision import DeferredDecision
from limitgate.routes.django import DjangoRoutes
from tests.exchange.test_plain import RULES, is_plain, stepped
from tests.gate.test_prepared import KEY, Counted, General, kept, rules
from tests.support.clock import Clock
from tests.support.django_app import CHANGING, WAYS, Changing, Way, rate
from tests.support.observed import Recorder


def answer(request: Any, **_: Any) -> HttpResponse:
    return HttpResponse(repr(request.limitgate))


async def on_a_loop(request: Any) -> HttpResponse:
    return HttpResponse(repr(request.limitgate))


class Views(View):
    """HEAD has a handler of its own, with a limit of its own."""

    def get(self, request: Any) -> HttpResponse:
        return answer(request)

    @limit("2/minute", name="head")
    def head(self, request: Any) -> HttpResponse:
        return answer(request)


login = limit("3/minute", key=["ip"], name="login")(answer)
SELF = [path("x", login)]
SELF.append(path("deeper/", include(SELF)))
URLS = (
    path("api/<str:item>", answer),
    path("login", login),
    path("health", exempt(answer)),
    path("views", Views.as_view()),
    path("loop", limit("3/minute", name="loop", key=["path"])(on_a_loop)),
    path("sub/", include(SELF)),
    re_path(r"^(?P<name>costly|measured|slow|counted)$", answer),
)
PATHS = ("/api/a", "/api/a", "/api/b", "/api/free", "/login", "/health", "/views", "/loop", "/sub/x", "/sub/deeper/deeper/x")
OTHERS = ("/costly", "/measured", "/counted", "/nowhere")


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def opened(way: Way, store: Any, *urls: Any, **options: Any) -> Any:
    return way.project(*urls or URLS, LIMITGATE={"RULES": rules(), "STORE": store, "TRUSTED_PROXIES": ["127.0.0.1"]}, **options)


requests = st.tuples(
    st.sampled_from(PATHS + OTHERS),
    st.sampled_from(["GET", "GET", "HEAD", "POST", "OPTIONS"]),
    st.sampled_from([{}, {}, {"X-Forwarded-For": "203.0.113.9"}, {"X-Forwarded-For": "2001:db8::1"}, {"X-API-Key": KEY}]),
    st.sampled_from([0, 0, 0.3, 1, 20]),
)


@settings(deadline=None, max_examples=15)
@given(visits=st.lists(requests, min_size=1, max_size=20))
@pytest.mark.parametrize("name", ["wsgi", "asgi"])
def test_a_prepared_plan_is_what_would_have_been_planned(name: str, visits: list[Any]) -> None:
    """Property: responses, decisions and buckets are the same, whether a store takes plain plans or not."""

    def told(kind: type[MemoryStore]) -> Iterator[Any]:
        clock = Clock()
        store = kind(clock)
        with opened(WAYS[name], store) as project:
            for url, method, headers, step in visits:
                clock.advance(step)
                response = project.ask(url, method, headers=headers)
                yield response.status_code, dict(response.items()), response.body, kept(store, clock())

    assert list(told(MemoryStore)) == list(told(General))


@pytest.mark.parametrize("url", PATHS)
def test_what_people_run_has_prepared_plans(way: Way, url: str) -> None:
    """Routes with variables, decorated and included views, sync and async ones, URLs that include themselves: all prepared."""
    store = Counted(Clock())
    with opened(way, store) as project:
        for _ in range(4):
            project.ask(url)
    assert (store.general, store.plain) == ((0, 0) if url in ("/health", "/api/free") else (0, 4))


def test_head_is_told_from_get(way: Way) -> None:
    """A view may serve HEAD by a handler of its own, whichever came first."""
    with opened(way, MemoryStore(Clock())) as project:
        statuses = [project.ask("/views", method).status_code for method in ("GET", "HEAD", "GET", "HEAD", "HEAD", "GET")]
    assert statuses == [200, 200, 200, 200, 429, 200]


class Even(converters.IntConverter):
    """A converter that only it knows what it looks at."""

    def to_python(self, value: str) -> int:
        if int(value) % 2:
            raise ValueError(value)
        return int(value)


if "even" not in converters.get_converters():
    register_converter(Even, "even")


class Own(RoutePattern):
    """A pattern that only it knows what it looks at."""


UNKNOWN = {
    "language": i18n_patterns(path("it", answer), prefix_default_language=False),
    "translated": [path(lazystr("it"), answer)],
    "translated regex": [re_path(lazystr("^it$"), answer)],
    "included": [path("", include([path(lazystr("it"), answer)]))],
    "converter": [path("<even:number>", answer), path("it", answer)],
    "pattern": [URLPattern(Own("it", is_endpoint=True), answer)],
    "entry": [type("Entry", (URLPattern,), {})(RoutePattern("it", is_endpoint=True), answer)],
}


@pytest.mark.parametrize("urls", UNKNOWN.values(), ids=UNKNOWN)
def test_where_more_than_the_path_may_matter_each_route_is_looked_up(urls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Languages, converters and patterns of a project's own: nobody knows what they look at besides."""
    store, found, find = Counted(Clock()), [], DjangoRoutes.find
    monkeypatch.setattr(DjangoRoutes, "find", lambda self, request: found.append(request) or find(self, request))
    with opened(WAYS["wsgi"], store, *urls, path("login", login)) as project:
        assert [project.ask("/it").status_code for _ in range(3)] == [200] * 3
    assert (store.general, store.plain, len(found)) == (0, 3, 3)


def test_each_urlconf_has_plans_of_its_own(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that brings its own URLconf is led by that one, however many came by another to the same path before."""
    other = (path("it", limit("2/minute", name="other")(answer)),)
    store = Counted(Clock())
    monkeypatch.setattr(Changing, "change", staticmethod(lambda request: setattr(request, "urlconf", urlconfs.pop())))
    urlconfs = [None, other] * 4
    with opened(way, store, path("it", answer), before=(CHANGING,)) as project:
        assert project.statuses(*["/it"] * 8) == [200, 200, 200, 200, 429, 200, 429, 200]
    assert (store.general, store.plain) == (0, 8)


def test_a_pattern_that_comes_later_is_seen(way: Way) -> None:
    """A decorated view that is added to a URLconf, or to one that is included, is limited from its first request on."""
    inner: list[Any] = []
    urls = (path("in/", include(inner)), re_path("^", answer))
    with opened(way, MemoryStore(Clock()), *urls) as project:
        assert project.statuses("/in/it", "/in/it", "/in/it") == [200, 200, 200]
        inner.append(path("it", limit("1/minute", name="late")(answer)))
        assert project.statuses("/in/it", "/in/it") == [200, 429]


def test_urls_that_are_put_in_place_of_others_are_seen(way: Way) -> None:
    """Where Django resolves by another URLconf, as tests have it do, so do plans."""
    with opened(way, MemoryStore(Clock()), path("it", answer)) as project:
        assert project.statuses("/it", "/it") == [200, 200]
        with override_settings(ROOT_URLCONF=(path("it", limit("1/minute", name="swapped")(answer)),)):
            assert project.statuses("/it", "/it") == [200, 429]
        assert project.statuses("/it") == [200]


STEPS = ("ask", "look", "settle", "settle a rule", "stream", "raise", "client left")


@settings(deadline=None, max_examples=18)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=5))
@pytest.mark.parametrize("name", ["wsgi", "asgi"])
def test_whatever_a_view_does_a_request_with_a_prepared_plan_ends_like_any_other(  # noqa: C901 - one request from all sides
    name: str, steps: list[str]
) -> None:
    """Property: responses, outcomes and buckets are the same. A request that nobody asks about stays a short one."""
    kinds: list[Any] = []
    opens = False

    def view(request: Any) -> Any:
        place = getattr(request, "scope", request.META)
        exchange, decision = place[EXCHANGE], request.limitgate
        if opens:
            exchange.open_admission()
        kinds.append((is_plain(exchange), type(decision)))
        took = steps.index("stream") if "stream" in steps else len(steps)

        def takes(some: list[str]) -> None:
            for step in some:
                if step == "look":
                    assert decision.remaining >= 0
                elif step == "client left":
                    raise UnreadablePostError
                stepped(exchange, decision, step)

        def chunks() -> Iterator[bytes]:
            yield place[OUTCOME].encode()
            takes(steps[took:])

        takes(steps[:took])
        return StreamingHttpResponse(chunks()) if "stream" in steps else HttpResponse(place[OUTCOME])

    def told(kind: type[MemoryStore]) -> Iterator[Any]:
        clock = Clock()
        store = kind(clock)
        with WAYS[name].project(path("it", view), LIMITGATE={"RULES": RULES, "STORE": store}) as project:
            project.client.raise_request_exception = False
            for _ in range(2):
                try:
                    response = project.ask("/it")
                    yield response.status_code, dict(response.items()), response.body
                except (LookupError, UnreadablePostError):  # in the midst of a stream
                    yield "error"
                yield kept(store, clock())

    short, general = list(told(MemoryStore)), list(told(General))
    opens = True
    assert short == general == list(told(General))
    assert [plain for plain, _ in kinds] == [True, True, True, True, False, False]
    assert [decision is DeferredDecision for _, decision in kinds] == [True, True, False, False, False, False]


STEPPED = [each.__code__ for each in (LimitGateMiddleware.__call__, LimitGateMiddleware._acall, DjangoExchange.completes)]


@contextmanager
def each_instruction(codes: Sequence[CodeType], step: Callable[[FrameType], None]) -> Iterator[None]:
    """Call ``step`` before each instruction of these functions. Tracing leaves out most of them on Python 3.13."""
    if sys.version_info < (3, 12):

        def instruction(frame: FrameType, event: str, _: object) -> Any:
            if event == "opcode":
                step(frame)
            return instruction

        def called(frame: FrameType, *_: object) -> Any:
            frame.f_trace_opcodes = frame.f_code in codes
            return instruction if frame.f_trace_opcodes else None

        before = sys.gettrace()
        sys.settrace(called)
        try:
            yield
        finally:
            sys.settrace(before)
        return
    monitoring, tool = sys.monitoring, sys.monitoring.OPTIMIZER_ID
    monitoring.use_tool_id(tool, "steps")
    monitoring.register_callback(tool, monitoring.events.INSTRUCTION, lambda *_: step(sys._getframe(1)))
    for code in codes:
        monitoring.set_local_events(tool, code, monitoring.events.INSTRUCTION)
    try:
        yield
    finally:
        for code in codes:
            monitoring.set_local_events(tool, code, monitoring.events.NO_EVENTS)
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, None)
        monitoring.free_tool_id(tool)


@pytest.mark.parametrize("name", ["wsgi", "asgi"])
def test_another_thread_may_make_a_request_like_any_other_at_each_step_of_the_middleware(name: str) -> None:
    """Its response has its rate fields, and it is counted once."""
    recorder, place, steps = Recorder(), 0, 0

    def step(frame: FrameType) -> None:
        nonlocal steps
        exchange = frame.f_locals.get("exchange") or frame.f_locals.get("self")
        if isinstance(exchange, Exchange):
            steps += 1
            if steps == place:
                assert exchange.open_admission()

    clock = Clock()
    options = {"RULES": RULES, "STORE": MemoryStore(clock), "OBSERVERS": [recorder]}
    with WAYS[name].project(path("it", lambda _: HttpResponse("it")), LIMITGATE=options) as project:

        def told() -> Any:
            """What came of a request on full buckets, for which the admission is asked for at step ``place``."""
            nonlocal steps
            steps = 0
            clock.advance(3600)
            before = recorder.new("requests")
            with each_instruction(STEPPED, step):
                response = project.ask("/it")
            counts, fields = Counter(recorder.new("requests")) - Counter(before), rate(response)
            fields["x-ratelimit-reset"] = int(fields["x-ratelimit-reset"]) - clock() // 1_000_000
            return response.status_code, fields, counts

        project.ask("/it")
        expected = told()
        assert len(expected[1]) == 3
        while steps >= place:
            place += 1
            assert told() == expected, place
    assert place > 100
