"""docs/platforms.md: what it says of each platform, played."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
from mangum import Mangum
from mangum.adapter import DEFAULT_TEXT_MIME_TYPES
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import LimitGate, RedisStore, Rule, open_store
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.request import ASGIRequest
from limitgate.rules.settings import GateSettings
from tests.support.markdown import rows
from tests.support.redis_server import RedisServer

PLATFORMS = [[cell.strip("`") for cell in row] for row in rows("docs/platforms.md", "platform")]
SERVICES = rows("docs/platforms.md", "service")
FORGED = "198.51.100.99"


@pytest.mark.parametrize("row", PLATFORMS, ids=[row[0][:40] for row in PLATFORMS])
def test_the_client_behind_a_platform(monkeypatch: pytest.MonkeyPatch, row: list[str]) -> None:
    """By the options of the page, given as variables; whatever the client sends itself changes nothing."""
    trusted, header, peer, value, client = row[1:]
    monkeypatch.setenv("LIMITGATE_TRUSTED_PROXIES", trusted)
    monkeypatch.setenv("LIMITGATE_FORWARDED_HEADER", header)
    settings = GateSettings(rules=[])
    proxies = TrustedProxies(settings.trusted_proxies, settings.forwarded_header)

    def found(*lines: tuple[str, str], peer: str = peer) -> str | None:
        raw = [(name.encode(), text.encode()) for name, text in lines]
        return proxies.client(ASGIRequest({"type": "http", "path": "/", "headers": raw, "client": (peer, 4711)}))

    assert found((header, value)) == client
    if header == "x-forwarded-for":
        assert found((header, f"{FORGED}, {value}")) == client
        assert found((header, FORGED), (header, value)) == client
    else:
        assert found(("x-forwarded-for", FORGED), (header, value)) == client
    assert found((header, FORGED), peer="192.0.2.77") == "192.0.2.77"


@pytest.mark.parametrize("url", [url for row in SERVICES for url in re.findall(r"`(rediss?://[^`]+)`", row[1])])
def test_the_urls_of_services_are_understood(url: str) -> None:
    """Up to what has to be filled in; passwords are escaped as the page says."""
    password = quote("a/b+c=d@e:f", safe="")
    filled = url.replace("PORT", "6379").replace("PASSWORD", password).replace("TOKEN", password).replace("KEY", password)
    filled = filled.replace("?ssl_ca_certs=/etc/server-ca.pem", "")
    for each in (filled, filled.replace("?ssl", "?ssl_check_hostname=false&ssl")):
        assert RedisStore(each).scheme == filled.partition(":")[0]
        assert open_store(each)
    if "rediss" in url and "?" not in url:
        assert RedisStore(filled.replace("rediss://", "rediss+cluster://")).scheme == "rediss+cluster"


# --- Lambda -----------------------------------------------------------------------------------------------------------


def rest_api(client: str, forged: str = "") -> dict[str, Any]:
    """API Gateway, REST API (payload 1.0)."""
    forwarded = ", ".join(filter(None, [forged, client, "130.176.1.1"]))
    return {
        "resource": "/{proxy+}",
        "path": "/hello",
        "httpMethod": "GET",
        "headers": {"Host": "example.com", "X-Forwarded-For": forwarded},
        "multiValueHeaders": {"Host": ["example.com"], "X-Forwarded-For": [forwarded]},
        "queryStringParameters": None,
        "multiValueQueryStringParameters": None,
        "requestContext": {"httpMethod": "GET", "identity": {"sourceIp": client}, "resourcePath": "/{proxy+}"},
        "body": None,
        "isBase64Encoded": False,
    }


def http_api(client: str, forged: str = "") -> dict[str, Any]:
    """API Gateway, HTTP API (payload 2.0), and function URLs."""
    return {
        "version": "2.0",
        "rawPath": "/hello",
        "rawQueryString": "",
        "headers": {"host": "example.com", "x-forwarded-for": ", ".join(filter(None, [forged, client]))},
        "requestContext": {"http": {"method": "GET", "path": "/hello", "sourceIp": client}},
        "isBase64Encoded": False,
    }


def load_balancer(client: str, forged: str = "") -> dict[str, Any]:
    """Application Load Balancer."""
    return {
        "requestContext": {"elb": {"targetGroupArn": "arn:aws:elasticloadbalancing:eu-west-1:1:targetgroup/a/1"}},
        "httpMethod": "GET",
        "path": "/hello",
        "queryStringParameters": {},
        "headers": {"host": "example.com", "x-forwarded-for": ", ".join(filter(None, [forged, client]))},
        "body": "",
        "isBase64Encoded": False,
    }


class BehindLoadBalancer:
    """That of the page."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app({**scope, "client": None}, receive, send)


