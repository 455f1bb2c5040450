"""The snapshot of one process: one compact, versioned value. Pure.

The bytes are ``LG``, a version, and JSON compressed by zlib. Readers don't trust them: other programs may write to the store.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from operator import gt
from typing import Any, TypeVar

from limitgate.fleet.sketch import NOBODY, SIZE, Entry, Top
from limitgate.messages.text import printable, shortened
from limitgate.stores.base import LONGEST_SNAPSHOT

VERSION = 1
_HEAD = b"LG%c" % VERSION
_MOST_JSON = 1_048_576
"""Maximum bytes of JSON to unpack."""
LONGEST_NAME = 128
MOST_RULES = 1_000
_HUGE = 2**63
_DIGESTS = re.compile("[0-9a-f]*")
T = TypeVar("T")

Labels = tuple[str, ...]
Value = tuple[str, Labels, Sequence[float]]
"""Instrument, labels and value. The value of a histogram is its bucket counts and sum."""


class UnreadableError(ValueError):
    """Not a snapshot of this version."""


@dataclass(slots=True)  # frozen would double the time to read one
class RuleState:
    name: str
    tier: str
    admitted: int
    refused: int
    utilization: float
    used: Top = NOBODY
    refusals: Top = NOBODY
    names: Mapping[str, str] = field(default_factory=dict)
    limits: Sequence[Any] = ()
    """Texts by label. In a decoded snapshot, they are as received, see `read_limits`."""
    rates: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})
    """Used and refused requests per second of the busiest keys."""
    would_refuse: int | None = None
    """Number of ``refusals`` by a shadow rule; None for other rules."""


@dataclass(frozen=True, slots=True)
class StoreState:
    up: bool
    latency: float | None
    """Seconds to write the previous snapshot."""
    breaker: str
    """``closed``, ``open`` or ``half-open``."""
    scheme: str = ""


@dataclass(frozen=True, slots=True)
class LoadState:
    ok: bool
    at: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One gate of one process. Times are Unix seconds by its clock."""

    id: str
    """16 hex digits, unique per gate and start of a process."""
    host: str
    pid: int
    start: float
    at: float
    version: str
    revision: int | None
    source: str
    requests: int
    refused: int
    store: StoreState
    load: LoadState
    last_error: str | None = None
    last_error_at: float | None = None
    rules: Sequence[RuleState] = ()
    adaptive: Sequence[tuple[str, str, int, int]] = ()
    """Rule, tier, limit, and requests in flight."""
    counters: Sequence[Any] = ()
    """A list of `Value`. In a decoded snapshot, it is as received, see `read_values`."""
    gauges: Sequence[Any] = ()
    ended: bool = False
    names: str = "masked"
    rates: tuple[float, float] = (0.0, 0.0)
    """Requests and refusals per second, over the last period."""
    history: Sequence[tuple[int, int, int]] = ()
    """Last 15 minutes by `STEP`: Unix time, requests, refusals."""
    process: str = ""
    """Id that all gates of a process share."""


STEP = 30
"""Seconds."""
STEPS = 30


