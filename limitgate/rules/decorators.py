"""``@limit`` and ``@exempt``: limits written beside the code they are for.

A decorator only leaves a mark. The gate finds the marks of the endpoint that a request will reach and decides about them
together with the rules, before the body is read. The wrapper around the endpoint is a guard: it raises where no gate has
decided, so a limited route never runs unlimited in silence.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal, NoReturn, TypeVar, Unpack, cast

from limitgate.errors import ConfigError
from limitgate.limits.limit import Limit, limit_of_rule
from limitgate.process import switch
from limitgate.rules.options import (
    LimitOptions,
    LimitsBy,
    check_names,
    check_takes_request,
    gives_limits,
    is_async,
    show_options,
)
from limitgate.rules.rule import DEFAULTS, Rule

F = TypeVar("F", bound=Callable[..., Any])
Mark = Rule | Literal["exempt"]

_MARKS = "__limitgate_marks__"
_OUTER = "__limitgate_outer__"
"""On a function: its outermost wrapper by a decorator of ours."""
_STACKED = "__limitgate_stacked__"
"""On a wrapper: only decorators below ours can have the function that it wraps."""
_ROUTED = "__limitgate_routed__"
"""On a wrapper: some application routes to it."""
_DISPATCHERS = ("dispatch", "dispatch_request")
"""The methods through which class-based endpoints are run: Starlette's and Flask's."""
_CONNECTS = "on_connect"
"""The method of Starlette's class-based endpoints that each WebSocket comes by."""

decided_marks: ContextVar[Container[Mark] | None] = ContextVar("limitgate_decided_marks", default=None)
"""Marks that a gate has decided about for the request at hand; None outside of a request, and where there are none to note."""
notes_none = False
"""True if it is noted, too, that a request has no marks: to note them costs as much as a key."""


def note_none() -> None:
    """Have `decided_marks` noted for every request from now on, so that it is known whether one is under way."""
    global notes_none  # noqa: PLW0603 - whoever asks, asks for every request
    notes_none = True


_PARENTHESES = "@limit takes its limits in parentheses: @limit('5/minute')"

_NO_ENDPOINT: Any = object()
"""Stands where ``@exempt()`` is given no endpoint."""

_places: Counter[str] = Counter()
_LONGEST = 40
"""Characters of a place's own name in that of its limit."""


class _Everything:
    """Contains every mark: for requests that a gate lets through without a decision."""

    def __contains__(self, mark: object) -> bool:
        return True


EVERYTHING: Container[Mark] = _Everything()


def limit(*limits: Limit | str | LimitsBy, name: str | None = None, **options: Unpack[LimitOptions]) -> Callable[[F], F]:
    """Limit an endpoint: a Starlette, FastAPI, Flask or Django view, a class-based one or one of its methods.

    Takes what `Rule` takes, and stacks. Without a ``name`` each decorated place has one of its own, such as ``login-3f9ac1``,
    from its qualified name and a digest of its module; places that are given the same name share buckets and places in flight.
    Raises `ConfigError` like `Rule`, and the decorated endpoint raises it when it is called without a gate around it.
    """
    check_names("limit", options, LimitOptions)
    for given in limits:
        if gives_limits(given):
            _check_gives_limits(given)
    parsed = tuple(limit if gives_limits(limit) else limit_of_rule(limit) for limit in limits)

    def decorate(endpoint: F) -> F:
        _check_is_real(endpoint)
        rule = Rule(name or place_named(*_place_of(endpoint)), *parsed, **options).placed()
        if any(isinstance(mark, Rule) and mark.name == rule.name for mark in _marks_within(endpoint)):
            raise ConfigError(f"limit {rule.name!r} is on {_name_of(endpoint)} twice, expected different names")
        guarded: F = _guarded(endpoint, rule)
        return guarded

    decorate.__annotations__["endpoint"] = _Endpoint
    return decorate


