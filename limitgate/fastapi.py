"""FastAPI: limits as dependencies. Importing this documents limited routes, see `limitgate.routes.fastapi_openapi`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Unpack, get_origin

from limitgate.messages.text import extra

with extra("fastapi", "fastapi", "starlette"):
    from fastapi import HTTPException, params
    from starlette.requests import HTTPConnection, Request

from limitgate.errors import ConfigError
from limitgate.exchange.asgi import ReceiveBuffer, marked_as_coroutine
from limitgate.exchange.base import EXCHANGE, Exchange
from limitgate.gate.admission import Admission
from limitgate.http.body import FORMS, too_large
from limitgate.http.response import Refusal
from limitgate.keys import Value, value_of
from limitgate.limits.decision import Decision, RateLimited
from limitgate.messages.text import not_of
from limitgate.routes import fastapi_openapi
from limitgate.rules.decorators import decided_marks, note_none, place_named, without_a_gate
from limitgate.rules.options import AnyLimit, DependencyOptions, check_names, show_options
from limitgate.rules.rule import DEFAULTS, Rule

Part = str | Callable[..., Any] | params.Depends | UnionType
"""A name of a key part, or a dependency, which may be in ``Depends`` or ``Annotated``."""


class Refused(RateLimited, HTTPException):
    """A dependency refused the request.

    The application's handler for `RateLimited` or for the status answers, or else `LimitGate`.
    """

    def __init__(self, refusal: Refusal, decision: Decision) -> None:
        HTTPException.__init__(self, refusal.status, refusal.reason, dict(refusal.waiting))
        self.decision = decision
        self.response: Any = None
        self.refusal_id: str | None = refusal.id


note_none()


class RateLimit:
    """A limit as a dependency: ``Depends(RateLimit("10/minute", key=[current_user]))``.

    Takes the arguments of `limitgate.limit`, except ``adaptive``, ``per`` and ``replaces``. ``key`` may contain dependencies,
    whose results select the bucket: text, a number, a UUID, or an object, mapping or tuple with an id. None counts as absent.
    If a limit refuses, the others are refunded. Routes with the same `RateLimit` share it, unless ``key`` has ``path``. Works
    on WebSocket routes. The default ``name`` is stable.

    Returns the `Decision`, or None if LimitGate is off or the request exempt. Raises `ConfigError` for the errors of a `Rule`
    and without `LimitGate`, `TypeError` for results without an id.
    """

    def __init__(
        self,
        *limits: AnyLimit,
        name: str | None = None,
        key: Iterable[Part] = ("ip",),
        **options: Unpack[DependencyOptions],
    ) -> None:
        check_names("RateLimit.__init__", options, DependencyOptions)
        if decided_marks.get() is not None:
            message = "a RateLimit was created during a request, expected one for all requests, because each has its own bucket"
            raise ConfigError(message)
        named, dependencies = _taken_apart(key)
        rule = Rule("RateLimit" if name is None else name, *limits, key=named, **options)
        self._asks_user = rule.key_asks("user")
        self._names = {f"part_{place}": _name_of(dependency) for place, dependency in enumerate(dependencies)}
        if name is None:
            rule = rule.model_copy(update={"name": _default_name(_module_of_caller(), rule)})
        self.rule: Rule = rule.placed(tuple(self._names.values()))
        connection = inspect.Parameter("connection", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=HTTPConnection)
        parts = [_parameter(name, dependency) for name, dependency in zip(self._names, dependencies)]
        self.__signature__: inspect.Signature = inspect.Signature([connection, *parts])

    @property
    def dependency(self) -> NoReturn:
        """Raise `AttributeError`, because FastAPI reads this only if ``Depends`` is missing."""
        raise AttributeError(f"the dependencies contain {self.rule.name} itself, expected Depends(RateLimit(...))")

    @marked_as_coroutine
    def __call__(self, connection: HTTPConnection, **values: Any) -> Coroutine[Any, Any, Decision | None]:
        """Decide whether a request may pass. Raises `ConfigError` if used as a decorator."""
        if not isinstance(connection, HTTPConnection):
            raise ConfigError(
                "RateLimit is a dependency, not a decorator, expected dependencies=[Depends(RateLimit('5/minute'))] "
                "of the route, or @limit('5/minute') of limitgate"
            )
        return self._limit(connection, **values)

    async def _limit(self, connection: HTTPConnection, **values: Any) -> Decision | None:
        if EXCHANGE not in connection.scope:
            without_a_gate(self.rule)
        exchange: Exchange | None = connection.scope.get(EXCHANGE)
        if exchange is None:
            return None
        if len(values) < len(self._names):
            names = ", ".join(self._names.values())
            raise TypeError(
                f"{self.rule.name} was called without {names}, expected Depends(...), so that FastAPI provides them"
            )
        if not self._has_charged(exchange.open_admission()):
            parts = [value_of(values[part], name) for part, name in self._names.items()]
            request = exchange.open_admission().request
            if self.rule.reads_body and request is not None and isinstance(connection, Request):
                request.source = _source_of(connection)
            connection.scope["limitgate"] = await self._decide(exchange, parts, connection.scope)
        decision, refusal = exchange.decision, exchange.open_admission().refusal
        if refusal is not None and decision is not None:
            raise Refused(refusal, decision)
        return decision

    def _has_charged(self, admission: Admission) -> bool:
        """True if the limit was charged already, because FastAPI may call a dependency several times per request."""
        return any(
            compiled_rule.written is self.rule
            for charged in admission.charged
            for compiled_rule in charged.request_plan.compiled_rules
        )

    async def _decide(self, exchange: Exchange, values: Sequence[Value], scope: MutableMapping[str, Any]) -> Decision | None:
        if self._asks_user:  # the user from authentication inside the gate
            request = exchange.open_admission().request
            request.scope = {**(request.scope or {}), "user": scope.get("user")}
        return await exchange.afurther([(self.rule, values)])


show_options(RateLimit.__init__, DependencyOptions, DEFAULTS)


def _source_of(request: Request) -> Callable[[int], Awaitable[bytes]]:
    async def read(most: int) -> bytes:
        if hasattr(request, "_body"):
            data = await request.body()
            if len(data) > most:
                raise too_large(most)
            return data
        if request._stream_consumed:  # noqa: SLF001 - there is no public way
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() in FORMS:
                return b""
            raise RuntimeError("the body was read as a stream before a RateLimit needed it, expected await request.body()")
        buffer = ReceiveBuffer(request.receive)
        request._receive = buffer.receive  # noqa: SLF001 - as above
        return await buffer.read(most)

    return read


class _Given:
    """Type of a parameter without ``Depends``. Raises an error when pydantic asks for its schema."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> NoReturn:
        raise ConfigError("RateLimit is a dependency without its limits, expected Depends(RateLimit('5/minute'))")


