"""The pool manager for urllib3, against a service on a port of its own."""

from __future__ import annotations

import contextlib
import gzip
import io
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import requests
import urllib3
from urllib3 import PoolManager, ProxyManager, Retry
from urllib3.exceptions import HTTPError, LocationValueError, MaxRetryError, ProtocolError

import limitgate.outbound.bodies
from limitgate import ConfigError, Limit, Limiter, RateLimited, StoreError
from limitgate.httpx import RateLimitTransport, host as host_of_httpx
from limitgate.requests import RateLimitAdapter
from limitgate.urllib3 import RateLimitPoolManager, Request, host, repeatable
from tests.support.doors import PATIENCE
from tests.support.redis_server import RedisServer
from tests.support.service import HOSTILE, LATER, SOON, URLS, Service, Told, refusal, serving


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


def path_of(request: Request) -> str:
    """A key of its own for each path."""
    return request.url


# --- turns ------------------------------------------------------------------------------------------------------------


def test_turns_are_waited_for(service: Service) -> None:
    """Nobody is refused; requests leave as the limit lets them, and over one connection."""
    with RateLimitPoolManager(Limit("20/second", burst=2)) as http:
        assert [http.request("GET", service.url).data for _ in range(5)] == [b"hello"] * 5
    assert 3 * 0.05 - 0.03 < sum(service.gaps) < 1
    assert service.lines == 1


