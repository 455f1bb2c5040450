"""Which versions of other packages tests need: LimitGate runs on earlier ones, which lack what some tests are about."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(package: str, since: str) -> None:
    """Skip a test where a package is of an earlier version."""
    if Version(version(package)) < Version(since):
        pytest.skip(f"needs {package} {since}")
