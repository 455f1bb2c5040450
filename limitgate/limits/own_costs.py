"""Limits with a cost of their own, such as tokens beside requests: ``("200000/minute", 900)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from limitgate.errors import ConfigError
from limitgate.limits.limit import Limit
from limitgate.limits.plan import check_cost


class OwnCosts(NamedTuple):
    """Limits, and the costs of some of them by place. The cost of the request applies to the others."""

    limits: tuple[Any, ...]
    costs: Mapping[int, int]


_NONE: Mapping[int, int] = {}
_WITH_COSTS = {tuple, list, dict}
_REQUESTS = object()
"""The limit has the cost of the request."""


def with_own_costs(limits: Sequence[Any]) -> OwnCosts:
    """Separate limits from their own costs. Raises `TypeError` or `ValueError` for an invalid cost."""
    if _WITH_COSTS.isdisjoint(map(type, limits)):
        return OwnCosts(tuple(limits), _NONE)
    bare, costs = [], {}
    for place, value in enumerate(limits):
        limit, cost = own_cost(value)
        bare.append(limit)
        if cost is not _REQUESTS:
            costs[place] = check_cost(cost)
            if isinstance(limit, Limit) and limit.lease:
                raise ConfigError(f"{limit!r} has a lease and its own cost, expected one of the two")
    return OwnCosts(tuple(bare), costs)


def own_cost(value: Any) -> tuple[Any, Any]:
    """Return a limit and its own cost, as given."""
    match value:
        case (str() | Limit() | {"limit": _}) as limit, cost if not isinstance(cost, str | Limit | dict):
            return limit, cost
        case {"limit": _, "cost": cost}:
            return {name: option for name, option in value.items() if name != "cost"}, cost
    return value, _REQUESTS