def test_threads_share_the_turns(service: Service) -> None:
    """Whoever sends, through one manager there is one budget."""
    with RateLimitPoolManager(Limit("50/second", burst=1)) as http:
        threads = [threading.Thread(target=http.request, args=["GET", service.url]) for _ in range(10)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(PATIENCE)
    assert len(service.asked) == 10
    assert 9 * 0.02 - 0.03 < sum(service.gaps) < 1


def test_a_turn_too_far_away_is_refused(service: Service) -> None:
    """Where the wait would be longer than the timeout nothing is sent, and there is no response."""
    with RateLimitPoolManager("1/hour", timeout=0.5) as http:
        http.request("GET", service.url)
        with pytest.raises(RateLimited) as refused:
            http.request("GET", service.url)
    assert refused.value.response is None
    assert 3500 < refused.value.decision.retry_after <= 3600
    assert len(service.asked) == 1


def test_each_redirect_is_a_request(service: Service) -> None:
    """A hop that has no turn left is not made."""
    service.script = lambda asked: Told() if asked.target == "/2" else Told(302, {"Location": f"/{len(service.asked)}"})
    with RateLimitPoolManager("3/hour", timeout=0) as http:
        reply = http.request("GET", f"{service.url}/0")
        assert (reply.data, reply.geturl()) == (b"hello", "/2")
        with pytest.raises(RateLimited):
            http.request("GET", f"{service.url}/2")
    with RateLimitPoolManager("2/hour", timeout=0) as http:
        service.asked.clear()
        with pytest.raises(RateLimited):
            http.request("GET", f"{service.url}/0")
    assert [each.target for each in service.asked] == ["/0", "/1"]


def test_each_hop_counts_where_it_goes(service: Service) -> None:
    """A redirect to another host takes from the budget of that one, and what that one says is heeded for it alone."""
    with serving() as other, RateLimitPoolManager("2/hour", timeout=0) as http:
        service.answers = [Told(302, {"Location": f"{other.url}/there"})]
        other.answers = [Told(200, {"RateLimit": '"default";r=0;t=100'})]
        assert http.request("GET", f"{service.url}/here").data == b"hello"
        with pytest.raises(RateLimited) as refused:
            http.request("GET", other.url)
        assert 99 < refused.value.decision.retry_after <= 100
        http.request("GET", service.url)
        with pytest.raises(RateLimited) as refused:
            http.request("GET", service.url)
        assert refused.value.decision.retry_after > 1000
    assert [each.target for each in service.asked + other.asked] == ["/here", "/", "/there"]


def test_a_key_decides_what_is_counted_together(service: Service) -> None:
    """By any text; what has none is not counted, and left to urllib3."""
    with RateLimitPoolManager("1/hour", timeout=0, key=lambda request: request.headers.get("X-Tenant")) as http:
        for tenant in ("a", "b"):
            http.request("GET", service.url, headers={"X-Tenant": tenant})
            with pytest.raises(RateLimited):
                http.request("GET", service.url, headers={"X-Tenant": tenant})
        service.answers = [LATER, refusal(b"", Retry_After="0")]
        assert http.request("GET", service.url, retries=False).status == 429
        assert http.request("GET", service.url).status == 200


@pytest.mark.parametrize("url", URLS)
def test_a_host_is_the_same_in_httpx(url: str) -> None:
    """One key for one host, however it is written and whoever sends."""
    seen: list[Request] = []

    def key(request: Request) -> str:
        seen.append(request)
        raise KeyboardInterrupt

    with RateLimitPoolManager(key=key) as http, pytest.raises(KeyboardInterrupt):
        http.request("GET", url)
    assert host(seen[0]) == host_of_httpx(httpx.Request("GET", url))
    assert host(seen[0]._replace(url=url)) == host(seen[0])


def test_a_request_is_what_is_about_to_be_sent(service: Service) -> None:
    """Without what is nobody else's business."""
    seen: list[Request] = []
    with RateLimitPoolManager(key=seen.append) as http:
        http.request("POST", service.url.replace("//", "//user:pw@") + "/a%20b?c=d#e", body=b"x", headers={"X": "1"})
        http.request("GET", service.url)
        http.urlopen("GET", service.url, headers=None)
    assert seen[0] == ("POST", f"{service.url}/a%20b?c=d", {"X": "1"}, b"x")
    assert [seen[1].headers, seen[2].headers] == [{}, {}]


@pytest.mark.parametrize("options", [{"timeout": -1}, {"timeout": "1"}, {"on_error": "sometimes"}])
def test_options_that_make_no_sense_are_told_when_it_is_built(options: dict[str, Any]) -> None:
    """What can never work is no matter for the first request."""
    with pytest.raises(ConfigError):
        RateLimitPoolManager("1/second", **options)


# --- what the other side says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [None, 3, 0, False, Retry(1, status_forcelist=[429], backoff_factor=10)])
def test_a_refusal_is_obeyed_and_the_request_repeated(service: Service, retries: Any) -> None:
    """Not before it may be, over the same connection, and whatever the retries would do about it."""
    service.answers = [SOON]
    limiter = Limiter("memory://")
    with RateLimitPoolManager("10/hour", limiter=limiter) as http:
        assert http.request("GET", f"{service.url}/x", retries=retries).data == b"hello"
    assert [each.target for each in service.asked] == ["/x", "/x"]
    assert 0.19 < service.gaps[0] < 0.7
    assert service.lines == 1
    assert limiter.peek(service.host, "10/hour").remaining == 8


def test_refusals_are_not_what_retries_are_for(service: Service) -> None:
    """Those of urllib3 would sleep here for an hour, three times, and nobody else would know."""
    service.answers = [LATER]
    limiter = Limiter("memory://")
    with RateLimitPoolManager(limiter=limiter) as http:
        with pytest.raises(RateLimited):
            http.request("GET", service.url)
        with pytest.raises(RateLimited):
            http.request("POST", service.url)
    assert limiter.banned(service.host).retry_after > 3590
    assert len(service.asked) == 1


@pytest.mark.parametrize(
    ("method", "options", "count"),
    [
        ("POST", {"body": b"x"}, 1),
        ("POST", {"body": b"x", "headers": {"idempotency-KEY": "1"}}, 2),
        ("POST", {"fields": {"x": "y"}, "headers": {"Idempotency-Key": "1"}}, 2),
        ("PUT", {"body": "x"}, 2),
        ("PUT", {"json": {"x": 1}}, 2),
        ("PUT", {"body": io.BytesIO(b"x")}, 1),
        ("PUT", {"body": iter([b"x"])}, 1),
        ("PATCH", {"body": b"x"}, 1),
        ("DELETE", {}, 2),
    ],
)
def test_what_is_repeated(service: Service, method: str, options: dict[str, Any], count: int) -> None:
    """What means the same twice, and whose body is there to be sent again."""
    service.answers = [Told(429, {"Retry-After": "0.02"})]
    with RateLimitPoolManager() as http:
        if count == 1:
            with pytest.raises(RateLimited):
                http.request(method, service.url, **options)
        else:
            assert http.request(method, service.url, **options).status == 200
    assert len(service.asked) == count
    assert len({each.body for each in service.asked}) == 1


def test_who_sends_may_know_better_what_is_repeatable(service: Service) -> None:
    """Either way."""
    assert repeatable(Request("get", service.url, {}, None))
    service.answers = [Told(429, {"Retry-After": "0.02"})]
    with RateLimitPoolManager(repeatable=lambda request: request.body == b"x") as http:
        assert http.request("POST", service.url, body=b"x").status == 200
        service.answers = [LATER]
        with pytest.raises(RateLimited):
            http.request("GET", service.url)


@pytest.mark.parametrize("preload_content", [False, True])
def test_a_refusal_carries_its_decision_and_response(service: Service, preload_content: bool) -> None:  # noqa: FBT001
    """As any response of urllib3, though its connection is free again."""
    fields = {**LATER.headers, "Content-Encoding": "gzip", "X-Own": "1"}
    service.answers = [LATER._replace(body=gzip.compress(LATER.body), headers=fields)]
    with RateLimitPoolManager("100/second") as http, pytest.raises(RateLimited) as refused:
        http.request("GET", f"{service.url}/x", preload_content=preload_content)
    error, response = refused.value, refused.value.response
    assert not error.decision.allowed
    assert error.decision.retry_after == 3600
    assert isinstance(response, urllib3.HTTPResponse)
    assert (response.status, response.reason, response.headers["x-own"]) == (429, "Too Many Requests", "1")
    assert response.geturl() == "/x"
    assert response.json() == {"error": "slow down"}
    assert response.data == LATER.body


def test_a_refusal_can_be_read_as_it_was_asked_for(service: Service) -> None:
    """As a stream, and as it was on the wire."""
    told = LATER._replace(body=gzip.compress(b"slow"), headers={**LATER.headers, "Content-Encoding": "gzip"})
    service.answers = [told, told]
    with RateLimitPoolManager(key=path_of) as http:
        with pytest.raises(RateLimited) as refused:
            http.request("GET", f"{service.url}/x", preload_content=False)
        assert b"".join(refused.value.response.stream(2)) == b"slow"
        with pytest.raises(RateLimited) as refused:
            http.request("GET", f"{service.url}/y", decode_content=False)
        assert gzip.decompress(refused.value.response.data) == b"slow"


def test_an_answer_that_leaves_nothing_holds_the_next_back(service: Service) -> None:
    """Fields of any response are heeded, not only those of refusals."""
    service.answers = [Told(200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "0.3"})]
    with RateLimitPoolManager() as http:
        http.request("GET", service.url)
        http.request("GET", service.url)
    assert 0.29 < service.gaps[0] < 0.8