def _note_on_limits(function: Any) -> None:
    shown = inspect.signature(function)
    parameters = [
        each.replace(annotation=Annotated[Any, _Given]) if each.name == "limits" else each for each in shown.parameters.values()
    ]
    function.__signature__ = shown.replace(parameters=parameters)


_note_on_limits(RateLimit.__init__)


def _taken_apart(key: Iterable[Part]) -> tuple[Iterable[str], list[Any]]:
    if callable(key) or isinstance(key, params.Depends):
        raise ConfigError(f"key is {key!r:.80}, expected a list, for example [current_user] or ['ip', 'path']")
    if isinstance(key, str):
        return key, []
    parts = list(key)
    dependencies = [part for part in parts if callable(part) or isinstance(part, params.Depends)]
    named: list[Any] = [part for part in parts if not callable(part) and not isinstance(part, params.Depends)]
    return (named if named or not dependencies else ("global",)), dependencies


def _check_takes_request(part: Any) -> None:
    """Raise an error for an unannotated ``request``, because FastAPI would read it from the query."""
    try:
        parameters = inspect.signature(_dependency(part)).parameters
    except (TypeError, ValueError):
        return
    request = parameters.get("request")
    if request is not None and request.annotation is request.default is inspect.Parameter.empty:
        raise ConfigError(
            f"key part {_name_of(part)}: its parameter request has no annotation, so FastAPI reads it from the query, "
            "expected a function (request: fastapi.Request)"
        )


def _parameter(name: str, part: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    _check_takes_request(part)
    if get_origin(part) is Annotated:
        if not _annotated_with(part):
            raise ConfigError(f"key part {part!r:.80} is not a dependency, expected Annotated[..., Depends(...)]")
        return inspect.Parameter(name, keyword, annotation=part)
    return inspect.Parameter(name, keyword, default=part if isinstance(part, params.Depends) else params.Depends(part))


def _annotated_with(part: Any) -> list[params.Depends]:
    return [each for each in getattr(part, "__metadata__", ()) if isinstance(each, params.Depends)]


def _dependency(part: Any) -> Any:
    for depends in [part] if isinstance(part, params.Depends) else _annotated_with(part):
        part = depends.dependency or getattr(part, "__origin__", part)
    return part


def _name_of(part: Any) -> str:
    part = _dependency(part)
    return getattr(part, "__qualname__", type(part).__qualname__)


def _default_name(module: str, rule: Rule) -> str:
    limits = [] if rule.limits_by is None else [getattr(rule.limits_by, "__name__", type(rule.limits_by).__name__)]
    limits += [str(limit).replace("/", "-per-").replace(" ", "-") for limit in rule.every_limit]
    limits += [f"cost-{cost}" for cost in rule.own_costs.values() if isinstance(cost, int)]
    return place_named(module, ".".join(limits))


def _module_of_caller() -> str:
    return str(sys._getframe(2).f_globals.get("__name__", ""))  # noqa: SLF001 - as logging and dataclasses do


fastapi_openapi.document()


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_of(
        __name__,
        {
            "FastAPILimiter": "app.add_middleware(LimitGate, rules=[...], store=...): from limitgate import LimitGate",
            "LimitGate": "from limitgate import LimitGate",
            "RateLimiter": "from limitgate.fastapi import RateLimit, whose limits are text: RateLimit('2 per 5 seconds')",
            "WebSocketRateLimiter": "@limit('2/second', per='message'): from limitgate import limit",
            "exempt": "from limitgate import exempt",
            "limit": "from limitgate import limit",
        },
    )
