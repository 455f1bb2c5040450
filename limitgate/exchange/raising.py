"""Refusals that are raised inside of a Flask or Quart application, so that its own error handlers answer them.

The application is called with the refusal on its way, and a function that runs before all others of the kind raises it: what
follows is the framework's own, handlers of blueprints and functions after the request included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from limitgate.exchange.refused import refused
from limitgate.http.response import Refusal
from limitgate.limits.decision import Decision
from limitgate.routes.handlers import ERRORS, STATUS

_REFUSED = "limitgate.refused"
"""Name of a refusal that is to be raised, in a scope or environ."""


class RaisingApp:
    """A Flask or Quart application, whose method ``entrance`` takes a request in."""

    def __init__(self, app: Any, entrance: str) -> None:
        self._app = app
        self._entrance = entrance

    def denial(self, place: Any, refusal: Refusal, decision: Decision) -> Callable[..., Any] | None:
        """The application that answers in the place of a refusal; None if no handler is registered for one anywhere."""
        if not any(self._has_handler(name) for name in self._app.error_handler_spec):
            return None
        self._hook()

        def answer(place: Any, *arguments: Any) -> Any:
            place[_REFUSED] = refusal, decision
            entrance = getattr(type(self._app), self._entrance)  # without the middleware around it, which might answer itself
            return entrance(self._app, place, *arguments)

        return answer

    def _hook(self) -> None:
        """Have refusals raised before all other functions run. Only from the first one on: each request pays for it.

        The list is another one from then on, as other threads may be going through it just now.
        """
        functions = self._app.before_request_funcs
        if self._raise not in functions.get(None, ()):
            functions[None] = [self._raise, *functions.get(None, ())]

    def _has_handler(self, blueprint: str | None) -> bool:
        spec = self._app.error_handler_spec.get(blueprint, {})
        return bool(spec.get(STATUS)) or any(kind in spec.get(None, {}) for kind in ERRORS)

    def _raise(self) -> Any:
        """Raise the refusal of the request at hand, or answer it where neither application nor blueprint has a handler."""
        request = self._request
        place = getattr(request, "scope", None) or request.environ
        found = place.pop(_REFUSED, None)
        if found is None:
            return None
        refusal, decision = found
        if any(self._has_handler(name) for name in (*request.blueprints, None)):
            from werkzeug.exceptions import TooManyRequests  # noqa: PLC0415 - as above

            raise refused(TooManyRequests, refusal, decision, description=refusal.detail)
        return self._app.response_class(refusal.body, refusal.status, refusal.fields)

    @property
    def _request(self) -> Any:
        """The request at hand, as the application's framework keeps it."""
        if self._entrance == "wsgi_app":
            import flask as framework  # noqa: PLC0415 - only where it is in use already
        else:
            import quart as framework  # type: ignore[no-redef]  # noqa: PLC0415
        return framework.request