# --- retries ----------------------------------------------------------------------------------------------------------


class Gone(Exception):  # noqa: N818 - no error of anybody's
    """The service goes away without an answer."""


BROKEN = Told(200, {"Content-Length": "10"}, [b"abc"], "reset")
BUSY = Told(503, {"Retry-After": "0"}, b"busy")
ZIPPED = Told(200, {"Content-Encoding": "gzip"}, gzip.compress(b"hello"))
SCRIPTS: dict[str, list[Any]] = {
    "fine": [],
    "zipped": [ZIPPED],
    "wrongly zipped": [Told(200, {"Content-Encoding": "gzip"}, b"nonsense")],
    "gone once": [Gone()],
    "gone for good": [Gone()] * 20,
    "broken once": [BROKEN],
    "broken for good": [BROKEN] * 20,
    "busy once": [BUSY],
    "busy for good": [BUSY] * 20,
    "failing once": [Told(500)],
    "failing for good": [Told(500)] * 20,
    "all of it": [Gone(), BROKEN, Told(500), BUSY],
    "elsewhere": [Told(302, {"Location": "/else?where"}, b"")],
    "elsewhere with a body": [Told(307, {"Location": "else"}, b"there")],
    "elsewhere by another method": [Told(303, {"Location": "/else"})],
    "in circles": [Told(302, {"Location": "/"})] * 20,
    "elsewhere, and gone": [Gone(), Told(302, {"Location": "/else"}), Gone(), Told(302, {"Location": "/more"}), BROKEN],
}
RETRIES: dict[str, Any] = {
    "usual": None,
    "none": 0,
    "one": 1,
    "off": False,
    "some": Retry(3, redirect=2, status_forcelist=[500]),
    "of every kind": Retry(connect=1, read=1, redirect=1, status=1, status_forcelist=[500, 503], raise_on_status=False),
    "that do not heed": Retry(4, respect_retry_after_header=False),
    "not raised": Retry(1, raise_on_redirect=False, raise_on_status=False),
    "of all methods": Retry(3, allowed_methods=None, status_forcelist=[500]),
}


