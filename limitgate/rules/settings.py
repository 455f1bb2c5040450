"""Options of a gate: from code, ``LIMITGATE_*`` variables, a file, or the default, in this order."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Container
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from dotenv import dotenv_values
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ImportString,
    SecretStr,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from limitgate.errors import ConfigError
from limitgate.http.body import BODY_LIMIT
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.rate_fields import FIELDS, Style, renamed_styles
from limitgate.limits.bucket import LONGEST_PREFIX
from limitgate.limits.limit import EXPECTED, seconds_of
from limitgate.messages.diagnostics import Diagnosis
from limitgate.messages.text import Names, expected_of, meant
from limitgate.rules.callers import API_KEY_HEADER
from limitgate.rules.options import OnError, check_header, check_secret, check_takes_request, each_is

PREFIX = "LIMITGATE_"
ENV_FILE = f"{PREFIX}ENV_FILE"

SHORTEST_RELOAD = 0.01


def _json(value: str, start: str, expected: str) -> Any:
    try:
        return json.loads(value) if value.lstrip().startswith(start) else None
    except ValueError as error:
        raise ConfigError(expected) from error


def _listed(value: object) -> object:
    if not isinstance(value, str):
        return value
    listed = _json(value, "[", 'expected a list, in JSON ["10.0.0.1", "::1"] or separated by commas 10.0.0.1, ::1')
    if listed is not None:
        return listed
    items = [item for item in (part.strip() for part in value.split(",")) if item]
    if spaced := next((item for item in items if len(item.split()) > 1), None):
        raise ConfigError(f"{spaced!r:.80} contains spaces, expected commas between entries")
    return items


def _mapped(value: object) -> object:
    if not isinstance(value, str):
        return value
    mapped = _json(value, "{", 'expected a mapping, as JSON {"A": "B"}, or without braces A=B, C=D')
    if mapped is not None:
        return mapped
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    if any(not equals for _, equals, _ in pairs):
        raise ConfigError("expected a mapping such as A=B, C=D")
    return {name.strip(): other.strip() for name, _, other in pairs}


def _duration(value: object) -> object:
    if isinstance(value, str):
        with suppress(ValueError):
            float(value)
            return value
    elif not isinstance(value, bool | timedelta):
        return value
    try:
        return seconds_of(value)
    except ConfigError:
        raise ConfigError(f"{EXPECTED}, not {value!r:.80}") from None


def _once(values: tuple[str, ...]) -> tuple[str, ...]:
    if repeated := next((value for value in values if values.count(value) > 1), None):
        raise ConfigError(f"{repeated!r} appears twice, expected each once")
    return values


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ConfigError(f"expected a number, not {value!r}")
    return value


def _polling(reload: float) -> float:
    if 0 < reload < SHORTEST_RELOAD:
        raise ConfigError(f"expected at least {SHORTEST_RELOAD:g} seconds between polls, or 0 for none")
    return reload


def _fitting(secret: SecretStr | None) -> SecretStr | None:
    check_secret(None if secret is None else secret.get_secret_value())
    return secret


def _check_style(style: str) -> None:
    if style not in FIELDS:
        raise ConfigError(f"header style {style!r:.80} is unknown, {expected_of(style, FIELDS)}")


WholeNumber = Annotated[int, BeforeValidator(_no_bool)]
HeaderName = Annotated[str, Field(min_length=1), AfterValidator(check_header)]
Strings = Annotated[tuple[StrictStr, ...], NoDecode, BeforeValidator(_listed)]


class Settings(BaseSettings):
    """Options of `LimitGate` and `LimitGateWSGI`. Raises `ConfigError`.

    Reads the file that ``LIMITGATE_ENV_FILE`` names, otherwise ``.env`` in the working folder.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, arbitrary_types_allowed=True, hide_input_in_errors=True
    )

    _dotenv: ClassVar[str | None] = ".env"

    enabled: bool = True
    """``False`` disables middleware and decorators."""
    rules: Annotated[Any, NoDecode] = None
    """A rule file, a folder, a list of `Rule`, or a `RuleSet`. Required."""
    store: Annotated[Any, NoDecode, Field(repr=False)] = "memory://"
    """URL of a store, or a store object. With ``memory://`` each process counts separately."""
    on_error: OnError = "open"
    """Behaviour while the store fails: admit, answer 503, or limit in this process alone."""
    processes: Annotated[WholeNumber, Field(ge=1, le=100_000)] = 1
    """Number of processes that divide the limits under ``local``."""
    timeout: Annotated[float, Field(gt=0, le=60), BeforeValidator(_duration)] = 0.1
    """Longest total wait of a request for the store: seconds, or ``100ms``."""
    trusted_proxies: Annotated[Strings, each_is(lambda entry: TrustedProxies([entry], "x-forwarded-for"))] = ()
    """Trusted proxies: addresses, CIDRs, lists such as ``cloudflare``, ``file:PATH`` for your own list, ``unix`` for unix
    sockets.
    """
    forwarded_header: HeaderName = "x-forwarded-for"
    """Header of trusted proxies; ``forwarded`` for RFC 7239."""
    ipv6_prefix: Annotated[WholeNumber, Field(ge=32, le=128)] = 64
    """Prefix length that groups IPv6 clients."""
    api_key_header: HeaderName = API_KEY_HEADER
    """Header with the API key; ``authorization`` reads a Bearer token (RFC 6750)."""
    identify: Annotated[ImportString[Callable[..., Any]], AfterValidator(check_takes_request)] | None = None
    """Returns the caller: ``(request) -> Caller | None``. May be async on ASGI."""
    headers: Annotated[Strings, each_is(_check_style), AfterValidator(_once)] = ("x-ratelimit",)
    """Styles of rate limit headers."""
    header_names: Annotated[dict[str, str], NoDecode, BeforeValidator(_mapped)] = {}
    """Other names of rate limit headers: ``{X-RateLimit-Limit: X-Quota}``."""
    shadow: bool = False
    """Decide and report, but never refuse."""
    strict: bool = False
    """Report at startup which limits admit more than their count in one period."""
    on_denied: ImportString[Callable[..., Any]] | None = None
    """ASGI or WSGI application that answers refused requests."""
    new_buckets: Annotated[WholeNumber, Field(ge=0, le=1_000_000)] = 1000
    """Buckets per minute that a client may open with invented keys, in each process; 0: unlimited."""
    body_limit: Annotated[WholeNumber, Field(ge=1, le=1_048_576)] = BODY_LIMIT
    """Longest body that rules may read, in bytes. Larger ones get 413."""
    key_prefix: Annotated[str, Field(min_length=1, max_length=LONGEST_PREFIX)] = "limitgate"
    """Prefix of every key in the store."""
    require_store: bool = False
    """Fail at startup if the store does not answer within 5 seconds."""
    reload: Annotated[
        float, Field(ge=0, le=86_400, allow_inf_nan=False), BeforeValidator(_duration), AfterValidator(_polling)
    ] = 0.0
    """Seconds, or ``2s``, between polls of rule files; 0: no polling."""
    names: Names = "masked"
    """How clients appear in log lines: ``masked``, ``full``, or ``off``."""
    refusal_logs: Annotated[WholeNumber, Field(ge=0, le=10_000)] = 60
    """Log lines per minute about refusals, in each process; 0: none."""
    observers: Annotated[tuple[Any, ...], NoDecode, BeforeValidator(_listed)] = ()
    """Receivers of metrics: ``prometheus``, ``opentelemetry``, or an `Observer`. See docs/observing.md."""
    fleet: bool = True
    """Write a snapshot to the store every 2 seconds, for ``limitgate status``, ``top``, the page and the exporter. See
    docs/watching.md.
    """
    secret: Annotated[SecretStr | None, AfterValidator(_fitting)] = None
    """Key of the digests in the store, 16 to 64 bytes. Prevents guesses of addresses and API keys from these digests."""

    def __init__(self, **options: Any) -> None:
        unknown = options.keys() - type(self).model_fields.keys()
        if "credentials" in unknown:
            raise TypeError(
                "unknown option 'credentials', expected store=AsyncRedisStore(url, credentials=...), "
                "or under WSGI store=RedisStore(url, credentials=...)"
            )
        if unknown:
            raise TypeError(f"unknown option {min(unknown)!r}, {expected_of(min(unknown), sorted(type(self).model_fields))}")
        try:
            super().__init__(_env_file=named_env_file() or self._dotenv, **options)
        except ValidationError as error:
            mistake = ConfigError.explaining(error, "options", type(self).model_fields)
            if not mistake.field or mistake.field[0] in options:
                raise mistake from None
            variable = f"{PREFIX}{mistake.field[0]}".upper()
            raise ConfigError.at(mistake.field, f"{mistake.reason} (from the variable {variable})", "options") from None
        except TypeError as error:
            message = f"options: {error}, expected identify and on_denied as callables, or as text like 'package.module:name'"
            raise ConfigError(message) from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic fixes the parameters
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Skip sources without LIMITGATE_* variables: searching them takes a third of a gate's construction.
        prefix = PREFIX.lower()
        variables = [
            source
            for source in (env_settings, dotenv_settings)
            if isinstance(source, EnvSettingsSource) and any(name.startswith(prefix) for name in source.env_vars)
        ]
        return init_settings, *variables

    @field_validator("header_names")
    @classmethod
    def _names_are_of_styles(cls, names: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for name in names.values():
            check_header(name)
        if "headers" in info.data:  # invalid headers are reported separately
            renamed_styles(info.data["headers"], names)
        return names

    @property
    def header_styles(self) -> tuple[Style, ...]:
        return renamed_styles(self.headers, self.header_names)

    @property
    def secret_bytes(self) -> bytes:
        return self.secret.get_secret_value().encode() if self.secret else b""


class GateSettings(Settings):
    """`Settings` that don't read ``.env`` in the working folder."""

    _dotenv = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)


