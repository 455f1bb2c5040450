"""``@limit`` and ``@exempt`` wherever Django and REST framework let a view stand, and what a gate knows of their URLs."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from django.conf.urls.i18n import i18n_patterns
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from django.urls import converters, include, path, re_path, register_converter
from django.utils.decorators import method_decorator
from django.utils.functional import lazy, lazystr
from django.utils.translation import get_language
from django.views import View
from django.views.decorators.cache import cache_page, never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET
from django.views.generic import TemplateView

from limitgate import ConfigError, MemoryStore, Rule, exempt, limit
from limitgate.django.middleware import DjangoRequest
from limitgate.routes.django import DjangoRoutes
from tests.support.clock import Clock
from tests.support.django_app import CHANGING, LOCALE, WAYS, Changing, Project, Way, rate
from tests.support.versions import needs

# isort: split
from rest_framework.decorators import action, api_view, throttle_classes
from rest_framework.generics import GenericAPIView
from rest_framework.response import Response
from rest_framework.routers import DefaultRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

Decorate = Callable[[Any], Any]
Open = Callable[..., Project]
HELLO = b"hello"


@pytest.fixture(params=["wsgi", "asgi"])
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def project(way: Way) -> Iterator[Open]:
    """Opens projects whose requests come one way."""
    with opening(way) as opened:
        yield opened


@pytest.fixture
def wsgi() -> Iterator[Open]:
    """Opens projects under WSGI, for what is the same both ways."""
    with opening(WAYS["wsgi"]) as opened:
        yield opened


@contextlib.contextmanager
def opening(way: Way) -> Iterator[Open]:
    with contextlib.ExitStack() as opened:
        yield lambda *patterns, **options: opened.enter_context(way.project(*patterns, **options))


# --- places -----------------------------------------------------------------------------------------------------------


def plain(decorate: Decorate) -> Any:
    @decorate
    def view(request: Any, **_: Any) -> HttpResponse:
        return HttpResponse(HELLO)

    return view


def coroutine(decorate: Decorate) -> Any:
    @decorate
    async def view(request: Any) -> HttpResponse:
        return HttpResponse(HELLO)

    return view


def by(*decorators: Decorate) -> Callable[[Decorate], Any]:
    """Django's own decorators above ours."""
    return lambda decorate: functools.reduce(lambda view, each: each(view), decorators, plain(decorate))


def above(*decorators: Decorate) -> Callable[[Decorate], Any]:
    """Django's own decorators below ours."""
    return lambda decorate: decorate(functools.reduce(lambda view, each: each(view), decorators, plain(lambda view: view)))


def coroutine_below(decorate: Decorate) -> Any:
    return never_cache(csrf_exempt(coroutine(decorate)))


def partial(decorate: Decorate) -> Any:
    @decorate
    def view(request: Any, words: bytes) -> HttpResponse:
        return HttpResponse(words)

    return functools.partial(view, words=HELLO)


def limited_partial(decorate: Decorate) -> Any:
    return decorate(functools.partial(plain(lambda view: view), words=HELLO))


class Greeter:
    def __call__(self, request: Any) -> HttpResponse:
        return HttpResponse(HELLO)


def callable_object(decorate: Decorate) -> Any:
    return decorate(Greeter())


class Greet(View):
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse(HELLO)


class AsyncGreet(View):
    async def get(self, request: Any) -> HttpResponse:
        return HttpResponse(HELLO)


def on_class(base: type) -> Callable[[Decorate], Any]:
    def build(decorate: Decorate) -> Any:
        return decorate(type("Own", (base,), {})).as_view()

    return build


def on_method(decorate: Decorate) -> Any:
    class Own(View):
        @decorate
        def get(self, request: Any) -> HttpResponse:
            return HttpResponse(HELLO)

    return Own.as_view()


def on_async_method(decorate: Decorate) -> Any:
    class Own(View):
        @decorate
        async def get(self, request: Any) -> HttpResponse:
            return HttpResponse(HELLO)

    return Own.as_view()


