"""FastAPI: limits as dependencies, and limits in the OpenAPI document.

A dependency runs after those that it depends on, so it can limit by what they have found out, such as the authenticated user.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import Depends, FastAPI, HTTPException
from starlette.requests import HTTPConnection

from limitgate.decision import Decision, RateLimited
from limitgate.decorators import effective, marks_of, place_named, without_a_gate
from limitgate.keys import told_apart
from limitgate.limits import Limit
from limitgate.routes.starlette import flat
from limitgate.rules import ChargeIf, Cost, OnError, Rule
from limitgate.visit import VISIT, Visit

Part = str | Callable[..., Any]
"""A part of a key: one that rules know, too, or a dependency."""

_NOT_THERE = object()


class Refused(HTTPException, RateLimited):
    """A request was refused by a dependency. `LimitGate` answers it as it answers all others."""

    def __init__(self, visit: Visit, decision: Decision) -> None:
        refusal = visit.refusal
        status, headers = (refusal.status, dict(refusal.waiting)) if refusal else (429, {})
        HTTPException.__init__(self, status, refusal.reason if refusal else None, headers)
        self.decision = decision


class RateLimit:
    """A limit as a dependency: ``Depends(RateLimit("10/minute", key=[current_user]))``.

    Takes what `limitgate.limit` takes. A part of the ``key`` may be a dependency, too: what it gives tells the buckets apart,
    text, a number, a UUID or an object with an ``id``; None counts as absent. The limit belongs to the place where it is made:
    given to a router, all routes of that share it, unless the key has the part ``path``. All dependencies of a request and the
    rules of `LimitGate` are charged together or not at all: one that refuses gives back what others have taken before it.

    Gives the `Decision`, or None where LimitGate is switched off or the route exempt. Works on WebSocket routes, too. Raises
    `ConfigError` like `Rule`, and when it runs without a `LimitGate` around the application.
    """

    def __init__(
        self,
        *limits: Limit | str,
        name: str | None = None,
        qps: int | None = None,
        qpm: int | None = None,
        qph: int | None = None,
        qpd: int | None = None,
        key: Iterable[Part] = ("ip",),
        methods: Iterable[str] | None = None,
        cost: Cost = 1,
        on_error: OnError | None = None,
        shadow: bool = False,
        charge_if: ChargeIf | Mapping[str, Iterable[int | str]] | None = None,
    ) -> None:
        parts = [key] if isinstance(key, str) else list(key)
        asked = [part for part in parts if callable(part)]
        named = [part for part in parts if not callable(part)]
        options: dict[str, Any] = {"qps": qps, "qpm": qpm, "qph": qph, "qpd": qpd, "on_error": on_error, "shadow": shadow}
        options |= {"methods": methods, "charge_if": charge_if} | ({} if cost == 1 else {"cost": cost})
        if named or not asked:
            options["key"] = key if isinstance(key, str) else named
        else:
            options["key"] = ("global",)
        self.rule = Rule(name or place_named(f"{_module_of_caller()}.RateLimit"), *limits, **options)
        self._parts = {f"part_{place}": part for place, part in enumerate(asked)}
        self.__signature__ = _signature(self._parts)

    async def __call__(self, connection: HTTPConnection, **given: Any) -> Decision | None:
        """Weigh the limit for the request at hand."""
        visit: Any = connection.scope.get(VISIT, _NOT_THERE)
        if visit is _NOT_THERE:
            without_a_gate(self.rule)
            return None
        if visit is None:
            return None
        values = [(_name_of(part), told_apart(given[name], _name_of(part))) for name, part in self._parts.items()]
        decision: Decision | None = await visit.gate.afurther(visit, [(self.rule, values)])
        connection.scope["limitgate"] = decision
        if visit.refusal is not None and decision is not None:
            raise Refused(visit, decision)
        return decision


def _signature(parts: Mapping[str, Callable[..., Any]]) -> inspect.Signature:
    """What FastAPI reads from a dependency: the connection, and further dependencies."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    wanted = [inspect.Parameter(name, keyword, default=Depends(part)) for name, part in parts.items()]
    first = inspect.Parameter("connection", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=HTTPConnection)
    return inspect.Signature([first, *wanted])


def _name_of(part: Callable[..., Any]) -> str:
    return getattr(part, "__qualname__", type(part).__qualname__)


def _module_of_caller() -> str:
    return str(sys._getframe(2).f_globals.get("__name__", ""))  # noqa: SLF001 - as logging and dataclasses do


# --- OpenAPI ----------------------------------------------------------------------------------------------------------

_generate = FastAPI.openapi
_documented: WeakKeyDictionary[FastAPI, dict[str, Any]] = WeakKeyDictionary()
_PROBLEM = "RateLimitProblem"


@functools.wraps(_generate)
def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application, in which limited routes have a 429."""
    document = _generate(app)
    if _documented.get(app) is not document:
        _documented[app] = document
        for operation in _limited_operations(app, document.get("paths", {})):
            operation.setdefault("responses", {}).setdefault("429", _REFUSED)
            document.setdefault("components", {}).setdefault("schemas", {}).setdefault(_PROBLEM, _PROBLEM_SCHEMA)
    return document


def _limited_operations(app: FastAPI, paths: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The operations of all routes that have limits of their own."""
    for route in flat(app.routes):
        for method in getattr(route, "methods", None) or ():
            operation = paths.get(getattr(route, "path_format", ""), {}).get(method.lower())
            if operation is not None and _is_limited(route, method):
                yield operation


def _is_limited(route: Any, method: str) -> bool:
    marks = marks_of(effective(route.endpoint), method)
    rules = [*(mark for mark in marks if isinstance(mark, Rule)), *_rules_within(getattr(route, "dependant", None))]
    return "exempt" not in marks and any(rule.applies_to(method) for rule in rules)


def _rules_within(dependant: Any) -> Iterator[Rule]:
    """The limits among all dependencies of a route."""
    for dependency in getattr(dependant, "dependencies", ()):
        if isinstance(dependency.call, RateLimit):
            yield dependency.call.rule
        yield from _rules_within(dependency)


def _header(description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "integer", "minimum": 0}}


_REFUSED = {
    "description": "Too Many Requests",
    "headers": {
        "Retry-After": _header("Seconds after which the request will be admitted, if nobody else uses the same limit."),
        "X-RateLimit-Limit": _header("How many requests may come at once."),
        "X-RateLimit-Remaining": _header("How many more may come now."),
        "X-RateLimit-Reset": _header("When all of them may come again, as Unix time."),
    },
    "content": {"application/problem+json": {"schema": {"$ref": f"#/components/schemas/{_PROBLEM}"}}},
}
_PROBLEM_SCHEMA = {
    "title": _PROBLEM,
    "description": "A refusal by a rate limit, as a problem of RFC 9457.",
    "type": "object",
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "violated-policies": {"type": "array", "items": {"type": "string"}, "description": "The limits that refused."},
    },
    "required": ["type", "title", "status", "detail", "violated-policies"],
}

setattr(FastAPI, "openapi", _openapi)  # noqa: B010 - mypy allows it like this only. So that nobody has to ask for it
