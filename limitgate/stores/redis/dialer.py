"""Connects to the servers of a URL by redis-py; resolves host names for asyncio."""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - else imported at the first lookup, when there may be no file descriptor left for it
import errno
import os
import socket
import threading
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import iscoroutinefunction, signature
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any

from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError, RedisError, TimeoutError as RedisTimeoutError
from redis.retry import Retry

from limitgate.errors import ConfigError
from limitgate.internal_errors import logged_errors, raise_interruption
from limitgate.process import background, switch
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.stores.redis.aio.listening import ListeningClock
from limitgate.stores.redis.credentials import Credentials, Login
from limitgate.stores.redis.errors import is_no_room, without_secrets
from limitgate.stores.redis.inspection import Inspection, TLSCheck
from limitgate.stores.redis.python_resp import pack_command
from limitgate.stores.redis.redis_py import KEEPALIVE, is_answer, lead_to, set_login, shared_options
from limitgate.stores.redis.url import (
    Address,
    check_effects,
    check_options,
    check_readable,
    format_address,
    parse_address,
    read_url,
    sentinel_name,
    server_name,
)

CONNECT_TIMEOUT = 1.5
"""Seconds, in the background."""
ASK_TIMEOUT = 0.3
"""Seconds until the next Sentinel or node."""

LOGIN_TIMEOUT = 1.0

_BRIEF = {"socket_timeout": ASK_TIMEOUT, "socket_connect_timeout": ASK_TIMEOUT}
_SLOTS = "CLUSTER", "SLOTS"


_OBJECTS = frozenset(
    {
        "command_packer",
        "credential_provider",
        "driver_info",
        "encoder_class",
        "event_dispatcher",
        "himport_registry",
        "host",
        "kwargs",
        "legacy_responses",
        "maint_notifications_config",
        "maint_notifications_pool_handler",
        "maintenance_notification_hash",
        "maintenance_state",
        "parser",
        "oss_cluster_maint_notifications_handler",
        "parser_class",
        "path",
        "port",
        "redis_connect_func",
        "retry",
        "retry_on_error",
        "self",
        "socket_keepalive_options",
        "socket_type",
        "ssl_context",
        "ssl_ocsp_context",
    }
)
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path")


class NoMasterError(RedisConnectionError): ...


