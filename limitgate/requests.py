"""Throttled adapter for requests: waits for a turn, obeys the service's rate fields, and retries after a 429."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn, Unpack

from limitgate.messages.text import extra

with extra("requests", "requests", "urllib3", "http_sf"):
    import http_sf  # noqa: F401 - raises here if the extra is missing
    from requests import ConnectionError as NoConnection, PreparedRequest, Response, Timeout
    from requests.adapters import BaseAdapter, HTTPAdapter
    from requests.exceptions import RetryError
    from urllib3.response import HTTPResponse

from limitgate.limiter.limiter import Limiter
from limitgate.limiter.plans import Configured
from limitgate.limits.limit import Limit
from limitgate.outbound.bodies import along, host_of, in_memory, kept, target_of
from limitgate.outbound.options import ClientOptions
from limitgate.outbound.response_fields import Answer, Field, answer_of, without_encoding
from limitgate.outbound.throttle import (
    OF_BODIES,
    ClientThrottle,
    Reading,
    SyncTransport,
    Target,
    ThrottledClient,
    by_method,
    is_idempotent,
    run,
)

__all__ = ["RateLimitAdapter", "host", "repeatable"]


def host(request: PreparedRequest) -> str:
    """Return the default key: the host of a request, with a non-default port."""
    return host_of(request.url or "")


@by_method
def repeatable(request: PreparedRequest) -> bool:
    """True for idempotent methods, and for requests with an ``Idempotency-Key``."""
    return is_idempotent(request.method or "", request.headers)


class RateLimitAdapter(ThrottledClient, BaseAdapter):
    """Rate-limited adapter: ``session.mount("https://", RateLimitAdapter("10/second"))``. Thread-safe.

    ``limits``, ``limiter`` (a `Limiter` or a store URL), ``key``, ``repeatable``, ``options`` and errors are as in
    `limitgate.httpx.AsyncRateLimitTransport`. Each followed redirect is a request.

    ``adapter`` is the wrapped adapter. Retries of that adapter don't take turns, and may repeat a 429. To prevent this, use
    ``Retry(3, respect_retry_after_header=False)`` without 429 in its ``status_forcelist``.
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
        """Send a request in its turn. Raises `RateLimited`, `StoreError`, and errors of the wrapped adapter."""
        transport = _Outbound(lambda each: self._adapter.send(each, *args, **kwargs))
        response: Response = run(self._throttle.exchange(transport, request))
        response.connection = self  # type: ignore[assignment] # authentication resends through it
        return response

    def close(self) -> None:
        """Close the wrapped adapter, and the store if this adapter opened it."""
        try:
            self._adapter.close()
        finally:
            if self._throttle.owned:
                self._throttle.owned.close()

    def handle_request(self, *_: object) -> NoReturn:
        """Raise `TypeError`, because this adapter is for requests."""
        raise TypeError(
            "RateLimitAdapter is for requests, expected RateLimitTransport of limitgate.httpx in httpx.Client, "
            "or of limitgate.httpx2 in httpx2.Client"
        )

    __enter__ = handle_request


class _Outbound(SyncTransport):
    def __init__(self, send: Callable[[PreparedRequest], Response]) -> None:
        self._send = send

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

    def field(self, response: Response) -> Field:
        return without_encoding(response.headers.get)

    def target(self, request: PreparedRequest) -> Target:
        return target_of(request.body, request.url or "", request.headers)

    def along(self, response: Response, reading: Reading) -> Response:
        if response._content_consumed:  # type: ignore[attr-defined]  # noqa: SLF001 - as `Response.content`
            reading.feed(response.content)
            run(reading.over())
        elif isinstance(response.raw, HTTPResponse):
            along(response.raw, reading)
        return response

    def is_unanswered(self, error: BaseException) -> bool:
        return isinstance(error, NoConnection | Timeout | RetryError | ConnectionError | TimeoutError)
