"""Types and checks of rule options and key parts."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from inspect import Parameter, Signature, isclass, signature
from typing import Annotated, Any, Literal, TypedDict, TypeGuard, TypeVar

from pydantic import AfterValidator, BaseModel, PlainValidator, model_validator

from limitgate.errors import ConfigError
from limitgate.http.body import pointer
from limitgate.http.request import Request
from limitgate.limits.bucket import Priority
from limitgate.limits.limit import Duration, Limit, limit_of_rule, seconds_of
from limitgate.messages.text import expected_of
from limitgate.overload.options import Adaptive
from limitgate.process.callables import accepts, is_async

MOST_REFUSALS = 10_000
HIGHEST_GROWTH = 100.0
LONGEST_S = 366 * 86_400.0
_DAY_S = 86_400.0
_MISSING = object()
_EXAMPLE = "{after: 20, within: 10m, for: 1h, growing: 2, most: 24h}"


@dataclass(frozen=True, slots=True, init=False)
class Ban:
    """A ban of clients that a rule refuses too often. Durations are seconds, or text such as ``10m``. Raises `ConfigError`."""

    after: int
    """Refusals that lead to a ban: 1 to 10,000."""
    within: float
    """Seconds in which the refusals happen: more than 0, up to a year."""
    duration: float
    """Seconds of the first ban, ``for`` in rule files: more than 0, up to a year."""
    growing: float
    """Factor of each further ban: 1 (default) to 100."""
    most: float
    """Seconds of the longest ban. After this time without a ban, the first duration applies again. ``duration`` to a year.
    Default: a day, or ``duration`` if longer.
    """

    def __init__(
        self,
        after: int = _MISSING,  # type: ignore[assignment]  # one error reports every missing field
        within: Duration = _MISSING,  # type: ignore[assignment]
        duration: Duration = _MISSING,  # type: ignore[assignment]
        growing: float = 1.0,
        most: Duration | None = None,
    ) -> None:
        mistakes = [ConfigError.at((field,), said, "ban") for field, said in _mistakes(after, within, duration, growing, most)]
        if mistakes:
            raise ConfigError.first_of(mistakes)
        lasts = seconds_of(duration)
        longest = max(lasts, _DAY_S) if most is None else seconds_of(most)
        values = {"after": after, "within": seconds_of(within), "duration": lasts, "growing": float(growing), "most": longest}
        for name, value in values.items():
            object.__setattr__(self, name, value)


def as_ban(value: object) -> Ban | None:
    """A `Ban`, its fields, or None. Raises `ConfigError`."""
    if value is None or isinstance(value, Ban):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{value!r:.80} is not a ban, expected a mapping such as {_EXAMPLE}, or in Python Ban(...)")
    known = ["for" if field.name == "duration" else field.name for field in fields(Ban)]
    given = {"duration" if name == "for" else str(name): each for name, each in value.items()}
    unknown = [str(name) for name in value if name not in (*known, "duration")]
    mistakes = [ConfigError.at((name,), f"unknown field, {expected_of(name, known)}", "ban") for name in unknown]
    if "for" in value and "duration" in value:
        mistakes.append(ConfigError.at(("duration",), "duplicates for, expected one of the two", "ban"))
    try:
        ban = Ban(**{name: each for name, each in given.items() if name not in unknown})
    except ConfigError as error:
        for each in error.every:
            is_for = each.field == ("duration",) and "duration" not in value
            mistakes.append(ConfigError.at(("for",) if is_for else each.field, each.reason, "ban"))
    if mistakes:
        raise ConfigError.first_of(mistakes)
    return ban


def _mistakes(after: object, within: object, duration: object, growing: object, most: object) -> Iterator[tuple[str, str]]:
    if type(after) is not int or not 1 <= after <= MOST_REFUSALS:
        yield "after", f"expected a whole number of refusals from 1 to {MOST_REFUSALS:,}, {_not(after)}"
    for name, value, example in (("within", within, "10m or 600"), ("duration", duration, "1h or 3600")):
        if _seconds(value) is None:
            yield name, f"expected a duration above 0 and up to a year, such as {example}, {_not(value)}"
    is_number = isinstance(growing, int | float) and not isinstance(growing, bool)
    if not is_number or not 1 <= growing <= HIGHEST_GROWTH:  # type: ignore[operator]
        yield "growing", f"expected a factor from 1 to {HIGHEST_GROWTH:g}, such as 2, {_not(growing)}"
    if most is None:
        return
    lasts, longest = _seconds(duration), _seconds(most)
    if longest is None:
        yield "most", f"expected a duration above 0 and up to a year, such as 24h, {_not(most)}"
    elif lasts is not None and longest < lasts:
        yield "most", f"expected at least as long as the first ban, which lasts {lasts:g} s, {_not(most)}"


def _not(value: object) -> str:
    return "which is missing" if value is _MISSING else f"not {value!r:.80}"


def _seconds(value: object) -> float | None:
    try:
        seconds = seconds_of(value)
    except ConfigError:
        return None
    return seconds if 0 < seconds <= LONGEST_S and math.ceil(seconds * 1e6) else None


Function = TypeVar("Function", bound=Callable[..., Any])
OnError = Literal["open", "closed", "local"]
Per = Literal["request", "message"]
Cost = int | Callable[[Request], int]
GivenCost = int | Callable[[Request], int] | Literal["tokens", "input_tokens", "output_tokens"]
"""A union of its own, because with ``Cost | ...`` mypy would accept callables that return text."""
Costed = tuple[str | Limit, GivenCost]
When = Callable[[Request], bool]
Given = str | Limit | Sequence[str | Limit] | None
LimitsBy = Callable[[Request], Given | Awaitable[Given]]
"""A callable that returns the limits of a request. May be async only on ASGI."""
AnyLimit = Limit | str | LimitsBy | Costed | Mapping[str, Any]
"""A limit in any form: also a mapping, with its own cost, or a callable."""

_STATUS_CLASSES = frozenset({"1xx", "2xx", "3xx", "4xx", "5xx"})


def _status_or_class(value: object) -> int | str:
    if (type(value) is int and 100 <= value <= 599) or (isinstance(value, str) and value in _STATUS_CLASSES):
        return value
    raise ConfigError(f"{value!r:.80} is not a status, expected a number such as 401 or a class such as 5xx")


Status = Annotated[int | str, PlainValidator(_status_or_class)]


class ChargeIf(BaseModel, extra="forbid", frozen=True):
    """Outcomes that are charged, by status: a number such as 401, or a class such as ``"5xx"``.

    The status of an accepted WebSocket is 101.
    """

    status: tuple[Status, ...] = ()
    """Charge only responses with one of these."""
    status_not: tuple[Status, ...] = ()
    """Charge only responses with none of these."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> ChargeIf:
        if bool(self.status) is bool(self.status_not):
            raise ConfigError("expected either status or status_not, for example {status: [401, 403]} or {status_not: [5xx]}")
        return self

    def __str__(self) -> str:
        said = "if" if self.status else "unless"
        return f"{said} {', '.join(map(str, self.status or self.status_not))}"

    def counts(self, status: int) -> bool:
        named, listed = {status, f"{status // 100}xx"}, self.status or self.status_not
        return named.isdisjoint(listed) is not bool(self.status)


