"""The gate's responses and the ids of refusals. Pure."""

from __future__ import annotations

import json
import re
from binascii import a2b_base64, b2a_base64, unhexlify
from collections.abc import Collection, Iterable
from functools import cache, lru_cache
from hashlib import blake2b
from http import HTTPStatus
from math import ceil, isinf
from typing import NamedTuple

from limitgate.http.rate_fields import PROVIDERS, Fields, RawFields, Renamed, Style, raw
from limitgate.limits.decision import Decision
from limitgate.limits.plan import REQUESTS, wait_us

LENGTH = 32
"""Base64url of 24 bytes."""
URN = "urn:limitgate:refusal:"
"""``instance`` of a problem (RFC 9457 section 3.1.5)."""

_DIGITS = 32
_TICK = 10_000
"""Unit of an id's time in µs. Five bytes last until the year 2318."""
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), str.maketrans("-_", "+/")
_LEFT, _RIGHT = 9, 10
"""Bytes of the two halves, which hold 3 of the rule's tag and 16 of the bucket's digest."""


class RefusalId(NamedTuple):
    """32 characters for time, rule and bucket.

    Without the key, an id reveals only the time. An id can be forged, so it proves nothing.
    """

    at: float
    """Unix seconds of the store."""
    tag: bytes
    digest: str


