"""Types and checks of rule options, including the parts of keys."""

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
from limitgate.limits.bucket import Priority
from limitgate.limits.limit import Duration, Limit, limit_of_rule
from limitgate.messages.text import expected_of
from limitgate.overload.options import Adaptive
from limitgate.rules.ban import Ban

Function = TypeVar("Function", bound=Callable[..., Any])
OnError = Literal["open", "closed", "local"]
Per = Literal["request", "message"]
Cost = int | Callable[[Request], int]
When = Callable[[Request], bool]
Given = str | Limit | Sequence[str | Limit] | None
"""Limits given at run time; None if the rule does not limit a request."""
LimitsBy = Callable[[Request], Given | Awaitable[Given]]
"""Returns the limits of a request. May be async on ASGI only."""

_STATUS_CLASSES = frozenset({"1xx", "2xx", "3xx", "4xx", "5xx"})


def _status_or_class(value: object) -> int | str:
    if (type(value) is int and 100 <= value <= 599) or (isinstance(value, str) and value in _STATUS_CLASSES):
        return value
    raise ConfigError(f"{value!r:.80} is not a status, expected a number such as 401 or a class such as 5xx")


Status = Annotated[int | str, PlainValidator(_status_or_class)]


class ChargeIf(BaseModel, extra="forbid", frozen=True):
    """Outcomes that are charged: those with, or those without, some statuses.

    A status is a number such as 401, or a class such as ``"5xx"``. An accepted WebSocket has status 101.
    """

    status: tuple[Status, ...] = ()
    """Charge responses with one of these."""
    status_not: tuple[Status, ...] = ()
    """Charge all responses except those with one of these."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> ChargeIf:
        if bool(self.status) is bool(self.status_not):
            raise ConfigError("expected either status or status_not, for example {status: [401, 403]} or {status_not: [5xx]}")
        return self

    def __str__(self) -> str:
        said = "if" if self.status else "unless"
        return f"{said} {', '.join(map(str, self.status or self.status_not))}"

    def counts(self, status: int) -> bool:
        """True if a response with this status is charged."""
        named, listed = {status, f"{status // 100}xx"}, self.status or self.status_not
        return named.isdisjoint(listed) is not bool(self.status)


Outcomes = ChargeIf | Mapping[str, Iterable[int | str]]


Bounds = Adaptive | Mapping[str, Duration] | bool | None


BanTerms = Ban | Mapping[str, int | Duration] | None


class ThrottleOptions(TypedDict, total=False):
    """Options of a throttle of Django REST framework. See `Rule`."""

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
    max_delay: Duration | None


class DependencyOptions(ThrottleOptions, total=False):
    """Options of a FastAPI dependency besides name, limits and key. See `Rule`."""

    qps: int | None
    qpm: int | None
    qph: int | None
    qpd: int | None
    concurrency: int | None


class LimitOptions(DependencyOptions, total=False):
    """Options of ``@limit`` besides name and limits. See `Rule`."""

    adaptive: Bounds
    key: Iterable[str]
    replaces: str | Iterable[str]
    per: Per


class RuleOptions(LimitOptions, total=False):
    """Options of a `Rule` besides name and limits."""

    path: str | Iterable[str]
    exclude: Iterable[str]
    tier: str | None
    exempt: bool
    deny: bool
    lease: int
    priority: Priority | None
    reserve: str | float | Fraction | None


def gives_limits(value: object) -> TypeGuard[LimitsBy]:
    """True for a callable in place of limits."""
    return callable(value) and not isclass(value)


def is_async(function: object) -> bool:
    """True for an async function, or an object with an async ``__call__``."""
    call = None if isclass(function) else getattr(function, "__call__", None)  # noqa: B004 - a class has that of its objects
    return iscoroutinefunction(function) or iscoroutinefunction(call)


def accepts(function: Callable[..., Any], count: int) -> bool:
    """True if a callable accepts ``count`` positional arguments, or if its signature is unknown."""
    try:
        signature(function if isroutine(function) else getattr(function, "__call__")).bind(*[None] * count)  # noqa: B004, B009
    except (AttributeError, TypeError):
        return False
    except ValueError:  # some functions in C
        return True
    return True


def check_takes_request(function: Function) -> Function:
    """Return the callable if it accepts a request. Raises `ConfigError`."""
    if not accepts(function, 1):
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        raise ConfigError(f"{name:.80} cannot be called with a request, expected a callable (request)")
    return function


def check_refuses(on_denied: Function | None, *parameters: str) -> Function | None:
    """Return the option ``on_denied`` if it accepts these parameters. Raises `ConfigError`."""
    if on_denied is not None and not accepts(on_denied, len(parameters)):
        name = getattr(on_denied, "__qualname__", None) or type(on_denied).__qualname__
        given = ", ".join(parameters)
        cure = "" if len(parameters) == 1 else "; register a handler (request, error) with the application instead"
        raise ConfigError(f"on_denied: {name:.80} cannot be called with ({given}), expected a callable ({given}){cure}")
    return on_denied


def check_is_plain(function: object, what: str) -> None:
    """Raise `ConfigError` for an async callable, which WSGI cannot await."""
    if is_async(function):
        raise ConfigError(f"{what} is async, expected a plain function under WSGI")


def read_limits(given: object) -> tuple[Limit, ...]:
    """Parse a limit or a list of limits. Raises `ConfigError`."""
    limits = tuple([limit_of_rule(each) for each in (given if isinstance(given, list | tuple) else [given])])
    if not limits:
        raise ConfigError("an empty list, expected limits, or None for no limit")
    return limits


def check_names(function: str, given: Mapping[str, object], options: type) -> None:
    """Raise Python's `TypeError` for options that a function does not take, with a list of the valid ones."""
    for name in given:
        if name not in options.__annotations__:
            expected = expected_of(name, options.__annotations__)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}, {expected}")


def show_options(function: Callable[..., Any], options: type, defaults: Mapping[str, object]) -> None:
    """Make ``help`` show each option of a function as a parameter with its default."""
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
    """Return the normalized alternatives in one part of a key. Raises `ConfigError`."""
    labels = tuple(label.strip() for label in name.split("|"))
    for label in labels:
        if label not in PARTS and not _HEADER_PART.fullmatch(label):
            expected = expected_of(label, [*PARTS, "header:NAME"])
            other = "for anything else use 'caller' with the option identify"
            raise ConfigError(f"key part {label!r:.80} is unknown, {expected}, alternatives separated by '|'; {other}")
    return tuple(label if label in PARTS else label.lower() for label in labels)


def check_header(name: str) -> str:
    """Return the name of a header as it is sent. Raises `ConfigError` if it is invalid, or spelled as in a WSGI environ."""
    if not _HEADER_NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.80} is not a header name, expected it as it is sent, such as x-forwarded-for")
    return name


def check_secret(secret: str | None) -> bytes:
    """Return the bytes that key the digests in the store, empty for None. Raises `ConfigError`, which omits the secret."""
    key = (secret or "").encode()
    if secret is not None and not 16 <= len(key) <= 64:
        raise ConfigError("expected a secret of 16 to 64 bytes")
    return key
