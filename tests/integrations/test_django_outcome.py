"""Charge by outcome and by a cost that is known afterwards, in all four ways in which requests come to Django."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.http import FileResponse, HttpResponse, StreamingHttpResponse, UnreadablePostError
from django.urls import path

from limitgate import Rule, limit
from limitgate.exchange.base import EXCHANGE
from tests.support.django_app import WAYS, Project
from tests.support.outcomes import Watched

Open = Callable[..., Project]


@pytest.fixture(params=WAYS)
def project(request: pytest.FixtureRequest) -> Iterator[Open]:
    with contextlib.ExitStack() as opened:
        yield lambda *patterns, **options: opened.enter_context(WAYS[request.param].project(*patterns, **options))


def answer(request: Any, status: int) -> HttpResponse:
    if status == 500:
        raise ValueError("as told")
    return HttpResponse(status=status)


def left(it: Project, url: str = "/left") -> int:
    """How much is left, not counting the question."""
    return int(it.ask(url)["X-RateLimit-Remaining"]) + 1


def statuses(it: Project, *asked: int) -> list[int]:
    it.client.raise_request_exception = False
    return [it.ask(f"/{status}").status_code for status in asked]


def test_only_some_statuses_count(project: Open) -> None:
    """What does not count is given back when the response is over."""
    failed = Rule("failed", "2/minute", charge_if={"status": [401, 403]})
    it = project(path("<int:status>", answer), rules=[failed])
    assert statuses(it, 200, 200, 200, 401, 200, 403, 200) == [200, 200, 200, 401, 200, 403, 429]


def test_what_the_server_broke_costs_nothing(project: Open) -> None:
    """An error in a view is a 500, and may be left out."""
    it = project(path("<int:status>", answer), rules=[Rule("all", "2/minute", charge_if={"status_not": ["5xx"]})])
    assert statuses(it, 500, 500, 500, 503, 200, 500, 200, 200) == [500, 500, 500, 503, 200, 500, 200, 429]


@pytest.mark.parametrize("options", [{}, {"enabled": False}])
def test_a_client_that_leaves_while_it_sends_stays_charged(project: Open, options: dict[str, Any]) -> None:
    """Django makes a 500 of a body that breaks off, but hanging up is no way to be charged nothing."""
    store = Watched()

    def view(request: Any) -> HttpResponse:
        raise UnreadablePostError("the client is gone")

    rules = [Rule("all", "9/minute", charge_if={"status_not": ["5xx"]})]
    it = project(path("x", view), rules=rules, store=store, **options)
    it.client.raise_request_exception = False
    assert it.ask("/x").status_code == 500
    assert store.owed == ({} if options else {"all": 1})


def test_settling(project: Open) -> None:
    """A view says what a request has cost, and the bucket is put right, down and up."""

    @limit("100/minute", cost=10, name="tokens")
    def view(request: Any, status: int) -> HttpResponse:
        request.limitgate.settle(status)
        return HttpResponse(status=200)

    it = project(path("<int:status>", view))
    assert it.ask("/3")["X-RateLimit-Remaining"] == "90"
    assert it.ask("/60")["X-RateLimit-Remaining"] == "87"
    assert it.ask("/200")["X-RateLimit-Remaining"] == "27"
    refused = it.ask("/1")
    assert (refused.status_code, refused["Retry-After"]) == (429, "104")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_stream_is_over_when_it_is_closed(project: Open, kind: str) -> None:
    """What a stream says that it cost while it runs still counts, and its outcome is settled when it was sent."""

    def view(request: Any) -> Any:
        def chunks() -> Iterator[bytes]:
            yield b"some"
            request.limitgate.settle(7)

        if kind == "stream":
            return StreamingHttpResponse(chunks())
        request.limitgate.settle(7)
        return FileResponse(open(__file__, "rb"))  # noqa: PTH123 - closed with the response

    it = project(path("x", view), path("left", lambda _: HttpResponse()), rules=[Rule("all", "100/day", cost=1)])
    assert it.ask("/x").status_code == 200
    assert left(it) == 93


def test_a_stream_is_put_right_at_its_beginning(project: Open) -> None:
    """A stream whose status does not count keeps nothing from others, however long it takes."""
    store, seen = Watched(), []

    def view(request: Any) -> StreamingHttpResponse:
        def chunks() -> Iterator[bytes]:
            seen.append(store.owed)
            yield b"some"

        return StreamingHttpResponse(chunks())

    it = project(path("x", view), rules=[Rule("failed", "9/minute", charge_if={"status": [401]})], store=store)
    assert it.ask("/x").status_code == 200
    assert seen == [{}]
    assert store.corrections == 1


class Killed(BaseException):
    """What Django lets pass, like the cancellation of a request whose client has left."""


def test_what_was_told_of_a_request_that_is_killed_counts(project: Open) -> None:
    """Where Django makes no response of it, there is no status, but a cost that was told."""
    store = Watched()

    def view(request: Any) -> HttpResponse:
        request.limitgate.settle(7, rule="cost")
        raise Killed

    rules = [Rule("failed", "9/minute", charge_if={"status": [401]}), Rule("cost", "9/minute")]
    it = project(path("x", view), rules=rules, store=store)
    with pytest.raises(Killed):
        it.ask("/x")
    assert store.owed == {"failed": 1, "cost": 7}


def test_a_request_that_is_over_is_let_go_of(project: Open) -> None:
    """What stays of an admission in a request does not lead back to it, allowed or refused, so both are freed at once."""
    seen: list[Any] = []

    def view(request: Any) -> HttpResponse:
        seen.append(getattr(request, "scope", request.META)[EXCHANGE].open_admission())
        return HttpResponse(status=429)

    it = project(path("x", view), rules=[Rule("all", "1/minute")], on_denied=view)
    assert [it.ask("/x").status_code for _ in range(2)] == [429, 429]
    assert [admission.decision.allowed for admission in seen] == [True, False]
    assert not any(admission.request for admission in seen)


def test_a_stream_that_is_over_is_let_go_of() -> None:
    """Under WSGI a streaming response is freed as soon as it is closed, as it is without a gate."""
    made: list[Any] = []

    def view(request: Any) -> StreamingHttpResponse:
        response = StreamingHttpResponse(iter([b"some"]))
        made.append(weakref.ref(response))
        return response

    with WAYS["wsgi"].project(path("x", view), rules=[Rule("all", "9/minute")]):
        ask = WAYS["wsgi"].handled()
        gc.collect()
        gc.disable()
        try:
            assert ask("/x") == 200
            assert made[0]() is None
        finally:
            gc.enable()


def test_a_cost_that_is_told_while_the_response_is_completed_counts(project: Any) -> None:
    """A thread of the view's may still be at work then."""
    raised: list[Any] = []

    def view(request: Any) -> HttpResponse:
        class Headers(type(HttpResponse().headers)):  # type: ignore[misc]
            def __setitem__(self, name: str, value: str) -> None:
                if name == "X-RateLimit-Limit":
                    request.limitgate.settle(1)
                super().__setitem__(name, value)

        response = HttpResponse()
        response.headers = Headers(dict(response.headers))
        raised.append(request.limitgate.remaining)
        return response

    it = project(path("x", view), rules=[Rule("all", "100/day", cost=10)])
    for _ in range(3):
        it.ask("/x")
    assert raised == [90, 89, 88]
