"""The switches of `limitgate.testing`, for this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

null_store: Any = None
"""A store that admits everything, while limits are off."""
stand_in: Callable[[Any], Any] | None = None
"""Returns the memory store that replaces a store on Redis (None for others), while clocks are frozen. Then stores on Redis
neither connect nor send.
"""
