"""Batching on asyncio: whom the failure of a call concerns, how connections end, and the ways to Redis."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from limitgate import AsyncRedisStore, LimitGate, RedisStore, Rule, StoreError
from limitgate.limits.plan import Plan
from limitgate.stores.redis import wire
from limitgate.stores.redis.aio.batcher import MAX_FLYING
from tests.support.crowds import a_plan, ask, begin, ends, store_at, turns, used
from tests.support.doors import asgi_reply
from tests.support.proxy import CUT, PATIENT, Proxy, in_a_loop, until
from tests.support.redis_server import RedisServer
from tests.support.server_features import TLS, needs

READ_ONLY = b"-READONLY You can't write against a read only replica.\r\n"


def visitors(server: RedisServer) -> int:
    """Connections to the server, but for the one that asks."""
    with server.client() as client:
        return len(client.client_list()) - 1


# --- whom a failure concerns ------------------------------------------------------------------------------------------

ZERO = b":0\r\n"
SIX = b"*%d\r\n" % (wire._HEAD + 6)
"""How an answer to three plans with a window each begins."""
MISHAPS = {
    "read only": READ_ONLY,
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "busy": b"-BUSY Redis is busy running a script.\r\n",
    "no permission": b"-NOPERM this user has no permissions\r\n",
    "moved": b"-MOVED 1 127.0.0.1:1\r\n",
    "an error without a word": b"-\r\n",
    "an error in no encoding": b"-\xff\xfe\r\n",
    "text": b"+OK\r\n",
    "nothing": b"_\r\n",
    "too short": b"*%d\r\n" % wire._HEAD + ZERO * wire._HEAD,
    "text inside": SIX + ZERO * (wire._HEAD + 5) + b"+a\r\n",
    "an error inside": SIX + ZERO * (wire._HEAD + 5) + b"-ERR no\r\n",
    "booleans inside": SIX + ZERO * (wire._HEAD + 5) + b"#t\r\n",
    "one too many": b"*%d\r\n" % (wire._HEAD + 7) + ZERO * (wire._HEAD + 7),
}


@pytest.mark.parametrize("reply", MISHAPS.values(), ids=MISHAPS)
@in_a_loop
async def test_a_failed_call_fails_only_its_own_requests(redis_server: RedisServer, reply: bytes) -> None:
    """An error fails the requests of its call; other calls are answered, later ones use another connection."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        known = len(proxy.calls)
        proxy.instead[known + 1] = reply
        requests = await turns(store, [a_plan()] * 3, [a_plan()] * 3, [a_plan()] * 3)
        await proxy.called(known + 3)
        proxy.release(2)
        assert await ends(requests[:3]) == [True] * 3
        faults = await ends(requests[3:6])
        assert faults in (["reply"] * 3, ["connection"] * 3)
        later = begin(store, a_plan(), a_plan())
        await proxy.called(known + 4)
        old, new = proxy.lines
        assert old.open
        assert not any(request.done() for request in requests[6:] + later)
        proxy.release()
        assert await ends(requests[6:] + later) == [True] * 5
        await until(lambda: not old.open)
        assert new.open
        assert await ask(store, a_plan()) == [True]
        assert len(proxy.lines) == 2


@in_a_loop
async def test_out_of_memory_keeps_the_connection(redis_server: RedisServer) -> None:
    """A Redis that is full fails the requests of a call by a fault of its own, on the connection that goes on."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.instead[len(proxy.calls)] = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
        assert await ends(await turns(store, [a_plan()] * 2, [a_plan()] * 2)) == ["oom"] * 2 + [True] * 2
        assert await ask(store, a_plan()) == [True]
        assert len(proxy.lines) == 1


@in_a_loop
async def test_an_unheard_call_is_sent_once_more(redis_server: RedisServer) -> None:
    """Calls on a connection that ends before anything on it was answered go out again, in order, and are charged once."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        known, plan = len(proxy.calls), a_plan("7/day")
        proxy.instead[known] = CUT
        assert await ends(await turns(store, [plan] * 3, [plan] * 3, [plan] * 3)) == [True] * 7 + [False] * 2
        assert proxy.sizes[known:] == [3] * 4
        assert len(proxy.lines) == 2


