from __future__ import annotations

import sys

import pytest

from tests.support import task_queues


@pytest.fixture(autouse=True)
def _task_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages may import Celery, arq and RQ."""
    for name, module in task_queues.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
