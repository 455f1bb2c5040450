"""Limits by Django's user: who it is, when it is looked up, and that this never blocks an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections
from django.http import HttpResponse
from django.urls import path
from django.utils.functional import SimpleLazyObject

from limitgate import Adaptive, Caller, ConfigError, Rule, ausage, exempt, limit, usage
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter
from limitgate.process.forking import living
from tests.support.django_app import (
    AUTHENTICATION,
    CHANGING,
    SESSIONS,
    WAYS,
    AnonymousUser,
    Changing,
    Project,
    Session,
    User,
    Way,
    hello,
)
from tests.support.doors import PATIENCE

Open = Callable[..., Project]
LOGGED_IN = (SESSIONS, AUTHENTICATION)
BY_USER = Rule("mine", "1/day", key=["user"])
HELLO = path("hello", hello)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def project(way: Way) -> Iterator[Open]:
    """Opens projects whose requests come one way, behind Django's sessions and authentication unless told otherwise."""
    with contextlib.ExitStack() as opened:

        def opening(*patterns: Any, before: tuple[str, ...] = LOGGED_IN, **options: Any) -> Project:
            return opened.enter_context(way.project(*patterns, before=before, trusted_proxies=["127.0.0.1"], **options))

        yield opening


@pytest.fixture(scope="module")
def users() -> Iterator[list[User]]:
    """Ann and Bob, in a real database; so are their sessions."""
    with connection.schema_editor() as editor:
        for model in (User, Session):
            editor.create_model(model)
    yield [User.objects.create_user(name) for name in ("ann", "bob")]
    with connection.schema_editor() as editor:  # the module may get its turn once more in this process
        for model in (Session, User):
            editor.delete_model(model)
    connections.close_all()
    asyncio.run(sync_to_async(connections.close_all)())


def asked(it: Project, *who: tuple[User | None, str], where: str = "/hello", **headers: str) -> list[int]:
    """The statuses that users get, each from an address of the network 192.0.2."""
    found = []
    for user, host in who:
        it.client.logout()
        if user is not None:
            it.client.force_login(user)
        found.append(it.ask(where, headers={"X-Forwarded-For": f"192.0.2.{host}", **headers}).status_code)
    return found


# --- who --------------------------------------------------------------------------------------------------------------


def test_each_user_has_a_bucket(project: Open, users: list[User]) -> None:
    """Users with sessions in a database are told apart wherever they call from; who is not logged in goes by address."""
    ann, bob = users
    it = project(HELLO, rules=[BY_USER])
    who = [(ann, "1"), (ann, "2"), (bob, "1"), (bob, "2"), (None, "1"), (None, "1"), (None, "2")]
    assert asked(it, *who) == [200, 429, 200, 429, 200, 429, 200]


def test_a_decorator_by_user(project: Open, users: list[User]) -> None:
    """The same for a decorated view."""
    ann, bob = users
    it = project(path("hello", limit("1/day", key=["user"])(hello)))
    assert asked(it, (ann, "1"), (bob, "1"), (ann, "2")) == [200, 200, 429]


def test_a_cost_and_identify_may_ask_for_the_user(way: Way, project: Open, users: list[User]) -> None:
    """Whatever gets the request may look at ``request.user``, on an event loop too."""
    ann, bob = users

    def identify(request: Any) -> Caller | None:
        try:
            return Caller(request.user.username, tier="staff" if request.user == ann else "default")
        except Exception:  # noqa: BLE001 - as careful people write it
            return None

    async def aidentify(request: Any) -> Caller | None:
        await asyncio.sleep(0)
        return identify(request)

    def cost(request: Any) -> int:
        return 1 if request.user == ann else 2

    rules = [Rule("api", "2/day", key=["caller"], cost=cost), Rule("api", "1/day", key=["caller"], tier="staff")]
    for function in [identify, aidentify] if way.awaits else [identify]:
        it = project(HELLO, rules=rules, identify=function)
        assert asked(it, *[(ann, "1"), (bob, "1")] * 2) == [200, 200, 429, 429]