@in_a_loop
async def test_a_call_is_not_sent_a_third_time(redis_server: RedisServer) -> None:
    """When the second connection ends, too, the requests fail; the next ones are sent."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        known = len(proxy.calls)
        proxy.instead = {known: CUT, known + 1: CUT}
        assert await ask(store, a_plan(), a_plan()) == ["connection"] * 2
        assert proxy.sizes[known:] == [2, 2]
        assert await ask(store, a_plan()) == [True]
        assert (len(proxy.calls), len(proxy.lines)) == (known + 3, 3)


@in_a_loop
async def test_what_may_have_been_heard_is_not_sent_again(redis_server: RedisServer) -> None:
    """Once something was answered, the end of a connection fails the calls on it; nobody is charged twice."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        known, plan = len(proxy.calls), a_plan()
        requests = await turns(store, [plan], [plan] * 2, [plan] * 3)
        await proxy.called(known + 3)
        proxy.release(1)
        assert await ends(requests[:1]) == [True]
        proxy.lines[0].cut()
        assert await ends(requests[1:]) == ["connection"] * 5
        proxy.release()
        assert await used(store, plan.charges[0].key) == 6
        assert proxy.sizes[known:] == [1, 2, 3, 1]


@in_a_loop
async def test_an_idle_connection_that_ended_goes_unnoticed(redis_server: RedisServer) -> None:
    """Between requests a connection may end, and the next request is decided on another."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        plan = a_plan("9/day")
        for visits in (1, 2, 3):
            assert await ask(store, plan) == [True]
            assert len(proxy.lines) == visits
            proxy.lines[-1].cut()
            await asyncio.sleep(0.01 * (visits - 1))
        assert await used(store, plan.charges[0].key, "9/day") == 3


GARBAGE = {
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "noise": bytes(range(128, 256)),
    "no number": b":12x\r\n",
    "a length below nothing": b"$-5\r\n",
    "too many parts": b"*99999999999\r\n",
    "an error that says too little": b"-MOVED nowhere\r\n",
    "a map by lists": b"%1\r\n*0\r\n:1\r\n",
}


@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE)
@in_a_loop
async def test_garbage_is_a_store_error(redis_server: RedisServer, words: bytes) -> None:
    """Bytes that are no reply fail the requests that wait on that connection, and it is replaced."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        known = len(proxy.calls)
        proxy.instead[known] = words
        requests = await turns(store, [a_plan()] * 2, [a_plan()])
        await proxy.called(known + 2)
        proxy.release()
        assert set(await ends(requests)) <= {"connection", "reply"}
        assert await ask(store, a_plan()) == [True]
        assert len(proxy.lines) == 2
        await until(lambda: not proxy.lines[0].open)


@pytest.mark.parametrize("words", (GARBAGE | MISHAPS).values(), ids=GARBAGE | MISHAPS)
@in_a_loop
async def test_threads_take_garbage_for_a_store_error_too(redis_server: RedisServer, words: bytes) -> None:
    """What is no reply of ours is a store error for threads as well, and their next call is decided."""
    async with Proxy(redis_server) as proxy:
        store = RedisStore(proxy.url)
        await asyncio.to_thread(store.spend, a_plan(), PATIENT)
        proxy.instead[len(proxy.calls)] = words
        with pytest.raises(StoreError):
            await asyncio.to_thread(store.spend, a_plan(), PATIENT)
        assert (await asyncio.to_thread(store.spend, a_plan(), PATIENT)).admitted
        store.close()


UNASKED = {"a reply": b":1\r\n", "an error": READ_ONLY, "garbage": b"HTTP/1.1 408 Request Timeout\r\n\r\n"}


