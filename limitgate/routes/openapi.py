"""The 429 in OpenAPI 3.1, independent of frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from limitgate.http.rate_fields import Renamed, Style
from limitgate.limits.limit import SECONDS
from limitgate.rules.rule import Rule

PROBLEM = "LimitGateProblem"
"""Name of `PROBLEM_SCHEMA` in a document."""

PROBLEM_SCHEMA: dict[str, Any] = {
    "title": PROBLEM,
    "description": "A refusal by a rate limit, as a problem of RFC 9457.",
    "type": "object",
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string", "format": "uri", "description": "The id of this refusal, for questions about it."},
        "violated-policies": {"type": "array", "items": {"type": "string"}, "description": "The limits that refused."},
    },
    "required": ["type", "title", "status", "detail", "instance", "violated-policies"],
}

Headers = dict[str, dict[str, Any]]


def too_many_requests(styles: Iterable[Style], rules: Sequence[Rule], *, is_problem: bool) -> dict[str, Any]:
    """Return the 429 of an operation that ``rules`` limit, with rate fields in ``styles``.

    ``is_problem`` is true if `PROBLEM_SCHEMA` describes the body.
    """
    wait = "Seconds after which the request will be admitted, if nobody else uses the same limit until then."
    headers = {"Retry-After": _header(wait, type="integer", minimum=1)}
    for style in styles:
        own, names = (style.style, dict(style.names)) if isinstance(style, Renamed) else (style, {})
        headers |= {names.get(name, name): header for name, header in _STYLES[own](rules).items()}
    response: dict[str, Any] = {"description": "Too Many Requests", "headers": headers}
    if is_problem:
        response["content"] = {"application/problem+json": {"schema": {"$ref": f"#/components/schemas/{PROBLEM}"}}}
    return response


def _x_ratelimit(_: Sequence[Rule]) -> Headers:
    return {
        "X-RateLimit-Limit": _count("How many requests may come at once."),
        "X-RateLimit-Remaining": _count("How many more may come now."),
        "X-RateLimit-Reset": _count("When all of them may come again, as Unix time in seconds."),
    }


def _x_ratelimit_windows(rules: Sequence[Rule]) -> Headers:
    limited = {limit.unit for rule in rules for limit in rule.every_limit}
    headers: Headers = {}
    for unit in [unit for unit in SECONDS if unit in limited]:
        headers[f"X-RateLimit-Limit-{unit.title()}"] = _count(f"How many requests may come at once, by the limit per {unit}.")
        headers[f"X-RateLimit-Remaining-{unit.title()}"] = _count(f"How many more may come now, by the limit per {unit}.")
    return headers


def _draft_11(_: Sequence[Rule]) -> Headers:
    return {
        "RateLimit-Policy": _header("The limits: q requests in w seconds each.", type="string"),
        "RateLimit": _header("How each limit stands: r requests remain, t seconds until there are more.", type="string"),
    }


_STYLES: dict[str, Callable[[Sequence[Rule]], Headers]] = {
    "x-ratelimit": _x_ratelimit,
    "x-ratelimit-windows": _x_ratelimit_windows,
    "draft-11": _draft_11,
}


def _count(description: str) -> dict[str, Any]:
    return _header(description, type="integer", minimum=0)


def _header(description: str, **schema: Any) -> dict[str, Any]:
    return {"description": description, "schema": schema}
