"""Priorities: the last of a limit is kept for those who matter most, in the same buckets, under any algorithm."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, strategies as st

from limitgate import Caller, ConfigError, Limit, MemoryStore, Rule, RuleSet, load_rules
from limitgate.limits.bucket import RESERVES, Bucket, graded, percent, share_of
from limitgate.limits.decision import decide
from limitgate.limits.plan import Charge, Plan
from limitgate.routes.overview import overview
from limitgate.rules.callers import KnownCaller
from tests.algorithms.test_algorithms import COUNTING
from tests.gate.planning.test_planner import asked, planner
from tests.routes.test_overview import listed
from tests.support.clock import Clock
from tests.support.doors import SITES, ASGISite, Site

KEYS = {priority: f"{priority}-key" for priority in RESERVES}
CALLERS = [
    KnownCaller(id=priority, api_key=f"sha256:{hashlib.sha256(key.encode()).hexdigest()}", priority=priority)
    for priority, key in KEYS.items()
]


def rooms(rule: Rule) -> dict[str, list[int]]:
    """What each priority has room for in each bucket."""
    return {
        priority: [limit.burst for bucket in rule.buckets_for(priority) for limit in bucket.limits] for priority in RESERVES
    }


SHARES = [
    ("20%", 100, 20),
    ("20 %", 5, 1),
    ("12.5%", 8, 1),
    ("49%", 100, 49),
    (0.2, 10, 2),
    (0.1, 10, 1),
    (Fraction(1, 3), 9, 3),
]


@pytest.mark.parametrize(("reserve", "burst", "kept"), SHARES, ids=str)
def test_a_reserve_is_a_share_of_the_burst(reserve: object, burst: int, kept: int) -> None:
    """A share, as a percentage or as a number that means just what it says, is kept from normal callers, and twice from low."""
    rule = Rule("r", f"{burst}/minute", reserve=reserve)
    assert rooms(rule) == {"high": [burst], "normal": [burst - kept], "low": [burst - 2 * kept]}


def test_reserve_of_a_fraction_is_rounded_up() -> None:
    """Where the share is no whole number of requests, the next whole one is kept, of each limit by itself."""
    rule = Rule("r", "3/second", "11/minute", Limit("7/day", algorithm="fixed_window"), reserve="20%")
    assert rooms(rule) == {"high": [3, 11, 7], "normal": [2, 8, 5], "low": [1, 5, 3]}


NO_RESERVES = [
    "20",
    "0%",
    "50%",
    "49.1%",
    "-5%",
    "1e1%",
    "",
    "%",
    "20%%",
    0.0,
    0.5,
    -0.2,
    1,
    20,
    True,
    math.nan,
    math.inf,
    [],
    {},
]


@pytest.mark.parametrize("reserve", NO_RESERVES, ids=repr)
def test_reserve_invalid_is_refused(reserve: object) -> None:
    """Anything else than a share that leaves something for all is a ConfigError that says what was expected."""
    with pytest.raises(ConfigError, match=r"reserve: .* expected a share above 0 and up to 49 %"):
        Rule("r", "100/minute", reserve=reserve)


MISTAKES = [
    ({"limits": ["1/minute"]}, "reserve: 1/minute admits 1 at once, of which 2 would be reserved for others"),
    ({"limits": ["2/minute"]}, "admits 2 at once, of which 2 would be reserved"),
    ({"limits": ["100/minute", "5/second burst 2"]}, "5/second burst 2 admits 2"),
    ({"limits": [{"limit": "10/second", "warm_up": 5}]}, "admits 1 at once, of which"),
    ({"limits": ["100/minute"], "lease": 10}, "has a lease, which all priorities share, expected no reserve"),
    ({"limits": [{"limit": "100/minute", "lease": 10}]}, "expected no reserve"),
    ({"limits": [{"limit": "100/minute", "borrow": True}]}, "borrow, which lets any priority use everything"),
    ({"limits": ["100/minute"], "max_delay": 1}, "has a max_delay, which queues requests"),
    ({"exempt": True}, "is exempt, expected no reserve"),
    ({"limits": ["100/minute"], "cost": 61}, "cost 61 exceeds 100/minute burst 60, expected at most 60"),
    ({"limits": ["100/minute"], "cost": 81, "priority": "normal"}, "expected at most 80"),
    ({"limits": ["100/minute"], "priority": "urgent"}, "priority: expected 'high', 'normal' or 'low', not 'urgent'"),
    ({"limits": ["100/minute"], "reserve": None, "priority": "low"}, "expected no priority, or a reserve"),
]


@pytest.mark.parametrize(("options", "expected"), MISTAKES, ids=str)
def test_reserve_that_leaves_no_room_is_refused(options: dict[str, Any], expected: str) -> None:
    """A reserve that leaves nothing for low priority, or that something else undoes, is a ConfigError."""
    with pytest.raises(ConfigError, match=expected):
        Rule("r", **{"reserve": "20%", **options})


def test_a_fixed_cost_has_to_fit_for_those_it_is_for() -> None:
    """Where a rule is for one priority, what this one has room for counts."""
    assert Rule("r", "100/minute", reserve="20%", cost=60)
    assert Rule("r", "100/minute", reserve="20%", cost=80, priority="normal")
    assert Rule("r", "100/minute", reserve="20%", cost=100, priority="high")


@pytest.mark.parametrize("priority", ["urgent", "", None, 1, "HIGH"], ids=repr)
def test_a_caller_has_one_of_three_priorities(priority: object) -> None:
    """A priority that there is not is a mistake wherever it is given."""
    with pytest.raises(ValueError, match="expected one of high, normal, low"):
        Caller("acme", priority=priority)
    with pytest.raises(ValueError, match="priority"):
        KnownCaller(id="acme", api_key=CALLERS[0].api_key, priority=priority)
    assert Caller("acme").priority == CALLERS[1].priority == KnownCaller(id="a", header={"X": "y"}).priority == "normal"


@given(burst=st.integers(1, 10**6), percents=st.integers(1, 49))
def test_reserve_leaves_room_for_every_priority_or_is_refused_property(burst: int, percents: int) -> None:
    """Low has less room than normal, that less than high, and at least one; buckets and windows are the same."""
    try:
        rule = Rule("r", Limit("5/day", burst=min(burst, 18_000)), reserve=f"{percents}%")
    except ConfigError:
        assert min(burst, 18_000) <= 2 * math.ceil(Fraction(percents, 100) * min(burst, 18_000))
        return
    (high,), (normal,), (low,) = rooms(rule).values()
    assert high > normal > low > 0
    assert normal - low == high - normal >= Fraction(percents, 100) * high
    assert len({(bucket.ids, bucket.suffix) for priority in RESERVES for bucket in rule.buckets_for(priority)}) == 1


def test_the_buckets_of_a_priority_are_the_same_every_time() -> None:
    """They are made once, so that stores know them again; without a reserve they are the rule's own."""
    rule, plain = Rule("r", "100/minute", reserve="20%"), Rule("r", "100/minute")
    assert all(rule.buckets_for(priority)[0] is rule.buckets_for(priority)[0] for priority in RESERVES)
    assert all(plain.buckets_for(priority) is plain.buckets for priority in RESERVES)
    assert Rule("r", "100/minute", reserve="20%", priority="low").buckets_for("high")[0].limits[0].burst == 60


