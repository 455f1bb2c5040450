"""Buckets as bytes, which the cyclic garbage collector does not track.

A value is a head and 8-byte numbers, little-endian:

    layout number (4) | written, Unix µs (8) | last cost (8) | states, as their algorithm counts them

Logs and slots append entries. A bucket with a ban or a debt above 64 bits is only a head, with states stored separately.
Functions that charge and refund are generated, because loops would take a third of the time of a request.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from textwrap import dedent, indent
from typing import Any, Final

from limitgate.algorithms import gcra
from limitgate.algorithms.base import State, Straight, StraightRefund, compiled, each_window
from limitgate.algorithms.concurrency import State as Slots
from limitgate.algorithms.sliding_log import Log
from limitgate.limits.bucket import Bucket
from limitgate.limits.template import MAX_WINDOWS, Row

Entry = tuple[int, int, Bucket, Sequence[State]]
"""Write time (Unix µs), last cost, windows and states."""

HEAD: Final = struct.Struct("<Iqq")
MAX_COST: Final = 2**63 - 1
"""Maximum cost, because no limit has room for more."""
# Head, time, and slots in use; the slots follow.
_SLOTS: Final = struct.Struct("<Iqqqq")
_NUMBER: Final = struct.Struct("<I")
_TIME: Final = struct.Struct("<q")
_COST_AT: Final = _NUMBER.size + _TIME.size


@cache
def _form(numbers: int) -> tuple[struct.Struct, Sequence[int], Callable[..., bytes], Callable[[bytes], tuple[int, ...]]]:
    form = struct.Struct(f"{HEAD.format}{numbers}q")
    return form, (0,) * numbers, form.pack, form.unpack


class Layout:
    """Layout of buckets with the same windows. Each value contains the layout's number."""

    __slots__ = (
        "_nothing",
        "_straight_refund",
        "advance",
        "bucket",
        "charge",
        "drains",
        "is_debts",
        "is_log",
        "is_row",
        "is_slots",
        "mark",
        "number",
        "pack",
        "plain_size",
        "size",
        "unpack",
        "uses",
    )

    def __init__(self, bucket: Bucket) -> None:
        self.bucket: Bucket = bucket
        self.number: int = 0
        self.mark: bytes = b""
        self.uses: int = 0
        initial = bucket.algorithm.initial(0, bucket)
        self.is_debts: bool = set(map(type, initial)) == {int}
        self.is_row: bool = type(initial[0]) is tuple if initial else False
        self.is_log: bool = isinstance(initial[0], Log) if initial else False
        self.is_slots: bool = bucket.has_slots
        numbers = len(initial) if self.is_debts else len(initial[0]) if self.is_row else 0
        self.pack: Callable[..., bytes]
        self.unpack: Callable[[bytes], tuple[int, ...]]
        form, self._nothing, self.pack, self.unpack = _form(numbers)
        self.size: int = form.size
        self.plain_size: int = form.size if self.is_debts else 0
        """Size of a value; 0 unless states are plain numbers."""
        self.drains: bool = bucket.algorithm is gcra
        straight = None if self.is_slots else bucket.algorithm.STRAIGHT
        self._straight_refund: Callable[..., bytes | None] | None = None
        if straight is not None and len(initial) <= MAX_WINDOWS:
            self.charge: StraightCharge = straight_charge(straight, form.format, len(initial))
        elif self.is_log:
            self.charge = partial(_charge_log, bucket)
        elif self.is_slots:
            self.charge = partial(_charge_slots, bucket)
        self.advance: Callable[..., Sequence[State]] = bucket.algorithm.advance

    def opened(self, now: int, cost: int) -> bytes:
        if self.drains:
            return self.pack(self.number, now, cost, *self._nothing)
        return self.packed(now, cost, self.bucket.algorithm.initial(now, self.bucket))

    def packed(self, written: int, cost: int, states: Sequence[State]) -> bytes:
        """Return a value, or only its head if states are stored separately."""
        try:
            if self.is_debts:
                return self.pack(self.number, written, cost, *states)
            if self.is_row:
                return self.pack(self.number, written, cost, *states[0])
            if self.is_log:
                return head(self.number, written, cost) + _packed_log(states[0])
            if self.is_slots:
                slots: Slots = states[0]
                return _SLOTS.pack(self.number, written, min(cost, MAX_COST), slots.at, slots.taken) + slots.packed
        except struct.error:
            pass
        return head(self.number, written, cost)

    def unpacked(self, value: bytes, beside: Sequence[State]) -> Entry:
        _, written, cost = HEAD.unpack_from(value)
        if is_head(value):
            return written, cost, self.bucket, beside
        if self.is_log:
            return written, cost, self.bucket, [_log(value[HEAD.size :])]
        if self.is_slots:
            _, _, _, at, taken = _SLOTS.unpack_from(value)
            return written, cost, self.bucket, [Slots(at, taken, value[_SLOTS.size :])]
        numbers = self.unpack(value)[3:]
        return written, cost, self.bucket, [numbers] if self.is_row else numbers

    def refund(  # noqa: PLR0917 - keywords are slower
        self, value: bytes, now: int, was: Sequence[State], as_of: int, rows: Sequence[Row], cost: int, slot: int
    ) -> bytes | None:
        """Return the value after a refund.

        ``was`` are the states at ``as_of``, before the charge. None for another layout, or a write in the future.
        """
        if self.is_slots:
            return _give_slot_back(value, now, self.number, slot)
        straight = self._straight_refund or self._straight()
        if straight is not None:
            return straight(value, now, self.number, was, as_of, rows)
        number, written, kept_cost = HEAD.unpack_from(value)
        if number != self.number or now < written or is_head(value):
            return None
        bucket = self.bucket
        algorithm = bucket.algorithm
        back, grace = algorithm.refund_amount(was, bucket, cost, 0, slot)
        states = algorithm.advance(self.unpacked(value, ())[3], now - written, bucket, now)
        states = algorithm.apply_adjustment(states, back, max(0, now - as_of), grace, bucket)
        refunded = self.packed(now, kept_cost, states)
        return None if is_head(refunded) else refunded

    def _straight(self) -> Callable[..., bytes | None] | None:
        straight = self.bucket.algorithm.STRAIGHT
        if straight is not None and straight.refund is not None and len(self.bucket.ids) <= MAX_WINDOWS:
            form, *_ = _form(len(self._nothing))
            self._straight_refund = straight_refund(straight, straight.refund, form.format, len(self.bucket.ids))
        return self._straight_refund


