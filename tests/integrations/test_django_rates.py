"""Throttles of REST framework that find their rates in the settings: whatever its own do, ours do, side by side."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from django.core.cache import cache
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from django.urls import path

from limitgate import Caller, ConfigError, Limit, Limiter, MemoryStore, Rule
from tests.support.clock import Clock
from tests.support.django_app import WAYS, Project, Way

# isort: split
from rest_framework import throttling
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action, api_view, throttle_classes
from rest_framework.response import Response
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from limitgate.django import rest
from limitgate.routes.django import routes_of

Open = Callable[..., Project]
BOTH = pytest.mark.parametrize("kit", [throttling, rest], ids=["theirs", "ours"])
"""REST framework's own throttles, and ours in their place."""
RATES = {"anon": "2/min", "user": "3/m", "uploads": "1/day", "contacts": "2/hour", "burst": "1/s", "free": None}


class ByToken(BaseAuthentication):
    """The token is the user's id."""

    def authenticate(self, request: Any) -> Any:
        token = request.headers.get("Authorization", "")
        return (SimpleNamespace(pk=token, is_authenticated=True, is_staff=token == "staff"), token) if token else None


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def project(way: Way) -> Iterator[Open]:
    cache.clear()
    with contextlib.ExitStack() as opened:
        yield lambda *patterns, rates=RATES, **options: opened.enter_context(
            way.project(*patterns, **{"REST_FRAMEWORK": {"DEFAULT_THROTTLE_RATES": rates}, **options})
        )
    cache.clear()


@pytest.fixture(autouse=True)
def _theirs_read_the_settings_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """REST framework's read them once, when they are imported."""
    monkeypatch.setattr(throttling.SimpleRateThrottle, "THROTTLE_RATES", RATES)


def view(*throttles: Any, **more: Any) -> Any:
    def get(self: APIView, request: Any) -> Response:
        return Response({})

    options = {"throttle_classes": throttles, "authentication_classes": [ByToken], "get": get, "post": get, **more}
    return type("Limited", (APIView,), options).as_view()


def ask(it: Project, url: str = "/x", who: str = "ann", **more: Any) -> Any:
    return it.ask(url, headers={"Authorization": who} if who else {}, **more)


def statuses(it: Project, count: int, url: str = "/x", who: str = "ann", **more: Any) -> list[int]:
    return [ask(it, url, who, **more).status_code for _ in range(count)]


# --- as the originals do --------------------------------------------------------------------------------------------------


@BOTH
def test_anon(project: Open, kit: Any) -> None:
    """Who is not authenticated counts by address; users are not throttled."""
    it = project(path("x", view(kit.AnonRateThrottle)))
    assert statuses(it, 3, who="") == [200, 200, 429]
    assert statuses(it, 5) == [200] * 5


@BOTH
def test_user(project: Open, kit: Any) -> None:
    """Each user has a bucket, wherever the throttle stands; all others have that of their address."""
    it = project(path("x", view(kit.UserRateThrottle)), path("y", view(kit.UserRateThrottle)))
    assert statuses(it, 2) + statuses(it, 2, "/y") == [200, 200, 200, 429]
    assert statuses(it, 4, who="bob") == [200, 200, 200, 429]
    assert statuses(it, 4, who="") == [200, 200, 200, 429]


@BOTH
def test_scoped(project: Open, kit: Any) -> None:
    """A view's ``throttle_scope`` is its rate, shared by all views of the scope; a view without one is not throttled."""
    scoped = kit.ScopedRateThrottle
    it = project(
        path("contacts", view(scoped, throttle_scope="contacts")),
        path("again", view(scoped, throttle_scope="contacts")),
        path("uploads", view(scoped, throttle_scope="uploads")),
        path("none", view(scoped)),
        path("free", view(scoped, throttle_scope="free")),
    )
    assert statuses(it, 1, "/contacts") + statuses(it, 2, "/again") == [200, 200, 429]
    assert statuses(it, 2, "/uploads") == [200, 429]
    assert statuses(it, 2, "/uploads", "bob") == [200, 429]
    assert statuses(it, 4, "/none") + statuses(it, 4, "/free") == [200] * 8


