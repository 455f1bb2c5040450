"""Other rules while the service runs: looks at where they are kept, and makes them ready aside.

A gate's rules in force are one object, so another one takes over between two requests. Rules that cannot be used never do.
"""

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
from limitgate.observing.audit import rules_changed
from limitgate.process.poller import Pollable, Poller
from limitgate.rules.changes import changes
from limitgate.rules.digest import revision
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings, named_env_file
from limitgate.rules.watch import RuleSource, WatchedFiles, WatchedRules

log = logging.getLogger("limitgate")

SPARED = 10
"""Loads of rules after a full garbage collection that cause no other one. With more, garbage could stay for ever."""
FROZEN_BY_PYTHON = 1_000
"""Objects that Python itself may have frozen at its start: 3.12 some hundreds. An application freezes many more."""


class Reloader:
    """Has a gate go by the rules that a source has now. ``ready`` makes a rule set ready for it."""

    def __init__(self, gate: Gate, source: RuleSource, ready: Callable[[RuleSet], ActiveRules]) -> None:
        self._gate = ref(gate)  # the gate has this object
        self._source = source
        self._ready = ready
        self._spared = self._full_collections = 0

    def poll(self) -> None:
        """Look once. Rules that have changed take over if they can be used; else those in force stay, which is logged."""
        if self._source.has_changed():
            with self._no_full_collection():
                self._load()

    def forget(self) -> None:
        """Load whatever there is, in the child of a fork, where the last load does not end."""
        with suppress(ValueError):
            gc.callbacks.remove(_age)
        self._source.forget()

    @contextmanager
    def _no_full_collection(self) -> Iterator[None]:
        """Keep the garbage collector from stopping all threads to look at every object, because so many are new.

        To freeze objects and take that back moves them to the oldest generation, and counts as no reason to collect it. What an
        application has frozen has to stay so.
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
            if rules is None:  # they change right now
                return
            before = gate.rules.rule_set
            self._check_some(before, rules)
            difference = changes(before, rules)
            rules.detach()
            ready = self._ready(rules)
            if ready.counts is not None:
                revision(rules)  # else the first scrape works it out, perhaps on an event loop
            gate.enforce(ready)
            if ready.counts is not None:
                ready.counts.retire(before, rules)
        except ConfigError as error:
            gate.loads.note(is_ok=False)
            more = f" (and {len(error.others)} more)" if error.others else ""
            Diagnosis.RULES_REJECTED.log(self._source.name, error, more)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with them, the rules in force stay
            gate.loads.note(is_ok=False)
            Diagnosis.RULES_REJECTED.log(self._source.name, internal_error(error), "")
        else:
            gate.loads.note(is_ok=True)
            rules_changed(self._source.name, str(difference))

    def _check_some(self, before: RuleSet, rules: RuleSet) -> None:
        """Raise `ConfigError` where all rules are gone: half of a file may be just that."""
        if any(before.tiers.values()) and not any(rules.tiers.values()):
            raise ConfigError(f"{self._source.name}: no rule at all, expected some, or a restart to limit nothing")


def _age(phase: str, _: object) -> None:
    """After a collection of the youngest generation, move what it has left to the oldest one."""
    if phase == "stop":
        gc.freeze()
        gc.unfreeze()


class OptionsWatch:
    """Tells of options that were changed in the file of variables, and wait for a restart. ``read`` reads them anew."""

    def __init__(self, settings: Settings, files: WatchedFiles, read: Callable[[], Settings]) -> None:
        self._settings = settings
        self._files = files
        self._read = read

    def poll(self) -> None:
        """Look once, and log the names of options that are not what they were at start."""
        if not self._files.has_changed():
            return
        try:
            now = self._read()
        except ConfigError as error:
            Diagnosis.NEEDS_RESTART.log(f"a mistake, with which no restart works: {error}")
            return
        changed = [name for name in Settings.model_fields if getattr(now, name) != getattr(self._settings, name)]
        if changed:
            Diagnosis.NEEDS_RESTART.log(", ".join(changed))

    def forget(self) -> None:
        """Compare whatever there is."""
        self._files.forget()


def poller_of(
    settings: Settings,
    gate: Gate,
    rules: RuleSet,
    ready: Callable[[RuleSet], ActiveRules],
    read_settings: Callable[[], Settings],
) -> Poller:
    """Make what looks for changes of the rules' files, and of the file of variables. Raises `ConfigError` without files."""
    if not rules.source:
        raise ConfigError("reload: the rules are given in Python, expected the path of a file or folder, or no reload")
    watched: list[Pollable] = [Reloader(gate, WatchedRules(Path(rules.source), rules.files_digest), ready)]
    variables = named_env_file()
    if variables is not None:
        file = Path(variables).absolute()
        watched.append(OptionsWatch(settings, WatchedFiles(lambda: [file]), read_settings))
    return Poller(settings.reload, watched)