@pytest.mark.parametrize("words", UNASKED.values(), ids=UNASKED)
@in_a_loop
async def test_what_nobody_asked_for_ends_the_connection(redis_server: RedisServer, words: bytes) -> None:
    """A server that speaks while nobody waits is out of step: the next request goes out on another connection."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.lines[0].say(words)
        await until(lambda: not proxy.lines[0].open)
        assert await ask(store, a_plan(), a_plan()) == [True] * 2
        assert len(proxy.lines) == 2


@in_a_loop
async def test_half_a_reply_that_nobody_asked_for_is_no_answer(redis_server: RedisServer) -> None:
    """The start of something unasked spoils the next reply at most: an error, and another connection."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        for words in (b":1", b"+O", b"$3\r\nab"):
            assert await ask(store, a_plan()) == [True]
            proxy.lines[-1].say(words)
            await asyncio.sleep(0.01)
            assert (await ask(store, a_plan(), timeout=0.2))[0] in ("connection", "reply", "timeout")
            await until(lambda: not proxy.lines[-1].open)
        assert await ask(store, a_plan()) == [True]


@in_a_loop
async def test_messages_of_resp3_are_passed_over(redis_server: RedisServer) -> None:
    """What RESP3 lets a server say out of turn is no reply, whether somebody waits or nobody."""
    message = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n"
    async with Proxy(redis_server) as proxy, store_at(f"{proxy.url}?protocol=3") as store:
        await ask(store, a_plan())
        proxy.lines[0].say(message * 3)
        known = len(proxy.calls)
        for number in range(2):
            proxy.hold()
            requests = await turns(store, [a_plan()], [a_plan()])
            await proxy.called(known + 2 * number + 2)
            proxy.lines[0].say(message)
            proxy.release(1)
            await until(requests[0].done)
            proxy.lines[0].say(message[:9])
            await asyncio.sleep(0.01)
            proxy.lines[0].say(message[9:])
            proxy.release()
            assert await ends(requests) == [True] * 2
        assert len(proxy.lines) == 1


@pytest.mark.parametrize("limit", [5, 12, 200])
@in_a_loop
async def test_many_calls_find_the_script_unknown(own_redis: RedisServer, limit: int) -> None:
    """When Redis has forgotten the script, all calls on their way and all that come are decided, in order, and once."""
    async with Proxy(own_redis) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        with own_redis.client() as client:
            client.script_flush()
        proxy.hold()
        known, plan = len(proxy.calls), a_plan(f"{limit}/day")
        requests = await turns(store, *[[plan] * 3] * 6)
        await proxy.called(known + 6)
        for _ in range(6):
            proxy.release(1)
            requests += await turns(store, [plan] * 2)
        proxy.release()
        assert await ends(requests) == [True] * min(limit, 30) + [False] * max(0, 30 - limit)
        assert await used(store, plan.charges[0].key, f"{limit}/day") == min(limit, 30)


