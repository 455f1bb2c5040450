"""``X-Request-Start``: when a proxy has begun to hand on a request, in the forms that proxies write."""

from __future__ import annotations

import re

from limitgate.http.request import Request

HEADER = "x-request-start"
OLDEST_S = 60.0
"""Seconds that a request may have waited; servers and proxies have given up before."""
_LONGEST = 64
"""Characters of the header that are looked at, from the right."""
_TIME = re.compile(r"\s*(?:t\s*=\s*)?([0-9]{9,19}(?:\.[0-9]{1,9})?)\s*", re.ASCII)
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
"""From which number on a time of our days is in ns, µs and ms, and how many of them are a second."""


def waited_s(request: Request, now: float) -> float | None:
    """Seconds that a request has waited by ``now``, Unix time in seconds; None if its proxy does not say, or makes no sense.

    ``t=1700000000.123`` (nginx: ``t=${msec}``), or without ``t=``, in seconds, ms (Heroku), µs (Apache: ``t=%t``) or ns. Of
    several times the last is the nearest proxy's. One that is yet to come, or older than a minute, is no time of this request.
    """
    match = _TIME.fullmatch(request.headers.end(HEADER, _LONGEST).rpartition(",")[2])
    if match is None:
        return None
    number = float(match[1])
    waited = now - number / next((each for least, each in _UNITS if number >= least), 1)
    return waited if 0 <= waited <= OLDEST_S else None
