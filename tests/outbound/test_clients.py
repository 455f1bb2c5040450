"""One suite for the clients of every library, against a service on a port of its own."""

from __future__ import annotations

import contextlib
import gzip
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

import limitgate.aiohttp
import limitgate.outbound.bodies
import limitgate.outbound.httpx_transports
from limitgate import Adaptive, ConfigError, Limit, RateLimited, StoreError
from limitgate.process import waiting
from tests.limiter.test_limiter import left, visitors
from tests.support.cases import case
from tests.support.clients import CLIENTS, Client, Interrupted
from tests.support.doors import PATIENCE, PROCESS_PATIENCE
from tests.support.redis_server import RedisServer
from tests.support.service import HOSTILE, LATER, SOON, Service, Told, held_port, refusal, serving

AT_ONCE = Told(429, {"Retry-After": "0.02"}, b'{"error": "slow down"}')
Opens = Callable[..., Client]


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


@pytest.fixture(params=CLIENTS.values(), ids=CLIENTS)
def kind(request: pytest.FixtureRequest) -> type[Client]:
    return request.param


@pytest.fixture
def use(kind: type[Client]) -> Iterator[Opens]:
    """Opens clients of one kind, closed after the test."""
    with contextlib.ExitStack() as opened:
        yield lambda *limits, **options: opened.enter_context(contextlib.closing(kind(*limits, **options)))


def come_in_turn(service: Service, began: float, interval: float) -> bool:
    """True if no request has come before its turn, the first of which was when the clients began."""
    return all(at - began >= turn * interval for turn, at in enumerate(sorted(each.at for each in service.asked)))


# --- turns ------------------------------------------------------------------------------------------------------------


def test_turns_are_waited_for(use: Opens, service: Service) -> None:
    """Nobody is refused; requests leave as the limit lets them, and over one connection."""
    client, began = use("20/second burst 1"), time.monotonic()
    assert [client.get(service.url).body for _ in range(4)] == [b"hello"] * 4
    assert come_in_turn(service, began, 1 / 20)
    assert service.lines == 1


def test_all_share_the_turns(use: Opens, service: Service) -> None:
    """Whoever sends, through one client there is one budget, in threads and in tasks."""
    client, began = use("50/second burst 1"), time.monotonic()
    assert [reply.body for reply in client.together(*[service.url] * 10)] == [b"hello"] * 10
    assert come_in_turn(service, began, 1 / 50)


def test_a_turn_too_far_away_is_refused(use: Opens, service: Service) -> None:
    """Where the wait would be longer than the timeout nothing is sent, and there is no response."""
    client = use("1/hour", timeout=0.5)
    client.get(service.url)
    refused = client.refused("GET", service.url)
    assert refused.response is None
    assert 3500 < refused.decision.retry_after <= 3600
    assert len(service.asked) == 1


def test_each_redirect_is_a_request(use: Opens, service: Service) -> None:
    """A hop that has no turn left is not made."""
    service.script = lambda asked: Told() if asked.target == "/2" else Told(302, {"Location": f"/{len(service.asked)}"})
    client = use("3/hour", timeout=0)
    assert client.get(f"{service.url}/0").body == b"hello"
    assert [each.target for each in service.asked] == ["/0", "/1", "/2"]
    client.refused("GET", f"{service.url}/2")
    service.asked.clear()
    use("2/hour", timeout=0).refused("GET", f"{service.url}/0")
    assert [each.target for each in service.asked] == ["/0", "/1"]


def test_each_hop_counts_where_it_goes(use: Opens, service: Service) -> None:
    """A redirect to another host takes from the budget of that one, and what that one says is heeded for it alone."""
    with serving() as other:
        client = use("2/hour", timeout=0)
        service.answers = [Told(302, {"Location": f"{other.url}/there"})]
        other.answers = [Told(200, {"RateLimit": '"default";r=0;t=100'})]
        assert client.get(f"{service.url}/here").body == b"hello"
        assert 90 < client.refused("GET", other.url).decision.retry_after <= 100
        client.get(service.url)
        assert client.refused("GET", service.url).decision.retry_after > 1000
    assert [each.target for each in service.asked + other.asked] == ["/here", "/", "/there"]


