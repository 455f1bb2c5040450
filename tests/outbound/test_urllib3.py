"""The pool manager for urllib3, against a service on a port of its own."""

from __future__ import annotations

import gzip
import io
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import urllib3
from urllib3 import HTTPConnectionPool, PoolManager, ProxyManager, Retry
from urllib3.connection import HTTPConnection
from urllib3.exceptions import (
    EmptyPoolError,
    HTTPError,
    LocationValueError,
    MaxRetryError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
    ResponseError,
    SSLError,
)

from limitgate import Limiter, RateLimited
from limitgate.urllib3 import RateLimitPoolManager, Request, _Outbound, repeatable
from tests.support.doors import PATIENCE
from tests.support.service import HOSTILE, LATER, SOON, Service, Told, held_port, refusal, serving

POOL = HTTPConnectionPool("shop")


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


def path_of(request: Request) -> str:
    """A key of its own for each path."""
    return request.url


# --- turns ------------------------------------------------------------------------------------------------------------


def test_a_request_is_what_is_about_to_be_sent(service: Service) -> None:
    """Without what is nobody else's business."""
    seen: list[Request] = []
    with RateLimitPoolManager(key=seen.append) as http:
        http.request("POST", service.url.replace("//", "//user:pw@") + "/a%20b?c=d#e", body=b"x", headers={"X": "1"})
        http.request("GET", service.url)
        http.urlopen("GET", service.url, headers=None)
    assert seen[0] == ("POST", f"{service.url}/a%20b?c=d", {"X": "1"}, b"x")
    assert [seen[1].headers, seen[2].headers] == [{}, {}]


def test_a_request_without_a_key_is_left_to_urllib3(service: Service) -> None:
    """With the retries that it has."""
    with RateLimitPoolManager("1/hour", timeout=0, key=lambda _: None) as http:
        service.answers = [LATER, refusal(b"", Retry_After="0")]
        assert http.request("GET", service.url, retries=False).status == 429
        assert http.request("GET", service.url).status == 200


def test_methods_are_repeatable_however_they_are_written() -> None:
    """As urllib3 takes them."""
    assert repeatable(Request("get", "http://example.com", {}, None))


# --- what the other side says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [None, 3, 0, False, Retry(1, status_forcelist=[429], backoff_factor=10)])
def test_a_refusal_is_obeyed_whatever_the_retries_are(service: Service, retries: Any) -> None:
    """What they would do about it is not done."""
    service.answers = [SOON]
    limiter = Limiter("memory://")
    with RateLimitPoolManager("10/hour", limiter=limiter) as http:
        assert http.request("GET", f"{service.url}/x", retries=retries).data == b"hello"
    assert [each.target for each in service.asked] == ["/x", "/x"]
    assert service.gaps[0] > 0.19
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


@pytest.mark.parametrize("preload_content", [False, True])
def test_a_refusal_is_a_response_of_urllib3(service: Service, preload_content: bool) -> None:  # noqa: FBT001
    """With all that belongs to one."""
    fields = {**LATER.headers, "Content-Encoding": "gzip", "X-Own": "1"}
    service.answers = [LATER._replace(body=gzip.compress(LATER.body), headers=fields)]
    with RateLimitPoolManager("100/second") as http, pytest.raises(RateLimited) as refused:
        http.request("GET", f"{service.url}/x", preload_content=preload_content)
    response = refused.value.response
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


