"""FastAPI: limits as dependencies, and limited routes in the OpenAPI document.

A dependency runs after those that it depends on, so it can limit by what they have found out, such as the authenticated user.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_origin
from weakref import WeakKeyDictionary

from fastapi import HTTPException, params
from fastapi.openapi import utils as generator
from starlette.requests import HTTPConnection
from starlette.routing import Match

from limitgate.decision import Decision, RateLimited
from limitgate.decorators import effective, marks_of, place_named, seen_by_gate, without_a_gate
from limitgate.errors import ConfigError
from limitgate.front import rules_of
from limitgate.headers import Refusal
from limitgate.keys import Value, value_of
from limitgate.limits import Limit
from limitgate.middleware import LimitGate
from limitgate.openapi import PROBLEM, PROBLEM_SCHEMA, too_many_requests
from limitgate.overview import Listed, applied
from limitgate.routes.starlette import flat, segments_of
from limitgate.rules import Cost, OnError, Outcomes, Rule, RuleOptions
from limitgate.settings import Settings
from limitgate.visit import VISIT, Visit

Part = str | Callable[..., Any] | params.Depends | UnionType
"""A part of a key: one that rules know, too, or a dependency, as it is, in ``Depends(...)``, or as ``Annotated`` type.

To a type checker, such a type is what it annotates: a class, or a union.
"""


class Refused(HTTPException, RateLimited):
    """A request was refused by a dependency. Whatever is made of this error, `LimitGate` answers as it answers all others."""

    def __init__(self, refusal: Refusal, decision: Decision) -> None:
        HTTPException.__init__(self, refusal.status, refusal.reason, dict(refusal.waiting))
        self.decision = decision


class RateLimit:
    """A limit as a dependency: ``Depends(RateLimit("10/minute", key=[current_user]))``.

    Takes what `limitgate.limit` takes, but ``per``. A part of the ``key`` may be a dependency, too: what it gives tells the
    buckets apart, text, a number, a UUID or an object with an ``id``; None counts as absent. All dependencies of a request and
    the rules of `LimitGate` are charged together or not at all: one that refuses gives back what others have taken before it.

    The limit belongs to the place where it is made: given to a router, all routes of that share it, unless the key has the part
    ``path``. Without a ``name`` it is called by its module and its limits.

    Gives the `Decision`, or None where LimitGate is switched off or the request exempt. Works on WebSocket routes, too.
    Raises `ConfigError` like `Rule`, and when it runs without a `LimitGate` around the application; `TypeError` when a
    dependency gives something that nobody can be told apart by.
    """

    def __init__(
        self,
        *limits: Limit | str,
        name: str | None = None,
        qps: int | None = None,
        qpm: int | None = None,
        qph: int | None = None,
        qpd: int | None = None,
        concurrency: int | None = None,
        key: Iterable[Part] = ("ip",),
        methods: Iterable[str] | None = None,
        cost: Cost = 1,
        on_error: OnError | None = None,
        shadow: bool = False,
        charge_if: Outcomes | None = None,
        algorithm: str | None = None,
        align: str | None = None,
        max_delay: float | str | None = None,
    ) -> None:
        if seen_by_gate.get() is not None:
            message = (
                "a RateLimit is made while a request is under way, expected it to be made once, since each has its own bucket"
            )
            raise ConfigError(message)
        options: RuleOptions = {"qps": qps, "qpm": qpm, "qph": qph, "qpd": qpd, "on_error": on_error, "shadow": shadow}
        options |= {"methods": methods, "cost": cost, "charge_if": charge_if, "algorithm": algorithm, "align": align}
        options |= {"concurrency": concurrency, "max_delay": max_delay}
        options["key"], dependencies = _taken_apart(key)
        rule = Rule(name or "RateLimit", *limits, **options)
        self.rule = rule if name else rule.model_copy(update={"name": _default_name(_module_of_caller(), rule)})
        self._asks_user = rule.key_asks("user")
        self._names = {f"part_{place}": _name_of(dependency) for place, dependency in enumerate(dependencies)}
        self.__signature__ = _signature(dict(zip(self._names, dependencies)))

    async def __call__(self, connection: HTTPConnection, **given: Any) -> Decision | None:
        """Weigh the limit for the request at hand."""
        if VISIT not in connection.scope:
            without_a_gate(self.rule)
        visit: Visit | None = connection.scope.get(VISIT)
        if visit is None:
            return None
        if len(given) < len(self._names):
            names = ", ".join(self._names.values())
            raise TypeError(f"{self.rule.name} was called without {names}, expected Depends(...), so that FastAPI finds them")
        if not self._has_charged(visit):
            values = [value_of(given[part], name) for part, name in self._names.items()]
            connection.scope["limitgate"] = await self._weigh(visit, values, connection.scope)
        if visit.refusal is not None and visit.decision is not None:
            raise Refused(visit.refusal, visit.decision)
        return visit.decision

    def _has_charged(self, visit: Visit) -> bool:
        """Whether it has run for this request before: FastAPI calls it once for each set of security scopes."""
        return any(bound.rule is self.rule for taken in visit.taken for bound in taken.considered.bounds)

    async def _weigh(self, visit: Visit, values: Sequence[Value], scope: MutableMapping[str, Any]) -> Decision | None:
        if self._asks_user:  # whom authentication inside of the gate has found; what the gate was given has no user
            visit.request.scope = {**(visit.request.scope or {}), "user": scope.get("user")}
        decision: Decision | None = await visit.gate.afurther(visit, [(self.rule, values)])
        return decision


def _taken_apart(key: Iterable[Part]) -> tuple[Iterable[str], list[Any]]:
    """The parts of a key that rules know, too, and those that are dependencies."""
    if callable(key) or isinstance(key, params.Depends):
        raise ConfigError(f"key is {key!r:.80}, expected a list, for example [current_user] or ['ip', 'path']")
    if isinstance(key, str):
        return key, []  # the rule complains
    parts = list(key)
    dependencies = [part for part in parts if callable(part) or isinstance(part, params.Depends)]
    named: list[Any] = [part for part in parts if not callable(part) and not isinstance(part, params.Depends)]
    return (named if named or not dependencies else ("global",)), dependencies


def _signature(dependencies: Mapping[str, Any]) -> inspect.Signature:
    """What FastAPI reads from a dependency: the connection, and further dependencies."""
    connection = inspect.Parameter("connection", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=HTTPConnection)
    return inspect.Signature([connection, *[_parameter(*named) for named in dependencies.items()]])


def _parameter(name: str, part: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    if get_origin(part) is Annotated:
        if not _annotated_with(part):
            raise ConfigError(f"key part {part!r:.80} is no dependency, expected Annotated[..., Depends(...)]")
        return inspect.Parameter(name, keyword, annotation=part)
    return inspect.Parameter(name, keyword, default=part if isinstance(part, params.Depends) else params.Depends(part))


def _annotated_with(part: Any) -> list[params.Depends]:
    return [found for found in getattr(part, "__metadata__", ()) if isinstance(found, params.Depends)]


def _name_of(part: Any) -> str:
    """What a dependency is called among the parts of a key."""
    for found in [part] if isinstance(part, params.Depends) else _annotated_with(part):
        part = found.dependency or getattr(part, "__origin__", part)
    return getattr(part, "__qualname__", type(part).__qualname__)


def _default_name(module: str, rule: Rule) -> str:
    """A name that stays when other limits come and go in the module: only those that are just like it are numbered."""
    limits = [str(limit).replace("/", "-per-").replace(" ", "-") for limit in rule.every_limit]
    return place_named(".".join([module, *limits]))


def _module_of_caller() -> str:
    return str(sys._getframe(2).f_globals.get("__name__", ""))  # noqa: SLF001 - as logging and dataclasses do


# --- OpenAPI ----------------------------------------------------------------------------------------------------------


class _Gate(NamedTuple):
    """What is known about a `LimitGate` before it is built."""

    tiers: tuple[Sequence[Rule], ...]
    """The rules of each tier; no tiers if it never refuses."""
    styles: Sequence[str]
    is_problem: bool
    """Whether a refusal's body is ours."""