def test_a_key_decides_what_is_counted_together(use: Opens, service: Service) -> None:
    """By any text; what has none is not counted, and its refusal is a response as any other."""
    client = use("1/hour", timeout=0, key=lambda request: request.headers.get("X-Tenant"))
    for tenant in ("a", "b"):
        client.get(service.url, headers={"X-Tenant": tenant})
        client.refused("GET", service.url, headers={"X-Tenant": tenant})
    service.answers = [Told(429)]
    assert [client.get(service.url).status for _ in range(2)] == [429, 200]


HOSTS = {
    "http://example.com/": "example.com",
    "http://EXAMPLE.com:80/a?b#c": "example.com",
    "https://Example.COM:443": "example.com",
    "https://example.com:80/": "example.com:80",
    "http://example.com:443/": "example.com:443",
    "http://example.com:0080/": "example.com",
    "http://example.com:/": "example.com",
    "http://example.com.": "example.com",
    "http://example.com.:8080/": "example.com:8080",
    "http://user:secret@Example.com/": "example.com",
    "http://example.com@evil.org": "evil.org",
    "http://us%40er:p%3Aw@example.com:81/x": "example.com:81",
    "http://user@M\u00fcnchen.de:8080/": "xn--mnchen-3ya.de:8080",
    "http://m\u00fcnchen.de/": "xn--mnchen-3ya.de",
    "http://XN--mnchen-3ya.de:80/": "xn--mnchen-3ya.de",
    "https://fa\u00df.de/": "xn--fa-hia.de",
    "https://\u65e5\u672c\u8a9e.jp:443/": "xn--wgv71a119e.jp",
    "http://a_b.example.com": "a_b.example.com",
    "http://127.0.0.1/": "127.0.0.1",
    "http://127.0.0.1:8000/": "127.0.0.1:8000",
    "http://[::1]/": "[::1]",
    "http://[::1]:80/": "[::1]",
    "http://[::1]:8080/": "[::1]:8080",
    "http://[2001:DB8::A]:8443/": "[2001:db8::a]:8443",
    "http://[::FFFF:1.2.3.4]/": "[::ffff:1.2.3.4]",
    "HTTP://Example.com?x=1": "example.com",
}


def test_a_host_is_the_same_in_every_library(kind: type[Client]) -> None:
    """One key for one host, however it is written and whoever sends, and with no secrets in it."""
    assert {url: kind.host(url) for url in HOSTS} == HOSTS


MISTAKES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("5/fortnight",), {}),
    ((Limit("1/second", algorithm="sliding_window"),), {}),
    (("1/second",), {"timeout": -1}),
    (("1/second",), {"timeout": "1 x"}),
    (("1/second",), {"on_error": "sometimes"}),
    (("1/second",), {"timeout": True}),
    (("1/second",), {"throttle": "yes"}),
    (("1/second",), {"throttle": 1}),
    (("1/second",), {"throttle": None}),
    (("1/second",), {"strict": 0}),
    (("1/second",), {"strict": 5}),
    (("1/second",), {"adaptive": 20}),
    (("1/second",), {"adaptive": {"mox": 20}}),
    (("1/second",), {"limiter": None}),
    (("1/second",), {"limiter": 5}),
]


def test_client_with_a_mistake_raises_config_error(kind: type[Client]) -> None:
    """When it is built, not at the first request."""
    for limits, options in MISTAKES:
        with case(limits, options), pytest.raises(ConfigError):
            kind(*limits, **options)


