"""``@limit`` and ``@exempt``: limits declared beside the code.

A decorator marks its endpoint. The gate decides on marks together with rules. Without a gate, the endpoint raises
`ConfigError`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Container
from contextlib import suppress
from contextvars import ContextVar
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal, NoReturn, TypeVar, Unpack, cast

from limitgate.errors import ConfigError
from limitgate.limits.limit import limit_of_rule
from limitgate.limits.plan import NO_COST, own_cost
from limitgate.process import switch
from limitgate.process.callables import is_async
from limitgate.rules.options import (
    AnyLimit,
    LimitOptions,
    check_names,
    check_takes_request,
    gives_limits,
    show_options,
)
from limitgate.rules.rule import DEFAULTS, Rule

F = TypeVar("F", bound=Callable[..., Any])
Mark = Rule | Literal["exempt"]

_MARKS = "__limitgate_marks__"
_OUTER = "__limitgate_outer__"
"""Attribute of a function, with the outermost wrapper."""
_STACKED = "__limitgate_stacked__"
"""Attribute of a wrapper. True if only decorators below it refer to the function."""
_ROUTED = "__limitgate_routed__"
"""Attribute of a wrapper. True if an application routes to it."""
_DISPATCHERS = ("dispatch", "dispatch_request")
_CONNECTS = "on_connect"
"""Method of Starlette's class-based endpoints."""

decided_marks: ContextVar[Container[Mark] | None] = ContextVar("limitgate_decided_marks", default=None)
"""Marks that a gate decided for this request; None outside of requests."""
notes_none: bool = False
"""Off by default, because noting costs as much as a key."""


def note_none() -> None:
    """Set `decided_marks` for all requests from now on."""
    global notes_none  # noqa: PLW0603 - affects every request
    notes_none = True


_PARENTHESES = "@limit takes limits in parentheses: @limit('5/minute')"

_NO_ENDPOINT: Any = object()

_places: Counter[str] = Counter()
_LONGEST = 40


class _Everything:
    def __contains__(self, mark: object) -> bool:
        return True


EVERYTHING: Container[Mark] = _Everything()


def limit(*limits: AnyLimit, name: str | None = None, **options: Unpack[LimitOptions]) -> Callable[[F], F]:
    """Limit an endpoint: a Starlette, FastAPI, Flask or Django view, a class-based view, or one of its methods.

    Takes the arguments of `Rule`. You can use it several times on an endpoint. Without ``name``, each endpoint has its own
    limit, such as ``login-3f9ac1``. Endpoints with the same name share a limit. Raises `ConfigError` like `Rule`; without a
    gate, so does the endpoint.
    """
    check_names("limit", options, LimitOptions)
    for given in filter(gives_limits, limits):
        try:
            check_takes_request(given)
        except ConfigError as error:
            raise ConfigError(f"@limit: {error}, or a limit; {_PARENTHESES}") from error
    parsed = tuple(limit if gives_limits(limit) else _parsed(limit) for limit in limits)

    def decorate(endpoint: F) -> F:
        _check_is_real(endpoint)
        rule = Rule(place_named(*_place_of(endpoint)) if name is None else name, *parsed, **options).placed()
        if any(isinstance(mark, Rule) and mark.name == rule.name for mark in _marks_within(endpoint)):
            raise ConfigError(f"limit {rule.name!r} is on {_name_of(endpoint)} twice, expected different names")
        guarded: F = _guarded(endpoint, rule)
        return guarded

    decorate.__annotations__["endpoint"] = _Endpoint
    return decorate


def _parsed(value: Any) -> Any:
    limit, cost = own_cost(value)
    return limit_of_rule(limit) if cost is NO_COST else (limit_of_rule(limit), cost)


