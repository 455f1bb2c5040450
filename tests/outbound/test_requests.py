"""The adapter for requests, against a service on a port of its own."""

from __future__ import annotations

import contextlib
import gzip
import io
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from uuid import uuid4

import httpx
import pytest
import requests
import urllib3
from requests.adapters import BaseAdapter, HTTPAdapter
from requests.auth import HTTPDigestAuth
from urllib3.util import Retry

import limitgate.outbound.bodies
from limitgate import ConfigError, Limit, Limiter, RateLimited, StoreError
from limitgate.httpx import RateLimitTransport, host as host_of_httpx
from limitgate.requests import RateLimitAdapter, host
from tests.support.doors import PATIENCE
from tests.support.redis_server import RedisServer
from tests.support.service import HOSTILE, LATER, SOON, URLS, Service, Told, refusal, serving

DIGEST = {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'}


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


def session(*limits: Limit | str, **options) -> requests.Session:
    """A session all of whose requests take turns."""
    made = requests.Session()
    made.trust_env = False
    for prefix in ("http://", "https://"):
        made.mount(prefix, RateLimitAdapter(*limits, **options))
    return made


# --- turns ------------------------------------------------------------------------------------------------------------


def test_turns_are_waited_for(service: Service) -> None:
    """Nobody is refused; requests leave as the limit lets them, and over one connection."""
    with session(Limit("20/second", burst=2)) as http:
        assert [http.get(service.url).text for _ in range(5)] == ["hello"] * 5
    assert 3 * 0.05 - 0.03 < sum(service.gaps) < 1
    assert service.lines == 1


def test_threads_share_the_turns(service: Service) -> None:
    """Whoever sends, through one adapter there is one budget."""
    with session(Limit("50/second", burst=1)) as http:
        threads = [threading.Thread(target=http.get, args=[service.url]) for _ in range(10)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(PATIENCE)
    assert len(service.asked) == 10
    assert 9 * 0.02 - 0.03 < sum(service.gaps) < 1


def test_a_turn_too_far_away_is_refused(service: Service) -> None:
    """Where the wait would be longer than the timeout nothing is sent, and there is no response."""
    with session("1/hour", timeout=0.5) as http:
        http.get(service.url)
        with pytest.raises(RateLimited) as refused:
            http.get(service.url)
    assert refused.value.response is None
    assert 3500 < refused.value.decision.retry_after <= 3600
    assert len(service.asked) == 1


def test_each_redirect_is_a_request(service: Service) -> None:
    """A hop that has no turn left is not made."""
    service.script = lambda asked: Told() if asked.target == "/2" else Told(302, {"Location": f"/{len(service.asked)}"})
    with session("3/hour", timeout=0) as http:
        reply = http.get(f"{service.url}/0")
        assert (reply.text, len(reply.history)) == ("hello", 2)
        with pytest.raises(RateLimited):
            http.get(f"{service.url}/2")
    with session("2/hour", timeout=0) as http:
        service.asked.clear()
        with pytest.raises(RateLimited):
            http.get(f"{service.url}/0")
    assert [each.target for each in service.asked] == ["/0", "/1"]


def test_authentication_that_sends_again_takes_a_turn(service: Service) -> None:
    """What an authentication sends by the response's connection is counted as well."""
    service.script = lambda asked: Told() if "authorization" in asked.headers else Told(401, DIGEST)
    with session("2/hour", timeout=0) as http:
        http.auth = HTTPDigestAuth("user", "secret")
        assert http.get(service.url).status_code == 200
        http.auth = None
        with pytest.raises(RateLimited):
            http.get(service.url)


def test_a_key_decides_what_is_counted_together(service: Service) -> None:
    """By any text; what has none is not counted."""
    with session("1/hour", timeout=0, key=lambda request: request.headers.get("X-Tenant")) as http:
        for tenant in ("a", "b"):
            http.get(service.url, headers={"X-Tenant": tenant})
            with pytest.raises(RateLimited):
                http.get(service.url, headers={"X-Tenant": tenant})
        service.answers = [LATER, Told()]
        assert [http.get(service.url).status_code for _ in range(2)] == [429, 200]


@pytest.mark.parametrize("url", URLS)
def test_a_host_is_the_same_in_httpx(url: str) -> None:
    """One key for one host, however it is written and whoever sends."""
    found = host(requests.Request("GET", url).prepare())
    assert found == host_of_httpx(httpx.Request("GET", url))
    assert found == found.lower()


def test_hosts_have_ports_that_are_not_usual() -> None:
    """The keys as they are written."""
    assert [host(requests.Request("GET", url).prepare()) for url in (URLS[1], URLS[3], URLS[9], URLS[10], URLS[21])] == [
        "example.com",
        "example.com:80",
        "example.com:81",
        "xn--mnchen-3ya.de:8080",
        "[2001:db8::a]:8443",
    ]


@pytest.mark.parametrize("options", [{"timeout": -1}, {"timeout": "1"}, {"on_error": "sometimes"}])
def test_options_that_make_no_sense_are_told_when_it_is_built(options: dict) -> None:
    """What can never work is no matter for the first request."""
    with pytest.raises(ConfigError):
        RateLimitAdapter("1/second", **options)


def test_limits_that_book_no_turns_are_told_when_it_is_built() -> None:
    """Nobody could wait for one."""
    with pytest.raises(ConfigError, match="books no turns"):
        RateLimitAdapter(Limit("1/second", algorithm="sliding_log"))


# --- what the other side says -----------------------------------------------------------------------------------------


def test_a_refusal_is_obeyed_and_the_request_repeated(service: Service) -> None:
    """Not before it may be, over the same connection."""
    service.answers = [SOON]
    with session("100/second") as http:
        assert http.get(f"{service.url}/x").text == "hello"
    assert [each.target for each in service.asked] == ["/x", "/x"]
    assert 0.19 < service.gaps[0] < 0.8
    assert service.lines == 1


def test_others_are_held_back_by_a_refusal_too(service: Service) -> None:
    """A pause is everybody's who has the same key, whatever they were about to send."""
    with session() as http:
        service.answers = [SOON]
        with pytest.raises(RateLimited):
            http.post(service.url)
        http.get(service.url)
    assert 0.19 < service.gaps[0] < 0.8


@pytest.mark.parametrize(
    ("send", "count"),
    [
        (lambda http, url: http.post(url, data=b"x"), 1),
        (lambda http, url: http.post(url, data=b"x", headers={"idempotency-KEY": "1"}), 2),
        (lambda http, url: http.put(url, data="x"), 2),
        (lambda http, url: http.put(url, json={"x": 1}), 2),
        (lambda http, url: http.post(url, files={"x": b"x"}, headers={"Idempotency-Key": "1"}), 2),
        (lambda http, url: http.put(url, data=io.BytesIO(b"x")), 1),
        (lambda http, url: http.put(url, data=iter([b"x"])), 1),
        (lambda http, url: http.patch(url, data=b"x"), 1),
        (lambda http, url: http.delete(url), 2),
    ],
)
def test_what_is_repeated(service: Service, send, count: int) -> None:
    """What means the same twice, and whose body is there to be sent again."""
    service.answers = [Told(429, {"Retry-After": "0.02"})]
    with session() as http:
        if count == 1:
            with pytest.raises(RateLimited):
                send(http, service.url)
        else:
            assert send(http, service.url).status_code == 200
    assert len(service.asked) == count
    assert len({each.body for each in service.asked}) == 1


def test_who_sends_may_know_better_what_is_repeatable(service: Service) -> None:
    """Either way."""
    service.answers = [Told(429, {"Retry-After": "0.02"})]
    with session(repeatable=bool) as http:
        assert http.post(service.url, data=b"x").status_code == 200
    assert [each.body for each in service.asked] == [b"x", b"x"]
    service.answers = [LATER]
    with session(repeatable=callable) as http, pytest.raises(RateLimited):
        http.get(service.url)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_carries_its_decision_and_response(service: Service, stream: bool) -> None:  # noqa: FBT001
    """As any response of requests, though its connection is in use again."""
    service.answers = [
        LATER._replace(body=gzip.compress(LATER.body), headers={**LATER.headers, "Content-Encoding": "gzip", "X-Own": "1"})
    ]
    with session("100/second") as http, pytest.raises(RateLimited) as refused:
        http.get(f"{service.url}/x", stream=stream)
    error = refused.value
    assert not error.decision.allowed
    assert error.decision.retry_after == 3600
    assert isinstance(error.response, requests.Response)
    assert error.response.json() == {"error": "slow down"}
    assert (error.response.status_code, error.response.reason) == (429, "Too Many Requests")
    assert (error.response.url, error.response.headers["x-own"]) == (f"{service.url}/x", "1")
    assert error.response.request.method == "GET"
    with pytest.raises(requests.HTTPError):
        error.response.raise_for_status()


def test_a_refusal_can_be_read_as_a_stream(service: Service) -> None:
    """Piece by piece, decoded."""
    service.answers = [LATER._replace(body=gzip.compress(b"a\nb"), headers={**LATER.headers, "Content-Encoding": "gzip"})]
    with session() as http, pytest.raises(RateLimited) as refused:
        http.get(service.url, stream=True)
    assert list(refused.value.response.iter_lines()) == [b"a", b"b"]


def test_what_is_streamed_is_left_to_who_asked(service: Service) -> None:
    """An answer is not read before it is wanted."""
    service.answers = [Told(200, {"Transfer-Encoding": "chunked"}, [b"2\r\nab\r\n", b"2\r\ncd\r\n0\r\n\r\n"])]
    with session("100/second") as http, http.get(service.url, stream=True) as reply:
        assert not reply.raw.closed
        assert reply.content == b"abcd"


def test_an_answer_that_leaves_nothing_holds_the_next_back(service: Service) -> None:
    """Fields of any response are heeded, not only those of refusals."""
    service.answers = [Told(200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "0.3"})]
    with session() as http:
        http.get(service.url)
        http.get(service.url)
    assert 0.29 < service.gaps[0] < 0.8


# --- retries of the inner adapter -------------------------------------------------------------------------------------


def test_retries_that_leave_refusals_alone_go_along(service: Service) -> None:
    """They are for what they were asked to do; a refusal reaches who waits for turns."""
    retries = Retry(3, respect_retry_after_header=False, status_forcelist=[503])
    with session("100/second", adapter=HTTPAdapter(max_retries=retries)) as http:
        service.answers = [Told(503), Told(503)]
        assert http.get(service.url).status_code == 200
        service.answers = [LATER]
        with pytest.raises(RateLimited) as refused:
            http.get(service.url)
        assert refused.value.decision.retry_after == 3600
    assert len(service.asked) == 4


def test_retries_that_respect_retry_after_keep_refusals_to_themselves(service: Service) -> None:
    """Which is why one should not have both: what they send takes no turns, and what they hear nobody else learns."""
    with session("1/hour", timeout=0, adapter=HTTPAdapter(max_retries=1)) as http:
        service.answers = [Told(429, {"Retry-After": "1"})]
        assert http.get(service.url).status_code == 200
    assert len(service.asked) == 2
    assert service.gaps[0] > 0.9


# --- what is shared ---------------------------------------------------------------------------------------------------


def test_the_budget_is_shared_with_httpx(service: Service) -> None:
    """Over one store, by the same key."""
    limiter = Limiter("memory://")
    transport = RateLimitTransport("2/hour", limiter=limiter, timeout=0)
    with session("2/hour", limiter=limiter, timeout=0) as ours, httpx.Client(transport=transport) as theirs:
        ours.get(service.url)
        theirs.get(service.url)
        for each in (ours, theirs):
            with pytest.raises(RateLimited):
                each.get(service.url)
    assert len(service.asked) == 2


def test_a_pause_is_shared_through_redis(service: Service, redis_server: RedisServer) -> None:
    """What one was told another does not have to be told."""
    service.answers = [LATER]
    prefix = uuid4().hex
    with Limiter(redis_server.url, key_prefix=prefix) as one, session(limiter=one) as http, pytest.raises(RateLimited):
        http.get(service.url)
    with (
        Limiter(redis_server.url, key_prefix=prefix) as other,
        session(limiter=other) as http,
        pytest.raises(RateLimited) as refused,
    ):
        http.get(service.url)
    assert refused.value.response is None
    assert 3590 < refused.value.decision.retry_after <= 3600
    assert len(service.asked) == 1


WITH_REQUESTS = """
import sys, requests
from limitgate import Limit
from limitgate.requests import RateLimitAdapter
with requests.Session() as http:
    http.trust_env = False
    http.mount("http://", RateLimitAdapter(Limit("25/second", burst=1), limiter=sys.argv[1]))
    print("ready", flush=True)
    input()
    for _ in range(8):
        http.get(sys.argv[2])
"""
WITH_URLLIB3 = """
import sys
from limitgate import Limit
from limitgate.urllib3 import RateLimitPoolManager
with RateLimitPoolManager(Limit("25/second", burst=1), limiter=sys.argv[1]) as http:
    print("ready", flush=True)
    input()
    for _ in range(8):
        http.request("GET", sys.argv[2])
"""


def test_processes_share_the_budget(service: Service, redis_server: RedisServer) -> None:
    """Through Redis the requests of two come as from one, whatever they send with."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", program, redis_server.url, service.url], **pipes))
            for program in (WITH_REQUESTS, WITH_URLLIB3)
        ]
        assert [each.stdout.readline() for each in both] == [b"ready\n"] * 2
        for each in both:
            each.stdin.write(b"\n")
            each.stdin.flush()
    assert [each.returncode for each in both] == [0, 0]
    assert len(service.asked) == 16
    assert 15 * 0.04 - 0.1 < sum(service.gaps) < 15 * 0.04 + 1


@pytest.mark.parametrize(
    ("on_error", "expected", "count"), [("local", RateLimited, 1), ("open", (), 2), ("closed", StoreError, 0)]
)
def test_without_redis(service: Service, own_redis: RedisServer, on_error: str, expected, count: int) -> None:
    """Counted in this process, not at all, or not sent."""
    own_redis.kill()
    with session("1/hour", limiter=own_redis.url, timeout=0, on_error=on_error) as http:
        for _ in range(2):
            with contextlib.suppress(expected):
                http.get(service.url)
    assert len(service.asked) == count


def test_a_refusal_is_obeyed_without_redis(service: Service, own_redis: RedisServer) -> None:
    """In this process at least."""
    own_redis.kill()
    service.answers = [SOON]
    with session(limiter=own_redis.url) as http:
        assert http.get(service.url).status_code == 200
    assert 0.19 < service.gaps[0] < 1


# --- hostile answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_refusal_is_a_refusal(service: Service, monkeypatch: pytest.MonkeyPatch, answer) -> None:
    """It takes its time at most, says nothing, and no connection is in the way of those that follow."""
    monkeypatch.setattr(limitgate.outbound.bodies, "LONGEST_READ", 0.1)
    service.answers = [answer()]
    pool = HTTPAdapter(pool_maxsize=1, pool_block=True)
    with session("100/second", key=lambda request: request.path_url, adapter=pool) as http:
        began = time.monotonic()
        with pytest.raises(RateLimited) as refused:
            http.get(f"{service.url}/x", timeout=PATIENCE)
        assert time.monotonic() - began < 0.6
        assert refused.value.decision.retry_after == 3600
        assert (refused.value.response.status_code, refused.value.response.content) == (429, b"")
        names = [set(map(str.lower, each.headers)) for each in (refused.value.response, refused.value.response.raw)]
        assert names[0] == names[1]
        assert names[0] <= {"retry-after", "connection"}
        assert http.get(f"{service.url}/y", timeout=PATIENCE).text == "hello"


def test_a_refusal_as_long_as_it_may_be_is_read(service: Service) -> None:
    """To the byte; and its connection is used again."""
    service.answers = [refusal(b"x" * 65_536), refusal(gzip.compress(b"y" * 65_536), Content_Encoding="gzip")]
    with session(key=lambda request: request.path_url) as http:
        for path, body in [("/x", b"x"), ("/y", b"y")]:
            with pytest.raises(RateLimited) as refused:
                http.get(service.url + path)
            assert refused.value.response.content == body * 65_536
    assert service.lines == 1


@pytest.mark.parametrize(
    "told", [refusal(b""), refusal(b"abc"), refusal([b"3\r\nabc\r\n0\r\n\r\n"], Transfer_Encoding="chunked")]
)
def test_connections_are_used_again_after_a_refusal(service: Service, told: Told) -> None:
    """Whatever frames its body."""
    service.answers = [told._replace(headers=told.headers | {"Retry-After": "0.02"})]
    with session() as http:
        assert http.get(service.url).text == "hello"
    assert service.lines == 1


def test_a_refusal_of_head_has_no_body(service: Service) -> None:
    """Though it says how long it would be."""
    service.answers = [refusal(b"abc")]
    with session() as http, pytest.raises(RateLimited) as refused:
        http.head(service.url)
    assert refused.value.response.content == b""
    assert refused.value.response.headers["content-length"] == "3"


def test_threads_leave_nothing_behind(service: Service) -> None:
    """What watched over the body of a refusal is gone with it."""
    service.answers = [refusal(b"abc"), refusal(b"x" * 100_000)]
    with session(key=lambda request: request.path_url) as http:
        before = threading.active_count()
        for path in ("/x", "/y"):
            with pytest.raises(RateLimited):
                http.get(service.url + path)
        assert not [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
        assert threading.active_count() <= before + 2


# --- what is inside ---------------------------------------------------------------------------------------------------


class Inner(BaseAdapter):
    """An adapter that does as it is told, without a network."""

    def __init__(self, outcome) -> None:
        super().__init__()
        self.outcome = outcome
        self.closed = 0
        self.options: list[dict] = []

    def send(self, request, **options) -> requests.Response:
        self.options.append(options)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome(request)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("error", [requests.ConnectionError("gone"), requests.ReadTimeout("late"), KeyError("bug")])
def test_what_the_inner_adapter_raises_passes(error: Exception) -> None:
    """As it is."""
    with session("100/second", adapter=Inner(error)) as http, pytest.raises(type(error)) as raised:
        http.get("http://example.com/")
    assert raised.value is error


def test_options_of_a_request_reach_the_inner_adapter() -> None:
    """All of them."""

    def answer(request: requests.PreparedRequest) -> requests.Response:
        reply = requests.Response()
        reply.status_code, reply.raw = 200, urllib3.HTTPResponse(io.BytesIO(b"hello"), preload_content=False)
        return reply

    inner = Inner(answer)
    with session(adapter=inner) as http:
        assert http.get("http://example.com/", timeout=(1, 2), verify="/ca", cert="/cert", stream=True).content == b"hello"
    options = {"timeout": (1, 2), "verify": "/ca", "cert": "/cert", "stream": True, "proxies": {}}
    assert {name: dict(each) if name == "proxies" else each for name, each in inner.options[0].items()} == options


def test_refusals_of_adapters_without_a_network_can_be_read() -> None:
    """Of whatever their responses are made."""

    def answer(request: requests.PreparedRequest) -> requests.Response:
        reply = requests.Response()
        reply.status_code, reply.headers["Retry-After"] = 429, "3600"
        if request.path_url == "/urllib3":
            reply.raw = urllib3.HTTPResponse(io.BytesIO(b"slow"), preload_content=False, headers=reply.headers)
        elif request.path_url == "/read":
            reply.raw = urllib3.HTTPResponse(io.BytesIO(b"slow"), preload_content=False, headers={"Content-Length": "4"})
            reply.content  # noqa: B018 - read by who made it
        elif request.path_url == "/less":
            fields = {"Content-Length": "10"}
            reply.raw = urllib3.HTTPResponse(
                io.BytesIO(b"slow"), preload_content=False, headers=fields, enforce_content_length=False
            )
        else:
            reply.raw = io.BytesIO(b"slow")
        return reply

    with session(key=lambda request: request.path_url, adapter=Inner(answer)) as http:
        for path, body in {"/urllib3": b"slow", "/read": b"slow", "/less": b"", "/io": b"slow"}.items():
            with pytest.raises(RateLimited) as refused:
                http.get(f"http://example.com{path}")
            assert refused.value.response.content == body


def test_refusals_that_were_read_before_can_be_read(service: Service) -> None:
    """As by an adapter that logs what it gets."""

    class Reading(HTTPAdapter):
        def send(self, *args, **options) -> requests.Response:
            reply = super().send(*args, **options)
            assert reply.content
            return reply

    fields = {**LATER.headers, "Content-Encoding": "gzip"}
    service.answers = [LATER, LATER._replace(body=gzip.compress(LATER.body), headers=fields)]
    with session(key=lambda request: request.path_url, adapter=Reading()) as http:
        for path in ("/x", "/y"):
            with pytest.raises(RateLimited) as refused:
                http.get(service.url + path)
            assert refused.value.response.json() == {"error": "slow down"}
    assert service.lines == 1


def test_what_is_closed_with_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner adapter; the store if it was opened here, and nobody else's."""
    closed: list[Limiter] = []
    monkeypatch.setattr(Limiter, "close", lambda limiter: closed.append(limiter))  # noqa: PLW0108 - a method
    inner = Inner(None)
    session(limiter=Limiter("memory://"), adapter=inner).close()
    assert (inner.closed, len(closed)) == (2, 0)
    session(adapter=inner).close()
    assert (inner.closed, len(closed)) == (4, 2)


def test_the_store_is_closed_even_if_the_inner_adapter_cannot_be(own_redis: RedisServer) -> None:
    """Both are told to."""

    class Stuck(Inner):
        def close(self) -> None:
            raise OSError("stuck")

    adapter = RateLimitAdapter("1/hour", limiter=own_redis.url, adapter=Stuck(lambda _: requests.Response()))
    with own_redis.client() as client:
        alone = client.info("clients")["connected_clients"]
        with pytest.raises(TypeError):  # a response without a status
            adapter.send(requests.Request("GET", "http://example.com/").prepare())
        assert client.info("clients")["connected_clients"] > alone
        with pytest.raises(OSError, match="stuck"):
            adapter.close()
        until = time.monotonic() + PATIENCE
        while client.info("clients")["connected_clients"] > alone:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_an_answer_that_nobody_gets_is_closed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something goes wrong after it has come, its connection is not kept from others."""
    service.answers = [LATER]
    limiter = Limiter("memory://")
    with session(limiter=limiter, adapter=HTTPAdapter(pool_maxsize=1, pool_block=True)) as http:
        with monkeypatch.context() as patch:
            patch.setattr(limiter, "ban", interrupted)
            with pytest.raises(KeyboardInterrupt):
                http.get(service.url)
        http.adapters["http://"]._throttle._paused.clear()
        assert http.get(service.url, timeout=PATIENCE).text == "hello"


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
