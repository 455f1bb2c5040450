"""Unforeseen exceptions: reported once, and turned into errors that callers can handle.

Wherever others wait for a callback, a thread or a task, an exception in it must not leave them without an answer.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from inspect import CO_VARARGS
from itertools import pairwise
from types import FrameType, TracebackType

from limitgate.errors import StoreError
from limitgate.messages.diagnostics import Diagnosis

try:  # `signal` makes an enum of each handler, which takes twenty times as long
    from _signal import getsignal as _handler_of  # type: ignore[import-not-found]
except ImportError:
    from signal import getsignal as _handler_of

_reported: set[str] = set()
"""Places that have been logged."""


class OwnError(StoreError):
    """A mistake of LimitGate's own during a call to a store: no sign that the store fails."""


def internal_error(error: Exception) -> StoreError:
    """Turn an unforeseen exception into a `StoreError`, and report its place once (LG020).

    A `StoreError` stays as it is. The text of any other is repeated nowhere, since it may contain data of a client. Raises
    what a signal handler has raised, see `raise_interruption`.
    """
    raise_interruption(error)
    if isinstance(error, StoreError):
        return error
    kind, place = type(error).__name__, place_of(error)
    if place not in _reported:
        _reported.add(place)
        try:
            Diagnosis.OWN_ERROR.log(kind, place)
        except Exception as failed:  # noqa: BLE001 - a log handler of the application's may raise
            raise_interruption(failed)
    failure = OwnError(f"internal error in LimitGate: {kind} at {place}", "reply")
    failure.__cause__ = error
    return failure


@contextmanager
def logged_errors() -> Iterator[None]:
    """Report an unforeseen exception that would otherwise end a thread or a task. Raises as `internal_error` does."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the thread or task has to go on
        internal_error(error)


def raise_interruption(error: BaseException) -> None:
    """Raise what a signal handler has raised, if that is the error or has led to it: no failure of whatever it interrupted.

    Such an exception may be of any class, `TimeoutError` and `OSError` included, so the traceback has to tell: the handler is
    in it. It cannot tell if the handler has no Python code, nor of exceptions that other threads set by
    `PyThreadState_SetAsyncExc`. In an event loop nothing is raised: it would strike whatever callback runs.
    """
    if threading.current_thread() is threading.main_thread() and not _runs_event_loop():
        each: BaseException | None = error
        handlers, seen = _handlers(), set[int]()
        while each is not None and id(each) not in seen:
            if _is_of_handler(each.__traceback__, handlers):
                raise each
            seen.add(id(each))
            each = each.__cause__ or each.__context__
            if each is not None and _is_handled_outside(each.__traceback__):
                return


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _is_of_handler(trace: TracebackType | None, handlers: Container[object]) -> bool:
    """True if a function of a traceback is a signal handler, or has the arguments of one: a number and the frame before it."""
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        received = _arguments(trace.tb_frame)
        if any(type(number) is int and frame is interrupted for number, frame in pairwise(received)):
            return True
        if trace.tb_frame.f_code in handlers:
            return True
    return False


_SIGNALS = tuple(map(int, signal.valid_signals()))


def _handlers() -> set[object]:
    """The code of the signal handlers that are set: some drop their arguments, and others are no longer set.

    That of a decorator is not among them, since it may be around anything else, too.
    """
    handlers = [handler for handler in map(_handler_of, _SIGNALS) if callable(handler)]
    functions = [inspect.unwrap(getattr(handler, "func", handler)) for handler in handlers]
    codes = [getattr(each, "__code__", None) for each in functions]
    return {code for code in codes if code is not None}


def _arguments(frame: FrameType) -> list[object]:
    """The positional arguments of a function, those behind a star as well."""
    code, values = frame.f_code, frame.f_locals
    received = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        received += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return received


def _is_handled_outside(trace: TracebackType | None) -> bool:
    """True if the frame that has caught an exception still runs: it is older than the call that failed."""
    frame: FrameType | None = sys._getframe() if trace is not None else None  # noqa: SLF001 - as `logging` does
    while frame is not None:
        if trace is not None and frame is trace.tb_frame:
            return True
        frame = frame.f_back
    return False


def place_of(error: BaseException) -> str:
    """Module and line that raised an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "an unknown place" if trace is None else f"{trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}"