class _Endpoint:
    """Signature of an endpoint. FastAPI then reports ``Depends(limit(...))``."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> NoReturn:
        raise ConfigError("@limit is a decorator, not a dependency, expected Depends(RateLimit(...)) of limitgate.fastapi")


show_options(limit, LimitOptions, DEFAULTS)


def exempt(endpoint: F = _NO_ENDPOINT) -> F:
    """Exempt an endpoint from every rule: no decision, no headers, no charge. Use it without parentheses.

    Covers routes to ``exempt(endpoint)``, but not routes to the undecorated endpoint, or subclasses. Place it below the route
    decorator.
    """
    if endpoint is _NO_ENDPOINT:
        raise ConfigError("@exempt takes no parentheses, expected @exempt on a line above the endpoint")
    _check_is_real(endpoint)
    twin = _twin(endpoint)
    _mark(twin, "exempt")
    if _is_being_defined(endpoint):
        _note_outer(endpoint, twin)
    return cast("F", twin)


def _twin(endpoint: Any) -> Any:
    if inspect.isclass(endpoint):
        names = ("__module__", "__qualname__", "__doc__")
        kind: Any = type(endpoint)
        return kind(endpoint.__name__, (endpoint,), {name: getattr(endpoint, name) for name in names})
    if not inspect.isfunction(endpoint):
        return _named_like(functools.update_wrapper(functools.partial(endpoint), endpoint), endpoint)
    code, arguments = endpoint.__code__, endpoint.__defaults__
    copied = FunctionType(code, endpoint.__globals__, endpoint.__name__, arguments, endpoint.__closure__)
    copied.__kwdefaults__ = endpoint.__kwdefaults__
    return _without_notes(functools.update_wrapper(copied, endpoint))


def marks_of(endpoint: Any, method: str = "") -> tuple[Mark, ...]:
    """Marks on an endpoint, and on a class-based one's handler of ``method`` (as sent)."""
    marks = _marks_behind(endpoint)
    while isinstance(endpoint, functools.partial):
        endpoint = endpoint.func
    view_class = class_of(endpoint)
    if inspect.isclass(view_class):
        marks += _marks_on(view_class) if view_class is not endpoint else ()
        for name in (*_DISPATCHERS, _handler_of(endpoint, view_class, method) if method else _CONNECTS):
            marks += _marks_behind(getattr(view_class, name, None))
    # Django's views also have the attributes of ``dispatch``.
    return tuple({id(mark): mark for mark in marks}.values())


def _marks_behind(endpoint: Any) -> tuple[Mark, ...]:
    """Return marks behind a wrapper.

    Without `functools.wraps`, any callable in the wrapper may run. So all limits apply, but no exemption.
    """
    marks = list(_marks_on(endpoint))
    waiting, seen = [(endpoint, True)], {id(endpoint)}
    for wrapper, is_only in waiting:
        kept = _kept_by(wrapper)
        for each in [each for each in kept if id(each) not in seen]:
            seen.add(id(each))
            is_sure = is_only and len(kept) == 1
            marks += [mark for mark in _marks_on(each) if is_sure or mark != "exempt"]
            waiting.append((each, is_sure))
    return tuple(marks)


def _kept_by(endpoint: Any) -> list[Any]:
    """Return what an object wraps: ``__call__``, or else the only callable attribute with marks."""
    if isinstance(endpoint, functools.partial):
        return [endpoint.func]
    function = endpoint.__func__ if type(endpoint) is MethodType else endpoint
    if type(function) is FunctionType:
        code, cells = function.__code__, function.__closure__ or ()
        names = _arguments_kept(code, function.__globals__.get("__name__", "")) if cells else ()
        values = [_value_in(cell) for name, cell in zip(code.co_freevars, cells) if name in names]
        return [value for value in values if _is_callable(value)]
    if not _is_callable(endpoint):
        return []
    call = type(endpoint).__call__
    attributes = [value for value in getattr(endpoint, "__dict__", {}).values() if _is_callable(value)]
    return attributes if len(attributes) == 1 and not _marks_behind(call) else [call]


def _value_in(cell: Any) -> Any:
    with suppress(ValueError):  # the cell is empty
        return cell.cell_contents
    return None


def _is_callable(value: Any) -> bool:
    """True for a callable. Looks only at the type, because a proxy may run code."""
    kind = type(value)
    if issubclass(kind, FunctionType | MethodType | functools.partial):
        return True
    return not issubclass(kind, type) and type(getattr(kind, "__call__", None)) is FunctionType  # noqa: B004 - the attribute of instances


@functools.lru_cache(maxsize=1024)
def _arguments_kept(code: CodeType, module: str) -> frozenset[str]:
    """Return the arguments in a closure, such as those of a decorator, but not views of a factory."""
    outermost: Any = sys.modules.get(module)
    for part in code.co_qualname.partition(".<locals>")[0].split("."):
        outermost = getattr(outermost, part, None)
    with suppress(ValueError):  # a function that wraps itself
        outermost = inspect.unwrap(outermost)
    around = _codes_around(code, outermost.__code__) if type(outermost) is FunctionType else []
    homes = {name: each for name in code.co_freevars for each in around if name in each.co_cellvars}
    taken = {name: home.co_varnames[: home.co_argcount + home.co_kwonlyargcount] for name, home in homes.items()}
    return frozenset([name for name, arguments in taken.items() if name in arguments])


