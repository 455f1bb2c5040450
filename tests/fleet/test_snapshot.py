"""The bytes of a snapshot: what is written can be read, and whatever else stands there does no harm."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate.fleet.sketch import Entry, Top
from limitgate.fleet.snapshot import LoadState, RuleState, Snapshot, StoreState, UnreadableError, decode, encode, read_values
from limitgate.stores.base import LONGEST_SNAPSHOT

NOW = 1_800_000_000.0


def key(number: int) -> str:
    return f"{random.Random(number).getrandbits(128):032x}"


def clients(count: int) -> Top:
    return Top([Entry(key(n), 1000 - n, n, int(NOW), int(NOW)) for n in range(count)], floor=7)


def rule(name: str = "api", count: int = 3) -> RuleState:
    names = {key(n): f"ip=20….{n}" for n in range(count)}
    rates = {key(1): 2.5}, {key(0): 0.1, key(2): 41.5}
    counts = 10, 3, 0.5, clients(count), clients(count)
    return RuleState(name, "default", *counts, names, [{"limit": "5/second"}], rates if count == 3 else ({}, {}), 7)


def snapshot(**more: Any) -> Snapshot:
    return Snapshot(
        **{
            "id": "0123456789abcdef",
            "host": "web-1",
            "pid": 12,
            "start": NOW - 100,
            "at": NOW,
            "version": "1.0",
            "revision": 5,
            "source": "config/",
            "requests": 13,
            "refused": 3,
            "store": StoreState(up=True, latency=0.001, breaker="closed", scheme="redis"),
            "load": LoadState(ok=False, at=NOW, error="config/a.yaml:3: no"),
            "last_error": "timed out",
            "last_error_at": NOW - 5,
            "rules": [rule()],
            "adaptive": [("all", "default", 20, 3)],
            "counters": [("limitgate.requests", ("admitted", "store"), [10])],
            "gauges": [("limitgate.store.up", ("redis",), [1])],
            "rates": (5.0, 1.5),
            "history": [(60_000_000, 10, 3)],
            "process": "fedcba9876543210",
            **more,
        }
    )


def test_what_is_written_can_be_read() -> None:
    read = decode(encode(snapshot()))
    assert replace(read, rules=[], adaptive=[], counters=[], gauges=[], history=[]) == replace(
        snapshot(), rules=[], adaptive=[], counters=[], gauges=[], history=[]
    )
    assert read.rules == [rule()]
    assert [*map(tuple, read.adaptive)] == [("all", "default", 20, 3)]
    assert read_values(read.counters) == [("limitgate.requests", ("admitted", "store"), [10])]
    assert read_values([*read.counters, None, ["a"], ["a", ["b"], ["c"]]]) == read_values(read.counters)
    assert read.history == [(60_000_000, 10, 3)]


def test_sketches_are_cut_to_the_budget() -> None:
    """Whoever is left out may have as much as the floor says."""
    whole = snapshot(rules=[rule(f"r{n}", 256) for n in range(10)])
    for budget in (4_000, 20_000, LONGEST_SNAPSHOT):
        packed = encode(whole, budget)
        assert len(packed) <= budget
        for each in decode(packed).rules:
            left = len(each.used.entries)
            assert each.used.entries == clients(256).entries[:left]
            assert each.used.floor == (7 if left == 256 else 1000 - left)


def test_thousands_of_rules_leave_the_process() -> None:
    """What does not fit is left out; that the process lives is told."""
    names = [f"{key(n)}{key(n + 1)}" for n in range(3_000)]
    many = snapshot(rules=[rule(name, 0) for name in names], counters=[(name, (name,), [n]) for n, name in enumerate(names)])
    packed = encode(many)
    assert len(packed) <= LONGEST_SNAPSHOT
    assert decode(packed).requests == 13


def packed_json(value: Any) -> bytes:
    return b"LG\x01" + zlib.compress(json.dumps(value).encode())


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"L",
        b"LG",
        b"LG\x01",
        b"LG\x02" + encode(snapshot())[3:],
        encode(snapshot())[:-9],
        encode(snapshot())[:40],
        b"x" * 1_000_000,
        b"LG\x01" + b"x" * 1_000_000,
        b"LG\x01" + zlib.compress(b"[" * 10_000),
        b"LG\x01" + zlib.compress(b"0" * 5_000_000),
        packed_json([]),
        packed_json({}),
        packed_json("text"),
        packed_json({"i": 1}),
    ],
    ids=lambda packed: f"{len(packed)} bytes",
)
def test_anything_else_is_unreadable(packed: bytes) -> None:
    with pytest.raises(UnreadableError, match="it "):
        decode(packed)


KEPT = json.loads(zlib.decompress(encode(snapshot())[3:]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@given(st.sampled_from(sorted(KEPT)), VALUES)
def test_a_foreign_value_is_refused_or_left_out(name: str, value: Any) -> None:
    """Nothing but `UnreadableError` is raised, and what is read can be shown."""
    try:
        read = decode(packed_json({**KEPT, name: value}))
    except UnreadableError:
        return
    json.dumps([read.host, read.version, read.requests, read.pid, read.last_error], allow_nan=False)


@pytest.mark.parametrize(
    "name", ["\x1b[31mred", "\u202edesrever", "<script>alert(1)</script>", "##[error]x", "a" * 5_000, "\ud800"]
)
def test_names_are_harmless_when_read(name: str) -> None:
    """Control characters and marks of direction are escaped, and all are short. Markup is text, which viewers escape."""
    mean = replace(rule(count=1), names={key(0): name}, name=name)
    (read,) = decode(encode(snapshot(rules=[mean], host=name, last_error=name))).rules
    for text in (read.name, read.names[key(0)]):
        assert text.isprintable()
        assert len(text) <= 128
        assert "##[" not in text