# --- in a rule set ----------------------------------------------------------------------------------------------------


def burst_for(rules: list[Rule], caller: Caller | None = None, **headers: str) -> list[int]:
    """What a caller has room for under the rules that apply."""
    plan = planner(*rules, callers=CALLERS, identifies=caller is not None).plan(asked(**headers), caller).plan
    return [charge.bucket.limits[0].burst for charge in plan.charges]


def test_priority_of_the_caller_selects_the_bucket() -> None:
    """A listed caller has its own priority, one that identify names the one that it was given, anybody else the normal one."""
    rules = [Rule("kept", "100/minute", reserve="20%"), Rule("plain", "50/minute")]
    assert burst_for(rules) == [80, 50]
    assert {name: burst_for(rules, x_api_key=key) for name, key in KEYS.items()} == {
        "high": [100, 50],
        "normal": [80, 50],
        "low": [60, 50],
    }
    assert burst_for(rules, Caller("anybody", priority="low"), x_api_key=KEYS["high"]) == [60, 50]


def test_priority_of_the_rule_overrides_that_of_the_caller() -> None:
    """Under a rule that has a priority nobody has another one."""
    rules = [Rule("kept", "100/minute", reserve="20%", priority="low")]
    assert burst_for(rules) == burst_for(rules, x_api_key=KEYS["high"]) == [60]


