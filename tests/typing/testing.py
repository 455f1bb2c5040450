"""Switches for tests, as a type checker sees them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import assert_type

from limitgate.testing import FrozenClock, frozen, off, reset

with off(), frozen() as clock, frozen(1_700_000_000), frozen(datetime(2026, 1, 1, tzinfo=UTC)):
    assert_type(clock, FrozenClock)
    clock.advance(1.5)
    assert_type(clock.now, float)
    reset()
