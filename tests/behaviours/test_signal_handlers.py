"""Signal handlers that raise in the midst of a call under threads, as the soft time limits of Celery do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import hiredis
import pytest

import limitgate
from limitgate import Limit, Limiter, StoreError
from limitgate.internal_errors import OwnError, internal_error, logged_errors, raise_interruption
from limitgate.process import background
from limitgate.stores.base import ConfigRequest
from limitgate.stores.redis import wire
from tests.support.redis_server import RedisServer

PATIENT = 20.0


class SoftTimeLimitError(Exception):
    """As Celery raises it."""


KINDS = [SoftTimeLimitError, TimeoutError, OSError, ConnectionResetError, StoreError, ValueError]


# --- what has raised an exception -------------------------------------------------------------------------------------


def _raises(kind: type[Exception]) -> Callable[..., None]:
    def handler(signum: int, frame: FrameType | None) -> None:
        raise kind("time is over")

    return handler


def _raises_deep_inside(*received: Any) -> None:
    def inside() -> None:
        raise SoftTimeLimitError from KeyError("a cause of its own")

    inside()


def _drops_its_arguments(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        frame = frame.f_back
    del number
    raise SoftTimeLimitError


def _is_no_longer_set(*_: object) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise SoftTimeLimitError


class _Handler:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise SoftTimeLimitError


HANDLERS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: _raises(kind) for kind in KINDS},
    "deep inside": _raises_deep_inside,
    "an object": _Handler(),
    "a method": _Handler().__call__,
    "without arguments": _drops_its_arguments,
    "no longer set": _is_no_longer_set,
    "partial": functools.partial(lambda _, __, frame: _raises(TimeoutError)(0, frame), "more"),
}


@contextlib.contextmanager
def _handled(handler: Callable[..., Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _strike() -> None:
    """Be interrupted."""
    os.kill(os.getpid(), signal.SIGUSR1)
    for _ in range(1000):
        os.getpid()


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
def test_what_a_signal_handler_raises_is_survived_by_nobody(handler: Callable[..., Any]) -> None:
    """It goes on to who called, whatever its class, and is no error of LimitGate's own."""
    kinds = tuple(KINDS)
    with _handled(handler), pytest.raises(kinds), logged_errors():
        _strike()
    with _handled(handler), pytest.raises(kinds) as caught:
        _struck_in_own_code(kinds)
    assert not isinstance(caught.value, OwnError)


def _struck_in_own_code(kinds: tuple[type[Exception], ...]) -> None:
    try:
        _strike()
    except kinds as error:
        internal_error(error)


def test_what_a_library_has_made_of_it_is_not_it() -> None:
    """An error that the exception of a signal handler has led to gives way to that."""

    def library() -> None:
        try:
            _strike()
        except OSError:
            raise RuntimeError("no connection") from None

    with _handled(_raises(OSError)), pytest.raises(OSError, match="time is over"), logged_errors():
        library()


def test_what_was_raised_before_a_call_is_nothing_of_the_calls() -> None:
    """Who handles the exception of a signal handler may ask the store: an error of that is its own."""
    with _handled(_raises(OSError)):
        try:
            _strike()
        except OSError:
            with logged_errors():
                int("no number")
            try:
                int("no number")
            except ValueError as error:
                raise_interruption(error)


def test_other_errors_are_survived() -> None:
    """An error in code that a call has called is told as before: a handler of the log, an object of the application's."""

    def handle(record: object, frame: object) -> None:
        raise TimeoutError

    with logged_errors():
        handle("a record", sys._getframe())
    with logged_errors():
        raise OSError


def test_errors_that_lead_to_each_other_are_looked_at_once() -> None:
    """A cause may have been raised again by what it has caused."""
    first, second = ValueError(), RuntimeError()
    first.__cause__, second.__cause__ = second, first
    raise_interruption(first)