def test_all_priorities_share_a_bucket() -> None:
    """The key of a bucket does not depend on the priority, but the room that a plan finds in it."""
    made = planner(Rule("kept", "100/minute", "9/day", key=["global"], reserve="20%"), callers=CALLERS)
    plans = {name: made.plan(asked(x_api_key=key), None).plan for name, key in KEYS.items()}
    assert len({tuple(charge.key for charge in plan.charges) for plan in plans.values()}) == 1
    assert len(set(plans.values())) == 3


def test_priority_in_a_rule_file_is_applied(tmp_path: Path) -> None:
    """Files give callers a priority and rules a reserve; a mistake names file, line and field."""
    file = tmp_path / "default.yaml"
    text = f"""callers:
  - {{id: acme, api_key: "{CALLERS[0].api_key}", priority: high}}
rules:
  - name: shared
    key: [global]
    limits: ["10/second", {{limit: 10/day, algorithm: sliding_log}}]
    reserve: 20%
    priority: low
  - {{name: other, qpm: 10, reserve: 0.2}}
"""
    file.write_text(text)
    rules = load_rules(file)
    assert rules.callers.with_key(KEYS["high"]) == Caller("acme", priority="high")
    shared, other = rules.tiers["default"]
    assert (shared.reserve, shared.priority, other.reserve, other.priority) == (Fraction(1, 5), "low", Fraction(1, 5), None)
    for right, wrong, message in (
        ("reserve: 20%", "reserve: 20", r"default.yaml:7: rules\[0\].reserve: 20 is not a reserve, expected a share"),
        ("reserve: 20%", "reserve: 45%", r"default.yaml:7: rules\[0\].reserve: 10/second admits 10 at once, of which 10"),
        ("priority: low", "priority: lowest", r"default.yaml:8: rules\[0\].priority: expected 'high'"),
        ("priority: high", "priority: higher", r"default.yaml:2: callers\[0\].priority: expected 'high'"),
    ):
        file.write_text(text.replace(right, wrong))
        with pytest.raises(ConfigError, match=message):
            load_rules(file)


def test_reserve_is_shown_in_the_overview() -> None:
    """A table of routes says what a rule keeps."""
    text = overview([RuleSet([Rule("kept", "100/minute", reserve="12.5%", priority="low")])], [listed()])
    assert "reserve 12.5%, priority low" in text
    assert [percent(share_of(value)) for value in ("20%", 0.2, Fraction(1, 4))] == ["20%", "20%", "25%"]


# --- in an application ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> str:
    return "memory://" if request.param == "memory" else request.getfixturevalue("redis_server").url


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.door)
@pytest.mark.parametrize(
    "limit",
    [Limit("10 per 366 days", algorithm=name) for name in COUNTING],
    ids=COUNTING,
)
def test_low_is_refused_first_and_high_last(site: type[Site], store: str, limit: Limit) -> None:
    """In a limit that all share low is refused first, then normal, and high gets all of it; headers say what each has."""
    rules = RuleSet([Rule("shared", limit, key=["global"], reserve="20%")], CALLERS)
    with site(rules=rules, store=store, key_prefix=uuid4().hex, timeout=5) as gated:

        def ask(priority: str) -> tuple[int, str, str]:
            reply = gated.ask(headers={"X-Api-Key": KEYS[priority]})
            rate = reply.rate
            return reply.status, rate["x-ratelimit-limit"], rate["x-ratelimit-remaining"]

        assert [ask("low") for _ in range(6)] == [(200, "6", str(left)) for left in (5, 4, 3, 2, 1, 0)]
        assert ask("low") == (429, "6", "0")
        assert [ask("normal") for _ in range(2)] == [(200, "8", "1"), (200, "8", "0")]
        assert ask("normal") == (429, "8", "0")
        assert ask("low")[0] == 429
        assert [ask("high") for _ in range(2)] == [(200, "10", "1"), (200, "10", "0")]
        assert [ask(priority)[0] for priority in RESERVES] == [429, 429, 429]


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.door)
def test_identify_gives_a_priority(site: type[Site], store: str) -> None:
    """What identify says of a caller counts, for everybody who shares the bucket."""

    def identify(request: Any) -> Caller:
        return Caller("x", priority=request.headers["x-priority"])

    rule = Rule("shared", "5/day", key=["global"], reserve="20%")
    asking = ["low"] * 4 + ["normal"] * 2 + ["high"] * 2
    with site(rule, store=store, key_prefix=uuid4().hex, timeout=5, identify=identify) as gated:
        statuses = [gated.ask(headers={"X-Priority": priority}).status for priority in asking]
    assert statuses == [200, 200, 200, 429, 200, 429, 200, 429]


