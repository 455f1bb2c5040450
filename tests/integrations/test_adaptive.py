"""`adaptive` behind the frameworks: their routes are its classes, their responses its samples."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakSet

import flask
import pytest
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import path
from fastapi import FastAPI
from fastapi.testclient import TestClient

from limitgate import Adaptive, LimitGate, Rule, limit
from limitgate.exchange.in_flight import UploadInFlight
from limitgate.flask import LimitGate as FlaskLimitGate
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter
from limitgate.process.forking import living
from tests.support.django_app import WAYS, rate
from tests.support.doors import PATIENCE

RULE = Rule("all", adaptive=Adaptive(min=2, max=2))
others: WeakSet[ConcurrencyLimiter] = WeakSet()
"""Of tests before. A thread, or the last record of somebody's log, may hold their gates for as long as it likes."""


def of_all_gates() -> set[ConcurrencyLimiter]:
    """The places of the rule of the gates there are."""
    return {
        each for each in living(ConcurrencyLimiter) if type(each) is ConcurrencyLimiter and each.terms.adaptive == RULE.adaptive
    }


@pytest.fixture(autouse=True)
def _others_are_known() -> None:
    others.update(of_all_gates())


def places() -> ConcurrencyLimiter:
    """Those of the only gate of this test."""
    (found,) = of_all_gates() - set(others)
    return found


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_django(way: Any) -> None:
    """In threads and on event loops: a view, a stream, an error, and a refusal."""

    def view(request: Any, number: int = 0) -> HttpResponse:
        assert request.limitgate.windows[0][:5] == ("all", 2, 0, 1, 1)
        return HttpResponse("done")

    def stream(request: Any) -> StreamingHttpResponse:
        return StreamingHttpResponse(iter([b"do", b"ne"]))

    def error(request: Any) -> HttpResponse:
        raise ValueError

    urls = path("view/<int:number>", view), path("stream", stream), path("error", error)
    with way.project(*urls, rules=[RULE]) as project:
        project.client.raise_request_exception = False
        assert project.statuses("/view/1", "/view/2", "/stream", "/error", "/none") == [200, 200, 200, 500, 404]
        limit_of_all = places().limit
        assert limit_of_all.in_flight == 0
        assert list(limit_of_all.base_s_by_class) == [("GET", "/view/<int:number>")]
        for _ in range(2):
            limit_of_all.begin(0.0, "other")
        response = project.ask("/view/1")
        assert response.status_code == 503
        assert 1 <= int(response["retry-after"]) <= 11
        assert response["cache-control"] == "no-store"


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_view_that_reads_its_body_on_django(way: Any) -> None:
    """In a thread it is watched for how long the client takes; an event loop has all of it before."""

    def view(request: Any) -> HttpResponse:
        watched.append(isinstance(request._stream, UploadInFlight))
        in_flight.append(places().limit.in_flight)
        return HttpResponse(request.body)

    watched: list[bool] = []
    in_flight: list[int] = []

    with way.project(path("", view), rules=[RULE]) as project:
        response = project.ask("/", method="POST", data=b"all", content_type="text/plain")
        assert (response.status_code, response.content, in_flight) == (200, b"all", [1])
        assert watched == [True] or way is not WAYS["wsgi"]
        assert places().limit.in_flight == 0


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_refusal_by_a_rate_has_its_fields_on_django(way: Any) -> None:
    rules = [Rule("api", "1/hour"), Rule("all", adaptive=RULE.adaptive, shadow=True)]
    with way.project(path("", lambda _: HttpResponse("done")), rules=rules) as project:
        responses = [project.ask("/") for _ in range(2)]
        assert [response.status_code for response in responses] == [200, 429]
        assert [rate(response)["x-ratelimit-limit"] for response in responses] == ["1", "1"]


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_an_error_of_a_rule_gives_places_back_on_django(way: Any) -> None:
    """Whoever keeps it."""

    def cost(request: Any) -> int:
        raise ZeroDivisionError(request.path)

    with way.project(path("", lambda _: HttpResponse()), rules=[RULE, Rule("api", "5/second", cost=cost)]) as project:
        with pytest.raises(ZeroDivisionError) as kept:
            project.ask("/")
        assert places().limit.in_flight == 0
        assert kept.traceback


def test_a_request_under_django_that_is_cancelled_waits_for_no_place() -> None:
    """Whoever keeps the task."""
    rules = [Rule("all", adaptive=RULE.adaptive, max_delay=60)]
    with WAYS["asgi"].project(path("", lambda _: HttpResponse()), rules=rules) as project:
        project.client.handler.load_middleware(is_async=True)

        async def main() -> None:
            limit = places().limit
            for _ in range(2):
                limit.begin(0.0, "other")
            task = asyncio.create_task(project.aask("/"))
            async with asyncio.timeout(PATIENCE):
                while not limit.waiting:  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert (limit.in_flight, limit.waiting) == (2, 0)

        asyncio.run(main())


def test_flask() -> None:
    app = flask.Flask(__name__)

    @app.get("/view/<int:number>")
    @limit("9/hour", adaptive=RULE.adaptive)
    def view(number: int) -> str:
        return str(flask.request.environ["limitgate"].windows[1][:3])

    FlaskLimitGate(app, rules=[Rule("other", path="/other", adaptive=True)])
    app.register_error_handler(429, lambda _: ("own", 429))
    client = app.test_client()
    first = client.get("/view/1")
    assert "2, 0" in first.text
    assert list(places().limit.base_s_by_class) == [("GET", "/view/<int:number>")]
    assert places().limit.in_flight == 0  # though the client reads one part of the body and closes nothing
    for _ in range(2):
        places().limit.begin(0.0, "other")
    assert client.get("/view/2").status_code == 503


def test_fastapi() -> None:
    app = FastAPI()

    @app.get("/view/{number}")
    def view(number: int) -> int:  # in a thread
        return number

    app.add_middleware(LimitGate, rules=[RULE])
    with TestClient(app) as client:
        assert [client.get(f"/view/{number}").status_code for number in range(5)] == [200] * 5
        assert client.get("/none").status_code == 404
        assert list(places().limit.base_s_by_class) == [("GET", "/view/{number}")]
        assert places().limit.in_flight == 0
        for _ in range(2):
            places().limit.begin(0.0, "other")
        assert client.get("/view/1").status_code == 503