def on_dispatch(decorate: Decorate) -> Any:
    class Own(Greet):
        @decorate
        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(*args, **kwargs)

    return Own.as_view()


def on_view_of(base: type) -> Callable[[Decorate], Any]:
    return lambda decorate: decorate(base.as_view())


def with_method_decorator(decorate: Decorate) -> Any:
    @method_decorator(never_cache, name="dispatch")
    @decorate
    class Own(View):
        @method_decorator(csrf_exempt)
        @decorate_nothing
        def get(self, request: Any) -> HttpResponse:
            return HttpResponse(HELLO)

    return Own.as_view()


def decorate_nothing(view: Any) -> Any:
    return view


def below_method_decorator(decorate: Decorate) -> Any:
    class Own(View):
        @method_decorator(never_cache)
        @decorate
        def get(self, request: Any) -> HttpResponse:
            return HttpResponse(HELLO)

    return csrf_exempt(Own.as_view())


def template_view(decorate: Decorate) -> Any:
    @decorate
    class Own(TemplateView):
        template_name = "hello.html"

    return Own.as_view(extra_context={"name": "you"})


# --- REST framework ---------------------------------------------------------------------------------------------------


def api_above(decorate: Decorate) -> Any:
    @decorate
    @api_view(["GET"])
    def view(request: Any) -> Response:
        return Response("hello")

    return view


def api_below(decorate: Decorate) -> Any:
    @api_view(["GET", "POST"])
    @throttle_classes([])
    @decorate
    def view(request: Any) -> Response:
        return Response("hello")

    return view


def api_class(decorate: Decorate) -> Any:
    @decorate
    class Own(APIView):
        def get(self, request: Any) -> Response:
            return Response("hello")

    return Own.as_view()


def api_method(decorate: Decorate) -> Any:
    class Own(GenericAPIView):
        @decorate
        def get(self, request: Any) -> Response:
            return Response("hello")

    return Own.as_view()


def view_set(decorate: Decorate) -> Any:
    @decorate
    class Own(ViewSet):
        def list(self, request: Any) -> Response:
            return Response("hello")

    return Own.as_view({"get": "list"})


def view_set_action(decorate: Decorate) -> Any:
    class Own(ViewSet):
        @decorate
        def list(self, request: Any) -> Response:
            return Response("hello")

    return Own.as_view({"get": "list", "post": "list"})


def view_set_view(decorate: Decorate) -> Any:
    return decorate(view_set_action(lambda view: view))


def router(decorate: Decorate) -> Any:
    class Things(ViewSet):
        def list(self, request: Any) -> Response:
            return Response("free")

        @action(detail=True)
        @decorate
        def recent(self, request: Any, pk: str) -> Response:
            return Response("hello")

    found = DefaultRouter()
    found.register("things", Things, basename="thing")
    return path("api/", include(found.urls))


def router_action_above(decorate: Decorate) -> Any:
    class Things(ViewSet):
        @decorate
        @action(detail=False, methods=["get", "post"])
        def recent(self, request: Any) -> Response:
            return Response("hello")

    found = DefaultRouter(trailing_slash=False)
    found.register("things", Things, basename="thing")
    return path("api/", include((found.urls, "things"), namespace="v1"))


# --- where a URL may stand --------------------------------------------------------------------------------------------


def included(decorate: Decorate) -> Any:
    inner = [path("free", plain(decorate_nothing)), path("<int:number>/<slug:name>/", plain(decorate))]
    return path("a/", include([path("b/<str:letter>/", include((inner, "inner"), namespace="one"))]))


def by_regex(decorate: Decorate) -> Any:
    return re_path(r"^limited/(?P<number>[0-9]{4})/$", plain(decorate))


def by_regex_groups(decorate: Decorate) -> Any:
    @decorate
    def view(request: Any, number: str) -> HttpResponse:
        return HttpResponse(HELLO)

    return re_path(r"^limited/", include([re_path(r"^([0-9]{4})", view)]))