def test_identify_is_asked_once(project: Open, users: list[User]) -> None:
    """That the user is looked up only when a key asks for it has nobody identified twice."""
    calls = []

    def identify(request: Any) -> Caller | None:
        calls.append(request.path)
        return Caller("somebody")

    it = project(HELLO, rules=[BY_USER], identify=identify)
    assert asked(it, (users[0], "1"), (users[0], "1")) == [200, 429]
    assert calls == ["/hello", "/hello"]


def threads_only(user: Any) -> Any:
    """A user that may be looked up anywhere but on an event loop."""

    def find() -> Any:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise AssertionError("looked up on an event loop")
        return user

    return SimpleLazyObject(find)


@pytest.mark.parametrize("lazily", [lambda user: user, threads_only], ids=["known", "lazy"])
def test_the_user_of_other_middleware(
    project: Open, monkeypatch: pytest.MonkeyPatch, lazily: Callable[[Any], Any], users: list[User]
) -> None:
    """Where other middleware, for tokens say, puts its own user into ``request.user``, that one counts, not the session's."""

    def by_token(request: Any) -> None:
        request.user = lazily(SimpleNamespace(id=request.headers.get("X-Token"), is_authenticated=True))

    monkeypatch.setattr(Changing, "change", staticmethod(by_token))
    it = project(HELLO, rules=[BY_USER], before=(*LOGGED_IN, CHANGING))
    ann = [(users[0], "1")]
    assert [asked(it, *ann, **{"X-Token": token}) for token in "aba"] == [[200], [200], [429]]


def test_before_django_5(project: Open, monkeypatch: pytest.MonkeyPatch, users: list[User]) -> None:
    """Where there is no ``request.auser``, the user is looked up in a thread."""
    monkeypatch.setattr(Changing, "change", staticmethod(lambda request: request.__dict__.pop("auser", None)))
    it = project(HELLO, rules=[BY_USER], before=(*LOGGED_IN, CHANGING))
    assert asked(it, (users[0], "1"), (users[1], "1"), (users[0], "2")) == [200, 200, 429]


