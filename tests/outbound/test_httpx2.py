"""httpx and httpx2 side by side: what belongs to one of them and gets into the other says so, with the cure."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import httpx2
import pytest

import limitgate.httpx
import limitgate.httpx2
from limitgate import ConfigError

Making = Callable[..., Any]
OURS = {"httpx": limitgate.httpx, "httpx2": limitgate.httpx2}
PAIRS = [(httpx, httpx2), (httpx2, httpx)]
URL = "http://localhost/"


def get(client: Any) -> Any:
    """Send a request by a client of whatever kind."""

    async def ask() -> Any:
        return await client.get(URL)

    return asyncio.run(ask()) if type(client).__name__ == "AsyncClient" else client.get(URL)


@pytest.mark.parametrize("kind", ["RateLimitTransport", "AsyncRateLimitTransport"])
@pytest.mark.parametrize("client", ["Client", "AsyncClient"])
@pytest.mark.parametrize(("library", "other"), PAIRS)
def test_a_transport_in_a_client_of_the_other_library(library: Any, other: Any, kind: str, client: str) -> None:
    """The first request says which module has the transport for this very client; no turn is taken for it."""
    ours, theirs = library.__name__, other.__name__
    transport = getattr(OURS[ours], kind)("1/hour", timeout=0)
    cure = f"expected {client.replace('Client', 'RateLimitTransport')} of limitgate.{theirs} in {theirs}.{client}"
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{kind} of limitgate.{ours} is for {ours}") as mixed:
            get(getattr(other, client)(transport=transport))
        assert str(mixed.value).endswith(cure)


def inner_of(library: Any, other: Any) -> dict[str, tuple[str, Making, str]]:
    """Inner transports that cannot send requests of a library, by what they are: for which of ours, how made, and the cure."""
    sync, awaits = "RateLimitTransport", "AsyncRateLimitTransport"
    ours, theirs = library.__name__, OURS[other.__name__]
    return {
        "sync": (sync, other.HTTPTransport, f"expected one of {ours} such as {ours}.HTTPTransport()"),
        "async": (awaits, other.AsyncHTTPTransport, f"expected one of {ours} such as {ours}.AsyncHTTPTransport()"),
        "mock": (sync, lambda: other.MockTransport(print), f"or limitgate.{other.__name__} for clients of {other.__name__}"),
        "of ours": (sync, theirs.RateLimitTransport, f"expected one of {ours}"),
        "of ours, async": (awaits, theirs.AsyncRateLimitTransport, f"expected one of {ours}"),
        "of the other kind": (sync, library.AsyncHTTPTransport, f"expected {ours}.BaseTransport, such as {ours}.HTTPTransport"),
        "sync in async": (awaits, library.HTTPTransport, f"expected {ours}.AsyncBaseTransport"),
        "a class": (sync, lambda: library.HTTPTransport, f"such as {ours}.HTTPTransport()"),
        "a client": (sync, library.Client, f"expected {ours}.BaseTransport"),
        "a client of the other": (sync, other.Client, f"expected one of {ours}"),
    }


def test_names_of_modules_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing openai names itself as the module of httpx2's classes."""
    for library, other in PAIRS:
        for kind in (other.BaseTransport, other.AsyncBaseTransport, other.HTTPTransport, other.Request):
            monkeypatch.setattr(kind, "__module__", "openai")
        for what in ("sync", "async", "of ours"):
            test_an_inner_transport_of_the_other_library(library, other, what)
        test_a_transport_in_a_client_of_the_other_library(library, other, "RateLimitTransport", "Client")


@pytest.mark.parametrize("what", inner_of(httpx, httpx2))
@pytest.mark.parametrize(("library", "other"), PAIRS)
def test_an_inner_transport_of_the_other_library(library: Any, other: Any, what: str) -> None:
    """It can never work, so it is told when the transport is made."""
    kind, inner, cure = inner_of(library, other)[what]
    with pytest.raises(ConfigError) as mixed:
        getattr(OURS[library.__name__], kind)(transport=inner())
    assert cure in str(mixed.value)


class Answering:
    """An inner transport of no library, which answers with a response of one."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def handle_request(self, request: Any) -> Any:
        return self.library.Response(200)

    async def handle_async_request(self, request: Any) -> Any:
        return self.library.Response(200)

    async def aclose(self) -> None:
        """Close nothing."""


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
@pytest.mark.parametrize(("library", "other"), PAIRS)
def test_an_inner_transport_of_no_library(library: Any, other: Any, kind: str) -> None:
    """What behaves as one is one, unless it answers with a response of the other library."""
    for answers in (library, other):
        ours = getattr(OURS[library.__name__], kind.replace("Client", "RateLimitTransport"))
        client = getattr(library, kind)(transport=ours("1/hour", timeout=0, transport=Answering(answers)))
        if answers is library:
            assert get(client).status_code == 200
        else:
            with pytest.raises(ConfigError, match=f"a response of {other.__name__}, expected one of {library.__name__}"):
                get(client)


ALIASED = """
import httpx2
httpx2.alias_httpx()
import httpx
import limitgate.httpx
transport = limitgate.httpx.RateLimitTransport("1/hour", transport=httpx2.MockTransport(lambda _: httpx2.Response(200)))
print(httpx2.Client(transport=transport).get("http://localhost/").status_code)
"""


@pytest.mark.skipif(not hasattr(httpx2, "alias_httpx"), reason="this httpx2 has no alias_httpx")
def test_httpx_may_be_another_name_of_httpx2() -> None:
    """Then there is nothing to mix."""
    ran = subprocess.run([sys.executable, "-c", ALIASED], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["200"]


WITHOUT_HTTPX = """
import sys
sys.modules["httpx"] = sys.modules["aiohttp"] = None
import limitgate.httpx2
"""


def test_httpx2_needs_no_httpx() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_HTTPX], check=True)
