"""The limits of a budget, by kind. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from limitgate.limits.limit import Limit
from limitgate.llm.provider_fields import Kind
from limitgate.llm.usage import Usage


class Windows(NamedTuple):
    """The limits of each kind."""

    requests: tuple[Limit, ...] = ()
    tokens: tuple[Limit, ...] = ()
    input_tokens: tuple[Limit, ...] = ()
    output_tokens: tuple[Limit, ...] = ()

    def apart(self) -> Windows:
        """Return the same limits with windows apart by kind: otherwise requests might take over the usage of tokens."""
        return Windows(*[tuple([limit.in_series(n) for limit in limits]) for n, limits in enumerate(self)])

    def costed(self, usage: Usage) -> list[Any]:
        """Return the limits for `Limiter.reserve`, each with its cost. A cost beyond a burst is cut to it, so that it fits."""
        return [
            (limit, min(cost, limit.burst) if limit.burst else max(1, cost))
            for limit, cost in zip(self.every(), self.costs(usage))
        ]

    def costs(self, usage: Usage) -> list[int]:
        """Return the cost of each limit, in the order of `every`."""
        costs = 1, usage.input + usage.output, usage.input, usage.output
        return [cost for cost, limits in zip(costs, self) for _ in limits]

    def kinds(self) -> list[Kind]:
        """Return the kind of each limit, in the order of `every`."""
        return [kind for kind, limits in self.by_kind() for _ in limits]

    def by_kind(self) -> list[tuple[Kind, tuple[Limit, ...]]]:
        """Return each kind with its limits."""
        return list(zip(KINDS, self))

    def every(self) -> list[Limit]:
        """Return all limits."""
        return [limit for limits in self for limit in limits]


KINDS: tuple[Kind, ...] = Windows._fields  # type: ignore[assignment]  # the same names