class Layouts:
    """Numbers layouts. Numbers of unused layouts are reused."""

    def __init__(self) -> None:
        self.known: dict[Bucket, Layout] = {}
        self.numbered: list[Any] = []
        self._free: list[int] = []

    def of(self, bucket: Bucket, unknown: Layout | None = None) -> Layout:
        layout = self.known.get(bucket)
        if layout is None:
            layout = Layout(bucket) if unknown is None else unknown
            # A signal handler cannot get the same number.
            layout.number = number = self._number()
            layout.mark = _NUMBER.pack(number)
            self.numbered[number] = self.known[bucket] = layout
        return layout

    def by(self, value: bytes) -> Layout:
        layout: Layout = self.numbered[_NUMBER.unpack_from(value)[0]]
        return layout

    def release(self, layout: Layout) -> None:
        layout.uses -= 1
        if not layout.uses:
            del self.known[layout.bucket]
            self.numbered[layout.number] = None
            self._free.append(layout.number)

    def _number(self) -> int:
        if self._free:
            return self._free.pop()
        self.numbered.append(None)
        return len(self.numbered) - 1


def head(number: int, written: int, cost: int) -> bytes:
    return HEAD.pack(number, written, min(cost, MAX_COST))


def is_head(value: bytes) -> bool:
    return len(value) == HEAD.size


def written_at(value: bytes, now: int) -> bytes:
    return value[: _NUMBER.size] + _TIME.pack(now) + value[_COST_AT:]


def with_cost(value: bytes, cost: int) -> bytes:
    return value[:_COST_AT] + _TIME.pack(min(cost, MAX_COST)) + value[HEAD.size :]


def _charge_log(
    bucket: Bucket, value: bytes, now: int, number: int, cost: int, _: Sequence[Row], __: int = 0
) -> tuple[tuple[Log, ...], bytes | None] | None:
    kept_number, written, kept_cost = HEAD.unpack_from(value)
    if kept_number != number or kept_cost != cost or now < written or is_head(value):
        return None
    before = bucket.algorithm.advance([_log(value[HEAD.size :])], now - written, bucket, now)
    after = bucket.algorithm.try_charge(before, bucket, cost)
    return (*before,), None if after is None else head(number, now, cost) + _packed_log(after[0])


def _charge_slots(  # noqa: PLR0917 - same signature as `straight_charge`
    bucket: Bucket, value: bytes, now: int, number: int, cost: int, _: Sequence[Row], slot: int
) -> tuple[tuple[Slots, ...], bytes | None] | None:
    try:
        kept_number, written, kept_cost, at, taken = _SLOTS.unpack_from(value)
    except struct.error:
        return None
    if kept_number != number or kept_cost != cost or now < written:
        return None
    before = Slots(at, taken, value[_SLOTS.size :]).later(now - written)
    if before.taken + cost > bucket.limits[0].burst and not before.places(slot):
        return (before,), None
    at, taken, packed = before.having(slot, cost)
    return (before,), _SLOTS.pack(number, now, cost, at, taken) + packed


def _give_slot_back(value: bytes, now: int, number: int, slot: int) -> bytes | None:
    try:
        kept_number, written, kept_cost, at, taken = _SLOTS.unpack_from(value)
    except struct.error:
        return None
    if kept_number != number or now < written:
        return None
    at, taken, packed = Slots(at, taken, value[_SLOTS.size :]).later(now - written).without(slot)
    return _SLOTS.pack(number, now, kept_cost, at, taken) + packed


def _packed_log(log: Log) -> bytes:
    return array("q", (log.now, log.before)).tobytes() + log.times.tobytes() + log.totals.tobytes()


def _log(body: bytes) -> Log:
    numbers = array("q", body)
    entries = len(numbers) // 2
    return Log(numbers[0], numbers[2 : entries + 1], numbers[entries + 1 :], numbers[1])


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
    """Make a function that charges a bucket of ``windows`` windows; ``form`` is its `struct` format.

    The function returns the states at ``now`` and the new value (None if the cost doesn't fit). It returns None for another
    layout or cost, or a write in the future.
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
    """Make a function that refunds such charges. It returns the new value, or None."""
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
