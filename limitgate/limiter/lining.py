"""The line of all processes' requests for a budget, in a limiter's store, see `limitgate.algorithms.line`."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from limitgate.algorithms import line
from limitgate.gate.flow import Flow
from limitgate.limiter.calls import AsyncCalls, Calls, carry_out
from limitgate.limiter.operations import Operations
from limitgate.limits.bucket import Bucket
from limitgate.limits.decision import SECOND
from limitgate.limits.limit import kept_as
from limitgate.limits.plan import Charge, Plan, Reading, new_slot

_LINES = Bucket((kept_as("line"),))


class Place:
    """A request's place, which it loses after ``stays`` seconds without joining."""

    def __init__(self, limiter: Calls | AsyncCalls, key: str, tenant: str, tokens: tuple[int, int], stays: float) -> None:
        digest = blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=6).digest()
        into, output = [min(many, line.MAX_TOKENS) for many in tokens]
        self._limiter = limiter
        self._key = key
        self._joining = line.Action(
            line.JOIN, new_slot(), int.from_bytes(digest, "little"), into, output, round(stays * SECOND)
        )

    def join(self) -> Any:
        """Join the line, or stay in it. Return the tickets ahead. Raises `StoreError`."""
        return self._act(self._joining)

    def leave(self, *, is_taken: bool) -> Any:
        """Leave the line. Raises `StoreError`."""
        return self._act(self._joining._replace(what=line.TAKE if is_taken else line.LEAVE))

    def _act(self, action: line.Action) -> Any:
        charge = _line_of(self._limiter, self._key).adjusted([action], [0])
        return carry_out(self._limiter, _reading(self._limiter, Plan.adjust([charge])))


def waiting_in_line(limiter: Operations, key: str) -> Flow[int]:
    """Return how many requests are in the line of a key. Raises `StoreError`."""
    state = yield from _reading(limiter, Plan.peek([_line_of(limiter, key)]))
    return state.waiting


def _reading(limiter: Operations, plan: Plan) -> Flow[line.State]:
    reading: Reading = yield plan, limiter._timeout  # noqa: SLF001 - a part of the limiter
    state: line.State = reading.buckets[0].before[0]
    return state


def _line_of(limiter: Operations, key: str) -> Charge:
    name = limiter._plans.name(key)  # noqa: SLF001 - a part of the limiter
    return Charge(f"{name}:line:{{{name}}}", _LINES, 0, enforced=False, rule=None)
