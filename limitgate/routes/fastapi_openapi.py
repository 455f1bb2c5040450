"""The 429 of limited operations in the OpenAPI documents of FastAPI, for applications that use LimitGate.

`document` switches it on: when `limitgate.fastapi` is imported, or when a `LimitGate` is built. Before an application has its
first request, its gates are not built yet, and what is known of them are their options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from fastapi import FastAPI
from fastapi.openapi import utils as generator
from starlette.routing import Match

from limitgate.errors import ConfigError
from limitgate.http.rate_fields import Style
from limitgate.routes.handlers import handler_of_refusals
from limitgate.routes.openapi import PROBLEM, PROBLEM_SCHEMA, too_many_requests
from limitgate.routes.overview import Listed, applied
from limitgate.routes.starlette import flat, segments_of
from limitgate.rules.decorators import effective, marks_of
from limitgate.rules.files import rules_of
from limitgate.rules.rule import Rule
from limitgate.rules.settings import GateSettings


class _Gate(NamedTuple):
    """Rules and body of a `LimitGate`."""

    tiers: tuple[Sequence[Rule], ...]
    """The rules of each tier; no tiers if it never refuses."""
    styles: Sequence[Style]
    is_problem: bool
    """True if a refusal has LimitGate's own body, not that of ``on_denied`` or of the application's handler."""


_UNKNOWN = _Gate(((),), ("x-ratelimit",), is_problem=True)
_gates: WeakKeyDictionary[Any, _Gate] = WeakKeyDictionary()
"""Gates by their entry in an application's list of middleware."""
_documented: WeakSet[Any] = WeakSet()
"""Applications that have asked for a document."""


@functools.cache
def document() -> None:
    """Have FastAPI document the 429 of limited operations, of applications that use LimitGate; others stay as they are."""
    documenting = _documenting(generator.get_openapi_path)
    setattr(generator, "get_openapi_path", documenting)  # noqa: B010 - mypy allows it like this only


def forget_documents() -> None:
    """Have applications make their documents anew when they are asked for next, as a gate has other rules."""
    for app in list(_documented):
        app.openapi_schema = None


def _documenting(get_path: Callable[..., Any]) -> Callable[..., Any]:
    """Add the 429 to the part of a document that is about one route, if that is limited."""

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
    if isinstance(app, FastAPI):
        _documented.add(app)
    own = (*marks_of(effective(route.endpoint), method), *rules_within(route.dependant))
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
    limiting = [rule for rule in found if rule != "exempt" and rule.per == "request" and rule.has_limits and rule.has_counts]
    return [rule for rule in limiting if not rule.shadow]


def rules_within(dependant: Any) -> Iterator[Rule]:
    """The limits among all dependencies of a route."""
    for dependency in dependant.dependencies:
        rule = getattr(dependency.call, "rule", None)
        if isinstance(rule, Rule):  # of a `RateLimit`
            yield rule
        yield from rules_within(dependency)


def _takes(app: Any, route: Any, method: str, path: str) -> bool:
    """True if the router leads this path to this route, and not to one before it."""
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
    gates = _with_present_rules([_gates[entry] for entry in entries], app) or [_UNKNOWN]
    answers_itself = handler_of_refusals(getattr(app, "exception_handlers", None)) is not None
    return [gate._replace(is_problem=False) for gate in gates] if answers_itself else gates


def _with_present_rules(gates: list[_Gate], app: Any) -> list[_Gate]:
    """The gates of an application, of which those that are built may have other rules by now."""
    built, layer = [], getattr(app, "middleware_stack", None)
    while layer is not None:
        if _is_gate(type(layer)):
            built.append(layer.gate)
        layer = getattr(layer, "app", None)
    if len(built) != len(gates):
        return gates
    return [
        gate if it is None or not gate.tiers else gate._replace(tiers=tuple(it.rules.rule_set.tiers.values()))
        for gate, it in zip(gates, built)
    ]


def _is_gate(middleware: Any) -> bool:
    """True for `LimitGate` and what is derived from it, told by the name of its module, which imports this one."""
    return isinstance(middleware, type) and any(base.__module__ == "limitgate.middleware" for base in middleware.__mro__)


def _gate_with(options: Mapping[str, Any]) -> _Gate:
    """Gate of these options. Mistakes in them are reported when it is built."""
    try:
        settings = GateSettings(**options)
    except (ConfigError, TypeError):
        return _UNKNOWN
    if settings.shadow:
        return _Gate((), (), is_problem=False)
    return _Gate(_tiers(settings.rules), settings.header_styles, is_problem=settings.on_denied is None)


def _tiers(rules: object) -> tuple[Sequence[Rule], ...]:
    if isinstance(rules, Iterator):  # it can be read only once, and that is for the gate to do
        return _UNKNOWN.tiers
    try:
        return tuple(rules_of(rules).tiers.values())
    except ConfigError:
        return _UNKNOWN.tiers