def test_an_option_that_is_unknown_is_told(kind: type[Client]) -> None:
    """With the one that was probably meant."""
    with pytest.raises(TypeError, match="unknown option 'throtle', did you mean 'throttle'"):
        kind("1/second", throtle=True)
    with pytest.raises(TypeError, match="unknown option 'limits', expected each limit separately before the options"):
        kind(limits=["1/second"])


# --- what the service says --------------------------------------------------------------------------------------------


def test_a_refusal_is_obeyed_and_the_request_repeated(use: Opens, service: Service) -> None:
    """Not before it may be, over the same connection."""
    service.answers = [SOON]
    assert use("100/second").get(f"{service.url}/x").body == b"hello"
    assert [each.target for each in service.asked] == ["/x", "/x"]
    assert service.gaps[0] > 0.19
    assert service.lines == 1


def test_others_are_held_back_by_a_refusal_too(use: Opens, service: Service) -> None:
    """A pause is everybody's who has the same key, whatever they were about to send."""
    client = use()
    service.answers = [SOON]
    client.refused("POST", service.url)
    client.get(service.url)
    assert service.gaps[0] > 0.19


def test_an_answer_that_leaves_nothing_holds_the_next_back(use: Opens, service: Service) -> None:
    """Fields of any response are heeded, not only those of refusals."""
    service.answers = [Told(200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "0.3"})]
    client = use()
    assert [client.get(service.url).body for _ in range(2)] == [b"hello"] * 2
    assert service.gaps[0] > 0.29


def test_no_response_pauses_a_key_for_longer_than_the_longest_pause(use: Opens, service: Service) -> None:
    """The refusal has the time that the service demanded, and the next request waits for no longer than the client allows."""
    service.answers = [Told(429, {"Retry-After": "7200"})]
    client = use(longest_pause=60, timeout=0)
    assert client.refused("GET", service.url).decision.retry_after == 7200
    assert 0 < client.refused("GET", service.url).decision.retry_after <= 60
    assert len(service.asked) == 1


@pytest.mark.parametrize(("mine", "theirs"), [("5", "90"), ("90", "5"), ("90", "90"), ("soon", "90")])
def test_a_retry_after_on_two_lines_is_obeyed(use: Opens, service: Service, mine: str, theirs: str) -> None:
    """A proxy and the service behind it may each send one: the longer wait counts."""
    service.answers = [Told(429, {"Retry-After": mine, "retry-after": theirs})]
    assert use(timeout=0).refused("GET", service.url).decision.retry_after == 90


KEYED = {"headers": {"idempotency-KEY": "1"}}
REPEATED: list[tuple[str, dict[str, Any], bool]] = [
    ("PUT", {"body": b"x"}, True),
    ("PUT", {"body": "x"}, True),
    ("PUT", {"json": {"x": 1}}, True),
    ("PUT", {"form": {"x": "y"}}, True),
    ("DELETE", {}, True),
    ("POST", {"body": b"x", **KEYED}, True),
    ("POST", {"form": {"x": "y"}, **KEYED}, True),
    ("POST", {"body": b"x"}, False),
    ("PATCH", {"body": b"x"}, False),
    ("POST", {}, False),
]


@pytest.mark.parametrize(("method", "options", "again"), REPEATED, ids=lambda each: str(each)[:40])
def test_a_request_is_repeated_if_it_means_the_same_twice(
    use: Opens, service: Service, method: str, options: dict[str, Any], *, again: bool
) -> None:
    """By its method or its key; the same body again. Otherwise it is up to the caller, who knows when to come back."""
    service.answers = [AT_ONCE]
    if again:
        assert use().request(method, service.url, **options).status == 200
    else:
        assert use().refused(method, service.url, **options).decision.retry_after == 0.02
    assert len(service.asked) == 1 + again
    assert len({each.body for each in service.asked}) == 1


def test_a_body_that_is_read_once_is_gone(use: Opens, kind: type[Client], service: Service) -> None:
    """Such as a file: a request with it is not repeated."""
    for body in kind.bodies_read_once():
        service.answers = [AT_ONCE]
        use().refused("PUT", service.url, body=body)
        assert service.asked.pop().body == b"x"
    assert service.asked == []


