"""Clients of every library that LimitGate makes polite, driven alike."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import httpx
import httpx2
import pytest
import requests
import urllib3
from requests.adapters import HTTPAdapter

import limitgate.aiohttp
import limitgate.httpx
import limitgate.httpx2
import limitgate.requests
import limitgate.urllib3
from limitgate import AsyncLimiter, Limiter, RateLimited
from tests.support.doors import PATIENCE


class Reply(NamedTuple):
    """A response of whatever library, with names of fields in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class Interrupted(BaseException):
    """Nobody expects it."""


class Client:
    """A client of one library, all of whose requests take turns. ``inner`` sends them; ``options`` are those of our part."""

    limiter: type[Any] = Limiter
    ours: Callable[..., Any]
    """Our part, whose constructor takes the limits."""
    inner_is: str
    """The option of our part that takes the inner one."""
    keeps_fields = False
    """True if a refusal whose body was lost still has the fields that describe it, since nothing decodes it again."""
    hears: Mapping[str, str] = {}
    """Hostile refusals that the library itself treats in another way, and why."""

    def __init__(self, *limits: Any, inner: Any = None, **options: Any) -> None:
        self.ourselves = type(self).ours(*limits, **{self.inner_is: inner}, **options)

    def request(self, method: str, url: str, **options: Any) -> Reply:
        """Send a request: ``headers``, and one of ``body``, ``json`` and ``form``. Follows redirects."""
        raise NotImplementedError

    def get(self, url: str, **options: Any) -> Reply:
        return self.request("GET", url, **options)

    def refused(self, method: str, url: str, **options: Any) -> RateLimited:
        with pytest.raises(RateLimited) as refused:
            self.request(method, url, **options)
        return refused.value

    def together(self, *urls: str) -> list[Reply]:
        """Send all at once, from as many threads or tasks."""
        replies: list[Reply] = []
        threads = [threading.Thread(target=lambda url: replies.append(self.get(url)), args=[url]) for url in urls]
        for each in threads:
            each.start()
        for each in threads:
            each.join(PATIENCE)
        return replies

    @staticmethod
    def reply(response: Any) -> Reply:
        """A response of the library's."""
        raise NotImplementedError

    @staticmethod
    def host(url: str) -> str:
        """The key that a request of a URL has if nobody says otherwise."""
        raise NotImplementedError

    @staticmethod
    def path(request: Any) -> str:
        """A key of its own for each path."""
        raise NotImplementedError

    @staticmethod
    def narrow() -> Any:
        """An inner part with one connection: one that is not given back is missed."""
        raise NotImplementedError

    @staticmethod
    def stuck() -> Any:
        """An inner part that raises `OSError` when it is closed."""
        raise NotImplementedError

    @staticmethod
    def bodies_read_once() -> list[Any]:
        """Bodies ``x`` that are gone once they are sent."""
        return [io.BytesIO(b"x"), iter([b"x"])]

    def end(self) -> None:
        """Close the client."""
        self.ourselves.close()

    def close_limiter(self, limiter: Any) -> None:
        limiter.close()

    def close(self) -> None:
        """Close the client, and what the test needs beside it."""
        self.end()


class Requests(Client):
    ours, inner_is = limitgate.requests.RateLimitAdapter, "adapter"

    def __init__(self, *limits: Any, **options: Any) -> None:
        super().__init__(*limits, **options)
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.mount("http://", self.ourselves)

    def request(self, method: str, url: str, *, body: Any = None, form: Any = None, **options: Any) -> Reply:
        return self.reply(self.session.request(method, url, data=body or form, timeout=PATIENCE, **options))

    @staticmethod
    def reply(response: requests.Response) -> Reply:
        return Reply(response.status_code, response.content, {name.lower(): it for name, it in response.headers.items()})

    @staticmethod
    def host(url: str) -> str:
        return limitgate.requests.host(requests.Request("GET", url).prepare())

    @staticmethod
    def path(request: requests.PreparedRequest) -> str:
        return request.path_url

    @staticmethod
    def narrow() -> HTTPAdapter:
        return HTTPAdapter(pool_maxsize=1, pool_block=True)

    @staticmethod
    def stuck() -> HTTPAdapter:
        class Stuck(HTTPAdapter):
            def close(self) -> None:
                super().close()
                raise OSError("stuck")

        return Stuck()

    def end(self) -> None:
        self.session.close()


