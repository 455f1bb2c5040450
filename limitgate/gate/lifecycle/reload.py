"""Polls rules, and replaces those of a gate between requests. Never uses invalid rules."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import ref

from limitgate.errors import ConfigError
from limitgate.gate.gate import Gate
from limitgate.gate.planning.active_rules import ActiveRules
from limitgate.internal_errors import internal_error
from limitgate.messages.diagnostics import Diagnosis
from limitgate.observing.logs import rules_changed
from limitgate.process.background import Pollable, Poller
from limitgate.rules.revision import changes, revision
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings, named_env_file
from limitgate.rules.watch import RuleSource, WatchedFiles, WatchedRules

log: logging.Logger = logging.getLogger("limitgate")

SPARED = 10
"""Reloads without a full garbage collection."""
FROZEN_BY_PYTHON = 1_000
"""Python freezes some hundreds at startup; applications many more."""


class Reloader:
    def __init__(self, gate: Gate, source: RuleSource, ready: Callable[[RuleSet], ActiveRules]) -> None:
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
        """An unfinished load never ends in a forked child."""
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
    """Raises `ConfigError` without files."""
    if not rules.source:
        raise ConfigError("reload: the rules are given in Python, expected the path of a file or folder, or no reload")
    watched: list[Pollable] = [Reloader(gate, WatchedRules(Path(rules.source), rules.files_digest), ready)]
    variables = named_env_file()
    if variables is not None:
        file = Path(variables).absolute()
        watched.append(OptionsWatch(settings, WatchedFiles(lambda: [file]), read_settings))
    return Poller(settings.reload, watched)
