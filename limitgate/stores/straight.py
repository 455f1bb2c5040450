"""The charge of a plain bucket in a straight line, for each number of windows.

It is written out window by window, as the script for Redis is (limitgate/stores/redis/protocol/plain.py): a loop over three
windows, and the lists that it would fill, take a third of what `MemoryStore` needs for a request.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache, partial

from limitgate.limits.template import Row
from limitgate.limits.written_out import compiled, each_window

StraightCharge = Callable[[bytes, int, int, int, Sequence[Row]], tuple[tuple[int, ...], bytes | None] | None]

_SOURCE = """
def charge(value, now, number, cost, rows):
    try:
        kept_number, written, kept_cost, {debts} = unpack(value)
    except error:
        return None
    elapsed = now - written
    if kept_number != number or kept_cost != cost or elapsed < 0:
        return None
    {rows} = rows
    {drained}
    {after} = {debts_after}
    if {fits}:
        return ({debts}), pack(number, now, cost, {after})
    return ({debts}), None
"""
_DRAINED = """
    if (debt{n} := debt{n} - elapsed * count{n}) < 0:
        debt{n} = 0
"""


@cache
def straight_charge(form: str, windows: int) -> StraightCharge:
    """Return the function that charges a bucket of so many windows, whose value has this form of `struct`.

    It takes the value, the time in Unix µs, the number of the bucket's layout, the cost, and the rows of its windows. It
    returns what each window owed at that time, in ticks, and the value after the charge, None if that does not fit; and None
    if the value is one of another layout, of another cost, or of the future.
    """
    kept = struct.Struct(form)
    each = partial(each_window, windows)
    source = _SOURCE.format(
        debts=each("debt{n},"),
        rows=each("(count{n}, increment{n}, capacity{n}),"),
        drained=each(_DRAINED.strip(), "\n    "),
        after=each("after{n},"),
        debts_after=each("debt{n} + increment{n},"),
        fits=each("after{n} <= capacity{n}", " and "),
    )
    return compiled(source, "charge", unpack=kept.unpack, pack=kept.pack, error=struct.error)  # type: ignore[no-any-return]