class Urllib3(Client):
    ours, inner_is = limitgate.urllib3.RateLimitPoolManager, "manager"

    def request(self, method: str, url: str, *, form: Any = None, **options: Any) -> Reply:
        options |= {"fields": form} if form else {}
        return self.reply(self.ourselves.request(method, url, timeout=PATIENCE, pool_timeout=PATIENCE, **options))

    @staticmethod
    def reply(response: urllib3.BaseHTTPResponse) -> Reply:
        return Reply(response.status, response.data, {name.lower(): it for name, it in response.headers.items()})

    @staticmethod
    def host(url: str) -> str:
        keys: list[str] = []

        def key(request: limitgate.urllib3.Request) -> str:
            keys.append(limitgate.urllib3.host(request))
            raise Interrupted

        with limitgate.urllib3.RateLimitPoolManager(key=key) as http, pytest.raises(Interrupted):
            http.request("GET", url)
        return keys[0]

    @staticmethod
    def path(request: limitgate.urllib3.Request) -> str:
        return request.url

    @staticmethod
    def narrow() -> urllib3.PoolManager:
        return urllib3.PoolManager(maxsize=1, block=True)

    @staticmethod
    def stuck() -> urllib3.PoolManager:
        class Stuck(urllib3.PoolManager):
            def clear(self) -> None:
                super().clear()
                raise OSError("stuck")

        return Stuck()


class Httpx(Client):
    library: Any = httpx
    ours, inner_is = limitgate.httpx.RateLimitTransport, "transport"

    def __init__(self, *limits: Any, **options: Any) -> None:
        super().__init__(*limits, **options)
        self.client = self.opens(transport=self.ourselves, timeout=PATIENCE, follow_redirects=True)

    @property
    def opens(self) -> Callable[..., Any]:
        return self.library.Client

    def go(self, doing: Any) -> Any:
        return doing

    def request(self, method: str, url: str, *, body: Any = None, form: Any = None, **options: Any) -> Reply:
        return self.reply(self.go(self.client.request(method, url, content=body, data=form, **options)))

    @staticmethod
    def reply(response: Any) -> Reply:
        return Reply(response.status_code, response.content, response.headers)

    @classmethod
    def host(cls, url: str) -> str:
        return limitgate.httpx.host(cls.library.Request("GET", url))

    @staticmethod
    def path(request: Any) -> str:
        return request.url.path

    @classmethod
    def narrow(cls) -> Any:
        return cls.library.HTTPTransport(limits=cls.library.Limits(max_connections=1))

    @classmethod
    def stuck(cls) -> Any:
        class Stuck(cls.library.HTTPTransport):
            def close(self) -> None:
                super().close()
                raise OSError("stuck")

        return Stuck()

    def end(self) -> None:
        self.client.close()


class Httpx2(Httpx):
    library, ours = httpx2, limitgate.httpx2.RateLimitTransport


class Awaiting(Client):
    """A client whose requests are awaited, in an event loop of its own."""

    limiter = AsyncLimiter

    def __init__(self, *limits: Any, **options: Any) -> None:
        self.runner = asyncio.Runner()
        super().__init__(*limits, **options)

    def go(self, doing: Any) -> Any:
        async def finish() -> Any:
            async with asyncio.timeout(PATIENCE):
                return await doing

        return self.runner.run(finish())

    @staticmethod
    def bodies_read_once() -> list[Any]:
        async def parts() -> Any:
            yield b"x"

        return [parts()]

    def close_limiter(self, limiter: AsyncLimiter) -> None:
        self.go(limiter.aclose())

    def close(self) -> None:
        self.end()
        self.runner.close()


