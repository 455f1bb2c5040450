"""Identifies a request's caller, tier, API key and user."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from inspect import isawaitable
from types import NoneType
from typing import Any
from uuid import UUID

from limitgate.errors import HeadersTooLargeError
from limitgate.gate.flow import Awaited, Flow
from limitgate.http.client_ip import TrustedProxies, grouped
from limitgate.http.request import HeaderNames, Request
from limitgate.internal_errors import place_in, raise_interruption
from limitgate.limits.bucket import NORMAL, Priority
from limitgate.messages.diagnostics import Diagnosis, Once, OncePerValue
from limitgate.messages.text import expected_of, shortened
from limitgate.rules.callers import DEFAULT_TIER, Caller, Callers
from limitgate.rules.options import Given

_LONGEST_TIER = 40

SyncIdentify = Callable[[Request], Caller | None]
AnyIdentify = Callable[[Request], Caller | Awaitable[Caller | None] | None]


class Subject:
    """A request with caller and tier: the source of key parts."""

    __slots__ = ("_identities", "caller", "fields", "request", "route", "tier")

    def __init__(self, request: Request, caller: Caller | None, tier: str, identities: Identities) -> None:
        self.request: Request = request
        self.caller: Caller | None = caller
        self.tier: str = tier
        self.route: str | None = None
        self._identities = identities
        self.fields: dict[str, str] = {}
        """Encoded key parts by label, empty if missing."""

    def api_key(self) -> str | None:
        return self._identities.api_key(self)

    @property
    def own_limits(self) -> Mapping[str, Given] | None:
        return None if self.caller is None else self.caller.limits

    @property
    def user(self) -> Any:
        return self.request.user

    def report_no_id(self, user: object) -> None:
        self._identities.no_id.log(type(user).__name__, EXPECTED_USER)

    @property
    def is_real(self) -> bool:
        """True for a known caller, or a client among ``trusted_proxies``."""
        return self.caller is not None or self._identities.trust(self.request.client)

    @property
    def priority(self) -> Priority:
        return self.caller.priority if self.caller else NORMAL

    def address(self) -> str | None:
        """Address or network; None without a peer."""
        client = self.request.resolved_client()
        return None if client is None else grouped(client, self._identities.ipv6_prefix)


class Identities:
    """Finds a request's caller by API key, or by headers if its client or proxy is trusted.

    ``no_tier`` logs an unknown tier, which gets the default rules. ``identifies`` is True if there is an ``identify``.
    """

    def __init__(
        self,
        callers: Callers,
        proxies: TrustedProxies,
        tiers: Collection[str],
        *,
        identifies: bool,
        api_key_header: str,
        ipv6_prefix: int,
        no_id: Once | None = None,
        no_tier: OncePerValue | None = None,
    ) -> None:
        self.ipv6_prefix = ipv6_prefix
        self._callers = callers
        self.list_callers: bool = bool(callers)
        self._lists_keys = callers.list_keys
        self.proxies = proxies
        self._tiers = tiers
        self._identifies = identifies
        self._api_key_header = api_key_header.lower()
        keys = [self._api_key_header] if self._lists_keys else []
        self._telling = HeaderNames([*keys, *callers.header_names])
        self.no_id: Once = no_id or Once(Diagnosis.USER_WITHOUT_ID)
        self._no_tier = no_tier

    def may_be_invented(self, label: str) -> bool:
        """True for values that clients choose. Unknown methods share one value."""
        return label == "host" or label.startswith(("header:", "json:")) or (label == "api_key" and not self.vouch_for_keys)

    def address(self, request: Request) -> str | None:
        client = request.client
        return None if client is None else grouped(client, self.ipv6_prefix)

    @property
    def vouch_for_keys(self) -> bool:
        """True if invented API keys are detected."""
        return self._lists_keys or self._identifies

    def trust(self, client: str | None) -> bool:
        return self.proxies.trust(client)

    def subject(self, request: Request, identified: Caller | None) -> Subject:
        caller = self.listed(request) if identified is None and self.list_callers else identified
        return Subject(request, caller, self.tier_of(caller), self)

    def listed(self, request: Request) -> Caller | None:
        if not request.opened_headers().have_any(self._telling):
            return None
        presented = self.presented_key(request) if self._callers.list_keys else None
        caller = None if presented is None else self._callers.with_key(presented)
        return caller or self._callers.with_headers(request, self.proxies)

    def tier_of(self, caller: Caller | None) -> str:
        if caller is None:
            return DEFAULT_TIER
        tier = caller.tier
        if tier in self._tiers:
            return tier
        name = shortened(tier, _LONGEST_TIER)
        if self._no_tier is not None and self._no_tier.is_new(name):
            self._no_tier.log(name, repr(name), expected_of(name, self._tiers))
        return DEFAULT_TIER

    def api_key(self, subject: Subject) -> str | None:
        """Return the text for an API key; unlisted keys count as missing.

        With ``identify``, the caller's id replaces the key, so that all keys of a caller share a bucket.
        """
        presented = self.presented_key(subject.request)
        if presented is None:
            return None
        if self._lists_keys:
            return self._callers.listed_key(presented)
        if self._identifies:
            return subject.caller.id if subject.caller else None
        return presented

    def presented_key(self, request: Request) -> str | None:
        """Return the API key in a request's header, listed or not."""
        value = request.opened_headers().identity(self._api_key_header)
        if self._api_key_header == "authorization":
            value = value[7:].strip() if value[:7].lower() == "bearer " else ""
        return value or None


