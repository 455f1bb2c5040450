"""Rate limiting for Python web services: every limit of a request, decided exactly, in one round trip to Redis.

A request reads downwards: middleware > exchange > gate > rules, keys > stores > limits.decision > http.response.

    middleware.py    LimitGate (ASGI) and LimitGateWSGI: a request comes in, an answer goes out
    keys.py          the parts of a key become the digest that names a bucket
    algorithms/      how requests are counted; one module each, its twin in lua/; pure
    limits/          limit, bucket, plan, decision, refund, priority, duration; pure
    overload/        how many requests this process can work on at the moment, and who is let in; pure, but for places.py and
                     heartbeat.py, which join threads and event loops to it
    http/            request, client address, paths, response (header styles, 429, 503); pure
    rules/           rule, tiers, callers, key parts, files (YAML), settings, decorators; review/: what is odd about rules
    observing/       what a service reports while it runs: metrics (counts, and their exporter), episodes of refusals, audit
    routes/          what is known of a framework's routes; overview and OpenAPI
    stores/          a plan becomes a reading, the only I/O; memory, and redis/: protocol/ (bytes), cluster/,
                     dial/ (from a URL to a connection), aio/ and threads/
    gate/            a request becomes an answer: gate, admission, fallback, wait queues, slots, load, explanations;
                     planning/: which rules, whose bucket, what charge; lifecycle/: build, start, reload
    exchange/        what passes between application and server: ASGI, WSGI; usage
    limiter/         the engine without HTTP: limiter, operations, reservation, slot, pace, adaptive work, stored limits
    outbound/        polite clients; for httpx.py, httpx2.py, aiohttp.py, requests.py and urllib3.py
    fastapi.py, flask.py, django/    integrations, thin; prometheus.py, opentelemetry.py for metrics
    command/         the command `limitgate`, whose verbs are in verbs/; also python -m limitgate, __main__.py
    replay/          access logs through rules
    testing.py       for tests of applications: nothing limited, a clock that stands still
    process/         what belongs to the process and not to a request: forks, clocks of those who wait, looking for changes,
                     the listen queue
    messages/        what is said to people: diagnostics (LG codes), masked names, suggestions, missing extras
    errors.py        the errors that are raised; internal_errors.py: unforeseen ones
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limitgate.errors import ConfigError, LimitGateError, StoreError
    from limitgate.exchange.usage import ausage, usage
    from limitgate.http.request import Request
    from limitgate.limiter.limiter import AsyncLimiter, Limiter
    from limitgate.limiter.stored_limits import Configured
    from limitgate.limits.decision import Decision, RateLimited, Window
    from limitgate.limits.limit import Limit
    from limitgate.middleware import LimitGate, LimitGateWSGI
    from limitgate.observing.observer import Observer
    from limitgate.overload.options import Adaptive
    from limitgate.rules.ban import Ban
    from limitgate.rules.callers import Caller
    from limitgate.rules.decorators import exempt, limit
    from limitgate.rules.files import load_rules
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
    "Ban": "rules.ban",
    "Caller": "rules.callers",
    "ConfigError": "errors",
    "Configured": "limiter.stored_limits",
    "Decision": "limits.decision",
    "Limit": "limits.limit",
    "LimitGate": "middleware",
    "LimitGateError": "errors",
    "LimitGateWSGI": "middleware",
    "Limiter": "limiter.limiter",
    "MemoryStore": "stores",
    "Observer": "observing.observer",
    "RateLimited": "limits.decision",
    "RedisStore": "stores",
    "Request": "http.request",
    "Rule": "rules.rule",
    "RuleSet": "rules.rule",
    "Settings": "rules.settings",
    "StoreError": "errors",
    "Window": "limits.decision",
    "ausage": "exchange.usage",
    "exempt": "rules.decorators",
    "limit": "rules.decorators",
    "load_rules": "rules.files",
    "open_store": "stores",
    "open_sync_store": "stores",
    "usage": "exchange.usage",
}
"""Module of each public name, imported when the name is first asked for, so that the command starts fast."""

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
"""Module of each name that is imported from there, as it needs an extra."""

_STAND_INS = {
    "FastAPILimiter": "LimitGate, with app.add_middleware(LimitGate, rules=[...], store='redis://...')",
    "RateLimitExceeded": "RateLimited",
    "RateLimitMiddleware": "LimitGate",
    "RateLimiter": "AsyncLimiter or Limiter; as a dependency of FastAPI: from limitgate.fastapi import RateLimit",
    "RateLimiterMiddleware": "LimitGate",
    "SlowAPIMiddleware": "LimitGate",
    "get_remote_address": "nothing, as limits count by the client's address unless they have another key",
}
"""What stands for the names that are imported from other limiters."""


if not TYPE_CHECKING:  # else any name would be one to type checkers

    def __getattr__(name: str) -> Any:
        """A public name, looked up once (PEP 562)."""
        home = _HOMES.get(name)
        if name in _ELSEWHERE:
            raise ImportError(f"{name} is not in limitgate, expected: from limitgate.{_ELSEWHERE[name]} import {name}")
        if home is None:
            from limitgate.messages.suggestions import not_of  # noqa: PLC0415 - only mistakes need it

            not_of("limitgate", _STAND_INS)(name)
        value = globals()[name] = getattr(import_module(f"limitgate.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