def by_language(decorate: Decorate) -> Any:
    return i18n_patterns(path("limited", plain(decorate)), prefix_default_language=False)[0]


def by_translation(decorate: Decorate) -> Any:
    return path(lazystr("limited"), plain(decorate))


def after_another(decorate: Decorate) -> Any:
    """A view that an earlier pattern refuses for its converter."""
    return path("", include([path("<int:number>", plain(decorate_nothing)), path("<str:anything>", plain(decorate))]))


class Place(NamedTuple):
    """A decorated view, and how to reach it."""

    build: Callable[[Decorate], Any]
    url: str = "/limited"

    def pattern(self, decorate: Decorate) -> Any:
        built = self.build(decorate)
        return built if hasattr(built, "pattern") else path("limited", built)

    @property
    def behind(self) -> dict[str, Any]:
        return {"before": (LOCALE,)} if self.build is by_language else {}


PLACES: dict[str, Place] = {
    "plain": Place(plain),
    "async": Place(coroutine),
    "csrf_exempt above": Place(by(csrf_exempt)),
    "several above": Place(by(require_GET, never_cache, csrf_exempt, cache_page(0))),
    "csrf_exempt below": Place(above(csrf_exempt)),
    "several below": Place(above(require_GET, never_cache, csrf_exempt)),
    "several above an async one": Place(coroutine_below),
    "partial": Place(partial),
    "limited partial": Place(limited_partial),
    "callable object": Place(callable_object),
    "class": Place(on_class(Greet)),
    "async class": Place(on_class(AsyncGreet)),
    "method": Place(on_method),
    "async method": Place(on_async_method),
    "dispatch": Place(on_dispatch),
    "as_view": Place(on_view_of(Greet)),
    "async as_view": Place(on_view_of(AsyncGreet)),
    "method_decorator above a class": Place(with_method_decorator),
    "method_decorator above a method": Place(below_method_decorator),
    "TemplateView": Place(template_view),
    "above api_view": Place(api_above),
    "below api_view": Place(api_below),
    "APIView": Place(api_class),
    "method of an APIView": Place(api_method),
    "ViewSet": Place(view_set),
    "action of a ViewSet": Place(view_set_action),
    "view of a ViewSet": Place(view_set_view),
    "router": Place(router, "/api/things/7/recent/"),
    "router, above action": Place(router_action_above, "/api/things/recent"),
    "included": Place(included, "/a/b/x/7/name/"),
    "regex": Place(by_regex, "/limited/2026/"),
    "regex groups": Place(by_regex_groups, "/limited/2026"),
    "language": Place(by_language, "/de/limited"),
    "translation": Place(by_translation),
    "after another": Place(after_another),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "several above an async one":
        needs("django", "5.0")  # its decorators leave coroutines alone since then
    return PLACES[request.param]


def passes(response: Any) -> bool:
    return response.status_code == 200 and HELLO in response.body


def policies(response: Any) -> list[str]:
    assert response.status_code == 429
    return response.json()["violated-policies"]


# --- in every place ---------------------------------------------------------------------------------------------------


def test_a_decorated_place_is_limited(project: Open, place: Place) -> None:
    """Whatever the view is and wherever it stands, its limit holds, together with the rules, and nowhere else."""
    clock = Clock()
    it = project(
        place.pattern(limit("2/minute")),
        rules=[Rule("day", "9/day")],
        store=MemoryStore(clock),
        headers=["draft-11"],
        **place.behind,
    )
    replies = [it.ask(place.url) for _ in range(4)]
    assert [passes(reply) for reply in replies] == [True, True, False, False]
    assert [re.findall(r";r=(\d+)", rate(reply)["ratelimit"]) for reply in replies] == [["8", "1"], *[["7", "0"]] * 3]
    assert it.statuses("/nowhere/at/all") == [404]
    (name,) = policies(replies[2])
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name)
    assert replies[2]["Retry-After"] == "30"
    clock.advance(30)
    assert passes(it.ask(place.url))


