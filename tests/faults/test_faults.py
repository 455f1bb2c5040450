"""Nothing falls when Redis does: each fault of the table, under steady traffic, at both doors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path

import pytest

from tests.faults.app import BURST, PER_SECOND
from tests.faults.experiment import CLOCKS, Fault, burst, run
from tests.faults.stages import DOORS, Door, Stages, compiler, served
from tests.faults.table import FAULTS, UNDER_THREADS
from tests.faults.traffic import Sample, Traffic
from tests.support.attempts import at_best
from tests.support.doors import until
from tests.support.redis_server import RedisServer

ENDS_WITHIN = 10.0
"""Seconds that an application may take to end."""


@pytest.fixture(scope="module")
def stages() -> Iterator[Stages]:
    """Applications that go through one fault after the other, and end in good order."""
    with Stages() as opened:
        yield opened


def goes_well(stages: Stages, fault: Fault, door: Door) -> None:
    """Let a fault happen and see what became of the requests."""
    if fault.way == "clocked" and compiler() is None:
        pytest.skip("no C compiler in PATH, needed to step a server's clock")

    def complaints() -> list[str]:
        seen = run(fault, stage)
        assert seen.burst(degraded=False) <= seen.bound + CLOCKS, "whatever else the machine has to do"
        return seen.complaints()

    with stages.on(door, fault.way) as stage:
        assert at_best(complaints) == []


@pytest.mark.parametrize("fault", FAULTS, ids=attrgetter("name"))
def test_asgi(stages: Stages, fault: Fault) -> None:
    """Every request gets 200, 429 or 503 in time as its policy says; limits hold, and soon they are exact again."""
    goes_well(stages, fault, "asgi")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in UNDER_THREADS], ids=attrgetter("name"))
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
                until(lambda: any(sample.degraded for sample in traffic.samples))
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
