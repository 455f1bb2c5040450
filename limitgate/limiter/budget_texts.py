"""Texts about budgets of language models that processes keep for each other in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limitgate.gate.flow import ConfigFlow
from limitgate.limiter.operations import Operations
from limitgate.limiter.stored_limits import Configuration
from limitgate.limits.limit import Limit


def stated_limits(limiter: Operations, key: str) -> ConfigFlow[Configuration | None]:
    """Return the limits that a provider has stated for a key, with what each counts."""
    return limiter._reading(_told(key))  # noqa: SLF001 - a part of the limiter


def stating_limits(limiter: Operations, key: str, limits: Sequence[Limit], kinds: Sequence[str]) -> ConfigFlow[Any]:
    """Keep the limits that a provider has stated for a key."""
    return limiter._configuring(_told(key), limits, per_process=False, replace=True, kinds=kinds)  # noqa: SLF001


def _told(key: str) -> str:
    return f"{key} told"
