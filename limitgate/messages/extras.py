"""Packages that only some modules need, and the extra that brings each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, *packages: str) -> Iterator[None]:
    """Import ``packages`` inside; where one is missing, the error says which ``pip install`` brings it.

    Raises `ModuleNotFoundError`, as the import itself.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        message = f"{missing} is not installed, expected it here: pip install 'limitgate[{name}]'"
        raise ModuleNotFoundError(message, name=error.name, path=error.path) from error
