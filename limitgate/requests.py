"""Polite clients of requests: an adapter that waits its turn, obeys the service's rate fields, and comes back after a 429."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn, Unpack

from limitgate.messages.extras import extra

with extra("requests", "requests", "urllib3", "http_sf"):
    import http_sf  # noqa: F401 - told here, by the name of this extra
    from requests import ConnectionError as NoConnection, PreparedRequest, Response, Timeout
    from requests.adapters import BaseAdapter, HTTPAdapter
    from requests.exceptions import RetryError
    from urllib3.response import HTTPResponse

from limitgate.limiter.limiter import Limiter
from limitgate.limiter.stored_limits import Configured
from limitgate.limits.limit import Limit
from limitgate.outbound.bodies import host_of, in_memory, kept
from limitgate.outbound.options import ClientOptions
from limitgate.outbound.response_fields import Answer, answer_of
from limitgate.outbound.throttle import OF_BODIES, ClientThrottle, ThrottledClient, is_idempotent, run
from limitgate.process import waiting

__all__ = ["RateLimitAdapter", "host", "repeatable"]


def host(request: PreparedRequest) -> str:
    """Default key: the host of a request, with its port if it is not that of the scheme."""
    return host_of(request.url or "")


def repeatable(request: PreparedRequest) -> bool:
    """True if a request may be sent twice: by its method, or since it has an ``Idempotency-Key``."""
    return is_idempotent(request.method or "", request.headers)


class RateLimitAdapter(ThrottledClient, BaseAdapter):
    """Requests wait their turn: ``session.mount("https://", RateLimitAdapter("10/second"))``. Safe under threads.

    ``limits`` are counted for each ``key``, which a callable gives of a request, by default its host. They are counted by
    the ``limiter``, a `Limiter` or the URL of a store, which is opened here and closed with the adapter; ``memory://`` if
    not given. All who share the store share the budget. A request whose key is None passes untouched. Without limits only
    the service's ``Retry-After``, ``RateLimit`` and ``X-RateLimit`` fields are obeyed, for all requests of the key. Each
    redirect that is followed is a request.

    A request that is refused with 429 is sent again if ``repeatable`` is true of it, by default for methods that may be
    repeated, and its body is in memory. Raises `RateLimited` if not, if it would have to wait for too long, and for what an
    overloaded host is spared. ``options`` are `ClientOptions`: ``timeout``, ``on_error``, ``longest_pause``, ``strict``,
    ``adaptive``, ``throttle`` and ``observers``. Raises `ConfigError` for limits that book no turns, and with ``strict`` for
    those that cannot hold so, `TypeError` for an unknown option.

    ``adapter`` sends. Retries of its own are not seen here; and retries that respect ``Retry-After``, as those of
    ``HTTPAdapter(max_retries=3)`` do, come back after a 429 by themselves, of which no other process learns.
    ``Retry(3, respect_retry_after_header=False)`` without 429 in its ``status_forcelist`` leaves that to this adapter.
    """

    def __init__(
        self,
        *limits: Limit | str | Configured,
        limiter: Limiter | str = "memory://",
        adapter: BaseAdapter | None = None,
        key: Callable[[PreparedRequest], str | None] = host,
        repeatable: Callable[[PreparedRequest], bool] = repeatable,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__()
        self._throttle = ClientThrottle(limits, limiter, Limiter, key=key, repeatable=repeatable, **options)
        self._adapter = HTTPAdapter() if adapter is None else adapter

    def send(self, request: PreparedRequest, *args: Any, **kwargs: Any) -> Response:
        """Send a request in its turn. Raises `RateLimited`, `StoreError`, and whatever the inner adapter raises."""
        transport = _Outbound(lambda each: self._adapter.send(each, *args, **kwargs))
        response: Response = run(self._throttle.exchange(transport, request))
        response.connection = self  # type: ignore[assignment] # authentication sends once more through it
        return response

    def close(self) -> None:
        """Close the inner adapter, and the store if it was opened here."""
        try:
            self._adapter.close()
        finally:
            if self._throttle.owned:
                self._throttle.owned.close()

    def handle_request(self, *_: object) -> NoReturn:
        """Say that this adapter is for requests. Raises `TypeError`."""
        raise TypeError(
            "RateLimitAdapter is for requests, expected RateLimitTransport of limitgate.httpx in httpx.Client, "
            "or of limitgate.httpx2 in httpx2.Client"
        )

    __enter__ = handle_request


class _Outbound:
    """The `Transport` of a request that is sent in one way."""

    def __init__(self, send: Callable[[PreparedRequest], Response]) -> None:
        self._send = send

    def sleep(self, seconds: float) -> None:
        waiting.sleep(seconds)

    def send(self, request: PreparedRequest) -> tuple[Response, Answer]:
        response = self._send(request)
        return response, answer_of(response.status_code, response.headers.get, time.time())

    def discard(self, response: Response) -> Response:
        if isinstance(response.raw, HTTPResponse):
            response.raw = kept(response.raw)
            for name in OF_BODIES:
                if name not in response.raw.headers:
                    response.headers.pop(name, None)
        return response

    def close(self, response: Response) -> None:
        response.close()

    def repeatable(self, request: PreparedRequest) -> bool:
        return in_memory(request.body)

    def is_unanswered(self, error: BaseException) -> bool:
        return isinstance(error, NoConnection | Timeout | RetryError | ConnectionError | TimeoutError)