def _codes_around(code: CodeType, outermost: CodeType) -> list[CodeType]:
    for each in outermost.co_consts:
        if each is code:
            return [outermost]
        if isinstance(each, CodeType) and (found := _codes_around(code, each)):
            return [outermost, *found]
    return []


def _marks_on(endpoint: Any) -> tuple[Mark, ...]:
    """Return the marks on an endpoint. Subclasses inherit limits, but not exemptions."""
    marks: tuple[Mark, ...] = getattr(endpoint, _MARKS, ())
    if inspect.isclass(endpoint) and "exempt" not in vars(endpoint).get(_MARKS, ()):
        return tuple([mark for mark in marks if mark != "exempt"])
    return marks


def class_of(endpoint: Any) -> Any:
    """Return the class of a Flask, Django or REST framework view, or the endpoint."""
    if not inspect.isclass(endpoint):
        for name in ("view_class", "cls"):
            if inspect.isclass(view_class := getattr(endpoint, name, None)):
                return view_class
    return endpoint


def _handler_of(endpoint: Any, view_class: type, method: str) -> str:
    """Return a view's handler of a method. View sets of REST framework have ``actions``."""
    actions = getattr(endpoint, "actions", None)
    named = actions if endpoint is not view_class and isinstance(actions, dict) else {}
    name = method.lower()
    if name == "head" and name not in named and not hasattr(view_class, name):
        name = "get"
    handler: str = named.get(name, name)
    return handler


def has_marks(endpoint: Any) -> bool:
    return bool(_marks_within(endpoint))


def limits_on(endpoint: Any) -> list[Rule]:
    return list({id(mark): mark for mark in _marks_within(endpoint) if isinstance(mark, Rule)}.values())


def _marks_within(endpoint: Any) -> list[Mark]:
    view_class = class_of(endpoint)
    names = dir(view_class) if inspect.isclass(view_class) else ()
    methods = [getattr(view_class, name, None) for name in names]
    return [*marks_of(endpoint), *(mark for method in methods for mark in _marks_behind(method))]


def note_routed(endpoint: Any) -> None:
    """Note that an application routes to this endpoint, and to the functions that it wraps."""
    function = getattr(endpoint, "__func__", endpoint)
    while function is not None and not inspect.isclass(function):
        if _MARKS in getattr(function, "__dict__", ()):
            setattr(function, _ROUTED, True)
        function = getattr(function, "__wrapped__", None)


def effective(endpoint: Any) -> Any:
    """Return the endpoint with the decorators above it, unless an application also routes to that wrapper.

    A limit between two route decorators applies to both if nothing else refers to the endpoint.
    """
    function = getattr(endpoint, "__func__", endpoint)
    below = made = function
    while (outer := getattr(made, "__dict__", {}).get(_OUTER)) is not None:
        if below is made and hasattr(outer, _STACKED) and "exempt" not in getattr(outer, _MARKS, ()):
            below = outer
        made = outer
    meant = below if hasattr(made, _ROUTED) else made
    return endpoint if meant is function else meant


def _is_being_defined(endpoint: Any) -> bool:
    """True if the module doesn't have the endpoint yet, so that only decorators above can refer to it."""
    name = getattr(endpoint, "__qualname__", "<object>")
    if "<" in name:  # defined in a function, or a lambda
        return False
    value: Any = sys.modules.get(getattr(endpoint, "__module__", None) or "")
    for part in name.split("."):
        value = getattr(value, part, None)
    return value is not endpoint


def _note_outer(endpoint: Any, made: Any) -> None:
    if inspect.isfunction(endpoint):
        if _is_being_defined(endpoint):
            setattr(made, _STACKED, True)
        setattr(endpoint, _OUTER, made)


def _without_notes(made: F) -> F:
    for note in (_OUTER, _STACKED, _ROUTED):
        vars(made).pop(note, None)
    return made