@in_a_loop
async def test_each_rules_policy_decides_for_its_own_requests(redis_server: RedisServer) -> None:
    """When a call fails that several requests share, each gets what its own rule says about failures."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["limitgate"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    policies = ("closed", "open", "local")
    rules = [Rule(name, "5/day", path=f"/{name}", on_error=name) for name in policies]
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        gate = LimitGate(app, rules=rules, store=store, timeout=PATIENT, headers=["x-ratelimit"], key_prefix=uuid4().hex)
        await ask(store, a_plan())
        known = len(proxy.calls)
        proxy.instead[known] = READ_ONLY
        closed, free, local = await asyncio.gather(*[asgi_reply(gate, f"/{name}") for name in policies])
        assert proxy.sizes[known:] == [3]
        assert (closed.status, closed.rate) == (503, {})
        assert (free.status, free.rate, free.body) == (200, {}, b"hello")
        assert (local.status, local.rate["x-ratelimit-remaining"]) == (200, "4")
        assert [(decision.allowed, decision.degraded) for decision in seen] == [(True, True)] * 2
        replies = await asyncio.gather(*[asgi_reply(gate, f"/{name}") for name in policies])
        assert [reply.rate["x-ratelimit-remaining"] for reply in replies] == ["4"] * 3
        assert not any(decision.degraded for decision in seen[2:])


# --- event loops and connections --------------------------------------------------------------------------------------


def test_loops_in_several_threads_share_a_store(own_redis: RedisServer) -> None:
    """Event loops in threads of their own batch on one store at a time, each on a connection of its own."""
    store, plan = AsyncRedisStore(own_redis.url, local_refusals=False), a_plan("500/day")

    @in_a_loop
    async def crowd() -> None:
        for _ in range(5):
            answers.extend(await ask(store, *[plan] * 50))
        await store.aclose()

    answers: list[Any] = []
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(crowd) for _ in range(4)]:
            done.result()
    assert sorted(answers) == [False] * 500 + [True] * 500
    assert len(store._loops) == 0


def test_a_loop_that_ends_takes_its_connection_along(own_redis: RedisServer) -> None:
    """A loop may end without closing the store: nothing warns, no connection stays, and nothing is kept in memory."""
    store = AsyncRedisStore(own_redis.url)

    @in_a_loop
    async def visit() -> None:
        assert await ask(store, a_plan(), a_plan()) == [True] * 2

    for _ in range(10):
        visit()
        deadline = time.monotonic() + PATIENT
        while visitors(own_redis):
            assert time.monotonic() < deadline
    assert len(store._loops) <= 1, "loops that have ended are still remembered"


@in_a_loop
async def test_closing_fails_what_still_waits(redis_server: RedisServer) -> None:
    """Requests that fly, that are queued or that wait for a connection fail when the store is closed; it can be used again."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        connecting = await turns(store, [a_plan()])
        await store.aclose()
        assert await ends(connecting) == ["connection"]
        await ask(store, a_plan())
        proxy.hold()
        requests = await turns(store, *[[a_plan()]] * (MAX_FLYING + 3))
        await store.aclose()
        assert await ends(requests) == ["connection"] * (MAX_FLYING + 3)
        proxy.release()
        assert await ask(store, a_plan()) == [True]