def playing(service: Service, script: list[Any]) -> None:
    """Let a service answer by a script, in which an error means that it goes away."""
    left = list(script)

    def answer(_: object) -> Told:
        told = left.pop(0) if left else Told()
        if isinstance(told, Exception):
            raise told
        return told

    service.script = answer


def outcome(service: Service, http: PoolManager, options: dict[str, Any]) -> tuple[Any, ...]:
    """What comes of a request, and what the service has seen of it."""
    service.asked.clear()
    headers = {"Authorization": "secret", "Cookie": "a=b", "X-Own": "1"}
    found: tuple[Any, ...]
    try:
        response = http.request(url=f"{service.url}/", headers=headers, **options)
        found = (response.status, response.data, response.read(), response.geturl())
        retries = response.retries
        if retries is not None:
            counts = (retries.total, retries.connect, retries.read, retries.redirect, retries.status, retries.other)
            found += (counts, len(retries.history), retries.status_forcelist, retries.respect_retry_after_header)
    except HTTPError as error:
        found = (type(error), type(getattr(error, "reason", None)))
    return found, [(each.method, each.target, each.body, sorted(each.headers.items())) for each in service.asked]


@pytest.mark.parametrize(("method", "preload_content"), [("GET", True), ("GET", False), ("POST", True)])
@pytest.mark.parametrize("retries", RETRIES.values(), ids=RETRIES)
def test_other_than_refusals_it_is_urllib3(service: Service, retries: Any, method: str, preload_content: bool) -> None:  # noqa: FBT001
    """The same requests, answers, errors and counts of retries, whatever happens."""
    elsewhere = f"{service.url.replace('127.0.0.1', 'localhost')}/"
    for name, script in [*SCRIPTS.items(), ("on another host", [Told(302, {"Location": elsewhere})])]:
        found = []
        for http in (PoolManager(), RateLimitPoolManager(timeout=0)):
            body = io.BytesIO(b"body") if method == "POST" else None
            playing(service, script)
            with http:
                options = {"method": method, "retries": retries, "preload_content": preload_content, "body": body}
                found.append(outcome(service, http, options))
        assert found[0] == found[1], name


@pytest.mark.parametrize("retries", [1, False, Retry(5, status_forcelist=[500], raise_on_status=False)])
def test_retries_of_the_manager_are_used(service: Service, retries: Any) -> None:
    """Where a request has none of its own."""
    for name, script in SCRIPTS.items():
        found = []
        for http in (PoolManager(retries=retries), RateLimitPoolManager(manager=PoolManager(retries=retries))):
            playing(service, script)
            with http:
                found.append(outcome(service, http, {"method": "GET"}))
        assert found[0] == found[1], name


