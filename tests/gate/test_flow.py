"""Flows: one driver for code that awaits and one for code that does not, which do the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest

from limitgate import MemoryStore, StoreError
from limitgate.gate.flow import Budget, Flow, adrive, arun, drive, run
from limitgate.limits.plan import Plan, Reading

Driver = Callable[[Any, Callable[[Any], Any]], Any]


def awaiting(flow: Any, fulfil: Callable[[Any], Any]) -> Any:
    """`adrive` as if it was `drive`."""

    async def fulfilled(wish: Any) -> Any:
        return fulfil(wish)

    return asyncio.run(adrive(flow, fulfilled))


@pytest.fixture(params=[drive, awaiting], ids=["drive", "adrive"])
def driver(request: pytest.FixtureRequest) -> Driver:
    given: Driver = request.param
    return given


def test_wishes_are_fulfilled_one_after_the_other(driver: Driver) -> None:
    """A flow is sent the result of each wish, and its outcome is returned."""

    def flow() -> Generator[int, int, list[int]]:
        return [(yield 1), (yield 2)]

    assert driver(flow(), lambda wish: wish * 10) == [10, 20]


@pytest.mark.parametrize("error", [LookupError("lost"), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_whatever_is_raised_is_thrown_into_the_flow(driver: Driver, error: BaseException) -> None:
    """Errors and interruptions alike: a flow may clean up and raise, or go on with another wish."""
    caught: list[BaseException] = []

    def raises(wish: str) -> str:
        if wish == "bad":
            raise error
        return wish

    def goes_on() -> Generator[str, str, str]:
        try:
            yield "bad"
        except BaseException as thrown:  # noqa: BLE001 - the test looks at all
            caught.append(thrown)
        return (yield "good")

    def ends() -> Generator[str, str, None]:
        try:
            yield "bad"
        finally:
            caught.append(error)

    assert driver(goes_on(), raises) == "good"
    with pytest.raises(type(error)):
        driver(ends(), raises)
    assert caught == [error, error]


def test_a_budget_is_shared_by_all_wishes() -> None:
    """Where no time is left the store is not asked, and the flow hears of a timeout."""

    class Slow(MemoryStore):
        def spend(self, plan: Plan, timeout: float | None = None) -> Reading:
            asked.append(timeout)
            return super().spend(plan)._replace(waited=0.3)

        async def aspend(self, plan: Plan, timeout: float | None = None) -> Reading:
            return self.spend(plan, timeout)

    def flow() -> Flow[str]:
        for _ in range(2):
            yield Plan(()), 0.4
        try:
            yield Plan(()), 0.4
        except StoreError as error:
            return error.fault
        return ""

    asked: list[float | None] = []
    assert run(Slow(), flow(), Budget(0.5, measured=True)) == "timeout"
    assert asyncio.run(arun(Slow(), flow(), Budget(0.5, measured=True))) == "timeout"
    assert asked == [0.4, 0.2, 0.4, 0.2]
