"""Caches of what clients choose: bounded, and without a cliff where there is one key more than fits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random
from typing import Any
from weakref import ref

import pytest

from limitgate import Caller, Limit, Limiter, MemoryStore, Rule
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.prepared import PreparedPlan
from limitgate.limiter import plans
from limitgate.limits import bucket
from limitgate.limits.bucket import MOST_REMEMBERED, Remembered
from tests.support.doors import SITES, Site
from tests.support.interpreter import needs_gil


@pytest.fixture(autouse=True)
def _same_chances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run draws the same places."""
    monkeypatch.setattr(bucket, "random", Random(1).random)


def rounds(cache: Remembered[int, int], keys: int, times: int) -> float:
    """The share of hits in the last of several rounds of these keys in turn."""
    hits = 0
    for _ in range(times):
        hits = 0
        for key in range(keys):
            if key in cache.values:
                hits += 1
            else:
                cache.add(key, key)
    return hits / keys


@pytest.mark.parametrize(
    ("keys", "least"),
    [(MOST_REMEMBERED, 1.0), (MOST_REMEMBERED + 1, 0.98), (MOST_REMEMBERED * 5 // 4, 0.7), (5 * MOST_REMEMBERED, 0.15)],
)
def test_hits_become_fewer_gradually(keys: int, least: float) -> None:
    """Keys that come in turn hit about as often as there is room for them."""
    cache = Remembered[int, int]()
    assert rounds(cache, keys, 4) >= least
    assert len(cache.values) <= MOST_REMEMBERED


def test_new_keys_replace_old_ones() -> None:
    """What is asked for again and again finds room in the end, also after a flood of keys that come once."""
    cache = Remembered[int, int]()
    for key in range(10 * MOST_REMEMBERED):
        cache.add(-key, key)
    assert len(cache.values) <= MOST_REMEMBERED
    assert rounds(cache, MOST_REMEMBERED // 2, 60) > 0.9


def own_limits() -> dict[str, Any]:
    """Callers with limits of their own."""

    def identify(request: Any) -> Caller:
        name = request.headers["x-id"]
        return Caller(name, limits={"api": f"{1000 + int(name)}/minute"})

    return {"rules": [Rule("api", "9/minute", key=["caller"])], "identify": identify}


def given_limits() -> dict[str, Any]:
    """Limits that a callable gives for each client."""
    rule = Rule("api", lambda request: f"{1000 + int(request.headers['x-id'])}/minute", key=["header:x-id"])
    return {"rules": [rule], "new_buckets": 0}


@pytest.mark.parametrize("options", [own_limits, given_limits])
@pytest.mark.parametrize("door", SITES)
def test_cache_with_one_key_too_many_keeps_most_hits(
    monkeypatch: pytest.MonkeyPatch, door: type[Site], options: Callable[[], dict[str, Any]]
) -> None:
    """Of callers with limits of their own that come in turn, most find their limits read already, in each round."""
    monkeypatch.setattr(bucket, "MOST_REMEMBERED", 64)
    made: list[object] = []
    having_limits = CompiledRule.having_limits
    monkeypatch.setattr(CompiledRule, "having_limits", lambda self, limits: made.append(limits) or having_limits(self, limits))
    with door(store=MemoryStore(), **options()) as it:
        for _ in range(3):
            made.clear()
            for caller in range(80):
                assert it.ask(headers={"X-Id": str(caller)}).headers["x-ratelimit-limit"] == str(1000 + caller)
        assert 0 < len(made) < 40


@pytest.mark.parametrize("options", [own_limits, given_limits])
def test_cache_entry_of_a_caller_has_few_objects(
    monkeypatch: pytest.MonkeyPatch, options: Callable[[], dict[str, Any]]
) -> None:
    """Each full garbage collection looks at all of them, and the process stands still meanwhile."""
    monkeypatch.setattr(bucket, "MOST_REMEMBERED", 256)
    with SITES[0](store=MemoryStore(), **options()) as it:
        it.ask(headers={"X-Id": "0"})
        gc.collect()
        before = len(gc.get_objects())
        for caller in range(1, 257):
            it.ask(headers={"X-Id": str(caller)})
        gc.collect()
        assert len(gc.get_objects()) - before < 32 * 256


@needs_gil
def test_a_plan_that_is_not_remembered_is_freed_at_once() -> None:
    """In a cycle it would wait for a full garbage collection."""
    options = {"key_prefix": "", "secret": b"", "shadow": False, "cardinality": None, "inventable": lambda _: False}
    limited = CompiledRule(Rule("api", "9/minute"), "rule", **options).having_limits([Limit("12345/minute")])
    prepared = PreparedPlan((limited,), (), (1,), ())
    bucket = ref(limited.rule.buckets[0])
    gc.disable()
    try:
        del limited, prepared
        assert bucket() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("cost", [1, 40])
def test_limiter_with_one_key_too_many_keeps_most_hits(monkeypatch: pytest.MonkeyPatch, cost: int) -> None:
    """Of limits that are hit in turn most are known, with a prepared plan or without, when there is one more than fits."""
    monkeypatch.setattr(bucket, "MOST_REMEMBERED", 64)
    monkeypatch.setattr(plans, "_known_parts", Remembered())
    monkeypatch.setattr(plans, "_known_templates", Remembered())
    read: list[object] = []
    as_limit = plans.as_limit
    monkeypatch.setattr(plans, "as_limit", lambda limit: read.append(limit) or as_limit(limit))
    with Limiter(MemoryStore()) as limiter:
        for _ in range(3):
            read.clear()
            for number in range(80):
                assert limiter.hit(f"user:{number}", f"{1000 + number}/minute", cost=cost).allowed
        assert 0 < len(read) < 40
