"""Throttled pool manager for urllib3: waits for a turn, obeys the service's rate fields, and retries after a 429."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple, Unpack, cast

from limitgate.messages.text import extra

with extra("urllib3", "urllib3", "http_sf"):
    import http_sf  # noqa: F401 - raises here if the extra is missing
    from urllib3 import BaseHTTPResponse, HTTPConnectionPool, HTTPResponse, PoolManager, Retry
    from urllib3.exceptions import (
        MaxRetryError,
        NewConnectionError,
        ProtocolError,
        ProxyError,
        SSLError,
        TimeoutError as TooLate,
    )
    from urllib3.util import Url
    from urllib3.util.request import set_file_position

from limitgate.limiter.limiter import Limiter
from limitgate.limiter.plans import Configured
from limitgate.limits.limit import Limit
from limitgate.outbound.bodies import along, host_of, in_memory, kept, target_of
from limitgate.outbound.options import ClientOptions
from limitgate.outbound.response_fields import Answer, Field, answer_of, without_encoding
from limitgate.outbound.throttle import (
    ClientThrottle,
    Reading,
    SyncTransport,
    Target,
    ThrottledClient,
    by_method,
    is_idempotent,
    run,
)

__all__ = ["RateLimitPoolManager", "Request", "host", "repeatable"]

_UNANSWERED = (NewConnectionError, ProtocolError, ProxyError, SSLError, TooLate)
"""Errors of a connection that failed or ended early. `MaxRetryError` may wrap them."""


class Request(NamedTuple):
    """A request to send, with an absolute URL. Each followed redirect is a request."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: Any


def host(request: Request) -> str:
    """Return the default key: the host of a request, with a non-default port."""
    return host_of(request.url)


@by_method
def repeatable(request: Request) -> bool:
    """True for idempotent methods, and for requests with an ``Idempotency-Key``."""
    return is_idempotent(request.method, request.headers)


class RateLimitPoolManager(ThrottledClient, PoolManager):
    """Rate-limited pool manager: ``RateLimitPoolManager("10/second").request("GET", url)``. Thread-safe.

    ``limits``, ``limiter`` (a `Limiter` or a store URL), ``key``, ``repeatable``, ``options`` and errors are as in
    `limitgate.httpx.AsyncRateLimitTransport`. Each followed redirect is a request.

    ``manager`` is the wrapped `PoolManager`. A retry after another status or a broken body takes a new turn. A retry of a
    failed connection takes a turn only with ``adaptive`` or ``throttle``.
    """

    def __init__(
        self,
        *limits: Limit | str | Configured,
        limiter: Limiter | str = "memory://",
        manager: PoolManager | None = None,
        key: Callable[[Request], str | None] = host,
        repeatable: Callable[[Request], bool] = repeatable,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._throttle = ClientThrottle(limits, limiter, Limiter, key=key, repeatable=repeatable, **options)
        self._manager = PoolManager() if manager is None else manager
        super().__init__(headers=self._manager.headers)

    def connection_from_host(
        self, host: str | None, port: int | None = None, scheme: str | None = "http", pool_kwargs: dict[str, Any] | None = None
    ) -> HTTPConnectionPool:
        """Return the pool for one request of `urlopen`. It has only the methods that `urlopen` needs."""
        pool = self._manager.connection_from_host(host, port, scheme, pool_kwargs)
        origin = Url(scheme or "http", host=host, port=port).url
        return cast("HTTPConnectionPool", _Hop(self._manager, self._throttle, pool, origin))

    def clear(self) -> None:
        """Close all connections; new ones are opened as needed."""
        self._manager.clear()

    def close(self) -> None:
        """Close all connections, and the store if this manager opened it."""
        try:
            self.clear()
        finally:
            if self._throttle.owned:
                self._throttle.owned.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.close()
        return False


class _Hop:
    """Stands in for a host's pool, so that requests and redirects take turns."""

    def __init__(
        self, manager: PoolManager, throttle: ClientThrottle[Request, Limiter], pool: HTTPConnectionPool, origin: str
    ) -> None:
        self._manager = manager
        self._throttle = throttle
        self._pool = pool
        self._origin = origin
        self.is_same_host = pool.is_same_host

    def urlopen(
        self,
        method: str,
        target: str,
        *,
        body: Any = None,
        body_pos: Any = None,
        headers: Mapping[str, str] | None = None,
        retries: Retry | bool | int | None = None,
        preload_content: bool = True,
        **options: Any,
    ) -> BaseHTTPResponse:
        """Send a request and its retries, each in its turn. Raises errors of urllib3, and `RateLimited`.

        urllib3 doesn't retry, because it would read a refusal's body in full.
        """
        for name in ("assert_same_host", "redirect", "release_conn"):
            options.pop(name, None)
        options |= {"body": body, "body_pos": set_file_position(body, body_pos), "headers": headers}
        request = Request(method, self._origin + target, headers or {}, body)
        left = Retry.from_int(retries, redirect=False, default=self._manager.connection_pool_kw.get("retries"))
        while True:
            try:
                outbound = _Outbound(self._manager, left, options, retries_connections=not self._throttle.counts_attempts)
                response: BaseHTTPResponse = run(self._throttle.exchange(outbound, request))
                left = response.retries or left
                if preload_content:
                    _ = response.data
            except _UNANSWERED as error:
                left = left.increment(method, target, error=error, _pool=self._pool, _stacktrace=error.__traceback__)
                left.sleep()
                continue
            if not left.is_retry(method, response.status, bool(response.headers.get("Retry-After"))):
                return response
            try:
                left = left.increment(method, target, response=response, _pool=self._pool)
            except MaxRetryError:
                if left.raise_on_status:
                    response.drain_conn()
                    raise
                return response
            response.drain_conn()
            left.sleep(response)


class _Outbound(SyncTransport):
    """A request with fixed options and remaining ``retries``.

    Without ``retries_connections``, raises connection errors at once.
    """

    def __init__(self, manager: PoolManager, retries: Retry, options: dict[str, Any], *, retries_connections: bool) -> None:
        self._manager = manager
        self._retries = retries
        self._options = options
        self._retries_connections = retries_connections

    def send(self, request: Request) -> tuple[BaseHTTPResponse, Answer]:
        ours = self._retries
        theirs = ours.new(respect_retry_after_header=False, status_forcelist=())
        response = self._manager.urlopen(
            request.method,
            request.url,
            redirect=False,
            retries=theirs if self._retries_connections else theirs.new(total=False),
            preload_content=False,
            **self._options,
        )
        left = (response.retries if self._retries_connections else None) or theirs
        response.retries = left.new(
            respect_retry_after_header=ours.respect_retry_after_header, status_forcelist=ours.status_forcelist
        )
        return response, answer_of(response.status, response.headers.get, time.time())

    def discard(self, response: BaseHTTPResponse) -> BaseHTTPResponse:
        return kept(response) if isinstance(response, HTTPResponse) else response

    def close(self, response: BaseHTTPResponse) -> None:
        response.close()
        response.release_conn()

    def repeatable(self, request: Request) -> bool:
        return in_memory(request.body)

    def field(self, response: BaseHTTPResponse) -> Field:
        return without_encoding(response.headers.get)

    def target(self, request: Request) -> Target:
        return target_of(request.body, request.url, request.headers)

    def along(self, response: BaseHTTPResponse, reading: Reading) -> BaseHTTPResponse:
        return along(response, reading) if isinstance(response, HTTPResponse) else response

    def is_unanswered(self, error: BaseException) -> bool:
        return isinstance(error, _UNANSWERED) or (isinstance(error, MaxRetryError) and isinstance(error.reason, _UNANSWERED))
