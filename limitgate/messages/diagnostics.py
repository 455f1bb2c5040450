"""Diagnostics: log lines with a code for ``limitgate doc``, without client data."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from enum import Enum
from itertools import count

log: logging.Logger = logging.getLogger("limitgate")


class Diagnosis(Enum):
    """A code with a text. Codes are never reused."""

    MEMORY_PER_WORKER = "LG001", "%d workers with memory:// count separately, so the limits multiply; use Redis to share them"
    SERVER_TRUSTS_ALL = (
        "LG002",
        (
            "the server accepts forwarding headers from every client, by FORWARDED_ALLOW_IPS or --forwarded-allow-ips '*', so "
            "clients can choose their address; name your proxies instead"
        ),
    )
    UNKNOWN_VARIABLE = "LG003", "%s is not a setting of LimitGate and is ignored; %s"
    TRUSTS_ALL = "LG004", "trusted_proxies covers all of %s, so clients can choose their address; name your proxies instead"
    UNLISTED_KEYS = (
        "LG005",
        (
            "%s counts by API key, but no keys are listed and identify is not set, so clients can invent keys to get new "
            "buckets; list digests of keys under callers, or set identify"
        ),
    )
    UNTRUSTED_FORWARDING = (
        "LG006",
        (
            "a request carried %s, which was ignored because its peer is not in trusted_proxies; if the peer is your proxy, "
            "all its clients count as one: add its address to trusted_proxies"
        ),
    )
    OVERSHOOTS = "LG007", "%s: %s admits up to %d within one period; 'burst %d' limits it to %d"
    CLOCK_STEPPED = (
        "LG011",
        (
            "the clock of %s stepped back, so clients may wait longer; let NTP slew the clock; further steps are counted, but "
            "not logged"
        ),
    )
    TOO_MANY_BUCKETS = (
        "LG013",
        (
            "%s: one client opens more than %d new buckets per minute, so its further keys share one bucket; if it is your "
            "proxy, add it to trusted_proxies; if it has that many customers, raise new_buckets"
        ),
    )
    OVERLOADED = (
        "LG015",
        (
            "%s; this process limits such requests without the store, whatever on_error is; lower the server's concurrency "
            "limit or add workers"
        ),
    )
    CLOCK_LEAPT = (
        "LG017",
        (
            "the clock of %s jumped %.1f seconds ahead, or this machine was suspended, so usage has drained early and "
            "slots have expired; let NTP slew the clock"
        ),
    )
    EVICTS = (
        "LG018",
        (
            "%s evicts buckets when its memory is full (maxmemory-policy %s), which can admit refused clients; set "
            "maxmemory-policy to volatile-ttl or noeviction"
        ),
    )
    REPLACED = (
        "LG019",
        "%s was restarted or replaced: usage that was not saved or replicated is lost; set appendonly to yes to save it",
    )
    OWN_ERROR = (
        "LG020",
        "internal error in LimitGate: %s at %s; on_error decided on the requests that waited; please report this line",
    )
    RIGHTS = "LG021", "the user at %s lacks permissions, so calls that need them fail; run ACL SETUSER <user> %s", logging.ERROR
    LOGIN = "LG022", "%s rejects the login: %s", logging.ERROR
    DATABASE = "LG023", "%s does not have the database in the URL: %s", logging.ERROR
    TLS = "LG024", "%s and its URL disagree on TLS: %s", logging.ERROR
    SERVER_KIND = "LG025", "%s is not the kind of server that its URL names: %s", logging.ERROR
    UNREADABLE_LIMITS = "LG026", "rule %s got invalid limits at run time, so the rule's own limits apply: %s"
    LOCAL_PER_WORKER = (
        "LG028",
        (
            "%d workers each grant the full limit while the store fails (on_error: local); set the option processes to the "
            "number of workers"
        ),
    )
    RULES_REJECTED = "LG034", "the rules in %s are invalid, so the current rules stay in force: %s%s", logging.ERROR
    NEEDS_RESTART = "LG035", "options in the file of LIMITGATE_ENV_FILE have changed; restart to apply them: %s"
    OBSERVER_FAILED = (
        "LG036",
        (
            "observer %s failed with %s, so metrics are missing; see the observer's log; later metrics are still exported, "
            "and further failures are not logged"
        ),
    )
    DROPPED = "LG039", "a %s was created, but receives no requests, so it limits nothing; expected %s"
    USER_WITHOUT_ID = ("LG049", "rules count by user, but a %s has no id, so its requests count by address; expected %s")
    IDENTIFY_FAILED = (
        "LG071",
        "identify failed, so requests failed: %s; expected identify to return a Caller or None without an error",
        logging.ERROR,
    )

    COMMANDS = "LG061", "%s lacks a feature that LimitGate needs, so calls fail: %s", logging.ERROR
    WRITES = "LG062", "%s rejects writes: %s", logging.ERROR
    CREDENTIALS = "LG063", "there is no valid login for %s: %s", logging.ERROR

    UNDERSCORE = (
        "LG072",
        (
            "forwarded_header %s has an underscore, so proxies may drop it, and WSGI can't tell underscores from hyphens; "
            "did you mean %s?"
        ),
    )
    NO_FIELDS = "LG073", "x-ratelimit-windows sends no field for rule %s, as no limit is per %s; use x-ratelimit or draft-11"
    UNKNOWN_TIER = "LG074", "identify returned a Caller of tier %s, which no rule names, so the default rules apply; %s"

    DISAGREEING = (
        "LG080",
        "a proxy's subrequest at %s got 400, because %s; to declare the proxy, send its subrequests to one of the paths %s",
        logging.ERROR,
    )
    NO_METHOD = (
        "LG081",
        "a proxy's subrequest at %s named no method, so every rule applies, regardless of its methods; set %s",
    )
    NO_CLIENT = (
        "LG083",
        "a trusted proxy's subrequest at %s named no client, so all its clients count as one; let the proxy send %s",
    )
    NO_URI = "LG082", "a proxy's subrequest at %s got 400, because it named no URI; expected %s", logging.ERROR

    def __init__(self, code: str, text: str, level: int = logging.WARNING) -> None:
        self.code = code
        self.level = level
        self.place: int = len(type(self).__members__)
        self.line: str = f"{code} {text} (limitgate doc {code})"

    def log(self, *values: object) -> None:
        times_logged[self.place] += 1
        log.log(self.level, self.line, *values)


times_logged: list[int] = [0] * len(Diagnosis)
"""Number of log lines, by `Diagnosis.place`."""


class OncePerValue:
    """Logs once per value, for `MOST` values."""

    __slots__ = ("_diagnosis", "_logged")
    MOST = 1000

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self._logged: set[Hashable] = set()

    @property
    def is_full(self) -> bool:
        return len(self._logged) >= self.MOST

    def is_new(self, value: Hashable) -> bool:
        return value not in self._logged and not self.is_full

    def log(self, value: Hashable, *said: object) -> bool:
        """Return True unless ``value`` was logged before."""
        if not self.is_new(value):
            return False
        self._logged.add(value)
        self._diagnosis.log(*said)
        return True


class Once:
    __slots__ = ("_diagnosis", "_times")

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self._times = count()

    def log(self, *values: object) -> None:
        if next(self._times) == 0:
            self._diagnosis.log(*values)
