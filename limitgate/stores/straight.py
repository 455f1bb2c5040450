"""Generated charge and refund functions without loops, which would take a third of a `MemoryStore` request."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from textwrap import dedent, indent
from typing import Any

from limitgate.algorithms.base import State, Straight, StraightRefund, compiled, each_window

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
    """Return a function that charges a bucket of ``windows`` windows; ``form`` is the `struct` format of its value.

    Its arguments are the value, the time in Unix µs, the layout number, the cost, the rows of the windows and the name of a
    slot. It returns the states at that time and the new value (None if the cost does not fit), or None if the value has another
    layout or cost, or was written in the future.
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
    """Return a function that refunds such a charge.

    It also takes the states and the time of the charge, before the rows, and returns the new value or None.
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
