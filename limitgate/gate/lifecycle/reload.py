"""Polls rules, and replaces those of a gate between requests. Never uses invalid rules."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from weakref import ref

from limitgate.errors import ConfigError
from limitgate.gate.gate import Gate
from limitgate.gate.planning.active_rules import ActiveRules
from limitgate.internal_errors import internal_error
from limitgate.messages.diagnostics import Diagnosis
from limitgate.observing.logs import rules_changed
from limitgate.process.background import Pollable, Poller
from limitgate.process.clock import monotonic
from limitgate.rules.document import read_bytes
from limitgate.rules.files import digest_of, files_at, load_rules
from limitgate.rules.revision import changes, revision
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings, named_env_file

SETTLED = 3.0
"""For this many seconds after a change, polls read contents, because the clocks of some file systems tick every 2 s."""


Stamp = tuple[str, str, int, int, int, int, int]
"""Name, real path, device, inode, size, ns of modification and change, which no tool resets."""


class Reading(NamedTuple):
    """Result of one poll."""

    stamps: tuple[Stamp | str, ...]
    """Stamps of the files, or errors in their place."""
    digest: bytes


class WatchedFiles:
    """Polled files. Detects every change, including those by links (ConfigMaps) and on network file systems.

    ``list_files`` returns the files, or raises `ConfigError`. ``known`` is the digest of their content.
    """

    def __init__(
        self, list_files: Callable[[], Sequence[Path]], known: bytes | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._list_files = list_files
        self._clock = clock
        self._known = known
        self._last: Reading | None = None
        self._changed_at = 0.0

    def has_changed(self) -> bool:
        """Return True once for new content, after two polls agree on it."""
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
        """Treat the current content as changed."""
        self._known = None


class WatchedRules(WatchedFiles):
    """Rule files for `load_rules`. ``known`` is `RuleSet.files_digest`."""

    def __init__(self, path: Path, known: bytes | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.name: str = str(path)
        self._path = path.absolute()  # independent of later changes of the working folder
        super().__init__(lambda: files_at(self._path), known, clock)

    def load(self) -> RuleSet | None:
        """Load the rules; None if they changed since the poll. Raises `ConfigError`."""
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


log: logging.Logger = logging.getLogger("limitgate")

SPARED = 10
"""Number of reloads without a full garbage collection."""
FROZEN_BY_PYTHON = 1_000
"""Python freezes fewer objects; applications that freeze objects freeze more."""


class Reloader:
    def __init__(self, gate: Gate, source: WatchedRules, ready: Callable[[RuleSet], ActiveRules]) -> None:
        # The gate refers to this object.
        self._gate = ref(gate)
        self._source = source
        self._ready = ready
        self._spared = self._full_collections = 0

    def poll(self) -> None:
        if self._source.has_changed():
            with self._no_full_collection():
                self._load()

    def forget(self) -> None:
        """Forget an unfinished load, because it never ends in a forked child."""
        with suppress(ValueError):
            gc.callbacks.remove(_age)
        self._source.forget()

    @contextmanager
    def _no_full_collection(self) -> Iterator[None]:
        """Avoid a full garbage collection, which pauses all threads.

        Unfreezing moves objects to the oldest generation. Objects that the application froze must stay frozen.
        """
        full_collections = gc.get_stats()[-1]["collections"]
        self._spared = self._spared + 1 if full_collections == self._full_collections else 1
        self._full_collections = full_collections
        if self._spared > SPARED or gc.get_freeze_count() > FROZEN_BY_PYTHON:
            yield
            return
        gc.callbacks.append(_age)
        try:
            yield
        finally:
            gc.callbacks.remove(_age)

    def _load(self) -> None:
        gate = self._gate()
        if gate is None:
            return
        try:
            rules = self._source.load()
            # The files are changing.
            if rules is None:
                return
            before = gate.rules.rule_set
            self._check_some(before, rules)
            difference = changes(before, rules)
            rules.detach()
            ready = self._ready(rules)
            ready.planner.check_limits_of(gate.rules.planner)
            if ready.counts is not None:
                # Cached, so that a scrape doesn't compute it on an event loop.
                revision(rules)
            gate.enforce(ready)
            if ready.counts is not None:
                ready.counts.retire(before, rules)
        except ConfigError as error:
            gate.loads.note(is_ok=False, error=str(error))
            more = f" (and {len(error.others)} more)" if error.others else ""
            Diagnosis.RULES_REJECTED.log(self._source.name, error, more)
        except Exception as error:  # noqa: BLE001 - keep the rules in force
            failure = internal_error(error)
            gate.loads.note(is_ok=False, error=str(failure))
            Diagnosis.RULES_REJECTED.log(self._source.name, failure, "")
        else:
            gate.loads.note(is_ok=True)
            rules_changed(self._source.name, str(difference))

    def _check_some(self, before: RuleSet, rules: RuleSet) -> None:
        if any(before.tiers.values()) and not any(rules.tiers.values()):
            raise ConfigError(f"{self._source.name}: no rules, expected some; to limit nothing, restart without rules")


def _age(phase: str, _: object) -> None:
    if phase == "stop":
        gc.freeze()
        gc.unfreeze()


class OptionsWatch:
    """Logs changed options in the environment file; they need a restart."""

    def __init__(self, settings: Settings, files: WatchedFiles, read: Callable[[], Settings]) -> None:
        self._settings = settings
        self._files = files
        self._read = read

    def poll(self) -> None:
        if not self._files.has_changed():
            return
        try:
            now = self._read()
        except ConfigError as error:
            Diagnosis.NEEDS_RESTART.log(f"the file has an error that prevents a restart: {error}")
            return
        changed = [name for name in Settings.model_fields if getattr(now, name) != getattr(self._settings, name)]
        if changed:
            Diagnosis.NEEDS_RESTART.log(", ".join(changed))

    def forget(self) -> None:
        self._files.forget()


def poller_of(
    settings: Settings,
    gate: Gate,
    rules: RuleSet,
    ready: Callable[[RuleSet], ActiveRules],
    read_settings: Callable[[], Settings],
) -> Poller:
    """Return a poller of the rules. Raises `ConfigError` if there are no files."""
    if not rules.source:
        raise ConfigError("reload: the rules are given in Python, expected the path of a file or folder, or no reload")
    watched: list[Pollable] = [Reloader(gate, WatchedRules(Path(rules.source), rules.files_digest), ready)]
    variables = named_env_file()
    if variables is not None:
        file = Path(variables).absolute()
        watched.append(OptionsWatch(settings, WatchedFiles(lambda: [file]), read_settings))
    return Poller(settings.reload, watched)
