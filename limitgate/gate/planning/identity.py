"""Identity: the caller behind a request, its tier, and the API key that counts, if any."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from limitgate.gate.planning.user_ids import EXPECTED
from limitgate.http.client_ip import TrustedProxies, grouped
from limitgate.http.request import HeaderNames, Request
from limitgate.limits.priority import NORMAL, Priority
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.rules.callers import DEFAULT_TIER, Caller, Callers
from limitgate.rules.options import Given


class Subject:
    """A request with its caller and tier: all that the parts of keys read."""

    __slots__ = ("_identities", "caller", "fields", "request", "route", "tier")

    def __init__(self, request: Request, caller: Caller | None, tier: str, identities: Identities) -> None:
        self.request = request
        self.caller = caller
        self.tier = tier
        """The tier whose rules apply."""
        self.route: str | None = None
        """The template of the framework's route, None where it is not known."""
        self._identities = identities
        self.fields: dict[str, str] = {}
        """Fields of keys' texts by the labels of their parts, each made once for all keys; empty for an absent part."""

    @property
    def api_key(self) -> str | None:
        """Text that stands for the API key; None if there is none, or none that counts."""
        return self._identities.api_key(self)

    @property
    def own_limits(self) -> Mapping[str, Given] | None:
        """The caller's own limits by the names of rules, if any."""
        return None if self.caller is None else self.caller.limits

    @property
    def user(self) -> Any:
        """The user that a layer around this one has set, None if there is none."""
        return self.request.user

    def report_no_id(self, user: object) -> None:
        """Log a user without an id, once (LG049)."""
        self._identities.no_id.log(type(user).__name__, EXPECTED)

    @property
    def is_real(self) -> bool:
        """True if its headers are believed: it is a known caller, or a client in ``trusted_proxies``."""
        return self.caller is not None or self._identities.trust(self.request.client)

    @property
    def priority(self) -> Priority:
        """That of the caller."""
        return self.caller.priority if self.caller else NORMAL

    def address(self) -> str | None:
        """Address or network that the client is counted by; None without a peer address."""
        client = self.request.client
        return None if client is None else grouped(client, self._identities.ipv6_prefix)


class Identities:
    """Finds the caller behind a request.

    Listed callers prove themselves by an API key or, where they or their proxy are trusted, by headers; ``identifies`` says
    whether the application names callers itself. A caller of a tier outside of ``tiers`` gets the default rules.
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
        self.proxies = proxies
        self._tiers = tiers
        self._identifies = identifies
        self._api_key_header = api_key_header.lower()
        keys = [self._api_key_header] if callers.list_keys else []
        self._telling = HeaderNames([*keys, *callers.header_names])
        """Headers of which a request of a listed caller has one at least."""
        self.no_id = no_id or Once(Diagnosis.USER_WITHOUT_ID)
        """Logs a user without an id."""

    def may_be_invented(self, label: str) -> bool:
        """True if a client may make up values of a key's part. Methods are no such part: invented ones are all one."""
        return label == "host" or label.startswith("header:") or (label == "api_key" and not self.vouch_for_keys)

    @property
    def list_callers(self) -> bool:
        """True if anybody may be told from the rest by what a request has in it."""
        return bool(self._callers)

    def address(self, request: Request) -> str | None:
        """Address or network that a request's client is counted by; None without a peer address."""
        client = request.client
        return None if client is None else grouped(client, self.ipv6_prefix)

    @property
    def vouch_for_keys(self) -> bool:
        """True if an API key that anybody could have invented is told from a real one."""
        return self._callers.list_keys or self._identifies

    def trust(self, client: str | None) -> bool:
        """True if the headers of a client are believed."""
        return self.proxies.trust(client)

    def subject(self, request: Request, identified: Caller | None) -> Subject:
        """The subject of a request, given the caller that the application has named, if any."""
        caller = self.caller(request, identified)
        return Subject(request, caller, self.tier_of(caller), self)

    def caller(self, request: Request, identified: Caller | None) -> Caller | None:
        """The caller behind a request: the one that the application has named, else one that is listed, if any."""
        if identified is None:
            return self.listed(request) if self._callers else None
        return identified

    def listed(self, request: Request) -> Caller | None:
        """The caller that a request comes from, if it is one of those that are listed."""
        if not request.opened_headers().have_any(self._telling):
            return None  # almost all requests
        return self._with_key(request) or self._callers.with_headers(request, self.proxies)

    def tier_of(self, caller: Caller | None) -> str:
        """The tier whose rules apply to a caller."""
        return DEFAULT_TIER if caller is None or caller.tier not in self._tiers else caller.tier

    def api_key(self, subject: Subject) -> str | None:
        """Text that stands for the API key of a request.

        Where keys are listed, a key that is not counts as none. Where the application names callers, a caller's key is no
        more than the caller, so that nobody gets another bucket by sending another key. Otherwise every key counts.
        """
        presented = self._presented(subject.request)
        if presented is None:
            return None
        if self._callers.list_keys:
            return self._callers.listed_key(presented)
        if self._identifies:
            return subject.caller.id if subject.caller else None
        return presented

    def _with_key(self, request: Request) -> Caller | None:
        presented = self._presented(request) if self._callers.list_keys else None
        return None if presented is None else self._callers.with_key(presented)

    def _presented(self, request: Request) -> str | None:
        value = request.opened_headers().identity(self._api_key_header)
        if self._api_key_header == "authorization":
            value = value[7:].strip() if value[:7].lower() == "bearer " else ""
        return value or None
