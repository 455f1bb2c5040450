"""The errors that LimitGate raises."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar

from limitgate.messages.text import expected_of, meant

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

T = TypeVar("T")
P = ParamSpec("P")

_LISTS = {
    "callers": "[{id: acme, api_key: 'sha256:...'}]",
    "clients": "['10.0.0.0/8']",
    "exclude": "['/api/health']",
    "headers": "['x-ratelimit']",
    "key": "['path', 'ip']",
    "limits": "['5/second', '100/minute']",
    "methods": "['POST']",
    "replaces": "['api']",
    "rules": "[{name: api, qpm: 100}]",
    "status": "[401, 403]",
    "status_not": "['5xx']",
    "trusted_proxies": "['10.0.0.0/8']",
}

_MAPPINGS = {
    "header": "{X-Caller: billing}",
    "header_names": "{X-RateLimit-Limit: X-Quota}",
    "headers": "{X-Caller: billing}",
    "limits": "{api: 500/minute}",
}

_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "callable_type": "a callable",
    "dict_type": "a mapping of fields",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "model_attributes_type": "a mapping, for example {{status: [401, 403]}}",
    "model_type": "a mapping, for example {{status: [401, 403]}}",
    "string_pattern_mismatch": "1 to 64 letters, digits, '.', '_' or '-'",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "text that is not empty",
    "string_type": "text",
    "too_short": "at least one entry, or omit the field",
}
"""What was expected, by pydantic's type of error."""

_RATES = frozenset({"qps", "qpm", "qph", "qpd"})
_SECONDS = frozenset({"timeout"})
SECRETS = frozenset({"api_key", "callers", "header", "secret", "store"})
"""Fields whose values are never shown in a message."""

Field = tuple[str | int, ...]
"""Path to a field, for example ``("limits", 0)``."""

MOST_MISTAKES = 100
"""Errors of one kind per report, because files may be hostile."""

StoreFault = Literal["timeout", "connection", "oom", "reply", "overload"]
"""A late reply, no connection, full memory, an invalid reply, or a process too busy to send."""


class LimitGateError(Exception):
    """Base class of all errors."""


class LimitGateDeprecationWarning(DeprecationWarning):
    """Warns about something that a later minor version removes. The message names the replacement.

    Turn it into an error in your tests: ``-W error::limitgate.LimitGateDeprecationWarning``.
    """


