"""The limits of a budget, by kind. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from limitgate.algorithms.line import State
from limitgate.limits.limit import Limit
from limitgate.llm.provider_fields import Kind
from limitgate.llm.usage import Usage

_NOBODY = State()


class Windows(NamedTuple):
    requests: tuple[Limit, ...] = ()
    tokens: tuple[Limit, ...] = ()
    input_tokens: tuple[Limit, ...] = ()
    output_tokens: tuple[Limit, ...] = ()

    def apart(self) -> Windows:
        """Return the limits with separate windows for each kind, so that requests never count as tokens."""
        return Windows(*[tuple([limit.in_series(n) for limit in limits]) for n, limits in enumerate(self)])

    def costed(self, usage: Usage, ahead: State = _NOBODY) -> list[Any]:
        """Return limits with costs for `Limiter.reserve`, capped at the bursts. Leaves room for requests ahead."""
        kept = self.costs(Usage(ahead.input, ahead.output), ahead.requests)
        costs = [
            min(cost, limit.burst) if limit.burst else max(1, cost) for limit, cost in zip(self.every(), self.costs(usage))
        ]
        return [
            (limit.less(min(less, limit.burst - cost)) if less > 0 and cost < limit.burst else limit, cost)
            for limit, cost, less in zip(self.every(), costs, kept)
        ]

    def takes_longer(self, usage: Usage, ahead: State) -> float:
        """Return the seconds until requests ahead fit, if a bucket is too small for them and this request, otherwise 0."""
        kept = self.costs(Usage(ahead.input, ahead.output), ahead.requests)
        limits = [(limit, min(cost, limit.burst), less) for limit, cost, less in zip(self.every(), self.costs(usage), kept)]
        if not any(0 < limit.burst < cost + less for limit, cost, less in limits if less):
            return 0.0
        return max([less * limit.period / limit.count for limit, _, less in limits if limit.count])

    def costs(self, usage: Usage, requests: int = 1) -> list[int]:
        costs = requests, usage.input + usage.output, usage.input, usage.output
        return [cost for cost, limits in zip(costs, self) for _ in limits]

    def kinds(self) -> list[Kind]:
        return [kind for kind, limits in self.by_kind() for _ in limits]

    def by_kind(self) -> list[tuple[Kind, tuple[Limit, ...]]]:
        return list(zip(KINDS, self))

    def with_kinds(self) -> list[tuple[str, Limit]]:
        return [(kind, limit) for kind, limits in self.by_kind() for limit in limits]

    def every(self) -> list[Limit]:
        return [limit for limits in self for limit in limits]


KINDS: tuple[Kind, ...] = Windows._fields  # type: ignore[assignment]  # the same names
