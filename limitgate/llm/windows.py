"""The limits of a budget, by kind. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from limitgate.limits.limit import Limit
from limitgate.llm.provider_fields import Kind
from limitgate.llm.usage import Usage

KINDS: tuple[Kind, ...] = ("requests", "tokens", "input_tokens", "output_tokens")


class Windows(NamedTuple):
    """The limits of each kind."""

    requests: tuple[Limit, ...] = ()
    tokens: tuple[Limit, ...] = ()
    input_tokens: tuple[Limit, ...] = ()
    output_tokens: tuple[Limit, ...] = ()

    def costed(self, usage: Usage) -> list[Any]:
        """Return the limits for `Limiter.reserve`, each with its cost. A cost beyond a burst is cut to it, so that it fits."""
        return [
            (limit, min(cost, limit.burst) if limit.burst else max(1, cost))
            for limit, cost in zip(self.every(), self.costs(usage))
        ]

    def costs(self, usage: Usage) -> list[int]:
        """Return the cost of each limit, in the order of `every`."""
        costs = {
            "requests": 1,
            "tokens": usage.input + usage.output,
            "input_tokens": usage.input,
            "output_tokens": usage.output,
        }
        return [costs[kind] for kind in self.kinds()]

    def kinds(self) -> list[Kind]:
        """Return the kind of each limit, in the order of `every`."""
        return [kind for kind in KINDS for _ in self.of(kind)]

    def of(self, kind: Kind) -> tuple[Limit, ...]:
        """Return the limits of a kind."""
        limits: tuple[Limit, ...] = getattr(self, kind)
        return limits

    def every(self) -> list[Limit]:
        """Return all limits."""
        return [limit for kind in KINDS for limit in self.of(kind)]
