"""Work in pieces: others have their turn, and what is large is freed bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys
from threading import Thread
from weakref import ref

import pytest

from limitgate.process import gil


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are made, where each piece is as short as can be."""
    made: list[float] = []
    monkeypatch.setattr(gil, "PIECE", 0.0)
    monkeypatch.setattr(gil, "sleep", made.append)
    return made


class Part:
    """Something that can be watched while it is freed."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts


def test_only_work_in_pieces_pauses(pauses: list[float]) -> None:
    """At start nobody waits, so the same loops run through; nor does a thread pause because another one works in pieces."""
    gil.yield_gil()
    with gil.in_pieces():
        other = Thread(target=gil.yield_gil)
        other.start()
        other.join()
        assert pauses == []
        gil.yield_gil()
    gil.yield_gil()
    assert pauses == [gil.PAUSE]


def test_a_piece_lasts_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause for each step of a loop would make it take for ever."""
    made: list[float] = []
    monkeypatch.setattr(gil, "PIECE", 60.0)
    monkeypatch.setattr(gil, "sleep", made.append)
    with gil.in_pieces():
        for _ in range(1000):
            gil.yield_gil()
    assert made == []


def test_an_error_ends_work_in_pieces(pauses: list[float]) -> None:
    """What the thread does next is not in pieces."""
    with pytest.raises(ZeroDivisionError), gil.in_pieces():
        raise ZeroDivisionError
    gil.yield_gil()
    assert pauses == []


def test_a_tree_is_freed_one_by_one(pauses: list[float]) -> None:
    """The whole before its parts, with a pause after each."""
    freed: list[str] = []

    def part(name: str, *parts: Part) -> Part:
        made = gil.freed_in_pieces(Part(*parts))
        watched.append(ref(made, lambda _: freed.append(f"{name}{len(pauses)}")))
        return made

    watched: list[ref[Part]] = []
    with gil.in_pieces():
        part("c", part("b", part("a")))
        assert freed == []
    assert freed == ["c0", "b1", "a2"]


def test_what_somebody_else_has_is_not_freed(pauses: list[float]) -> None:
    """It is only let go of."""
    kept = Part()
    parts: list[object] = [Part(), kept]
    gil.free_in_pieces(parts)
    assert parts == []
    assert kept.parts == ()
    assert gil.freed_in_pieces(kept) is kept


COLLECTIONS = """
import gc, json
from limitgate.process import gil

gc.set_threshold(700, 10, 10)  # later versions begin with others

def generations(work):
    found = []
    note = lambda phase, told: phase == "start" and found.append(told["generation"])
    gc.callbacks.append(note)
    work()
    gc.callbacks.remove(note)
    return sorted(set(found))

def make():
    made = []
    for _ in range(300):
        made += [[object()] for _ in range(500)]
        gil.yield_gil()
    return made

def make_in_pieces():
    with gil.in_pieces():
        return make()

gil.PIECE, gil.sleep, gil.SPARED = 0.0, lambda _: None, 2
at_once = generations(make)
gc.collect()
in_pieces = [generations(make_in_pieces) for _ in range(3)]
gc.collect()
again = generations(make_in_pieces)
gc.freeze()
frozen = gc.get_freeze_count()
generations(make_in_pieces)
print(json.dumps([at_once, in_pieces[:2], max(in_pieces[2]) > 0, again, gc.get_freeze_count() > 0.9 * frozen]))
"""


def test_work_in_pieces_makes_nobody_wait_for_the_collector() -> None:
    """It looks at what is new only, until work upon work has had it do so; then all is looked at once, and so on.

    What an application has frozen itself, before a fork say, stays so. In a process of its own, as ours has frozen all.
    """
    done = subprocess.run([sys.executable, "-c", COLLECTIONS], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[0, 1, 2], [[0], [0]], True, [0], True]
