"""Logs of refusals: what is told when a bucket begins and ceases to refuse, and how little when thousands do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from limitgate.observing import logs as module
from limitgate.observing.logs import MINUTE, MOST, QUIET, Episodes
from limitgate.process.forking import living

SECOND = 1_000_000


class World:
    """Episodes on two clocks that go on together; nobody looks unless told."""

    def __init__(self, per_minute: int = 60) -> None:
        self.now = 1_000.0
        self.episodes = Episodes(per_minute, lambda: self.now)
        self.episodes._is_watched = True  # no thread

    def refuse(self, key: str = "k", times: int = 1, who: Callable[[], str] = lambda: "ip=1") -> None:
        for _ in range(times):
            now = int(self.now * SECOND)
            if not self.episodes.count(key, now):
                self.episodes.begin(key, "api", now, "ID", who)

    def wait(self, seconds: float) -> None:
        """Let time go by, and look once a second."""
        for _ in range(int(seconds)):
            self.now += 1
            self.episodes.look()
            self.episodes._is_watched = True


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "limitgate")


def test_a_line_at_the_beginning_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Between the two nothing is logged; the end tells how many were refused until the last refusal."""
    world = World()
    world.refuse()
    assert caplog.messages == ["rule api begins to refuse ip=1 (refusal ID)"]
    for _ in range(252):
        world.refuse(times=21)
        world.wait(1)
    world.refuse(times=19)
    world.wait(QUIET - 1)
    assert len(caplog.messages) == 1
    world.wait(3)
    assert caplog.messages[1:] == ["rule api has ceased to refuse ip=1: refused 5,312 in 252 s"]
    begin, end = caplog.records
    assert {record.name for record in caplog.records} == {"limitgate.refusals"}
    assert (begin.rule, begin.who, begin.refusal_id) == ("api", "ip=1", "ID")  # type: ignore[attr-defined]
    assert (end.rule, end.who, end.refused, end.seconds) == ("api", "ip=1", 5312, 252)  # type: ignore[attr-defined]
    assert not world.episodes.look()


def test_a_pause_ends_an_episode_even_if_nobody_looked(caplog: pytest.LogCaptureFixture) -> None:
    """A clock of a test that jumps, or a process that stood still: the next refusal tells the end before its own beginning."""
    world = World()
    world.refuse(times=3)
    world.now += QUIET + 1
    world.refuse()
    assert [text.split(" ")[2] for text in caplog.messages] == ["begins", "has", "begins"]


def test_a_clock_that_steps_back_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The duration is never negative."""
    world = World()
    world.refuse()
    assert world.episodes.count("k", 5)
    world.wait(QUIET + 2)
    assert caplog.messages[1:] == ["rule api has ceased to refuse ip=1: refused 2 in 0 s"]


def test_no_more_lines_than_allowed(caplog: pytest.LogCaptureFixture) -> None:
    """Ten thousand clients at once: so many lines in any minute, and one that says how many were left out."""
    world = World(per_minute=60)
    asked = []
    for number in range(10_000):
        world.refuse(f"k{number}", who=lambda: asked.append(1) or "x")  # type: ignore[func-returns-value]
    assert len(caplog.messages) == len(asked) == 60
    assert len(world.episodes._open) == MOST
    world.wait(MINUTE - 1)
    assert len(caplog.messages) == 60
    world.wait(2)
    assert caplog.messages[60:] == ["10,000 more lines about refusals were left out, because refusal_logs allows 60 a minute"]
    assert not world.episodes.look()


def test_whose_beginning_was_left_out_has_no_end(caplog: pytest.LogCaptureFixture) -> None:
    """A pair of lines is logged or left out; what is left out counts once."""
    world = World(per_minute=1)
    world.refuse("a")
    world.now += MINUTE / 2
    world.refuse("b")
    world.wait(MINUTE / 2)
    assert [text.split(" ")[2] for text in caplog.messages] == ["begins"]
    world.wait(MINUTE)
    assert caplog.messages[1:] == ["2 more lines about refusals were left out, because refusal_logs allows 1 a minute"]


def test_a_name_or_a_handler_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Users are objects of the application's, and so are handlers of logs."""

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(record.msg)

    world = World()
    handler = Failing()
    module.log.addHandler(handler)
    try:
        world.refuse("a", who=lambda: str(1 / 0))
        world.refuse("b")
    finally:
        module.log.removeHandler(handler)
    world.refuse("c")
    assert caplog.messages[-1] == "rule api begins to refuse ip=1 (refusal ID)"


def test_threads_that_are_refused_at_once_begin_one_episode(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever comes second counts in the episode of the first."""
    world = World()
    assert not world.episodes.count("k", 0)
    assert not world.episodes.count("k", 0)
    for _ in range(2):
        world.episodes.begin("k", "api", 0, "ID", str)
    assert caplog.messages == ["rule api begins to refuse (refusal ID)"]
    assert world.episodes._open["k"].count == 2


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET", 0.0)
    monkeypatch.setattr(module, "_PERIOD", 0.001)


def watchers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "limitgate-refusals"}


@pytest.mark.usefixtures("_hasty")
def test_a_thread_tells_the_end_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has to ask again for an end to be told; a later episode finds a thread again."""
    episodes = Episodes(60)
    for turn in (1, 2):
        others = watchers()
        episodes.begin("k", "api", turn * 10**9, "ID", str)
        for thread in watchers() - others:
            thread.join()
        assert len(caplog.messages) == 2 * turn
    assert caplog.messages[-1] == "rule api has ceased to refuse: refused 1 in 0 s"


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The refusal is answered all the same, and the next episode tries again."""

    def start(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    episodes = Episodes(60)
    monkeypatch.setattr(threading.Thread, "start", start)
    episodes.begin("k", "api", 0, "ID", str)
    assert len(caplog.messages) == 1
    assert not episodes._is_watched


def test_a_forked_child_begins_anew() -> None:
    """Episodes of the parent are for the parent to tell."""
    world = World()
    world.refuse()
    assert world.episodes in living(Episodes)
    world.episodes.reset_after_fork()
    assert (len(world.episodes._open), world.episodes._is_watched) == (0, False)
