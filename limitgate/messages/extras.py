"""Packages that only some modules need, and the extra that brings each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec


@contextmanager
def extra(name: str, *packages: str) -> Iterator[None]:
    """Import ``packages`` inside; if one is missing, the error names the first that is, and the ``pip install`` that brings it.

    Raises `ModuleNotFoundError`, as the import itself.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        missing = next((package for package in packages if not _is_there(package)), packages[0])
        message = f"{missing} is not installed, expected it here: pip install 'limitgate[{name}]'"
        raise ModuleNotFoundError(message, name=missing, path=error.path) from error


def _is_there(package: str) -> bool:
    with suppress(ModuleNotFoundError):
        return find_spec(package) is not None
    return False