class Dialer:
    """Opens and inspects connections. Raises `ConfigError`.

    ``pool_class`` is a class of redis-py. ``socket_timeout`` is None on asyncio, where a `ListeningClock` measures time.
    """

    def __init__(
        self,
        url: str,
        pool_class: Any,
        inspection: Inspection,
        *,
        socket_timeout: float | None,
        credentials: Credentials | None = None,
    ) -> None:
        self._brief = {} if socket_timeout is None else _BRIEF
        self._where = where = read_url(url)
        check_readable(where.url)
        check_effects(where.url)
        try:
            pool = pool_class.from_url(
                where.url, socket_timeout=socket_timeout, socket_connect_timeout=socket_timeout, retry=Retry(NoBackoff(), 0)
            )
            known = _options_of(pool.connection_class)
            check_options(where.url, known)
            _check_files(pool.connection_kwargs)
            made = pool.connection_class(**pool.connection_kwargs)
        except ConfigError:
            raise
        except (AttributeError, ValueError, TypeError, RedisError) as error:
            said = str(error).rstrip(".")
            raise ConfigError(f"store: {said}, expected a URL and options that redis-py understands") from error
        if credentials is not None and (pool.connection_kwargs.get("username") or pool.connection_kwargs.get("password")):
            raise ConfigError("store: a login in the URL and credentials=, expected only one of them")
        if where.nodes and pool.connection_kwargs.get("db"):
            raise ConfigError("store: a Redis Cluster has only database 0, expected no other")
        self._class = pool.connection_class
        keepalive = {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE} if "socket_keepalive" in known else {}
        self._options = {**keepalive, **shared_options(pool.connection_kwargs, made)}
        if not iscoroutinefunction(self._class.connect):
            self._options["command_packer"] = _Packer()
        self._credentials = credentials
        self._sentinels = where.sentinels
        self._resolver = Resolver()
        self._inspection = inspection
        has_certificate = "ssl_certfile" in pool.connection_kwargs
        self._tls = TLSCheck(inspection, uses_tls=where.url.startswith("rediss"), has_certificate=has_certificate)
        SPARE.fill()

    @property
    def nodes(self) -> Sequence[Address]:
        return self._where.nodes

    def dial(self, address: Address | None = None, *, within: float | None = None) -> Any:
        """Connect, also to the cluster node at ``address``. Each step takes ``within`` seconds."""
        _check_not_frozen()
        options = {} if within is None else {"socket_timeout": within, "socket_connect_timeout": within}
        try:
            connection = self._dial(address, options)
        except Exception as error:
            if not (is_no_room(error) and SPARE.release()):
                self._failed(server_name(address), error)
                raise
            connection = self._dial(address, options)
        SPARE.fill()
        return connection

    def _dial(self, address: Address | None, options: Mapping[str, float]) -> Any:
        server = server_name(address)
        if address is None and self._sentinels:
            address = self._master(options)
        login = self._login(options.get("socket_timeout", LOGIN_TIMEOUT))
        began = monotonic()
        connection = self._reached(server, self._connection(address, login, **options))
        try:
            said = _said(connection, self._inspection.question)
        except Exception as error:
            self._tls.look_again(server, connection, error)
            raise
        self._inspection.heard(server, said, began)
        return connection

    async def adial(self, clock: ListeningClock, address: Address | None = None) -> Any:
        """`dial` on asyncio. ``clock`` is that of the event loop."""
        _check_not_frozen()
        try:
            connection = await self._adial(clock, address)
        except Exception as error:
            if not (is_no_room(error) and SPARE.release()):
                self._failed(server_name(address), error)
                raise
            connection = await self._adial(clock, address)
        SPARE.fill()
        return connection

    async def _adial(self, clock: ListeningClock, address: Address | None) -> Any:
        server = server_name(address)
        if address is None and self._sentinels:
            address = await self._amaster(clock)
        login = await self._alogin()
        began = monotonic()
        connection = await self._areached(server, partial(self._connection, address, login))
        try:
            said = await _asaid(connection, self._inspection.question)
        except Exception as error:
            self._tls.look_again(server, connection, error)
            raise
        self._inspection.heard(server, said, began)
        return connection

    def slots(self, node: Address) -> Any:
        _check_not_frozen()
        try:
            connection = self._connection(node, self._login(LOGIN_TIMEOUT), **self._brief)
            return _asked(self._reached(server_name(node), connection), _SLOTS)
        except Exception as error:
            self._failed(server_name(node), error)
            raise

    async def aslots(self, clock: ListeningClock, node: Address) -> Any:
        _check_not_frozen()
        try:
            login = await self._alogin()
            async with clock.within(ASK_TIMEOUT):
                return await _aasked(self._areached(server_name(node), partial(self._connection, node, login)), _SLOTS)
        except Exception as error:
            self._failed(server_name(node), error)
            raise

    def _reached(self, server: str, connection: Any) -> Any:
        try:
            return _connected(connection)
        except Exception as error:
            self._tls.look(server, connection, error)
            raise

    async def _areached(self, server: str, connection: Callable[[], Any]) -> Any:
        made = connection()
        try:
            return await self._areached_at_any(made, connection)
        except CancelledError:  # usually a timeout
            self._tls.look(server, made, TimeoutError())
            raise
        except Exception as error:
            self._tls.look(server, made, error)
            raise

    async def _areached_at_any(self, made: Any, connection: Callable[[], Any]) -> Any:
        host = getattr(made, "host", None)
        if host is None:
            return await _aconnected(made)
        failure: Exception | None = None
        for address in await self._resolver.addresses(host):
            made = connection()
            lead_to(made, host, address)
            try:
                return await _aconnected(made)
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                self._resolver.pass_over(host, address)
                failure = error
            except CancelledError:  # usually a timeout
                self._resolver.pass_over(host, address)
                raise
        raise failure or OSError(f"{host} has no address")

    def _connection(self, address: Address | None, login: Login | None = None, **options: Any) -> Any:
        where = {} if address is None else {"host": address[0], "port": address[1]}
        made = self._class(**{**self._options, **where, **options})
        if login is not None:
            set_login(made, login)
        return made

    def _login(self, within: float) -> Login | None:
        return None if self._credentials is None else self._credentials.login(min(within, LOGIN_TIMEOUT))

    async def _alogin(self) -> Login | None:
        return None if self._credentials is None else await self._credentials.alogin(LOGIN_TIMEOUT)

    def _master(self, options: Mapping[str, float] = MappingProxyType({})) -> Address:
        brief = {name: seconds / len(self._sentinels) for name, seconds in options.items()}
        failures = []
        for sentinel in self._sentinels:
            try:
                reached = self._reached(sentinel_name(sentinel), self._sentinel(sentinel, **brief))
                return self._named_by(sentinel, _asked(reached, self._question))
            except Exception as error:
                raise_interruption(error)
                if is_no_room(error):  # not the Sentinel's fault
                    raise
                self._passed_over(sentinel, error)
                failures.append(error)
        raise self._nobody_knows(failures)

    async def _amaster(self, clock: ListeningClock) -> Address:
        failures = []
        for sentinel in self._sentinels:
            try:
                async with clock.within(ASK_TIMEOUT):
                    reached = self._areached(sentinel_name(sentinel), partial(self._sentinel, sentinel))
                    reply = await _aasked(reached, self._question)
                return self._named_by(sentinel, reply)
            except Exception as error:
                if is_no_room(error):  # not the Sentinel's fault
                    raise
                self._passed_over(sentinel, error)
                failures.append(error)
        raise self._nobody_knows(failures)

    def _sentinel(self, address: Address, **options: float) -> Any:
        user, password = self._where.login
        options = {**self._brief, **options}
        return self._connection(address, None, username=user, password=password, credential_provider=None, db=0, **options)

    @property
    def _question(self) -> Sequence[str]:
        return "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._where.master

    def _named_by(self, sentinel: Address, reply: Any) -> Address:
        """Return the master in a Sentinel's reply. This Sentinel is asked first from now on."""
        try:
            master = parse_address(*reply)
        except (TypeError, ValueError) as error:
            raise RedisConnectionError(f"the Sentinel at {format_address(sentinel)} knows no master of that name") from error
        self._sentinels = (sentinel, *[other for other in self._sentinels if other != sentinel])
        return master

    def _passed_over(self, sentinel: Address, error: Exception) -> None:
        self._failed(sentinel_name(sentinel), error)
        self._sentinels = (*[other for other in self._sentinels if other != sentinel], sentinel)

    def _failed(self, server: str, error: Exception) -> None:
        if not isinstance(error, NoMasterError):
            with logged_errors():
                self._inspection.failed(server, error)

    @staticmethod
    def _nobody_knows(failures: Sequence[Exception]) -> NoMasterError:
        return NoMasterError(f"no Sentinel knows where the master is: {'; '.join(map(str, failures))}")