def test_a_subclass_is_limited_as_its_class(wsgi: Open) -> None:
    """What is made from a limited class shares its bucket."""
    own = limit("2/minute")(type("Own", (Greet,), {}))
    it = wsgi(path("a", own.as_view()), path("b", type("Lower", (own,), {}).as_view()))
    assert [it.ask(f"/{url}").status_code for url in ("a", "b", "a")] == [200, 200, 429]


def test_exempt_holds_for_the_url_that_has_it(wsgi: Open) -> None:
    """``exempt(view)`` at one URL leaves limits on at other URLs of the view, and at those of subclasses of an exempt class."""
    view, own = Greet.as_view(), type("Own", (Greet,), {})
    exempted = exempt(own)
    patterns = [path("free", exempt(view)), path("limited", view)]
    patterns += [
        path("own", exempted.as_view()),
        path("base", own.as_view()),
        path("sub", type("Sub", (exempted,), {}).as_view()),
    ]
    it = wsgi(*patterns, rules=[Rule("all", "1/day", key=["path", "ip"])])
    asked = [[it.ask(f"/{url}").status_code for url in ("free", "own", "limited", "base", "sub")] for _ in range(2)]
    assert asked == [[200] * 5, [200, 200, 429, 429, 429]]


def test_an_exempt_place_is_never_limited(wsgi: Open, place: Place) -> None:
    """``@exempt`` takes a view out of every rule, its own limits too: no decision, no field, no charge."""
    for decorate in (exempt, lambda view: exempt(limit("1/day")(view)), lambda view: limit("1/day")(exempt(view))):
        it = wsgi(place.pattern(decorate), rules=[Rule("all", "1/day")], **place.behind)
        replies = [it.ask(place.url) for _ in range(2)]
        assert [(passes(reply), rate(reply)) for reply in replies] == [(True, {})] * 2


def test_limits_stack(wsgi: Open, place: Place) -> None:
    """Of several limits on one view every one holds, and each is charged once."""
    pattern = place.pattern(lambda view: limit("9/hour")(limit("2/minute")(limit("2/day", name="daily")(view))))
    it = wsgi(pattern, headers=["draft-11"], **place.behind)
    first, _, third = (it.ask(place.url) for _ in range(3))
    assert sorted(re.findall(r";r=(\d+)", rate(first)["ratelimit"])) == ["1", "1", "8"]
    assert len(policies(third)) == 2
    assert "daily" in policies(third)


def test_without_the_middleware_a_place_raises(project: Open, place: Place) -> None:
    """A decorated view in a project without the middleware raises ConfigError at the first call."""
    it = project(place.pattern(limit("2/minute")), MIDDLEWARE=[LOCALE])
    with pytest.raises(ConfigError, match="LimitGateMiddleware"):
        it.ask(place.url)