@BOTH
def test_a_scope_and_a_rate_of_ones_own(project: Open, kit: Any) -> None:
    """``scope`` finds another rate, ``rate`` is one."""
    burst = type("Burst", (kit.UserRateThrottle,), {"scope": "uploads"})
    own = type("Own", (kit.UserRateThrottle,), {"scope": "own", "rate": "2/day"})
    it = project(path("x", view(burst)), path("y", view(own)), path("z", view(kit.UserRateThrottle, own)))
    assert statuses(it, 2) == [200, 429]
    assert statuses(it, 3, "/y") == [200, 200, 429]
    assert statuses(it, 2, "/z") == [429, 429]
    assert statuses(it, 3, "/z", "bob") == [200, 200, 429]


@BOTH
def test_no_rate_is_no_limit(project: Open, kit: Any) -> None:
    """None in the settings lets everybody pass."""
    free = type("Free", (kit.UserRateThrottle,), {"scope": "free"})
    it = project(path("x", view(free)))
    assert statuses(it, 5) == [200] * 5


@BOTH
def test_rates_of_the_class(project: Open, kit: Any) -> None:
    """``THROTTLE_RATES`` goes before the settings."""
    own = type("Own", (kit.UserRateThrottle,), {"THROTTLE_RATES": {"user": "1/m"}})
    it = project(path("x", view(own)))
    assert statuses(it, 2) == [200, 429]


@BOTH
def test_keys_of_ones_own(project: Open, kit: Any) -> None:
    """``get_cache_key`` says who counts together, and None who is not throttled."""

    class ByEmail(kit.SimpleRateThrottle):
        scope = "uploads"

        def get_cache_key(self, request: Any, view: Any) -> str | None:
            return request.query_params.get("email")

    class ButStaff(kit.UserRateThrottle):
        def get_cache_key(self, request: Any, view: Any) -> str | None:
            return None if getattr(request.user, "is_staff", False) else super().get_cache_key(request, view)

    class ByAddress(kit.AnonRateThrottle):
        def get_cache_key(self, request: Any, view: Any) -> str | None:
            return f"{self.scope}-{self.get_ident(request)}"

    class ByTenant(kit.SimpleRateThrottle):
        scope = "uploads"
        cache_format = "tenant_%(scope)s_%(ident)s"

        def get_cache_key(self, request: Any, view: Any) -> Any:
            return self.cache_format % {"scope": self.scope, "ident": request.query_params.get("tenant")}

    class AsWritten(ByTenant):
        cache_format = kit.SimpleRateThrottle.cache_format

    it = project(
        path("x", view(ByEmail)),
        path("y", view(ButStaff)),
        path("z", view(ByAddress)),
        path("t", view(ByTenant)),
        path("w", view(AsWritten)),
    )
    assert statuses(it, 2, "/t?tenant=a") + statuses(it, 2, "/t?tenant=b") == [200, 429] * 2
    assert statuses(it, 2, "/w?tenant=a") + statuses(it, 2, "/w?tenant=b") == [200, 429] * 2
    assert statuses(it, 2, "/x?email=a") + statuses(it, 2, "/x?email=b") + statuses(it, 3) == [200, 429] * 2 + [200] * 3
    assert statuses(it, 4, "/y") == [200, 200, 200, 429]
    assert statuses(it, 5, "/y", "staff") == [200] * 5
    assert statuses(it, 4, "/y", "") == [200, 200, 200, 429]
    assert statuses(it, 1, "/z") + statuses(it, 2, "/z", "") == [200, 200, 429]


@BOTH
def test_mistakes_are_told_as_by_the_originals(project: Open, kit: Any) -> None:
    """A throttle without scope and rate, and a scope without a rate, are no throttles."""

    class Neither(kit.SimpleRateThrottle):
        def get_cache_key(self, request: Any, view: Any) -> str:
            return ""

    unknown = type("Unknown", (kit.UserRateThrottle,), {"scope": "unknown"})
    scoped = view(kit.ScopedRateThrottle, throttle_scope="unknown")
    it = project(path("x", view(Neither)), path("y", view(unknown)), path("z", scoped))
    for url in ("/x", "/y", "/z"):
        with pytest.raises(ImproperlyConfigured):
            ask(it, url)


