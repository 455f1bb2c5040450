"""The charge of a plain bucket in a straight line, for each algorithm and number of windows.

It is written out window by window, as the script for Redis is (limitgate/stores/redis/protocol/plain.py): a loop over three
windows, and the lists that it would fill, take a third of what `MemoryStore` needs for a request.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from textwrap import dedent, indent
from typing import Any

from limitgate.algorithms.base import State, Straight, StraightRefund
from limitgate.limits.written_out import compiled, each_window

StraightCharge = Callable[..., tuple[tuple[State, ...], bytes | None] | None]

_SOURCE = """
def charge(value, now, number, cost, rows, slot=0):
    try:
        kept_number, written, kept_cost, {kept} = unpack(value)
    except error:
        return None
    elapsed = now - written
    if kept_number != number or kept_cost != cost or elapsed < 0:
        return None
    {rows} = rows
{advance}
    if {fits}:
        return ({states}), pack(number, now, cost, {charged})
    return ({states}), None
"""


@cache
def straight_charge(straight: Straight, form: str, windows: int) -> StraightCharge:
    """Return the function that charges a bucket of so many windows, whose value has this form of `struct`.

    It takes the value, the time in Unix µs, the number of the bucket's layout, the cost, the rows of its windows, and maybe the
    name of a slot, which only a bucket of slots takes. It
    returns the state of each window at that time, and the value after the charge, None if that does not fit; and None if the
    value is one of another layout, of another cost, or of the future.
    """
    value = struct.Struct(form)
    each = partial(each_window, windows)
    source = _SOURCE.format(
        kept=each(straight.kept),
        rows=each(f"({straight.row}),"),
        advance=indent(each(dedent(straight.advance).strip(), "\n"), "    "),
        fits=each(straight.fits, " and "),
        states=each(straight.state),
        charged=each(straight.charged),
    )
    known: dict[str, Any] = {"unpack": value.unpack, "pack": value.pack, "error": struct.error}
    return compiled(source, "charge", **known)  # type: ignore[no-any-return]


_REFUND = """
def refund(value, now, number, was, as_of, rows):
    try:
        kept_number, written, kept_cost, {kept} = unpack(value)
    except error:
        return None
    elapsed, since = now - written, now - as_of
    if kept_number != number or elapsed < 0 or since < 0:
        return None
    {was} = was
    {rows} = rows
{graces}
{advance}
{refunded}
    return pack(number, now, kept_cost, {kept})
"""


@cache
def straight_refund(straight: Straight, refund: StraightRefund, form: str, windows: int) -> Callable[..., bytes | None]:
    """Return the function that gives back a charge of such a bucket.

    It takes what `straight_charge` takes, and before the rows the states that the charge has found, and its time.
    It returns the value after it, None where `straight_charge` returns None for a value.
    """
    value = struct.Struct(form)
    each = partial(each_window, windows)
    source = _REFUND.format(
        kept=each(straight.kept),
        was=each(f"was_{straight.kept}"),
        rows=each(f"({straight.row}),"),
        advance=indent(each(dedent(straight.advance).strip(), "\n"), "    "),
        graces=indent(each(f"grace{{n}} = {refund.grace}", "\n"), "    "),
        refunded=indent(each(dedent(refund.refunded).strip(), "\n"), "    "),
    )
    known: dict[str, Any] = {"unpack": value.unpack, "pack": value.pack, "error": struct.error}
    return compiled(source, "refund", **known)  # type: ignore[no-any-return]
