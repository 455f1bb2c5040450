"""Measurements on a machine that has other things to do."""

from __future__ import annotations

from collections.abc import Callable

ATTEMPTS = 4


def at_best(complaints_of: Callable[[], list[str]]) -> list[str]:
    """Measure again, a few times, while there are complaints: a busy machine explains them once. The last complaints."""
    complaints = complaints_of()
    for _ in range(ATTEMPTS - 1):
        if complaints:
            complaints = complaints_of()
    return complaints