def encode(snapshot: Snapshot, budget: int = LONGEST_SNAPSHOT) -> bytes:
    """Return a snapshot's bytes. Sketches are cut to stay within ``budget``."""
    most = SIZE
    while True:
        packed = _HEAD + zlib.compress(json.dumps(_plain(snapshot, most), separators=(",", ":")).encode(), 1)
        if len(packed) <= budget or most == 0:
            break
        most = min(most // 2, most * budget // len(packed))
    # The process has thousands of rules.
    return packed if len(packed) <= LONGEST_SNAPSHOT else _HEAD + zlib.compress(json.dumps(_bare(snapshot)).encode(), 9)


def _bare(snapshot: Snapshot) -> dict[str, Any]:
    bare = {**_plain(snapshot, 0), **_plain_rules([], 0), "c": [], "g": [], "a": []}
    return {name: value[:LONGEST_NAME] if isinstance(value, str) else value for name, value in bare.items()}


def _plain(snapshot: Snapshot, most: int) -> dict[str, Any]:
    return {
        "i": snapshot.id,
        "h": snapshot.host,
        "p": snapshot.pid,
        "s": round(snapshot.start, 3),
        "t": round(snapshot.at, 3),
        "v": snapshot.version,
        "r": snapshot.revision,
        "o": snapshot.source,
        "q": snapshot.requests,
        "f": snapshot.refused,
        "st": [snapshot.store.up, snapshot.store.latency, snapshot.store.breaker, snapshot.store.scheme],
        "l": [snapshot.load.ok, round(snapshot.load.at, 3), snapshot.load.error],
        "e": [snapshot.last_error, snapshot.last_error_at],
        **_plain_rules(snapshot.rules[:MOST_RULES], most),
        "a": snapshot.adaptive,
        "c": snapshot.counters,
        "g": snapshot.gauges,
        "x": snapshot.ended,
        "n": snapshot.names,
        "w": [round(each, 3) for each in snapshot.rates],
        "y": snapshot.history,
        "j": snapshot.process,
    }


def _plain_rules(rules: Sequence[RuleState], most: int) -> dict[str, Any]:
    """Return rules with clients in columns, which are several times faster to read than rows."""
    listed, entries, names = [], list[Entry](), list[str]()
    moving: dict[int, int] = {}
    for rule in rules:
        tops = rule.used.cut(most), rule.refusals.cut(most)
        sizes = [(each.floor, len(each.entries)) for each in tops]
        listed.append([rule.name, rule.tier, rule.admitted, rule.refused, round(rule.utilization, 4), sizes, rule.limits])
        for each, rates in zip(tops, rule.rates):
            tenths = [round(10 * rates.get(entry.key, 0)) for entry in each.entries] if rates else ()
            moving.update({place: rate for place, rate in enumerate(tenths, len(entries)) if rate})
            entries += each.entries
            names += [rule.names.get(entry.key, "")[:LONGEST_NAME] for entry in each.entries]
    keys = {key: place for place, key in enumerate(dict.fromkeys([each.key for each in entries]))}
    columns = [
        [keys[each.key] for each in entries],
        [each.hits for each in entries],
        [each.error for each in entries],
        [int(each.since) for each in entries],
        [int(each.last) for each in entries],
    ]
    known = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return {
        "k": listed,
        "z": columns,
        "d": list(keys),
        "m": list(known),
        "u": [known[name] for name in names],
        "b": [list(moving), list(moving.values())],
        "sh": [(place, rule.would_refuse) for place, rule in enumerate(rules) if rule.would_refuse is not None],
    }


_NO_RATES: tuple[Mapping[str, float], Mapping[str, float]] = {}, {}
_DAMAGE = zlib.error, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, StopIteration


def decode(packed: bytes, *, brief: bool = False) -> Snapshot:
    """Read a snapshot, if ``brief`` without rules and history. Raises `UnreadableError`, whatever the bytes are."""
    if not packed.startswith(b"LG"):
        raise UnreadableError("it is not a snapshot")
    if not packed.startswith(_HEAD):
        raise UnreadableError(f"it has version {packed[2]}, expected {VERSION}" if len(packed) > 2 else "it is cut off")
    if len(packed) > LONGEST_SNAPSHOT:
        raise UnreadableError(f"it has {len(packed):,} bytes, expected at most {LONGEST_SNAPSHOT:,}")
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(packed[len(_HEAD) :], _MOST_JSON)
        if unpacking.eof:
            return _snapshot(json.loads(text), brief=brief)
    except _DAMAGE as error:
        raise UnreadableError(f"it is damaged ({type(error).__name__})") from error
    raise UnreadableError("it is cut off or too long")


def _snapshot(kept: Mapping[str, Any], *, brief: bool) -> Snapshot:
    up, latency, breaker, scheme = kept["st"]
    is_loaded, loaded_at, load_error = kept["l"]
    error, error_at = kept["e"]
    return Snapshot(
        id=_text(kept["i"], 32),
        host=_text(kept["h"]),
        pid=_whole(kept["p"]),
        start=_number(kept["s"]),
        at=_number(kept["t"]),
        version=_text(kept["v"]),
        revision=None if kept["r"] is None else _whole(kept["r"]),
        source=_text(kept["o"], 500),
        requests=_whole(kept["q"]),
        refused=_whole(kept["f"]),
        store=StoreState(bool(up), None if latency is None else _number(latency), _text(breaker), _text(scheme)),
        load=LoadState(bool(is_loaded), _number(loaded_at), None if load_error is None else _text(load_error, 500)),
        last_error=None if error is None else _text(error, 500),
        last_error_at=None if error_at is None else _number(error_at),
        rules=() if brief else _rules(kept),
        adaptive=_each(kept["a"][:MOST_RULES], lambda each: (_text(each[0]), _text(each[1]), _whole(each[2]), _whole(each[3]))),
        counters=_listed(kept["c"]),
        gauges=_listed(kept["g"]),
        ended=bool(kept["x"]),
        names=_text(kept["n"]),
        rates=(_number(kept["w"][0]), _number(kept["w"][1])),
        history=() if brief else _history(kept["y"][-STEPS - 1 :]),
        process=_text(kept.get("j", ""), 32),
    )


def _history(rows: Any) -> list[tuple[int, int, int]]:
    flat = _wholes([*chain.from_iterable(rows)])
    if set(map(len, rows)) - {3}:
        raise ValueError("a step does not have three numbers")
    return list(zip(flat[::3], flat[1::3], flat[2::3]))


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is no list")
    return value


def read_values(received: Iterable[Any]) -> list[Value]:
    """Read counters or gauges of a snapshot; skip damaged ones. Only exporters need them."""
    return _each(received, _value)


def read_limits(received: Sequence[Any]) -> list[Mapping[str, str]]:
    """Read the limits of a rule; skip damaged ones."""
    return _each(received[:64], lambda limit: {_text(label): _text(value) for label, value in limit.items()})


def _rules(kept: Mapping[str, Any]) -> list[RuleState]:
    digests, told = kept["d"], _texts(kept["m"])
    if not _DIGESTS.fullmatch("".join(digests)):
        raise ValueError("a key is not a digest")
    keys = [digests[place] for place in _wholes(kept["z"][0])]
    hits, errors, since, last = map(_wholes, kept["z"][1:])
    if any(map(gt, errors, hits)):
        raise ValueError("an error is above its count")
    entries = list(map(Entry._make, zip(keys, hits, errors, since, last)))
    # A digest stands for the same client in each rule.
    names = {key: name for key, place in zip(keys, _wholes(kept["u"])) if (name := told[place])}
    moving, tenths = map(_wholes, kept.get("b", ([], [])))
    shadows = {_whole(place): _whole(count) for place, count in kept.get("sh", ())}
    rules = kept["k"][:MOST_RULES]
    labels = _texts([label for rule in rules for label in rule[:2]])
    numbers = iter(_wholes([number for rule in rules for number in (*rule[2:4], *chain.from_iterable(rule[5]))]))
    found, at = [], 0
    for place, (_, _, _, _, utilization, _, limits) in enumerate(rules):
        admitted, refused, floor, size, other_floor, other_size = islice(numbers, 6)
        middle, end = at + size, at + size + other_size
        used, refusals = Top(entries[at:middle], floor), Top(entries[middle:end], other_floor)
        rates = _NO_RATES
        if moving:
            rates = _rates(keys, moving, tenths, at, middle), _rates(keys, moving, tenths, middle, end)
        at = end
        counts = admitted, refused, max(0.0, _number(utilization))
        name, tier = labels[2 * place : 2 * place + 2]
        found.append(RuleState(name, tier, *counts, used, refusals, names, _listed(limits), rates, shadows.get(place)))
    return found


def _rates(keys: Sequence[str], moving: Sequence[int], tenths: Sequence[int], begin: int, end: int) -> Mapping[str, float]:
    part = slice(bisect_left(moving, begin), bisect_left(moving, end))
    return {keys[entry]: rate / 10 for entry, rate in zip(moving[part], tenths[part])}


def _wholes(column: Any) -> Sequence[int]:
    if not isinstance(column, list) or not set(map(type, column)) <= {int}:
        raise TypeError(f"{column!r:.80} are not whole numbers")
    if column and not (min(column) >= 0 and max(column) < _HUGE):
        raise ValueError("a number is out of range")
    return column


def _value(kept: Sequence[Any]) -> Value:
    name, labels, values = kept
    return _text(name), tuple([_text(each) for each in labels]), [_number(each) for each in values]


def _each(kept: Iterable[Any], read: Callable[[Any], T]) -> list[T]:
    found: list[T] = []
    for each in kept:
        with suppress(TypeError, ValueError, LookupError, AttributeError, OverflowError):
            found.append(read(each))
    return found


def _texts(column: Any) -> Sequence[str]:
    if not isinstance(column, list) or not set(map(type, column)) <= {str}:
        raise TypeError(f"{column!r:.80} are not texts")
    return [_harmless(each[: 2 * LONGEST_NAME], LONGEST_NAME) for each in column]


def _text(value: Any, longest: int = LONGEST_NAME) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not text")
    return _harmless(value[: 2 * longest], longest)


@lru_cache(maxsize=16_384)
def _harmless(text: str, longest: int) -> str:
    """Make text printable and short. Cached, because processes report the same texts."""
    return shortened(printable(text), longest)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r:.80} is not a number")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _HUGE:
        raise TypeError(f"{value!r:.80} is not a whole number")
    return value