def _check_not_frozen() -> None:
    if switch.stand_in is not None:
        raise RedisConnectionError("Redis is not used while limitgate.testing.frozen() is open")


class _Packer:
    """Packs commands without hiredis, see `wire.arguments`."""

    @staticmethod
    def pack(*words: Any) -> list[bytes]:
        return [pack_command(word if isinstance(word, bytes) else str(word) for word in words)]


def _options_of(connection_class: type) -> frozenset[str]:
    makers = [vars(kind)["__init__"] for kind in connection_class.__mro__[:-1] if "__init__" in vars(kind)]
    named = {name for maker in makers for name in signature(maker).parameters}
    return frozenset(name for name in named - _OBJECTS if not name.startswith("orig_"))


def _check_files(options: Mapping[str, Any]) -> None:
    for name in _FILES:
        if options.get(name) and not os.path.exists(options[name]):  # noqa: PTH110 - user text, may be a folder
            raise ConfigError(f"store: option {name} names a missing file, expected a readable one")


def _connected(connection: Any) -> Any:
    try:
        connection.connect()
    except BaseException as error:
        connection.disconnect()
        if not isinstance(error, Exception):
            raise
        raise_interruption(error)
        failure = without_secrets(error, connection.username, connection.password)
    else:
        return connection
    # Outside the handler, to avoid the original error as context.
    raise failure


async def _aconnected(connection: Any) -> Any:
    try:
        await connection.connect()
    except BaseException as error:
        await connection.disconnect(nowait=True)
        if not isinstance(error, Exception):
            raise
        failure = without_secrets(error, connection.username, connection.password)
    else:
        return connection
    raise failure


