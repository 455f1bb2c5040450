"""Unforeseen exceptions: reported once, and turned into errors that callers can handle.

Wherever others wait for a callback, a thread or a task, an exception in it must not leave them without an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from limitgate.errors import StoreError
from limitgate.messages.diagnostics import Diagnosis

_reported: set[str] = set()
"""Places that have been logged."""


class OwnError(StoreError):
    """A mistake of LimitGate's own during a call to a store: no sign that the store fails."""


def own_error(error: Exception) -> StoreError:
    """Turn an unforeseen exception into a `StoreError`, and report its place once (LG020).

    A `StoreError` stays as it is. The text of any other is repeated nowhere, since it may contain data of a client.
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
    """Report an unforeseen exception that would otherwise end a thread or a task."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the thread or task has to go on
        own_error(error)


def _place(error: BaseException) -> str:
    """Module and line that raised an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "an unknown place" if trace is None else f"{trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}"
