"""The throttle for Django REST framework, in threads and on an event loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.urls import path

from limitgate import ConfigError, Limit, MemoryStore, Rule
from limitgate.rules.options import ChargeIf
from tests.support.clock import Clock
from tests.support.django_app import WAYS, Project, Way

# isort: split
from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.views import APIView

from limitgate.django.rest import Throttle

Open = Callable[..., Project]
NOWHERE = "redis://127.0.0.1:1"


class ByToken(BaseAuthentication):
    """The token is the user's id; ``nobody`` has none."""

    def authenticate(self, request: Any) -> Any:
        token = request.headers.get("Authorization", "")
        return (SimpleNamespace(pk=token, is_authenticated=True), token) if token else None

    def authenticate_header(self, request: Any) -> str:
        return "Token"


class Twice(Throttle):
    limits = ("2/minute",)
    name = "twice"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def project(way: Way) -> Iterator[Open]:
    with contextlib.ExitStack() as opened:
        yield lambda *patterns, **options: opened.enter_context(way.project(*patterns, **options))


def view(*throttles: Any, status: int = 200, **more: Any) -> Any:
    """A view of REST framework with these throttles."""

    def get(self: APIView, request: Any) -> Response:
        return Response({"user": getattr(request.user, "pk", None)}, status)

    options = {"throttle_classes": throttles, "authentication_classes": [ByToken], "get": get, "post": get, **more}
    return type("Limited", (APIView,), options).as_view()


def ask(it: Project, url: str = "/x", who: str = "ann", **more: Any) -> Any:
    return it.ask(url, headers={"Authorization": who} if who else {}, **more)


def statuses(it: Project, *asked: tuple[str, str]) -> list[int]:
    return [ask(it, url, who).status_code for url, who in asked]


def test_it_counts_authenticated_users(project: Open) -> None:
    """Each user has a bucket, whoever is not authenticated has that of the address."""
    it = project(path("x", view(Twice)))
    assert statuses(it, *[("/x", "ann")] * 3, *[("/x", "bob")] * 3, *[("/x", "")] * 3) == [200, 200, 429] * 3


def test_the_refusal(project: Open) -> None:
    """REST framework answers in its own way, with a true ``Retry-After`` and the rate fields of the throttle."""
    it = project(path("x", view(Twice)), rules=[Rule("all", "9/minute")])
    first = ask(it)
    assert (first["X-RateLimit-Limit"], first["X-RateLimit-Remaining"]) == ("2", "1")
    ask(it)
    refused = ask(it)
    assert (refused.status_code, refused["Retry-After"], refused["X-RateLimit-Remaining"]) == (429, "30", "0")
    assert b"throttled" in refused.body


def test_a_refusal_gives_back_what_the_rules_took(project: Open) -> None:
    """A request that a throttle refuses is charged to no rule, and to none of the other throttles either."""

    class Other(Throttle):
        limits = ("3/minute",)

    it = project(path("x", view(Other, Twice)), path("y", view(Other)), path("z", view()), rules=[Rule("all", "5/minute")])
    assert statuses(it, *[("/x", "ann")] * 5) == [200, 200, 429, 429, 429]
    assert statuses(it, *[("/y", "ann")] * 2) == [200, 429]
    assert statuses(it, *[("/z", "ann")] * 3) == [200, 200, 429]


def test_refused_users_are_not_weighed(project: Open) -> None:
    """Who is not let in by authentication never reaches a throttle; the rules have counted the request."""
    it = project(path("x", view(Twice, permission_classes=[IsAuthenticated])), rules=[Rule("all", "4/minute")])
    assert statuses(it, *[("/x", "")] * 2, *[("/x", "ann")] * 3) == [401, 401, 200, 200, 429]


