"""Rate limiting for Python web services: one exact decision about all limits of a request, in one round trip to Redis.

A request passes from top to bottom. docs/architecture.md describes each module.

    middleware.py    LimitGate (ASGI) and LimitGateWSGI, the entry points for requests
    exchange/        adds rate fields to responses and sends refusals, between application and server
    http/            requests, client addresses, paths, rate fields, the 429; pure
    routes/          routes of the frameworks
    rules/           rules, tiers, callers, rule files, options, decorators
    keys.py          turns the parts of a key into the digest that names a bucket
    gate/            admits, refuses and refunds; planning/, outages, slots, and lifecycle/ for start and reload
    stores/          carry out plans and return readings, the only I/O: memory, and redis/
    algorithms/      one pure module per algorithm, with a counterpart in lua/
    limits/          limits, buckets, plans, decisions; pure
    overload/        adaptive limits for this process
    limiter/         limits without HTTP
    outbound/        limits for HTTP clients: httpx.py, httpx2.py, aiohttp.py, requests.py and urllib3.py
    llm/             budgets for language models
    forward/         decides for proxies
    fastapi.py, flask.py, django/    thin integrations
    observing/       metrics and logs; prometheus.py and opentelemetry.py export metrics
    fleet/, page/    the state of all processes, and the live page
    command/         the command `limitgate`; __main__.py
    replay/          runs access logs through rules
    testing.py       limits off and a controlled clock, for tests of applications
    process/         forks, clocks and background threads
    messages/        diagnostics (LG codes) and text
    errors.py        public errors; internal_errors.py handles unexpected ones
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limitgate.errors import ConfigError, LimitGateDeprecationWarning, LimitGateError, StoreError
    from limitgate.exchange.application import ausage, usage
    from limitgate.http.request import Request
    from limitgate.limiter.limiter import AsyncLimiter, Limiter
    from limitgate.limiter.plans import Configured
    from limitgate.limits.decision import Decision, RateLimited, Window
    from limitgate.limits.limit import Limit
    from limitgate.middleware import LimitGate, LimitGateWSGI
    from limitgate.observing.exporter import Observer
    from limitgate.overload.options import Adaptive
    from limitgate.rules.callers import Caller
    from limitgate.rules.decorators import exempt, limit
    from limitgate.rules.files import load_rules
    from limitgate.rules.options import Ban
    from limitgate.rules.rule import Rule, RuleSet
    from limitgate.rules.settings import Settings
    from limitgate.stores import AsyncRedisStore, MemoryStore, RedisStore, open_store, open_sync_store

__all__ = [
    "Adaptive",
    "AsyncLimiter",
    "AsyncRedisStore",
    "Ban",
    "Caller",
    "ConfigError",
    "Configured",
    "Decision",
    "Limit",
    "LimitGate",
    "LimitGateDeprecationWarning",
    "LimitGateError",
    "LimitGateWSGI",
    "Limiter",
    "MemoryStore",
    "Observer",
    "RateLimited",
    "RedisStore",
    "Request",
    "Rule",
    "RuleSet",
    "Settings",
    "StoreError",
    "Window",
    "ausage",
    "exempt",
    "limit",
    "load_rules",
    "open_store",
    "open_sync_store",
    "usage",
]

_HOMES = {
    "Adaptive": "overload.options",
    "AsyncLimiter": "limiter.limiter",
    "AsyncRedisStore": "stores",
    "Ban": "rules.options",
    "Caller": "rules.callers",
    "ConfigError": "errors",
    "Configured": "limiter.plans",
    "Decision": "limits.decision",
    "Limit": "limits.limit",
    "LimitGate": "middleware",
    "LimitGateDeprecationWarning": "errors",
    "LimitGateError": "errors",
    "LimitGateWSGI": "middleware",
    "Limiter": "limiter.limiter",
    "MemoryStore": "stores",
    "Observer": "observing.exporter",
    "RateLimited": "limits.decision",
    "RedisStore": "stores",
    "Request": "http.request",
    "Rule": "rules.rule",
    "RuleSet": "rules.rule",
    "Settings": "rules.settings",
    "StoreError": "errors",
    "Window": "limits.decision",
    "ausage": "exchange.application",
    "exempt": "rules.decorators",
    "limit": "rules.decorators",
    "load_rules": "rules.files",
    "open_store": "stores",
    "open_sync_store": "stores",
    "usage": "exchange.application",
}
"""Imports are lazy, so that the command starts fast."""

_ELSEWHERE = {
    "AsyncRateLimitTransport": "httpx",
    "LimitGateMiddleware": "django",
    "OpenTelemetryObserver": "opentelemetry",
    "PrometheusObserver": "prometheus",
    "RateLimit": "fastapi",
    "RateLimitAdapter": "requests",
    "RateLimitPoolManager": "urllib3",
    "RateLimitTransport": "httpx",
    "Throttle": "django.rest",
}
_STAND_INS = {
    "FastAPILimiter": "LimitGate, with app.add_middleware(LimitGate, rules=[...], store='redis://...')",
    "RateLimitExceeded": "RateLimited",
    "RateLimitMiddleware": "LimitGate",
    "RateLimiter": "AsyncLimiter or Limiter; as a dependency of FastAPI: from limitgate.fastapi import RateLimit",
    "RateLimiterMiddleware": "LimitGate",
    "SlowAPIMiddleware": "LimitGate",
    "get_remote_address": "nothing, because limits count by the client's address by default",
}


# Hidden from type checkers, which would otherwise accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name on first access (PEP 562)."""
        home = _HOMES.get(name)
        if name in _ELSEWHERE:
            raise ImportError(f"{name} is not in limitgate, expected: from limitgate.{_ELSEWHERE[name]} import {name}")
        if home is None:
            from limitgate.messages.text import not_of  # noqa: PLC0415 - needed for errors only

            not_of("limitgate", _STAND_INS)(name)
        value = globals()[name] = getattr(import_module(f"limitgate.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