def test_without_authentication_the_server_names_the_user(project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing sets ``request.user``, it is ``REMOTE_USER``, else nobody."""

    def named(request: Any) -> None:
        request.META["REMOTE_USER"] = request.headers.get("X-Name", "")

    monkeypatch.setattr(Changing, "change", staticmethod(named))
    it = project(HELLO, rules=[BY_USER], before=(CHANGING,))
    names = ["ann", "bob", "ann", "", ""]
    assert [it.ask("/hello", headers={"X-Name": name}).status_code for name in names] == [200, 200, 429, 200, 429]


def test_an_anonymous_user_is_nobody(project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who is not logged in is no user, whatever the server calls them."""

    def anonymous(request: Any) -> None:
        request.META["REMOTE_USER"] = request.headers.get("X-Name", "")
        request.user = AnonymousUser()

    monkeypatch.setattr(Changing, "change", staticmethod(anonymous))
    it = project(HELLO, rules=[BY_USER], before=(CHANGING,))
    assert [it.ask("/hello", headers={"X-Name": name}).status_code for name in "ab"] == [200, 429]


# --- adaptive limits --------------------------------------------------------------------------------------------------


def test_one_place_does_for_a_request_whose_user_is_looked_up(project: Open, users: list[User]) -> None:
    ann = [(users[0], "1")] * 3
    own_cost = {"key": ["ip"], "cost": lambda request: request.user.id and 1}
    for options in ({"key": ["user"]}, own_cost):
        rule = Rule("mine", "2/day", adaptive=Adaptive(min=1, max=1), **options)
        assert asked(project(HELLO, rules=[rule]), *ann) == [200, 200, 429]


def test_a_user_is_looked_up_after_the_wait_for_a_place(users: list[User]) -> None:
    gc.collect()
    first: list[Any] = []

    def is_waiting() -> bool:
        return any(each.limit.waiting for each in living(ConcurrencyLimiter) if type(each) is ConcurrencyLimiter)

    async def view(request: Any) -> HttpResponse:
        if not first:
            first.append(request)
            async with asyncio.timeout(PATIENCE):
                while not is_waiting():  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(0.001)
        return HttpResponse(str([each.remaining for each in request.limitgate.windows if each.rule == "mine"]))

    async def main() -> list[bytes]:
        asking = [it.aask("/hello") for _ in range(2)]
        return [response.body for response in await asyncio.gather(*asking)]

    rules = [Rule("all", adaptive=Adaptive(min=1, max=1), max_delay=60), Rule("mine", "2/day", key=["user"])]
    with WAYS["asgi"].project(path("hello", view), before=LOGGED_IN, rules=rules) as it:
        it.client.force_login(users[0])
        assert asyncio.run(main()) == [b"[1]", b"[0]"]


# --- when -------------------------------------------------------------------------------------------------------------

QUIET: dict[str, Any] = {
    "no rule by user": ([Rule("api", "9/day")], hello, {}),
    "a rule for another path": ([Rule("mine", "9/day", path="/other", key=["user"])], hello, {}),
    "a rule for another method": ([Rule("mine", "9/day", methods=["POST"], key=["user"])], hello, {}),
    "an alternative that comes first": ([Rule("mine", "9/day", key=["api_key|user"])], hello, {"X-API-Key": "k"}),
    "an exempt view": ([Rule("mine", "9/day", key=["user"])], exempt(partial(hello)), {}),
    "an exempt path": ([Rule("ok", path="/hello", exempt=True), BY_USER], hello, {}),
}


@pytest.mark.parametrize("case", QUIET)
def test_nobody_is_looked_up_unless_a_key_asks(project: Open, users: list[User], case: str) -> None:
    """Where no key needs the user, there is no session lookup, so the response does not vary by cookie."""
    rules, view, headers = QUIET[case]
    it = project(path("hello", view), rules=rules)
    it.client.force_login(users[0])
    response = it.ask("/hello", headers=headers)
    assert (response.status_code, response.get("Vary")) == (200, None)
    assert not response_request(response).session.accessed


def test_a_lookup_shows(project: Open, users: list[User]) -> None:
    """Where a key asks for the user the response varies by cookie, admitted and refused."""
    it = project(HELLO, rules=[BY_USER])
    it.client.force_login(users[0])
    assert [(reply.status_code, reply["Vary"]) for reply in (it.ask("/hello"), it.ask("/hello"))] == [
        (200, "Cookie"),
        (429, "Cookie"),
    ]


def response_request(response: Any) -> Any:
    """The request that Django's test client keeps with a response."""
    return getattr(response, "wsgi_request", None) or response.asgi_request


def test_usage_of_a_user(way: Way, project: Open, users: list[User]) -> None:
    """A view shows what its user has left of a rule that is for other paths; on an event loop nothing blocks."""
    others = Rule("others", "9/day", path="/others/**", key=["user"])

    async def ashow(request: Any) -> HttpResponse:
        return HttpResponse(str([window.remaining for window in await ausage(request, "others")]))

    def show(request: Any) -> HttpResponse:
        return HttpResponse(str([window.remaining for window in usage(request, "others")]))

    it = project(path("others/x", hello), path("usage", show), path("ausage", ashow), rules=[others])
    it.client.force_login(users[0])
    it.ask("/others/x")
    right, wrong = ("/ausage", "/usage") if way.awaits else ("/usage", "/ausage")
    assert it.ask(right).content == b"[8]"
    with pytest.raises(ConfigError, match=r"expected await ausage" if way.awaits else "expected usage"):
        it.ask(wrong)
