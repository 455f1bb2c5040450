"""Who occurs most in a stream: counts within their error, and nobody that matters pushed out."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from limitgate.fleet.sketch import PERIOD, Entry, RecentSketch, Sketch, Top, merge, top

NOW = 1_800_000_000.0
NAMES = 1_000_000


def fed(stream: list[str], sketch: Sketch, together: int = 5_000) -> Sketch:
    """Counted as in a process: some thousand requests at once."""
    for place in range(0, len(stream), together):
        sketch.add(Counter(stream[place : place + together]), NOW + place)
    return sketch


def check(found: Top, true: Counter[str]) -> None:
    """The true count of each name lies within its error, and that of any other name below the floor."""
    listed = set()
    for entry in found.entries:
        listed.add(entry.key)
        assert entry.hits - entry.error <= true[entry.key] <= entry.hits
    assert all(count <= found.floor for name, count in true.items() if name not in listed)


def zipf(seed: int, length: int) -> list[str]:
    """A stream whose n-th name has a share of 1/n."""
    chance = random.Random(seed)
    # The inverse of the distribution's integral, which is that of 1/n but for the first few names.
    return [f"name {int(NAMES ** chance.random())}" for _ in range(length)]


@pytest.mark.usefixtures("_unwatched")
def test_the_top_twenty_of_a_million_names() -> None:
    """All are shown, and each count is right within its error."""
    stream = zipf(1, 1_000_000)
    true = Counter(stream)
    found = top(fed(stream, Sketch()))
    check(found, true)
    assert {name for name, _ in true.most_common(20)} <= {entry.key for entry in found.entries[:40]}
    assert [entry.key for entry in found.entries[:5]] == [name for name, _ in true.most_common(5)]


@pytest.mark.usefixtures("_unwatched")
def test_a_flood_of_new_names_pushes_nobody_out() -> None:
    """250,000 names that occur once each: twenty that occur a hundred times stay, before all of the flood."""
    chance, names = random.Random(2), NAMES // 4
    steady = [f"steady {number}" for number in range(20) for _ in range(100)]
    flood = [f"flood {number}" for number in range(names)]
    stream = steady[:500] + chance.sample(steady[500:] + flood, len(steady) - 500 + names)
    found = top(fed(stream, Sketch()))
    check(found, Counter(stream))
    assert {entry.key for entry in found.entries[:20]} == {f"steady {number}" for number in range(20)}
    assert max(entry.error for entry in found.entries) < 2 * names / 4096


@pytest.mark.usefixtures("_unwatched")
def test_without_a_filter_the_flood_would_push_them_out() -> None:
    """What the filter is for: plain Space-Saving gives every name of a flood a counter."""
    stream = [f"steady {number}" for number in range(20) for _ in range(400)] + [f"flood {number}" for number in range(200_000)]
    plain, filtered = [top(fed(stream, Sketch(cells=cells))) for cells in (0, 4096)]
    check(plain, Counter(stream))
    assert not any(entry.key.startswith("steady") for entry in plain.entries)
    assert sum(entry.key.startswith("steady") for entry in filtered.entries) == 20


NAMED = st.lists(st.sampled_from("abcdefghijkl"), max_size=200)


@given(NAMED, st.sampled_from([0, 1, 3, 64]))
def test_counts_lie_within_their_error(stream: list[str], cells: int) -> None:
    """Whatever comes in whatever order, however few counters and cells there are."""
    check(top(fed(stream, Sketch(size=4, cells=cells), together=3)), Counter(stream))


@given(st.lists(NAMED, min_size=1, max_size=5), st.integers(0, 4))
def test_merged_counts_lie_within_the_merged_error(streams: list[list[str]], most: int) -> None:
    """Those of several processes, each cut to what fits into a snapshot."""
    tops = [top(fed(stream, Sketch(size=4, cells=3), together=3)).cut(most) for stream in streams]
    check(merge(tops), Counter([name for stream in streams for name in stream]))


def test_a_run_begins_anew_after_a_pause() -> None:
    """Since when somebody is refused: a minute without a refusal ends it."""
    sketch = Sketch()
    for at in (0, 30, 85, 200, 201):
        sketch.add({"somebody": 1}, NOW + at)
    (entry,) = sketch.entries()
    assert (entry.since, entry.last, entry.hits) == (NOW + 200, NOW + 201, 5)


@pytest.mark.parametrize("order", [1, -1])
def test_a_pause_between_two_streams_ends_a_run(order: int) -> None:
    """Another process saw somebody earlier, or this one did in the period before: the run of now began later."""
    times = [[0, 30], [200, 230], [240, 250]][::order]
    sketches = [Sketch() for _ in times]
    for sketch, moments in zip(sketches, times):
        for at in moments:
            sketch.add({"somebody": 1}, NOW + at)
    (entry,) = merge(map(top, sketches)).entries
    assert (entry.since, entry.last, entry.hits) == (NOW + 200, NOW + 250, 6)


def test_a_run_goes_on_in_the_next_period() -> None:
    """A pause across the boundary ends it."""
    start = NOW - NOW % PERIOD
    for pause in (59, 61):
        recent = RecentSketch()
        recent.add({"somebody": 1}, start + PERIOD - 1)
        recent.add({"somebody": 1}, start + PERIOD - 1 + pause)
        (entry,) = recent.top().entries
        assert entry.since == start + PERIOD - 1 + (0 if pause == 59 else pause)


def test_old_counts_are_forgotten() -> None:
    """Those of this period and of the one before count."""
    start = NOW - NOW % PERIOD
    recent = RecentSketch()

    def moments() -> Iterator[int]:
        for at in (0, PERIOD - 1, PERIOD, 2 * PERIOD - 1, 2 * PERIOD, 3 * PERIOD, 5 * PERIOD):
            recent.add({"somebody": 1}, start + at)
            yield sum(entry.hits for entry in recent.top().entries)

    assert list(moments()) == [1, 2, 3, 4, 3, 2, 1]
    assert "somebody" in recent
    recent.look(start + 9 * PERIOD)
    assert "somebody" not in recent
    assert not recent.top().entries


def test_a_run_outlives_the_periods() -> None:
    """Since when somebody is refused who is refused for an hour, within any pause of less than a minute."""
    start = NOW - NOW % PERIOD + 7
    recent = RecentSketch()
    for at in range(0, 3600, 59):
        recent.add({"somebody": 1, f"flood {at}": 1}, start + at)
        entries = {entry.key: entry for entry in recent.top().entries}
        assert (entries["somebody"].since, entries["somebody"].last) == (start, start + at)
    assert len(entries) < 2 * PERIOD / 59 + 2
    recent.add({"somebody": 1}, start + 3599 + 61)
    assert next(entry.since for entry in recent.top().entries if entry.key == "somebody") == start + 3660


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_third_stream_joins_two(order: tuple[int, ...]) -> None:
    """In whatever order processes are read, a run began with the first of them."""
    runs = [(0, 10), (100, 130), (20, 90)]
    tops = [Top([Entry("somebody", 1, 0, NOW + since, NOW + last)]) for since, last in runs]
    (entry,) = merge([tops[place] for place in order]).entries
    assert (entry.since, entry.last) == (NOW, NOW + 130)


def test_a_run_begins_with_the_first_hit() -> None:
    """Not when hits are counted, after a pause as at first."""
    sketch = Sketch()
    for at in (2, 100):
        sketch.add({"somebody": 3}, NOW + at, {"somebody": NOW + at - 1.5})
        sketch.add({"somebody": 3}, NOW + at + 2, {"somebody": NOW + at + 0.5})
        (entry,) = sketch.entries()
        assert (entry.since, entry.last) == (NOW + at - 1.5, NOW + at + 2)