def test_a_decorator_of_a_handler_is_no_handler() -> None:
    """What else it decorates may fail as it likes."""

    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*received: Any) -> Any:
            return function(*received)

        return wrapper

    @logged
    def resolve(host: str) -> None:
        raise OSError(host)

    with _handled(logged(lambda *_: None)):
        try:
            resolve("nowhere")
        except OSError as error:
            raise_interruption(error)


def test_event_loops_go_on() -> None:
    """In a callback of an event loop others wait for what comes of it, so whatever strikes there is survived."""

    async def strike() -> None:
        with logged_errors():
            _strike()

    with _handled(_raises(SoftTimeLimitError)):
        asyncio.run(strike())


# --- calls ------------------------------------------------------------------------------------------------------------


def _line(frame: FrameType, ahead: int = 0) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno + ahead).strip()


def _begins(frame: FrameType, line: str, before: str) -> bool:
    """True if a block begins with a line: no signal strikes there, as no call has ended just before.

    Also true if a comprehension goes on. CPython 3.12 traces its steps as lines of the function. An error of a tracer in such a
    step leaves a ``with`` without its end; an error of a signal handler doesn't.
    """
    return line.startswith(("try:", "with ")) or _line(frame, -1) == "finally:" or line == before


class Strikes:
    """Raises an exception of a class as a signal handler would, once, after one of the calls that the package makes.

    A signal strikes when a call has ended. In its place a tracing function raises, with the arguments of a handler.
    """

    folder = str(Path(limitgate.__file__).parent)

    def __init__(self, left: int, kind: type[Exception]) -> None:
        self._left = left
        self._kind = kind
        self._before: dict[FrameType, str] = {}
        self.struck = ""

    def __enter__(self) -> None:
        self._tracer = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._tracer)

    def _called(self, frame: FrameType, _: str, __: object) -> Any:
        is_ours = frame.f_code.co_filename.startswith(self.folder)
        return functools.partial(self._stepped, int(signal.SIGUSR1)) if is_ours else None

    def _stepped(self, number: int, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and not self.struck:
            before, line = self._before.get(frame, ""), _line(frame)
            self._before[frame] = line
            if "(" in before and not before.startswith(("return ", "with ", "class ")) and not _begins(frame, line, before):
                self._left -= 1
                if self._left < 0:
                    self.struck = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    self._before.clear()
                    raise self._kind
        return functools.partial(self._stepped, number)


LIMITS = [Limit("1000/day", lease=5), Limit("500/hour", lease=5)]


def _ask_plainly(limiter: Limiter, key: str) -> Any:
    return limiter.hit(key, "1000/day")


def _ask_for_more(limiter: Limiter, key: str) -> Any:
    return limiter.hit(key, *LIMITS, cost=2)


def _ask_anew(limiter: Limiter, key: str) -> Any:
    limiter._store.close()
    return limiter.hit(key, "1000/day")


ASKING = {"plain": _ask_plainly, "general": _ask_for_more, "without a connection": _ask_anew}


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("asks", ASKING.values(), ids=ASKING)
@pytest.mark.parametrize(
    ("servers", "kind"),
    [
        ("redis_server", SoftTimeLimitError),
        ("redis_server", TimeoutError),
        ("redis_server", ConnectionResetError),
        ("redis_cluster", TimeoutError),
    ],
)
def test_a_call_that_is_struck_anywhere(
    request: pytest.FixtureRequest, servers: str, kind: type[Exception], asks: Callable[[Limiter, str], Any]
) -> None:
    """The exception comes out of the call as it is, Redis is not blamed, and the next call has an answer of its own."""
    url = request.getfixturevalue(servers).url
    step, struck = 0, list[str]()
    with Limiter(url, timeout=PATIENT) as limiter:
        store: Any = limiter._store
        while True:
            asks(limiter, uuid4().hex)
            strikes = Strikes(step, kind)
            raised: BaseException | None = None
            try:
                with strikes:
                    asks(limiter, uuid4().hex)
            except kind as error:
                raised = error
            if not strikes.struck:
                break
            struck.append(strikes.struck)
            assert type(raised) is kind, f"it is swallowed at {strikes.struck}"
            assert store.failures == 0, f"Redis is blamed at {strikes.struck}"
            key = uuid4().hex
            for used in range(1, 4):
                assert limiter.hit(key, "9/day").remaining == 9 - used, f"an answer of another call at {strikes.struck}"
            step += 1 if len(struck) < 40 else 3
    assert len(struck) > 20


def test_a_signal_while_redis_is_silent(own_redis: RedisServer) -> None:
    """The time limit of the application ends a call that waits for Redis, and that is no failure of Redis."""
    with Limiter(own_redis.url, timeout=PATIENT) as limiter, _handled(_raises(TimeoutError)):
        store: Any = limiter._store
        limiter.hit("key", "9/day")
        for _ in range(6):
            with own_redis.frozen():
                main = threading.main_thread().ident or 0
                alarm = threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGUSR1])
                alarm.start()
                with pytest.raises(TimeoutError, match="time is over"):
                    limiter.hit("key", "9/day")
        assert store.failures == 0
        key = uuid4().hex
        assert [limiter.hit(key, "9/day").remaining for _ in range(3)] == [8, 7, 6]