def test_what_is_sent_again_takes_a_turn(service: Service) -> None:
    """After another status, and where a body broke off; not where there was no answer at all."""
    retries = Retry(9, status_forcelist=[500])
    for script, count in [([Told(500), BUSY], 3), ([BROKEN], 2), ([Gone(), Gone()], 1)]:
        limiter = Limiter("memory://")
        playing(service, script)
        with RateLimitPoolManager("10/hour", limiter=limiter, timeout=0) as http:
            assert http.request("GET", service.url, retries=retries).data == b"hello"
        assert limiter.peek(service.host, "10/hour").remaining == 10 - count


@pytest.mark.parametrize("answer", [BROKEN, Told(500)], ids=["broken", "failing"])
def test_retries_wait_as_long_as_they_say(service: Service, answer: Told) -> None:
    """Beside their turns."""
    service.answers = [answer, answer]
    with RateLimitPoolManager("100/second") as http:
        http.request("GET", service.url, retries=Retry(3, status_forcelist=[500], backoff_factor=0.1))
    assert 0.19 < service.gaps[1] < 0.6


def test_retries_keep_no_connections(service: Service) -> None:
    """What is not read by who asked is read before it is sent again, and where there is nothing left of the retries."""
    service.answers = [BUSY] * 5
    with RateLimitPoolManager("100/second", manager=PoolManager(maxsize=1, block=True)) as http:
        with pytest.raises(MaxRetryError):
            http.request("GET", service.url, preload_content=False, pool_timeout=1, retries=Retry(3, status_forcelist=[503]))
        assert http.request("GET", service.url, preload_content=False, pool_timeout=1).data == b"hello"
    assert (len(service.asked), service.lines) == (6, 1)


def test_a_pause_of_another_status_is_everybodys(service: Service) -> None:
    """What asks for it is heeded by others, too, and again by who was told."""
    service.answers = [Told(503, {"Retry-After": "1"})]
    with RateLimitPoolManager() as http:
        waiting = threading.Thread(target=http.request, args=["GET", service.url])
        waiting.start()
        while not http._throttle._paused_for(service.host):
            time.sleep(0.01)
        http.request("GET", service.url, retries=False)
        waiting.join(PATIENCE)
    assert len(service.asked) == 3
    assert 0.9 < service.gaps[0] < 1.5


# --- what is shared ---------------------------------------------------------------------------------------------------


def test_the_budget_is_shared_with_httpx_and_requests(service: Service) -> None:
    """Over one store, by the same key."""
    limiter = Limiter("memory://")
    options: dict[str, Any] = {"limiter": limiter, "timeout": 0}
    with (
        RateLimitPoolManager("3/hour", **options) as ours,
        httpx.Client(transport=RateLimitTransport("3/hour", **options)) as theirs,
        requests.Session() as others,
    ):
        others.mount("http://", RateLimitAdapter("3/hour", **options))
        asking = (lambda: ours.request("GET", service.url), lambda: theirs.get(service.url), lambda: others.get(service.url))
        for ask in asking:
            ask()
        for ask in asking:
            with pytest.raises(RateLimited):
                ask()
    assert len(service.asked) == 3


def test_a_pause_is_shared_through_redis(service: Service, redis_server: RedisServer) -> None:
    """What one was told another does not have to be told."""
    service.answers = [LATER]
    prefix = uuid4().hex
    with (
        Limiter(redis_server.url, key_prefix=prefix) as one,
        RateLimitPoolManager(limiter=one) as http,
        pytest.raises(RateLimited),
    ):
        http.request("GET", service.url)
    with (
        Limiter(redis_server.url, key_prefix=prefix) as other,
        RateLimitPoolManager(limiter=other) as http,
        pytest.raises(RateLimited) as refused,
    ):
        http.request("GET", service.url)
    assert refused.value.response is None
    assert 3590 < refused.value.decision.retry_after <= 3600
    assert len(service.asked) == 1


@pytest.mark.parametrize(
    ("on_error", "expected", "count"), [("local", RateLimited, 1), ("open", (), 2), ("closed", StoreError, 0)]
)
def test_without_redis(service: Service, own_redis: RedisServer, on_error: Any, expected: Any, count: int) -> None:
    """Counted in this process, not at all, or not sent."""
    own_redis.kill()
    with RateLimitPoolManager("1/hour", limiter=own_redis.url, timeout=0, on_error=on_error) as http:
        for _ in range(2):
            with contextlib.suppress(expected):
                http.request("GET", service.url)
    assert len(service.asked) == count


