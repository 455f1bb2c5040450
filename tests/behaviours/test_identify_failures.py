"""An ``identify`` that fails: its error is the application's, no request passes, and the log says once where it comes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
from flask import Flask
from starlette.applications import Starlette
from starlette.testclient import TestClient

import limitgate.flask
from limitgate import Caller, ConfigError, Limiter, LimitGate, LimitGateWSGI, MemoryStore, Rule
from limitgate.gate.planning import identity
from limitgate.http.request import MOST_LINES
from limitgate.internal_errors import place_in
from tests.support.doors import SITES, ASGISite, Site

PLACE = f"LookupError at {__name__}:"


def raising(request: Any) -> Caller | None:
    if request.path == "/free":
        return None
    raise LookupError("the customer's secret")


async def raising_later(request: Any) -> Caller | None:
    return raising(request)


@pytest.fixture(params=SITES, ids=attrgetter("door"))
def opened(request: pytest.FixtureRequest) -> Iterator[Callable[..., Site]]:
    """Opens sites of one door."""
    sites: list[Site] = []

    def opening(identify: Any, **options: Any) -> Site:
        options = {"rules": [Rule("api", "2/minute", key=["global"])], **options}
        sites.append(request.param(store=MemoryStore(), identify=identify, **options))
        return sites[-1]

    yield opening
    for it in sites:
        it.close()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged."""
    caplog.set_level(logging.WARNING, "limitgate")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("identify", [raising, raising_later])
def test_an_error_is_raised_and_told_once(opened: Callable[..., Site], told: Any, identify: Any) -> None:
    """The line says where, and repeats nothing of the error; the request neither passes nor is charged."""
    try:
        it = opened(identify)
    except ConfigError:
        pytest.skip("WSGI takes no async function")
    for _ in range(3):
        with pytest.raises(LookupError, match="secret"):
            it.ask()
    assert it.statuses(3, "/free") == [200, 200, 429]
    (line,) = told()
    assert line.startswith("LG071 identify failed, so requests failed: " + PLACE)
    assert "secret" not in line


def reading(request: Any) -> Caller | None:
    return Caller(request.headers["x-who"])


async def reading_later(request: Any) -> Caller | None:
    return reading(request)


class Reading:
    """A callable object."""

    def __call__(self, request: Any) -> Caller | None:
        return Caller(request.whatever)


def computing(_: Any) -> Caller | None:
    return Caller(str(Fraction(1, 0)))


def without_tier(_: Any) -> Caller | None:
    return Caller("ada", 5)  # type: ignore[arg-type]


def of_nothing() -> None:
    """Takes no request."""


@pytest.mark.parametrize(
    ("identify", "line"),
    [
        (reading, reading.__code__.co_firstlineno + 1),
        (reading_later, reading.__code__.co_firstlineno + 1),
        (partial(reading), reading.__code__.co_firstlineno + 1),
        (Reading(), Reading.__call__.__code__.co_firstlineno + 1),
        (computing, computing.__code__.co_firstlineno + 1),
        (without_tier, without_tier.__code__.co_firstlineno + 1),
    ],
)
def test_the_place_is_in_the_applications_own_code(opened: Callable[..., Site], told: Any, identify: Any, line: int) -> None:
    """Also if the error is raised below it, by LimitGate's own request or caller, or by a library."""
    try:
        it = opened(identify)
    except ConfigError:
        pytest.skip("WSGI takes no async function")
    with pytest.raises((KeyError, AttributeError, ZeroDivisionError, TypeError)):
        it.ask()
    assert f" at {__name__}:{line}; expected" in told()[0]


def test_the_place_below_flasks_request_context(told: Any) -> None:
    flask = Flask("shop")
    limitgate.flask.LimitGate(flask, rules=[Rule("api", "2/minute")], identify=reading, store=MemoryStore())
    with pytest.raises(KeyError):
        flask.test_client().get("/")
    assert f"KeyError at {__name__}:{reading.__code__.co_firstlineno + 1};" in told()[0]


def test_the_place_of_a_function_that_does_not_begin() -> None:
    def failing() -> TypeError:
        try:
            of_nothing(1)  # type: ignore[call-arg]
        except TypeError as error:
            return error.with_traceback(None)
        raise AssertionError

    assert place_in(of_nothing, failing()) == f"{__name__}:{of_nothing.__code__.co_firstlineno}"
    assert place_in(print, failing()) == "builtins"


