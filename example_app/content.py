"""What both twins serve, so that they differ in nothing but the framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from example_app import demo
from limitgate import Decision, MemoryStore, Settings

CHUNKS = 5
PAUSE = 0.2
"""Seconds between the chunks of the stream, so that one can watch them arrive."""

_CONFIG = Path(__file__).parent.parent / "config"


def rules() -> str | Path:
    """``LIMITGATE_RULES`` if it is set, else the folder config/ beside this package, whatever the working directory."""
    return Settings().rules or _CONFIG


def hello(decision: Decision | None) -> dict[str, Any]:
    """A greeting that says what the caller has left. The decision is None where LimitGate is disabled."""
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


def worked() -> dict[str, str]:
    """The answer when a piece of work is done."""
    return {"message": "Done."}


def busy() -> tuple[dict[str, str], int, dict[str, str]]:
    """The answer when the overload guard refuses, its status and its headers."""
    return {"message": "The service is busy. Try again in a second."}, 503, {"Retry-After": "1"}


def store(options: dict[str, Any]) -> Any:
    """The store for the gate and the live page: a URL, or an object. In memory both have to have the same object."""
    given = options.get("store")
    given = Settings().store if given is None else given
    return MemoryStore() if given is None or given == "memory://" else given


def start_page(base: str) -> tuple[str, dict[str, str]]:
    """The start page as HTML, and its headers."""
    return demo.page(base, rules(), demo.store_name())