class _Endpoint:
    """Annotation of the one parameter of a decorator, at run time: whoever makes a dependency of it has pydantic look here."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> NoReturn:
        raise ConfigError("@limit is a decorator and no dependency, expected Depends(RateLimit(...)) of limitgate.fastapi")


show_options(limit, LimitOptions, DEFAULTS)


def exempt(endpoint: F = _NO_ENDPOINT) -> F:
    """Switch off every rule for an endpoint: no decision, no headers, no charge. Takes no parentheses: ``@exempt``.

    It holds for what is routed as ``exempt(endpoint)``, not for other routes of the same endpoint, nor for subclasses of an
    exempt class. So it belongs below the route decorator; among other decorators its place does not matter.
    """
    if endpoint is _NO_ENDPOINT:
        raise ConfigError("@exempt takes no parentheses, expected @exempt alone, above the endpoint")
    _check_is_real(endpoint)
    twin = _twin(endpoint)
    _mark(twin, "exempt")
    if _is_being_defined(endpoint):
        _note_outer(endpoint, twin)
    return cast("F", twin)


def _twin(endpoint: Any) -> Any:
    """Another endpoint that does the same: a function for a function, a subclass for a class."""
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
    """The marks on an endpoint, and on the method of a class-based one that serves ``method``, given as sent."""
    marks = _marks_behind(endpoint)
    while isinstance(endpoint, functools.partial):
        endpoint = endpoint.func
    view_class = class_of(endpoint)
    if inspect.isclass(view_class):
        marks += _marks_on(view_class) if view_class is not endpoint else ()
        for name in (*_DISPATCHERS, _handler_of(endpoint, view_class, method) if method else _CONNECTS):
            marks += _marks_behind(getattr(view_class, name, None))
    return tuple({id(mark): mark for mark in marks}.values())  # Django's views have the attributes of ``dispatch``, too


def _marks_behind(endpoint: Any) -> tuple[Mark, ...]:
    """The marks on an endpoint, and on the callables that it calls, as far as these are known without a call.

    A wrapper without `functools.wraps` has no marks of its own. If it keeps several callables, any of them may run: their
    limits hold, but none of them exempts it.
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
    """The callables that an endpoint calls: those that a decorator was given to wrap.

    For an object: its ``__call__``, or without marks on that, the only callable among its attributes.
    """
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
    with suppress(ValueError):  # nothing is in it yet
        return cell.cell_contents
    return None


def _is_callable(value: Any) -> bool:
    """True for functions, methods, partial objects, and objects with a ``__call__`` in Python; asks no proxy what it is."""
    kind = type(value)
    if issubclass(kind, FunctionType | MethodType | functools.partial):
        return True
    return not issubclass(kind, type) and type(getattr(kind, "__call__", None)) is FunctionType  # noqa: B004 - that of its objects


@functools.lru_cache(maxsize=1024)
def _arguments_kept(code: CodeType, module: str) -> frozenset[str]:
    """The variables of a function's closure that are arguments of the function around it.

    A decorator keeps the endpoint that it wraps in such an argument. A view in an application factory may mention another view,
    but that is a local variable of the factory.
    """
    outermost: Any = sys.modules.get(module)
    for part in code.co_qualname.partition(".<locals>")[0].split("."):
        outermost = getattr(outermost, part, None)
    with suppress(ValueError):  # it is wrapped in itself
        outermost = inspect.unwrap(outermost)
    around = _codes_around(code, outermost.__code__) if type(outermost) is FunctionType else []
    homes = {name: each for name in code.co_freevars for each in around if name in each.co_cellvars}
    return frozenset([name for name, home in homes.items() if name in _arguments_of(home)])


def _arguments_of(code: CodeType) -> Sequence[str]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _codes_around(code: CodeType, outermost: CodeType) -> list[CodeType]:
    """The code of the functions around one, the outermost first; none if it is not within that."""
    for each in outermost.co_consts:
        if each is code:
            return [outermost]
        if isinstance(each, CodeType) and (found := _codes_around(code, each)):
            return [outermost, *found]
    return []


def _marks_on(endpoint: Any) -> tuple[Mark, ...]:
    """The marks on an endpoint itself; a class inherits limits, but not that it is exempt."""
    marks: tuple[Mark, ...] = getattr(endpoint, _MARKS, ())
    if inspect.isclass(endpoint) and "exempt" not in vars(endpoint).get(_MARKS, ()):
        return tuple([mark for mark in marks if mark != "exempt"])
    return marks


def class_of(endpoint: Any) -> Any:
    """The class of a class-based view: ``view_class`` to Flask and Django, ``cls`` to REST framework. Else the endpoint."""
    if not inspect.isclass(endpoint):
        for name in ("view_class", "cls"):
            if inspect.isclass(view_class := getattr(endpoint, name, None)):
                return view_class
    return endpoint


