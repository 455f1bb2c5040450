"""Plain plans on the wire: one script for each shape of plan, and a reply that is one string of numbers. Pure: no connection.

Almost every request makes a plain plan. Calls of one shape differ in keys and numbers alone, see limitgate/lua/plain.lua.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import NamedTuple

from limitgate.errors import StoreError
from limitgate.limits.plan import Reading
from limitgate.limits.template import PlainPlan, PlainShape, PlanTemplate

_LINES = (files("limitgate") / "lua" / "plain.lua").read_text("utf-8").splitlines()
"""Read at once: when the first request comes, no file may be left to open."""
_HEAD = 2  # the clock, no memory
NOT_CARRIED_OUT, ADMITTED = -1, 1
"""Of a plan: a bucket was not as expected, so nothing was charged; it was admitted, and every charge fitted."""


_Repetition = tuple[Mapping[str, object], Sequence[int]]
"""Of a bucket the texts for names in its lines, and the places of its windows."""


class PlainScript(NamedTuple):
    """Script for the plans of a shape."""

    text: str
    sha: str
    """The name by which Redis knows it."""


@cache
def script_of(shape: PlainShape) -> PlainScript:
    """Script for the plans of a shape."""
    text = _script(shape)
    return PlainScript(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def arguments(plans: Iterable[PlainPlan]) -> list[str | bytes | int]:
    """Arguments of EVALSHA or EVAL after the script's hash or text, for plain plans of one shape.

    A crowd mostly asks for the same of different buckets, so what is asked is sent once for each template.
    """
    keys: list[str | bytes | int] = [0]
    templates: dict[PlanTemplate, int] = {}
    which = []
    for plan in plans:
        keys += plan.keys
        which.append(templates.setdefault(plan.template, len(templates) + 1))
    keys[0] = len(keys) - 1
    numbers = struct.pack(f"<{len(which)}H", *which) if len(templates) > 1 else b""
    return [*keys, numbers, *map(_asked, templates)]


@lru_cache(maxsize=1024)
def _asked(template: PlanTemplate) -> bytes:
    """Pack the numbers of a template's windows for the script."""
    return b"".join(
        struct.pack("<6d", *bucket.algorithm.encode_charge(limit, window, cost, 0, 0))
        for bucket, cost, *_ in template.buckets
        for limit, window in zip(bucket.limits, bucket.ids)
    )


class PlainAnswers(NamedTuple):
    """Reply of the script to several plans."""

    now: int
    """Clock of the server, Unix µs."""
    unwritten: bool
    """True if Redis is out of memory: nothing was charged."""
    verdicts: Sequence[int]
    """Per plan `ADMITTED`, `NOT_CARRIED_OUT`, or 0 or 2 where a charge did not fit."""
    readings: Sequence[Reading]


def answers(shape: PlainShape, plans: Sequence[PlainPlan], reply: object) -> PlainAnswers:
    """Decode the reply to plans of a shape. Raises `StoreError` for a reply of any other form."""
    size = 1 + 2 * sum([windows for windows, _ in shape.buckets])
    if not isinstance(reply, bytes) or len(reply) != 8 * (_HEAD + len(plans) * size):
        raise StoreError(f"unexpected reply of {type(reply).__name__} from the script", "reply")
    now, unwritten, *numbers = struct.unpack(f"<{_HEAD + len(plans) * size}q", reply)
    verdicts, readings, at = numbers[::size], [], 1
    for plan, verdict in zip(plans, verdicts):
        debts, template = [], plan.template
        for count in template.counts:
            debts.append(numbers[at] * count + numbers[at + 1])
            at += 2
        at += 1
        readings.append(template.reading(plan.keys, now, debts, admitted=verdict > 0))
    return PlainAnswers(now, bool(unwritten), verdicts, readings)


def _script(shape: PlainShape) -> str:
    """Write out the repeated lines of limitgate/lua/plain.lua for plans of a shape."""
    first = 1
    buckets: dict[str, list[_Repetition]] = {"--bucket": [], "--ban": []}
    names: Mapping[str, object]
    for place, (windows, enforced) in enumerate(shape.buckets):
        value = "<BI7" + "I6I6I7I6" * windows
        names = {"$b": place, "$bytes": 8 + 25 * windows, "$value": value, "$refuses": str(enforced).lower()}
        buckets["--bucket" if windows else "--ban"].append((names, range(first, first + windows)))
        first += windows
    lines: list[str] = []
    block: list[str] | None = None
    repeated: Sequence[_Repetition] = ()
    for line in _LINES:
        if line in buckets:
            block, repeated = [], buckets[line]
        elif line == "--end" and block is not None:
            for names, of_bucket in repeated:
                lines += [_filled(each, names) for each in _unrolled(block, of_bucket)]
            block = None
        else:
            (lines if block is None else block).append(line)
    return _filled("\n".join(lines), {"$buckets": len(shape.buckets), "$numbers": 2 * (first - 1) + 1})


def _unrolled(block: Sequence[str], windows: Sequence[int]) -> Iterator[str]:
    """Lines of a block, those that end in ``--window`` once for each window."""
    for line in block:
        if line.endswith("--window"):
            yield from [_filled(line.removesuffix("--window").rstrip(), {"$w": window}) for window in windows]
        else:
            yield line


def _filled(text: str, names: Mapping[str, object]) -> str:
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, str(names[name]))
    return text
