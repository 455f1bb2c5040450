"""Logs unexpected exceptions once, and converts them to errors that callers handle."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import CO_VARARGS
from itertools import pairwise
from types import FrameType, TracebackType

from limitgate.errors import StoreError
from limitgate.messages.diagnostics import Diagnosis

# `signal` creates enums, which takes twenty times as long.
try:
    from _signal import getsignal as _handler_of  # type: ignore[import-not-found]
except ImportError:
    from signal import getsignal as _handler_of

_reported: set[str] = set()


class OwnError(StoreError):
    """Internal error in LimitGate; the store may be fine."""


def internal_error(error: Exception) -> StoreError:
    """Convert an exception to a `StoreError`, and log its location once (LG020).

    The text isn't logged, because it may contain client data. Raises exceptions of signal handlers.
    """
    raise_interruption(error)
    if isinstance(error, StoreError):
        return error
    kind, place = type(error).__name__, place_of(error)
    if place not in _reported:
        _reported.add(place)
        try:
            Diagnosis.OWN_ERROR.log(kind, place)
        except Exception as failed:  # noqa: BLE001 - log handlers are foreign code
            raise_interruption(failed)
    failure = OwnError(f"internal error in LimitGate: {kind} at {place}", "reply")
    failure.__cause__ = error
    return failure


@contextmanager
def logged_errors() -> Iterator[None]:
    """Log exceptions that would end a thread or task. Raises the errors of `internal_error`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the thread or task must continue
        internal_error(error)


def raise_interruption(error: BaseException) -> None:
    """Raise a signal handler's exception if it caused the error.

    The traceback shows the handler. Doesn't find handlers without Python code, or exceptions of `PyThreadState_SetAsyncExc`.
    Never raises in an event loop, because an arbitrary callback would get the exception.
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
    """Return the code of signal handlers. Decorators are left out, because they may wrap other functions."""
    handlers = [handler for handler in map(_handler_of, _SIGNALS) if callable(handler)]
    functions = [inspect.unwrap(getattr(handler, "func", handler)) for handler in handlers]
    codes = [getattr(each, "__code__", None) for each in functions]
    return {code for code in codes if code is not None}


def _arguments(frame: FrameType) -> list[object]:
    code, values = frame.f_code, frame.f_locals
    received = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        received += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return received


def _is_handled_outside(trace: TracebackType | None) -> bool:
    frame: FrameType | None = sys._getframe() if trace is not None else None  # noqa: SLF001 - as `logging` does
    while frame is not None:
        if trace is not None and frame is trace.tb_frame:
            return True
        frame = frame.f_back
    return False


def place_of(error: BaseException) -> str:
    """Return the module and line that raised."""
    places = _places(error)
    return places[-1] if places else "an unknown place"


def place_in(function: object, error: BaseException) -> str:
    """Return the failed line in the application's package, otherwise outside LimitGate, otherwise the function's definition."""
    with suppress(ValueError):  # wrapped in a cycle
        function = inspect.unwrap(function.func if isinstance(function, partial) else function)  # type: ignore[arg-type]
    module = getattr(function, "__module__", None) or "an unknown place"
    places = [place for place in _places(error) if _package(place) != _package(__name__)]
    own = [place for place in places if _package(place) == _package(module)]
    if places:
        return (own or places)[-1]
    code = getattr(function if inspect.isroutine(function) else getattr(type(function), "__call__"), "__code__", None)  # noqa: B004, B009
    return module if code is None else f"{module}:{code.co_firstlineno}"


def _places(error: BaseException) -> list[str]:
    places, trace = [], error.__traceback__
    while trace is not None:
        places.append(f"{trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}")
        trace = trace.tb_next
    return places


def _package(place: str) -> str:
    return place.partition(":")[0].partition(".")[0]