def _handler_of(endpoint: Any, view_class: type, method: str) -> str:
    """The name of the handler of ``method`` in a class; REST framework's view sets map one to the other by ``actions``."""
    actions = getattr(endpoint, "actions", None)
    named = actions if endpoint is not view_class and isinstance(actions, dict) else {}
    name = method.lower()
    if name == "head" and name not in named and not hasattr(view_class, name):
        name = "get"
    handler: str = named.get(name, name)
    return handler


def has_marks(endpoint: Any) -> bool:
    """True if an endpoint is marked, or any method of a class-based one."""
    return bool(_marks_within(endpoint))


def limits_on(endpoint: Any) -> list[Rule]:
    """The limits on an endpoint, and on all methods of a class-based one."""
    return list({id(mark): mark for mark in _marks_within(endpoint) if isinstance(mark, Rule)}.values())


def _marks_within(endpoint: Any) -> list[Mark]:
    """The marks on an endpoint, and on all methods of a class-based one."""
    view_class = class_of(endpoint)
    names = dir(view_class) if inspect.isclass(view_class) else ()
    methods = [getattr(view_class, name, None) for name in names]
    return [*marks_of(endpoint), *(mark for method in methods for mark in _marks_behind(method))]


def note_routed(endpoint: Any) -> None:
    """Note that an application routes to this endpoint, and so to the functions that it wraps."""
    function = getattr(endpoint, "__func__", endpoint)
    while function is not None and not inspect.isclass(function):
        if _MARKS in getattr(function, "__dict__", ()):
            setattr(function, _ROUTED, True)
        function = getattr(function, "__wrapped__", None)


def effective(endpoint: Any) -> Any:
    """The endpoint as it is meant: wrapped by our decorators above, if no application routes to that.

    A decorator that stands above the route decorator has made something that the route does not know of. A limit between two
    route decorators is meant for both routes, if it is certain that nobody else has the endpoint.
    """
    function = getattr(endpoint, "__func__", endpoint)
    below = made = function
    while (outer := getattr(made, "__dict__", {}).get(_OUTER)) is not None:
        if below is made and hasattr(outer, _STACKED) and not _is_exempt(outer):
            below = outer
        made = outer
    meant = below if hasattr(made, _ROUTED) else made
    return endpoint if meant is function else meant


def _is_exempt(made: Any) -> bool:
    return "exempt" in getattr(made, _MARKS, ())


def _is_being_defined(endpoint: Any) -> bool:
    """True if an endpoint of a module is not found there under its own name yet: only decorators above can have it.

    Of one that is defined in a function this cannot be known, so it is False.
    """
    name = getattr(endpoint, "__qualname__", "<object>")
    if "<" in name:  # within a function, or a lambda
        return False
    value: Any = sys.modules.get(getattr(endpoint, "__module__", None) or "")
    for part in name.split("."):
        value = getattr(value, part, None)
    return value is not endpoint


def _note_outer(endpoint: Any, made: Any) -> None:
    """Note on a function the endpoint that wraps it."""
    if inspect.isfunction(endpoint):
        if _is_being_defined(endpoint):
            setattr(made, _STACKED, True)
        setattr(endpoint, _OUTER, made)


def _without_notes(made: F) -> F:
    """A wrapper without the notes that are about the wrapped function alone."""
    for note in (_OUTER, _STACKED, _ROUTED):
        vars(made).pop(note, None)
    return made


def _guarded(endpoint: Any, rule: Rule) -> Any:
    """The endpoint with a guard around it and the mark upon it; the class itself for a class-based one.

    An object becomes an object, as Starlette takes functions for something else.
    """
    if inspect.isclass(endpoint):
        dispatchers = [name for name in _DISPATCHERS if hasattr(endpoint, name)]
        if not dispatchers:
            raise ConfigError(f"{_name_of(endpoint)} is no class-based endpoint, expected one or a function")
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
    """Base of objects that stand for another one, but for the way in which it is called."""

    def __init__(self, called: Any) -> None:
        self.__wrapped__ = called

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)