def _asked(connection: Any, command: Sequence[str]) -> Any:
    try:
        connection.send_command(*command)
        return connection.read_response()
    finally:
        connection.disconnect()


async def _aasked(reached: Awaitable[Any], command: Sequence[str]) -> Any:
    connection = await reached
    try:
        await connection.send_command(*command)
        return await connection.read_response()
    finally:
        await connection.disconnect(nowait=True)


def _said(connection: Any, command: Sequence[Any]) -> object:
    try:
        connection.send_command(*command, check_health=False)
        return connection.read_response(disable_decoding=True, disconnect_on_error=False)
    except BaseException as error:
        if is_answer(error):
            raise_interruption(error)
            return error
        connection.disconnect()
        raise


async def _asaid(connection: Any, command: Sequence[Any]) -> object:
    try:
        await connection.send_command(*command, check_health=False)
        return await connection.read_response(disable_decoding=True, disconnect_on_error=False)
    except BaseException as error:
        if is_answer(error):
            return error
        await connection.disconnect(nowait=True)
        raise


class Spare:
    """A reserved file descriptor, for times when none is free. Thread-safe."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        """list.pop() is atomic."""

    def fill(self) -> None:
        if not self._descriptors:
            with suppress(OSError):
                self._descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> bool:
        """Free the descriptor. Return False if there is none."""
        try:
            os.close(self._descriptors.pop())
        except IndexError:
            return False
        return True


SPARE = Spare()


Addresses = Sequence[str]


class Resolver:
    """Resolves names for all event loops. After a failed lookup, the last result is used. A failed address is tried last.

    Each name has its own daemon thread, because a slow name server would block the threads of the default executor.
    """

    def __init__(self) -> None:
        self._known: dict[str, Addresses] = {}
        self._passed_over: dict[str, Addresses] = {}
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[asyncio.Future[Addresses]]] = {}

    async def addresses(self, host: str) -> Addresses:
        """Return at least one address, in order. Raises `OSError`."""
        try:
            ip_address(host)
        except ValueError:
            found, last = await self._look_up(host), self._passed_over.get(host, ())
            return tuple(sorted(found, key=lambda address: last.index(address) if address in last else -1))
        return (host,)

    def pass_over(self, host: str, address: str) -> None:
        if host in self._known:
            others = [each for each in self._passed_over.get(host, ()) if each in self._known[host] and each != address]
            self._passed_over[host] = [*others, address]

    async def _look_up(self, host: str) -> Addresses:
        answer: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        with self._lock:
            if host in self._waiting:
                self._waiting[host].append(answer)
            else:
                try:
                    background.start("resolver", self._run, host)
                except RuntimeError as error:  # no thread can be started now
                    return self._instead(host, OSError(errno.ENOMEM, f"no thread can be started to resolve a host: {error}"))
                self._waiting[host] = [answer]
        return await answer

    def _run(self, host: str) -> None:
        result: Addresses | Exception
        try:
            result = _resolve(host)
        except Exception as error:  # noqa: BLE001 - UnicodeError for an invalid host name
            result = error
        with self._lock:
            waiting = self._waiting.pop(host, [])
            if not isinstance(result, Exception):
                self._known[host] = result
        for answer in waiting:
            with suppress(RuntimeError):  # the event loop has ended
                answer.get_loop().call_soon_threadsafe(self._tell, answer, host, result)

    def _tell(self, answer: asyncio.Future[Addresses], host: str, result: Addresses | Exception) -> None:
        if answer.done():
            return
        try:
            answer.set_result(self._instead(host, result) if isinstance(result, Exception) else result)
        except Exception as error:  # noqa: BLE001 - reported to the connection attempt
            answer.set_exception(error)

    def _instead(self, host: str, error: Exception) -> Addresses:
        if host not in self._known:
            raise error
        return self._known[host]


def _resolve(host: str) -> Addresses:
    try:
        listed = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        # Raises if file descriptors are exhausted: the name server is not at fault.
        os.close(os.open(os.devnull, os.O_RDONLY))
        raise
    return tuple(dict.fromkeys(str(address[0]) for *_, address in listed))
