"""What was measured as Markdown, and whether each bar was met."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.overload.app import ADAPTIVE, NONE
from benchmarks.overload.rows import (
    FIXED,
    LOADS,
    SHARES,
    STEADY,
    STEP,
    STEP_DOWN_S,
    STEP_UP_S,
    STEPS_END_S,
    WORKS,
    Capacity,
    Results,
    refusal_s,
)
from benchmarks.overload.runs import Run
from benchmarks.report import table

_WAYS = {ADAPTIVE: "adaptive", NONE: "without a limit"}
DISTURBED = 0.02
"""Share of the time for which others may have had a server's core before its figures are those of another machine."""
LATE_S = 0.020
"""Seconds by which the client may be late."""
_AT_1X, _ABOVE = 0.95, 0.97
"""Goodput as a share of what can be served, at 1 times the capacity and above."""
_TIMES, _MORE_S = 3, 0.060
"""Latency: so many times that on an idle server, or so much more."""
_OF_FIXED = 0.97
_AFTER_STEP = 0.9
_ALONE, _TOGETHER = 0.10, 0.15
"""Standard deviation of the limit as a share of its mean, in one process and of the sum of four."""
_FAIR = 0.98
_HIGH = 0.9
_DRIFT = 1.1


class Bar(NamedTuple):
    """A mark that was set beforehand; ``measured`` has to be at least ``bound``, or at most where `is_most`."""

    what: str
    bound: float
    measured: float
    is_most: bool = False
    unit: str = "%"

    @property
    def is_met(self) -> bool:
        """True if it was reached."""
        return self.measured <= self.bound if self.is_most else self.measured >= self.bound


def most_share(load: float, k: float) -> float:
    """The largest share of its capacity that a loop can serve if each refusal costs k times as much as a request."""
    return load if load <= 1 else max(0.0, (1 - load * k) / (1 - k))


def bars(results: Results) -> list[Bar]:
    """The bars of what was measured."""
    return [
        *_steady_bars(results),
        *_fixed_bars(results),
        *_step_bars(results),
        *_sharing_bars(results),
        *[
            Bar(
                f"{WORKS[work].name} at {load:g}, high alone {load * SHARES['high']:.1f}: high answered",
                100 * _HIGH,
                100 * run.answered("high"),
            )
            for (work, load), run in results.priorities.items()
        ],
    ]


def _steady_bars(results: Results) -> Iterator[Bar]:
    for (work, load), run in results.limited.items():
        what = f"{WORKS[work].name} at {load:g}"
        if load < 1:
            yield Bar(f"{what}: shed", 0, 100 * run.shed, is_most=True)
        else:
            reachable = most_of(results, work, load)
            bound = _AT_1X if load == 1 else _ABOVE * reachable
            yield Bar(f"{what}: goodput", 100 * bound, 100 * run.share(results.capacity[work].rate))
        yield Bar(f"{what}: p99 of the admitted", _p99_bound_ms(results, work), 1000 * run.quantile_s(0.99), True, "ms")
    alone = results.limited.get(("pool", 2))
    if alone is not None:
        mean, deviation = alone.limits
        yield Bar("pool at 2: deviation of the limit", 100 * _ALONE, 100 * deviation / mean, is_most=True)


def _fixed_bars(results: Results) -> Iterator[Bar]:
    for work, load in [(work, load) for work, by_load in FIXED.items() for load in by_load]:
        best, ours = best_fixed(results, work, load), results.limited.get((work, load))
        if best is not None and ours is not None:
            rate = results.capacity[work].rate
            share = ours.share(rate) / results.fixed[work, load, best].share(rate)
            what = f"{WORKS[work].name} at {load:g}: of the goodput of the best fixed limit, {best}"
            yield Bar(what, 100 * _OF_FIXED, 100 * share)


def _step_bars(results: Results) -> Iterator[Bar]:
    run = results.steps.get(ADAPTIVE)
    if run is not None:
        rate = results.capacity["pool"].rate
        for way, begin_s, end_s, times in (("up", STEP_UP_S, STEP_DOWN_S, STEP), ("down", STEP_DOWN_S, STEPS_END_S, 1)):
            share = run.rate(begin_s + 2, end_s) / (times * rate)
            yield Bar(f"2 to 10 s after a step {way} by {STEP}: goodput", 100 * _AFTER_STEP, 100 * share)


def _sharing_bars(results: Results) -> Iterator[Bar]:
    run = results.processes
    if run is not None:
        mean, deviation = run.limits
        yield Bar("four processes at 2: goodput", 100 * _ABOVE, 100 * run.share(results.capacity["pool"].rate))
        yield Bar(
            "four processes at 2: p99 of the admitted", _p99_bound_ms(results, "pool"), 1000 * run.quantile_s(0.99), True, "ms"
        )
        yield Bar(
            "four processes at 2: deviation of the sum of the limits", 100 * _TOGETHER, 100 * deviation / mean, is_most=True
        )
        yield Bar("four processes at 2: Jain's index", 100 * _FAIR, 100 * run.fairness)
    if results.drift is not None:
        first, last = results.drift
        yield Bar(
            "limit after ten minutes at 2, of that of the first", 100 * _DRIFT, 100 * last.limits[0] / first.limits[0], True
        )


def most_of(results: Results, work: str, load: float) -> float:
    """The largest share of its capacity that some work can serve: of a pool all of it."""
    return min(1.0, load) if work == "pool" else most_share(load, k_of(results, work) or 0.0)