_UNKNOWN = _Gate(((),), ("x-ratelimit",), is_problem=True)
_gates: WeakKeyDictionary[Any, _Gate] = WeakKeyDictionary()
"""What is known, by the entry in an application's list of middleware."""


def _documenting(get_path: Callable[..., Any]) -> Callable[..., Any]:
    """What makes the part of a document that is about one route, and adds the 429 if that is limited."""

    @functools.wraps(get_path)
    def get_openapi_path(*, route: Any, **given: Any) -> Any:
        operations, security, definitions = get_path(route=route, **given)
        for method, operation in operations.items():
            refused = _refused(route, method.upper())
            if refused is not None and "429" not in operation.setdefault("responses", {}):
                operation["responses"]["429"] = refused
                definitions |= {PROBLEM: PROBLEM_SCHEMA} if "content" in refused else {}
        return operations, security, definitions

    return get_openapi_path


def _refused(route: Any, method: str) -> dict[str, Any] | None:
    """The 429 of an operation, None if nothing limits it."""
    app = route.dependency_overrides_provider
    own = (*marks_of(effective(route.endpoint), method), *_rules_within(route.dependant))
    listed = Listed(
        route.path,
        tuple(filter(None, segments_of(route.path))),
        (method,),
        lambda _: own,
        lambda path: _takes(app, route, method, path),
    )
    limits = [(gate, _limiting(gate, listed, method)) for gate in _gates_of(app)]
    gates = [gate for gate, rules in limits if rules]
    if not gates:
        return None
    styles = dict.fromkeys(style for gate in gates for style in gate.styles)
    rules = [rule for _, rules in limits for rule in rules]
    return too_many_requests(styles, rules, is_problem=any(gate.is_problem for gate in gates))