# --- hostile answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_refusal_is_a_refusal(service: Service, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """It takes its time at most, says nothing, and no connection is in the way of those that follow."""
    monkeypatch.setattr(limitgate.outbound.bodies, "LONGEST_READ", 0.1)
    service.answers = [answer()]
    with RateLimitPoolManager("100/second", key=path_of, manager=PoolManager(maxsize=1, block=True)) as http:
        began = time.monotonic()
        with pytest.raises(RateLimited) as refused:
            http.request("GET", f"{service.url}/x", timeout=PATIENCE)
        assert time.monotonic() - began < 0.6
        assert refused.value.decision.retry_after == 3600
        assert (refused.value.response.status, refused.value.response.data) == (429, b"")
        assert {name.lower() for name in refused.value.response.headers} <= {"retry-after", "connection"}
        assert http.request("GET", f"{service.url}/y", pool_timeout=PATIENCE, retries=False).data == b"hello"


def test_the_body_of_a_refusal_has_a_second(service: Service) -> None:
    """As long as it comes at all."""
    service.answers = [HOSTILE["trickling"]()]
    with RateLimitPoolManager() as http:
        began = time.monotonic()
        with pytest.raises(RateLimited):
            http.request("GET", service.url)
        assert 0.9 < time.monotonic() - began < 1.4


@pytest.mark.parametrize(
    "told", [refusal(b""), refusal(b"x" * 65_536), refusal([b"1\r\nx\r\n0\r\n\r\n"], Transfer_Encoding="chunked")]
)
def test_connections_are_used_again_after_a_refusal(service: Service, told: Told) -> None:
    """Whatever frames its body."""
    service.answers = [told._replace(headers=told.headers | {"Retry-After": "0.02"})]
    with RateLimitPoolManager() as http:
        assert http.request("GET", service.url).data == b"hello"
    assert service.lines == 1


# --- what is inside ---------------------------------------------------------------------------------------------------


def test_through_a_proxy_it_counts_where_a_request_is_meant_for(service: Service) -> None:
    """Not where it goes first."""
    service.answers = [Told(302, {"Location": "http://two.example/there"}), Told(), refusal(b"no")]
    with RateLimitPoolManager("1/hour", timeout=0, manager=ProxyManager(service.url)) as http:
        assert http.request("GET", "http://one.example/here").data == b"hello"
        for name in ("one", "two"):
            with pytest.raises(RateLimited) as refused:
                http.request("GET", f"http://{name}.example/")
            assert refused.value.response is None
        with pytest.raises(RateLimited) as refused:
            http.request("GET", "http://three.example/")
        assert refused.value.response.data == b"no"
    assert [each.target for each in service.asked] == [
        "http://one.example/here",
        "http://two.example/there",
        "http://three.example/",
    ]
    assert [each.headers["host"] for each in service.asked] == ["one.example", "two.example", "three.example"]


def test_fields_of_the_manager_are_sent(service: Service) -> None:
    """As it would send them itself."""
    with RateLimitPoolManager(manager=PoolManager(headers={"X-Own": "1"})) as http:
        http.request("GET", service.url)
        http.request("GET", service.url, headers={"X-Other": "1"})
    assert ["x-own" in each.headers for each in service.asked] == [True, False]


