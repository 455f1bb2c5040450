"""Nothing falls when Redis does: each fault of the table, under steady traffic, at both doors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.experiment import Fault, run
from tests.faults.stages import Door, Stages
from tests.faults.table import FAULTS, UNDER_THREADS

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
    known = {name: [pytest.mark.xfail(reason=reason)] for (where, name), reason in KNOWN.items() if where == door}
    return pytest.mark.parametrize(
        "fault", [pytest.param(fault, id=fault.name, marks=known.get(fault.name, [])) for fault in faults]
    )


@tried("asgi")
def test_asgi(stages: Stages, fault: Fault) -> None:
    """Every request gets 200, 429 or 503 in time as its policy says; limits hold, and soon they are exact again."""
    goes_well(stages, fault, "asgi")


@tried("wsgi")
def test_wsgi(stages: Stages, fault: Fault) -> None:
    """Where threads wait for Redis, it is the same."""
    goes_well(stages, fault, "wsgi")