def test_who_sends_may_know_better_what_is_repeatable(use: Opens, service: Service) -> None:
    """Either way."""
    client = use(repeatable=lambda request: request.method == "POST")
    service.answers = [AT_ONCE]
    assert client.request("POST", service.url, body=b"x").status == 200
    service.answers = [AT_ONCE]
    client.refused("GET", service.url)
    assert [each.body for each in service.asked] == [b"x", b"x", b""]


def test_a_refusal_carries_its_decision_and_response(use: Opens, kind: type[Client], service: Service) -> None:
    """As any response of the library, though its connection is in use again."""
    fields = {**LATER.headers, "Content-Encoding": "gzip", "X-Own": "1"}
    service.answers = [LATER._replace(body=gzip.compress(LATER.body), headers=fields)]
    client = use("100/second", inner=kind.narrow(), key=kind.path)
    refused = client.refused("GET", f"{service.url}/x")
    assert (refused.decision.allowed, refused.decision.retry_after) == (False, 3600)
    client.get(service.url)
    status, body, headers = kind.reply(refused.response)
    assert (status, body, headers["x-own"]) == (429, LATER.body, "1")
    assert service.lines == 1


# --- a service that is overloaded -------------------------------------------------------------------------------------


def offered_until(client: Client, url: str, now: list[float], wanted: str, count: int) -> int:
    """Offer 10 requests a second by a clock until so many of the last 60 have an outcome. Returns how many it took, or 600."""
    found: list[str] = []
    while len(found) < 600 and found[-60:].count(wanted) < count:
        now[0] += 0.1
        try:
            found.append("answered" if client.get(url).status == 200 else "error")
        except RateLimited as refused:
            found.append("refused" if refused.response is None else "error")
        except Exception as error:  # noqa: BLE001 - whatever the library raises
            found.append(type(error).__module__.partition(".")[0])
    return len(found)


