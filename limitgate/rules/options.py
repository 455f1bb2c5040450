"""Options of rules as they may be given, parts of keys among them: for type checkers, and for all that takes some of them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from inspect import Parameter, Signature, isclass, iscoroutinefunction, isroutine, signature
from typing import Annotated, Any, Literal, TypedDict, TypeGuard, TypeVar

from pydantic import BaseModel, PlainValidator, model_validator

from limitgate.errors import ConfigError
from limitgate.http.request import Request
from limitgate.limits.limit import Limit, limit_of_rule
from limitgate.limits.priority import Priority
from limitgate.messages.suggestions import expected_of
from limitgate.overload.options import Adaptive
from limitgate.rules.ban import Ban

Function = TypeVar("Function", bound=Callable[..., Any])
OnError = Literal["open", "closed", "local"]
Per = Literal["request", "message"]
Cost = int | Callable[[Request], int]
When = Callable[[Request], bool]
Given = str | Limit | Sequence[str | Limit] | None
"""Limits as they are given at run time; None where a rule does not limit a request."""
LimitsBy = Callable[[Request], Given | Awaitable[Given]]
"""Gives the limits of a request; async on ASGI only."""

_STATUS_CLASSES = frozenset({"1xx", "2xx", "3xx", "4xx", "5xx"})


def _status_or_class(value: object) -> int | str:
    if (type(value) is int and 100 <= value <= 599) or (isinstance(value, str) and value in _STATUS_CLASSES):
        return value
    raise ConfigError(f"{value!r:.80} is no status, expected a number such as 401 or a class such as 5xx")


Status = Annotated[int | str, PlainValidator(_status_or_class)]


class ChargeIf(BaseModel, extra="forbid", frozen=True):
    """Which outcomes of a request are charged: those with some statuses, or all but those with some.

    A status is a number such as 401, or a class such as ``"5xx"``. A WebSocket that is accepted has status 101.
    """

    status: tuple[Status, ...] = ()
    """Charged are responses with one of these."""
    status_not: tuple[Status, ...] = ()
    """Charged are all responses but those with one of these."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> ChargeIf:
        if bool(self.status) is bool(self.status_not):
            raise ConfigError("expected either status or status_not, for example {status: [401, 403]} or {status_not: [5xx]}")
        return self

    def __str__(self) -> str:
        said = "if" if self.status else "unless"
        return f"{said} {', '.join(map(str, self.status or self.status_not))}"

    def counts(self, status: int) -> bool:
        """True if a request is charged whose response had this status."""
        named, listed = {status, f"{status // 100}xx"}, self.status or self.status_not
        return named.isdisjoint(listed) is not bool(self.status)


Outcomes = ChargeIf | Mapping[str, Iterable[int | str]]
"""Outcomes that are charged, as they may be given."""


Bounds = Adaptive | Mapping[str, float | str] | bool | None
"""Bounds of an adaptive limit, as they may be given."""


BanTerms = Ban | Mapping[str, int | float | str] | None
"""The ban of clients that a rule refuses too often, as it may be given."""


class ThrottleOptions(TypedDict, total=False):
    """Options of a throttle of Django REST framework; the fields of `Rule` say what each means."""

    methods: Iterable[str] | None
    clients: Iterable[str]
    when: When | None
    cost: Cost
    on_error: OnError | None
    shadow: bool
    charge_if: Outcomes | None
    ban: BanTerms
    algorithm: str | None
    align: str | None
    max_delay: float | str | None


class DependencyOptions(ThrottleOptions, total=False):
    """Options of a dependency of FastAPI, besides its name, limits and key; see `Rule`."""

    qps: int | None
    qpm: int | None
    qph: int | None
    qpd: int | None
    concurrency: int | None


class LimitOptions(DependencyOptions, total=False):
    """Options of ``@limit``, besides its name and limits; see `Rule`."""

    adaptive: Bounds
    key: Iterable[str]
    replaces: str | Iterable[str]
    per: Per


class RuleOptions(LimitOptions, total=False):
    """Options of a `Rule`, besides its name and limits, as they may be given."""

    path: str | Iterable[str]
    exclude: Iterable[str]
    tier: str | None
    exempt: bool
    deny: bool
    lease: int
    priority: Priority | None
    reserve: str | float | Fraction | None


def gives_limits(value: object) -> TypeGuard[LimitsBy]:
    """True for a callable that stands where limits stand."""
    return callable(value) and not isclass(value)