class AsyncHttpx(Awaiting, Httpx):
    ours = limitgate.httpx.AsyncRateLimitTransport

    @property
    def opens(self) -> Callable[..., Any]:
        return self.library.AsyncClient

    def together(self, *urls: str) -> list[Reply]:
        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*[self.client.get(url) for url in urls])

        return [self.reply(response) for response in self.go(all_of_them())]

    @classmethod
    def narrow(cls) -> Any:
        return cls.library.AsyncHTTPTransport(limits=cls.library.Limits(max_connections=1))

    @classmethod
    def stuck(cls) -> Any:
        class Stuck(cls.library.AsyncHTTPTransport):
            async def aclose(self) -> None:
                await super().aclose()
                raise OSError("stuck")

        return Stuck()

    def end(self) -> None:
        self.go(self.client.aclose())


class AsyncHttpx2(AsyncHttpx):
    library, ours = httpx2, limitgate.httpx2.AsyncRateLimitTransport


class Aiohttp(Awaiting):
    """``inner`` makes the connector: a middleware has no inner part."""

    ours = limitgate.aiohttp.RateLimitMiddleware
    keeps_fields = True
    hears: Mapping[str, str] = {
        "no chunks": "aiohttp reads the beginning of a body together with the fields, and raises its own error",
        "larger when zipped": "aiohttp counts bytes as decoded",
    }

    def __init__(self, *limits: Any, inner: Callable[[], aiohttp.BaseConnector] | None = None, **options: Any) -> None:
        self.runner = asyncio.Runner()
        self.ourselves = type(self).ours(*limits, **options)
        self.session: aiohttp.ClientSession = self.go(self.opened(inner or aiohttp.TCPConnector))

    async def opened(self, connector: Callable[[], aiohttp.BaseConnector]) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        return aiohttp.ClientSession(connector=connector(), middlewares=[self.ourselves], timeout=timeout)

    def request(self, method: str, url: str, *, body: Any = None, form: Any = None, **options: Any) -> Reply:
        return self.go(self.asked(method, url, data=form if body is None else body, **options))

    async def asked(self, method: str, url: str, **options: Any) -> Reply:
        async with self.session.request(method, url, **options) as response:
            return await self.read(response)

    @staticmethod
    async def read(response: aiohttp.ClientResponse) -> Reply:
        return Reply(response.status, await response.read(), {name.lower(): it for name, it in response.headers.items()})

    @classmethod
    def reply(cls, response: aiohttp.ClientResponse) -> Reply:
        return asyncio.run(cls.read(response))

    def together(self, *urls: str) -> list[Reply]:
        async def all_of_them() -> list[Reply]:
            return await asyncio.gather(*[self.asked("GET", url) for url in urls])

        return self.go(all_of_them())

    @staticmethod
    def host(url: str) -> str:
        keys: list[str] = []

        def key(request: aiohttp.ClientRequest) -> str:
            keys.append(limitgate.aiohttp.host(request))
            raise Interrupted

        async def ask() -> None:
            polite = limitgate.aiohttp.RateLimitMiddleware(key=key)
            async with aiohttp.ClientSession(middlewares=[polite]) as session:
                await session.get(url)

        with pytest.raises(Interrupted):
            asyncio.run(ask())
        return keys[0]

    @staticmethod
    def path(request: aiohttp.ClientRequest) -> str:
        return request.url.path

    @staticmethod
    def narrow() -> Callable[[], aiohttp.BaseConnector]:
        return lambda: aiohttp.TCPConnector(limit=1)

    @staticmethod
    def stuck() -> Callable[[], aiohttp.BaseConnector]:
        class Stuck(aiohttp.TCPConnector):
            async def close(self, **options: Any) -> None:
                await super().close(**options)
                raise OSError("stuck")

        return Stuck

    @staticmethod
    def bodies_read_once() -> list[Any]:
        return [io.BytesIO(b"x"), *Awaiting.bodies_read_once()]

    def end(self) -> None:
        async def closed() -> None:
            async with self.ourselves:
                await self.session.close()

        self.go(closed())


CLIENTS = {
    "requests": Requests,
    "urllib3": Urllib3,
    "httpx": Httpx,
    "httpx async": AsyncHttpx,
    "httpx2": Httpx2,
    "httpx2 async": AsyncHttpx2,
    "aiohttp": Aiohttp,
}
