"""How a plan travels to limitgate/lua/spend.lua and its reply comes back. Pure: bytes and numbers, no connection."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from importlib.resources import files

from limitgate.errors import StoreError
from limitgate.limits import Windows
from limitgate.plan import Plan, Reading, read

SPEND = (files("limitgate") / "lua" / "spend.lua").read_text("utf-8")
SHA = hashlib.sha1(SPEND.encode(), usedforsecurity=False).hexdigest()

_HEAD = 3  # the clock, unreadable values, clock steps


def arguments(plan: Plan) -> list[str | bytes | int]:
    """What follows the script's hash or text in EVALSHA or EVAL: the number of keys, the keys, the arguments."""
    charges = plan.charges
    packed = [_packed(charge.windows, charge.cost, charge.binding) for charge in charges]
    return [len(charges), *[charge.key for charge in charges], plan.verb, *packed]


def reading(plan: Plan, reply: object) -> tuple[Reading, int, int]:
    """The reading in a reply, and how many unreadable values and clock steps the script met.

    Raises `StoreError` for a reply of any other shape.
    """
    sizes = [len(charge.windows.ids) for charge in plan.charges]
    if not isinstance(reply, list) or len(reply) != _HEAD + 2 * sum(sizes) or not all(type(number) is int for number in reply):
        raise StoreError(f"unexpected reply of {type(reply).__name__} from the script", "reply")
    amounts = iter(reply[_HEAD:])
    debts = [[next(amounts) * limit.count + next(amounts) for limit in charge.windows.limits] for charge in plan.charges]
    return read(plan.charges, reply[0], debts), reply[1], reply[2]


@lru_cache(maxsize=4096)
def _packed(windows: Windows, cost: int, binding: bool) -> bytes:  # noqa: FBT001 - a field of the packed charge
    """One charge as the script reads it. A cost above the burst stays just above it, since it never fits anyway."""
    charge = [struct.pack("<B", binding)]
    for limit, window in zip(windows.limits, windows.ids, strict=True):
        tolerance = divmod(limit.capacity, limit.count)
        increment = divmod(min(cost, limit.burst + 1) * limit.period_us, limit.count)
        charge.append(struct.pack("<6d", window, limit.count, *tolerance, *increment))
    return b"".join(charge)