def naming_variable(error: ConfigError, option: str, given: Container[str]) -> ConfigError:
    """Add the variable's name to an error, unless the option was given in code."""
    return error if option in given else ConfigError(f"{error} (from the variable {PREFIX}{option.upper()})", (option,))


def named_env_file() -> str | None:
    name = os.environ.get(ENV_FILE)
    if name and not os.path.isfile(name):  # noqa: PTH113 - the name stays text
        raise ConfigError(f"{ENV_FILE}: {name!r:.200} is not a file, expected the path of one")
    return name or None


def warn_about_environment() -> None:
    """Log variables that are probably mistakes."""
    known = {ENV_FILE, *(PREFIX + name.upper() for name in Settings.model_fields)}
    env_file = named_env_file()
    given = {name.upper() for name in (*os.environ, *(dotenv_values(env_file) if env_file else ()))}
    for name in sorted(given - known):
        if name.startswith(PREFIX):
            near = meant(name.removeprefix(PREFIX), Settings.model_fields)
            cure = "remove it, or see help(limitgate.Settings)" if near is None else f"did you mean {PREFIX}{near.upper()}?"
            Diagnosis.UNKNOWN_VARIABLE.log(name, cure)
    if "*" in trusted_by_server():
        Diagnosis.SERVER_TRUSTS_ALL.log()


def server_options() -> list[str]:
    """Return options from the command line and ``GUNICORN_CMD_ARGS``."""
    return [*sys.argv[1:], *os.environ.get("GUNICORN_CMD_ARGS", "").split()]


def _values(option: str, *variables: str) -> list[str]:
    options = server_options()
    found = [os.environ.get(name, "") for name in variables]
    found += [value for before, value in pairwise(options) if before == option]
    found += [each.removeprefix(f"{option}=") for each in options if each.startswith(f"{option}=")]
    return [value.strip("'\"") for value in found]


def trusted_by_server() -> list[str]:
    return [value for value in _values("--forwarded-allow-ips", "FORWARDED_ALLOW_IPS") if value]


def workers_of_server() -> int:
    """Return the number of workers in the server's options."""
    short = [each.removeprefix("-w") for each in server_options() if each.startswith("-w")]
    told = [*_values("--workers", "WEB_CONCURRENCY"), *_values("-w"), *short]
    return max((int(count) for count in told if count.isascii() and count.isdigit()), default=1)
