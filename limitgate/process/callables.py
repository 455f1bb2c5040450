"""Whether a callable is async, and how many arguments it accepts."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isclass, iscoroutinefunction, isroutine, signature
from typing import Any


def is_async(function: object) -> bool:
    call = None if isclass(function) else getattr(function, "__call__", None)  # noqa: B004 - a class has that of its objects
    return iscoroutinefunction(function) or iscoroutinefunction(call)


def accepts(function: Callable[..., Any], count: int) -> bool:
    """True if a function accepts ``count`` arguments, or has no readable signature."""
    try:
        signature(function if isroutine(function) else getattr(function, "__call__")).bind(*[None] * count)  # noqa: B004, B009
    except (AttributeError, TypeError):
        return False
    except ValueError:  # some functions in C
        return True
    return True
