"""pytest's plugin: the fixtures ``limitgate_off`` and ``limitgate_clock``.

It lies beside the package: pytest loads it at start wherever LimitGate is installed, and the package only with a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from limitgate.testing import FrozenClock


@pytest.fixture
def limitgate_off() -> Iterator[None]:
    """Nothing is limited, see `limitgate.testing.off`."""
    from limitgate import testing  # noqa: PLC0415 - only for tests that use it

    with testing.off():
        yield


@pytest.fixture
def limitgate_clock() -> Iterator[FrozenClock]:
    """Clock of all stores, which goes on when told, see `limitgate.testing.frozen`."""
    from limitgate import testing  # noqa: PLC0415 - only for tests that use it

    with testing.frozen() as clock:
        yield clock
