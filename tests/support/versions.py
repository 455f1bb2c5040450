"""Which versions of other packages tests need: LimitGate runs on earlier ones, which lack what some tests are about."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(package: str, since: str) -> None:
    """Skip a test where a package is of an earlier version."""
    if _installed(package) < Version(since):
        pytest.skip(f"needs {package} {since}")


@cache
def _installed(package: str) -> Version:
    return Version(version(package))