Outcomes = ChargeIf | Mapping[str, Iterable[int | str]]


Bounds = Adaptive | Mapping[str, Duration] | bool | None


BanTerms = Ban | Mapping[str, int | Duration] | None


class ThrottleOptions(TypedDict, total=False):
    """Options of a REST framework throttle. See `Rule`."""

    methods: Iterable[str] | None
    clients: Iterable[str]
    when: When | None
    cost: GivenCost
    body: bool
    on_error: OnError | None
    shadow: bool
    charge_if: Outcomes | None
    ban: BanTerms
    algorithm: str | None
    align: str | None
    max_delay: Duration | None


class DependencyOptions(ThrottleOptions, total=False):
    """Options of a FastAPI dependency. See `Rule`."""

    qps: int | None
    qpm: int | None
    qph: int | None
    qpd: int | None
    concurrency: int | None


class LimitOptions(DependencyOptions, total=False):
    """Options of ``@limit``. See `Rule`."""

    adaptive: Bounds
    key: Iterable[str]
    replaces: str | Iterable[str]
    per: Per


class RuleOptions(LimitOptions, total=False):
    """Options of a `Rule`."""

    path: str | Iterable[str]
    exclude: Iterable[str]
    tier: str | None
    exempt: bool
    deny: bool
    lease: int
    priority: Priority | None
    reserve: str | float | Fraction | None


