"""Workers of the same server are told from those that they replace, and from other children of their parent."""

from __future__ import annotations

import os

import pytest

from limitgate.gate.lifecycle import workers


@pytest.mark.parametrize(
    ("here", "others", "counted"),
    [
        (100.0, {}, 1),
        (100.0, {2: (100.1, "a"), 3: (100.3, "a")}, 3),
        (100.3, {2: (100.1, "a"), 3: (100.0, "a")}, 3),
        (100.0, {2: (100.1, "b")}, 1),  # it listens elsewhere
        (105.0, {2: (100.0, "a"), 3: (100.1, "a")}, 1),  # it replaces them
        (105.0, {2: (100.0, "a"), 3: (100.1, "a"), 4: (105.2, "a")}, 2),
        (100.0, {2: (105.0, "a")}, 1),  # it is being replaced
        (100.0, {2: (101.5, "a"), 3: (103.0, "a"), 4: (104.5, "a")}, 4),  # a slow machine
    ],
)
def test_workers_that_begin_together_are_counted(
    monkeypatch: pytest.MonkeyPatch, here: float, others: dict[int, tuple[float, str]], counted: int
) -> None:
    """Each within two seconds of the one before: after a HUP both generations live for a while, and are not one."""
    began = {os.getpid(): here, **{pid: when for pid, (when, _) in others.items()}}
    monkeypatch.setattr(workers, "_listening_sockets", lambda: frozenset({"a"}))
    monkeypatch.setattr(workers, "_children", lambda _: list(began))
    monkeypatch.setattr(workers, "_began", began.__getitem__)
    monkeypatch.setattr(workers, "_sockets", lambda pid: iter([others[pid][1]]))
    assert workers.count_workers() == counted


def test_one_that_ends_meanwhile_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are gone from ``/proc``."""

    def gone(pid: int) -> float:
        if pid != os.getpid():
            raise FileNotFoundError
        return 100.0

    monkeypatch.setattr(workers, "_listening_sockets", lambda: frozenset({"a"}))
    monkeypatch.setattr(workers, "_children", lambda _: [os.getpid(), 2])
    monkeypatch.setattr(workers, "_began", gone)
    monkeypatch.setattr(workers, "_sockets", lambda _: iter(["a"]))
    assert workers.count_workers() == 1
