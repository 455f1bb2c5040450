"""Audit log of changed limits and bans, at level INFO of the logger ``limitgate.audit``, with structured fields for JSON."""

from __future__ import annotations

import getpass
import logging
import socket
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

from limitgate.messages.text import printable

log = logging.getLogger("limitgate.audit")

T = TypeVar("T")


def audited(
    flow: Generator[Any, Any, T], action: str, name: Callable[[], str], reason: str | None, **facts: object
) -> Generator[Any, Any, T]:
    """Run a flow, and log its change of state. ``name`` returns the name of the target."""
    result = yield from flow
    if log.isEnabledFor(logging.INFO):
        target, by = name(), somebody()
        why = f": {printable(reason)}" if reason else ""
        log.info("%s %s by %s%s", action, target, by, why, extra=_fields(action, target, by, reason, facts))
    return result


def rules_changed(source: str, changes: str) -> None:
    """Log a rule change; the source doesn't identify the author."""
    fields = _fields("rules", source, None, None, {"changes": changes})
    log.info("rules read again from %s: %s", source, changes, extra=fields)


def somebody() -> str:
    """Return user and host of this process."""
    user = "unknown"
    with suppress(OSError, KeyError):
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def _fields(action: str, target: str, by: str | None, reason: str | None, facts: dict[str, object]) -> dict[str, object]:
    return {"action": action, "target": target, "by": by, "reason": reason, **facts}