def test_views_share_a_throttle_unless_its_key_has_the_path(project: Open) -> None:
    """A throttle is one limit for all views that have it."""

    class Each(Throttle):
        limits = ("1/minute",)
        key = ("user", "path")

    it = project(path("x", view(Twice)), path("y", view(Twice)), path("p/<int:n>", view(Each)), path("q", view(Each)))
    assert statuses(it, ("/x", "ann"), ("/y", "ann"), ("/x", "ann"), ("/y", "ann")) == [200, 200, 429, 429]

    class Numbered(APIView):
        throttle_classes = (Each,)
        authentication_classes = (ByToken,)

        def get(self, request: Any, n: int = 0) -> Response:
            return Response()

    it = project(path("p/<int:n>", Numbered.as_view()), path("q", Numbered.as_view()))
    assert statuses(it, ("/p/1", "ann"), ("/p/2", "ann"), ("/q", "ann"), ("/q", "bob")) == [200, 429, 200, 200]


def test_methods_cost_and_outcome(project: Open) -> None:
    """A throttle takes what a rule takes."""

    class Writing(Throttle):
        limits = ("4/minute",)
        methods = ("POST",)
        cost = 2

    class Failing(Throttle):
        limits = ("1/minute",)
        charge_if = ChargeIf(status=(404,))

    it = project(path("x", view(Writing)), path("y", view(Failing)), path("z", view(Failing, status=404)))
    assert statuses(it, *[("/x", "ann")] * 5) == [200] * 5
    assert [ask(it, method="POST").status_code for _ in range(3)] == [200, 200, 429]
    assert statuses(it, *[("/y", "ann")] * 3, *[("/z", "ann")] * 2, ("/y", "ann")) == [200, 200, 200, 404, 429, 429]


def test_subclasses_have_limits_of_their_own(project: Open) -> None:
    """What derives from a throttle is another one, with a name of its own."""

    class More(Twice):
        limits = ("3/minute",)

    assert Twice.rule.name == "twice" != More.rule.name
    it = project(path("x", view(Twice)), path("y", view(More)))
    assert statuses(it, *[("/x", "ann")] * 3, *[("/y", "ann")] * 4) == [200, 200, 429, 200, 200, 200, 429]


@pytest.mark.parametrize(("on_error", "expected"), [("open", [200] * 3), ("closed", [503] * 3), ("local", [200, 200, 429])])
def test_without_the_store(project: Open, on_error: str, expected: list[int]) -> None:
    """``on_error`` of a throttle decides; closed is a 503, never a 429."""

    class Kept(Twice):
        limits = ("2/minute",)

    Kept.rule = Kept.rule.model_copy(update={"on_error": on_error})
    it = project(path("x", view(Kept)), store=NOWHERE)
    replies = [ask(it) for _ in range(3)]
    assert [reply.status_code for reply in replies] == expected
    assert [reply.headers.get("Retry-After") for reply in replies if reply.status_code == 503] == ["1"] * expected.count(503)


def test_switched_off(project: Open) -> None:
    """With LimitGate switched off a throttle lets everybody pass."""
    it = project(path("x", view(Twice)), enabled=False)
    assert statuses(it, *[("/x", "ann")] * 4) == [200] * 4


def test_an_exempt_request_is_not_throttled(project: Open) -> None:
    """An exempt rule switches throttles off as it does everything else."""
    it = project(path("x", view(Twice)), rules=[Rule("free", path="/x", exempt=True)])
    assert statuses(it, *[("/x", "ann")] * 4) == [200] * 4


def test_without_the_middleware(way: Way) -> None:
    """A throttle never runs unlimited in silence."""
    with way.project(path("x", view(Twice)), gates=0) as it, pytest.raises(ConfigError, match="LimitGateMiddleware"):
        ask(it)


def test_mistakes(project: Open) -> None:
    """A mistake is told where the class is defined, a class without limits where it is used."""
    with pytest.raises(ConfigError, match="5/fortnight"):
        type("Wrong", (Throttle,), {"limits": ("5/fortnight",)})
    with pytest.raises(ConfigError, match="nonsense"):
        type("Wrong", (Throttle,), {"limits": ("5/minute",), "key": ("nonsense",)})
    with pytest.raises(TypeError, match="no limits"):
        ask(project(path("x", view(Throttle))))


