"""Rate limiting for Python web services: one exact decision about all limits of a request, in one round trip to Redis.

A request passes from top to bottom: middleware > exchange > gate > rules, keys > stores > limits.decision > http.response.

    middleware.py    LimitGate (ASGI) and LimitGateWSGI, the entry points for requests
    keys.py          turns the parts of a key into the digest that names a bucket
    algorithms/      one pure module per algorithm, with a counterpart in lua/
    limits/          limits, durations, buckets, plans, refunds, decisions; pure
    overload/        adaptive concurrency limits for this process; pure, except for concurrency_limiter.py and
                     lag.py, which use threads and event loops
    http/            requests, client addresses, paths, responses (header styles, 429, 503); pure
    rules/           rules, tiers, callers, key parts, rule files (YAML), settings, decorators; review.py finds odd rules
    observing/       metrics, observers and their exporter, logs of refusals and changes
    routes/          routes of the frameworks, for rules, overviews and OpenAPI
    stores/          carry out plans and return readings, the only I/O: memory, and redis/ with aio/ and threads/
    gate/            decides about requests: gate, admission, charging, late (further limits, messages, usage),
                     outage, turns, load (adaptive limits), refunds, slots, explanations; planning/ finds rules,
                     buckets and charges; lifecycle/ builds, starts and reloads a gate
    exchange/        connects application and server: ASGI, WSGI, in_flight (adaptive limits), application (handlers of
                     refusals, usage)
    limiter/         limits without HTTP: limiter, calls, operations, plans, slots, pace, adaptive work, stored limits
    outbound/        limits for HTTP clients: httpx.py, httpx2.py, aiohttp.py, requests.py and urllib3.py
    llm/             budgets for language models: estimates, usage in responses, fields of providers, turns of tenants; costs of
                     rules in tokens (costs.py, metering.py), which the gate uses
    forward/         decides for proxies, which ask before they pass a request on; ForwardGate
    fastapi.py, flask.py, django/    thin integrations; prometheus.py and opentelemetry.py export metrics
    fleet/           snapshots of every process in the store, and their sums: for status, top, the page and the exporter
    command/         the command `limitgate`, with one module per verb in verbs/; also python -m limitgate, __main__.py
    page/            the live page: an ASGI and a WSGI application, one document, server-sent events
    replay/          runs access logs through rules
    testing.py       helpers for tests of applications: limits off, a controlled clock
    process/         state of the process: forks, clocks, background threads
    messages/        diagnostics (LG codes), text (masked names, suggestions, missing extras)
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
    "get_remote_address": "nothing, as limits count by the client's address unless they have another key",
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
