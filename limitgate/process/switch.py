"""The switch of `limitgate.testing.off`, for this process."""

from __future__ import annotations

from typing import Any

null_store: Any = None
"""A store that admits everything, used while limits are off; otherwise None."""
