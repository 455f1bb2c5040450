"""Built-in lists of proxies, and list files: one address or CIDR per line, ``#`` starts a comment."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from limitgate.errors import ConfigError

FILE = "file:"
"""Prefix of a list file's path."""
_FOLDER = Path(__file__).parent / "proxies"


@cache
def names() -> tuple[str, ...]:
    """The names of the built-in lists."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.txt")))


def entries(entry: str) -> Iterator[tuple[str, str]]:
    """Yield the addresses and CIDRs of a ``trusted_proxies`` entry, each with its location in a list, or an empty location.

    Raises `ConfigError` for an unreadable or empty file.
    """
    path = entry[len(FILE) :] if entry.startswith(FILE) else _FOLDER / f"{entry}.txt" if entry in names() else None
    if path is None:
        yield entry, ""
        return
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"{entry!r:.200} cannot be read ({error}), expected a file of addresses and CIDRs, one a line"
        ) from error
    found = [(line.partition("#")[0].strip(), f"{path}:{number}: ") for number, line in enumerate(lines, 1)]
    listed = [each for each in found if each[0]]
    if not listed:
        raise ConfigError(f"{entry!r:.200} lists nothing, expected addresses and CIDRs, one a line")
    yield from listed
