"""Polls rule files. Detects every change, also by links (ConfigMaps) and on network file systems."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from limitgate.errors import ConfigError
from limitgate.process.clock import monotonic
from limitgate.rules.document import read_bytes
from limitgate.rules.files import digest_of, files_at, load_rules
from limitgate.rules.rule import RuleSet

SETTLED = 3.0
"""Seconds after a change in which contents are read: some file systems' clocks tick every 2 s."""


class RuleSource(Protocol):
    name: str

    def has_changed(self) -> bool:
        """True once per new content that two polls agree on."""

    def load(self) -> RuleSet | None:
        """Return None if the rules changed since the poll. Raises `ConfigError`."""

    def forget(self) -> None:
        """Treat the current content as changed."""


Stamp = tuple[str, str, int, int, int, int, int]
"""Name, real path, device, inode, size, ns of modification and change, which no tool resets."""


class Reading(NamedTuple):
    stamps: tuple[Stamp | str, ...]
    """Or the reasons why there are none."""
    digest: bytes


class WatchedFiles:
    """Polled files. ``list_files`` returns them, or raises `ConfigError`. ``known`` is their digest."""

    def __init__(
        self, list_files: Callable[[], Sequence[Path]], known: bytes | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._list_files = list_files
        self._clock = clock
        self._known = known
        self._last: Reading | None = None
        self._changed_at = 0.0

    def has_changed(self) -> bool:
        at = self._clock()
        try:
            files = self._list_files()
        except ConfigError as error:
            return self._is_new(Reading((str(error),), _encoded(error)), at)
        stamps = tuple(map(_stamp, files))
        if self._last == (stamps, self._known) and at - self._changed_at > SETTLED:
            return False
        return self._is_new(Reading(stamps, _digest(files)), at)

    def _is_new(self, reading: Reading, at: float) -> bool:
        if reading != self._last:
            if self._last is None or reading.stamps != self._last.stamps:
                self._changed_at = at
            self._last = reading
            return False
        is_new = reading.digest != self._known
        self._known = reading.digest
        return is_new

    def is_known(self, digest: bytes | None) -> bool:
        return digest == self._known

    def forget(self) -> None:
        self._known = None


class WatchedRules(WatchedFiles):
    """Rule files for `load_rules`. ``known`` is `RuleSet.files_digest`."""

    def __init__(self, path: Path, known: bytes | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.name: str = str(path)
        self._path = path.absolute()  # independent of later changes of the working folder
        super().__init__(lambda: files_at(self._path), known, clock)

    def load(self) -> RuleSet | None:
        try:
            rules = load_rules(self._path)
        except ConfigError:
            if self._stand_still():
                raise
            rules = None
        if rules is None or not self.is_known(rules.files_digest):
            self.forget()
            return None
        rules.source = self.name
        return rules

    def _stand_still(self) -> bool:
        try:
            return self.is_known(_digest(files_at(self._path)))
        except ConfigError as error:
            return self.is_known(_encoded(error))


def _stamp(file: Path) -> Stamp | str:
    try:
        found = file.stat()
        real_path = os.path.realpath(file)
    except OSError as error:
        return f"{file}: {error.strerror}"
    return str(file), real_path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(files: Iterable[Path]) -> bytes:
    def content(file: Path) -> bytes:
        try:
            return read_bytes(file)
        except OSError as error:
            return _encoded(f"{file}: {error.strerror}")

    return digest_of([(file, hashlib.sha256(content(file)).digest()) for file in files])


def _encoded(text: object) -> bytes:
    return str(text).encode(errors="backslashreplace")
