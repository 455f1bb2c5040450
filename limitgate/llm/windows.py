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
        """Return the limits for `Limiter.reserve`. A cost beyond a burst is cut to the burst, so that it fits at last."""
        limits: list[Any] = list(self.requests)
        for kind, tokens in _tokens(usage):
            limits += [(limit, min(tokens, limit.burst) if limit.burst else max(1, tokens)) for limit in self.of(kind)]
        return limits

    def costs(self, usage: Usage) -> list[int]:
        """Return the costs of the limits with their own cost, in the order of `costed`."""
        return [tokens for kind, tokens in _tokens(usage) for _ in self.of(kind)]

    def kinds(self) -> list[Kind]:
        """Return the kind of each limit, in the order of `costed`."""
        return [kind for kind in KINDS for _ in self.of(kind)]

    def of(self, kind: Kind) -> tuple[Limit, ...]:
        """Return the limits of a kind."""
        limits: tuple[Limit, ...] = getattr(self, kind)
        return limits

    def every(self) -> list[Limit]:
        """Return all limits, in the order of `costed`."""
        return [limit for kind in KINDS for limit in self.of(kind)]


def _tokens(usage: Usage) -> tuple[tuple[Kind, int], ...]:
    return ("tokens", usage.input + usage.output), ("input_tokens", usage.input), ("output_tokens", usage.output)
