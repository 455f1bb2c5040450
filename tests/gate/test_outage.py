"""Verdicts while the store fails: bans that it has seen hold under ``local``."""

from __future__ import annotations

from limitgate import StoreError
from limitgate.gate.admission import Verdict
from limitgate.gate.outage import Outages
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.prepared import RequestPlan
from limitgate.limits.plan import Charge, Plan
from limitgate.rules.options import OnError
from limitgate.rules.rule import Rule

GONE = StoreError("out of order", keys=frozenset({"here"}))
"""Of a store that fails for one bucket only."""


class Banning:
    """A store that has seen these bans, in µs."""

    def __init__(self, **bans: int) -> None:
        self.bans = bans

    def ban_left_us(self, key: str) -> int:
        return self.bans.get(key, 0)


def request(cost: int = 1, on_error: OnError = "local") -> RequestPlan:
    """A request that is counted in two buckets, here and there."""
    rule = Rule("r", "2/minute", on_error=on_error, cost=cost)
    compiled_rule = CompiledRule(
        rule, "rule", key_prefix="", secret=b"", shadow=False, cardinality=None, inventable=lambda _: False
    )
    (bucket,) = rule.buckets
    charges = [Charge(key, bucket, cost, enforced=True, rule="r") for key in ("here", "there")]
    return RequestPlan(Plan.spend(charges), [compiled_rule] * 2, ())


def outages_of(store: Banning, on_error: OnError, processes: int) -> Outages:
    return Outages(store, on_error, processes, timeout=1.0, at_recovery=bool)


def verdict(outages: Outages, error: StoreError = StoreError("gone"), **asked: object) -> Verdict:  # noqa: B008
    outcome = outages.without_store(request(**asked), error)  # type: ignore[arg-type]
    assert isinstance(outcome, Verdict)
    return outcome


def test_a_ban_refuses_and_nothing_is_charged() -> None:
    """Not the other bucket either: once the ban is over, both are full."""
    store = Banning(there=90_000_000)
    outages = outages_of(store, "open", 1)
    for _ in range(9):
        refused = verdict(outages)
        assert (refused.decision.allowed, refused.decision.retry_after, refused.decision.degraded) == (False, 90.0, True)
        assert refused.charged == ()
    store.bans.clear()
    assert [verdict(outages).decision.allowed for _ in range(3)] == [True, True, False]


def test_what_costs_nothing_passes_a_ban() -> None:
    """As it does where the store answers."""
    assert verdict(outages_of(Banning(here=1), "open", 1), cost=0).decision.allowed


def test_what_costs_nothing_passes_under_closed() -> None:
    """Alone, and beside a rule whose policy then decides."""
    outages = outages_of(Banning(), "open", 1)
    assert verdict(outages, cost=0, on_error="closed").decision.allowed
    free, costly = request(cost=0, on_error="closed"), request(cost=1, on_error="local")
    assert free.plan is not None
    assert costly.plan is not None
    charges = [*free.plan.charges, *costly.plan.charges]
    both = RequestPlan(Plan.spend(charges), [*free.compiled_rules, *costly.compiled_rules], ())
    outcomes = [outages.without_store(both, StoreError("gone")) for _ in range(3)]
    assert [isinstance(each, Verdict) and each.decision.allowed for each in outcomes] == [True, True, False]


def test_a_ban_under_other_policies() -> None:
    """Open lets everybody pass, whom nobody can look up."""
    outages = outages_of(Banning(here=90_000_000), "open", 1)
    assert verdict(outages, on_error="open").decision.allowed
    assert not verdict(outages, on_error="closed").decision.allowed


def test_a_ban_on_the_part_that_is_gone() -> None:
    """Where a store fails in part, a ban of that part refuses before the other part is asked."""
    assert not verdict(outages_of(Banning(here=1), "open", 1), GONE).decision.allowed
    assert not isinstance(outages_of(Banning(there=1), "open", 1).without_store(request(), GONE), Verdict)


def test_shares_of_a_limit() -> None:
    """A ban holds in each of several processes that share a limit."""
    decision = verdict(outages_of(Banning(here=5_000_000), "open", 2)).decision
    assert (decision.allowed, decision.retry_after) == (False, 5.0)
