"""The remaining quota of the current caller."""

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


def usage(request: object, *rule_names: str, path: str | None = None) -> tuple[Window, ...]:
    """Return the state of the limits for the caller of a request, in WSGI applications. Charges nothing.

    ``request`` is an environ, or a request of Flask, Django or any framework with an environ.

    ``rule_names`` selects rules of the caller's tier, or rules that apply to the request. Without names, you get all rules
    that apply, including ``@limit``, throttles and adaptive limits. If a named rule counts by ``path`` and does not apply to
    the request, pass the route template as ``path``, for example ``/items/{id}``.

    Makes one call to the store within the request's ``timeout``. The result is empty if LimitGate is switched off, if the
    request is exempt and you pass no names, or if the headers are too large to read.

    Raises `StoreError` if the store fails, whatever ``on_error`` is. Raises `ConfigError` for an unknown rule, a missing
    ``path``, or outside a request that a `LimitGate` has admitted.
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
    """`usage` for ASGI applications.

    ``request`` is a scope, or a request of Starlette, FastAPI, Django or any framework with a scope.
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
