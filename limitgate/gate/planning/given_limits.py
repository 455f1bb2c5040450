"""Limits from run time: those of callers, and those that callables return."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from inspect import isawaitable
from typing import Any, NamedTuple

from limitgate.errors import ConfigError
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.http.request import Request
from limitgate.limits.bucket import Remembered
from limitgate.limits.limit import Limit
from limitgate.messages.diagnostics import Diagnosis, OncePerValue
from limitgate.messages.text import HIDDEN, Names, shown
from limitgate.rules.options import read_limits

_LONG = 200
_AT_HAND = (str, Limit, list, tuple, type(None))
AS_WRITTEN = object()
_TOLD = 200
MOST_CALLERS = 10
"""Maximum of callers to log for the same error in a rule's limits."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class AppliedLimits(NamedTuple):
    compiled_rules: tuple[CompiledRule, ...]
    pending: Sequence[int]
    """Rules with limits to await."""
    is_open: bool
    """True if an error may be logged again."""


class _FaultyLimitsError(Exception): ...


class GivenLimits:
    """Applies limits from run time. ``names`` masks logged callers."""

    def __init__(self, names: Names = "masked") -> None:
        self._remembered = Remembered[tuple[CompiledRule, Any], CompiledRule]()
        self._names: Names = names
        self._unreadable = OncePerValue(Diagnosis.UNREADABLE_LIMITS)
        self._callers_logged: Counter[tuple[str, str]] = Counter()

    def applied(
        self, compiled_rules: Iterable[CompiledRule], request: Request, own: Mapping[str, Any] | None, *, remembers: bool = True
    ) -> AppliedLimits:
        """Return the rules that limit a request, with its limits. ``own`` are the caller's limits.

        Caches the result with ``remembers``. Raises `ConfigError` for invalid limits if the rule has no written ones.
        """
        given = request.given_limits
        found, pending, is_open = [], [], False
        for compiled_rule in compiled_rules:
            limited: CompiledRule | None = compiled_rule
            limits: Any = AS_WRITTEN
            if own and compiled_rule.rule.name in own:
                limits = own[compiled_rule.rule.name]
            elif compiled_rule.limits_by is not None:
                key = id(compiled_rule.written)
                if given is None:
                    given = request.given_limits = {}
                if key not in given:
                    given[key] = compiled_rule.limits_by(request)
                limits = given[key]
                if not isinstance(limits, _AT_HAND) and isawaitable(limits):
                    pending.append(key)
                    limits = AS_WRITTEN
            if limits is not AS_WRITTEN:
                try:
                    limited = self._limited(compiled_rule, limits, remembers=remembers)
                except _FaultyLimitsError as error:
                    is_open |= self._report(compiled_rule.rule.name, str(error), request)
                    limited = compiled_rule
            if limited is not None:
                found.append(limited)
        return AppliedLimits(tuple(found), pending, is_open)

    def _limited(self, compiled_rule: CompiledRule, limits: Any, *, remembers: bool) -> CompiledRule | None:
        """Raise `_FaultyLimitsError` if written limits can replace invalid ones."""
        if limits is None:
            return None
        try:
            if isinstance(limits, list):
                limits = tuple(limits)
            return self._remembered.values.get((compiled_rule, limits)) or self._read(
                compiled_rule, limits, remembers=remembers
            )
        except (ConfigError, TypeError) as error:
            name = compiled_rule.rule.name
            reason = str(error) if isinstance(error, ConfigError) else f"{limits!r:.80} is not a limit"
            if not compiled_rule.rule.every_limit:
                raise ConfigError(f"rule {name!r}: invalid limits at run time: {reason}") from error
            raise _FaultyLimitsError(reason[:_TOLD]) from error

    def _report(self, rule: str, reason: str, request: Request) -> bool:
        """Log the first callers. Return True if another caller will be logged."""
        fault = rule, _ADDRESS.sub("", reason)
        if self._names == "off" or request.caller is None:
            self._unreadable.log(fault, rule, reason)
            return self._names != "off"
        name = shown("caller", request.caller.id, self._names)
        if name == HIDDEN:
            name = f"{name}, in full with names='full'"
        told = self._callers_logged[fault]
        if told < MOST_CALLERS:
            further = "" if told + 1 < MOST_CALLERS else "; further callers with this value are not logged"
            if self._unreadable.log((*fault, request.caller.id), rule, f"{reason} (caller {name}{further})"):
                self._callers_logged[fault] = told = told + 1
        return told < MOST_CALLERS and not self._unreadable.is_full

    def _read(self, compiled_rule: CompiledRule, limits: Any, *, remembers: bool) -> CompiledRule:
        limited = compiled_rule.having_limits(read_limits(limits))
        if remembers and not (isinstance(limits, str) and len(limits) > _LONG):
            self._remembered.add((compiled_rule, limits), limited)
        return limited


def is_short(limits: Iterable[Any]) -> bool:
    return sum([len(each if type(each) is str else repr(each)) for each in limits if each is not AS_WRITTEN]) <= _LONG
