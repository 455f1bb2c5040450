"""The start page, and the routes that its buttons need beside those of the service."""

from __future__ import annotations

import html
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import yaml

from limitgate import ConfigError, RuleSet, Settings, Window, load_rules
from limitgate.rules.callers import DEFAULT_TIER

PASSWORD = "sesame"  # noqa: S105 - for everybody to try
WORK = 0.05
"""Seconds that one piece of work takes. The service does one at a time."""
CROWD, BETWEEN = 60, 0.025
"""Requests of a crowd, and the seconds from one to the next: twice what the service can do."""
SHOWN = "api", "login"
"""Rules whose buckets the page shows."""
HELLO = "/api/hello"
"""The route whose bucket of the rule `api` it shows."""
LIVE = "/live"
"""Path of the live page."""

_GUARD = {
    "tier": DEFAULT_TIER,
    "name": "guard",
    "file": "example_app/main.py",
    "text": """guard = AsyncLimiter("memory://").adaptive("guard", min=2, max=8)

async with guard:
    return await work(request)""",
}
"""The overload guard as the page shows it."""
_HERE = Path(__file__).parent
_DOCS = _HERE.parent / "docs"
_LINKS = (("start.md", "First steps"), ("rules.md", "Rules"), ("operating.md", "Operation"))
_TRY = (
    (
        "Say hello",
        "curl -i {base}/api/hello",
        "The <code>X-RateLimit</code> headers show the tightest of three limits: 5 per second, 100 per minute, 2000 per day.",
    ),
    (
        "Say hello too often",
        "curl -s -o /dev/null -w '%{{http_code}}\\n' '{base}/api/hello?[1-8]'",
        "Eight at once: up to five times 200, then 429. After a second, five more are admitted.",
    ),
    (
        "Be a VIP",
        "curl -i -H 'X-API-Key: demo-vip-key' {base}/api/hello",
        "50 per second, counted per caller: the tier <code>vip</code> in <code>config/vip.yaml</code>.",
    ),
    (
        "Items",
        "curl -i {base}/api/items/7",
        "Counted by route: all items share one bucket, apart from <code>/api/hello</code>.",
    ),
    (
        "Log in",
        "curl -s -o /dev/null -w '%{{http_code}}\\n' -X POST '{base}/login?[1-4]'",
        "Three at once and five per minute by a rule, twenty per hour by a decorator on the view.",
    ),
    (
        "Watch a stream",
        "curl -N {base}/api/stream",
        "Limited like the rest of the API; the chunks arrive one by one.",
    ),
    (
        "Check its health",
        "curl -i {base}/healthz",
        "Exempt: never refused, and no rate headers.",
    ),
)
_STEP = "<div><h3>{title}</h3>\n<pre>{command}</pre>\n<p>{note}</p></div>\n"


def page(base: str, rules: str | Path, store: str) -> tuple[str, dict[str, str]]:
    """The start page and its headers. Commands use ``base``, the URL of this service."""
    base = base.rstrip("/")
    nonce = secrets.token_urlsafe(16)
    at = urlsplit(base).path
    facts = {"base": f"{at}/", "url": base, "rules": [*rule_texts(str(rules)), _GUARD]}
    steps = (
        _STEP.format(title=title, command=html.escape(command.format(base=base), quote=False), note=note)
        for title, command, note in _TRY
    )
    links = (f'<a href="{html.escape(at)}/docs/{name}">{title}</a>' for name, title in _LINKS if (_DOCS / name).is_file())
    values = {
        "nonce": nonce,
        "docs": "".join(links),
        "live": html.escape(f"{at}{LIVE}/"),
        "steps": "".join(steps),
        "store": html.escape(store),
        # Nothing in it may end the script element.
        "facts": json.dumps(facts).replace("<", "\\u003c"),
        "script": _file("start.js"),
    }
    head, *rest = _file("start.html").split("{{")
    parts = [head]
    for part in rest:
        name, _, after = part.partition("}}")
        parts += values[name], after
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return "".join(parts), {**headers, "Referrer-Policy": "no-referrer"}


@cache
def _file(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def store_name() -> str:
    """The store's URL without password, user or query."""
    url = urlsplit(Settings().store or "memory://")
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


@cache
def rule_texts(rules: str) -> list[dict[str, str]]:
    """Each rule as its file has it. Empty without files."""
    folder = Path(rules)
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]) if folder.is_dir() else [folder]
    return [found for file in files if file.is_file() for found in _rules_in(file)]


def _rules_in(file: Path) -> Iterable[dict[str, str]]:
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    fields = {key.value: value for key, value in document.value}
    tier = fields["tier"].value if "tier" in fields else DEFAULT_TIER
    for rule in fields["rules"].value:
        name = next(value.value for key, value in rule.value if key.value == "name")
        first, last = rule.start_mark.line, rule.value[-1][1].end_mark.line
        written = [lines[first][rule.start_mark.column :], *lines[first + 1 : last + 1]]
        margin = " " * rule.start_mark.column
        kept = [line.removeprefix(margin).partition(" #")[0].rstrip() for line in written]
        yield {"tier": tier, "name": name, "file": f"{file.parent.name}/{file.name}", "text": "\n".join(kept)}


class State(NamedTuple):
    """The buckets of the client that asks."""

    windows: Sequence[Window]

    def fields(self, rules: str | Path) -> dict[str, Any]:
        """As JSON; ``full_after`` is the seconds that an empty bucket takes to be full."""
        full = _full_after(str(rules))
        shown = [
            window._asdict() | {"full_after": full.get((window.rule, window.period, window.limit), window.period)}
            for window in self.windows
            if window.period
        ]
        return {"windows": [{name: None if value == float("inf") else value for name, value in each.items()} for each in shown]}


@cache
def _full_after(rules: str) -> Mapping[tuple[str | None, int, int], float]:
    try:
        found: RuleSet = load_rules(rules)
    except ConfigError:  # reported by the gate
        return {}
    return {
        (rule.name, limit.period, limit.burst): limit.burst * limit.period / limit.count
        for of_tier in found.tiers.values()
        for rule in of_tier
        for limit in rule.every_limit
        if limit.period and limit.count
    }


def login(body: bytes) -> tuple[dict[str, str], int]:
    """The answer to a login and its status. A login without a password succeeds, because the limit is the point here."""
    given = parse_qs(body[:1000].decode("utf-8", "replace"), keep_blank_values=True).get("password")
    if given is None or given[0] == PASSWORD:
        return {"message": "Logged in."}, 200
    return {"message": "Wrong password."}, 401


def answered(number: int, status: int, seconds: float) -> str:
    """One request of a crowd, as a line of JSON."""
    return json.dumps({"number": number, "status": status, "ms": round(seconds * 1000, 1)}) + "\n"


def work_path(query: str) -> str:
    """What a crowd asks for: ``guard=off`` goes past the overload guard."""
    return "/work/unguarded" if parse_qs(query).get("guard") == ["off"] else "/work"


def document(name: str) -> str | None:
    """A page of the documentation as text; None if there is none of this name."""
    known = {file.name: file for file in _DOCS.glob("*.md")}
    return known[name].read_text(encoding="utf-8") if name in known else None