def test_a_user_without_anything_to_tell_it_by(project: Open) -> None:
    """A user that nothing tells from others is an error, not a bucket that all of them share."""

    class Useless(ByToken):
        def authenticate(self, request: Any) -> Any:
            return SimpleNamespace(is_authenticated=True), None

    with pytest.raises(TypeError, match="user returned a SimpleNamespace"):
        ask(project(path("x", view(Twice, authentication_classes=[Useless]))))


def test_waiting_is_enough(way: Way) -> None:
    """Who waits as long as ``Retry-After`` says is admitted."""
    clock = Clock()
    with way.project(path("x", view(Twice)), store=MemoryStore(clock)) as it:
        assert statuses(it, *[("/x", "ann")] * 2) == [200, 200]
        clock.now += int(ask(it)["Retry-After"]) * 1_000_000
        assert ask(it).status_code == 200


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        (
            {"limits": ("2/minute",), "on_eror": "closed"},
            "unknown attribute 'on_eror', did you mean 'on_error'?",
        ),
        ({"rate": "2/minute"}, "unknown attribute 'rate', did you mean 'limits'?"),
        ({"limits": "2/minute"}, "limits or key is text"),
        ({"limits": ("2/minute",), "key": "user"}, "limits or key is text"),
    ],
)
def test_a_slip_is_no_silent_default(attributes: dict[str, Any], expected: str) -> None:
    """What a throttle does not know is a mistake, told where the class is defined; helpers of one's own begin with ``_``."""
    with pytest.raises(ConfigError, match=expected):
        type("Wrong", (Throttle,), attributes)
    type("Right", (Throttle,), {"limits": ("2/minute",), "_mine": 1, "wait": Throttle.wait, "helper": property(str)})


def test_how_a_throttle_counts() -> None:
    """``algorithm`` and ``align`` are for the limits of a throttle, as on rules."""

    class Daily(Throttle):
        limits = ("2/day",)
        algorithm = "fixed_window"
        align = "Europe/Berlin"

    assert Daily.rule.every_limit == (Limit("2/day", algorithm="fixed_window", align="Europe/Berlin"),)


def by_path(request: Any) -> str | None:
    return {"/x": "1/minute", "/y": None}.get(request.path, "often")


def by_user(request: Any) -> str:
    return "1/minute" if request.user.pk == "ann" else "2/minute"


async def alater(request: Any) -> str:
    return "1/minute"


class ByFunction(Throttle):
    limits = by_path


class ByMethod(Throttle):
    def limits(self, request: Any) -> str:  # type: ignore[override]
        return by_user(request)

    def cost(self, request: Any) -> int:
        return int(request.query.get("cost", "1"))

    def when(self, request: Any) -> bool:
        return request.query.get("free") is None


def test_a_function_gives_the_limits_of_a_throttle(project: Open) -> None:
    """None for no limit; it finds the request as rules do."""
    it = project(path("x", view(ByFunction)), path("y", view(ByFunction)))
    assert statuses(it, *[("/x", "ann")] * 2, *[("/y", "ann")] * 3) == [200, 429, 200, 200, 200]


def test_methods_of_a_throttle_are_called_as_such(project: Open) -> None:
    """Limits, cost and condition by methods, which find whom REST framework has authenticated."""
    it = project(path("x", view(ByMethod)))
    assert statuses(it, *[("/x", "ann")] * 2, *[("/x", "bob")] * 3) == [200, 429, 200, 200, 429]
    assert statuses(it, ("/x?cost=2", "eve"), ("/x?cost=1", "eve"), ("/x?free=1", "eve")) == [200, 429, 200]


def test_an_async_function_gives_limits_on_an_event_loop(way: Way, project: Open) -> None:
    """In threads it is a mistake that is told."""

    class Later(Throttle):
        limits = alater

    it = project(path("x", view(Later)))
    if way.awaits:
        assert statuses(it, *[("/x", "ann")] * 2) == [200, 429]
    else:
        with pytest.raises(TypeError, match="is async, expected a plain function under WSGI"):
            ask(it)
