"""Other rules while the service runs: looks at where they are kept, and makes them ready aside.

A gate's rules in force are one object, so another one takes over between two requests. Rules that cannot be used never do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple
from weakref import ref

from limitgate.errors import ConfigError
from limitgate.gate.gate import Gate
from limitgate.gate.planning.rules_in_force import RulesInForce
from limitgate.messages.diagnostics import Diagnosis
from limitgate.observing.audit import rules_changed
from limitgate.own_errors import own_error
from limitgate.process.gil import free_in_pieces, in_pieces
from limitgate.rules.changes import changes
from limitgate.rules.digest import revision
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings
from limitgate.rules.watch import RuleSource, WatchedFiles

log = logging.getLogger("limitgate")


class _Retired(NamedTuple):
    """Rules that were in force, and what they consist of, the whole before its parts."""

    rules: ref[RulesInForce]
    parts: list[object]


class Reloader:
    """Has a gate go by the rules that a source has now. ``ready`` makes a rule set ready for it."""

    def __init__(self, gate: Gate, source: RuleSource, ready: Callable[[RuleSet], RulesInForce]) -> None:
        self._gate = ref(gate)  # the gate has this object
        self._source = source
        self._ready = ready
        self._retired: list[_Retired] = []

    def look(self) -> None:
        """Look once. Rules that have changed take over if they can be used; else those in force stay, which is logged."""
        if self._retired:
            self._free_retired()
        if self._source.has_changed():
            with in_pieces():
                self._load()

    def forget(self) -> None:
        """Load whatever there is."""
        self._source.forget()

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
                revision(rules)  # observers are told it, by threads that do not work in pieces
            self._enforce(gate, ready)
        except ConfigError as error:
            gate.loads.note(is_ok=False)
            more = f" (and {len(error.others)} more)" if error.others else ""
            Diagnosis.RULES_REJECTED.log(self._source.name, error, more)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with them, the rules in force stay
            gate.loads.note(is_ok=False)
            Diagnosis.RULES_REJECTED.log(self._source.name, own_error(error), "")
        else:
            gate.loads.note(is_ok=True)
            rules_changed(self._source.name, str(difference))

    def _enforce(self, gate: Gate, rules: RulesInForce) -> None:
        """Put rules in force, and keep the parts of those before until no request has these any more."""
        before = gate.rules
        self._retired.append(_Retired(ref(before), list(before.planner.parts())))
        gate.enforce(rules)
        if rules.counts is not None:
            rules.counts.retire(before.rule_set, rules.rule_set)

    def _free_retired(self) -> None:
        """Free the parts of rules that no request has any more, bit by bit: Python would free all at once."""
        gone = [retired for retired in self._retired if retired.rules() is None]
        self._retired = [retired for retired in self._retired if retired not in gone]
        with in_pieces():
            for retired in gone:
                free_in_pieces(retired.parts)

    def _check_some(self, before: RuleSet, rules: RuleSet) -> None:
        """Raise `ConfigError` where all rules are gone: half of a file may be just that."""
        if any(before.tiers.values()) and not any(rules.tiers.values()):
            raise ConfigError(f"{self._source.name}: no rule at all, expected some, or a restart to limit nothing")


class OptionsWatch:
    """Tells of options that were changed in the file of variables, and wait for a restart. ``read`` reads them anew."""

    def __init__(self, settings: Settings, files: WatchedFiles, read: Callable[[], Settings]) -> None:
        self._settings = settings
        self._files = files
        self._read = read

    def look(self) -> None:
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
