"""Calls ``identify``, the application's function that returns the caller of a request."""

from __future__ import annotations

from inspect import isawaitable

from limitgate.errors import HeadersTooLargeError
from limitgate.gate.flow import Awaited, Flow
from limitgate.gate.planning.identity import AnyIdentify
from limitgate.http.request import Request
from limitgate.internal_errors import place_of, raise_interruption
from limitgate.messages.diagnostics import Diagnosis, OncePerValue
from limitgate.rules.callers import Caller

UNASKED = object()


class NotACallerError(TypeError):
    """``identify`` returned something other than a `Caller` or None."""

    def __init__(self, identified: object) -> None:
        self.what = f"it gave a {type(identified).__name__}"
        super().__init__(f"identify gave a {type(identified).__name__}, expected a Caller or None")


class Identify:
    """Calls the function, and logs its failures once per place in the code (LG071).

    The text of an error is omitted, because it may name a client.
    """

    def __init__(self, function: AnyIdentify) -> None:
        self._function = function
        self._logged = OncePerValue(Diagnosis.IDENTIFY_FAILED)

    def finding(self, request: Request, identified: object) -> Flow[Caller | None]:
        """Return the caller; await or call the function if needed. Raises `TypeError` for other types."""
        try:
            if identified is UNASKED:
                identified = self._function(request)
            if isawaitable(identified):
                identified = yield Awaited(identified, "identify is async, expected a plain function under WSGI")
            if not (identified is None or isinstance(identified, Caller)):
                raise NotACallerError(identified)  # noqa: TRY301 - Logged like any other failure.
        except Exception as error:
            self.note(error)
            raise
        return identified

    def note(self, error: Exception) -> None:
        """Log a failure, unless it is about headers."""
        if not isinstance(error, HeadersTooLargeError):
            raise_interruption(error)
            what = error.what if isinstance(error, NotACallerError) else f"{type(error).__name__} at {place_of(error)}"
            self._logged.log(what, what)
