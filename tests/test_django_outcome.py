"""Charge by outcome and by a cost that is known afterwards, in all four ways in which requests come to Django."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.urls import path

from limitgate import Rule, limit
from tests.django_app import WAYS, Project

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