Event = Callable[..., dict[str, Any]]
EVENTS = pytest.mark.parametrize("event", [rest_api, http_api, load_balancer])


@pytest.fixture
def new_loop() -> Iterator[Callable[[], None]]:
    """Sets a new event loop, as some runtimes do for each invocation; the one before is closed."""
    runners = [asyncio.Runner()]

    def renew() -> None:
        runners.pop().close()
        runners.append(asyncio.Runner())
        asyncio.set_event_loop(runners[-1].get_loop())

    yield renew
    runners.pop().close()
    asyncio.set_event_loop(None)


def made(event: Event, store: str, prefix: str = "limitgate") -> Mangum:
    async def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route("/hello", hello)])
    trusted = ["unix"] if event is load_balancer else []
    rules = [Rule("all", "2/minute", key=["ip"])]
    app.add_middleware(LimitGate, rules=rules, store=store, trusted_proxies=trusted, key_prefix=prefix)
    if event is load_balancer:
        app.add_middleware(BehindLoadBalancer)
    return Mangum(app, lifespan="off", text_mime_types=[*DEFAULT_TEXT_MIME_TYPES, "application/problem+json"])


@EVENTS
@pytest.mark.parametrize("renews", [False, True], ids=["one loop", "a loop for each"])
def test_requests_of_lambda_are_limited(
    event: Event, new_loop: Callable[[], None], redis_server: RedisServer, *, renews: bool
) -> None:
    """Each client by itself, through all kinds of events and in any number of event loops, over two instances."""
    new_loop()
    prefix = uuid4().hex
    instances = [made(event, redis_server.url, prefix) for _ in range(2)]

    def status(at: int, client: str, forged: str = "") -> int:
        if renews:
            new_loop()
        status: int = instances[at](event(client, forged), None)["statusCode"]
        return status

    assert [status(at, "203.0.113.7") for at in (0, 1, 0, 1)] == [200, 200, 429, 429]
    assert status(0, "203.0.113.7", FORGED) == 429
    assert [status(at, "203.0.113.8", f"198.51.100.{at}") for at in (0, 1, 0)] == [200, 200, 429]


@EVENTS
def test_a_refusal_reaches_the_client(event: Event, new_loop: Callable[[], None]) -> None:
    """With its fields and its body, as text."""
    new_loop()
    handler = made(event, "memory://")
    replies = [handler(event("203.0.113.7"), None) for _ in range(3)]
    assert replies[0]["headers"]["x-ratelimit-remaining"] == "1"
    assert (replies[2]["statusCode"], replies[2]["headers"]["retry-after"]) == (429, "30")
    assert "quota-exceeded" in replies[2]["body"]
    assert replies[2]["isBase64Encoded"] is False


@EVENTS
def test_without_redis_on_error_decides(event: Event, new_loop: Callable[[], None]) -> None:
    """An instance that cannot reach Redis goes on serving."""
    new_loop()
    assert [made(event, "redis://127.0.0.1:1")(event("203.0.113.7"), None)["statusCode"] for _ in range(2)] == [200] * 2
