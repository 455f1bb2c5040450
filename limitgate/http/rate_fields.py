"""Rate limit header fields in each style."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain, count
from math import floor, inf, isinf
from typing import NamedTuple

from limitgate.algorithms import ban
from limitgate.errors import ConfigError
from limitgate.limits.bucket import Bucket
from limitgate.limits.decision import SECOND, Decision, Standing
from limitgate.limits.plan import REQUESTS
from limitgate.messages.text import expected_of

Fields = list[tuple[str, str]]
RawFields = list[tuple[bytes, bytes]]


class Numbers(NamedTuple):
    limit: int
    remaining: int
    """Whole requests."""
    full_at_us: int
    windows: Sequence[tuple[int, int]] | Sequence[tuple[int, int | None]]
    """Per window: remaining, and µs to wait (None for never)."""
    now_us: int
    """Store clock, Unix µs."""


class Renamed(NamedTuple):
    style: str
    names: tuple[tuple[str, str], ...]
    """Old and new name."""


Style = str | Renamed


def renamed_styles(styles: Iterable[str], names: Mapping[str, str]) -> tuple[Style, ...]:
    """Rename fields.

    ``names`` maps standard names to new ones, ignoring case. Raises `ConfigError` for unknown or used names.
    """
    styles = tuple(styles)
    known = {field.lower(): field for style in styles for field in FIELDS[style]}
    for name in names:
        if name.lower() not in known:
            expected = expected_of(name, sorted(known.values())) if known else "expected none, because headers is empty"
            other = next((style for style, fields in FIELDS.items() if name.lower() in map(str.lower, fields)), None)
            if other is not None:
                expected = f"it is of the style {other}, expected {other!r} in headers"
            raise ConfigError.at((name,), f"no style in headers has the field, {expected}")
    chosen = {known[name.lower()]: other for name, other in names.items()}
    taken = dict.fromkeys(_OF_REFUSALS, "a refusal")
    for field in known.values():
        name = chosen.get(field, field)
        if name.lower() in taken:
            raise ConfigError.at((field,), f"{name} is already the name of {taken[name.lower()]}, expected another name")
        if field in chosen and _HAS_MEANING.fullmatch(name.lower()):
            raise ConfigError.at((field,), f"{name} already has another meaning, expected another name, such as X-Quota")
        taken[name.lower()] = field
    found: list[Style] = []
    for style in styles:
        own = tuple([(field, chosen[field]) for field in FIELDS[style] if field in chosen])
        found.append(Renamed(style, own) if own else style)
    return tuple(found)


def names_of(styles: Iterable[Style]) -> list[str]:
    found = []
    for style in styles:
        own, names = (style.style, dict(style.names)) if isinstance(style, Renamed) else (style, {})
        found += [names.get(field, field) for field in FIELDS[own]]
    return found


def without(fields: Iterable[tuple[str, str]], others: Iterable[tuple[str, str]]) -> Fields:
    taken = {name.lower() for name, _ in others}
    return [field for field in fields if field[0].lower() not in taken]


def raw_without(fields: Iterable[tuple[bytes, bytes]], others: Iterable[tuple[bytes, bytes]]) -> RawFields:
    taken = {bytes(name).lower() for name, _ in others}
    return [field for field in fields if bytes(field[0]).lower() not in taken]


def rate_fields(styles: Iterable[Style], decision: Decision, now: int, rules: frozenset[str] = frozenset()) -> Fields:
    """Return the fields of each style. ``now`` is Unix µs of the store."""
    styles = tuple(styles)
    limit, remaining, full_at_us = decision.limit, decision.remaining, full_at(decision, now)
    if styles == ("x-ratelimit",):
        return x_ratelimit(limit, remaining, full_at_us)
    standings = decision.standings
    enforced = [each for each in standings if each.charge.enforced]
    if not enforced or len(enforced) == len(standings):
        return _fields_of(styles, standings, Numbers(limit, remaining, full_at_us, (), now), rules)
    fields: Fields = []
    for style in styles:
        own = style.style if isinstance(style, Renamed) else style
        shown = standings if own in _NAMES_POLICIES else enforced
        fields += _fields_of((style,), shown, Numbers(limit, remaining, full_at_us, (), now), rules)
    return fields


def _fields_of(styles: tuple[Style, ...], standings: Sequence[Standing], numbers: Numbers, rules: frozenset[str]) -> Fields:
    groups: dict[tuple[str, str], list[Standing]] = {}
    for standing in standings:
        charge = standing.charge
        groups.setdefault((charge.rule or "", charge.key.removesuffix(charge.bucket.suffix)), []).append(standing)
    buckets = tuple([(rule, tuple([each.charge.bucket for each in group])) for (rule, _), group in groups.items()])
    windows: list[tuple[int, int | None]] = []
    for window in [window for group in groups.values() for standing in group for window in standing.windows()]:
        wait = window.retry_after or (window.reset_after if window.period and window.limit else inf)
        windows.append((window.remaining, None if isinf(wait) else round(wait * SECOND)))
    units = tuple([each.charge.unit for group in groups.values() for each in group for _ in each.charge.bucket.limits])
    return prepared_fields(styles, buckets, rules, units)(numbers._replace(windows=windows))


Buckets = tuple[tuple[str, tuple[Bucket, ...]], ...]
Writer = Callable[[Numbers], Fields]


@lru_cache(maxsize=1024)
def prepared_fields(
    styles: tuple[Style, ...], buckets: Buckets, rules: frozenset[str], units: tuple[str, ...] | None = None
) -> Writer:
    """Return a cached writer of these buckets' fields. ``units`` is None for requests."""
    limits = [limit for _, of_rule in buckets for bucket in of_rule for limit in bucket.limits]
    units = (REQUESTS,) * len(limits) if units is None else units
    counted = tuple([(unit if limit.period else "", limit.burst) for unit, limit in zip(units, limits, strict=True)])
    writers = [_writer(style, buckets, rules, counted) for style in styles]
    if len(writers) == 1:
        return writers[0]

    def write(numbers: Numbers) -> Fields:
        return [field for write_style in writers for field in write_style(numbers)]

    return write


