"""Base of the middleware."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from limitgate.exchange.base import EXCHANGE, PASSED, Exchange
from limitgate.gate.gate import Gate
from limitgate.messages.diagnostics import Diagnosis
from limitgate.messages.suggestions import lacking

OF_LIMITERS = {
    "check": "nothing, as requests are checked before the application runs; in its midst limitgate.Limiter.hit",
    "current_limit": "usage(request) of limitgate, under ASGI await ausage(request)",
    "enabled": "the option enabled; in tests off() of limitgate.testing",
    "exempt": "@exempt of limitgate",
    "limit": "@limit('5/minute') of limitgate, below the route decorator",
    "request_filter": "Rule('monitoring', exempt=True, when=...) among the rules",
    "reset": "reset() of limitgate.testing in tests, limitgate.Limiter.bucket(...).reset() for one client",
    "shared_limit": "@limit('10/minute', name='database') of limitgate, below the route decorator",
}
AT_ONCE = 1.0
"""Maximum age of a dropped gate in seconds."""


@lacking("LimitGate", OF_LIMITERS)
class Around:
    """Middleware that wraps an application and may replace its entrance."""

    gate: Gate | None = None
    app: Any
    options: Mapping[str, Any]
    """The command uses the options to find the same keys and clients."""
    PUT_AROUND: ClassVar[str]
    ENTRANCES: ClassVar[tuple[str, ...]]

    def note_entrances(self, app: Any) -> None:
        """Save the entrances before this middleware replaces one."""
        standing = {name: getattr(app, name, None) for name in self.ENTRANCES}
        self._entrances: dict[str, Callable[..., Any]] = {name: found for name, found in standing.items() if found is not None}

    def app_inside(self, place: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return the application to call if a request has returned to this gate; otherwise None.

        This happens after ``app.wsgi_app = LimitGateWSGI(app)``. ``place`` is the scope or environ.
        """
        exchange: Exchange | None = place.get(EXCHANGE)
        has_passed = place.get(PASSED) is self
        if not has_passed and (exchange is None or exchange.gate is not self.gate or exchange.has_come_back):
            return None
        for name, before in self._entrances.items():
            if self._is_behind(getattr(self.app, name, None)):
                if exchange is not None and not has_passed:
                    # The next time, the application has sent it.
                    exchange.has_come_back = True
                return before
        return None

    def _is_behind(self, app: Any) -> bool:
        seen = set[int]()
        while app is not None and app is not self and id(app) not in seen:
            seen.add(id(app))
            app = getattr(app, "app", None)
        return app is self

    def __del__(self) -> None:
        """Log a gate that is dropped right after its creation (LG039)."""
        gate = self.gate
        if gate is None or gate.has_begun or gate.outages.has_answered or sys.is_finalizing():
            return
        if time.time() - gate.loads.at < AT_ONCE:
            Diagnosis.DROPPED.log(type(self).__name__, self.PUT_AROUND)
