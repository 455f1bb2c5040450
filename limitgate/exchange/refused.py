"""Errors that stand for a refusal where a framework's handlers are given one."""

from __future__ import annotations

from functools import cache
from typing import Any

from limitgate.http.response import Refusal
from limitgate.limits.decision import Decision, RateLimited


def refused(base: type[Exception], refusal: Refusal, decision: Decision, **options: Any) -> RateLimited:
    """A `RateLimited` that is an error of a framework's, too: of the class ``base``, with these options of its own."""
    kind = _kind(base)  # type: ignore[arg-type]  # any class can be hashed
    error: Any = kind.__new__(kind)
    initialise: Any = base.__init__
    initialise(error, **options)
    error.decision, error.response, error.refusal_id = decision, None, refusal.id
    refused: RateLimited = error
    return refused


@cache
def _kind(base: Any) -> type[RateLimited]:
    return type("Refused", (RateLimited, base), {"__doc__": "A request was refused by a gate.", "__module__": __name__})
