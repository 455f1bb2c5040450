"""Logins from a ``credentials`` callable, in a separate thread or task.

If the callable hangs or fails, only a connection attempt fails. The next attempt uses a late answer. No error, log line or
repr contains a login.
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
from limitgate.internal_errors import place_in
from limitgate.process import background
from limitgate.process.callables import accepts, is_async
from limitgate.process.clock import begin, monotonic, wait_within
from limitgate.process.forking import reset_in_children
from limitgate.stores.redis.errors import CredentialsError, is_no_room

Given = tuple[str | None, str] | tuple[str | None, str, float]
"""User (None: default), password, validity in seconds."""
GivesLogin = Callable[[], Given]
AsyncGivesLogin = Callable[[], Given | Awaitable[Given]]

LONGEST = 10.0
"""Seconds after which another call may begin while one hangs."""
MOST_HANGING = 4
_RENEWED_AFTER = 0.75
"""A login is renewed after this share of its validity."""
_LOGIN = "(user, password) or (user, password, seconds it is valid)"
_SHORTEST_RETRY, _LONGEST_RETRY = 0.05, 10.0
_FOR_EVER = 1e9


class Login(NamedTuple):
    user: str | None
    password: str
    renew_at: float
    """Monotonic seconds; infinite without expiry."""
    expires_at: float

    @property
    def retry_every(self) -> float:
        return min(max((self.expires_at - self.renew_at) / 4, _SHORTEST_RETRY), _LONGEST_RETRY)

    def __repr__(self) -> str:
        return "Login()"


class _Answer(NamedTuple):
    given: object
    at: float

    def __repr__(self) -> str:
        """Hides the login from asyncio's debug log."""
        return "_Answer()"


class Credentials:
    """Calls a ``credentials`` callable. Raises `ConfigError` if it is unsuitable."""

    def __init__(self, give: AsyncGivesLogin, *, may_await: bool) -> None:
        if not callable(give):
            raise ConfigError(f"credentials: an object of {type(give).__qualname__}, expected a callable that returns {_LOGIN}")
        if not accepts(give, 0):
            raise ConfigError(
                f"credentials: a callable with required arguments, expected one without arguments that returns {_LOGIN}"
            )
        if is_async(give) and not may_await:
            raise ConfigError("credentials: an async callable, expected a plain one, or an AsyncRedisStore")
        self._give = give
        self._in_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[_Answer]] = WeakKeyDictionary()
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._lock = Lock()
        self._calls: list[tuple[float, Future[_Answer]]] = []

    def login(self, within: float) -> Login:
        """Return a login. Raises `CredentialsError` after ``within`` seconds, and `OSError` if no thread can be started."""
        call = self._call()
        try:
            call.result(within)
        except FutureTimeoutError:
            return _told(_late(within))
        self._use(call)
        return _told(self._read(call))

    async def alogin(self, within: float) -> Login:
        loop = asyncio.get_running_loop()
        task = self._in_loops.get(loop)
        if task is None or task.done():
            task = self._in_loops[loop] = begin(self._answer())
        await wait_within(task, within)
        if not task.done():
            return _told(_late(within))
        self._in_loops.pop(loop, None)
        return _told(self._read(task))

    async def _answer(self) -> _Answer:
        given: object
        try:
            async with asyncio.timeout(LONGEST):
                if is_async(self._give):
                    given = await self._give()  # type: ignore[misc]
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
            given = self._failed(error)
        except Exception as error:  # noqa: BLE001 - any error is the callable's
            given = error if is_no_room(error) else self._failed(error)
        return _Answer(given, monotonic())

    def _call(self) -> Future[_Answer]:
        """Call the callable, unless a call is running or its late answer is unused."""
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
                raise OSError(errno.ENOMEM, "no thread can be started to get credentials") from error
            self._calls.append((now, call))
            return call

    def _run(self, call: Future[_Answer]) -> None:
        given: object
        try:
            given = self._give()
        except BaseException as error:  # noqa: BLE001 - the waiting threads need an answer
            given = self._failed(error)
        call.set_result(_Answer(given, monotonic()))

    def _failed(self, error: BaseException) -> CredentialsError:
        """Return an error without the original text, which may contain a token."""
        return CredentialsError(f"credentials raised {type(error).__name__} at {place_in(self._give, error)}")

    def _use(self, call: Future[_Answer]) -> None:
        with self._lock:
            self._calls = [each for each in self._calls if each[1] is not call]

    def _read(self, call: Future[_Answer] | asyncio.Task[_Answer]) -> Login | CredentialsError | OSError:
        given, at = call.result()
        if isinstance(given, CredentialsError | OSError):
            return type(given)(*given.args)
        if isawaitable(given):
            # An unclosed coroutine causes a warning.
            getattr(given, "close", bool)()
        try:
            user, password, seconds = _parts(given)
        except CredentialsError as error:
            # Its frames hold the login.
            return error.with_traceback(None)
        if at + seconds <= monotonic():
            return CredentialsError("credentials returned an expired login, expected a validity above 0 seconds")
        return Login(user, password, at + _RENEWED_AFTER * seconds, at + seconds)


def _told(found: Login | CredentialsError | OSError) -> Login:
    """Return the login or raise the error. Tracebacks don't show the login."""
    if isinstance(found, Exception):
        raise found
    return found


def _late(within: float) -> CredentialsError:
    return CredentialsError(f"credentials returned nothing within {within:g} s, expected {_LOGIN}")


def _parts(given: object) -> tuple[str | None, str, float]:
    if not (isinstance(given, tuple | list) and len(given) in (2, 3)):
        kind = f"{len(given)} values" if isinstance(given, tuple | list) else f"an object of {type(given).__qualname__}"
        raise CredentialsError(f"credentials returned {kind}, expected {_LOGIN}")
    user, password, seconds = (*given, math.inf)[:3]
    if not (user is None or isinstance(user, str)):
        raise CredentialsError(
            f"credentials returned a user of {type(user).__qualname__}, expected text, or None for the default user"
        )
    if not isinstance(password, str) or not password:
        kind = "an empty password" if password == "" else f"a password of {type(password).__qualname__}"
        raise CredentialsError(f"credentials returned {kind}, expected text")
    if seconds is None or isinstance(seconds, bool) or not isinstance(seconds, int | float) or math.isnan(seconds):
        kind = type(seconds).__qualname__
        raise CredentialsError(f"credentials returned a validity of {kind}, expected seconds")
    return user or None, password, math.inf if seconds > _FOR_EVER else float(seconds)