def is_async(function: object) -> bool:
    """True for an async function, and for an object that is called like one."""
    call = None if isclass(function) else getattr(function, "__call__", None)  # noqa: B004 - a class has that of its objects
    return iscoroutinefunction(function) or iscoroutinefunction(call)


def accepts(function: Callable[..., Any], count: int) -> bool:
    """True if a callable can be called with so many arguments, and where it does not tell."""
    try:
        signature(function if isroutine(function) else getattr(function, "__call__")).bind(*[None] * count)  # noqa: B004, B009
    except (AttributeError, TypeError):
        return False
    except ValueError:  # some that are written in C
        return True
    return True


def check_takes_request(function: Function) -> Function:
    """The callable, if it can be called with a request and nothing else. Raises `ConfigError`."""
    if not accepts(function, 1):
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        raise ConfigError(f"{name:.80} cannot be called with a request, expected a callable (request)")
    return function


def check_refuses(on_denied: Function | None, *parameters: str) -> Function | None:
    """The option ``on_denied``, if it can be called with these parameters. Raises `ConfigError`."""
    if on_denied is not None and not accepts(on_denied, len(parameters)):
        name = getattr(on_denied, "__qualname__", None) or type(on_denied).__qualname__
        given = ", ".join(parameters)
        cure = "" if len(parameters) == 1 else "; a handler (request, error) is registered with the application"
        raise ConfigError(f"on_denied: {name:.80} cannot be called with ({given}), expected a callable ({given}){cure}")
    return on_denied


def check_is_plain(function: object, what: str) -> None:
    """Raise `ConfigError` for an async callable, which WSGI cannot await."""
    if is_async(function):
        raise ConfigError(f"{what} is async, expected a plain function under WSGI")


def read_limits(given: object) -> tuple[Limit, ...]:
    """Limits for a rule of a limit or a list of them. Raises `ConfigError` for anything else."""
    limits = tuple([limit_of_rule(each) for each in (given if isinstance(given, list | tuple) else [given])])
    if not limits:
        raise ConfigError("a list without limits, expected some, or None for no limit")
    return limits


def check_names(function: str, given: Mapping[str, object], options: type) -> None:
    """Raise the `TypeError` of Python if options were given that a function does not take, with those that it does."""
    for name in given:
        if name not in options.__annotations__:
            expected = expected_of(name, options.__annotations__)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}, {expected}")


def show_options(function: Callable[..., Any], options: type, defaults: Mapping[str, object]) -> None:
    """Have ``help`` show each of the options of a function as a parameter of its own, with its default."""
    plain = signature(function)
    own = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    annotations = {name: getattr(kind, "__forward_arg__", kind) for name, kind in options.__annotations__.items()}
    named = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind) for name, kind in annotations.items()
    ]
    setattr(function, "__signature__", Signature([*own, *named], return_annotation=plain.return_annotation))  # noqa: B010


PARTS = ("path", "ip", "api_key", "method", "host", "user", "caller", "tier", "global")
_HEADER = r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}"
_HEADER_PART = re.compile(f"header:{_HEADER}", re.ASCII)
_HEADER_NAME = re.compile(f"(?!(?i:HTTP_)){_HEADER}", re.ASCII)


@lru_cache(maxsize=1024)
def check_part(name: str) -> tuple[str, ...]:
    """The alternatives in one part of a key, as they are known inside. Raises `ConfigError`."""
    labels = tuple(label.strip() for label in name.split("|"))
    for label in labels:
        if label not in PARTS and not _HEADER_PART.fullmatch(label):
            expected = expected_of(label, [*PARTS, "header:NAME"])
            other = "for anything else there is 'caller', whom the option identify names"
            raise ConfigError(f"key part {label!r:.80} is unknown, {expected}, alternatives separated by '|'; {other}")
    return tuple(label if label in PARTS else label.lower() for label in labels)


def check_header(name: str) -> str:
    """The name of a header as it is sent. Raises `ConfigError` for what is none, or is spelled as in an environ."""
    if not _HEADER_NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.80} is no name of a header, expected it as it is sent, such as x-forwarded-for")
    return name


def check_secret(secret: str | None) -> bytes:
    """The bytes that key the digests in the store, none for None. Raises `ConfigError`, which does not tell the secret."""
    key = (secret or "").encode()
    if secret is not None and not 16 <= len(key) <= 64:
        raise ConfigError("expected a secret of 16 to 64 bytes")
    return key
