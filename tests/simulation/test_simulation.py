"""Histories by seed find nothing, and find each past bug that is put back. `make simulate` runs many more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from limitgate import AsyncLimiter
from limitgate.process import clock
from limitgate.stores.redis.aio import connection
from tests.simulation import bugs
from tests.simulation.installed import worlds
from tests.simulation.scenario import simulate

FOUND_BY = {
    "breaker-stays-open": 1,
    "charged-partly": 9,
    "dropped-connection": 17,
    "lease-without-time": 2,
    "mixed-answers": 2,
    "no-timeout-in-flight": 5,
    "refund-of-what-has-drained": 25,
    "refund-sent-again": 171,
    "refusal-after-a-reset": 8,
    "refusal-counted-from-the-answer": 9,
    "refusal-for-other-costs": 0,
    "refusal-without-time": 0,
    "sent-again-and-again": 626,
    "slot-of-a-cancelled-call": 74,
    "step-back-pays": 278,
    "wait-rounded-down": 0,
}
"""The first seed, from 0, that finds a bug. If the scenario changes, ``python -m tests.simulation --bug NAME`` tells it."""
NEAR = 1000
"""Seeds to try if the engine or the scenario has changed."""


def test_histories_find_nothing():
    with worlds():
        for seed in range(60):
            assert simulate(seed).findings == [], f"repeat with: python -m tests.simulation --seed {seed}"


def test_a_seed_is_one_history():
    with worlds():
        first, again = [simulate(7, keeps_history=True) for _ in range(2)]
    assert first.history == again.history
    assert (first.steps, first.us) == (again.steps, again.us)


def test_a_seed_is_one_history_whatever_texts_hash_to():
    code = """
from tests.simulation.installed import worlds
from tests.simulation.scenario import simulate
with worlds():
    for seed in (7, 74, 75):
        print(*simulate(seed, keeps_history=True).history, sep="\\n")
"""
    first, again = [
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("1", "2")
    ]
    assert first == again
    assert first.count(b"\n") > 100


def test_nothing_stays_of_a_world():
    before = clock.monotonic, connection.has_data, AsyncLimiter.__module__
    with worlds():
        simulate(1)
    assert (clock.monotonic, connection.has_data, AsyncLimiter.__module__) == before


def test_every_bug_has_its_seed():
    assert set(FOUND_BY) == set(bugs.BUGS)


@pytest.mark.parametrize("bug", sorted(FOUND_BY))
def test_a_past_bug_is_found(bug: str):
    with worlds(), bugs.put_back(bug):
        known = FOUND_BY[bug]
        seeds = [known, *range(NEAR)]
        assert any(simulate(seed).findings for seed in seeds), f"{bug} was not found by {NEAR} seeds"
