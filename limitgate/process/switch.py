"""The switch of `limitgate.testing.off`, for this process. Each way to limit something asks it in one place."""

from __future__ import annotations

from typing import Any

null_store: Any = None
"""A store that admits everything, which limiters ask instead of their own while nothing is limited; None otherwise."""
