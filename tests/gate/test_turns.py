"""Waiting: what has to be given back when it is over."""

from __future__ import annotations

import asyncio
from typing import Any

from limitgate import MemoryStore
from limitgate.gate.admission import Admission, PermitWait
from limitgate.gate.flow import Budget
from limitgate.gate.turns import Turns
from limitgate.http.response import unavailable


class ConcurrencyLimiter:
    """Places in flight that are there when they are waited for."""

    refusal = None

    async def await_places(self, _: object) -> bool:
        return True


class Refunds:
    """Notes whose charges are given back."""

    def __init__(self) -> None:
        self.settled: list[Admission] = []

    async def asettle_refused(self, admission: Admission) -> None:
        self.settled.append(admission)


def test_a_request_that_is_refused_once_it_has_its_places_is_refunded() -> None:
    """A part of it may be charged already, as where the store fails for the rest."""
    admission: Any = Admission()
    admission.permits, refunds = ConcurrencyLimiter(), Refunds()
    admission._budget = Budget(1.0, measured=True)

    def refused() -> Any:
        yield from ()
        admission.refusal = unavailable()

    turns: Any = Turns(MemoryStore(), refunds, None)  # type: ignore[arg-type]
    admission.turn = PermitWait(refused())
    assert not asyncio.run(turns.await_turn(admission, None))
    assert refunds.settled == [admission]