def test_switched_off_by_the_environment(wsgi: Open, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """``LIMITGATE_ENABLED=false`` switches decorators off."""
    monkeypatch.setenv("LIMITGATE_ENABLED", "false")
    it = wsgi(place.pattern(limit("1/minute")), LIMITGATE={}, **place.behind)
    assert all(passes(it.ask(place.url)) for _ in range(2))


# --- buckets ----------------------------------------------------------------------------------------------------------


def test_one_view_under_two_urls_is_one_place(project: Open) -> None:
    """A decorated view with two URLs has one bucket, unless its key tells the paths apart."""
    view, each = plain(limit("2/day")), plain(limit("1/day", key=["path"]))
    both = [path("x/<int:number>", each), path("y", include([path("/<int:number>", each)]))]
    it = project(path("a", view), path("b", include([path("", view)])), *both)
    assert it.statuses("/a", "/b", "/a", "/b") == [200, 200, 429, 429]
    assert it.statuses("/x/1", "/x/2", "/y/1", "/y/2") == [200, 429, 200, 429]


def test_one_view_limited_for_one_url_only(project: Open) -> None:
    """A view that is decorated in one pattern stays free in the other, whatever is put around it."""
    view = plain(decorate_nothing)
    it = project(path("limited", csrf_exempt(limit("1/day")(view))), path("free", view))
    assert it.statuses("/limited", "/limited", "/free", "/free") == [200, 429, 200, 200]


def test_methods_and_actions_have_limits_of_their_own(project: Open) -> None:
    """Methods of a class, and actions of a view set, are limited one by one; HEAD is a GET."""

    class Own(View):
        @limit("1/day")
        def get(self, request: Any) -> HttpResponse:
            return HttpResponse(HELLO)

        def post(self, request: Any) -> HttpResponse:
            return HttpResponse(HELLO)

    class Things(ViewSet):
        @limit("1/day")
        def list(self, request: Any) -> Response:
            return Response("hello")

        @limit("2/day")
        def create(self, request: Any) -> Response:
            return Response("hello")

    things = Things.as_view({"get": "list", "post": "create"})
    it = project(path("view", csrf_exempt(Own.as_view())), path("set", things))
    methods = ["HEAD", "GET", "POST", "POST", "OPTIONS", "OPTIONS", "DELETE", "DELETE"]
    assert [it.ask("/view", method).status_code for method in methods] == [200, 429, 200, 200, 200, 200, 405, 405]
    assert [it.ask("/set", method).status_code for method in ["HEAD", "GET", *["POST"] * 3]] == [200, 429, 200, 200, 429]


def test_what_api_view_refuses_costs_nothing(project: Open) -> None:
    """A method that ``@api_view`` does not list, HEAD among them, is not charged to the limit below it."""
    it = project(path("limited", api_below(limit("1/day"))))
    methods = ["PUT", "OPTIONS", "HEAD", "GET", "POST"]
    assert [it.ask("/limited", method).status_code for method in methods] == [405, 200, 405, 200, 429]


def test_what_a_class_refuses_costs_nothing(project: Open) -> None:
    """A method that a class has but does not list is not charged to the limit on it."""

    class Own(Greet):
        http_method_names = ("get",)

        @limit("1/day")
        def post(self, request: Any) -> HttpResponse:
            return HttpResponse(HELLO)

        @limit("2/day")
        def get(self, request: Any) -> HttpResponse:
            return HttpResponse(HELLO)

    it = project(path("limited", Own.as_view()), path("all", Own.as_view(http_method_names=["get", "post"])))
    methods = ["POST", "POST", "HEAD", "HEAD", "HEAD", "GET", "GET", "GET"]
    assert [it.ask("/limited", method).status_code for method in methods] == [*[405] * 5, 200, 200, 429]
    assert [it.ask("/all", method).status_code for method in ["POST", "POST", "HEAD"]] == [200, 429, 405]


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("plain", "plain.view-"),
        ("class", "Own-"),
        ("method", "on_method.Own.get"),
        ("as_view", "Greet-"),
        ("above api_view", "view"),
        ("view of a ViewSet", "view_set_action.Own"),
        ("action of a ViewSet", "view_set_action.Own.list"),
    ],
)
def test_the_name_tells_the_place(project: Open, place: str, told: str) -> None:
    """Whoever reads a refusal finds the view by the name in it."""
    it = project(PLACES[place].pattern(limit("1/day")))
    it.ask("/limited")
    assert told in policies(it.ask("/limited"))[0]


def test_cached_pages_are_limited(project: Open) -> None:
    """A page that comes out of Django's cache counts like any other, and has its own request's fields."""
    it = project(path("limited", cache_page(60)(plain(limit("3/day")))))
    assert [rate(it.ask("/limited"))["x-ratelimit-remaining"] for _ in range(4)] == ["2", "1", "0", "0"]


