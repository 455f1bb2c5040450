"""The thread that looks: one in each process, and in none that is about to fork."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from threading import Thread, enumerate as enumerate_threads

import pytest

from limitgate.process.background import Poller
from tests.support.doors import until

SOON = 0.02


def pollers() -> list[Thread]:
    """The threads that look, in this process."""
    return [thread for thread in enumerate_threads() if thread.name == "limitgate-reload"]


class Counting:
    """Something to look at, which counts how often that was done."""

    def __init__(self) -> None:
        self.looks = self.forgotten = 0

    def poll(self) -> None:
        self.looks += 1

    def forget(self) -> None:
        self.forgotten += 1


def test_one_thread_looks_however_often_it_is_started() -> None:
    """A server may say that it starts, when the thread runs already."""
    before = set(pollers())
    poller = Poller(SOON, [Counting()])
    for _ in range(3):
        poller.start()
    assert len(set(pollers()) - before) == 1
    poller.stop()
    until(lambda: not set(pollers()) - before)
    poller.start()
    assert len(set(pollers()) - before) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("in_children", [False, True])
def test_each_child_of_a_fork_looks_for_itself(*, in_children: bool) -> None:
    """And in a master that is about to fork nobody looks at all."""
    counting = Counting()
    poller = Poller(SOON, [counting])
    poller.start(in_children=in_children)
    if in_children:
        assert not poller.is_running
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            looks = counting.looks
            until(lambda: counting.looks > looks + 2)
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_the_parent_was_reading_is_read_by_its_child() -> None:
    """A content that was seen, and not loaded yet, would else count as known."""

    class Forking(Counting):
        def poll(self) -> None:
            self.child = os.fork()

    forking = Forking()
    poller = Poller(SOON, [forking])
    poller.poll()
    if forking.child == 0:
        os._exit(forking.forgotten)
    assert os.waitstatus_to_exitcode(os.waitpid(forking.child, 0)[1]) == 1
    assert forking.forgotten == 0


def test_the_first_look_may_come_sooner() -> None:
    """For what was put off by a fork."""
    counting = Counting()
    poller = Poller(3600, [counting])
    poller.start(first=0.0)
    until(lambda: counting.looks == 1)
    poller.stop()


REPLACED = """
import threading
from limitgate.process import background

class Local(threading.local):
    made = []

    def __init__(self):
        self.made.append(self)

threading.local = Local
said = []
background.start("test", lambda: said.append(background.is_background())).join()
print(len(Local.made), said, background.is_background())
"""


def test_threads_may_be_replaced_after_the_import() -> None:
    """As gunicorn's gevent workers do after it has read its configuration: who is in the background is theirs to know."""
    ran = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, check=True)
    assert ran.stdout == "1 [True] False\n"
