"""Limits as data: those that a callable or a caller gives in the place of a rule's own. What was read is remembered."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable
from typing import Any, Final, final

from limitgate.errors import ConfigError
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.request_plan import AdaptiveMatch, PreparedPlan, keep
from limitgate.gate.planning.rule_match import CompiledRules, RuleMatch, is_met
from limitgate.http.request import Request
from limitgate.keys import PreparedKey
from limitgate.limits.limit import Limit
from limitgate.limits.remembered import Remembered
from limitgate.messages.diagnostics import Diagnosis, OncePerValue
from limitgate.messages.text import Names, shown
from limitgate.rules.decorators import Mark
from limitgate.rules.options import read_limits

_LONG = 200
"""Characters that the text of limits may have which are remembered."""
_MOST_MET = 256
"""Combinations of conditions whose plans are remembered for one route."""
_AT_HAND = (str, Limit, list, tuple, type(None))
_AS_WRITTEN = object()
"""Stands for the limits of a rule to which none are given."""
_TOLD = 200
"""Characters of a mistake that are logged."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Part of the text of an object that is another one for each object."""


class PendingLimits:
    """Limits of a request that async callables have yet to give: to be awaited before it is planned again.

    They are those of rules with these ids; without ``keys`` all that are known to be pending.
    """

    __slots__ = ("_given", "_keys")

    def __init__(self, request: Request, keys: Sequence[int] | None = None) -> None:
        self._given = given = {} if request.given_limits is None else request.given_limits
        self._keys = [key for key, limits in given.items() if isawaitable(limits)] if keys is None else keys

    def __bool__(self) -> bool:
        """True if there is anything to await."""
        return bool(self._keys)

    def __await__(self) -> Generator[Any, Any, None]:
        return self._complete().__await__()

    async def _complete(self) -> None:
        """Await the limits. Raises whatever a callable does."""
        try:
            for key in self._keys:
                if isawaitable(limits := self._given[key]):
                    self._given[key] = await limits
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up, and leave no coroutine that nobody has awaited."""
        for key in self._keys:
            if isawaitable(self._given[key]):
                getattr(self._given[key], "close", bool)()


class GivenLimits:
    """Puts limits that are given at run time in the place of those that are written.

    ``names`` says how much of a caller's name is logged.
    """

    def __init__(self, names: Names = "masked") -> None:
        self._remembered = Remembered[tuple[CompiledRule, Any], CompiledRule]()
        self._names: Names = names
        self._unreadable = OncePerValue(Diagnosis.UNREADABLE_LIMITS)

    def applied(
        self, compiled_rules: Iterable[CompiledRule], request: Request, own: Mapping[str, Any] | None, *, remembers: bool = True
    ) -> tuple[tuple[CompiledRule, ...], Sequence[int]]:
        """Rules with the limits of a request, without those that do not limit it, and the ids of rules that have to be awaited.

        ``own`` are the limits of its caller. ``remembers`` is false for who remembers the rules by itself. Each callable is
        called once for a request. Raises `ConfigError` where limits cannot be read and none are written.
        """
        given = request.given_limits
        found, pending = [], []
        for compiled_rule in compiled_rules:
            limited: CompiledRule | None = compiled_rule
            if own and compiled_rule.rule.name in own:
                limited = self._limited(compiled_rule, own[compiled_rule.rule.name], request, remembers=remembers)
            elif compiled_rule.limits_by is not None:
                key = id(compiled_rule.written)
                if given is None:
                    given = request.given_limits = {}
                if key not in given:
                    given[key] = compiled_rule.limits_by(request)
                limits = given[key]
                if isinstance(limits, _AT_HAND) or not isawaitable(limits):
                    limited = self._limited(compiled_rule, limits, request, remembers=remembers)
                else:
                    pending.append(key)
            if limited is not None:
                found.append(limited)
        return tuple(found), pending

    def _limited(self, compiled_rule: CompiledRule, limits: Any, request: Request, *, remembers: bool) -> CompiledRule | None:
        """A rule with these limits, None if they are; as it was written if they cannot be read."""
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
                raise ConfigError(f"rule {name!r}: the limits given at run time cannot be read: {reason}") from error
            self._report(name, reason[:_TOLD], request)
            return compiled_rule

    def _report(self, rule: str, reason: str, request: Request) -> None:
        """Log limits that cannot be read once for a rule and a mistake, which repeats them (LG026)."""
        name = shown("caller", request.caller.id, self._names) if request.caller is not None else ""
        said = f"{reason} (caller {name})" if name else reason
        self._unreadable.log((rule, _ADDRESS.sub("", reason)), rule, said)

    def _read(self, compiled_rule: CompiledRule, limits: Any, *, remembers: bool) -> CompiledRule:
        """A rule with limits that are not known yet. Raises `ConfigError` if they cannot be read."""
        limited = compiled_rule.having_limits(read_limits(limits))
        if remembers and not (isinstance(limits, str) and len(limits) > _LONG):
            self._remembered.add((compiled_rule, limits), limited)
        return limited


@final
class GivenPlans:
    """Stands for the prepared plan of requests whose limits are given at run time: there is one for all that have the same.

    ``compiled_rules`` are those that limit the requests, with their ``keys``. ``marks``, ``adaptive`` and ``denying`` are those
    of each plan.
    """

    __slots__ = (
        "_callables",
        "_compiled_rules",
        "_denying",
        "_every_key",
        "_given",
        "_keys",
        "_plans",
        "_remember",
        "_sources",
        "adaptive",
        "marks",
    )
    is_ready: Final = False
    """The plan of a request has to be found first."""

    def __init__(
        self,
        given: GivenLimits,
        compiled_rules: CompiledRules,
        keys: Iterable[PreparedKey],
        marks: Container[Mark],
        adaptive: AdaptiveMatch | None,
        *,
        denying: CompiledRule | None,
    ) -> None:
        self.adaptive = adaptive
        """Adaptive limits to ask before; None for none."""
        self._given = given
        self._compiled_rules = compiled_rules
        self._every_key = tuple(keys)
        self._keys = {id(each.written): key for each, key in zip(compiled_rules, self._every_key)}
        self.marks = marks
        """Decorators that were taken into account."""
        self._denying = denying
        self._sources = [(each.name, id(each.written), each.limits_by) for each in compiled_rules]
        self._callables = [(key, limits_by) for _, key, limits_by in self._sources if limits_by is not None]
        remembered = Remembered[tuple[Any, ...], PreparedPlan]()
        self._remember = remembered.add
        self._plans = remembered.values
        """By what each callable gives; and where callers have limits of their own, by what is given to each rule."""

    @property
    def as_written(self) -> PreparedPlan | GivenPlans:
        """The plan of callers without limits of their own; itself where that depends on what callables give."""
        if self._callables:
            return self
        prepared = self._prepared(self._compiled_rules)
        prepared.given = self
        return prepared

    def with_limits(self, request: Request, own: Mapping[str, Any] | None) -> PreparedPlan | None:
        """The plan of a request whose caller has these limits of its own; None where limits have yet to be awaited."""
        given = request.given_limits
        if given is None:
            given = request.given_limits = {}
        if own:
            limits = self._limits(request, own, given)
        else:
            for key, limits_by in self._callables:
                if key not in given:
                    given[key] = limits_by(request)
            limits = tuple([given[key] for key, _ in self._callables])
        try:
            return self._plans[limits]
        except KeyError:
            pass
        except TypeError:  # there are lists in it
            limits = tuple([tuple(each) if isinstance(each, list) else each for each in limits])
            with suppress(KeyError, TypeError):
                return self._plans[limits]
        return self._plan_with(request, own, limits)

    def _limits(self, request: Request, own: Mapping[str, Any], given: dict[int, Any]) -> tuple[Any, ...]:
        """What is given to each rule, by the caller or else by its callable."""
        limits: list[Any] = []
        for name, key, limits_by in self._sources:
            if name in own:
                limits.append(own[name])
            elif limits_by is None:
                limits.append(_AS_WRITTEN)
            else:
                if key not in given:
                    given[key] = limits_by(request)
                limits.append(given[key])
        return tuple(limits)

    def _plan_with(self, request: Request, own: Mapping[str, Any] | None, limits: tuple[Any, ...]) -> PreparedPlan | None:
        """Make the plan of a request that was given these limits, which are not remembered."""
        limited, pending = self._given.applied(self._compiled_rules, request, own, remembers=False)
        if pending:
            return None
        prepared = self._prepared(limited)
        if is_short(limits):
            with suppress(TypeError):
                self._remember(limits, prepared)
        return prepared

    def _prepared(self, limited: CompiledRules) -> PreparedPlan:
        """The plan of requests that these rules limit, and of their messages."""
        counted = tuple([each for each in limited if each.rule.has_counts])
        of_messages = tuple([each for each in counted if each.rule.per == "message"])
        messages = PreparedPlan(of_messages, *self._keys_and_costs(of_messages), self.marks) if of_messages else None
        if of_messages:
            counted = tuple([each for each in counted if each.rule.per == "request"])
        keys, costs = self._keys_and_costs(counted)
        return PreparedPlan(counted, keys, costs, self.marks, self.adaptive, denying=self._denying, messages=messages)

    def _keys_and_costs(self, compiled_rules: CompiledRules) -> tuple[Sequence[PreparedKey], tuple[int | None, ...]]:
        """What a plan of these rules needs besides."""
        keys = self._every_key
        if len(compiled_rules) < len(keys):
            keys = tuple([self._keys[id(each.written)] for each in compiled_rules])
        return keys, tuple([each.cost for each in compiled_rules])


@final
class ConditionalPlans:
    """Stands for the prepared plan of requests whose rules have conditions: there is one for all that meet the same ones.

    ``prepare`` makes it of the rules that are for a request and all that are like it. ``unlimited`` is the plan of requests
    that a rule exempts.
    """

    __slots__ = ("_conditions", "_match", "_plans", "_prepare", "_unlimited")

    def __init__(
        self,
        match: RuleMatch,
        prepare: Callable[[Request, tuple[CompiledRule, ...]], PreparedPlan | GivenPlans],
        unlimited: PreparedPlan,
    ) -> None:
        self._match = match
        self._conditions = match.conditions()
        self._prepare = prepare
        self._unlimited = unlimited
        self._plans: dict[tuple[bool, ...], PreparedPlan | GivenPlans] = {}
        """By what each condition says."""

    def plan_of(self, request: Request) -> PreparedPlan | GivenPlans:
        """The plan of a request. Raises whatever a condition does."""
        match = self._match
        if match.exempting and match.exempts(request):
            return self._unlimited
        met = tuple([is_met(rule, request) for rule in self._conditions])
        try:
            return self._plans[met]
        except KeyError:
            prepared = self._prepare(request, match.narrowed(request))
            keep(self._plans, met, prepared, most=_MOST_MET)
            return prepared


def is_short(limits: Iterable[Any]) -> bool:
    """True if limits that were given may be remembered."""
    return sum([len(each if type(each) is str else repr(each)) for each in limits if each is not _AS_WRITTEN]) <= _LONG