def test_a_view_behind_login_required(project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a decorator that turns people away, a limit counts whoever is."""

    def name_user(request: Any) -> None:
        request.user = type("User", (), {"is_authenticated": "X-User" in request.headers})

    monkeypatch.setattr(Changing, "change", staticmethod(name_user))
    it = project(path("limited", login_required(plain(limit("2/day")))), before=(CHANGING,))
    named = {"X-User": "ann"}
    assert [it.ask("/limited", headers=headers).status_code for headers in ({}, named, named)] == [302, 200, 429]


# --- method_decorator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: method_decorator(limit("1/day"))(Greet.get),
        lambda: method_decorator(limit("1/day", name="x"), name="dispatch")(type("Own", (Greet,), {})),
        lambda: method_decorator([never_cache, limit("1/day")], name="get")(type("Own", (Greet,), {})),
        lambda: method_decorator(exempt, name="dispatch")(type("Own", (Greet,), {})),
    ],
)
def test_method_decorator_is_told_off(make: Callable[[], Any]) -> None:
    """Django's ``method_decorator`` decorates anew for every request; it is refused at import, saying what to write."""
    with pytest.raises(ConfigError, match=r"method_decorator cannot .* directly on the method or on the class"):
        make()


# --- finding routes ---------------------------------------------------------------------------------------------------


class Fussy(converters.StringConverter):
    """A converter with a fault."""

    def to_python(self, value: str) -> str:
        raise RuntimeError(f"cannot read {value}")


if "fussy" not in converters.get_converters():
    register_converter(Fussy, "fussy")


def test_a_resolver_that_raises(project: Open) -> None:
    """Where resolving fails, the request is charged by what is known, and the failure is Django's to answer."""
    view = plain(limit("1/day", key=["path"]))
    it = project(path("fussy/<fussy:it>", view), path("limited", view), rules=[Rule("all", "3/day", key=["path", "ip"])])
    it.client.raise_request_exception = False
    assert it.statuses("/fussy/1", "/limited", "/fussy/1", "/fussy/2", "/fussy/3") == [500, 200, 500, 500, 429]


def test_a_urlconf_that_cannot_be_imported(project: Open) -> None:
    """Where there are no URLs to be had, requests are charged all the same, and the failure is Django's."""
    it = project(ROOT_URLCONF="tests.no_such_module", rules=[Rule("all", "2/day", key=["path"])])
    it.client.raise_request_exception = False
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            it.ask("/")
    assert it.statuses("/") == [429]


def test_a_urlconf_of_the_requests_own(project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Middleware that chooses a URLconf by host, before the gate, has its decorated views found there."""
    by_host = {
        "shop.example": (path("limited", plain(limit("1/day"))),),
        "blog.example": (path("limited", plain(decorate_nothing)),),
    }

    def choose(request: Any) -> None:
        if request.headers["X-Host"] in by_host:
            request.urlconf = by_host[request.headers["X-Host"]]

    monkeypatch.setattr(Changing, "change", staticmethod(choose))
    it = project(path("root", plain(decorate_nothing)), before=(CHANGING,))
    asked = [("/limited", host) for host in ("shop.example", "blog.example") * 2] + [("/root", "other.example")] * 2
    assert [it.ask(url, headers={"X-Host": host}).status_code for url, host in asked] == [200, 200, 429, 200, 200, 200]


def test_a_urlconf_that_is_none(project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be a URLconf is Django's to raise."""
    monkeypatch.setattr(Changing, "change", staticmethod(lambda request: setattr(request, "urlconf", [7])))
    it = project(path("limited", plain(limit("1/day"))), before=(CHANGING,))
    with pytest.raises(TypeError, match="unhashable"):
        it.ask("/limited")


def test_urls_that_include_themselves(project: Open) -> None:
    """URLs may include themselves; however deep a client goes, that is one template more, not one for each depth."""
    inner = [path("limited", plain(limit("1/day", key=["path"])))]
    inner.append(path("deeper/", include(inner)))
    it = project(path("", include(inner)))
    found = it.statuses("/limited", *[f"/{'deeper/' * depth}limited" for depth in (1, 2, 3, 50)])
    assert found == [200, 200, 429, 429, 429]


def test_one_template_in_all_languages(project: Open) -> None:
    """A path counts as the same in every language, so that nobody multiplies a limit by the languages there are."""
    translated = lazy(lambda: {"de": "artikel"}.get(get_language(), "items"), str)()
    view = plain(limit("1/day", key=["path"]))
    languages = i18n_patterns(path(translated, view), path("other", view), prefix_default_language=False)
    it = project(*languages, before=(LOCALE,))
    assert it.statuses("/items", "/de/artikel", "/fr/items", "/de/other", "/other") == [200, 429, 429, 200, 429]


@pytest.mark.parametrize(
    ("pattern", "url", "template"),
    [
        (path("", plain(decorate_nothing)), "/", "/"),
        (path("items/<int:id>/", plain(decorate_nothing)), "/items/7/", "/items/<int:id>/"),
        (included(decorate_nothing), "/a/b/x/7/name/", "/a/b/<str:letter>/<int:number>/<slug:name>/"),
        (by_regex(decorate_nothing), "/limited/2026/", "/limited/(?P<number>[0-9]{4})/$"),
        (by_regex_groups(decorate_nothing), "/limited/2026", "/limited/([0-9]{4})"),
        (router(decorate_nothing), "/api/things/7/recent/", "/api/things/(?P<pk>[^/.]+)/recent/$"),
    ],
)
def test_templates(pattern: Any, url: str, template: str) -> None:
    """The template is the whole route, from the root on; so there are only as many as there are routes."""
    routes = DjangoRoutes()
    with override_settings(ROOT_URLCONF=(pattern,)):
        assert not routes.decorated()
        for _ in range(2):
            assert routes.find(DjangoRequest(RequestFactory().get(url))) == (template, ())
        assert routes.find(DjangoRequest(RequestFactory().get("/nowhere/at/all"))) is None


def test_the_path_of_a_key(project: Open) -> None:
    """However many ids, one template is one bucket; what has no route goes by the rule's own pattern."""
    it = project(path("a/<int:id>", plain(decorate_nothing)), rules=[Rule("each", "1/day", key=["path"])])
    assert it.statuses("/a/1", "/a/2", "/b/1", "/c", "/a/x") == [200, 429, 404, 429, 429]


@pytest.mark.parametrize(("decorate", "finds"), [(decorate_nothing, 0), (limit("9/day"), 2)])
def test_routes_are_looked_for_where_needed(
    project: Open, monkeypatch: pytest.MonkeyPatch, decorate: Decorate, finds: int
) -> None:
    """Without decorators and ``path`` in a key, Django's price for resolving is not paid twice."""
    found = []
    find = DjangoRoutes.find
    monkeypatch.setattr(DjangoRoutes, "find", lambda *args: found.append(find(*args)) or found[-1])
    it = project(path("free", plain(decorate_nothing)), path("it", plain(decorate)), rules=[Rule("all", "9/day")])
    assert it.statuses("/free", "/it") == [200, 200]
    assert len(found) == finds


@pytest.mark.parametrize("spelling", ["//limited", "/limited/", "/limited;x", "/l%69mited", "/limited?x", "/limited%0A"])
def test_every_spelling_that_reaches_the_view_is_limited(way: Way, spelling: str) -> None:
    """However a path is spelled, what Django takes to the view has been counted."""
    ran = []

    def view(request: Any) -> HttpResponse:
        ran.append(request.path)
        return HttpResponse(HELLO)

    view = limit("1/day")(view)
    urls = [path("limited", view), re_path(r"^limited(?:/|;x|\n)?$", view), re_path("^/limited", view)]
    with way.project(*urls):
        ask = way.handled()
        assert [ask("/limited"), ask(spelling)] == [200, 429]
    assert ran == ["/limited"]
