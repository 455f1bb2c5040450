"""Optional packages, and the extras that install them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec


@contextmanager
def extra(name: str, *packages: str) -> Iterator[None]:
    """Import ``packages`` inside. If one is missing, the `ModuleNotFoundError` names it and the ``pip install`` command."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        missing = next((package for package in packages if not _is_there(package)), packages[0])
        message = f"{missing} is not installed, expected it here: pip install 'limitgate[{name}]'"
        raise ModuleNotFoundError(message, name=missing, path=error.path) from error


def require(package: str) -> None:
    """Raise `ModuleNotFoundError` if a package is missing, without importing it."""
    if not _is_there(package):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def _is_there(package: str) -> bool:
    with suppress(ModuleNotFoundError):
        return find_spec(package) is not None
    return False
