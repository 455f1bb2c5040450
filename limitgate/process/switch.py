"""The switches of `limitgate.testing`, for this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

null_store: Any = None
"""Store that admits everything, while limits are off."""
stand_in: Callable[[Any], Any] | None = None
"""Replaces stores on Redis while clocks are frozen. Returns None for other stores."""