def _guarded(endpoint: Any, rule: Rule) -> Any:
    """Objects stay objects, because Starlette treats functions differently."""
    if inspect.isclass(endpoint):
        dispatchers = [name for name in _DISPATCHERS if hasattr(endpoint, name)]
        if not dispatchers:
            raise ConfigError(f"{_name_of(endpoint)} is not a class-based endpoint, expected one or a function")
        for name in dispatchers:
            setattr(endpoint, name, _guard(getattr(endpoint, name), rule))
        _mark(endpoint, rule)
        return endpoint
    guard = _guard(endpoint, rule)
    if not isinstance(endpoint, FunctionType | MethodType | functools.partial):
        guard = type(type(endpoint).__name__, (_Called,), {"__call__": staticmethod(guard)})(endpoint)
    _mark(guard, rule)
    _note_outer(endpoint, guard)
    return guard


class _Called:
    def __init__(self, called: Any) -> None:
        self.__wrapped__ = called

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # a copy without attributes yet
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)


def _named_like(made: Any, endpoint: Any) -> Any:
    """Copy the endpoint's name, because frameworks name routes by endpoints."""
    function = endpoint
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(endpoint, "__name__"):
        made.__name__ = getattr(function, "__name__", type(function).__name__)
    return made


def _guard(function: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    def guard(*args: Any, **kwargs: Any) -> Any:
        _check(rule)
        return function(*args, **kwargs)

    async def aguard(*args: Any, **kwargs: Any) -> Any:
        _check(rule)
        return await function(*args, **kwargs)

    made: Callable[..., Any] = _named_like(functools.wraps(function)(aguard if is_async(function) else guard), function)
    return _without_notes(made)


def _check(rule: Rule) -> None:
    decided = decided_marks.get()
    if decided is None or rule not in decided:
        without_a_gate(rule)


def without_a_gate(rule: Rule) -> None:
    """Raise `ConfigError`, unless LimitGate is disabled."""
    if switch.null_store is not None:
        return
    from limitgate.rules.settings import GateSettings  # noqa: PLC0415 - needed for errors only

    if GateSettings().enabled:
        raise ConfigError(
            f"{rule.name} is limited, but no LimitGate has checked this request; expected "
            "app.add_middleware(LimitGate, rules=...) or LimitGateWSGI around the application that routes to it, in Flask "
            "limitgate.flask.LimitGate(app), in Django 'limitgate.django.LimitGateMiddleware' in MIDDLEWARE; "
            "if LimitGate is there, functools.wraps in the decorators above @limit, so that LimitGate finds it; "
            "for a function that is not an endpoint, Limiter.limited"
        )


def _check_is_real(endpoint: Any) -> None:
    """Raise an error for ``@limit`` without parentheses, which takes the endpoint for a limit."""
    if not inspect.isclass(endpoint) and any(hasattr(endpoint, name) for name in ("routes", "add_url_rule")):
        raise ConfigError(
            f"{type(endpoint).__qualname__} has routes and is not an endpoint, expected a rule with their path, such as "
            "/shop/**, or in FastAPI dependencies=[Depends(RateLimit(...))]"
        )
    if not callable(endpoint):
        raise ConfigError(f"a {type(endpoint).__qualname__} is not an endpoint, expected a function or class; {_PARENTHESES}")
    if getattr(endpoint, "__module__", None) == "django.utils.decorators":
        raise ConfigError(
            "method_decorator cannot apply @limit or @exempt, expected them without it: directly on the method or on the class"
        )


def _mark(endpoint: Any, mark: Mark) -> None:
    setattr(endpoint, _MARKS, (*_marks_on(endpoint), mark))


def _name_of(endpoint: Any) -> str:
    return ".".join(_place_of(endpoint))


def _place_of(endpoint: Any) -> tuple[str, str]:
    function = inspect.unwrap(class_of(endpoint))
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    given = getattr(function, "__name__", "")
    # Class-based views and ``@api_view`` set the name after the function is made.
    if ".as_view." in name or not name.endswith(given):
        name = given
    return getattr(function, "__module__", None) or "", name.replace(".<locals>", "")


def place_named(module: str, name: str) -> str:
    """Return a name such as ``login-3f9ac1``: unique, and equal in all processes."""
    digits = hashlib.sha256(f"{module}.{name}".encode()).hexdigest()[:6]
    short = f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[-_LONGEST:].lstrip('._-') or 'limit'}-{digits}"
    _places[short] += 1
    return short if _places[short] == 1 else f"{short}-{_places[short]}"