def test_a_dead_service_is_spared_and_found_again(use: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly anything is sent to it, and within half a minute after it is back it has all requests again."""
    now = [1000.0]
    monkeypatch.setattr(waiting, "monotonic", lambda: now[0])
    monkeypatch.setattr(random, "random", random.Random(2).random)
    client = use(throttle=True, adaptive=Adaptive(min=1, max=1))
    closing = Told(headers={"Connection": "close"})
    with held_port() as port:
        url = f"http://127.0.0.1:{port}"
        with serving(port) as service:
            service.script = lambda _: closing
            assert offered_until(client, url, now, "answered", 60) == 60
        assert offered_until(client, url, now, "refused", 54) < 600
        with serving(port) as service:
            service.script = lambda _: closing
            assert offered_until(client, url, now, "answered", 54) < 600
            assert len(service.asked) < 600


def test_a_service_that_is_busy_is_not_taken_for_a_dead_one(use: Opens, service: Service) -> None:
    """What it answers counts, unless it refuses."""
    client = use(throttle=True, key=lambda _: "shop")
    service.script = lambda asked: Told(int(asked.target[1:]))
    for status in (500, 404, 502, 504) * 10:
        assert client.get(f"{service.url}/{status}").status == status


# --- bodies of refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_refusal_is_a_refusal(
    use: Opens, kind: type[Client], service: Service, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is not heard to the end, says nothing, and no connection is in the way of those that follow."""
    if name in kind.hears:
        pytest.skip(kind.hears[name])
    for module in (limitgate.outbound.bodies, limitgate.outbound.httpx_transports, limitgate.aiohttp):
        monkeypatch.setattr(module, "LONGEST_READ", 0.1)
    service.answers = [HOSTILE[name]()]
    client, began = use("100/second", key=kind.path, inner=kind.narrow()), time.monotonic()
    refused = client.refused("GET", f"{service.url}/x")
    assert time.monotonic() - began < 5, "half of what it would have taken"
    assert refused.decision.retry_after == 3600
    status, body, headers = kind.reply(refused.response)
    assert (status, body) == (429, b"")
    assert kind.keeps_fields or set(headers) <= {"retry-after", "connection"}
    assert client.get(f"{service.url}/y").body == b"hello"


def test_a_refusal_as_long_as_it_may_be_is_read(use: Opens, kind: type[Client], service: Service) -> None:
    """To the byte; and its connection is used again."""
    service.answers = [refusal(b"x" * 65_536), refusal(gzip.compress(b"y" * 65_536), Content_Encoding="gzip")]
    client = use(key=kind.path)
    for path, body in [("/x", b"x"), ("/y", b"y")]:
        assert kind.reply(client.refused("GET", service.url + path).response).body == body * 65_536
    assert service.lines == 1


@pytest.mark.parametrize(
    "told",
    [
        refusal(b""),
        refusal(b"abc"),
        refusal(b"x" * 65_536),
        refusal([b"3\r\nabc\r\n0\r\n\r\n"], Transfer_Encoding="chunked"),
    ],
    ids=["empty", "short", "long", "chunked"],
)
def test_connections_are_used_again_after_a_refusal(use: Opens, service: Service, told: Told) -> None:
    """Whatever frames its body."""
    service.answers = [told._replace(headers=told.headers | {"Retry-After": "0.02"})]
    assert use().get(service.url).body == b"hello"
    assert service.lines == 1


def test_a_refusal_of_head_has_no_body(use: Opens, kind: type[Client], service: Service) -> None:
    """Though it says how long it would be."""
    service.answers = [refusal(b"abc")]
    reply = kind.reply(use().refused("HEAD", service.url).response)
    assert (reply.body, reply.headers["content-length"]) == (b"", "3")


def test_an_answer_that_nobody_gets_is_closed(
    use: Opens, kind: type[Client], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where something goes wrong after it has come, its connection is not kept from others."""

    def interrupted(*_: object) -> None:
        raise Interrupted

    service.answers = [LATER]
    limiter = kind.limiter("memory://")
    monkeypatch.setattr(limiter, "ban", interrupted)
    client = use(limiter=limiter, inner=kind.narrow(), key=kind.path)
    with pytest.raises(Interrupted):
        client.get(f"{service.url}/x")
    assert client.get(f"{service.url}/y").body == b"hello"


# --- what is shared, and closed ---------------------------------------------------------------------------------------


def test_the_budget_is_shared_by_all_libraries(service: Service, redis_server: RedisServer) -> None:
    """Over one store, by the same key."""
    prefix = uuid4().hex
    with contextlib.ExitStack() as opened:
        clients = []
        for kind in CLIENTS.values():
            limiter = kind.limiter(redis_server.url, key_prefix=prefix, timeout=PATIENCE)
            client = opened.enter_context(contextlib.closing(kind(f"{len(CLIENTS)}/hour", limiter=limiter, timeout=0)))
            opened.callback(client.close_limiter, limiter)
            clients.append(client)
        for each in clients:
            each.get(service.url)
        for each in clients:
            assert each.refused("GET", service.url).response is None
    assert len(service.asked) == len(CLIENTS)


def test_a_pause_is_shared_through_redis(use: Opens, kind: type[Client], service: Service, redis_server: RedisServer) -> None:
    """What one was told another does not have to be told."""
    service.answers = [LATER]
    prefix = uuid4().hex
    for from_the_service in (True, False):
        limiter = kind.limiter(redis_server.url, key_prefix=prefix, timeout=PATIENCE)
        client = use(limiter=limiter)
        refused = client.refused("GET", service.url)
        assert (refused.response is not None) == from_the_service
        assert 3500 < refused.decision.retry_after <= 3600
        client.close_limiter(limiter)
    assert len(service.asked) == 1


PROGRAM = """
import os
import sys
from tests.support.clients import CLIENTS

*names, store, prefix, url = sys.argv[1:]
other = os.fork()
kind = CLIENTS[names[other == 0]]
client = kind("40/second burst 1", limiter=kind.limiter(store, timeout=20, key_prefix=prefix))
os.write(1, b"ready\\n")
os.read(0, 1)
assert len(client.together(*[url] * 10)) == 10
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


def test_processes_share_a_budget(service: Service, redis_server: RedisServer) -> None:
    """Programs of two libraries, one that awaits and one that does not, are no faster together than one may be."""
    words = ["requests", "httpx async", redis_server.url, uuid4().hex, service.url]
    command = [sys.executable, "-c", PROGRAM, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert [running.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        began = time.monotonic()
        running.stdin.write(b"go")
        running.stdin.flush()
        assert running.wait(PROCESS_PATIENCE) == 0
    assert len(service.asked) == 20
    assert come_in_turn(service, began, 1 / 40)


@pytest.mark.parametrize(
    ("on_error", "error", "count"), [("local", RateLimited, 1), ("open", (), 2), ("closed", StoreError, 0)]
)
def test_without_redis(use: Opens, service: Service, own_redis: RedisServer, *, on_error: str, error: Any, count: int) -> None:
    """Counted in this process, not at all, or not sent."""
    own_redis.kill()
    client = use("1/hour", limiter=own_redis.url, timeout=0, on_error=on_error)
    for _ in range(2):
        with contextlib.suppress(error):
            client.get(service.url)
    assert len(service.asked) == count


def test_redis_is_found_again(use: Opens, service: Service, own_redis: RedisServer) -> None:
    """Once it is back, requests are counted there as before."""
    client = use("9/second", limiter=own_redis.url, on_error="closed")
    client.get(service.url)
    own_redis.kill()
    with pytest.raises(StoreError):
        client.get(service.url)
    own_redis.start()
    deadline = time.monotonic() + PATIENCE
    while len(service.asked) < 2:
        assert time.monotonic() < deadline
        with contextlib.suppress(StoreError):
            client.get(service.url)


def test_a_refusal_is_obeyed_without_redis(use: Opens, service: Service, own_redis: RedisServer) -> None:
    """In this process at least."""
    own_redis.kill()
    service.answers = [SOON]
    assert use(limiter=own_redis.url).get(service.url).status == 200
    assert service.gaps[0] > 0.19


@pytest.mark.parametrize("stuck", [False, True])
def test_a_store_that_was_opened_is_closed(
    kind: type[Client], service: Service, own_redis: RedisServer, *, stuck: bool
) -> None:
    """Even if what sends cannot be closed."""
    client = kind("9/second", limiter=own_redis.url, inner=kind.stuck() if stuck else None)
    client.get(service.url)
    assert visitors(own_redis) == 1
    with pytest.raises(OSError, match="stuck") if stuck else contextlib.nullcontext():
        client.end()
    assert left(own_redis)
    with contextlib.suppress(OSError):
        client.close()


def test_a_limiter_that_was_given_stays_open(use: Opens, kind: type[Client], service: Service, own_redis: RedisServer) -> None:
    """Several clients may share one."""
    limiter = kind.limiter(own_redis.url, timeout=PATIENCE)
    client = use("9/second", limiter=limiter)
    client.get(service.url)
    client.end()
    assert visitors(own_redis) == 1
    client.close_limiter(limiter)
    assert left(own_redis)


def test_an_error_of_the_network_passes(use: Opens, kind: type[Client]) -> None:
    """As the library raises it, and nothing of ours."""
    with serving() as service:
        url = service.url
    with pytest.raises(Exception, match=r"refused|failed") as raised:
        use("100/second").get(url)
    assert type(raised.value).__module__.partition(".")[0] in {"requests", "urllib3", "httpx", "httpx2", "aiohttp"}
