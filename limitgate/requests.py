"""Polite clients of requests: an adapter that waits its turn, obeys the service's rate fields, and comes back after a 429."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from limitgate.extras import extra

with extra("requests", "requests", "urllib3", "http_sf"):
    import http_sf  # noqa: F401 - told here, by the name of this extra
    from requests import PreparedRequest, Response
    from requests.adapters import BaseAdapter, HTTPAdapter
    from urllib3.response import HTTPResponse

from limitgate import waiting
from limitgate.limiter.limiter import Limiter
from limitgate.limiter.stored_limits import Configured
from limitgate.limits.limit import Limit
from limitgate.observing.observer import Observer
from limitgate.outbound.bodies import host_of, in_memory, kept
from limitgate.outbound.response_fields import Answer, answer_of
from limitgate.outbound.throttle import LONGEST_PAUSE, OF_BODIES, ClientThrottle, is_idempotent, limiter_of, run
from limitgate.rules.options import OnError

__all__ = ["RateLimitAdapter", "host", "repeatable"]


def host(request: PreparedRequest) -> str:
    """Default key: the host of a request, with its port if it is not that of the scheme."""
    return host_of(request.url or "")


def repeatable(request: PreparedRequest) -> bool:
    """True if a request may be sent twice: by its method, or since it has an ``Idempotency-Key``."""
    return is_idempotent(request.method or "", request.headers)


class RateLimitAdapter(BaseAdapter):
    """Requests wait their turn: ``session.mount("https://", RateLimitAdapter("10/second"))``. Safe under threads.

    ``limits`` are counted for each ``key``, which a callable gives of a request, by default its host. They are counted by
    the ``limiter``, a `Limiter` or the URL of a store, which is opened here and closed with the adapter; ``memory://`` if
    not given. All who share the store share the budget. A request whose key is None passes untouched. Without limits only
    the service's ``Retry-After``, ``RateLimit`` and ``X-RateLimit`` fields are obeyed, for all requests of the key. Each
    redirect that is followed is a request.

    A request that is refused with 429 is sent again if ``repeatable`` is true of it, by default for methods that may be
    repeated, and its body is in memory. Raises `RateLimited` if not, or if it would have to wait for more than ``timeout``
    seconds in all, by default 120 (None: as long as it takes). While the store fails, ``on_error`` counts in this process
    (``local``, the default), sends at once (``open``), or raises `StoreError` (``closed``). No response pauses a key for
    more than ``longest_pause`` seconds, by default 3600. With ``strict``, False by default, never more than the count of a
    limit is sent in any period, whatever the service counts by. Raises `ConfigError` for limits that book no turns, and
    with ``strict`` for those that cannot hold so. ``observers`` are those of a limiter that is made here, none by default.

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
        timeout: float | None = 120.0,
        on_error: OnError = "local",
        repeatable: Callable[[PreparedRequest], bool] = repeatable,
        longest_pause: float = LONGEST_PAUSE,
        strict: bool = False,
        observers: Iterable[str | Observer] = (),
    ) -> None:
        super().__init__()
        counting = limiter_of(limiter, Limiter, observers)
        self._owned = counting if isinstance(limiter, str) else None
        self._throttle = ClientThrottle(
            limits,
            counting,
            key=key,
            timeout=timeout,
            on_error=on_error,
            repeatable=repeatable,
            longest_pause=longest_pause,
            strict=strict,
        )
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
            if self._owned:
                self._owned.close()


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
