"""Identifies the caller of a request, its tier and its API key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from limitgate.gate.planning.user_ids import EXPECTED
from limitgate.http.client_ip import TrustedProxies, grouped
from limitgate.http.request import HeaderNames, Request
from limitgate.limits.priority import NORMAL, Priority
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.rules.callers import DEFAULT_TIER, Caller, Callers
from limitgate.rules.options import Given

SyncIdentify = Callable[[Request], Caller | None]
AnyIdentify = Callable[[Request], Caller | Awaitable[Caller | None] | None]


class Subject:
    """A request with its caller and tier, the source of all key parts."""

    __slots__ = ("_identities", "caller", "fields", "request", "route", "tier")

    def __init__(self, request: Request, caller: Caller | None, tier: str, identities: Identities) -> None:
        self.request = request
        self.caller = caller
        self.tier = tier
        self.route: str | None = None
        self._identities = identities
        self.fields: dict[str, str] = {}
        """Cached key fields by label; empty for a missing part."""

    def api_key(self) -> str | None:
        """Return the text for the API key; None without a valid one."""
        return self._identities.api_key(self)

    @property
    def own_limits(self) -> Mapping[str, Given] | None:
        """The caller's individual limits by rule name."""
        return None if self.caller is None else self.caller.limits

    @property
    def user(self) -> Any:
        """The user set by an outer layer."""
        return self.request.user

    def report_no_id(self, user: object) -> None:
        """Log a user without an id once (LG049)."""
        self._identities.no_id.log(type(user).__name__, EXPECTED)

    @property
    def is_real(self) -> bool:
        """True for a known caller, or a client in ``trusted_proxies``."""
        return self.caller is not None or self._identities.trust(self.request.client)

    @property
    def priority(self) -> Priority:
        """Priority of the caller."""
        return self.caller.priority if self.caller else NORMAL

    def address(self) -> str | None:
        """Return the address or network to count; None without a peer address."""
        client = self.request.resolved_client()
        return None if client is None else grouped(client, self._identities.ipv6_prefix)


class Identities:
    """Finds the caller of a request.

    Listed callers send an API key, or headers if they or their proxy are trusted. ``identifies`` is True if the application
    has ``identify``. A caller with a tier outside ``tiers`` gets the default rules.
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
    ) -> None:
        self.ipv6_prefix = ipv6_prefix
        self._callers = callers
        self._lists_keys = callers.list_keys
        self.proxies = proxies
        self._tiers = tiers
        self._identifies = identifies
        self._api_key_header = api_key_header.lower()
        keys = [self._api_key_header] if self._lists_keys else []
        self._telling = HeaderNames([*keys, *callers.header_names])
        self.no_id = no_id or Once(Diagnosis.USER_WITHOUT_ID)

    def may_be_invented(self, label: str) -> bool:
        """Return True if clients may invent values. Unknown methods share one value."""
        return label == "host" or label.startswith("header:") or (label == "api_key" and not self.vouch_for_keys)

    @property
    def list_callers(self) -> bool:
        """True with listed callers."""
        return bool(self._callers)

    def address(self, request: Request) -> str | None:
        """Return the address or network to count; None without a peer address."""
        client = request.client
        return None if client is None else grouped(client, self.ipv6_prefix)

    @property
    def vouch_for_keys(self) -> bool:
        """True if invented API keys can be detected."""
        return self._lists_keys or self._identifies

    def trust(self, client: str | None) -> bool:
        """Return True if the client's headers are trusted."""
        return self.proxies.trust(client)

    def subject(self, request: Request, identified: Caller | None) -> Subject:
        """Return the subject of a request. ``identified`` is the caller from ``identify``."""
        caller = self.caller(request, identified)
        return Subject(request, caller, self.tier_of(caller), self)

    def caller(self, request: Request, identified: Caller | None) -> Caller | None:
        """Return the caller from ``identify``, or else a listed caller."""
        if identified is None:
            return self.listed(request) if self._callers else None
        return identified

    def listed(self, request: Request) -> Caller | None:
        """Return the listed caller of a request, if any."""
        if not request.opened_headers().have_any(self._telling):
            return None
        return self._with_key(request) or self._callers.with_headers(request, self.proxies)

    def tier_of(self, caller: Caller | None) -> str:
        """Return the caller's tier."""
        return DEFAULT_TIER if caller is None or caller.tier not in self._tiers else caller.tier

    def api_key(self, subject: Subject) -> str | None:
        """Return the text for an API key.

        With listed keys, other keys count as missing. With ``identify``, the caller's id replaces the key, so that another key
        does not open another bucket.
        """
        presented = self._presented(subject.request)
        if presented is None:
            return None
        if self._lists_keys:
            return self._callers.listed_key(presented)
        if self._identifies:
            return subject.caller.id if subject.caller else None
        return presented

    def _with_key(self, request: Request) -> Caller | None:
        presented = self._presented(request) if self._lists_keys else None
        return None if presented is None else self._callers.with_key(presented)

    def _presented(self, request: Request) -> str | None:
        value = request.opened_headers().identity(self._api_key_header)
        if self._api_key_header == "authorization":
            value = value[7:].strip() if value[:7].lower() == "bearer " else ""
        return value or None
