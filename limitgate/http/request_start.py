"""``X-Request-Start``: the time when a proxy received the request."""

from __future__ import annotations

import re

from limitgate.http.request import Request

HEADER = "x-request-start"
OLDEST_S = 60.0
"""Maximum plausible wait in seconds; servers and proxies time out earlier."""
_LONGEST = 64
"""Maximum characters of the header read, from the right."""
_TIME = re.compile(r"\s*(?:t\s*=\s*)?([0-9]{9,19}(?:\.[0-9]{1,9})?)\s*", re.ASCII)
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))


def waited_s(request: Request, now: float) -> float | None:
    """Return the seconds from the proxy's time until ``now`` (Unix time in s), or None without a plausible time.

    Reads ``t=1700000000.123`` (nginx: ``t=${msec}``) with or without ``t=``, in s, ms (Heroku), µs (Apache: ``t=%t``) or ns; of
    several times the last.
    """
    match = _TIME.fullmatch(request.headers.end(HEADER, _LONGEST).rpartition(",")[2])
    if match is None:
        return None
    number = float(match[1])
    waited = now - number / next((each for least, each in _UNITS if number >= least), 1)
    return waited if 0 <= waited <= OLDEST_S else None
