"""The worker of the example: real processes on a real Redis, which are killed, stopped and cut off in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from example_app.worker import __main__ as program
from example_app.worker.jobs import connect, fill
from tests.support.doors import PATIENCE, PROCESS_PATIENCE
from tests.support.redis_server import RedisServer
from tests.support.worker_jobs import Note, begun, notes

ROOT = Path(__file__).parents[2]


class Site:
    """A stream of jobs, and crews that work on it."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server = server
        self.file = folder / "done"
        self.stream = uuid4().hex
        self._output = folder / "output"
        self.running: list[subprocess.Popen[bytes]] = []

    def call(self, command: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start the program."""
        whole = [sys.executable, "-W", "error", "-m", "example_app.worker", command]
        whole += ["--store", self.server.url, "--stream", self.stream, *arguments]
        environment = {**os.environ, "JOBS_FILE": str(self.file), **environment}
        with self._output.open("ab") as output:
            self.running.append(subprocess.Popen(whole, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT))
        return self.running[-1]

    def fill(self, jobs: int) -> None:
        """Add jobs, as the program would."""

        async def filled() -> None:
            async with connect(self.server.url) as redis:
                await fill(redis, self.stream, jobs)

        asyncio.run(filled())

    def crew(self, rate: str, processes: int, *arguments: str, idle: float = 60, **environment: str) -> subprocess.Popen[bytes]:
        """Start a crew that writes down what it does."""
        options = ["--rate", rate, "--processes", str(processes), "--idle", str(idle)]
        if "--handler" not in arguments:
            options += ["--handler", "tests.support.worker_jobs:note"]
        return self.call("run", *options, *arguments, **environment)

    def finish(self, crew: subprocess.Popen[bytes], jobs: int) -> list[Note]:
        """Let a crew do so many jobs and end; what was done by then."""
        self.until(lambda: len({note.job for note in self.done}) == jobs and not self.pending())
        crew.terminate()
        assert crew.wait(PROCESS_PATIENCE) == 0, self.output
        return self.done

    @property
    def done(self) -> list[Note]:
        return notes(self.file)

    @property
    def begun(self) -> list[Note]:
        return notes(begun(self.file))

    @property
    def output(self) -> str:
        return self._output.read_text()

    def until(self, reached: Callable[[], object]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + PROCESS_PATIENCE
        while not reached():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.03)

    def pending(self) -> set[int]:
        """Jobs that are handed out and not acknowledged."""
        with self.server.client() as untyped:
            client: Any = untyped
            held = client.xpending_range(self.stream, "workers", "-", "+", 1000)
            return {int(client.xrange(self.stream, each["message_id"], each["message_id"])[0][1][b"job"]) for each in held}

    def idle_ms(self) -> dict[tuple[bytes, bytes], int]:
        """For how long nobody has said anything of the jobs that are handed out, by worker and job."""
        with self.server.client() as untyped:
            client: Any = untyped
            held = client.xpending_range(self.stream, "workers", "-", "+", 1000)
            return {(each["consumer"], each["message_id"]): each["time_since_delivered"] for each in held}

    def make_idle(self, ms: int, pids: Container[int], least_ms: int = 0) -> None:
        """Have jobs that these workers hold look as if nobody had said anything of them for so long.

        It is done to those of which nobody has for ``least_ms``.
        """
        with self.server.client() as untyped:
            client: Any = untyped
            for consumer, job in self.idle_ms():
                if int(consumer.rpartition(b"-")[2]) in pids:
                    client.xclaim(self.stream, "workers", consumer, least_ms, [job], idle=ms, justid=True)

    def handed_out(self) -> int:
        """How many jobs were."""
        with self.server.client() as untyped:
            client: Any = untyped
            return client.xinfo_groups(self.stream)[0]["entries-read"]


@contextlib.contextmanager
def opened(server: RedisServer, folder: Path) -> Iterator[Site]:
    site = Site(server, folder)
    yield site
    for process in site.running:
        if process.poll() is None:  # its workers end by themselves then
            process.kill()
            process.wait()


@pytest.fixture
def site(redis_server: RedisServer, tmp_path: Path) -> Iterator[Site]:
    with opened(redis_server, tmp_path) as site:
        yield site


def workers(crew: subprocess.Popen[bytes]) -> set[int]:
    """The worker processes that a crew has at the moment."""
    found = set()
    for pid in Path(f"/proc/{crew.pid}/task/{crew.pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(int(pid))
    return found


def doubled(done: list[Note]) -> list[list[Note]]:
    """Who did the jobs that were done more than once."""
    counts = Counter(note.job for note in done)
    return [[note for note in done if note.job == job] for job, count in counts.items() if count > 1]


def test_a_stream_is_drained_at_the_rate(site: Site) -> None:
    """Every job is done once, evenly spaced over all processes, and the parent says how it went.

    A busy machine makes it slower now and then, but there are times when it is not as slow as processes that take turns.
    """
    crew, fed = site.crew("25/second", 3), 0
    while len({note.pid for note in site.done}) < 3:  # who begins late would find nothing to do
        site.fill(1)
        fed += 1
        site.until(lambda fed=fed: len(site.done) == fed)
    assert site.call("fill", "--jobs", "40").wait(PROCESS_PATIENCE) == 0
    site.until(lambda: sum(int(line.split()[0]) for line in site.output.splitlines()) == fed + 40)
    done = site.finish(crew, 40)[fed:]
    assert sorted(note.job for note in done) == list(range(40))
    assert len({note.pid for note in done}) == 3
    assert max(sum(first.at <= note.at < first.at + 0.5 for note in done) for first in done) <= 13 + 3  # one late each
    assert min(last.at - first.at for first, last in zip(done, done[20:])) < 1.6
    *seconds, last = site.output.splitlines()
    assert last.startswith(f"{fed + 40} done in ")
    assert any(2 < float(line.split()[-3].removesuffix("/s")) < 33 for line in seconds)


def test_workers_that_die_or_freeze_lose_nothing(site: Site) -> None:
    """What they had in hand is done by others after the idle time; only that may be done twice, and who died is replaced."""
    site.fill(200)
    crew = site.crew("100/second", 3, idle=8, JOBS_TAKE="0.02")
    site.until(lambda: len({note.pid for note in site.done}) == 3 and len(site.done) > 40)
    killed, frozen, _ = {note.pid for note in site.done}
    os.kill(killed, signal.SIGKILL)
    os.kill(frozen, signal.SIGSTOP)

    def is_done() -> bool:
        site.make_idle(8_000, (killed, frozen), 500)  # nothing that another has claimed just now
        return len({note.job for note in site.done}) == 200

    site.until(is_done)
    site.until(lambda: len(workers(crew) - {killed}) == 3)  # on a busy machine the fourth begins when all is done
    os.kill(frozen, signal.SIGCONT)
    done = site.finish(crew, 200)
    assert all({note.pid for note in each} & {killed, frozen} for each in doubled(done))
    assert len(doubled(done)) <= 2
    assert f"worker {killed} was killed by SIGKILL, " in site.output


def test_ctrl_c_ends_cleanly(site: Site) -> None:
    """A terminal sends SIGINT to workers, too, but only the parent acts: jobs that are being worked on are finished.

    Nothing is acknowledged that was not done, and the next crew does the rest.
    """
    site.fill(30)
    crew = site.crew("100/second", 2, JOBS_TAKE="0.3")
    site.until(lambda: len({note.pid for note in site.done}) == 2 and len(site.begun) > len(site.done))
    for pid in {note.pid for note in site.done}:
        os.kill(pid, signal.SIGINT)
    crew.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert crew.wait(PROCESS_PATIENCE) == 0, site.output
    assert time.monotonic() - began < PATIENCE / 2
    assert "Traceback" not in site.output
    assert sorted(note.job for note in site.done) == sorted(note.job for note in site.begun)
    assert len(site.done) + len(site.pending()) == site.handed_out() < 30
    assert sorted(note.job for note in site.finish(site.crew("1000/second", 1, idle=0.4), 30)) == list(range(30))


def test_whoever_is_told_to_stop_gives_back_what_it_waits_with(site: Site) -> None:
    """The next crew does not have to wait for the idle time, which is a minute."""
    site.fill(8)
    crew = site.crew("1/minute", 2)
    site.until(lambda: len(site.done) == 1 and len(site.pending()) == 2)
    crew.terminate()
    assert crew.wait(PROCESS_PATIENCE) == 0, site.output
    assert len(site.pending()) == 2
    assert sorted(note.job for note in site.finish(site.crew("1000/second", 1), 8)) == list(range(8))


def test_whoever_holds_a_job_says_so(site: Site) -> None:
    """However long it waits for its turn: jobs in hand that look as if nobody held them are held again and again."""
    site.fill(4)
    site.crew("1/hour", 2, idle=1)
    site.until(lambda: len(site.done) == 1 and len(site.idle_ms()) == 2)
    for _ in range(3):
        site.make_idle(3_000_000, range(sys.maxsize))
        site.until(lambda: max(site.idle_ms().values()) < 3_000_000)
    assert len(site.done) == 1


def test_what_has_failed_is_tried_again(site: Site) -> None:
    """After the idle time, and before the crew thinks that all is done."""
    site.fill(4)
    crew = site.crew("1000/second", 1, "--handler", "tests.support.worker_jobs:fail_first", "--until-empty", idle=0.2)
    assert crew.wait(PROCESS_PATIENCE) == 0, site.output
    assert sorted(note.job for note in site.done) == [0, 1, 2, 3]
    assert site.output.count("ValueError: a job that fails") == 2


def test_a_redis_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    """Everybody waits for it and goes on: every job is done once, the one included that was done just when it went.

    So they do where it is full, and books no turns.
    """
    server = RedisServer(appendonly="yes")
    try:
        with opened(server, tmp_path) as site:
            site.fill(60)
            crew = site.crew("100/second", 2, idle=20, JOBS_TAKE="0.02")  # longer than Redis is away
            site.until(lambda: len(site.done) > 10)
            with server.client() as client:
                client.config_set("maxmemory", "1")  # jobs can be had, turns cannot
                site.until(lambda: "no turn for the job in hand" in site.output)
                client.config_set("maxmemory", "0")
            site.until(lambda: len(site.done) > 30)
            server.kill()
            time.sleep(1)
            server.start()
            assert sorted(note.job for note in site.finish(crew, 60)) == list(range(60))
            assert "Traceback" not in site.output
            assert "no answer from Redis" in site.output
    finally:
        server.stop()


def test_workers_whose_parent_was_killed_end(site: Site) -> None:
    """Nobody goes on unseen."""
    site.fill(1000)
    crew = site.crew("50/second", 2)
    site.until(lambda: len({note.pid for note in site.done}) == 2)
    crew.kill()
    crew.wait()
    counts = [-1]

    def is_over() -> bool:
        time.sleep(0.3)
        counts.append(len(site.done))
        return counts[-1] == counts[-2]

    site.until(is_over)
    assert counts[-1] < 1000
    assert len(site.pending()) <= 2


@pytest.mark.parametrize(
    ("option", "said"),
    [("--rate=3 at once", "can't book turns"), ("--rate=often", "is not a limit"), ("--processes=0", "invalid")],
)
def test_mistakes_are_told_before_any_process_starts(
    option: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever starts the crew is told what is wrong with an option."""
    monkeypatch.setattr(sys, "argv", ["worker", "run", option])
    with pytest.raises(SystemExit):
        program._arguments()
    assert said in capsys.readouterr().err
