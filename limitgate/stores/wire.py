"""How plans travel to limitgate/lua/spend.lua and their readings come back. Pure: bytes and numbers, no connection."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

from limitgate.errors import StoreError
from limitgate.limits import Windows
from limitgate.plan import Lease, Plan, Reading, Verb, read

SPEND = (files("limitgate") / "lua" / "spend.lua").read_text("utf-8")
SHA = hashlib.sha1(SPEND.encode(), usedforsecurity=False).hexdigest()

UNSENDABLE = (ValueError, struct.error)
"""What is raised for a call that cannot be put into bytes: a key that is no Unicode, more buckets than can be numbered."""

_HEAD = 4  # the clock, unreadable values, clock steps, no memory


class Answers(NamedTuple):
    """What the script says to several plans."""

    readings: list[Reading]
    unreadable: int
    """Values that were not ours; each was replaced."""
    clock_steps: int
    """Buckets that were written in the server's future."""
    unwritten: bool
    """Redis is out of memory: whatever a plan takes was not taken."""


class Call:
    """Plans that are sent together. On a cluster all their buckets are in one slot."""

    __slots__ = ("asking", "hops", "in_full", "plans", "replies_due", "sent")

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = plans
        self.sent = 0.0
        """When it was sent, on a monotonic clock in seconds."""
        self.in_full = False
        """Whether to send the script's text, since Redis did not know its hash."""
        self.asking = False
        """Whether it goes to a node that a slot is just moving to (ASK in the Redis Cluster specification)."""
        self.hops = 0
        """How often a node of a cluster has sent it on."""
        self.replies_due = 0
        """How many replies have not come yet, while it is on its way on a pipeline."""

    def follow(self, other: Call) -> None:
        """Be sent as another call that it is a part of, but not to the target of a move: it would begin a bucket anew."""
        self.sent, self.in_full, self.hops = other.sent, other.in_full, other.hops

    def commands(self) -> list[Sequence[str | bytes | int]]:
        """What to send; the last reply is the one that counts. Raises one of `UNSENDABLE`."""
        script = ("EVAL", SPEND) if self.in_full else ("EVALSHA", SHA)
        command = (*script, *arguments(self.plans))
        return [("ASKING",), command] if self.asking else [command]


def arguments(plans: Sequence[Plan]) -> list[str | bytes | int]:
    """What follows the script's hash or text in EVALSHA or EVAL: the number of keys, the keys, the arguments.

    A crowd mostly asks for the same of different buckets, so each charge is sent once and every key says which one it gets.
    """
    keys: list[str | bytes | int] = [0]
    charges: dict[bytes, int] = {}
    which = []
    for asked, verb in plans:
        last = len(asked) - 1
        for place, charge in enumerate(asked):
            keys.append(charge.key)
            packed = _packed(charge.windows, charge.cost, charge.binding, verb, place == last)
            if charge.lease is not None:
                packed += _lease(charge.windows, charge.lease)
            which.append(charges.setdefault(packed, len(charges) + 1))
    keys[0] = len(which)
    return [*keys, struct.pack(f"<{len(which)}H", *which), *charges]


def answers(plans: Sequence[Plan], reply: object) -> Answers:
    """What a reply says to each plan. Raises `StoreError` for a reply of any other shape."""
    amounts = sum([2 * len(charge.windows.ids) for plan in plans for charge in plan.charges])
    if not isinstance(reply, list) or len(reply) != _HEAD + amounts or set(map(type, reply)) != {int}:
        raise StoreError(f"unexpected reply of {type(reply).__name__} from the script", "reply")
    readings = []
    at = _HEAD
    for charges, _ in plans:
        debts = []
        for charge in charges:
            owed = []
            for count in charge.windows.counts:
                owed.append(reply[at] * count + reply[at + 1])
                at += 2
            debts.append(owed)
        readings.append(read(charges, reply[0], debts))
    return Answers(readings, reply[1], reply[2], bool(reply[3]))


@lru_cache(maxsize=4096)
def _packed(windows: Windows, cost: int, binding: bool, verb: Verb, last: bool) -> bytes:  # noqa: FBT001 - packed fields
    """One charge as the script reads it. A cost above the burst stays just above it, since it never fits anyway."""
    charge = [struct.pack("<sBBH", verb.encode(), binding, last, len(windows.ids))]
    for limit, window in zip(windows.limits, windows.ids, strict=True):
        tolerance = divmod(limit.capacity, limit.count)
        increment = divmod(min(cost, limit.burst + 1) * limit.period_us, limit.count)
        charge.append(struct.pack("<6d", window, limit.count, *tolerance, *increment))
    return b"".join(charge)


def _lease(windows: Windows, lease: Lease) -> bytes:
    """What follows a charge whose bucket is leased from or given back to."""
    packed = [struct.pack("<dd", lease.most, lease.as_of)]
    for limit, back, grace in zip(windows.limits, lease.back, lease.grace, strict=True):
        packed.append(struct.pack("<5d", *divmod(limit.period_us, limit.count), *divmod(back, limit.count), grace))
    return b"".join(packed)
