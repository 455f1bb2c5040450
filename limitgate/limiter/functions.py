"""Validates decorated functions, and returns the keys of their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import isclass
from typing import Any

from limitgate.rules.options import is_async

KeyOf = str | Callable[..., str] | None
"""Key of a function's calls: text, or a callable that takes the arguments of the call."""


def check_plain(function: object) -> None:
    """Raise `TypeError` unless a `Limiter` can call the function."""
    if is_async(function):
        raise TypeError(f"{function!r:.80} is async, expected a plain function, or an AsyncLimiter instead of a Limiter")
    if isclass(function):
        raise TypeError(f"{function!r:.80} is a class, expected a function, such as one of its methods")
    if not callable(function):
        below = ", or @classmethod above this decorator" if isinstance(function, classmethod) else ""
        raise TypeError(f"{function!r:.80} cannot be called, expected a function{below}")


def check_async(function: object) -> None:
    """Raise `TypeError` unless an `AsyncLimiter` can await the function."""
    if not is_async(function):
        raise TypeError(f"{function!r:.80} is no async function, expected one, or a Limiter instead of an AsyncLimiter")


def check_key_of(key: object) -> None:
    """Raise `TypeError` unless this can be the key of a function's calls."""
    if not (key is None or isinstance(key, str) or callable(key)):
        raise TypeError(f"key is {key!r:.80}, expected text, or a function of the call's arguments that gives it")


def check_named(function: object, key: KeyOf) -> None:
    """Raise `TypeError` if neither a key nor the function's name identifies its calls."""
    if key is None and not hasattr(function, "__qualname__"):
        raise TypeError(f"{function!r:.80} has no name to count by, expected key='...'")


def key_of(key: KeyOf, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the key of a call. Raises `TypeError` if the key isn't text."""
    if key is None:
        return f"{function.__module__}.{function.__qualname__}"
    return key(*args, **kwargs) if callable(key) else key
