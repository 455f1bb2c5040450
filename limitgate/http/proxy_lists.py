"""Named lists of proxies, and lists in files: one address or CIDR on each line, with ``#`` before a comment."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from limitgate.errors import ConfigError

FILE = "file:"
"""Words before the path of a list."""
_FOLDER = Path(__file__).parent / "proxies"


@cache
def names() -> tuple[str, ...]:
    """Names of the lists that come with LimitGate."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.txt")))


def entries(entry: str) -> Iterator[tuple[str, str]]:
    """Addresses and CIDRs that an entry of ``trusted_proxies`` stands for, each with the place where it is written.

    An entry that is no list stands for itself, at no place. Raises `ConfigError` for a file that cannot be read or is empty.
    """
    path = entry[len(FILE) :] if entry.startswith(FILE) else _FOLDER / f"{entry}.txt" if entry in names() else None
    if path is None:
        yield entry, ""
        return
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"{entry!r:.200} cannot be read ({error}), expected a file of addresses and CIDRs, one a line"
        ) from error
    found = [(line.partition("#")[0].strip(), f"{path}:{number}: ") for number, line in enumerate(lines, 1)]
    listed = [each for each in found if each[0]]
    if not listed:
        raise ConfigError(f"{entry!r:.200} lists nothing, expected addresses and CIDRs, one a line")
    yield from listed