def test_a_tier_that_no_rule_names_is_told_once(opened: Callable[..., Site], told: Any) -> None:
    """The default rules apply, and the line names the tiers that there are."""
    vip = Rule("api", "4/minute", key=["global"], tier="vip")

    def identify(request: Any) -> Caller:
        return Caller("ada", tier=request.headers["x-tier"])

    it = opened(identify, rules=[Rule("api", "2/minute", key=["caller"]), vip])
    for _ in range(2):
        for tier in ("VIP", "gold", "vip", "default", "x" * 5000, "a\n\ud800"):
            it.ask(headers={"X-Tier": tier.encode("unicode_escape").decode()})
    lines = told()
    assert [line.partition(" ")[0] for line in lines] == ["LG074"] * 4
    unknown = "which no rule names, so the default rules apply; "
    assert f"tier 'VIP', {unknown}did you mean 'vip'? expected one of default, vip (" in lines[0]
    assert f"tier 'gold', {unknown}expected one of default, vip (" in lines[1]
    assert max(map(len, lines)) < 300


def test_a_tier_that_a_bucket_is_described_with_is_not_told(told: Any) -> None:
    """No ``identify`` has returned it."""
    rule = Rule("api", "2/minute", key=["caller"])
    for caller in ("ada", Caller("ada", "gold")):
        assert Limiter(MemoryStore()).bucket(rule, caller=caller).peek().allowed
    assert told() == []


def test_a_known_tier_costs_no_search(monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Site]) -> None:
    """Nor does an unknown one that was logged."""
    searches: list[object] = []
    monkeypatch.setattr(identity, "expected_of", lambda *_: searches.append(1) or "expected one of ...")
    it = opened(lambda _: Caller("ada", tier="gold"))
    assert it.statuses(5) == [200, 200, 429, 429, 429]
    assert len(searches) == 1


def test_each_place_is_told(opened: Callable[..., Site], told: Any) -> None:
    def identify(request: Any) -> Caller | None:
        if request.path == "/a":
            raise LookupError
        raise ValueError

    it = opened(identify)
    for path in ("/a", "/b", "/a"):
        with pytest.raises((LookupError, ValueError)):
            it.ask(path)
    assert [line.partition(": ")[2].partition(" at ")[0] for line in told()] == ["LookupError", "ValueError"]


@pytest.mark.parametrize("given", ["ann", 5, {}, ("ann", "vip")])
def test_what_is_no_caller(opened: Callable[..., Site], told: Any, given: Any) -> None:
    it = opened(lambda _: given)
    for _ in range(2):
        with pytest.raises(TypeError, match=f"identify gave a {type(given).__name__}, expected a Caller or None"):
            it.ask()
    (line,) = told()
    assert f": it gave a {type(given).__name__}; expected identify to return a Caller or None" in line
    assert "ann" not in line


def test_an_async_one_that_gives_no_caller(told: Any) -> None:
    async def identify(_: Any) -> Any:
        return "ann"

    site = ASGISite(Rule("api", "2/minute"), store=MemoryStore(), identify=identify)
    with site as it, pytest.raises(TypeError, match="identify gave a str"):
        it.ask()
    assert len(told()) == 1


def test_headers_that_are_too_many_are_no_failure(told: Any) -> None:
    """They are answered with a 431, and nothing is logged."""

    def identify(request: Any) -> None:
        request.headers.get("x-who")

    with ASGISite(Rule("api", "2/minute"), store=MemoryStore(), identify=identify) as it:
        assert it.ask(headers=[("X-Who", "a")] * (MOST_LINES + 1)).status == 431
    assert told() == []


def test_the_answer_is_a_500() -> None:
    """The framework's own, as for any error of the application."""
    app = Starlette()
    app.add_middleware(LimitGate, rules=[Rule("api", "2/minute")], identify=raising)
    assert TestClient(app, raise_server_exceptions=False).get("/").status_code == 500
    flask = Flask("shop")
    flask.wsgi_app = LimitGateWSGI(flask.wsgi_app, rules=[Rule("api", "2/minute")], identify=raising)  # type: ignore[method-assign]
    with pytest.raises(LookupError):  # which a WSGI server answers with a 500
        flask.test_client().get("/")
