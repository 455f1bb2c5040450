"""Tests that rule files have of themselves: a request that is given, and what is expected of the decision about it."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from limitgate.errors import ConfigError
from limitgate.http.client_ip import canonical
from limitgate.limits.duration import seconds_of
from limitgate.messages.suggestions import expected_of
from limitgate.rules.callers import Text
from limitgate.rules.rule import METHOD, Name

_FIELDS = ("given", "expect")
_LATEST = 10 * 366 * 86400
_EXAMPLE = "{given: {path: /login, method: POST}, expect: {allowed: true}}"


def _path(value: str) -> str:
    if not value.startswith("/"):
        raise ConfigError(f"{value!r:.80} is no path of a request, expected for example '/login'")
    return value


def _method(value: str) -> str:
    if not METHOD.fullmatch(value):
        raise ConfigError(f"{value!r:.80} is no method, expected for example POST")
    return value


def _address(value: str) -> str:
    if canonical(value) is None:
        raise ConfigError(f"{value!r:.80} is no address, expected for example '203.0.113.7' or '2001:db8::1'")
    return value


def _duration(value: object) -> object:
    return seconds_of(value) if isinstance(value, str) else value


class Given(BaseModel, extra="forbid", frozen=True):
    """A request of a test, and when it comes."""

    model_config = ConfigDict(hide_input_in_errors=True)

    path: Annotated[StrictStr, AfterValidator(_path)]
    """Path of the request, with or without a query."""
    method: Annotated[StrictStr, AfterValidator(_method)] = "GET"
    """Method of the request; GET if not given."""
    ip: Annotated[StrictStr, AfterValidator(_address)] = "192.0.2.1"
    """Address of the peer, which is the client unless it is a trusted proxy; 192.0.2.1 if not given."""
    headers: dict[StrictStr, StrictStr] = {}
    """Headers of the request by name; none if not given."""
    at: Annotated[float | None, Field(strict=True, ge=0, le=_LATEST), BeforeValidator(_duration)] = None
    """When the request comes: seconds, or text such as ``2m``, since the clock of the tests began.

    With the request before it if not given.

    The clock begins at midnight UTC on the first of January 2026, with which a day, a week and a month begin, too.
    """


class Expected(BaseModel, extra="forbid", frozen=True):
    """What is expected of the decision about the request; only what is given is compared."""

    model_config = ConfigDict(hide_input_in_errors=True)

    allowed: StrictBool = True
    """False if the request is to be refused."""
    rule: Name | None = None
    """The rule that decides: the one that refuses, or has the least remaining; null where none applies."""
    remaining: Annotated[int | None, Field(strict=True, ge=0)] = None
    """Requests that still fit afterwards, by the window with the least; null where no rule applies."""
    tier: Text = "default"
    """The tier whose rules apply."""
    retry_after: Annotated[float, Field(strict=True, ge=0), BeforeValidator(_duration)] = 0.0
    """Seconds to wait, or text such as ``2m``; 0 when allowed. A whole number is compared with the wait rounded up, as
    Retry-After is."""


class RuleTest(NamedTuple):
    """A test in a rule file."""

    given: Given
    expect: Expected


def read_rule_test(entry: object) -> RuleTest:
    """The test that an entry of ``tests`` is. Raises `ConfigError`."""
    if not isinstance(entry, dict):
        raise ConfigError(f"expected a mapping, for example {_EXAMPLE}, not {entry!r:.80}")
    unknown = [name for name in entry if name not in _FIELDS]
    mistakes = [ConfigError(f"unknown field, {expected_of(name, _FIELDS)}", (name,)) for name in unknown]
    parts: dict[str, Any] = {}
    for name, model in (("given", Given), ("expect", Expected)):
        try:
            parts[name] = _part(model, entry.get(name))
        except ConfigError as error:
            mistakes += [ConfigError(each.reason, (name, *each.field)) for each in error.every]
    if mistakes:
        raise ConfigError.first_of(mistakes)
    return RuleTest(**parts)


def _part(model: type[BaseModel], value: object) -> BaseModel:
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"expected some of {', '.join(model.model_fields)}, for example {_EXAMPLE}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ConfigError.explaining(error, "", model.model_fields) from error