class ConfigError(LimitGateError, ValueError):
    """An error in a rule, a limit, a file or an option. The message ends with the expected value.

    ``field`` is the path to the error in the checked object. ``reason`` is the message without path, ``file`` and ``line``.
    ``others`` are further errors.
    """

    def __init__(self, message: str, field: Field = (), reason: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.reason: str = message if reason is None else reason
        self.file: str | None = None
        self.line: int | None = None
        self.others: tuple[ConfigError, ...] = ()

    @property
    def every(self) -> tuple[ConfigError, ...]:
        """This error and the others found with it."""
        return self, *self.others

    @classmethod
    def in_file(cls, file: str, line: int | None, field: Field, reason: str) -> ConfigError:
        """Make an error for a line of a file."""
        place = file if line is None else f"{file}:{line}"
        mistake = cls(f"{place}: {f'{spelled(field)}: ' if field else ''}{reason}", field, reason)
        mistake.file, mistake.line = file, line
        return mistake

    @classmethod
    def first_of(cls, mistakes: Sequence[ConfigError]) -> ConfigError:
        """Return the first error; ``others`` has the rest without duplicates."""
        first, *others = dict.fromkeys([each for mistake in mistakes for each in mistake.every])
        first.others = tuple(others)
        return first

    @classmethod
    def explaining(cls, error: ValidationError, what: str, known: Iterable[str]) -> ConfigError:
        """Make an error from pydantic's report about ``what``, whose valid fields are ``known``."""
        every = [mistake for detail in error.errors(include_url=False) for mistake in _mistakes(detail, known)]
        return cls.first_of([cls.at(field, reason, what) for field, reason in every])

    @classmethod
    def at(cls, field: Field, reason: str, what: str = "") -> ConfigError:
        """Make an error for a field of ``what``."""
        return cls(": ".join(filter(None, (what, spelled(field), reason))), field, reason)

    @classmethod
    def check_each(cls, values: Iterable[T], check: Callable[[T], object]) -> None:
        """Check each entry of a list. The `ConfigError` names each index."""
        mistakes = []
        for place, value in enumerate(values):
            try:
                check(value)
            except ConfigError as error:
                mistakes += [cls.at((place, *each.field), each.reason) for each in error.every]
        if mistakes:
            raise cls.first_of(mistakes)


def _mistakes(detail: ErrorDetails, known: Iterable[str]) -> Iterator[tuple[Field, str]]:
    field, kind, context = detail["loc"], detail["type"], detail.get("ctx", {})
    own = context.get("error")
    if isinstance(own, ConfigError):
        for each in own.every:
            yield (*field, *each.field), each.reason
    elif kind == "extra_forbidden":
        yield field, f"unknown field, {expected_of(field[-1], known)}"
    elif kind == "missing":
        yield field, "missing, expected a value"
    elif kind == "import_error":
        yield field, f"cannot be imported, expected the text 'package.module:name': {own}"
    elif kind == "value_error":
        yield field, str(own)
    else:
        reason, given = _reason(kind, detail["msg"], context, field), detail["input"]
        if not isinstance(given, dict) and not SECRETS.intersection(field):
            reason += f", not {given!r:.80}"
        yield field, reason + _hint(kind, given, field)


def _hint(kind: str, given: object, field: Field) -> str:
    if kind == "int_type" and isinstance(given, str) and "/" in given and field[-1] in _RATES:
        return f": write text such as {given!r:.80} under limits"
    if kind == "string_pattern_mismatch" and isinstance(given, str) and re.match(r"[0-9]+ *(/|per )", given):
        return ": the name of a rule comes before its limits"
    return ": use quotes for text" if kind == "string_type" and isinstance(given, int | float) else ""


def _reason(kind: str, said: str, context: dict[str, Any], field: Field) -> str:
    named = [part for part in field if isinstance(part, str)]
    if kind in ("tuple_type", "frozen_set_type", "list_type"):
        example = _LISTS.get(named[-1]) if named else None
        return f"expected a list{'' if example is None else f' such as {example}'}"
    if kind == "dict_type" and named and named[-1] in _MAPPINGS:
        return f"expected a mapping such as {_MAPPINGS[named[-1]]}"
    if kind not in _EXPECTED:
        return f"expected a valid value: {said}"
    numbers = {name: int(bound) if isinstance(bound, float) else bound for name, bound in context.items()}
    unit = " (in seconds)" if _SECONDS.intersection(named) else ""
    return f"expected {_EXPECTED[kind].format(**numbers)}{unit}"


def spelled(field: Field) -> str:
    """Format a field: ``rules[0].limits[1]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part:.80}" for part in field).removeprefix(".")


class HeadersTooLargeError(LimitGateError):
    """Too many or too long header fields. The gate answers 431."""


class BodyError(LimitGateError):
    """A request's body cannot be read for the rules that need it. The gate answers ``status``: 400, 408, 411 or 413."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StoreError(LimitGateError):
    """The store did not decide in time. ``fault`` is the kind of failure.

    ``keys`` are the buckets of an unreachable cluster node; empty if the whole store failed. ``waited`` are the seconds without
    a reply, if measured. ``is_unwritable`` is True if the store answers but can't write: it is read-only, full or without its
    disk.
    """

    def __init__(
        self,
        message: str,
        fault: StoreFault = "connection",
        keys: frozenset[str] = frozenset(),
        *,
        is_unwritable: bool = False,
    ) -> None:
        super().__init__(message)
        self.fault: StoreFault = fault
        self.keys = keys
        self.waited: float = 0.0
        self.is_unwritable: bool = is_unwritable or fault == "oom"

    def anew(self) -> StoreError:
        """Return a copy of the error for another caller."""
        return StoreError(str(self), self.fault, is_unwritable=self.is_unwritable)


def check_switches(**switches: object) -> None:
    """Raise `ConfigError` for a value that isn't a bool, because the text ``"no"`` would be true."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r:.40}, expected True or False")


def called_as(example: str, **instead: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Add an example to a function's `TypeError` for wrong arguments. ``instead`` has other examples by argument."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # the function has started
                    raise
                shown = next((each for name, each in instead.items() if name in kwargs), example)
                told = str(error).partition(". Did you mean")[0]  # of Python 3.13
                raise TypeError(f"{told}, {_guess(told, kwargs, function)}expected {shown}") from None

        return called

    return decorate


def _guess(told: str, given: Iterable[str], function: Callable[..., object]) -> str:
    wrong = next((name for name in given if told.endswith(f"unexpected keyword argument {name!r}")), None)
    near = None if wrong is None else meant(wrong, signature(function).parameters)
    return "" if near is None else f"did you mean {near!r}? "


def wrong_way(mistake: str) -> Callable[..., NoReturn]:
    """Make a method that raises `TypeError` if ``with`` should be ``async with``, or the reverse."""

    def enter(*_: object) -> NoReturn:
        raise TypeError(mistake)

    return enter
