"""HTTP fields and refusals made of decisions. Pure: names and values are text, in the case people write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Set as AbstractSet
from functools import cache, lru_cache
from http import HTTPStatus
from itertools import count
from math import ceil, floor, inf, isinf
from typing import NamedTuple

from limitgate.limits.bucket import Bucket
from limitgate.limits.decision import SECOND, Decision, Standing, Window
from limitgate.limits.limit import unit_of
from limitgate.limits.refusal_id import LENGTH, URN, refusal_id

Fields = list[tuple[str, str]]
RawFields = list[tuple[bytes, bytes]]

_PROBLEMS = "https://iana.org/assignments/http-problem-types#"


_TRY_AGAIN_LATER = 1013
"""Close code of a server that is overloaded."""
_POLICY_VIOLATION = 1008
"""Close code for a request that would be refused at any time."""


class Refusal(NamedTuple):
    """A response made by the gate: 429, 403, 431 or 503."""

    status: int
    fields: Fields
    raw: RawFields
    """The fields as `raw` gives them."""
    body: bytes
    detail: str
    """What a person reads in the body."""
    id: str | None = None
    """See `limitgate.limits.refusal_id`; None where no bucket refused: a rule denies or adapts, the store fails."""

    @property
    def waiting(self) -> Fields:
        """The ``Retry-After`` among the fields, if there is one."""
        return [field for field in self.fields if field[0] == "Retry-After"]

    @property
    def reason(self) -> str:
        """The reason phrase of the status."""
        return HTTPStatus(self.status).phrase

    @property
    def close_code(self) -> int:
        """The code that a WebSocket is closed with (IANA WebSocket Close Code Number Registry)."""
        return _POLICY_VIOLATION if self.status in {403, 431} else _TRY_AGAIN_LATER


def rate_fields(styles: Iterable[str], decision: Decision, now: int, rules: frozenset[str] = frozenset()) -> Fields:
    """Rate fields of a response in each of ``styles``; ``now`` is the store's clock in Unix µs.

    ``rules`` are the names of all rules of the gate: no policy of another rule gets one of these names.
    """
    fields: Fields = []
    for style in styles:
        fields += STYLES[style](decision, now, rules)
    return fields


def raw(fields: Iterable[tuple[str, str]]) -> RawFields:
    """Encode fields for ASGI: bytes, names in lower case."""
    return [(_RAW_NAMES.get(name) or name.lower().encode(), value.encode()) for name, value in fields]


_RAW_NAMES = {f"X-RateLimit-{part}": f"x-ratelimit-{part}".lower().encode() for part in ("Limit", "Remaining", "Reset")}
"""Encoded forms of the commonest names."""


def refusal(decision: Decision, now: int) -> Refusal:
    """The 429 (RFC 6585 section 4) with a problem body (RFC 9457) as draft-ietf-httpapi-ratelimit-headers-11 names it.

    ``Retry-After`` is in whole seconds, at least 1 (RFC 9110 section 10.2.3), and left out where waiting cannot help. ``now``
    is the store's clock in Unix µs.
    """
    return quota_exceeded(decision.refusing, decision.retry_after, now, decision.rule, decision.refusing_key)


def quota_exceeded(rules: tuple[str | None, ...], wait: float, now: int, rule: str | None, key: str) -> Refusal:
    """The `refusal` by these rules, with the wait in seconds; ``key`` is that of the bucket of ``rule``, less its suffix."""
    common, before, after = _refusal(rules, None if isinf(wait) else max(1, ceil(wait)))
    name = refusal_id(now, rule, key)
    status, fields, raw_fields, _, detail, _ = common
    made: Refusal = tuple.__new__(Refusal, (status, fields, raw_fields, before + name + after, detail, name.decode()))
    return made


_NO_ID = "0" * LENGTH


@lru_cache(maxsize=4096)
def _refusal(rules: tuple[str | None, ...], wait: int | None) -> tuple[Refusal, bytes, bytes]:
    """The 429 of these rules, with its body before and after the id, which is always of the same length.

    Cached, since refused clients tend to ask again at once.
    """
    detail, fields = f"Too many requests. Try again in {wait} s.", [("Retry-After", str(wait))]
    if wait is None:
        detail, fields = "This request costs more than its limit ever allows at once. Waiting does not help.", []
    problem = _problem(429, "Quota Exceeded", detail, fields, instance=URN + _NO_ID, **{"violated-policies": rules})
    before, _, after = problem.body.partition(_NO_ID.encode())
    return problem, before, after


@cache
def forbidden() -> Refusal:
    """The 403 of a rule that denies, a problem without a type of its own (RFC 9457 section 4.2.1)."""
    return _problem(403, "Forbidden", "This request is not permitted.", [], type="about:blank")


@cache
def headers_too_large(detail: str) -> Refusal:
    """The 431 (RFC 6585 section 5) for header fields that are not read: those of `limitgate.errors.HeadersTooLargeError`."""
    return _problem(431, "Request Header Fields Too Large", detail, [], type="about:blank")


@cache
def unavailable() -> Refusal:
    """The 503 of ``on_error: closed``."""
    detail = "The rate limit cannot be checked at the moment. Try again shortly."
    return _problem(503, "Temporary Reduced Capacity", detail, [("Retry-After", "1")])


@cache
def overloaded(after_s: int) -> Refusal:
    """The 503 of an adaptive limit, with the whole seconds after which to come back: these are few, so each is made once."""
    detail = "The service is at its capacity at the moment. Try again shortly."
    return _problem(503, "Temporary Reduced Capacity", detail, [("Retry-After", str(after_s))])


def _problem(status: int, title: str, detail: str, fields: Fields, **more: object) -> Refusal:
    kind = _PROBLEMS + title.lower().replace(" ", "-")
    members = {"type": kind, "title": title, "status": status, "detail": detail, **more}
    body = json.dumps(members).encode()
    fields = [
        ("Content-Type", "application/problem+json"),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
        *fields,
    ]
    return Refusal(status, fields, raw(fields), body, detail)


def x_ratelimit(limit: int, remaining: int, full_at_us: int) -> Fields:
    """The commonest convention: the tightest window, and as Unix time when it is full again, here in Unix µs."""
    return [
        ("X-RateLimit-Limit", str(limit)),
        ("X-RateLimit-Remaining", str(remaining)),
        ("X-RateLimit-Reset", str(-(-full_at_us // SECOND))),
    ]


def raw_x_ratelimit(limit: int, remaining: int, full_at_us: int) -> RawFields:
    """The fields of style ``x-ratelimit`` as `raw` gives them. Remembered, as most have numbers that others had lately."""
    reset = -(-full_at_us // SECOND)
    try:
        return [_LIMIT[limit], _REMAINING[remaining], _RESET[reset]]
    except KeyError:
        fields = raw(x_ratelimit(limit, remaining, full_at_us))
        for known, number, field in zip((_LIMIT, _REMAINING, _RESET), (limit, remaining, reset), fields):
            if len(known) >= _NUMBERS:
                known.clear()
            known[number] = field
        return fields


def _x_ratelimit(decision: Decision, now: int, _: frozenset[str]) -> Fields:
    """`x_ratelimit` of a decision."""
    return x_ratelimit(decision.limit, decision.remaining, full_at(decision, now))


def full_at(decision: Decision, now: int) -> int:
    """Unix µs at which the tightest window is full again, by a decision of ``now``."""
    return now + floor(decision.reset_after * SECOND + 0.5)  # exact below 2**53 µs, 285 years


_NUMBERS = 1024
"""Numbers that are remembered of a field, in about 150 bytes each."""
_LIMIT: dict[int, tuple[bytes, bytes]] = {}
_REMAINING: dict[int, tuple[bytes, bytes]] = {}
_RESET: dict[int, tuple[bytes, bytes]] = {}


_UNITS = ("second", "minute", "hour", "day")
"""Units that the convention has fields for."""


def _x_ratelimit_windows(decision: Decision, _: int, __: frozenset[str]) -> Fields:
    """Two fields for each unit of time; of several windows of a unit the one with the least remaining."""
    tightest: dict[str, Window] = {}
    for window in decision.windows:
        unit = unit_of(window.period)
        if unit in _UNITS and (unit not in tightest or window.remaining < tightest[unit].remaining):
            tightest[unit] = window
    fields: Fields = []
    for unit, window in tightest.items():
        fields.append((f"X-RateLimit-Limit-{unit.title()}", str(window.limit)))
        fields.append((f"X-RateLimit-Remaining-{unit.title()}", str(window.remaining)))
    return fields


def _draft_11(decision: Decision, _: int, rules: frozenset[str]) -> Fields:
    """draft-ietf-httpapi-ratelimit-headers-11 sections 3 and 4: RFC 9651 lists of strings with parameters.

    Adaptive limits are none of its policies, and an empty list is not sent (RFC 9651 section 3.1).
    """
    policies, states = [], []
    buckets: dict[tuple[str, str], list[Standing]] = {}
    for standing in decision.standings:
        charge = standing.charge
        buckets.setdefault((charge.rule or "", charge.key.removesuffix(charge.bucket.suffix)), []).append(standing)
    applying = {rule for rule, _key in buckets}
    reserved = rules if applying <= rules else rules | applying
    names: set[str] = set()
    for (rule, _key), standings in buckets.items():
        windows = [window for standing in standings for window in standing.windows()]
        named = _policies(rule, tuple([standing.charge.bucket for standing in standings]), reserved)
        for (name, policy), window in zip(named, windows, strict=True):
            if name in names:  # another gate, or a dependency, has a rule of the same name
                name = _numbered(name, names | reserved)  # noqa: PLW2901
            names.add(name)
            policies.append(f'"{name}";{policy}')
            wait = window.retry_after or (window.reset_after if window.period else inf)
            until = "" if isinf(wait) else f";t={ceil(wait)}"
            states.append(f'"{name}";r={window.remaining}{until}')
    return [("RateLimit-Policy", ", ".join(policies)), ("RateLimit", ", ".join(states))] if policies else []


@lru_cache(maxsize=4096)
def _policies(rule: str, buckets: tuple[Bucket, ...], reserved: frozenset[str]) -> list[tuple[str, str]]:
    """Name and parameters of the policy of each window of a rule. A rule's name needs no escaping, see `Rule`.

    Windows of a rule that has several avoid the names of rules, which are ``reserved``.
    """
    found: dict[str, str] = {}
    limits = [limit for windows in buckets for limit in windows.limits]
    for limit in limits:
        kind = (unit_of(limit.period) or f"{limit.period}s") if limit.period else "concurrent"
        name = rule if len(limits) == 1 else f"{rule}-{kind}"
        if len(limits) > 1 and (name in reserved or name in found):
            name = _numbered(name, reserved | found.keys())
        unit = f"w={limit.period}" if limit.period else 'qu="concurrent-requests"'
        found[name] = f"q={limit.count};{unit}"
    return list(found.items())


def _numbered(name: str, taken: AbstractSet[str]) -> str:
    """The name with the smallest number from 2 on that makes it unique."""
    return next(each for number in count(2) if (each := f"{name}-{number}") not in taken)


STYLES: dict[str, Callable[[Decision, int, frozenset[str]], Fields]] = {
    "x-ratelimit": _x_ratelimit,
    "x-ratelimit-windows": _x_ratelimit_windows,
    "draft-11": _draft_11,
}
