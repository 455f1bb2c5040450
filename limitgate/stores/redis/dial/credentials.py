"""Logins that a callable gives: asked for each new connection, in a thread or a task of its own.

A callable may hang, raise, or give nonsense. None of that reaches a request: the attempt to connect fails, and the next one
asks again. An answer that comes too late for one attempt serves the next. Nothing of a login is in an error, a log line or a
repr.
"""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from inspect import isawaitable
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

from limitgate.errors import ConfigError
from limitgate.internal_errors import place_of
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.rules.options import accepts, is_async
from limitgate.stores.redis import background
from limitgate.stores.redis.aio.loop_end import begin
from limitgate.stores.redis.errors import CredentialsError, is_no_room

Given = tuple[str | None, str] | tuple[str | None, str, float]
"""User, None for the default one, password, and the seconds for which they are valid, if not for ever."""
GivesLogin = Callable[[], Given]
AsyncGivesLogin = Callable[[], Given | Awaitable[Given]]

LONGEST = 10.0
"""Seconds after which a call that has given nothing is given up, and another may begin."""
MOST_HANGING = 4
"""Threads in which a callable may hang; after that nothing is asked until one of them ends."""
_RENEWED_AFTER = 0.75
"""Share of its time for which a login is used."""
_LOGIN = "(user, password) or (user, password, seconds it is valid)"
_SHORTEST_RETRY, _LONGEST_RETRY = 0.05, 10.0
_FOR_EVER = 1e9
"""Seconds after which no process runs any more."""


class Login(NamedTuple):
    """User and password for a new connection."""

    user: str | None
    password: str
    renew_at: float
    """Time at which the connection is to be replaced, by `time.monotonic`; infinite for one that is valid for ever."""
    expires_at: float

    @property
    def retry_every(self) -> float:
        """Seconds between two attempts to replace the connection."""
        return min(max((self.expires_at - self.renew_at) / 4, _SHORTEST_RETRY), _LONGEST_RETRY)

    def __repr__(self) -> str:
        return "Login()"


class _Answer(NamedTuple):
    """What a callable gave, and when."""

    given: object
    at: float

    def __repr__(self) -> str:
        """Nothing of it: asyncio's debug mode logs the results of tasks."""
        return "_Answer()"


