"""Diagnostics for operators: log lines, each with a permanent code and an entry in the docs.

The only place of these codes and texts. They never contain data of a client.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from enum import Enum
from itertools import count

PAGE = "docs/diagnostics.md"
"""Page with an anchor for each code: ``#lg001``."""

log = logging.getLogger("limitgate")


class Diagnosis(Enum):
    """Code and text of a diagnostic. Codes are never reused."""

    MEMORY_PER_WORKER = "LG001", "%d workers on memory:// limit each by itself; use Redis to limit them together"
    SERVER_TRUSTS_ALL = (
        "LG002",
        "by FORWARDED_ALLOW_IPS or --forwarded-allow-ips '*' every client can choose its address; name your proxies instead",
    )
    UNKNOWN_VARIABLE = "LG003", "%s is no setting of LimitGate and is ignored; %s"
    TRUSTS_ALL = "LG004", "trusted_proxies covers all of %s: every client can choose its address; name your proxies instead"
    UNLISTED_KEYS = (
        "LG005",
        (
            "%s goes by API keys, but none are listed and there is no identify: every key that a client invents has its own "
            "bucket; list their digests under callers, or name callers by identify"
        ),
    )
    UNTRUSTED_FORWARDING = (
        "LG006",
        (
            "a request came with %s from a peer outside of trusted_proxies: if that is your proxy, its clients all count "
            "as one; add its address to trusted_proxies then"
        ),
    )
    OVERSHOOTS = "LG007", "%s: %s lets up to %d pass within one period; 'burst %d' would hold it to %d"
    CLOCK_STEPPED = "LG011", "the clock of %s stepped back; let NTP slew it; further steps are only counted"
    TOO_MANY_BUCKETS = (
        "LG013",
        (
            "%s: one source opens more than %d new buckets a minute; its requests under further keys share a "
            "single one; if it is your proxy, add it to trusted_proxies, if it has as many customers, raise new_buckets"
        ),
    )
    OVERLOADED = (
        "LG015",
        (
            "%s; requests that cannot be asked about are limited by this process alone, whatever on_error says; "
            "bound what a process takes in, or add processes"
        ),
    )
    CLOCK_LEAPT = (
        "LG017",
        (
            "the clock of %s leapt %.1f seconds ahead, or this machine slept: debts have drained, slots in flight expired; "
            "let NTP slew clocks"
        ),
    )
    EVICTS = (
        "LG018",
        "%s evicts buckets when it is full, by %s, also of clients that are refused; let it be volatile-ttl or noeviction",
    )
    REPLACED = "LG019", "%s was restarted or replaced: what had not been saved or copied is forgotten; appendonly yes saves it"
    OWN_ERROR = (
        "LG020",
        "%s at %s, a mistake of LimitGate's own: whoever waited for it is told that the store failed; please report it",
    )
    RIGHTS = "LG021", "the user at %s lacks rights, and calls that need them fail: ACL SETUSER <user> %s", logging.ERROR
    LOGIN = "LG022", "%s refuses the login: %s", logging.ERROR
    DATABASE = "LG023", "%s does not have the database in the URL: %s", logging.ERROR
    TLS = "LG024", "%s and its URL do not agree on TLS: %s", logging.ERROR
    SERVER_KIND = "LG025", "%s is another kind of server than its URL says: %s", logging.ERROR
    UNREADABLE_LIMITS = (
        "LG026",
        "the limits that rule %s is given at run time cannot be read, so those that are written apply: %s",
    )
    LOCAL_PER_WORKER = (
        "LG028",
        "%d workers would grant all of a limit each while the store fails (on_error: local); say how many by option processes",
    )
    RULES_REJECTED = (
        "LG034",
        "the rules in force stay, as those that are in %s now cannot be used: %s%s",
        logging.ERROR,
    )
    NEEDS_RESTART = "LG035", "the file that LIMITGATE_ENV_FILE names was changed, and takes effect with a restart: %s"
    OBSERVER_FAILED = (
        "LG036",
        "observer %s has failed by %s and is told what is new all the same, further failures unsaid; look into its own log",
    )
    DROPPED = "LG039", "a %s was made and dropped, so nothing is limited; expected %s"
    USER_WITHOUT_ID = (
        "LG049",
        "rules count by user, but a %s has no id, so its requests count by address; expected %s",
    )
    IDENTIFY_FAILED = (
        "LG071",
        "identify failed, and so do the requests that it was called for: %s; expected a Caller or None from it, and no error",
        logging.ERROR,
    )

    COMMANDS = "LG061", "%s lacks what LimitGate needs, and calls fail: %s", logging.ERROR
    WRITES = "LG062", "%s takes no writes: %s", logging.ERROR
    CREDENTIALS = "LG063", "there is no login for %s: %s", logging.ERROR

    def __init__(self, code: str, text: str, level: int = logging.WARNING) -> None:
        self.code = code
        self.level = level
        self.place = len(type(self).__members__)
        """Index among all diagnostics."""
        self.line = f"{code} {text} ({PAGE}#{code.lower()})"

    def log(self, *values: object) -> None:
        """Log the diagnostic with these values."""
        times_logged[self.place] += 1
        log.log(self.level, self.line, *values)


times_logged = [0] * len(Diagnosis)
"""How often this process has logged each diagnostic, by `Diagnosis.place`."""


class OncePerValue:
    """Logs a diagnostic once per value, for at most `MOST` values."""

    __slots__ = ("_diagnosis", "_logged")
    MOST = 1000

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self._logged: set[Hashable] = set()

    def log(self, value: Hashable, *said: object) -> None:
        """Log the diagnostic with ``said``, unless it was logged for ``value`` before."""
        if value not in self._logged and len(self._logged) < self.MOST:
            self._logged.add(value)
            self._diagnosis.log(*said)


class Once:
    """Logs a diagnostic once, also if several threads call it."""

    __slots__ = ("_diagnosis", "_times")

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self._times = count()

    def log(self, *values: object) -> None:
        """Log the diagnostic, unless this object has logged it before."""
        if next(self._times) == 0:
            self._diagnosis.log(*values)
