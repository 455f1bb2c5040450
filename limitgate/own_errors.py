"""Exceptions that nobody foresaw: reported once, and turned into what callers can deal with.

Wherever others wait for what a callback, a thread or a task does, an exception there must not leave them without an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from limitgate.diagnostics import Diagnosis
from limitgate.errors import StoreError

_reported: set[str] = set()
"""Places that are in the log already."""


class OwnError(StoreError):
    """A mistake of LimitGate's own while a store was asked: no sign that the store fails."""


def own_error(error: Exception) -> StoreError:
    """Turn an exception that nobody foresaw into a `StoreError`, and report its place once (LG020).

    A `StoreError` stays as it is. The text of any other is repeated nowhere: it may hold what a client has sent.
    """
    if isinstance(error, StoreError):
        return error
    kind, place = type(error).__name__, _place(error)
    if place not in _reported:
        _reported.add(place)
        with suppress(Exception):  # a log handler of the application's may raise
            Diagnosis.OWN_ERROR.log(kind, place)
    failure = OwnError(f"an error of LimitGate's own: {kind} at {place}", "reply")
    failure.__cause__ = error
    return failure


@contextmanager
def survived() -> Iterator[None]:
    """Report an exception that nobody foresaw, in place of ending a thread or a task by it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, what follows has to be done
        own_error(error)


def _place(error: BaseException) -> str:
    """Module and line that raised an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "an unknown place" if trace is None else f"{trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}"
