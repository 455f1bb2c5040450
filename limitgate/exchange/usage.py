"""What is left of limits: the windows of rules as they stand for the caller of a request, for an application to show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limitgate.errors import ConfigError
from limitgate.exchange.base import EXCHANGE, Exchange
from limitgate.gate import late
from limitgate.gate.flow import run
from limitgate.limits.decision import Window
from limitgate.process import switch
from limitgate.stores import AsyncStore, SyncStore

_PLACES = ("scope", "environ", "META", "env")
"""Attributes by which frameworks' requests have their scope or environ."""


def usage(request: object, *rule_names: str, path: str | None = None) -> tuple[Window, ...]:
    """Return the windows of rules as they stand for the caller of a request, in WSGI applications. Charges nothing.

    ``request`` is an environ, or a request of Flask, Django or any framework that has its environ. Without ``rule_names``
    the rules are those that apply to the request, ``@limit`` and throttles included. Named rules are of the caller's tier,
    whatever their ``path``, or apply to the request. Where a named rule counts by ``path`` and does not apply to the
    request, ``path`` is the template of the route that is meant, ``/items/{id}``. Adaptive limits are there where they apply.

    One call to the store, within what the request has left of its ``timeout``. Raises `StoreError` if the store fails, whatever
    ``on_error`` says; `ConfigError` for a name that no rule has, a route that is missing, and outside of a request that a
    `LimitGate` has let in. Returns nothing where LimitGate is switched off, without names where the request is exempt, and if
    the rules go by headers that are too large to be read.
    """
    exchange = _exchange_of(request, "usage")
    if exchange is None:
        return ()
    if exchange.awaits or not isinstance(exchange.gate.store, SyncStore):
        raise ConfigError("usage was called under ASGI, expected await ausage(request)")
    gate, admission = exchange.gate, exchange.open_admission()
    if rule_names and admission.rules.planner.asks_user:
        admission.request.find_user_here()
    return run(gate.store, late.usage(gate, admission, rule_names, path), admission.budget)


async def ausage(request: object, *rule_names: str, path: str | None = None) -> tuple[Window, ...]:
    """`usage` in ASGI applications, to be awaited.

    ``request`` is a scope, or a request of Starlette, FastAPI, Django or any framework that has its scope.
    """
    exchange = _exchange_of(request, "ausage")
    if exchange is None:
        return ()
    if not (exchange.awaits and isinstance(exchange.gate.store, AsyncStore)):
        raise ConfigError("ausage was called under WSGI, expected usage(request)")
    admission = exchange.open_admission()
    if rule_names and admission.rules.planner.asks_user:
        await admission.request.find_user()
    return await exchange.abudgeted(late.usage(exchange.gate, admission, rule_names, path))


def _exchange_of(request: object, function: str) -> Exchange | None:
    """The exchange of a request with the nearest gate around; None where that is switched off."""
    places = [getattr(request, name, None) for name in _PLACES]
    place: Any = next((each for each in places if isinstance(each, Mapping)), request)
    if not isinstance(place, Mapping):
        raise TypeError(f"request is a {type(request).__name__}, expected a framework's request, a scope or an environ")
    if EXCHANGE not in place:
        raise ConfigError(f"{function} was called where no LimitGate has let a request in, expected one around the application")
    exchange: Exchange | None = place[EXCHANGE]
    if exchange is not None and exchange.open_admission().settlement.is_over:
        raise ConfigError(f"{function} was called when the request was over, expected it before")
    return exchange if switch.null_store is None else None