@BOTH
def test_where_throttles_stand(project: Open, kit: Any) -> None:
    """In the settings, on function views, and on actions of a view set that have scopes of their own."""

    class Photos(ViewSet):
        throttle_classes = (kit.ScopedRateThrottle,)
        authentication_classes = (ByToken,)
        throttle_scope = None

        def list(self, request: Any) -> Response:
            return Response()

        @action(methods=["post"], detail=False, throttle_scope="uploads")
        def upload(self, request: Any) -> Response:
            return Response()

    @api_view(["GET"])
    @throttle_classes([kit.AnonRateThrottle])
    def plain(request: Any) -> Response:
        return Response()

    upload = Photos.as_view({"post": "upload"}, **Photos.upload.kwargs)
    it = project(path("x", Photos.as_view({"get": "list"})), path("y", upload), path("z", plain))
    assert statuses(it, 3) == [200] * 3
    assert statuses(it, 2, "/y", method="POST") == [200, 429]
    assert statuses(it, 3, "/z", "") == [200, 200, 429]


def test_in_the_settings(project: Open) -> None:
    """``DEFAULT_THROTTLE_CLASSES`` as in REST framework's guide, with our module in the place of its own."""
    classes = [f"limitgate.django.rest.{name}" for name in ("AnonRateThrottle", "UserRateThrottle")]
    framework = {"DEFAULT_THROTTLE_CLASSES": classes, "DEFAULT_THROTTLE_RATES": {"anon": "1/day", "user": "2/day"}}
    with override_settings(REST_FRAMEWORK=framework):
        defaults = view(*APIView.settings.DEFAULT_THROTTLE_CLASSES)
    it = project(path("x", defaults), REST_FRAMEWORK=framework)
    assert statuses(it, 2, who="") == [200, 429]
    assert statuses(it, 3) == [200, 200, 429]


# --- what ours do besides ---------------------------------------------------------------------------------------------------


def test_settings_are_read_when_they_are_needed(project: Open) -> None:
    """A test overrides them, or patches the rates."""
    it = project(path("x", view(rest.UserRateThrottle)))
    with override_settings(REST_FRAMEWORK={"DEFAULT_THROTTLE_RATES": {"user": "1/m"}}):
        assert statuses(it, 2) == [200, 429]
    with mock.patch.object(rest.UserRateThrottle, "THROTTLE_RATES", {"user": None}):
        assert statuses(it, 2) == [200, 200]
    with mock.patch.object(rest.UserRateThrottle, "rate", "9/m"):
        assert statuses(it, 2) == [200, 200]
    assert rest.UserRateThrottle.THROTTLE_RATES == RATES


def test_the_engine_is_ours(way: Way) -> None:
    """Rate fields and a ``Retry-After`` that is enough; a refused request is charged to no rule and no other throttle."""
    clock = Clock()
    throttles = rest.UserRateThrottle, type("Daily", (rest.UserRateThrottle,), {"scope": "contacts"})
    with way.project(
        path("x", view(*throttles)),
        path("y", view(throttles[0])),
        rules=[Rule("all", "4/minute")],
        store=MemoryStore(clock),
        REST_FRAMEWORK={"DEFAULT_THROTTLE_RATES": RATES},
    ) as it:
        first = ask(it)
        assert (first["X-RateLimit-Limit"], first["X-RateLimit-Remaining"]) == ("2", "1")
        assert statuses(it, 3) == [200, 429, 429]
        assert statuses(it, 2, "/y") == [200, 429]
        refused = ask(it, "/y")
        assert refused.status_code == 429
        clock.advance(int(refused["Retry-After"]))
        assert statuses(it, 2, "/y") == [200, 429]


