"""Calls of ``identify``, the application's function that names the caller of a request."""

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
"""Stands for the caller that ``identify`` has yet to find."""


class NotACallerError(TypeError):
    """``identify`` gave something else than a `Caller` or None."""

    def __init__(self, identified: object) -> None:
        self.what = f"it gave a {type(identified).__name__}"
        super().__init__(f"identify gave a {type(identified).__name__}, expected a Caller or None")


class Identify:
    """One function, whose failures are logged once for each place (LG071), without their text: it may name a client."""

    def __init__(self, function: AnyIdentify) -> None:
        self._function = function
        self._logged = OncePerValue(Diagnosis.IDENTIFY_FAILED)

    def finding(self, request: Request, identified: object) -> Flow[Caller | None]:
        """The caller by what the function gave, or gives now. Raises `TypeError` if that is none."""
        try:
            if identified is UNASKED:
                identified = self._function(request)
            if isawaitable(identified):
                identified = yield Awaited(identified, "identify is async, expected a plain function under WSGI")
            if not (identified is None or isinstance(identified, Caller)):
                raise NotACallerError(identified)  # noqa: TRY301 - it is logged as any other failure
        except Exception as error:
            self.note(error)
            raise
        return identified

    def note(self, error: Exception) -> None:
        """Log that the function has failed by an error, unless that is about headers."""
        if not isinstance(error, HeadersTooLargeError):
            raise_interruption(error)
            what = error.what if isinstance(error, NotACallerError) else f"{type(error).__name__} at {place_of(error)}"
            self._logged.log(what, what)
