from __future__ import annotations

import pytest

from tests.attacks import catalogue
from tests.attacks.world import ATTACKS

assert catalogue


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_an_attack_comes_to_nothing(name: str) -> None:
    """Nobody gets more than the limit by it, and nobody else is refused because of it."""
    outcome = ATTACKS[name]()
    assert outcome.tries
    assert (outcome.through, outcome.harmed) == (0, 0)