def test_several_rates_and_whole_limits(project: Open) -> None:
    """A scope may have several, and whatever a limit may say."""
    rates = {"user": ["9/minute", Limit("2/day")], "anon": "10 per 5 minutes burst 3"}
    it = project(path("x", view(rest.UserRateThrottle, rest.AnonRateThrottle)), rates=rates)
    assert statuses(it, 3) == [200, 200, 429]
    assert statuses(it, 3, who="") == [200, 200, 429]


def test_options_are_attributes(project: Open) -> None:
    """Such as ``cost``, which may be a method, and parts of the key besides the user."""

    class Heavy(rest.UserRateThrottle):
        methods = ("POST",)

        def cost(self, request: Any) -> int:
            return int(request.query.get("n", 1))

    each = type("Each", (rest.UserRateThrottle,), {"scope": "contacts", "key": ("user", "path")})
    exact = type("Exact", (rest.UserRateThrottle,), {"scope": "exact", "rate": "2/day", "algorithm": "sliding_log"})
    it = project(path("x", view(Heavy)), path("y", view(each)), path("z", view(each)), path("exact", view(exact)))
    assert statuses(it, 2, "/x?n=2", method="POST") + statuses(it, 5) == [200, 429] + [200] * 5
    assert statuses(it, 3, "/y") + statuses(it, 3, "/z") == [200, 200, 429] * 2
    assert statuses(it, 3, "/exact") == [200, 200, 429]


def test_limits_of_the_caller(project: Open) -> None:
    """A scope is the name of a rule, for which a caller may have limits of its own."""
    it = project(
        path("x", view(rest.UserRateThrottle)),
        identify=lambda request: Caller(
            request.headers.get("authorization", "nobody"),
            limits={"user": "1/minute"} if request.headers.get("authorization") == "slow" else {},
        ),
    )
    assert statuses(it, 4) == [200, 200, 200, 429]
    assert statuses(it, 2, who="slow") == [200, 429]


class ByIdent(rest.UserRateThrottle):
    scope = "contacts"

    def get_cache_key(self, request: Any, view: Any) -> str:
        return self.get_ident(request)


def test_addresses_are_counted_as_by_all_limits() -> None:
    """Behind trusted proxies, and IPv6 by network; a forged field is not believed, as it is by the originals."""
    patterns = path("x", view(rest.AnonRateThrottle)), path("y", view(ByIdent))
    framework = {"DEFAULT_THROTTLE_RATES": RATES}
    with WAYS["wsgi"].project(*patterns, trusted_proxies=["192.0.2.1"], REST_FRAMEWORK=framework) as it:
        for url, peer in itertools.product("xy", ("192.0.2.9", "192.0.2.1")):
            fields = [{"X-Forwarded-For": f"2001:db8::{number}"} for number in range(3)]
            assert [it.ask(f"/{url}", headers=each, REMOTE_ADDR=peer).status_code for each in fields] == [200, 200, 429]


def test_one_bucket_of_a_throttle() -> None:
    """A limiter finds the bucket of a user by the throttle, and bans it there."""
    store = MemoryStore(Clock())
    bucket = Limiter(store).bucket
    with WAYS["wsgi"].project(
        path("x", view(rest.UserRateThrottle)), store=store, REST_FRAMEWORK={"DEFAULT_THROTTLE_RATES": RATES}
    ) as it:
        assert statuses(it, 2) == [200, 200]
        assert bucket(rest.UserRateThrottle, user="ann").peek().remaining == 1
        bucket(rest.UserRateThrottle, user="ann").ban(60)
        assert (statuses(it, 1), statuses(it, 1, who="bob")) == ([429], [200])
        assert rest.ScopedRateThrottle.rule is None


@pytest.mark.parametrize("scope", ["login attempts", "Anmeldung ä", "a" * 80, "a/b"])
def test_any_text_is_a_scope(project: Open, scope: str) -> None:
    """The rule has a name like it."""
    it = project(path("x", view(rest.ScopedRateThrottle, throttle_scope=scope)), rates={scope: "1/m"}, headers=["draft-11"])
    assert statuses(it, 2) == [200, 429]