def test_what_is_streamed_is_left_to_who_asked(service: Service) -> None:
    """An answer is not read before it is wanted, unless that is how it was asked for; then its connection is free."""
    service.answers = [Told(200, {"Transfer-Encoding": "chunked"}, [b"2\r\nab\r\n", b"2\r\ncd\r\n0\r\n\r\n"])]
    with RateLimitPoolManager("100/second", manager=PoolManager(maxsize=1, block=True)) as http:
        reply = http.request("GET", service.url, preload_content=False)
        assert not reply.closed
        assert b"".join(reply.stream(3)) == b"abcd"
        reply = http.request("GET", service.url, pool_timeout=1)
        assert (reply.connection, reply.data, reply.data) == (None, b"hello", b"hello")
        http.request("GET", service.url, pool_timeout=1, release_conn=False)
        reply = http.request("GET", service.url, pool_timeout=1, preload_content=False, release_conn=True)
        assert reply.connection is not None, "others could have it while it is read"
        assert reply.data == b"hello"
    assert service.lines == 1


@pytest.mark.parametrize(
    ("url", "error"), [("http://", LocationValueError), ("gopher://x/", urllib3.exceptions.URLSchemeUnknown)]
)
def test_what_urllib3_raises_passes(url: str, error: type[Exception]) -> None:
    """For an address that is none, and where nobody is."""
    with RateLimitPoolManager("100/second") as http:
        with pytest.raises(error):
            http.request("GET", url)
        with pytest.raises(MaxRetryError, match="/x"):
            http.request("GET", "http://127.0.0.1:1/x", retries=1)
        with pytest.raises(urllib3.exceptions.NewConnectionError):
            http.request("GET", "http://127.0.0.1:1/x", retries=False)


def test_a_body_that_breaks_off_is_an_error_of_who_reads_it(service: Service) -> None:
    """Where it was to be read later."""
    service.answers = [BROKEN]
    with RateLimitPoolManager("100/second") as http:
        reply = http.request("GET", service.url, preload_content=False)
        with pytest.raises(ProtocolError):
            reply.read()


def test_a_pool_of_the_manager_takes_turns(service: Service) -> None:
    """And does nothing else."""
    with RateLimitPoolManager("1/hour", timeout=0) as http:
        pool = http.connection_from_url(service.url)
        assert pool.urlopen("GET", "/x").data == b"hello"
        with pytest.raises(RateLimited):
            pool.urlopen("GET", "/x")
        assert not hasattr(pool, "request")


def test_an_answer_that_nobody_gets_is_closed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something goes wrong after it has come, its connection is not kept from others."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    service.answers = [LATER]
    limiter = Limiter("memory://")
    with RateLimitPoolManager(limiter=limiter, manager=PoolManager(maxsize=1, block=True)) as http:
        with monkeypatch.context() as patch:
            patch.setattr(limiter, "ban", interrupted)
            with pytest.raises(KeyboardInterrupt):
                http.request("GET", service.url)
        http._throttle._paused.clear()
        assert http.request("GET", service.url, pool_timeout=1).data == b"hello"


def test_what_others_opened_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is theirs."""
    closed: list[Limiter] = []
    monkeypatch.setattr(Limiter, "close", lambda limiter: closed.append(limiter))  # noqa: PLW0108 - a method
    for limiter, count in ((Limiter("memory://"), 0), ("memory://", 1)):
        RateLimitPoolManager("1/hour", limiter=limiter).close()
        assert len(closed) == count


def test_what_is_closed_with_a_manager(own_redis: RedisServer) -> None:
    """The connections of the inner one; the store if it was opened here, even if something goes wrong."""

    class Stuck(PoolManager):
        def clear(self) -> None:
            raise OSError("stuck")

    with serving() as service, own_redis.client() as client:
        alone = client.info("clients")["connected_clients"]
        http = RateLimitPoolManager("5/hour", limiter=own_redis.url, manager=Stuck())
        http.request("GET", service.url)
        assert client.info("clients")["connected_clients"] > alone
        with pytest.raises(OSError, match="stuck"), http:
            pass
        until = time.monotonic() + PATIENCE
        while client.info("clients")["connected_clients"] > alone:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_clearing_closes_connections_and_nothing_else(service: Service) -> None:
    """New ones are made."""
    with RateLimitPoolManager("2/hour", timeout=0) as http:
        http.request("GET", service.url)
        http.clear()
        http.request("GET", service.url)
        with pytest.raises(RateLimited):
            http.request("GET", service.url)
    assert service.lines == 2
