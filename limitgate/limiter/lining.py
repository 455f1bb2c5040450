"""Plans of a budget's line across processes, see `limitgate.algorithms.line`."""

from __future__ import annotations

from collections.abc import Coroutine
from hashlib import blake2b
from typing import Any, TypeVar

from limitgate.algorithms import line
from limitgate.gate.flow import Flow
from limitgate.limiter.calls import AsyncCalls, Calls
from limitgate.limiter.operations import Operations
from limitgate.limits.bucket import Bucket
from limitgate.limits.decision import SECOND
from limitgate.limits.limit import kept_as
from limitgate.limits.plan import Charge, Plan, Reading, new_slot

T = TypeVar("T")
_LINES = Bucket((kept_as("line"),))


class Place:
    """A request's place, which it loses after ``stays`` seconds without joining."""

    def __init__(self, limiter: Operations, key: str, tenant: str, tokens: tuple[int, int], stays: float) -> None:
        digest = blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=6).digest()
        into, output = [min(many, line.MAX_TOKENS) for many in tokens]
        name = limiter._plans.name(key)  # noqa: SLF001 - a part of the limiter
        self._timeout = limiter._timeout  # noqa: SLF001 - a part of the limiter
        self._joining = line.Action(
            line.JOIN, new_slot(), int.from_bytes(digest, "little"), into, output, round(stays * SECOND)
        )
        self._charge = Charge(f"{name}:line:{{{name}}}", _LINES, 0, enforced=False, rule=None)

    def joining(self) -> Flow[line.State]:
        """Join or stay; return what is ahead. Raises `StoreError`."""
        return (yield from self._carrying_out(self._joining))

    def leaving(self, *, is_taken: bool) -> Flow[line.State]:
        return (yield from self._carrying_out(self._joining._replace(what=line.TAKE if is_taken else line.LEAVE)))

    def _carrying_out(self, action: line.Action) -> Flow[line.State]:
        plan = Plan.adjust([self._charge.adjusted([action], [0])])
        reading: Reading = yield plan, self._timeout
        state: line.State = reading.buckets[0].before[0]
        return state


def carry_out(limiter: AsyncCalls | Calls, flow: Flow[T]) -> Coroutine[Any, Any, T] | T:
    return limiter._arun(flow) if isinstance(limiter, AsyncCalls) else limiter._run(flow)  # noqa: SLF001 - a part of the limiter