def test_hiredis_gets_text_or_bytes_only(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes text of an integer by a call that runs signal handlers, and crashes if one raises."""
    heard: list[type] = []
    packs = hiredis.pack_command

    def noted(words: Any) -> bytes:
        heard.extend(map(type, words))
        return packs(words)

    monkeypatch.setattr(hiredis, "pack_command", noted)
    monkeypatch.setattr(background, "start", _no_thread)
    with Limiter(f"{redis_server.url}?db=1&protocol=3", timeout=PATIENT) as limiter:
        key = uuid4().hex
        limiter.hit(key, *LIMITS, cost=2)
        limiter.refund(key, *LIMITS)
        limiter.reset(key, *LIMITS)
        limiter.wait(uuid4().hex, "10/second", timeout=1)
        with limiter.slot(uuid4().hex, 9):
            pass
        limiter.ban(key, 5)
    for version in (None, 3):
        heard.extend(map(type, wire.config_arguments(ConfigRequest("key", "{}", version))))
    assert set(heard) <= {str, bytes}
    assert heard


def _no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


STORM = """
    import collections, signal, sys, time, weakref
    from limitgate import Limit, Limiter

    class Soft(TimeoutError): pass

    struck, where = 0, ""

    def handler(signum, frame):
        global struck, where
        struck, where = struck + 1, frame.f_code.co_name
        while frame is not None:
            if frame.f_code.co_name in ("__del__", "_remove") or frame.f_code is weakref.finalize.__call__.__code__:
                where = "a finalizer"
            frame = frame.f_back
        raise Soft

    def until_struck(before):
        while struck == before:
            time.sleep(0.0001)

    outcomes, several = collections.Counter(), [Limit(f"{{1000 + n}}/day") for n in range(6)]
    with Limiter({url!r}, timeout=20) as limiter:
        signal.signal(signal.SIGALRM, handler)
        end, asked = time.monotonic() + {seconds}, 0
        while time.monotonic() < end:
            asked, before = asked + 1, struck
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + asked % 80 * 0.00001)
                try:
                    limiter.hit("plain", "100000/second") if asked % 2 else limiter.hit("several", *several, cost=asked % 3)
                    until_struck(before)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                outcomes[f"went on after {{where}}"] += 1
            except Soft:
                outcomes["raised"] += 1
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        for left in range(8, 4, -1):
            assert limiter.hit("after", "9/day").remaining == left
        assert outcomes["raised"] > 20
        assert set(outcomes) <= {{"raised", "went on after a finalizer"}}, outcomes
"""


@pytest.mark.skipif(sys.version_info[:2] == (3, 14), reason="a handler may raise between a with and its block in CPython 3.14")
def test_a_storm_of_signals(own_redis: RedisServer) -> None:
    """No process crashes, Redis is not blamed, and no exception gets lost but in finalizers, where Python drops it."""
    program = textwrap.dedent(STORM.format(url=own_redis.url, seconds=1.5))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
