"""Decisions that are worked out when somebody looks at them: to whoever does they are decisions like any other."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, asdict, fields, replace
from threading import Barrier
from typing import Any
from weakref import ref

import pytest

from limitgate import Decision, Limit, RateLimited
from limitgate.http.request import Request
from limitgate.limits.bucket import Bucket
from limitgate.limits.decision import DeferredDecision, FinalCosts, InForce, deferred, set_in_force
from limitgate.limits.plan import Charge
from limitgate.limits.template import PlainSpend, PlanTemplate

NOW = 1_700_000_000_000_000


@pytest.fixture
def request_() -> Request:
    """A request that is under way."""
    return Request()


@pytest.fixture
def decision(request_: Request) -> Decision:
    """A decision that nobody has looked at."""
    return made(request_)


def reading() -> PlainSpend:
    """The reading of two windows, of which one owes two requests."""
    charge = Charge("", Bucket((Limit("5/second"), Limit("100/minute"))), 1, enforced=True, rule="api")
    return PlanTemplate([charge]).reading(["key"], NOW, (2_000_000, 0), admitted=True)


def made(owner: Request) -> Decision:
    """A deferred decision by the reading of two windows."""
    return deferred(reading(), owner)


def under_places(reading: PlainSpend, owner: Request, in_force: tuple[InForce, ...]) -> Decision:
    """A deferred decision about a request with permits."""
    decision = deferred(reading, owner)
    set_in_force(decision, in_force)
    return decision


EXPECTED = (True, 5, 2, 0.0, 0.6, 1, "api", False, False, 0.0)
"""Values of the fields that are compared."""


def values(decision: Decision) -> tuple[Any, ...]:
    """Values of the fields that are compared."""
    return tuple([getattr(decision, each.name) for each in fields(decision) if each.compare])


@pytest.mark.parametrize(
    "name", [each.name for each in fields(Decision)] + ["windows", "standings", "refusing", "refusing_key"]
)
def test_deferred_decision_read_of_any_field_is_computed(decision: Decision, name: str) -> None:
    """Whatever is looked at first is there, and all the rest is then."""
    getattr(decision, name)
    assert values(decision) == EXPECTED
    assert type(decision) is Decision


LOOKS: dict[str, Callable[[Decision, Decision], bool]] = {
    "pickled in an error": lambda decision, _: pickle.loads(pickle.dumps(RateLimited(decision))).decision == decision,
    "pickled": lambda decision, _: pickle.loads(pickle.dumps(decision)) == decision,
    "copied": lambda decision, _: copy.copy(decision) == decision,
    "copied in depth": lambda decision, _: copy.deepcopy([decision]) == [decision],
    "written to a log": lambda decision, _: decision._asdict()["remaining"] == 2,
    "a dictionary": lambda decision, _: asdict(decision)["remaining"] == 2,
    "replaced": lambda decision, _: replace(decision, rule="other").rule == "other",
    "equal": lambda decision, other: decision == other,
    "equal from the other side": lambda decision, other: other == decision,
    "hashed": lambda decision, other: len({decision, other}) == 1,
    "shown": lambda decision, other: repr(decision) == repr(other) and "remaining=2" in repr(decision),
    "an instance": lambda decision, _: isinstance(decision, Decision),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("other_is_deferred", [True, False])
def test_deferred_decision_is_an_instance_of_decision(decision: Decision, look: Any, *, other_is_deferred: bool) -> None:
    """It is pickled, copied, compared and shown as the decision that it is."""
    other = made(Request())
    if not other_is_deferred:
        assert other.allowed
    assert look(decision, other)


IN_FORCE: dict[str, tuple[tuple[InForce, ...], tuple[Any, ...]]] = {
    "as many places": ((("all", 20, 2),), EXPECTED),
    "fewer places": ((("all", 20, 1),), (True, 20, 1, 0.0, 0.0, 1, "all", False, False, 0.0)),
    "the fewest, which come first": (
        (("all", 20, 1), ("some", 9, 0), ("other", 8, 0)),
        (True, 9, 0, 0.0, 0.0, 1, "some", False, False, 0.0),
    ),
}
"""Adaptive limits as a request has found them, and values of the fields that are compared then."""


@pytest.mark.parametrize("name", [each.name for each in fields(Decision)] + ["windows", "standings", "refusing"])
@pytest.mark.parametrize(("in_force", "expected"), IN_FORCE.values(), ids=IN_FORCE)
def test_decision_with_adaptive_limits_includes_their_windows(
    in_force: tuple[InForce, ...], expected: tuple[Any, ...], name: str
) -> None:
    """Whatever is looked at first, the tightest of all limits is told, and all of them are windows."""
    decision = under_places(reading(), Request(), in_force)
    getattr(decision, name)
    assert values(decision) == expected
    assert type(decision) is Decision
    assert [window.rule for window in decision.windows] == ["api", "api", *[rule for rule, _, _ in in_force]]


def test_decision_pickled_keeps_all_public_fields(decision: Decision) -> None:
    """Windows, too, of adaptive limits as well; and it can be pickled again."""
    in_force = under_places(reading(), Request(), (("all", 20, 1),))
    for each in (decision, in_force):
        again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(each))))
        assert (again, again.windows, repr(again)) == (each, each.windows, repr(each))
        assert again._asdict() == each._asdict()
        assert len(again.windows) >= 2


def test_decision_pickled_or_copied_drops_the_request(decision: Decision) -> None:
    """Nothing can be settled there, and no key of a bucket goes with it."""
    sent = pickle.dumps(RateLimited(decision))
    assert b"limitgate.limits.plan" not in sent
    with pytest.raises(RuntimeError, match="outside of a request"):
        pickle.loads(sent).decision.settle(3)


def test_a_decision_is_written_as_json(decision: Decision) -> None:
    """Its fields for users are plain values, by the names that they have."""
    told = json.loads(json.dumps(decision._asdict()))
    assert told | {"windows": len(told["windows"])} == dict(
        zip([each.name for each in fields(Decision) if each.compare], EXPECTED), windows=2
    )
    assert told["windows"][0]["period"] == 1


def test_decision_assignment_raises(decision: Decision) -> None:
    """Nothing of it can be set, before it is looked at or afterwards."""
    for _ in range(2):
        with pytest.raises(FrozenInstanceError):
            decision.remaining = 9  # type: ignore[misc]
        assert decision.remaining == 2


def test_decision_unknown_attribute_raises(decision: Decision) -> None:
    """A name that no decision has is not there."""
    with pytest.raises(AttributeError, match="no 'missing'"):
        decision.missing  # type: ignore[attr-defined]  # noqa: B018
    assert type(decision) is DeferredDecision


def test_decision_settled_passes_the_cost_to_the_request(request_: Request, decision: Decision) -> None:
    """A cost that is told to it, or to a copy, is noted for its request."""
    decision.settle(3)
    replace(decision, delay=1.0).settle(4, rule="api")
    settlement = request_.open_settlement()
    assert settlement.has_news
    assert dict(settlement.costs) == {None: 3, "api": 4}


def test_decision_computed_does_not_keep_the_request_alive() -> None:
    """An application may keep decisions for longer than requests."""
    owner = Request()
    decision, known = made(owner), ref(owner)
    assert decision.allowed
    del owner
    assert known() is None


def test_decision_settled_after_the_request_raises(request_: Request, decision: Decision) -> None:
    """Once the request is over it says so, also where nobody has looked before."""
    request_.is_over = True
    with pytest.raises(RuntimeError, match="outside of a request"):
        decision.settle(3)


LATE: dict[str, Callable[[Any, Decision], bool]] = {
    "a value": lambda late, decision: late.__getattr__(decision, "remaining") == 2,
    "the settlement": lambda late, decision: late.settlement.fget(decision) is decision.settlement,
    "equality": lambda late, decision: late.__eq__(decision, made(Request())) is True,
}


@pytest.mark.parametrize("look", LATE.values(), ids=LATE)
def test_deferred_decision_computed_by_another_thread_meanwhile_is_read(decision: Decision, look: Any) -> None:
    """A look that began while it was deferred finds it a decision already."""
    assert decision.allowed
    assert look(DeferredDecision, decision)


def test_deferred_decision_of_a_request_that_ends_meanwhile_is_computed(request_: Request) -> None:
    """From then on nothing can be settled."""

    class Ending(PlainSpend):
        """A reading whose request ends, in another thread, while its decision is worked out."""

        __slots__ = ()

        def decision(self, settlement: FinalCosts) -> Decision:
            request_.is_over = True
            return super().decision(settlement)

    decision = made(request_)
    decision.evidence.__class__ = Ending
    assert decision.allowed
    with pytest.raises(RuntimeError, match="outside of a request"):
        decision.settle(3)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that look at the same time."""
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_deferred_decision_read_by_threads_is_equal_in_all(pool: ThreadPoolExecutor) -> None:
    """However many threads look first, all find the same values and settle the same request."""
    for _ in range(200):
        request = Request()
        decision, together = made(request), Barrier(4)

        def look(number: int, decision: Decision = decision, together: Barrier = together) -> tuple[Any, FinalCosts | None]:
            together.wait()
            if number % 2:
                decision.settle(2)
            return values(decision), decision.settlement

        assert set(pool.map(look, range(4))) == {(EXPECTED, request.open_settlement())}