@pytest.mark.parametrize(
    ("kind", "method", "preload_content"),
    [
        *[(kind, "GET", True) for kind in RETRIES],
        *[(kind, "GET", False) for kind in ("usual", "some")],
        *[(kind, "POST", True) for kind in ("of every kind", "of all methods")],
    ],
)
def test_other_than_refusals_it_is_urllib3(service: Service, kind: str, method: str, preload_content: bool) -> None:  # noqa: FBT001
    """The same requests, answers, errors and counts of retries, whatever happens."""
    retries = RETRIES[kind]
    elsewhere = f"{service.url.replace('127.0.0.1', 'localhost')}/"
    for name, script in [*SCRIPTS.items(), ("on another host", [Told(302, {"Location": elsewhere})])]:
        found = []
        for http in (PoolManager(), RateLimitPoolManager(timeout=0), RateLimitPoolManager(timeout=0, throttle=True)):
            body = io.BytesIO(b"body") if method == "POST" else None
            playing(service, script)
            with http:
                options = {"method": method, "retries": retries, "preload_content": preload_content, "body": body}
                found.append(outcome(service, http, options))
        assert found[0] == found[1] == found[2], name


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


@pytest.mark.parametrize("options", [{"throttle": True}, {"adaptive": True}], ids=str)
def test_each_attempt_tells_of_an_overloaded_host(service: Service, options: dict[str, Any]) -> None:
    """So each of them takes a turn."""
    limiter = Limiter("memory://")
    playing(service, [Gone(), Gone()])
    with RateLimitPoolManager("10/hour", limiter=limiter, timeout=0, **options) as http:
        assert http.request("GET", service.url, retries=9).data == b"hello"
    assert limiter.peek(service.host, "10/hour").remaining == 7


def test_retries_end_where_a_dead_host_is_spared() -> None:
    """After the ten attempts that it takes to know."""
    with held_port() as port, RateLimitPoolManager(throttle=True) as http, pytest.raises(RateLimited):
        http.request("GET", f"http://127.0.0.1:{port}", retries=999)


UNANSWERED = {
    NewConnectionError(HTTPConnection("shop"), "refused"): True,
    MaxRetryError(POOL, "/", NewConnectionError(HTTPConnection("shop"), "refused")): True,
    MaxRetryError(POOL, "/", ReadTimeoutError(POOL, "/", "late")): True,
    MaxRetryError(POOL, "/", ResponseError("too many redirects")): False,
    ProtocolError("reset"): True,
    SSLError("no certificate"): True,
    EmptyPoolError(POOL, "busy"): False,
    LocationValueError("no host"): False,
    KeyboardInterrupt(): False,
}


@pytest.mark.parametrize(("error", "is_unanswered"), UNANSWERED.items(), ids=[type(error).__name__ for error in UNANSWERED])
def test_what_means_that_there_was_no_answer(error: BaseException, *, is_unanswered: bool) -> None:
    """What is wrong with the request, or full here, is no fault of the host."""
    transport = _Outbound(PoolManager(), Retry(), {}, retries_connections=False)
    assert transport.is_unanswered(error) is is_unanswered


@pytest.mark.parametrize("answer", [BROKEN, Told(500)], ids=["broken", "failing"])
def test_retries_wait_as_long_as_they_say(service: Service, answer: Told) -> None:
    """Beside their turns."""
    service.answers = [answer, answer]
    with RateLimitPoolManager("100/second") as http:
        http.request("GET", service.url, retries=Retry(3, status_forcelist=[500], backoff_factor=0.1))
    assert service.gaps[1] > 0.19


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
    assert service.gaps[0] > 0.9


# --- hostile answers --------------------------------------------------------------------------------------------------


def test_the_body_of_a_refusal_has_a_second(service: Service) -> None:
    """As long as it comes at all, and not as long as it takes."""
    service.answers = [HOSTILE["trickling"]()]
    with RateLimitPoolManager() as http:
        began = time.monotonic()
        with pytest.raises(RateLimited):
            http.request("GET", service.url)
        assert 0.9 < time.monotonic() - began < PATIENCE


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


def test_clearing_closes_connections_and_nothing_else(service: Service) -> None:
    """New ones are made."""
    with RateLimitPoolManager("2/hour", timeout=0) as http:
        http.request("GET", service.url)
        http.clear()
        http.request("GET", service.url)
        with pytest.raises(RateLimited):
            http.request("GET", service.url)
    assert service.lines == 2
