"""Tests in rule files: a request, and the expected decision."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from limitgate.errors import ConfigError
from limitgate.http.client_ip import canonical
from limitgate.limits.limit import seconds_of
from limitgate.messages.text import expected_of
from limitgate.rules.callers import Text
from limitgate.rules.rule import METHOD, Name

_FIELDS = ("given", "expect")
_LATEST = 10 * 366 * 86400
_EXAMPLE = "{given: {path: /login, method: POST}, expect: {allowed: true}}"


def _path(value: str) -> str:
    if not value.startswith("/"):
        raise ConfigError(f"{value!r:.80} is not a request path, expected for example '/login'")
    return value


def _method(value: str) -> str:
    if not METHOD.fullmatch(value):
        raise ConfigError(f"{value!r:.80} is not a method, expected for example POST")
    return value


def _address(value: str) -> str:
    if canonical(value) is None:
        raise ConfigError(f"{value!r:.80} is not an address, expected for example '203.0.113.7' or '2001:db8::1'")
    return value


def _duration(value: object) -> object:
    return seconds_of(value) if isinstance(value, str) else value


class Given(BaseModel, extra="forbid", frozen=True):
    """The request of a test, and its time."""

    model_config = ConfigDict(hide_input_in_errors=True)

    path: Annotated[StrictStr, AfterValidator(_path)]
    """Path of the request, with or without a query."""
    method: Annotated[StrictStr, AfterValidator(_method)] = "GET"
    """Method of the request; GET if omitted."""
    ip: Annotated[StrictStr, AfterValidator(_address)] = "192.0.2.1"
    """Address of the peer, which is the client unless it is a trusted proxy; 192.0.2.1 if omitted."""
    headers: dict[StrictStr, StrictStr] = {}
    """Headers of the request by name; none if omitted."""
    at: Annotated[float | None, Field(strict=True, ge=0, le=_LATEST), BeforeValidator(_duration)] = None
    """Time of the request: seconds, or text such as ``2m``, after the clock of the tests starts.

    The time of the previous request if omitted.

    The clock starts at midnight UTC on January 1, 2026, which is also the start of a month.
    """


class Expected(BaseModel, extra="forbid", frozen=True):
    """The expected decision. Only the given fields are compared."""

    model_config = ConfigDict(hide_input_in_errors=True)

    allowed: StrictBool = True
    """False if the request must be refused."""
    rule: Name | None = None
    """Rule that decides: the one that refuses, or has the least remaining; null if no rule applies."""
    remaining: Annotated[int | None, Field(strict=True, ge=0)] = None
    """Remaining requests in the window with the fewest; null if no rule applies."""
    tier: Text = "default"
    """Tier whose rules apply."""
    retry_after: Annotated[float, Field(strict=True, ge=0), BeforeValidator(_duration)] = 0.0
    """Seconds to wait, or text such as ``2m``; 0 if allowed. A whole number is compared with the wait rounded up, as in
    Retry-After.
    """


class RuleTest(NamedTuple):
    """A test in a rule file."""

    given: Given
    expect: Expected


def read_rule_test(entry: object) -> RuleTest:
    """Parse an entry of ``tests``. Raises `ConfigError`."""
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
