"""`Caller`, and the callers that a rule file lists."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, Field, PlainValidator, StrictBool, StrictStr, field_validator, model_validator

from limitgate.errors import ConfigError
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.request import Headers, Request
from limitgate.limits.bucket import NORMAL, RESERVES, Priority, is_priority
from limitgate.limits.limit import Limit
from limitgate.rules.options import Given, check_header, read_limits

DEFAULT_TIER = "default"
API_KEY_HEADER = "x-api-key"
"""Default of the option ``api_key_header``."""

_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}", re.ASCII)

_UNSENT = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]|\A[ \t]|[ \t]\Z")
"""Servers refuse or remove these."""

_LONGEST = 256
_MOST_BYTES = 4 * _LONGEST
Text = Annotated[StrictStr, Field(min_length=1, max_length=_LONGEST)]


@dataclass(frozen=True, slots=True, init=False)
class Caller:
    """A caller, as ``identify`` returns it.

    Raises `ConfigError` for an empty ``id`` or list of limits, `TypeError` or `ValueError` for other invalid values.
    """

    id: str
    """Identity, used by the key part ``caller``. Not empty."""
    tier: str
    """Tier; ``default`` if omitted or unknown."""
    limits: Mapping[str, Given] = field(hash=False)
    """Own limits by rule name: text, a `Limit`, a list, or None for no limit."""
    priority: Priority
    """``high``, ``normal`` (default) or ``low``, for rules with a ``reserve``."""

    def __init__(
        self,
        id: str,  # noqa: A002 - the contract names it so
        tier: str = DEFAULT_TIER,
        limits: Mapping[str, Given] | None = None,
        priority: Priority = NORMAL,
    ) -> None:
        become = object.__setattr__
        become(self, "id", id)
        become(self, "tier", tier)
        become(self, "limits", {} if limits is None else limits)
        become(self, "priority", priority)
        if type(limits) is not dict and not isinstance(self.limits, Mapping):
            raise TypeError(
                f"the limits of a Caller are a {type(limits).__name__}, expected a mapping such as {{'api': '500/minute'}}"
            )
        for rule, given in self.limits.items():
            # Applications make a caller for each request.
            if type(given) is not str or not given or type(rule) is not str:
                _check_given(rule, given)
        if not isinstance(self.id, str) or not isinstance(self.tier, str):
            raise TypeError(
                f"a Caller has an id of type {type(self.id).__name__} and a tier of type {type(self.tier).__name__}, "
                "expected text for both"
            )
        if not self.id:
            raise ConfigError("a Caller has no id, expected unique text, or None instead of the Caller")
        if not is_priority(self.priority):
            raise ValueError(f"a Caller has priority {self.priority!r:.40}, expected one of {', '.join(RESERVES)}")


def _check_given(rule: object, given: object) -> None:
    if not isinstance(rule, str):
        raise TypeError(f"the limits of a Caller are for {rule!r:.80}, expected the name of a rule")
    several = isinstance(given, list | tuple)
    if several and not given:
        raise ConfigError(f"the limits of a Caller for {rule!r:.80} are empty, expected limits, or None for no limit")
    for each in given if isinstance(given, list | tuple) else (given,):
        if not isinstance(each, str | Limit | Mapping) and not (each is None and not several):
            raise TypeError(
                f"the limits of a Caller for {rule!r:.80} contain {each!r:.80}, expected text such as '500/minute', a Limit, a "
                "list of them, or None for no limit; '0/day' refuses every request"
            )


def _by_rule(value: object) -> dict[str, tuple[Limit, ...]]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError("expected a mapping from rules to limits, such as {api: 500/minute}")
    limits, mistakes = {}, []
    for name, given in value.items():
        try:
            limits[name] = read_limits(given)
        except ConfigError as error:
            mistakes.append(ConfigError.at((name,), str(error)))
    if mistakes:
        raise ConfigError.first_of(mistakes)
    return limits


class KnownCaller(BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True):
    """A caller in a rule file."""

    id: Text
    """Identity, used by the key part ``caller``."""
    api_key: StrictStr | None = None
    """``sha256:`` and the key's SHA-256 in 64 hex digits."""
    header: Annotated[dict[Text, Text] | None, Field(repr=False)] = None
    """Headers that must all match. Accepted only from ``trusted_proxies``."""
    set_by_proxy: StrictBool = False
    """Accept headers from trusted proxies, which must set them and strip those of clients."""
    tier: Text | None = None
    """Tier; by default that of the file."""
    priority: Priority = NORMAL
    """High may use the ``reserve`` of rules, normal may not; for low, the reserve is twice as large."""

    limits: Annotated[dict[str, tuple[Limit, ...]], PlainValidator(_by_rule)] = {}
    """Limits that replace those of rules, by rule name; each is a limit or a list."""

    @field_validator("api_key")
    @classmethod
    def _key_is_a_digest(cls, api_key: str | None) -> str | None:
        if api_key is not None and not _DIGEST.fullmatch(api_key):
            raise ConfigError(
                "expected sha256: and 64 hex digits, as sha256sum prints them before its dash, not the key itself"
            )
        return api_key

    @field_validator("header")
    @classmethod
    def _header_can_be_sent(cls, header: dict[str, str] | None) -> dict[str, str] | None:
        mistakes: list[ConfigError] = []
        names = set[str]()
        for name, value in (header or {}).items():
            try:
                check_header(name)
            except ConfigError as error:
                mistakes.append(ConfigError.at((name,), str(error)))
            if name.lower() in names:
                mistakes.append(ConfigError.at((name,), "duplicate name, expected it once, because case does not matter"))
            if _UNSENT.search(value):
                what = "a value without control characters, and without white space at its ends"
                mistakes.append(ConfigError.at((name,), f"no request can send this, expected {what}"))
            names.add(name.lower())
        if mistakes:
            raise ConfigError.first_of(mistakes)
        return header

    @model_validator(mode="after")
    def _can_be_recognised(self) -> KnownCaller:
        if not self.api_key and not self.header:
            raise ConfigError(f"caller {self.id!r} has neither api_key nor header, expected one of them")
        if self.set_by_proxy and not self.header:
            raise ConfigError(f"caller {self.id!r} has set_by_proxy, but no header, expected the header that the proxy sets")
        return self


