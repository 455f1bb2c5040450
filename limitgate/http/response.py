"""Responses of the gate: 403, 429, 431 and 503. Pure."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from http import HTTPStatus
from math import ceil, isinf
from typing import NamedTuple

from limitgate.http.rate_fields import Fields, RawFields, raw
from limitgate.limits.refusal_id import LENGTH, URN

_PROBLEMS = "https://iana.org/assignments/http-problem-types#"


_TRY_AGAIN_LATER = 1013
_POLICY_VIOLATION = 1008


class Refusal(NamedTuple):
    """A response of the gate: 403, 429, 431 or 503."""

    status: int
    fields: Fields
    raw: RawFields
    body: bytes
    detail: str
    """The explanation in the body."""
    id: str | None = None
    """See `limitgate.limits.refusal_id`."""

    @property
    def waiting(self) -> Fields:
        """The ``Retry-After`` field, if any."""
        return [field for field in self.fields if field[0] == "Retry-After"]

    @property
    def reason(self) -> str:
        """The reason phrase of the status."""
        return HTTPStatus(self.status).phrase

    @property
    def close_code(self) -> int:
        """The WebSocket close code (IANA WebSocket Close Code Number Registry)."""
        return _POLICY_VIOLATION if self.status in {403, 431} else _TRY_AGAIN_LATER


def quota_exceeded(rules: tuple[str | None, ...], wait: float, name: bytes, *, is_permanent_ban: bool = False) -> Refusal:
    """Return the 429 (RFC 6585 section 4) with a problem body (RFC 9457, draft-ietf-httpapi-ratelimit-headers-11).

    ``Retry-After`` is ``wait`` in whole seconds, at least 1 (RFC 9110 section 10.2.3), and absent if waiting can't help.
    ``name`` is the refusal id.
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
    """Return a 429, and its body before and after the id. Cached, because refused clients often retry immediately."""
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
    """Return the 403 of a deny rule, with problem type ``about:blank`` (RFC 9457 section 4.2.1)."""
    return _problem(403, "Forbidden", "This request is not permitted.", [], type="about:blank")


@cache
def headers_too_large(detail: str) -> Refusal:
    """Return the 431 (RFC 6585 section 5) for a `limitgate.errors.HeadersTooLargeError`."""
    return _problem(431, "Request Header Fields Too Large", detail, [], type="about:blank")


@cache
def unavailable() -> Refusal:
    """Return the 503 of ``on_error: closed``."""
    detail = "The rate limit cannot be checked at the moment. Try again shortly."
    return _problem(503, "Temporary Reduced Capacity", detail, [("Retry-After", "1")])


@cache
def overloaded(after_s: int) -> Refusal:
    """Return the 503 of an adaptive limit, with ``Retry-After`` in s. Cached: the values are few."""
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
