"""Changes of files: looks at them again and again, and believes what two looks in a row have seen.

Looking is polling, since that alone sees every way in which a file changes: in place, by a rename over it, by a link above it
that leads elsewhere (a ConfigMap of Kubernetes), on network file systems too.
"""

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
"""Seconds for which the contents of files are read at every look after their stamps have changed: a file that changes again
within one tick of its file system's clock, which is 2 s on some, keeps its times."""


class RuleSource(Protocol):
    """Place where a rule set is kept, and may change."""

    name: str
    """The place as operators know it."""

    def has_changed(self) -> bool:
        """Look. True once for each content that is another than the one before, and stands still."""

    def load(self) -> RuleSet | None:
        """The rule set there; None if it has changed since it was looked at. Raises `ConfigError` if it cannot be used."""

    def forget(self) -> None:
        """Take whatever there is for changed."""


class Stamp(NamedTuple):
    """A file as its file system knows it. Any change of it changes one of these, but for one within a tick of the clock."""

    name: str
    real_path: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    """Time of the last change of content, name or rights, which no tool puts back."""


class Reading(NamedTuple):
    """One look at files."""

    stamps: tuple[Stamp | str, ...]
    """A stamp for each file, or the reason why there is none."""
    digest: bytes
    """Digest of the contents."""


class Watch:
    """Decides by one reading after another whether there is new content. Pure: times are seconds on one monotonic clock.

    ``known`` is the digest of the content that is in use; None to take any for new.
    """

    def __init__(self, known: bytes | None) -> None:
        self.known = known
        self._last: Reading | None = None
        self._changed_at = 0.0

    def knows(self, stamps: tuple[Stamp | str, ...], at: float) -> bool:
        """True if by these stamps nothing can have changed, so that no content has to be read."""
        last = self._last
        return last is not None and last == (stamps, self.known) and at - self._changed_at > SETTLED

    def note(self, reading: Reading, at: float) -> bool:
        """Note a reading. True if it is the second one of a content that is not known yet; from then on it is."""
        if reading != self._last:
            if self._last is None or reading.stamps != self._last.stamps:
                self._changed_at = at
            self._last = reading
            return False
        if reading.digest == self.known:
            return False
        self.known = reading.digest
        return True

    def forget(self) -> None:
        """Take any content for new."""
        self.known = None


class WatchedFiles:
    """Files that are looked at. ``list_files`` names those that there are now, or raises `ConfigError`."""

    def __init__(
        self,
        list_files: Callable[[], Sequence[Path]],
        known: bytes | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._list_files = list_files
        self._clock = clock
        self._watch = Watch(known)

    def has_changed(self) -> bool:
        """Look. True once for each content that is another than the one before, and stands still."""
        at = self._clock()
        try:
            files = self._list_files()
        except ConfigError as error:
            missing = str(error)
            return self._watch.note(Reading((missing,), missing.encode(errors="backslashreplace")), at)
        stamps = tuple(map(_stamp, files))
        return not self._watch.knows(stamps, at) and self._watch.note(Reading(stamps, _digest(files)), at)

    def is_known(self, digest: bytes | None) -> bool:
        """True if a digest is that of the content that was seen last."""
        return digest == self._watch.known

    def forget(self) -> None:
        """Take whatever stands there for new."""
        self._watch.forget()


class WatchedRules(WatchedFiles):
    """Rule files at a path, as `load_rules` reads them; ``known`` is `RuleSet.files_digest` of the rules that are in use."""

    def __init__(self, path: Path, known: bytes | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.name = str(path)
        self._path = path.absolute()  # whatever becomes of the working folder
        super().__init__(lambda: files_at(self._path), known, clock)

    def load(self) -> RuleSet | None:
        """The rules there; None if the files have changed since they were looked at. Raises `ConfigError` for a mistake."""
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
        """True if the mistake is one of the content that was looked at."""
        try:
            return self.is_known(_digest(files_at(self._path)))
        except ConfigError as error:
            return self.is_known(str(error).encode(errors="backslashreplace"))


def _stamp(file: Path) -> Stamp | str:
    try:
        found = file.stat()
        real_path = os.path.realpath(file)
    except OSError as error:
        return f"{file}: {error.strerror}"
    return Stamp(str(file), real_path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _digest(files: Iterable[Path]) -> bytes:
    """Digest of the contents of files, as `RuleSet.files_digest` has it; of one that cannot be read, of the reason."""
    return digest_of([(file, _content(file)) for file in files])


def _content(file: Path) -> bytes:
    try:
        content = read_bytes(file)
    except OSError as error:
        content = f"{file}: {error.strerror}".encode(errors="backslashreplace")
    return hashlib.sha256(content).digest()