class Credentials:
    """Asks a callable for logins; one that is async needs an event loop. Raises `ConfigError` for what is no such callable."""

    def __init__(self, give: AsyncGivesLogin, *, may_await: bool) -> None:
        if not callable(give):
            raise ConfigError(f"credentials: an object of {type(give).__qualname__}, expected a callable that gives {_LOGIN}")
        if not accepts(give, 0):
            raise ConfigError(f"credentials: a callable that needs arguments, expected one without that gives {_LOGIN}")
        if is_async(give) and not may_await:
            raise ConfigError("credentials: an async callable, expected a plain one, or an AsyncRedisStore")
        self._give = give
        self._may_await = may_await
        self._in_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[_Answer]] = WeakKeyDictionary()
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """In the child of a fork: no thread is left there that would answer, or release a lock."""
        self._lock = Lock()
        self._calls: list[tuple[float, Future[_Answer]]] = []
        """Calls in threads whose answers are not used yet, and when each began."""

    def login(self, within: float) -> Login:
        """Ask, and wait for so many seconds. Raises `CredentialsError`, `OSError` if no thread can be started."""
        call = self._call()
        try:
            call.result(within)
        except FutureTimeoutError:
            return _told(_late(within))
        self._use(call)
        return _told(self._read(call))

    async def alogin(self, within: float) -> Login:
        """`login`, for asyncio."""
        loop = asyncio.get_running_loop()
        task = self._in_loops.get(loop)
        if task is None or task.done():
            task = self._in_loops[loop] = begin(self._answer())
        await asyncio.wait([task], timeout=within)
        if not task.done():
            return _told(_late(within))
        self._in_loops.pop(loop, None)
        return _told(self._read(task))

    async def _answer(self) -> _Answer:
        """Call on the running event loop what is async, and anything else in a thread."""
        given: object
        try:
            async with asyncio.timeout(LONGEST):
                if is_async(self._give):
                    given = await self._give()  # type: ignore[misc]  # it is awaitable
                else:
                    call = self._call()
                    given = (await asyncio.shield(asyncio.wrap_future(call))).given
                    self._use(call)
                    if isawaitable(given):
                        given = await given
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            given = _failed(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the callable's
            given = error if is_no_room(error) else _failed(error)
        return _Answer(given, monotonic())

    def _call(self) -> Future[_Answer]:
        """Call in a thread of its own, unless a call is under way, or was answered too late for those who waited for it."""
        with self._lock:
            now = monotonic()
            self._calls = [call for call in self._calls if not call[1].done() or now - call[1].result().at < LONGEST]
            if self._calls:
                began, latest = self._calls[-1]
                if latest.done():
                    self._calls.pop()
                    return latest
                if now - began < LONGEST or len(self._calls) >= MOST_HANGING:
                    return latest
            call: Future[_Answer] = Future()
            try:
                background.start("credentials", self._run, call)
            except RuntimeError as error:  # no thread can be started now
                raise OSError(errno.ENOMEM, "no thread to ask for credentials in") from error
            self._calls.append((now, call))
            return call

    def _run(self, call: Future[_Answer]) -> None:
        given: object
        try:
            given = self._give()
        except BaseException as error:  # noqa: BLE001 - a thread that ended without an answer would be waited for
            given = _failed(error)
        call.set_result(_Answer(given, monotonic()))

    def _use(self, call: Future[_Answer]) -> None:
        """The answer to a call serves no other connection."""
        with self._lock:
            self._calls = [each for each in self._calls if each[1] is not call]

    def _read(self, call: Future[_Answer] | asyncio.Task[_Answer]) -> Login | CredentialsError | OSError:
        """The login that a call gave, or why it gave none."""
        given, at = call.result()
        if isinstance(given, CredentialsError | OSError):
            return type(given)(*given.args)
        if isawaitable(given):
            getattr(given, "close", bool)()  # unclosed, a coroutine would warn
        try:
            user, password, seconds = _parts(given)
        except CredentialsError as error:
            return error.with_traceback(None)  # variables in its frames hold the login
        if at + seconds <= monotonic():
            return CredentialsError("credentials gave a login that has expired, expected seconds above 0")
        return Login(user, password, at + _RENEWED_AFTER * seconds, at + seconds)


def _told(found: Login | CredentialsError | OSError) -> Login:
    """A login. Raises what there is instead, in a frame without anything of it."""
    if isinstance(found, Exception):
        raise found
    return found


def _late(within: float) -> CredentialsError:
    return CredentialsError(f"credentials gave nothing within {within:g} s, expected {_LOGIN}")


def _parts(given: object) -> tuple[str | None, str, float]:
    """User, password and seconds. Raises `CredentialsError` that repeats nothing of what was given."""
    if not (isinstance(given, tuple | list) and len(given) in (2, 3)):
        kind = f"{len(given)} values" if isinstance(given, tuple | list) else f"an object of {type(given).__qualname__}"
        raise CredentialsError(f"credentials gave {kind}, expected {_LOGIN}")
    user, password, seconds = (*given, math.inf)[:3]
    if not (user is None or isinstance(user, str)):
        raise CredentialsError(
            f"credentials gave a user of {type(user).__qualname__}, expected text, or None for the default user"
        )
    if not isinstance(password, str) or not password:
        kind = "an empty password" if password == "" else f"a password of {type(password).__qualname__}"
        raise CredentialsError(f"credentials gave {kind}, expected text")
    if seconds is None or isinstance(seconds, bool) or not isinstance(seconds, int | float) or math.isnan(seconds):
        kind = type(seconds).__qualname__
        raise CredentialsError(f"credentials gave a time of {kind}, expected the seconds for which the login is valid")
    return user or None, password, math.inf if seconds > _FOR_EVER else float(seconds)


def _failed(error: BaseException) -> CredentialsError:
    """The failure of a callable: never its text, which may hold a token."""
    return CredentialsError(f"credentials raised {type(error).__name__} at {place_of(error)}")