def _limiting(gate: _Gate, listed: Listed, method: str) -> list[Rule]:
    """The rules, decorators and dependencies that may refuse a request to a route, in any tier."""
    found = [each.rule for of_tier in gate.tiers for each in applied(of_tier, listed, method)]
    return [rule for rule in found if rule != "exempt" and rule.per == "request" and not rule.exempt and not rule.shadow]


def _rules_within(dependant: Any) -> Iterator[Rule]:
    """The limits among all dependencies of a route."""
    for dependency in dependant.dependencies:
        if isinstance(dependency.call, RateLimit):
            yield dependency.call.rule
        yield from _rules_within(dependency)


def _takes(app: Any, route: Any, method: str, path: str) -> bool:
    """Whether the router takes this path to this route, and not to one that comes before it."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "path_params": {}, "headers": []}
    try:
        taker = next((other for other in flat(app.routes) if other.matches(dict(scope))[0] is Match.FULL), None)
    except Exception:  # noqa: BLE001 - a convertor that cannot read the path; the router will fail, too
        return False
    return bool(getattr(taker, "path", None) == route.path)


def _gates_of(app: Any) -> list[_Gate]:
    """The `LimitGate` around an application, or several; where none is known, one without rules."""
    entries = [entry for entry in getattr(app, "user_middleware", ()) if _is_gate(entry.cls)]
    for entry in entries:
        if entry not in _gates:
            _gates[entry] = _gate_with(entry.kwargs)
    return [_gates[entry] for entry in entries] or [_UNKNOWN]


def _is_gate(middleware: Any) -> bool:
    return isinstance(middleware, type) and issubclass(middleware, LimitGate)


def _gate_with(options: Mapping[str, Any]) -> _Gate:
    """The gate that there will be with these options. Mistakes in them are told when it is built."""
    try:
        settings = Settings(**options)
    except (ConfigError, TypeError):
        return _UNKNOWN
    if settings.shadow:
        return _Gate((), (), is_problem=False)
    return _Gate(_tiers(settings.rules), settings.headers, is_problem=settings.on_denied is None)


def _tiers(rules: object) -> tuple[Sequence[Rule], ...]:
    if isinstance(rules, Iterator):  # it can be read only once, and that is for the gate to do
        return _UNKNOWN.tiers
    try:
        return tuple(rules_of(rules).tiers.values())
    except ConfigError:
        return _UNKNOWN.tiers


setattr(generator, "get_openapi_path", _documenting(generator.get_openapi_path))  # noqa: B010 - mypy allows it like this only
