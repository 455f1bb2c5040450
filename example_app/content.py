"""What both twins serve, so that they differ in nothing but the framework."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from limitgate import Decision, Settings

CHUNKS = 5
PAUSE = 0.2
"""Seconds between the chunks of the stream, so that one can watch them arrive."""

_CONFIG = Path(__file__).parent.parent / "config"


def rules() -> str | Path:
    """``LIMITGATE_RULES`` if it is set, else the folder config/ beside this package, whatever the working directory."""
    return Settings().rules or _CONFIG


def hello(decision: Decision | None) -> dict[str, Any]:
    """A greeting that says what the caller has left. The decision is None where LimitGate is switched off."""
    windows = decision.windows if decision else ()
    return {
        "message": "Hello!",
        "rule": decision.rule if decision else None,
        "remaining": decision.remaining if decision else None,
        "limits": [{"limit": window.limit, "seconds": window.period, "remaining": window.remaining} for window in windows],
    }


def item(name: str) -> dict[str, str]:
    """One item. All items share a limit, because their route is one."""
    return {"id": name, "name": f"Item {name}"}


def chunk(number: int) -> str:
    """One piece of the stream."""
    return f"chunk {number} of {CHUNKS}\n"


def logged_in() -> dict[str, str]:
    """The answer to every login: here it is the limit that counts, not the password."""
    return {"message": "Logged in."}


_TRY = (
    (
        "Say hello",
        "curl -i {base}/api/hello",
        "The <code>X-RateLimit</code> headers show the tightest of three limits: 5 per second, 100 per minute, 2000 per day.",
    ),
    (
        "Say hello too often",
        "curl -s -o /dev/null -w '%{{http_code}}\\n' '{base}/api/hello?[1-8]'",
        "Eight at once: up to five times 200, then 429. Ask again after a second.",
    ),
    (
        "Be a VIP",
        "curl -i -H 'X-API-Key: demo-vip-key' {base}/api/hello",
        "50 per second, counted per caller: the tier <code>vip</code> in <code>config/vip.yaml</code>.",
    ),
    (
        "Items",
        "curl -i {base}/api/items/7",
        "Counted by route template: all items share one bucket, apart from <code>/api/hello</code>.",
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

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>LimitGate example</title>
<style>
  body {{ max-width: 46rem; margin: 3rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #223; }}
  h1 {{ margin-bottom: 0; }}
  h2 {{ font-size: 1.05rem; margin: 1.8rem 0 .3rem; }}
  p {{ margin: .3rem 0; }}
  pre {{ margin: 0; padding: .6rem .8rem; background: #f2f4f8; border-radius: .4rem;
         white-space: pre-wrap; overflow-wrap: anywhere; }}
</style>
<h1>LimitGate</h1>
<p>This small service is limited by the rules in <code>config/</code>. Try it from a terminal:</p>
{steps}
</html>
"""

_STEP = """<h2>{title}</h2>
<pre>{command}</pre>
<p>{note}</p>
"""


def start_page(base: str) -> str:
    """The start page as HTML, its commands addressed to ``base``, the URL under which this service was reached."""
    base = html.escape(base.rstrip("/"))
    steps = (_STEP.format(title=title, command=command.format(base=base), note=note) for title, command, note in _TRY)
    return _PAGE.format(steps="".join(steps))