def _writer(style: Style, buckets: Buckets, rules: frozenset[str], units: Units) -> Writer:
    if not isinstance(style, Renamed):
        return _of_provider(style, units) if style in PROVIDERS else STYLES[style](buckets, rules)
    write, names = _writer(style.style, buckets, rules, units), dict(style.names)
    return lambda numbers: [(names.get(name, name), value) for name, value in write(numbers)]


def raw(fields: Iterable[tuple[str, str]]) -> RawFields:
    return [(_RAW_NAMES.get(name) or name.lower().encode(), value.encode()) for name, value in fields]


_LIMIT, _REMAINING, _RESET = "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"
_POLICY, _STATE = "RateLimit-Policy", "RateLimit"
_RAW_NAMES = {name: name.lower().encode() for name in (_LIMIT, _REMAINING, _RESET, _POLICY, _STATE)}


def x_ratelimit(limit: int, remaining: int, full_at_us: int) -> Fields:
    """Return the fields. The reset in seconds is left out if waiting can't help. ``full_at_us`` is Unix µs."""
    fields = [(_LIMIT, str(limit)), (_REMAINING, str(remaining)), (_RESET, str(-(-full_at_us // SECOND)))]
    return fields if limit and full_at_us != _NEVER else fields[:2]


def raw_x_ratelimit(limit: int, remaining: int, full_at_us: int) -> RawFields:
    """Return `x_ratelimit` in ASGI form. Cached, because most numbers repeat."""
    reset = -(-full_at_us // SECOND)
    try:
        return [_RAW_LIMIT[limit], _RAW_REMAINING[remaining], _RAW_RESET[reset]]
    except KeyError:
        fields = raw(x_ratelimit(limit, remaining, full_at_us))
        if len(fields) < len(_RAW_X_RATELIMIT):
            return fields
        for known, number, field in zip(_RAW_X_RATELIMIT, (limit, remaining, reset), fields):
            if len(known) >= _NUMBERS:
                known.clear()
            known[number] = field
        return fields


def full_at(decision: Decision, now: int) -> int:
    """Unix µs when the tightest window is full."""
    if decision.reset_after * SECOND > ban.PERMANENT:
        return _NEVER
    return now + floor(decision.reset_after * SECOND + 0.5)  # exact below 2**53 µs (285 years)


_NEVER = 1 << 62
_NUMBERS = 1024
_RAW_LIMIT: dict[int, tuple[bytes, bytes]] = {}
_RAW_REMAINING: dict[int, tuple[bytes, bytes]] = {}
_RAW_RESET: dict[int, tuple[bytes, bytes]] = {}
_RAW_X_RATELIMIT = _RAW_LIMIT, _RAW_REMAINING, _RAW_RESET


def _x_ratelimit(_: Buckets, __: frozenset[str]) -> Writer:
    return lambda numbers: x_ratelimit(numbers.limit, numbers.remaining, numbers.full_at_us)


WINDOW_UNITS = ("second", "minute", "hour", "day")


def _x_ratelimit_windows(buckets: Buckets, _: frozenset[str]) -> Writer:
    limits = [limit for _, of_rule in buckets for bucket in of_rule for limit in bucket.limits]
    units = [(limit.unit, limit.burst) for limit in limits]

    def write(numbers: Numbers) -> Fields:
        tightest: dict[str, tuple[int, int]] = {}
        for (unit, burst), (left, _) in zip(units, numbers.windows, strict=True):
            if unit in WINDOW_UNITS and (unit not in tightest or left < tightest[unit][1]):
                tightest[unit] = burst, left
        fields: Fields = []
        for unit, (burst, left) in tightest.items():
            fields.append((f"X-RateLimit-Limit-{unit.title()}", str(burst)))
            fields.append((f"X-RateLimit-Remaining-{unit.title()}", str(left)))
        return fields

    return write


def _draft_11(buckets: Buckets, rules: frozenset[str]) -> Writer:
    """Write the lists (RFC 9651) of draft-ietf-httpapi-ratelimit-headers-11, sections 3 and 4, which are never empty."""
    applying = {rule for rule, _ in buckets}
    reserved = rules if applying <= rules else rules | applying
    policies: dict[str, str] = {}
    for rule, of_rule in buckets:
        for name, policy in _policies(rule, of_rule, reserved):
            policies[_numbered(name, policies.keys() | reserved) if name in policies else name] = policy
    policy_field = _POLICY, ", ".join([f'"{name}";{parameters}' for name, parameters in policies.items()])
    heads = [f'"{name}";r=' for name in policies]

    def write(numbers: Numbers) -> Fields:
        states = [
            f"{head}{left}" if wait is None else f"{head}{left};t={-(-wait // SECOND)}"
            for head, (left, wait) in zip(heads, numbers.windows, strict=True)
        ]
        return [policy_field, (_STATE, ", ".join(states))] if states else []

    return write


def _policies(rule: str, buckets: tuple[Bucket, ...], reserved: frozenset[str]) -> list[tuple[str, str]]:
    """Names need no escapes: `Rule` checks them."""
    found: dict[str, str] = {}
    limits = [limit for windows in buckets for limit in windows.limits]
    for limit in limits:
        kind = (limit.unit or f"{limit.period}s") if limit.period else "concurrent"
        name = rule if len(limits) == 1 else f"{rule}-{kind}"
        if len(limits) > 1 and (name in reserved or name in found):
            name = _numbered(name, reserved | found.keys())
        unit = f"w={limit.period}" if limit.period else 'qu="concurrent-requests"'
        found[name] = f"q={limit.count};{unit}"
    return list(found.items())


def _numbered(name: str, taken: AbstractSet[str]) -> str:
    return next(each for number in count(2) if (each := f"{name}-{number}") not in taken)


Units = tuple[tuple[str, int], ...]


def _of_provider(style: str, units: Units) -> Writer:
    names, written = PROVIDERS[style]

    def write(numbers: Numbers) -> Fields:
        tightest: dict[str, tuple[int, int, int | None]] = {}
        for (unit, burst), (left, wait) in zip(units, numbers.windows, strict=True):
            if unit in names and (unit not in tightest or left < tightest[unit][1]):
                tightest[unit] = burst, left, wait
        fields: Fields = []
        for unit, (burst, left, wait) in tightest.items():
            limit, remaining, reset = names[unit]
            fields += [(limit, str(burst)), (remaining, str(left))]
            if wait is not None:
                fields.append((reset, written(wait, numbers.now_us)))
        return fields

    return write


def _as_go_prints(us: int, _: int) -> str:
    """Format a time as Go's ``time.Duration``, such as ``12ms``, ``7.66s`` or ``6m0s``, rounded up to ms."""
    ms = -(-us // 1000)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    rest = f"{ms / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _as_time(us: int, now_us: int) -> str:
    at = datetime.fromtimestamp(min(-(-(now_us + us) // SECOND), _LATEST), UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


_LATEST = 253_402_300_799
"""End of the year 9999."""
_UNITS = ("requests", "tokens", "input_tokens", "output_tokens")
PROVIDERS: dict[str, tuple[dict[str, tuple[str, str, str]], Callable[[int, int], str]]] = {
    "openai": (
        {
            unit: (f"x-ratelimit-limit-{unit}", f"x-ratelimit-remaining-{unit}", f"x-ratelimit-reset-{unit}")
            for unit in _UNITS[:2]
        },
        _as_go_prints,
    ),
    "anthropic": (
        {
            unit: (
                f"anthropic-ratelimit-{unit.replace('_', '-')}-limit",
                f"anthropic-ratelimit-{unit.replace('_', '-')}-remaining",
                f"anthropic-ratelimit-{unit.replace('_', '-')}-reset",
            )
            for unit in _UNITS
        },
        _as_time,
    ),
}
STYLES: dict[str, Callable[[Buckets, frozenset[str]], Writer]] = {
    "x-ratelimit": _x_ratelimit,
    "x-ratelimit-windows": _x_ratelimit_windows,
    "draft-11": _draft_11,
}
FIELDS: dict[str, tuple[str, ...]] = {
    "x-ratelimit": (_LIMIT, _REMAINING, _RESET),
    "x-ratelimit-windows": tuple([f"{name}-{unit.title()}" for unit in WINDOW_UNITS for name in (_LIMIT, _REMAINING)]),
    "draft-11": (_POLICY, _STATE),
    **{style: tuple(chain.from_iterable(names.values())) for style, (names, _) in PROVIDERS.items()},
}
_OF_REFUSALS = ("retry-after", "retry-after-ms", "x-should-retry", "content-type", "content-length", "cache-control")
_HAS_MEANING = re.compile(
    "(?:access-control|content|cross-origin|sec|proxy)-.*|x-(?:accel|content|frame|forwarded|sendfile)-?.*|accept(?:-.*)?|age"
    "|allow|alt-svc|authorization|cache-control|connection|cookie|date|etag|expires|host|keep-alive|last-modified|link|location"
    "|origin-agent-cluster|permissions-policy|pragma|refer(?:r)?er(?:-policy)?|refresh|retry-after|server|server-timing"
    "|set-cookie|strict-transport-security|te|trailer|transfer-encoding|upgrade|vary|via|warning|www-authenticate"
)
"""Fields with a meaning for HTTP, browsers or servers."""
_NAMES_POLICIES = frozenset({"draft-11"})