class Callers:
    def __init__(self, listed: Iterable[KnownCaller] = ()) -> None:
        self._by_key: dict[bytes, list[tuple[bytes, Caller]]] = {}
        self._by_header: list[tuple[dict[str, str], Caller, bool]] = []
        mistakes: list[ConfigError] = []
        for place, entry in enumerate(listed):
            caller = Caller(entry.id, entry.tier or DEFAULT_TIER, entry.limits, entry.priority)
            if entry.api_key:
                digest = bytes.fromhex(entry.api_key.removeprefix("sha256:"))
                alike = self._by_key.setdefault(digest[:8], [])
                if other := next((other for listed, other in alike if listed == digest), None):
                    message = f"caller {entry.id!r} has the same api_key as caller {other.id!r}, expected a different key"
                    mistakes.append(ConfigError.at(("callers", place, "api_key"), message))
                alike.append((digest, caller))
            if entry.header:
                header = {name.lower(): value for name, value in entry.header.items()}
                if other := next((other for listed, other, _ in self._by_header if listed == header), None):
                    message = f"caller {entry.id!r} has the same header as caller {other.id!r}, expected a different header"
                    mistakes.append(ConfigError.at(("callers", place, "header"), message))
                self._by_header.append((header, caller, entry.set_by_proxy))
        if mistakes:
            raise ConfigError.first_of(mistakes)

    @property
    def header_names(self) -> list[str]:
        return [name for header, _, _ in self._by_header for name in header]

    @property
    def list_keys(self) -> bool:
        return bool(self._by_key)

    def every(self) -> list[Caller]:
        callers = [caller for alike in self._by_key.values() for _, caller in alike]
        return callers + [caller for _, caller, _ in self._by_header]

    def named(self, name: str) -> Caller | None:
        return next((caller for caller in self.every() if caller.id == name), None)

    def __bool__(self) -> bool:
        return bool(self._by_key or self._by_header)

    def with_key(self, api_key: str) -> Caller | None:
        """Return the caller with this key, as text or as a header decoded as latin-1."""
        match = self._match(api_key)
        return match[1] if match else None

    def listed_key(self, api_key: str) -> str | None:
        """Return the hex digest of a listed key, whatever its encoding."""
        match = self._match(api_key)
        return match[0].hex() if match else None

    def _match(self, api_key: str) -> tuple[bytes, Caller] | None:
        # Clients cannot choose the first bytes of a digest. The rest is compared in constant time.
        for sent in _as_bytes(api_key):
            digest = hashlib.sha256(sent).digest()
            for listed, caller in self._by_key.get(digest[:8], ()):
                if hmac.compare_digest(listed, digest):
                    return listed, caller
        return None

    def with_headers(self, request: Request, proxies: TrustedProxies) -> Caller | None:
        """Return the caller that headers identify. The client must be trusted, or the proxy if ``set_by_proxy``."""
        if not self._by_header or not proxies.trust(request.peer):
            return None
        headers = request.headers
        for expected, caller, set_by_proxy in self._by_header:
            if _are_equal(headers, expected) and (set_by_proxy or proxies.trust(request.client)):
                return caller
        return None


def _as_bytes(sent: str) -> Iterator[bytes]:
    yield sent.encode("utf-8", "surrogatepass")
    if not sent.isascii():
        with suppress(UnicodeEncodeError):
            yield sent.encode("latin-1")


def _are_equal(headers: Headers, expected: Mapping[str, str]) -> bool:
    """Compare in constant time."""
    for name, value in expected.items():
        sent = headers.end(name, _MOST_BYTES + 1)
        if len(sent) > _MOST_BYTES or not any(hmac.compare_digest(form, value.encode()) for form in _as_bytes(sent)):
            return False
    return True