def test_rates_that_are_none(project: Open) -> None:
    """What is no limit is told, with the scope and what was expected."""
    for rate, expected in (
        ("5/fortnight", "'fortnight' is not a unit"),
        ({"a": 1}, "for example '100/day'"),
        (5, "for example"),
    ):
        it = project(path("x", view(rest.UserRateThrottle)), rates={"user": rate})
        with pytest.raises(ConfigError, match=expected):
            ask(it)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"limits": ("1/m",)}, "unknown attribute 'limits'"),
        ({"limits": lambda _: "1/m"}, "expected rate or scope"),
        ({"scop": "burst"}, "unknown attribute 'scop', did you mean 'scope'[?] expected one of scope, rate"),
        ({"cache": {}}, "unknown attribute 'cache'"),
    ],
)
def test_a_slip_is_told_where_the_class_is_defined(attributes: dict[str, Any], expected: str) -> None:
    """What such a throttle does not know is a mistake; the buckets are in the store of LimitGate."""
    with pytest.raises(ConfigError, match=expected):
        type("Wrong", (rest.UserRateThrottle,), attributes)


def test_without_the_middleware_and_switched_off(way: Way) -> None:
    """A throttle never runs unlimited in silence."""
    framework = {"DEFAULT_THROTTLE_RATES": {"user": "1/m", "anon": "1/m"}}
    pattern = path("x", view(rest.UserRateThrottle, rest.AnonRateThrottle))
    with way.project(pattern, gates=0, REST_FRAMEWORK=framework) as it, pytest.raises(ConfigError, match="LimitGateMiddleware"):
        ask(it)
    with way.project(pattern, enabled=False, REST_FRAMEWORK=framework) as it:
        assert statuses(it, 3) == [200] * 3


def test_they_are_throttles() -> None:
    """As REST framework knows them."""
    for name in ("SimpleRateThrottle", "AnonRateThrottle", "UserRateThrottle", "ScopedRateThrottle"):
        assert issubclass(getattr(rest, name), BaseThrottle)


def test_routes_are_listed_with_their_throttles() -> None:
    """Those of views, of functions, of actions of view sets, and by the scope of the view; none that a request has to tell."""

    class Burst(rest.Throttle):
        limits = ("9/minute",)

    class Plain(APIView):
        throttle_classes = (
            Burst,
            rest.UserRateThrottle,
            throttling.AnonRateThrottle,
        )

        def get(self, request: Any) -> None: ...

    class Scoped(APIView):
        throttle_classes = (rest.ScopedRateThrottle,)
        throttle_scope = "uploads"

        def post(self, request: Any) -> None: ...

    class Asking(Plain):
        def get_throttles(self) -> list[Any]:
            return []

    class Things(ViewSet):
        throttle_classes = (rest.AnonRateThrottle,)

        def list(self, request: Any) -> None: ...

        @action(detail=False, throttle_classes=[rest.UserRateThrottle])
        def some(self, request: Any) -> None: ...

    @api_view(["GET"])
    @throttle_classes([Burst])
    def function(request: Any) -> None: ...

    urlconf = ModuleType("urls")
    urlconf.urlpatterns = [  # type: ignore[attr-defined]
        path("plain", Plain.as_view()),
        path("scoped", Scoped.as_view()),
        path("free", Scoped.as_view(throttle_scope="free")),
        path("wrong", Scoped.as_view(throttle_scope="nowhere")),
        path("asking", Asking.as_view()),
        path("things", Things.as_view({"get": "list"})),
        path("some", Things.as_view({"get": "some"}, **Things.some.kwargs)),
        path("function", function),
    ]
    with override_settings(REST_FRAMEWORK={"DEFAULT_THROTTLE_RATES": RATES}):
        listed = {route.template: [each.name for each in route.marks(route.methods[0])] for route in routes_of(urlconf)}
    assert listed == {
        "/plain": [Burst.rule.name, "user"],
        "/scoped": ["uploads"],
        "/free": [],
        "/wrong": [],
        "/asking": [],
        "/things": ["anon"],
        "/some": ["user"],
        "/function": [Burst.rule.name],
    }