class RefusalKey:
    """A key of 32 bytes that encrypts ids.

    Uses a four-round Feistel network (Luby and Rackoff 1988) with keyed BLAKE2b and the time as tweak: unlike with a stream
    cipher, the XOR of two ids reveals nothing.
    """

    __slots__ = ("_pairs", "key")

    def __init__(self, key: bytes) -> None:
        self.key: bytes = key
        rounds = [
            blake2b(key=key, digest_size=size, person=b"refusal id %d" % number)
            for number, size in enumerate((_LEFT, _RIGHT, _LEFT, _RIGHT))
        ]
        self._pairs = (rounds[0], rounds[1]), (rounds[2], rounds[3])

    @staticmethod
    def derived(secret: bytes) -> RefusalKey:
        """Derive a key from a ``secret`` of 16 to 64 bytes."""
        return RefusalKey(blake2b(key=secret, digest_size=32, person=b"refusal key").digest())

    def write(self, now: int, rule: str | None, key: str) -> bytes:
        """Return an id at ``now``, Unix µs. ``key`` has no suffix."""
        time = (now // _TICK).to_bytes(5, "big")
        block = tag_of(rule) + unhexlify(key[-_DIGITS:])
        left, right = block[:_LEFT], block[_LEFT:]
        for to_left, to_right in self._pairs:
            digest = to_left.copy()
            digest.update(time + right)
            left = (int.from_bytes(left, "big") ^ int.from_bytes(digest.digest(), "big")).to_bytes(_LEFT, "big")
            digest = to_right.copy()
            digest.update(time + left)
            right = (int.from_bytes(right, "big") ^ int.from_bytes(digest.digest(), "big")).to_bytes(_RIGHT, "big")
        return b2a_base64(time + left + right, newline=False).translate(_TO_URL)

    def read(self, text: str) -> RefusalId:
        """Decrypt an id, with or without `URN`. With a wrong key, only the time is right. Raises `ValueError`."""
        named = _bytes_of(text)
        time, left, right = named[:5], named[5 : 5 + _LEFT], named[5 + _LEFT :]
        for to_left, to_right in reversed(self._pairs):
            digest = to_right.copy()
            digest.update(time + left)
            right = (int.from_bytes(right, "big") ^ int.from_bytes(digest.digest(), "big")).to_bytes(_RIGHT, "big")
            digest = to_left.copy()
            digest.update(time + right)
            left = (int.from_bytes(left, "big") ^ int.from_bytes(digest.digest(), "big")).to_bytes(_LEFT, "big")
        return RefusalId(time_of(text), left[:3], (left[3:] + right).hex())


def time_of(text: str) -> float:
    """Return the Unix time of an id in seconds. Raises `ValueError`."""
    return int.from_bytes(_bytes_of(text)[:5], "big") * _TICK / 1e6


def _bytes_of(text: str) -> bytes:
    # Text copied from a response or a log, with the characters around it.
    found = re.fullmatch(rf"""[\s"'<(]*(?i:{URN})?([A-Za-z0-9_-]{{{LENGTH}}})[\s"'>),.;]*""", text, re.ASCII)
    if found is None:
        raise ValueError(
            f"{text!r:.80} is not the id of a refusal, expected {LENGTH} letters, digits, '-' and '_', or {URN}..."
        )
    return a2b_base64(found[1].translate(_FROM_URL))


@lru_cache(maxsize=4096)
def tag_of(rule: str | None) -> bytes:
    """Return three bytes that identify a rule. Two of a thousand rules collide in one of 34 cases."""
    return blake2b((rule or "").encode(), digest_size=3).digest()


_PROBLEMS = "https://iana.org/assignments/http-problem-types#"


_WAITING = frozenset({"Retry-After", "retry-after-ms", "x-should-retry"})
UNREAD_BODY = frozenset({400, 408, 411, 413})
"""Statuses of `limitgate.errors.BodyError`."""
_TRY_AGAIN_LATER = 1013
_POLICY_VIOLATION = 1008


class Refusal(NamedTuple):
    status: int
    fields: Fields
    raw: RawFields
    body: bytes
    detail: str
    id: str | None = None

    @property
    def waiting(self) -> Fields:
        """``Retry-After``, if any, and equivalent fields of providers."""
        return [field for field in self.fields if field[0] in _WAITING]

    @property
    def reason(self) -> str:
        return HTTPStatus(self.status).phrase

    @property
    def close_code(self) -> int:
        """WebSocket close code (IANA WebSocket Close Code Number Registry)."""
        return _POLICY_VIOLATION if self.status in {403, 431} else _TRY_AGAIN_LATER


def quota_exceeded(rules: tuple[str | None, ...], wait: float, name: bytes, *, is_permanent_ban: bool = False) -> Refusal:
    """The 429 (RFC 6585 section 4) with a problem body (RFC 9457, draft-ietf-httpapi-ratelimit-headers-11).

    ``Retry-After`` is ``wait`` in whole seconds, at least 1 (RFC 9110 section 10.2.3); absent if waiting can't help. ``name``
    is the id.
    """
    common, before, after = _refusal(rules, None if isinf(wait) else max(1, ceil(wait)), is_permanent_ban)
    status, fields, raw_fields, _, detail, _ = common
    made: Refusal = tuple.__new__(Refusal, (status, fields, raw_fields, before + name + after, detail, name.decode()))
    return made


_NO_ID = "0" * LENGTH


@lru_cache(maxsize=4096)
def _refusal(
    rules: tuple[str | None, ...],
    wait: int | None,
    is_permanent_ban: bool,  # noqa: FBT001 - `lru_cache` is faster without keywords
) -> tuple[Refusal, bytes, bytes]:
    """Cached, because refused clients often retry."""
    detail, fields = f"Too many requests. Try again in {wait} s.", [("Retry-After", str(wait))]
    if wait is None:
        detail, fields = "This request is more than its limit ever allows. Waiting does not help.", []
        if is_permanent_ban:
            detail = "You are banned permanently. Waiting does not help."
    problem = _problem(429, "Quota Exceeded", detail, fields, instance=URN + _NO_ID, **{"violated-policies": rules})
    before, _, after = problem.body.partition(_NO_ID.encode())
    return problem, before, after


@cache
def forbidden() -> Refusal:
    """Return the 403 of a deny rule, of type ``about:blank`` (RFC 9457 section 4.2.1)."""
    return _problem(403, "Forbidden", "This request is not permitted.", [], type="about:blank")


@cache
def headers_too_large(detail: str) -> Refusal:
    return _problem(431, "Request Header Fields Too Large", detail, [], type="about:blank")


@cache
def body_unread(status: int, detail: str) -> Refusal:
    # Its name before RFC 9110 depends on the version of Python.
    title = "Content Too Large" if status == 413 else HTTPStatus(status).phrase
    return _problem(status, title, detail, [], type="about:blank")


@cache
def bad_request(detail: str) -> Refusal:
    """Return the 400 for a subrequest that describes no request. ``detail`` is a fixed text."""
    return _problem(400, "Bad Request", detail, [], type="about:blank")


@cache
def unavailable() -> Refusal:
    detail = "The rate limit cannot be checked at the moment. Try again shortly."
    return _problem(503, "Temporary Reduced Capacity", detail, [("Retry-After", "1")])


@cache
def overloaded(after_s: int) -> Refusal:
    """Return the 503 of an adaptive limit, with ``Retry-After`` in s."""
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


NEVER = "x-should-retry"
"""Header that keeps clients from retrying requests that can't be admitted."""


def provider_styles(styles: Iterable[Style]) -> frozenset[str]:
    return frozenset(style.style if isinstance(style, Renamed) else style for style in styles) & PROVIDERS.keys()


def as_provider(refusal: Refusal, decision: Decision, styles: Collection[str]) -> Refusal:
    """Add what clients of OpenAI or Anthropic expect in a 429: ``error`` in the body, and fields for retries."""
    wait = decision.retry_after
    unit = _unit(decision)
    counted = (unit or "usage").replace("_", " ")
    error: dict[str, object] = {"message": f"Rate limit {decision.rule} reached on {counted}. {_advice(wait)}"}
    if "openai" in styles:
        error |= {"type": unit or REQUESTS, "param": None, "code": "rate_limit_exceeded"}
    if "anthropic" in styles:
        error["type"] = "rate_limit_error"
    body = json.dumps({**json.loads(refusal.body), "error": error}).encode()
    fields = [(name, str(len(body)) if name == "Content-Length" else value) for name, value in refusal.fields]
    fields.append((NEVER, "false") if isinf(wait) else ("retry-after-ms", str(max(1, ceil(wait * 1000)))))
    return refusal._replace(fields=fields, raw=raw(fields), body=body)


def _advice(wait: float) -> str:
    return "Waiting does not help." if isinf(wait) else f"Please try again in {wait:.3f}s."


def _unit(decision: Decision) -> str:
    found: tuple[float, str] = (-1, REQUESTS)
    for charge, states, after in decision.evidence:
        if after is None and charge.enforced and charge.rule == decision.rule:
            wait = wait_us(charge, states)
            found = max(found, (float("inf") if wait is None else wait, charge.unit))
    return found[1]