@in_a_loop
async def test_a_connection_that_ends_as_soon_as_it_is_made(redis_server: RedisServer) -> None:
    """A server that hangs up right after the handshake costs nobody a timeout."""

    async def polite(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = b""
        while b"LIB-VER" not in heard:
            heard += await reader.read(2**16)
        visits.append(writer)
        writer.write(b"+OK\r\n" * 2)
        writer.close()

    visits: list[Any] = []
    server = await asyncio.start_server(polite, "127.0.0.1", 0)
    async with store_at(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}?protocol=2") as store:
        begun = time.monotonic()
        assert await ask(store, a_plan()) == ["connection"]
        assert time.monotonic() - begun < PATIENT / 2
        assert 1 <= len(visits) <= 2
    server.close()


# --- ways to Redis ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis that speaks TLS, wants a password and has a database 3."""
    needs(TLS)
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    make += ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(make, cwd=folder, check=True, capture_output=True)
    files = {"tls_cert_file": str(folder / "cert.pem"), "tls_key_file": str(folder / "key.pem"), "tls_auth_clients": "no"}
    server = RedisServer(tls_port=str(port), bind="127.0.0.1", **files)
    with server.client() as client:
        client.config_set("requirepass", "s3cret")
    yield f"rediss://:s3cret@127.0.0.1:{port}/3?ssl_ca_certs={folder}/cert.pem"
    server.stop()


@pytest.mark.parametrize("protocol", [2, 3])
@in_a_loop
async def test_tls_with_a_password_and_a_database(tls: str, protocol: int) -> None:
    """Through TLS, with a password and a database in the URL, everything is as without, by either protocol."""
    plan = a_plan("100/day")
    async with store_at(f"{tls}&protocol={protocol}") as store:
        assert await ends(await turns(store, *[[plan] * 70] * 3)) == [True] * 100 + [False] * 110
        assert await used(store, plan.charges[0].key, "100/day") == 100
    async with store_at(tls.replace("/3?", "/4?")) as elsewhere:
        assert await used(elsewhere, plan.charges[0].key, "100/day") == 0


@in_a_loop
async def test_tls_without_the_password(tls: str) -> None:
    """A wrong password, or a certificate that is not trusted, is a store error."""
    for url in (tls.replace("s3cret", "mistaken"), tls.partition("?")[0]):
        async with store_at(url) as store:
            assert set(await ask(store, a_plan(), a_plan())) <= {"connection", "reply"}


def test_a_loop_that_ends_takes_its_tls_connection_along(tls: str) -> None:
    """A loop may end, idle or with requests on their way, without closing a store that speaks TLS."""
    store = AsyncRedisStore(tls, local_refusals=False)

    @in_a_loop
    async def visit() -> None:
        assert await ask(store, a_plan()) == [True]

    @in_a_loop
    async def leave() -> None:
        await ask(store, a_plan())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(store.aspend(a_plan(), PATIENT), 0.000_1)
        begin(store, a_plan(), a_plan())

    for _ in range(5):
        visit()
        leave()
    assert len(store._loops) <= 1, "loops that have ended are still remembered"


@in_a_loop
async def test_closing_through_tls(tls: str) -> None:
    """Closing a store that speaks TLS fails what is on its way, and the store can be used again."""
    async with store_at(tls) as store:
        await ask(store, a_plan())
        requests = await turns(store, [a_plan()] * 2)
        await store.aclose()
        assert await ends(requests) == ["connection"] * 2
        assert await ask(store, a_plan()) == [True]


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("database", [0, 5])
@in_a_loop
async def test_both_protocols(redis_server: RedisServer, protocol: int, database: int) -> None:
    """RESP2 and RESP3 give the same answers, in any database."""
    async with Proxy(redis_server) as proxy, store_at(f"{proxy.url[:-1]}{database}?protocol={protocol}") as store:
        plan = a_plan("100/day")
        assert await ask(store, *[plan] * 150) == [True] * 100 + [False] * 50
        proxy.instead[len(proxy.calls)] = READ_ONLY
        assert await ask(store, plan) == ["reply"]
        assert await used(store, plan.charges[0].key, "100/day") == 100
    with redis_server.client() as client:
        client.select(database)
        assert client.delete(plan.charges[0].key) == 1


# --- what cannot be sent, and what could not be written ---------------------------------------------------------------


@pytest.fixture
def many() -> Plan:
    """More buckets than a call can hold."""
    (charge,) = a_plan("100000/day").charges
    return Plan(tuple([charge._replace(key=f"{charge.key}{number}", cost=number + 1) for number in range(2**16)]))


@in_a_loop
async def test_a_call_that_cannot_be_sent_fails_alone(redis_server: RedisServer, many: Plan) -> None:
    """A key that cannot be put into bytes, or too many buckets, is a store error; replies still go to those who asked."""
    async with store_at(redis_server.url) as store:
        for plan in (a_plan(key="\ud800"), many):
            await ask(store, a_plan())
            assert await ask(store, plan) == ["connection"]
            empty, full = a_plan("1/day"), a_plan("1/day")
            assert await ask(store, full, full, empty) == [True, False, True]


@in_a_loop
async def test_nobody_is_refused_for_what_could_not_be_written(own_redis: RedisServer) -> None:
    """Without memory, those who find no room only because of others in their call are not refused, neither then nor later."""
    plan, other, store = a_plan("3/day"), a_plan("1/day"), AsyncRedisStore(own_redis.url)
    await ask(store, other)
    with own_redis.client() as client:
        client.config_set("maxmemory", 1)
        asked = [plan] * 5 + [other, plan._replace(verb="peek")]
        assert await ask(store, *asked) == ["oom"] * 5 + [False, "oom"]
        client.config_set("maxmemory", 0)
    assert await ask(store, plan, plan) == [True] * 2
    await store.aclose()