def _named_like(made: Any, endpoint: Any) -> Any:
    """What was made of an endpoint, named by what that calls if it has no name: frameworks call routes by it."""
    function = endpoint
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(endpoint, "__name__"):
        made.__name__ = getattr(function, "__name__", type(function).__name__)
    return made


def _guard(function: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """A function that first makes sure that a gate has decided about ``rule``; a generator function is called, not entered."""
    guard: Callable[..., Any]
    if is_async(function):

        async def guard(*args: Any, **kwargs: Any) -> Any:
            _check(rule)
            return await function(*args, **kwargs)

    else:

        def guard(*args: Any, **kwargs: Any) -> Any:
            _check(rule)
            return function(*args, **kwargs)

    named: Callable[..., Any] = _named_like(functools.wraps(function)(guard), function)
    return _without_notes(named)


def _check(rule: Rule) -> None:
    decided = decided_marks.get()
    if decided is None or rule not in decided:
        without_a_gate(rule)


def without_a_gate(rule: Rule) -> None:
    """Raise `ConfigError` for a limit that was reached without a gate around it, unless LimitGate is switched off."""
    if switch.null_store is None and _enabled():
        raise ConfigError(
            f"{rule.name} is limited, but no LimitGate has seen this request for it; expected "
            "app.add_middleware(LimitGate, rules=...) or LimitGateWSGI around the application that routes to it, in Flask "
            "limitgate.flask.LimitGate(app), in Django 'limitgate.django.LimitGateMiddleware' in MIDDLEWARE; "
            "if there is one, functools.wraps in the decorators above, so that it finds the limit; "
            "for a function that is no endpoint, Limiter.limited"
        )


def _enabled() -> bool:
    from limitgate.rules.settings import GateSettings  # noqa: PLC0415 - only here, where something is wrong or switched off

    return GateSettings().enabled


def _check_gives_limits(given: LimitsBy) -> None:
    """Raise `ConfigError` for a callable that cannot give limits: it may well be the endpoint, under ``@limit`` alone."""
    try:
        check_takes_request(given)
    except ConfigError as error:
        raise ConfigError(f"@limit: {error}, or a limit; {_PARENTHESES}") from error


def _check_is_real(endpoint: Any) -> None:
    """Raise `ConfigError` for what is no endpoint, and for what Django's ``method_decorator`` decorates for each request.

    Without parentheses ``@limit`` has taken the endpoint for its limits, and is given the first request to decorate.
    """
    if not inspect.isclass(endpoint) and any(hasattr(endpoint, name) for name in ("routes", "add_url_rule")):
        raise ConfigError(
            f"{type(endpoint).__qualname__} has routes and is no endpoint, expected a rule with their path, such as /shop/**, "
            "or in FastAPI dependencies=[Depends(RateLimit(...))]"
        )
    if not callable(endpoint):
        raise ConfigError(f"a {type(endpoint).__qualname__} is no endpoint, expected a function or class; {_PARENTHESES}")
    if getattr(endpoint, "__module__", None) == "django.utils.decorators":
        raise ConfigError(
            "method_decorator cannot apply @limit or @exempt, expected them without it: directly on the method or on the class"
        )


def _mark(endpoint: Any, mark: Mark) -> None:
    setattr(endpoint, _MARKS, (*_marks_on(endpoint), mark))


def _name_of(endpoint: Any) -> str:
    """The module and qualified name of an endpoint, for people who are to find it."""
    return ".".join(_place_of(endpoint))


def _place_of(endpoint: Any) -> tuple[str, str]:
    """The module of an endpoint, and its qualified name there."""
    function = inspect.unwrap(class_of(endpoint))
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    given = getattr(function, "__name__", "")
    if ".as_view." in name or not name.endswith(given):  # views of classes, and ``@api_view``, are made first and then named
        name = given
    return getattr(function, "__module__", None) or "", name.replace(".<locals>", "")


def place_named(module: str, name: str) -> str:
    """The name of a limit by its place, which clients read: short, without the module, but for a few digits of its digest.

    Stable between processes, and different from that of every other place.
    """
    digits = hashlib.sha256(f"{module}.{name}".encode()).hexdigest()[:6]
    short = f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[-_LONGEST:].lstrip('._-') or 'limit'}-{digits}"
    _places[short] += 1
    return short if _places[short] == 1 else f"{short}-{_places[short]}"
