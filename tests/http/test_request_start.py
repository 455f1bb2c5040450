"""The time at which a proxy has begun to hand on a request, in all forms that proxies write, and in none that makes sense."""

from __future__ import annotations

import pytest

from limitgate.http.request import OLDEST_START_S, WSGIRequest, waited_s
from tests.support.doors import Lines, wsgi_environ

NOW = 1_700_000_000.5


def waited(text: str, now: float = NOW) -> float | None:
    return of([("X-Request-Start", text)], now)


def of(lines: Lines, now: float = NOW) -> float | None:
    return waited_s(WSGIRequest(wsgi_environ(headers=lines)), now)


@pytest.mark.parametrize(
    "text",
    [
        "t=1700000000.250",
        "1700000000.25",
        "t = 1700000000.250",
        " t=1700000000.250 ",
        "t=1700000000250",
        "1700000000250",
        "1700000000250.0",
        "t=1700000000250000",
        "1700000000250000000",
        "t=1, t=1700000000.250",
        "t=1600000000,1700000000250",
    ],
)
def test_a_time_in_seconds_milliseconds_microseconds_or_nanoseconds(text: str) -> None:
    """As nginx, Heroku, Apache and others write it; of several the last, which is the nearest proxy's."""
    assert waited(text) == pytest.approx(0.25)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "t=",
        "soon",
        "t=nan",
        "t=inf",
        "t=1e9",
        "t=-1700000000",
        "t=0x65536000",
        "t=12345678",
        "t=17000000002500000000000",
        "t=1700000000.25; x",
        "t=1700000000.250,",
        "s=1700000000.250",
        "t=\N{FULLWIDTH DIGIT ONE}700000000.250",
        "9" * 100_000,
        "t=1700000001",
        f"t={NOW - OLDEST_START_S - 1}",
        "t=999999999",
    ],
)
def test_request_start_implausible_is_ignored(text: str) -> None:
    assert waited(text) is None


def test_request_start_missing_is_ignored() -> None:
    assert of([]) is None