def test_while_the_store_fails_shares_keep_their_reserve() -> None:
    """A process that limits alone keeps a reserve of its share, too."""
    rules, limits = RuleSet([Rule("shared", "20/day", key=["global"], reserve="20%")], CALLERS), {}
    with ASGISite(rules=rules, store="unix:///nowhere/redis.sock", on_error="local", processes=2) as gated:
        for priority, key in KEYS.items():
            limits[priority] = gated.ask(headers={"X-Api-Key": key}).rate["x-ratelimit-limit"]
    assert limits == {"high": "10", "normal": "8", "low": "6"}


def test_reserve_on_a_concurrency_limit_keeps_slots(store: str) -> None:
    """Of requests in flight, too, some places are kept for those of high priority."""
    rules = RuleSet([Rule("shared", "5 at once", key=["global"], reserve="20%")], CALLERS)
    with ASGISite(rules=rules, store=store, key_prefix=uuid4().hex, timeout=5) as gated:
        rates = [gated.ask(headers={"X-Api-Key": key}).rate for key in KEYS.values()]
    told = [(rate["x-ratelimit-limit"], rate["x-ratelimit-remaining"]) for rate in rates]
    assert told == [("5", "4"), ("4", "3"), ("3", "2")]


# --- in the memory store ----------------------------------------------------------------------------------------------


def charge(bucket: Bucket, key: str = "shared", cost: int = 1) -> Plan:
    return Plan((Charge(key, bucket, cost, enforced=True, rule=None),))


@given(
    limit=st.sampled_from([Limit("10/day burst 30"), *[Limit("10/day", algorithm=name) for name in COUNTING]]),
    asking=st.lists(st.tuples(st.sampled_from(list(RESERVES)), st.integers(0, 3)), max_size=60),
)
def test_reserve_is_never_used_by_lower_priorities_property(limit: Limit, asking: list[tuple[str, int]]) -> None:
    """Whoever asks in whatever order gets in just as long as all that was taken fits into what this priority has room for."""
    store, rule = MemoryStore(Clock()), Rule("r", limit, reserve="20%")
    taken = 0
    for priority, cost in asking:
        (bucket,) = rule.buckets_for(priority)
        decision = decide(plan := charge(bucket, cost=cost), store.spend(plan))
        room = bucket.limits[0].burst
        assert decision.allowed is (taken + cost <= room or not cost)
        taken += cost if decision.allowed else 0
        assert (decision.limit, decision.remaining) == (room, max(0, room - taken))


def test_bucket_that_refuses_any_priority_is_not_evicted() -> None:
    """However many new keys come, one that refuses low priority stays, even if high priority used it last."""
    store = MemoryStore(Clock(), max_buckets=3)
    buckets = {priority: bucket for priority, (bucket,) in graded(Rule("r", "10/second").buckets, Fraction(1, 5)).items()}
    store.spend(charge(buckets["high"], cost=7))
    for number in range(50):
        store.spend(charge(Rule("r", "10/day").buckets[0], f"new {number}"))
    assert not store.spend(charge(buckets["low"])).admitted
    assert store.spend(charge(buckets["normal"])).admitted
