"""Nothing falls when Redis does: each fault of the table, under steady traffic, at both doors."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import pytest

from tests.faults.experiment import Fault, run
from tests.faults.stages import Door, Stages
from tests.faults.table import FAULTS, UNDER_THREADS


@pytest.fixture(scope="module")
def stages() -> Iterator[Stages]:
    """Applications that go through one fault after the other, and end in good order."""
    with Stages() as opened:
        yield opened


def goes_well(stages: Stages, fault: Fault, door: Door) -> None:
    """Let a fault happen and see what became of the requests."""
    with stages.on(door, fault.way) as stage:
        assert run(fault, stage).complaints() == []


@pytest.mark.parametrize("fault", FAULTS, ids=attrgetter("name"))
def test_asgi(stages: Stages, fault: Fault) -> None:
    """Every request gets 200, 429 or 503 in time as its policy says; limits hold, and soon they are exact again."""
    goes_well(stages, fault, "asgi")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in UNDER_THREADS], ids=attrgetter("name"))
def test_wsgi(stages: Stages, fault: Fault) -> None:
    """Where threads wait for Redis, it is the same."""
    goes_well(stages, fault, "wsgi")
