"""The adapter for requests, against a service on a port of its own."""

from __future__ import annotations

import gzip
import io
import threading
from collections.abc import Iterator

import pytest
import requests
import urllib3
from requests.adapters import BaseAdapter, HTTPAdapter
from requests.auth import HTTPDigestAuth
from urllib3.exceptions import EmptyPoolError
from urllib3.util import Retry

from limitgate import Adaptive, Limit, RateLimited
from limitgate.requests import RateLimitAdapter, _Outbound
from tests.support.service import LATER, Service, Told, refusal, serving

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


def test_authentication_that_sends_again_takes_a_turn(service: Service) -> None:
    """What an authentication sends by the response's connection is counted as well."""
    service.script = lambda asked: Told() if "authorization" in asked.headers else Told(401, DIGEST)
    with session("2/hour", timeout=0) as http:
        http.auth = HTTPDigestAuth("user", "secret")
        assert http.get(service.url).status_code == 200
        http.auth = None
        with pytest.raises(RateLimited):
            http.get(service.url)


# --- what the other side says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_a_response_of_requests(service: Service, stream: bool) -> None:  # noqa: FBT001
    """With all that belongs to one."""
    service.answers = [
        LATER._replace(body=gzip.compress(LATER.body), headers={**LATER.headers, "Content-Encoding": "gzip", "X-Own": "1"})
    ]
    with session("100/second") as http, pytest.raises(RateLimited) as refused:
        http.get(f"{service.url}/x", stream=stream)
    response = refused.value.response
    assert isinstance(response, requests.Response)
    assert response.json() == {"error": "slow down"}
    assert (response.status_code, response.reason) == (429, "Too Many Requests")
    assert (response.url, response.headers["x-own"]) == (f"{service.url}/x", "1")
    assert response.request.method == "GET"
    with pytest.raises(requests.HTTPError):
        response.raise_for_status()


def test_a_form_with_files_is_repeated(service: Service) -> None:
    """It is in memory."""
    service.answers = [Told(429, {"Retry-After": "0.02"})]
    with session() as http:
        assert http.put(service.url, files={"x": b"x"}).status_code == 200
    assert service.asked[0].body == service.asked[1].body != b""


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


@pytest.mark.parametrize(
    ("error", "is_unanswered"),
    [
        (requests.ConnectionError(), True),
        (requests.exceptions.SSLError(), True),
        (requests.exceptions.ProxyError(), True),
        (requests.ReadTimeout(), True),
        (requests.ConnectTimeout(), True),
        (requests.exceptions.RetryError(), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (requests.exceptions.InvalidURL(), False),
        (EmptyPoolError(urllib3.HTTPConnectionPool("shop"), "busy"), False),
        (OSError(), False),
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
def test_what_means_that_there_was_no_answer(error: BaseException, *, is_unanswered: bool) -> None:
    """What is wrong with the request, or full here, is no fault of the host."""
    assert _Outbound(HTTPAdapter().send).is_unanswered(error) is is_unanswered


def test_a_body_that_is_read_slowly_takes_no_place(service: Service) -> None:
    """A request is in flight until its response begins."""
    with session(adaptive=Adaptive(min=1, max=1)) as http:
        slow = http.get(service.url, stream=True)
        assert http.get(service.url).content == slow.content == b"hello"


# --- hostile answers --------------------------------------------------------------------------------------------------


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
