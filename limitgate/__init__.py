"""Rate limiting for Python web services: every limit of a request, decided exactly, in one round trip to Redis."""

from __future__ import annotations

import sys

from limitgate.callers import Caller
from limitgate.config import load_rules
from limitgate.configured import Configured
from limitgate.decision import Decision, RateLimited, Window
from limitgate.decorators import exempt, limit
from limitgate.errors import ConfigError, LimitGateError, StoreError
from limitgate.limiter import AsyncLimiter, Limiter
from limitgate.limits import Limit
from limitgate.middleware import LimitGate, LimitGateWSGI
from limitgate.request import Request
from limitgate.rules import Rule, RuleSet
from limitgate.settings import Settings
from limitgate.stores import AsyncRedisStore, MemoryStore, RedisStore, open_store, open_sync_store

__all__ = [
    "AsyncLimiter",
    "AsyncRedisStore",
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
    "RateLimited",
    "RedisStore",
    "Request",
    "Rule",
    "RuleSet",
    "Settings",
    "StoreError",
    "Window",
    "exempt",
    "limit",
    "load_rules",
    "open_store",
    "open_sync_store",
]

if "fastapi" in sys.modules:
    import limitgate.fastapi  # noqa: F401 - so that OpenAPI documents tell of limits, without anybody asking for it
