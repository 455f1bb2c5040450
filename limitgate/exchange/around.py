"""Middleware that is put around an application, and is no use to anybody unless the application is served by way of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from limitgate.exchange.base import EXCHANGE, Exchange
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
"""What stands for the attributes of other limiters that are made of an application."""
AT_ONCE = 1.0
"""Seconds after it was made in which a gate is gone that nobody has kept."""


@lacking("LimitGate", OF_LIMITERS)
class Around:
    """Base of middleware that is made of an application and kept in its place."""

    gate: Gate | None = None
    app: Any
    options: Mapping[str, Any]
    """The options that it was given in code, by which the command finds the same keys and clients."""
    PUT_AROUND: ClassVar[str]
    """Code that puts it around an application."""
    ENTRANCES: ClassVar[tuple[str, ...]]
    """Attributes of applications that middleware is put in the place of."""

    def note_entrances(self, app: Any) -> None:
        """Note the entrances of an application, before this middleware is put into the place of one."""
        standing = {name: getattr(app, name, None) for name in self.ENTRANCES}
        self._entrances: dict[str, Callable[..., Any]] = {name: found for name, found in standing.items() if found is not None}

    def app_inside(self, place: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return the application to call if a request has come back to this gate by way of its own application.

        This happens after ``app.wsgi_app = LimitGateWSGI(app)``. None for other requests; ``place`` is the scope or environ.
        """
        exchange: Exchange | None = place.get(EXCHANGE)
        if EXCHANGE not in place or (exchange is not None and (exchange.gate is not self.gate or exchange.has_come_back)):
            return None
        for name, before in self._entrances.items():
            if self._is_behind(getattr(self.app, name, None)):
                if exchange is not None:
                    exchange.has_come_back = True  # if it comes again, the application has sent it
                return before
        return None

    def _is_behind(self, app: Any) -> bool:
        """True if this is an application, or behind its middleware."""
        seen = set[int]()
        while app is not None and app is not self and id(app) not in seen:
            seen.add(id(app))
            app = getattr(app, "app", None)
        return app is self

    def __del__(self) -> None:
        """Log a gate that goes as soon as it was made, and so was kept by nobody (LG039)."""
        gate = self.gate
        if gate is None or gate.outages.has_answered or sys.is_finalizing():
            return
        if time.time() - gate.loads.at < AT_ONCE:
            Diagnosis.DROPPED.log(type(self).__name__, self.PUT_AROUND)
