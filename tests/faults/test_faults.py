"""Nothing falls when Redis does: each fault of the table, under steady traffic, at both doors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.app import BURST, PER_SECOND
from tests.faults.experiment import Fault, burst, run
from tests.faults.stages import DOORS, Door, Stages, compiler, served
from tests.faults.table import FAULTS, UNDER_THREADS
from tests.faults.traffic import Sample, Traffic
from tests.redis_server import RedisServer

ENDS_WITHIN = 3.0
"""Seconds that an application may take to end."""
FLAPS = "a reply that comes too late for whoever waits counts as a sign of life, so requests begin to wait again"
PIECES = "under threads a reply that comes in pieces has until the deadline for each piece"
KNOWN = {
    ("asgi", "replies 0.3 s late"): FLAPS,
    ("asgi", "replies 1 s late"): FLAPS,
    ("asgi", "replies byte by byte"): FLAPS,
    ("wsgi", "replies byte by byte"): PIECES,
}
"""What is not yet as it has to be, and why."""


@pytest.fixture(scope="module")
def stages() -> Iterator[Stages]:
    """Applications that go through one fault after the other, and end in good order."""
    with Stages() as opened:
        yield opened


def goes_well(stages: Stages, fault: Fault, door: Door) -> None:
    """Let a fault happen and see what became of the requests."""
    with stages.on(door, fault.way) as stage:
        assert run(fault, stage).complaints() == []


def tried(door: Door) -> Any:
    """The faults for a door, one test each."""
    faults = [fault for fault in FAULTS if door == "asgi" or fault.name in UNDER_THREADS]
    return pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name, marks=marks(fault, door)) for fault in faults])


def marks(fault: Fault, door: Door) -> list[pytest.MarkDecorator]:
    """What pytest has to know of a fault beforehand."""
    clockless = fault.way == "clocked" and compiler() is None
    found = [pytest.mark.skipif(clockless, reason="no C compiler in PATH, needed to step a server's clock")]
    if (door, fault.name) in KNOWN:
        found.append(pytest.mark.xfail(reason=KNOWN[door, fault.name]))
    return found


@tried("asgi")
def test_asgi(stages: Stages, fault: Fault) -> None:
    """Every request gets 200, 429 or 503 in time as its policy says; limits hold, and soon they are exact again."""
    goes_well(stages, fault, "asgi")


@tried("wsgi")
def test_wsgi(stages: Stages, fault: Fault) -> None:
    """Where threads wait for Redis, it is the same."""
    goes_well(stages, fault, "wsgi")


@pytest.mark.parametrize("door", DOORS)
def test_an_application_ends_while_redis_is_frozen(door: Door, own_redis: RedisServer, tmp_path: Path) -> None:
    """Nobody waits for Redis to be told goodbye."""
    with ExitStack() as serving:
        url = serving.enter_context(served(door, tmp_path, own_redis.url))
        with Traffic(url):
            time.sleep(0.2)
        with own_redis.frozen():
            with Traffic(url) as traffic:
                time.sleep(0.4)
            assert any(sample.degraded for sample in traffic.samples)
            begun = time.monotonic()
            serving.close()
            assert time.monotonic() - begun < ENDS_WITHIN


@pytest.mark.parametrize(
    ("times", "most"),
    [
        ([], 0),
        ([0.0] * BURST, BURST),
        ([0.0] * 2 * BURST, 2 * BURST),
        ([number / PER_SECOND for number in range(20)], 1),
        ([*[0.0] * BURST, *[1 + number / PER_SECOND for number in range(20)]], BURST),
        ([0.0, *[9.0] * BURST, *[9 + 1 / PER_SECOND] * 2], BURST + 1),
    ],
)
def test_what_counts_as_a_burst(times: list[float], most: float) -> None:
    """What passes in an interval beyond what the rate gives in it, wherever the interval lies."""
    admitted = [Sample("open", at, at, 200, degraded=False, trouble="") for at in times]
    assert burst(admitted) == pytest.approx(most)