def k_of(results: Results, work: str) -> float | None:
    """Cost of a refusal over that of a request, from the run with most refusals.

    None where that cannot be told: requests that await cost more the more of them there are, and under the backlog by which the
    capacity is measured there are so many that refusals seem to give time back.
    """
    costs_s = [refusal_s(results, work, load) for load in LOADS]
    known = [cost_s for cost_s in costs_s if cost_s is not None]
    return known[-1] / results.capacity[work].request_s if known and known[-1] > 0 else None


def best_fixed(results: Results, work: str, load: float) -> int | None:
    """The fixed limit with most goodput of those that keep the bar of latency."""
    bound_s = _p99_bound_ms(results, work) / 1000 if work in results.idle else math.inf
    kept = {
        limit: run
        for (of, at, limit), run in results.fixed.items()
        if (of, at) == (work, load) and run.quantile_s(0.99) <= bound_s and run.goodput
    }
    return max(kept, key=lambda limit: kept[limit].goodput, default=None)


def report(results: Results) -> str:
    """Everything that was measured: tables, and whether each bar was met."""
    texts = [_capacities(results), _loads(results), _others(results), _bars(results)]
    return "\n\n".join(text for text in texts if text)


def disturbed(results: Results) -> str:
    """Say how much of their core the servers had to leave to others, and the client; "" where it was next to nothing."""
    steps = [run for limit, run in results.steps.items() if limit != NONE]
    runs = [*results.limited.values(), *results.fixed.values(), *results.priorities.values(), *steps]
    waited = max([run.waited_s / run.seconds for run in runs], default=0.0)
    lag_s = max([run.lag_s for run in runs], default=0.0)
    if waited <= DISTURBED and lag_s <= LATE_S:
        return ""
    said = f"Others had the core of a server for up to {waited:.0%} of a run, and requests were sent up to {_ms(lag_s)} late"
    return f"{said}: these figures are not of a quiet machine."


def _capacities(results: Results) -> str:
    heads = ["", "capacity, requests/s", "CPU of a request", "of a refusal", "p99 idle"]
    rows = []
    for work, capacity in results.capacity.items():
        k = k_of(results, work)
        refusal = "-" if k is None else f"{1e6 * k * capacity.request_s:.0f} µs"
        idle = _ms(results.idle[work].quantile_s(0.99))
        rows.append([WORKS[work].name, f"{capacity.rate:.0f}", f"{1e6 * capacity.request_s:.0f} µs", refusal, idle])
    return table(heads, rows)


def _loads(results: Results) -> str:
    works = [work for work in STEADY if (work, LOADS[0]) in results.limited]
    if not works:
        return ""
    heads = ["load", *[head for work in works for head in (WORKS[work].name, f"{WORKS[work].name}, without a limit")]]
    rows = []
    for load in LOADS:
        row = [f"{load:g}"]
        for work in works:
            rate = results.capacity[work].rate
            most = rate * most_of(results, work, max(1, load))
            row += [_cell(results.limited[work, load], most), _cell(results.unlimited[work, load], rate)]
        rows.append(row)
    return table(heads, rows)


def _cell(run: Run, rate: float) -> str:
    """Goodput as a share of what could be served, p50 and p99 of the admitted, and what was shed."""
    shed = f", {100 * run.shed:.0f} % shed" if run.shed else ""
    return f"{100 * run.share(rate):.0f} %, {_ms(run.quantile_s(0.5))} / {_ms(run.quantile_s(0.99))}{shed}"


def _others(results: Results) -> str:
    """Rows of other kinds."""
    rows: list[Sequence[str]] = []
    for runs, way in ((results.limited, ADAPTIVE), (results.unlimited, NONE)):
        for (work, load), run in runs.items():
            if work not in STEADY:
                most = results.capacity[work].rate * (1 if way == NONE else most_of(results, work, max(1, load)))
                rows.append([f"{WORKS[work].name}, at {load:g}, {_WAYS[way]}", _cell(run, most)])
    pool = results.capacity.get("pool", Capacity(0.0, 0.0))
    for (work, load, limit), run in results.fixed.items():
        rows.append([f"{WORKS[work].name} at {load:g}, fixed limit of {limit}", _cell(run, results.capacity[work].rate)])
    for way, run in results.steps.items():
        up, down = run.rate(STEP_UP_S + 2, STEP_DOWN_S), run.rate(STEP_DOWN_S + 2, STEPS_END_S)
        rows.append([f"capacity x {STEP}, then back, {_WAYS[way]}: answered in time", f"{up:.0f}/s, then {down:.0f}/s"])
    if results.processes is not None:
        rows.append(["four processes on one backend at 2", _cell(results.processes, pool.rate)])
    for (work, load), run in results.priorities.items():
        answered = ", ".join(f"{100 * run.answered(kind):.0f}" for kind in SHARES)
        rows.append([f"{WORKS[work].name} at {load:g}, answered of high, normal and low", f"{answered} %"])
    return table(["", ""], rows) if rows else ""


def _bars(results: Results) -> str:
    rows = []
    for bar in bars(results):
        bound = f"{'at most' if bar.is_most else 'at least'} {_figure(bar.bound, bar.unit)}"
        rows.append([bar.what, bound, _figure(bar.measured, bar.unit), "met" if bar.is_met else "missed"])
    return table(["bar", "to be met", "measured", ""], rows) if rows else ""


def _p99_bound_ms(results: Results, work: str) -> float:
    idle_s = results.idle[work].quantile_s(0.99)
    return 1000 * max(_TIMES * idle_s, idle_s + _MORE_S)


def _figure(value: float, unit: str) -> str:
    if math.isinf(value):
        return "no answer"
    return f"{value:.0f} ms" if unit == "ms" else f"{value:.1f} %"


def _ms(seconds: float) -> str:
    return "over 1 s" if math.isinf(seconds) else f"{1000 * seconds:.0f} ms"