ID_FIELDS = ("identity", "id", "pk", "get_id", "user_id", "sub", "username", "display_name", "email")
"""Attributes with a user's id, in order of preference."""
EXPECTED_USER = "text, a number, a UUID, or an object with identity, id, pk or username, or a tuple or mapping of these"


class NoIdError(TypeError): ...


def user_id(user: Any) -> str | None:
    """Return the text for a user; None if anonymous. Raises `NoIdError`.

    An integer or a UUID is the same as its text. A tuple differs from every text.
    """
    if isinstance(user, _PLAIN):
        return _text(user)
    fields = user if isinstance(user, Mapping) else None
    if not _field(user, fields, "is_authenticated", default=True):
        return None
    for name in ID_FIELDS:
        text = _text(_field(user, fields, name))
        if text:
            return text
    if isinstance(user, tuple) or fields == {}:
        return _joined(tuple(user))
    raise NoIdError(f"a {type(user).__name__}, expected {EXPECTED_USER}")


def _field(user: Any, fields: Mapping[Any, Any] | None, name: str, *, default: Any = None) -> Any:
    try:
        value = getattr(user, name, default) if fields is None else fields.get(name, default)
        return value() if name == "get_id" and callable(value) else value
    # Raised by base classes of Starlette and Flask-Login.
    except NotImplementedError:
        return default


def _text(value: Any) -> str | None:
    if isinstance(value, _PLAIN):
        return None if isinstance(value, NoneType | bool) else _plain(str(value))
    if isinstance(value, tuple):
        return _joined(value)
    kind: Any = type(value)
    if callable(value) or (kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__):
        return None
    return _plain(str(value))


_PLAIN = (str, int, UUID, NoneType)
_TUPLE = "\0"
"""Prefix of a tuple's text; doubled if other text starts with it."""


def _plain(text: str) -> str | None:
    return (_TUPLE + text if text.startswith(_TUPLE) else text) or None


def _joined(users: tuple[Any, ...]) -> str | None:
    """Join the ids of a tuple. Raises `NoIdError` if one is missing, because users would share the result."""
    texts = [user_id(each) for each in users]
    if None in texts:
        raise NoIdError(f"a tuple with an empty element, expected {EXPECTED_USER}")
    return f"{_TUPLE}{texts}" if texts else None


UNASKED = object()


class Identify:
    """Calls ``identify``. Logs failures once per place (LG071), without their text."""

    def __init__(self, function: AnyIdentify) -> None:
        self._function = function
        self._logged = OncePerValue(Diagnosis.IDENTIFY_FAILED)

    def finding(self, request: Request, identified: object) -> Flow[Caller | None]:
        """Return the caller, awaited if needed. Raises `TypeError` for other types."""
        try:
            if identified is UNASKED:
                identified = self._function(request)
            if isawaitable(identified):
                identified = yield Awaited(identified, "identify is async, expected a plain function under WSGI")
        except Exception as error:
            self.note(error)
            raise
        if identified is None or isinstance(identified, Caller):
            return identified
        gave = f"gave a {type(identified).__name__}"
        self._logged.log(gave, f"it {gave}")
        raise TypeError(f"identify {gave}, expected a Caller or None")

    def note(self, error: Exception) -> None:
        """Log a failure. An error about headers isn't a failure."""
        if not isinstance(error, HeadersTooLargeError):
            raise_interruption(error)
            what = f"{type(error).__name__} at {place_in(self._function, error)}"
            self._logged.log(what, what)
