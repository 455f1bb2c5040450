"""Diagnoses for whoever runs the service: log lines, each with a permanent code and an entry in the docs.

The only place of these codes and texts. None contains anything that a client has sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from itertools import count

PAGE = "docs/diagnostics.md"
"""Page with an anchor for each code: ``#lg001``."""
APART = 2.0
"""Seconds by which two clocks may differ unreported."""

log = logging.getLogger("limitgate")


class Diagnosis(Enum):
    """Code and text of a diagnosis. A code is never reused for another one."""

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
    SHADOWED = "LG008", "%s never applies: every request that it is for is exempt by %s; narrow that one, or remove the other"
    TIER_OF_NOBODY = (
        "LG009",
        (
            "the rules of tier %s never apply: no caller can be known to be of it, and there is no identify; "
            "list callers in the tier's file, or name them by identify"
        ),
    )
    CLOCKS_DIFFER = "LG010", "the store's clock is %.1f seconds %s this machine's; let NTP set both"
    CLOCK_STEPPED = "LG011", "the clock of %s stepped back; let NTP slew it; further steps are only counted"
    LIMIT_ABOVE_ROUTE = (
        "LG012",
        "@limit stands above the route decorator of %s; it applies only under a LimitGate, and belongs below",
    )
    TOO_MANY_BUCKETS = (
        "LG013",
        (
            "%s: one source opens more than %d new buckets a minute; its requests under further keys share a "
            "single one; if it is your proxy, add it to trusted_proxies, if it has as many customers, raise new_buckets"
        ),
    )
    RESERVE_OF_NOBODY = (
        "LG014",
        (
            "%s keeps a reserve for callers of high priority, but none is known, and there is no identify; "
            "give some priority: high, or take the reserve away"
        ),
    )
    OVERLOADED = (
        "LG015",
        (
            "%s; requests that cannot be asked about are limited by this process alone, whatever on_error says; "
            "bound what a process takes in, or add processes"
        ),
    )
    PASSED_ON_CALLER = (
        "LG016",
        "a trusted proxy passed on the header of caller %s for a client that is not; if it sets that, say set_by_proxy: true",
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
    REPLACES_NOTHING = "LG027", "%s replaces %s, but there is no rule of that name; name one that there is, or '*' for all"
    LOCAL_PER_WORKER = (
        "LG028",
        "%d workers would grant all of a limit each while the store fails (on_error: local); say how many by option processes",
    )
    BLOCKS_LOOP = (
        "LG029",
        "a Limiter was called inside of a running event loop, which stands still while it waits; use an AsyncLimiter there",
    )
    PATHS_OF_NO_ROUTE = (
        "LG030",
        "no route of the application has a path of these rules, which limit nothing; correct or remove them: %s",
    )
    USER_OF_NOBODY = (
        "LG031",
        "rules count by user, but the first %d requests of theirs had none: authentication has to stand around LimitGate",
    )
    CALLER_OF_NOBODY = (
        "LG032",
        (
            "%s counts by caller, but nobody can be known as one: there is no identify, and none is listed by api_key, or by a "
            "header that is believed; list callers in a rule file, set trusted_proxies for headers, or name them by identify"
        ),
    )
    LIMITS_OF_NO_RULE = (
        "LG033",
        "a Caller has limits for %s, but there is no rule or limit of that name; name one that there is",
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
    CORS_INSIDE = (
        "LG037",
        (
            "CORSMiddleware stands inside of LimitGate, so scripts of other origins cannot read a refusal; add it after "
            "LimitGate, so that it is around"
        ),
    )
    TIER_MISSPELT = "LG038", "a Caller is of tier %r, which has no rules, and has those of everybody; did you mean %r?"
    DROPPED = "LG039", "a %s was made and dropped, so nothing is limited; expected %s"
    CHARGED_TWICE = (
        "LG040",
        (
            "two gates, one inside of the other, charge each request twice in the same buckets of %s; keep one of them, or "
            "give their rules different names"
        ),
    )
    OTHER_LIMITERS_SETTINGS = (
        "LG041",
        "%s has settings of another limiter, which are ignored: %s; their counterparts are in docs/migrating.md",
    )
    METHOD_MISSPELT = "LG042", "%s is for method %r, which hardly any client sends; did you mean %s?"
    USER_WITHOUT_ID = (
        "LG049",
        "rules count by user, but a %s has no id, so its requests count by address; expected %s",
    )

    def __init__(self, code: str, text: str, level: int = logging.WARNING) -> None:
        self.code = code
        self.level = level
        self.place = len(type(self).__members__)
        """Place among all diagnoses."""
        self.line = f"{code} {text} ({PAGE}#{code.lower()})"

    def log(self, *values: object) -> None:
        """Log the diagnosis."""
        times_logged[self.place] += 1
        log.log(self.level, self.line, *values)


times_logged = [0] * len(Diagnosis)
"""How often each diagnosis was logged in this process, by its place."""


class Once:
    """Logger of a diagnosis that is logged once, whichever thread comes first."""

    __slots__ = ("_diagnosis", "_times")

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self._times = count()

    def log(self, *values: object) -> None:
        """Log the diagnosis unless this object has logged it before."""
        if next(self._times) == 0:
            self._diagnosis.log(*values)


def clock_comparison(clock: Callable[[], float], late: float) -> Callable[[int], None]:
    """Make a function that compares a reading's ``now`` in Unix µs with this machine's clock in Unix seconds (LG010).

    ``late`` is the longest time in seconds that a reply may have taken; the store's clock may be behind by as much unnoticed.
    """
    once = Once(Diagnosis.CLOCKS_DIFFER)

    def compare(now: int) -> None:
        ahead = now / 1_000_000 - clock()
        if ahead > APART or ahead < -APART - late:
            once.log(abs(ahead), "ahead of" if ahead > 0 else "behind")

    return compare