def each_is(check: Callable[[Any], object]) -> AfterValidator:
    """Validate each entry of a list by ``check``, which raises `ConfigError`."""

    def checked(values: Sequence[Any]) -> Sequence[Any]:
        ConfigError.check_each(values, check)
        return values

    return AfterValidator(checked)


def gives_limits(value: object) -> TypeGuard[LimitsBy]:
    return callable(value) and not isclass(value)


def check_takes_request(function: Function) -> Function:
    if not accepts(function, 1):
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        raise ConfigError(f"{name:.80} cannot be called with a request, expected a callable (request)")
    return function


def check_refuses(on_denied: Function | None, *parameters: str) -> Function | None:
    """Raises `ConfigError` for wrong parameters of ``on_denied``."""
    if on_denied is not None and not accepts(on_denied, len(parameters)):
        name = getattr(on_denied, "__qualname__", None) or type(on_denied).__qualname__
        given = ", ".join(parameters)
        cure = "" if len(parameters) == 1 else "; register a handler (request, error) with the application instead"
        raise ConfigError(f"on_denied: {name:.80} cannot be called with ({given}), expected a callable ({given}){cure}")
    return on_denied


def check_is_plain(function: object, what: str) -> None:
    """Raises `ConfigError` if the function is async: WSGI can't await."""
    if is_async(function):
        raise ConfigError(f"{what} is async, expected a plain function under WSGI")


def read_limits(given: object) -> tuple[Limit, ...]:
    limits = tuple([limit_of_rule(each) for each in (given if isinstance(given, list | tuple) else [given])])
    if not limits:
        raise ConfigError("an empty list, expected limits, or None for no limit")
    return limits


def check_names(function: str, given: Mapping[str, object], options: type) -> None:
    """Raise a `TypeError` that names the valid options."""
    for name in given:
        if name not in options.__annotations__:
            expected = expected_of(name, options.__annotations__)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}, {expected}")


def show_options(function: Callable[..., Any], options: type, defaults: Mapping[str, object]) -> None:
    """Show options as parameters in ``help``."""
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
    """Return the alternatives of a key part, normalized. Raises `ConfigError`."""
    labels = tuple(label.strip() for label in name.split("|"))
    for label in labels:
        if label.startswith("json:"):
            pointer(label.removeprefix("json:"))
        elif label not in PARTS and not _HEADER_PART.fullmatch(label):
            expected = expected_of(label, [*PARTS, "header:NAME", "json:/POINTER"])
            other = "for anything else use 'caller' with the option identify"
            raise ConfigError(f"key part {label!r:.80} is unknown, {expected}, alternatives separated by '|'; {other}")
    return tuple(label.lower() if label.startswith("header:") else label for label in labels)


def check_header(name: str) -> str:
    """Check a header name. Raises `ConfigError`, also for WSGI's spelling of names."""
    if not _HEADER_NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.80} is not a header name, expected it as it is sent, such as x-forwarded-for")
    return name


def check_secret(secret: str | None) -> bytes:
    """Return the secret; empty for None. Raises a `ConfigError` that doesn't show it."""
    key = (secret or "").encode()
    if secret is not None and not 16 <= len(key) <= 64:
        raise ConfigError("expected a secret of 16 to 64 bytes")
    return key
