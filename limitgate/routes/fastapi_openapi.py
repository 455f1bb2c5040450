"""Documents the 429 of limited operations in FastAPI's OpenAPI.

Importing `limitgate.fastapi` or creating a `LimitGate` enables this. Before the first request, options come from the middleware
list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from fastapi import FastAPI
from fastapi.openapi import utils as generator
from starlette.routing import Match

from limitgate.errors import ConfigError
from limitgate.http.rate_fields import PROVIDERS, Renamed, Style
from limitgate.limits.limit import SECONDS
from limitgate.routes import handler_of_refusals
from limitgate.routes.overview import Listed, applied
from limitgate.routes.starlette import flat, rules_within, segments_of
from limitgate.rules.decorators import effective, marks_of
from limitgate.rules.files import rules_of
from limitgate.rules.rule import Rule
from limitgate.rules.settings import GateSettings


class _Gate(NamedTuple):
    tiers: tuple[Sequence[Rule], ...]
    """Rules of each tier; empty if the gate never refuses."""
    styles: Sequence[Style]
    is_problem: bool
    """False if the application makes the body."""


_UNKNOWN = _Gate(((),), ("x-ratelimit",), is_problem=True)
_gates: WeakKeyDictionary[Any, _Gate] = WeakKeyDictionary()
"""Gates by entry in the middleware list."""
_documented: WeakSet[Any] = WeakSet()


@functools.cache
def document() -> None:
    documenting = _documenting(generator.get_openapi_path)
    setattr(generator, "get_openapi_path", documenting)  # noqa: B010 - mypy allows it like this only


def forget_documents() -> None:
    for app in list(_documented):
        app.openapi_schema = None


def _documenting(get_path: Callable[..., Any]) -> Callable[..., Any]:
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
    found = [each.rule for of_tier in gate.tiers for each in applied(of_tier, listed, method)]
    limiting = [rule for rule in found if rule != "exempt" and rule.per == "request" and rule.has_limits and rule.has_counts]
    return [rule for rule in limiting if not rule.shadow]


def _takes(app: Any, route: Any, method: str, path: str) -> bool:
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "path_params": {}, "headers": []}
    try:
        taker = next((other for other in flat(app.routes) if other.matches(dict(scope))[0] is Match.FULL), None)
    except Exception:  # noqa: BLE001 - a convertor fails, as it will in the router
        return False
    return bool(getattr(taker, "path", None) == route.path)


def _gates_of(app: Any) -> list[_Gate]:
    entries = [entry for entry in getattr(app, "user_middleware", ()) if _is_gate(entry.cls)]
    for entry in entries:
        if entry not in _gates:
            _gates[entry] = _gate_with(entry.kwargs)
    gates = _with_present_rules([_gates[entry] for entry in entries], app) or [_UNKNOWN]
    answers_itself = handler_of_refusals(getattr(app, "exception_handlers", None)) is not None
    return [gate._replace(is_problem=False) for gate in gates] if answers_itself else gates


def _with_present_rules(gates: list[_Gate], app: Any) -> list[_Gate]:
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
    """True for a gate, by its module, because importing the class would be circular."""
    return isinstance(middleware, type) and any(base.__module__ == "limitgate.middleware" for base in middleware.__mro__)


def _gate_with(options: Mapping[str, Any]) -> _Gate:
    try:
        settings = GateSettings(**options)
    except (ConfigError, TypeError):
        return _UNKNOWN
    if settings.shadow:
        return _Gate((), (), is_problem=False)
    return _Gate(_tiers(settings.rules), settings.header_styles, is_problem=settings.on_denied is None)


def _tiers(rules: object) -> tuple[Sequence[Rule], ...]:
    if isinstance(rules, Iterator):  # only the gate may consume it
        return _UNKNOWN.tiers
    try:
        return tuple(rules_of(rules).tiers.values())
    except ConfigError:
        return _UNKNOWN.tiers


PROBLEM = "LimitGateProblem"
PROBLEM_SCHEMA: dict[str, Any] = {
    "title": PROBLEM,
    "description": "A refusal by a rate limit, as a problem of RFC 9457.",
    "type": "object",
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string", "format": "uri", "description": "The id of this refusal, for questions about it."},
        "violated-policies": {"type": "array", "items": {"type": "string"}, "description": "The limits that refused."},
    },
    "required": ["type", "title", "status", "detail", "instance", "violated-policies"],
}

Headers = dict[str, dict[str, Any]]


def too_many_requests(styles: Iterable[Style], rules: Sequence[Rule], *, is_problem: bool) -> dict[str, Any]:
    """Return the documentation of a 429. With ``is_problem``, `PROBLEM_SCHEMA` describes the body."""
    wait = "Seconds after which the request is admitted, unless another request uses the same limit in the meantime."
    headers = {"Retry-After": _header(wait, type="integer", minimum=1)}
    for style in styles:
        own, names = (style.style, dict(style.names)) if isinstance(style, Renamed) else (style, {})
        headers |= {names.get(name, name): header for name, header in _STYLES[own](rules).items()}
    response: dict[str, Any] = {"description": "Too Many Requests", "headers": headers}
    if is_problem:
        response["content"] = {"application/problem+json": {"schema": {"$ref": f"#/components/schemas/{PROBLEM}"}}}
    return response


def _x_ratelimit(_: Sequence[Rule]) -> Headers:
    return {
        "X-RateLimit-Limit": _count("Requests that can be sent at once."),
        "X-RateLimit-Remaining": _count("Requests that can still be sent now."),
        "X-RateLimit-Reset": _count("Unix time in seconds at which the limit is fully available again."),
    }


def _x_ratelimit_windows(rules: Sequence[Rule]) -> Headers:
    limited = {limit.unit for rule in rules for limit in rule.every_limit}
    headers: Headers = {}
    for unit in [unit for unit in SECONDS if unit in limited]:
        headers[f"X-RateLimit-Limit-{unit.title()}"] = _count(f"Requests that can be sent at once under the limit per {unit}.")
        headers[f"X-RateLimit-Remaining-{unit.title()}"] = _count(
            f"Requests that can still be sent now under the limit per {unit}."
        )
    return headers


def _draft_11(_: Sequence[Rule]) -> Headers:
    return {
        "RateLimit-Policy": _header("The limits: q requests in w seconds each.", type="string"),
        "RateLimit": _header("State of each limit: r requests remain, t seconds until there are more.", type="string"),
    }


def _of_provider(style: str, rules: Sequence[Rule]) -> Headers:
    units = {unit for rule in rules for unit in rule.bucket_units}
    headers: Headers = {}
    for unit, (limit, remaining, reset) in PROVIDERS[style][0].items():
        if unit in units:
            counted = unit.replace("_", " ")
            headers[limit] = _count(f"{counted} that can be sent at once.")
            headers[remaining] = _count(f"{counted} that can still be sent now.")
            headers[reset] = _header(f"Time at which all {counted} can be sent again.", type="string")
    return headers


_STYLES: dict[str, Callable[[Sequence[Rule]], Headers]] = {
    "x-ratelimit": _x_ratelimit,
    "x-ratelimit-windows": _x_ratelimit_windows,
    "draft-11": _draft_11,
    **{style: partial(_of_provider, style) for style in PROVIDERS},
}


def _count(description: str) -> dict[str, Any]:
    return _header(description, type="integer", minimum=0)


def _header(description: str, **schema: Any) -> dict[str, Any]:
    return {"description": description, "schema": schema}
