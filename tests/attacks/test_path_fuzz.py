from __future__ import annotations

import pytest

from tests.attacks import path_fuzz
from tests.attacks.path_fuzz import FRAMEWORKS, SEEDS, found_by

PATHS = 2000


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_whatever_path_reaches_a_handler_is_charged_fuzz(framework: str) -> None:
    """However a path is spelled, with whatever mount point, a handler that ran was charged for by its rule."""
    reached, findings = found_by(framework, PATHS, seed=16)
    assert len(SEEDS) < PATHS
    assert reached > PATHS // 50
    assert findings == []


def test_a_path_that_is_not_charged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that does not look below a handler's path leaves findings, so that none mean something."""
    rules = [rule for rule in path_fuzz.RULES if rule.name != "file"]
    monkeypatch.setattr(path_fuzz, "RULES", rules)
    reached, findings = found_by("Starlette", 500, seed=16)
    assert 0 < len(findings) < reached
