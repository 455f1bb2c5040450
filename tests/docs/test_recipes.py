"""docs/recipes.md keeps what it promises: each of its files as it stands there, on a clock that stands still and on a Redis."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import Caller, LimitGate, Rule
from limitgate.testing import FrozenClock, frozen, reset
from tests.support import examples
from tests.support.doors import PATIENCE, PROCESS_PATIENCE, Lines, Reply, Wire, asgi_through_httpx, http_scope, wsgi_reply
from tests.support.markdown import blocks
from tests.support.redis_server import RedisServer
from tests.support.task_queues import TaskQueue, arq_job, rq_job

PAGE = "docs/recipes.md"
JSON = {"Content-Type": "application/json"}
GIVEN_TIME = "timeout=20"
"""In the place of the second that recipes give the store: a machine may be slow."""


class Kitchen(NamedTuple):
    """Where recipes are tried."""

    url: str
    folder: Path
    clock: FrozenClock | None
    """The clock of the store; None for Redis, which has its own."""

    @contextlib.contextmanager
    def recipe(self, file: str) -> Iterator[ModuleType]:
        """Import a file of the page."""
        block = next(block for block in blocks(PAGE, "python") if block.file == file)
        examples.write(block, self.folder, self.url)
        path = self.folder / file
        path.write_text(path.read_text().replace("timeout=1)", f"{GIVEN_TIME})"))
        with examples.imported(file, self.folder) as module:
            yield module


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis for the recipes, emptied before each test."""
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(params=["memory", "redis"])
def kitchen(
    request: pytest.FixtureRequest, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kitchen]:
    """A folder and an empty store."""
    monkeypatch.setenv("LIMITGATE_TIMEOUT", "20")
    if request.param == "memory":
        with frozen() as clock:
            yield Kitchen("memory://", tmp_path, clock)
            reset()
    else:
        with redis.client() as client:
            client.flushall()
        yield Kitchen(redis.url, tmp_path, None)


async def ask(app: Any, path: str, method: str = "GET", headers: Lines = (), body: object = None) -> Reply:
    """One request, with a body of JSON if there is one."""
    if body is None:
        return await asgi_through_httpx(app, path, method, headers)
    return await asgi_through_httpx(app, path, method, {**dict(headers), **JSON}, json.dumps(body).encode())


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that takes a while: a process that has just refused may do so for up to a second."""
    async with asyncio.timeout(PATIENCE):
        while not await is_so():  # noqa: ASYNC110 - it has to be asked
            await asyncio.sleep(0.01)


# --- login ------------------------------------------------------------------------------------------------------------


def test_login_counts_failures_of_an_account_however_it_is_spelled(kitchen: Kitchen) -> None:
    """Right passwords are not counted, wrong ones are, until an operator unlocks."""

    async def main(login: ModuleType) -> None:
        async def attempt(user: str, password: str) -> Reply:
            return await ask(login.app, "/login", "POST", body={"user": user, "password": password})

        async def is_let_in() -> bool:
            return (await attempt("ann", "right")).status == 200

        def by_operator(what: str) -> Any:
            return ask(login.app, f"/accounts/Ann/{what}", "POST", {"X-Operator-Token": login.OPERATOR_TOKEN})

        assert [(await attempt("ann", "right")).status for _ in range(30)] == [200] * 30
        guesses = [await attempt(user, "wrong") for user in ("ann", "Ann", " ANN ", "ann", "aNN", "ann")]
        assert [reply.status for reply in guesses] == [401] * 5 + [429]
        assert guesses[-1].json()["violated-policies"] == ["logins-by-account"]
        assert (await attempt("ann", "right")).status == 429
        assert (await attempt("bob", "right")).status == 200
        if kitchen.clock:
            kitchen.clock.advance(guesses[-1].wait)
            assert [(await attempt("ann", "wrong")).status for _ in range(2)] == [401, 429]

        assert (await ask(login.app, "/accounts/ann/unlock", "POST")).status == 403
        assert (await ask(login.app, "/accounts/ann/unlock", "POST", {"X-Operator-Token": "guessed"})).status == 403
        assert (await by_operator("unlock")).json() == {"failures left": 5}
        await until(is_let_in)
        assert (await by_operator("lock?hours=2")).status == 200
        locked = await attempt("ann", "right")
        assert locked.status == 429
        assert 2 * 3600 - 60 <= locked.wait <= 2 * 3600
        assert (await by_operator("unlock")).status == 200
        await until(is_let_in)

    with kitchen.recipe("login.py") as login:
        asyncio.run(main(login))


def test_login_counts_failures_of_an_address(kitchen: Kitchen) -> None:
    """Guesses at many accounts are as limited, and stay so when an account is unlocked."""

    async def main(login: ModuleType) -> None:
        statuses = [
            (await ask(login.app, "/login", "POST", body={"user": f"user {turn}", "password": "wrong"})).status
            for turn in range(21)
        ]
        assert statuses == [401] * 20 + [429]
        refused = await ask(login.app, "/login", "POST", body={"user": "ann", "password": "right"})
        assert refused.json()["violated-policies"] == ["logins-by-address"]

    with kitchen.recipe("login.py") as login:
        asyncio.run(main(login))


@pytest.mark.parametrize("kitchen", ["redis"], indirect=True)  # under a frozen clock, Redis is never asked
def test_login_is_closed_while_nobody_can_count(kitchen: Kitchen) -> None:
    """Without its Redis nobody guesses, and nobody logs in."""
    with kitchen._replace(url="redis://127.0.0.1:1/0").recipe("login.py") as login:
        reply = asyncio.run(ask(login.app, "/login", "POST", body={"user": "ann", "password": "right"}))
        assert reply.status == 503


# --- MCP server ---------------------------------------------------------------------------------------------------------


def test_mcp_limits_each_tool_of_each_user(kitchen: Kitchen) -> None:
    """Clients of the package raise an error with the wait; what is no call of a tool passes."""
    # Not for the other tests, which every process collects: the package takes a second to import.
    from mcp.client.session import ClientSession
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared.exceptions import MCPError

    async def calls(app: Any, name: str, *tools: str) -> list[Any]:
        headers, found = {"Authorization": f"Bearer of-{name}"}, list[Any]()
        async with (
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app), headers=headers) as http,
            streamable_http_client("http://127.0.0.1:8000/mcp", http_client=http) as (receiving, sending),
            ClientSession(receiving, sending) as session,
        ):
            await session.initialize()
            assert [tool.name for tool in (await session.list_tools()).tools] == ["search", "summarize"]
            for tool in tools:
                try:
                    found.append((await session.call_tool(tool, {"subject": "x", "book": "y"})).content[0].text)
                except MCPError as error:
                    found.append(error.error)
        return found

    async def main(app: Any) -> None:
        async with app.router.lifespan_context(app):
            # Room comes back while a busy machine takes its time, so that some more calls may pass.
            found = await calls(app, "ann", *["search"] * 26, *["summarize"] * 2)
            assert found[:20] == ["a book about x"] * 20
            assert found[26:] == ["y, in short"] * 2
            refused = next(each for each in found[20:26] if not isinstance(each, str))
            assert (refused.code, refused.message) == (-32000, "The limit 'tool' is reached.")
            assert 1 <= refused.data["retryAfterSeconds"] <= 3
            assert await calls(app, "bob", "search") == ["a book about x"]
            found = await calls(app, "ann", *[f"made up {number}" for number in range(80)])
            assert "The limit 'calls' is reached." in [getattr(each, "message", None) for each in found]

    with kitchen.recipe("library.py") as library:
        asyncio.run(main(library.asgi))


def test_mcp_batches_cost_what_they_contain(kitchen: Kitchen) -> None:
    """Else a batch would be a way around the limits, on servers that take some."""

    async def main(app: Any) -> None:
        call = {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "search", "arguments": {"subject": "x"}}}
        batch = [{**call, "id": number} for number in range(15)]

        async def post(body: object, name: str = "ann") -> Reply:
            headers = {"Authorization": f"Bearer of-{name}", "Accept": "application/json, text/event-stream"}
            return await ask(app, "/mcp", "POST", {**headers, "Host": "127.0.0.1:8000"}, body)

        async with app.router.lifespan_context(app):
            assert (await post(batch)).status == 400
            refused = await post(batch)
            assert refused.status == 429
            assert [each["id"] for each in refused.json()] == [*range(15)]
            assert {each["error"]["code"] for each in refused.json()} == {-32000}
            assert 1 <= refused.json()[0]["error"]["data"]["retryAfterSeconds"] <= 30
            # Neither is a call, so both are for the server.
            assert [(await post(body)).status for body in (5, [], {**call, "method": ["tools/call"]})] == [400] * 3
            assert (await post({**call, "id": 1}, "bob")).status == 200

    with kitchen.recipe("library.py") as library:
        asyncio.run(main(library.asgi))


# --- GraphQL batches ----------------------------------------------------------------------------------------------------


def test_graphql_batches_cost_what_they_contain(kitchen: Kitchen) -> None:
    async def main(app: Any) -> None:
        batch = [{"query": "{ me }"}] * 4
        replies = [await ask(app, "/graphql", "POST", {}, body) for body in (batch, batch, batch[:1], batch, batch[0])]
        assert [each.status for each in replies] == [200, 200, 200, 429, 200]
        assert len(replies[0].json()) == 4
        never = await ask(app, "/graphql", "POST", {}, batch * 3)
        assert never.status == 429
        assert "retry-after" not in never.headers

    with kitchen.recipe("graph.py") as graph:
        asyncio.run(main(graph.app))


# --- LLM gateway ------------------------------------------------------------------------------------------------------

COMPLETIONS = "/v1/chat/completions"
ANN, BOB = {"Authorization": "Bearer sk-ann"}, {"Authorization": "Bearer sk-bob"}
PROMPT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
USED = 110
"""Tokens of the model's answer."""


def test_gateway_charges_what_was_used(kitchen: Kitchen) -> None:
    """The estimate counts until the answer is there; the next request sees what it really took."""

    async def main(gateway: ModuleType) -> None:
        first = await ask(gateway.app, COMPLETIONS, "POST", ANN, PROMPT)
        assert first.status == 200
        assert len(first.json()["choices"][0]["message"]["content"].split()) == 100
        assert int(first.headers["x-ratelimit-remaining-tokens"]) == 10_000 - 1_000 - 2
        assert "x-ratelimit-limit" not in first.headers
        streamed = await ask(gateway.app, COMPLETIONS, "POST", ANN, {**PROMPT, "stream": True, "max_tokens": 500})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.body.count(b"\n\n") == 102
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        if kitchen.clock:
            assert int(streamed.headers["x-ratelimit-remaining-tokens"]) == 10_000 - USED - 502
            assert streamed.headers["x-ratelimit-reset-requests"] == "2s"
            assert streamed.headers["x-ratelimit-limit-requests"] == "60"
            third = await ask(gateway.app, COMPLETIONS, "POST", ANN, PROMPT)
            assert int(third.headers["x-ratelimit-remaining-tokens"]) == 10_000 - 2 * USED - 1_002
        of_bob = await ask(gateway.app, COMPLETIONS, "POST", BOB, PROMPT)
        assert of_bob.headers["x-ratelimit-limit-tokens"] == "40000"
        stranger = await ask(gateway.app, COMPLETIONS, "POST", {"Authorization": "Bearer sk-guessed"}, PROMPT)
        assert stranger.status == 401
        again = await ask(gateway.app, COMPLETIONS, "POST", {"Authorization": "Bearer sk-guessed"}, PROMPT)
        # A failed request costs no tokens.
        assert int(again.headers["x-ratelimit-remaining-tokens"]) == 10_000 - 1_002

    with kitchen.recipe("gateway.py") as gateway:
        asyncio.run(main(gateway))


def test_gateway_refuses_as_openai_does(kitchen: Kitchen) -> None:
    """The body, and the milliseconds."""

    async def main(gateway: ModuleType) -> None:
        large = {**PROMPT, "max_tokens": 50_000}
        # A full bucket is enough for a request that is larger than it.
        assert (await ask(gateway.app, COMPLETIONS, "POST", ANN, large)).status == 200
        refused = await ask(gateway.app, COMPLETIONS, "POST", ANN, large)
        assert refused.status == 429
        error = refused.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["param"], error["code"]) == ("tokens", None, "rate_limit_exceeded")
        assert "Please try again in " in error["message"]
        milliseconds = int(refused.headers["retry-after-ms"])
        assert 0 <= refused.wait * 1000 - milliseconds < 1000
        if kitchen.clock:
            kitchen.clock.advance(milliseconds / 1000)
            assert (await ask(gateway.app, COMPLETIONS, "POST", ANN, large)).status == 200

    with kitchen.recipe("gateway.py") as gateway:
        asyncio.run(main(gateway))


def test_gateway_holds_streams_to_four_at_once(kitchen: Kitchen) -> None:
    """A fifth is refused while four are under way, and not after that."""

    async def main(gateway: ModuleType) -> None:
        begun, may_end = [], asyncio.Event()

        async def slow() -> AsyncIterator[str]:
            begun.append(1)
            await may_end.wait()
            yield "data: [DONE]\n\n"

        sys.modules["model"].events = slow  # type: ignore[attr-defined]
        four = [asyncio.create_task(ask(gateway.app, COMPLETIONS, "POST", ANN, {**PROMPT, "stream": True})) for _ in range(4)]

        async def all_have_begun() -> bool:
            return len(begun) == 4

        async def there_is_room() -> bool:
            return (await ask(gateway.app, COMPLETIONS, "POST", ANN, PROMPT)).status == 200

        await until(all_have_begun)
        fifth = await ask(gateway.app, COMPLETIONS, "POST", ANN, PROMPT)
        assert fifth.status == 429
        assert fifth.json()["violated-policies"] == ["at-once"]
        assert fifth.json()["error"]["type"] == "requests"
        may_end.set()
        assert [(await each).status for each in four] == [200] * 4
        await until(there_is_room)

    with kitchen.recipe("gateway.py") as gateway:
        asyncio.run(main(gateway))


def test_gateway_charges_a_client_that_leaves_for_what_it_got(kitchen: Kitchen) -> None:
    """A stream that is broken off takes the tokens that were sent, and not the estimate."""

    async def main(gateway: ModuleType) -> None:
        async def endless() -> AsyncIterator[str]:
            while True:
                yield 'data: {"choices": [{"index": 0, "delta": {"content": "four"}}]}\n\n'
                await asyncio.sleep(0)

        sys.modules["model"].events = endless  # type: ignore[attr-defined]
        body = json.dumps({**PROMPT, "stream": True}).encode()
        wire = Wire({"type": "http.request", "body": body})
        headers = {**ANN, **JSON, "Content-Length": str(len(body))}
        call = asyncio.create_task(wire.call(gateway.app, http_scope(COMPLETIONS, "POST", headers)))
        await wire.until_sent(6)
        call.cancel()
        await asyncio.wait([call], timeout=PATIENCE)
        pieces = sum(message["type"] == "http.response.body" for message in wire.sent)
        after = await ask(gateway.app, COMPLETIONS, "POST", ANN, PROMPT)
        left = int(after.headers["x-ratelimit-remaining-tokens"])
        assert 10_000 - 1_002 - pieces - 4 <= left <= 10_000 - 1_002

    with kitchen.recipe("gateway.py") as gateway:
        asyncio.run(main(gateway))


# --- plans ------------------------------------------------------------------------------------------------------------


def of(customer: str) -> dict[str, str]:
    return {"X-API-Key": f"key-of-{customer}"}


def test_plans_come_from_the_database(kitchen: Kitchen, caplog: pytest.LogCaptureFixture) -> None:
    """Each customer has the limits of its row; a changed row holds after the next look, and finds what was used."""

    def change(limits: str | None) -> None:
        with contextlib.closing(sqlite3.connect("plans.db")) as database, database:
            database.execute("UPDATE customers SET limits = ? WHERE name = 'ann'", [limits])

    async def main(plans: ModuleType) -> None:
        async def statuses(headers: Lines, count: int) -> list[int]:
            return [(await ask(plans.app, "/v1/hello", headers=headers)).status for _ in range(count)]

        async def usage(customer: str) -> list[dict[str, int]]:
            shown: list[dict[str, int]] = (await ask(plans.app, "/usage", headers=of(customer))).json()
            return shown

        async with plans.lifespan(plans.app):
            assert await statuses(of("ann"), 4) == [200, 200, 200, 429]
            assert await usage("ann") == [{"limit": 3, "period": 60, "used": 3, "remaining": 0}]
            bob = await usage("bob")
            assert [(window["limit"], window["period"], window["used"]) for window in bob] == [(20, 1, 0), (5000, 86400, 0)]
            change('["5/minute"]')
            assert await statuses(of("ann"), 1) == [429]
            await plans.customers.refresh()
            assert [window["limit"] for window in await usage("ann")] == [5]
            if kitchen.clock:
                assert await statuses(of("ann"), 3) == [200, 200, 429]
            assert await statuses(of("nobody"), 6) == [200] * 6
            assert await statuses((), 5) == [200] * 4 + [429]

            change('["5 per fortnight"]')
            await plans.customers.refresh()
            assert await statuses(of("ann"), 1) == [200]
            assert [window["limit"] for window in await usage("ann")] == [10]
            assert [record for record in caplog.records if record.getMessage().startswith("LG026")]

            for unreadable in (None, "[]", "5/minute"):
                change(unreadable)
                caplog.clear()
                await plans.customers.refresh()
                assert [window["limit"] for window in await usage("ann")] == [10]
                assert [window["limit"] for window in await usage("bob")] == [20, 5000]
                assert "the limits of ann are unreadable" in caplog.text

    with kitchen.recipe("plans.py") as plans:
        asyncio.run(main(plans))


def test_plans_of_before_hold_while_the_database_fails(
    kitchen: Kitchen, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, and the next look that succeeds brings the plans of then."""

    async def main(plans: ModuleType) -> None:
        async def limit_of_ann() -> int:
            usage: list[dict[str, int]] = (await ask(plans.app, "/usage", headers=of("ann"))).json()
            return usage[0]["limit"]

        async def is_told() -> bool:
            return "could not be read" in caplog.text

        async def is_changed() -> bool:
            ann: Caller = plans.customers.identify(SimpleNamespace(headers={"x-api-key": "key-of-ann"}))
            return ann.limits["api"] == ("7/minute",)

        monkeypatch.setattr(plans, "REFRESH", 0.001)
        async with plans.lifespan(plans.app):
            monkeypatch.setattr(plans, "DATABASE", "/nowhere/plans.db")
            await until(is_told)
            assert await limit_of_ann() == 3
            monkeypatch.setattr(plans, "DATABASE", "plans.db")
            with contextlib.closing(sqlite3.connect("plans.db")) as database, database:
                database.execute("""UPDATE customers SET limits = '["7/minute"]'""")
            await until(is_changed)
            assert await limit_of_ann() == 7

    with kitchen.recipe("plans.py") as plans:
        asyncio.run(main(plans))


# --- background tasks -------------------------------------------------------------------------------------------------


def test_mails_leave_in_turn_and_none_is_lost(kitchen: Kitchen, capsys: pytest.CaptureFixture[str]) -> None:
    """A mail whose turn is far away goes back until it is near; then they leave 0.6 seconds apart."""
    with kitchen.recipe("mails.py") as mails:
        tasks = mails.queue.queue = TaskQueue(kitchen.clock)
        mails.limiter.ban("mails", 300)
        for number in range(8 if kitchen.clock else 2):
            mails.send_mail.delay(f"user {number}")
        tasks.run_one()
        assert 2 < tasks.countdowns[0] <= 300
        if kitchen.clock is None:
            mails.limiter.pardon("mails")
        began = kitchen.clock.now if kitchen.clock else 0
        tasks.run()
        sent = capsys.readouterr().out.splitlines()
        assert sorted(sent) == [f"a mail to user {number}" for number in range(8 if kitchen.clock else 2)]
        if kitchen.clock:
            assert tasks.countdowns == [300] * 8
            assert kitchen.clock.now - began == pytest.approx(300 + 7 * 0.6)


@pytest.mark.parametrize("kitchen", ["redis"], indirect=True)  # under a frozen clock, Redis is never asked
def test_mails_wait_for_a_store_that_fails(
    kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task finds no Redis, and is tried again."""
    with kitchen.recipe("mails.py") as mails:
        tasks = mails.queue.queue = TaskQueue(kitchen.clock)
        mails.send_mail.delay("ann")
        with monkeypatch.context() as outage:
            outage.setattr(mails, "limiter", mails.Limiter("redis://127.0.0.1:1/0"))
            tasks.run_one()
        assert capsys.readouterr().out == ""
        tasks.run()
        assert capsys.readouterr().out == "a mail to ann\n"


def test_exports_leave_in_turn_and_none_is_lost(kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose turn is far away goes back until it is near, and so does one that finds no Redis."""
    context: dict[str, Any] = {}
    tasks, results = TaskQueue(kitchen.clock), []
    number = 30 if kitchen.clock else 3
    with kitchen.recipe("exports.py") as exports, asyncio.Runner() as runner:
        runner.run(exports.startup(context))
        runner.run(context["limiter"].ban("exports", 300))
        for each in range(number):
            arq_job(tasks, runner, functools.partial(exports.export, context, f"customer {each}"), results)
        tasks.run_one()
        assert 2 < tasks.countdowns[0] <= 300
        if kitchen.clock is None:
            runner.run(context["limiter"].pardon("exports"))
            with monkeypatch.context() as outage:
                outage.setitem(context, "limiter", exports.AsyncLimiter("redis://127.0.0.1:1/0"))
                tasks.run_one()
                runner.run(context["limiter"].aclose())
            assert tasks.countdowns[1:] == [10]
        began = kitchen.clock.now if kitchen.clock else 0
        tasks.run()
        runner.run(exports.shutdown(context))
        assert sorted(results) == sorted(f"an export for customer {each}" for each in range(number))
        if kitchen.clock:
            assert kitchen.clock.now - began == pytest.approx(300 + 0.1 * (number - 1))


def test_reports_come_back(kitchen: Kitchen) -> None:
    """A job that is early asks to come back after whole seconds; nobody else waits for it."""
    with kitchen.recipe("reports.py") as reports:
        tasks, results = TaskQueue(kitchen.clock), []
        reports.limiter.ban("reports:ann", 100.5)
        for _ in range(3 if kitchen.clock else 1):
            rq_job(tasks, reports.build_report, "ann", results=results)
        rq_job(tasks, reports.build_report, "bob", results=results)
        tasks.run_one()
        assert 2 < tasks.countdowns[0] <= 101
        if kitchen.clock is None:
            reports.limiter.pardon("reports:ann")
        tasks.run()
        assert results.count("a report for ann") == (3 if kitchen.clock else 1)
        assert results.count("a report for bob") == 1


# --- office and scraper -----------------------------------------------------------------------------------------------


def test_office_and_scraper(kitchen: Kitchen) -> None:
    """Who comes from where, and what a client makes up."""
    with kitchen.recipe("shop.py") as shop:
        assert from_address(shop, "198.51.100.200", 9) == from_address(shop, "2001:db8:1:9::1", 9) == [200] * 9
        assert from_address(shop, "203.0.113.9", 2) == from_address(shop, "192.0.2.127", 2) == [403, 403]
        assert from_address(shop, "203.0.113.10", 4) == [200, 200, 200, 429]
        assert from_address(shop, "203.0.113.130", 11) == [200] * 10 + [429]
        assert from_address(shop, "198.51.100.200, 203.0.113.10", 1) == [429]  # written by the client: no office
        assert wsgi_reply(shop.app, "/hello", headers={"X-Forwarded-For": "198.51.100.7"}, peer="203.0.113.10").status == 429


def from_address(shop: ModuleType, address: str, count: int) -> list[int]:
    replies = [wsgi_reply(shop.app, "/hello", headers={"X-Forwarded-For": address}) for _ in range(count)]
    return [reply.status for reply in replies]


def test_ban_after_refusals(kitchen: Kitchen) -> None:
    """The ban begins with the twentieth refusal, and the next one is twice as long."""

    async def main(guarded: ModuleType) -> None:
        replies = [await ask(guarded.app, "/api/hello") for _ in range(30)]
        assert [reply.status for reply in replies] == [200] * 5 + [429] * 25
        assert all(reply.wait <= 60 for reply in replies[5:24])
        assert all(3540 < reply.wait <= 3600 for reply in replies[24:])
        if kitchen.clock:
            kitchen.clock.advance(3600)
            replies = [await ask(guarded.app, "/api/hello") for _ in range(26)]
            assert 7140 < replies[-1].wait <= 7200

    with kitchen.recipe("guarded.py") as guarded:
        asyncio.run(main(guarded))


@pytest.mark.parametrize("kitchen", ["redis"], indirect=True)
def test_a_scraper_is_kept_out_while_it_runs(kitchen: Kitchen) -> None:
    """The command on the page, and the one that ends it; both ask unless told not to."""
    (shown,) = [block.text for block in blocks(PAGE, "sh") if block.text.startswith("limitgate ban")]

    def run(line: str) -> None:
        words = line.replace(examples.REDIS, kitchen.url).split()[1:]
        command = [sys.executable, "-m", "limitgate", *words, "-y"]
        subprocess.run(command, cwd=kitchen.folder, timeout=PROCESS_PATIENCE, check=True)

    with kitchen.recipe("shop.py") as shop:
        run(shown)
        assert from_address(shop, "203.0.113.11", 1) == [429]
        run(shown.replace("limitgate ban", "limitgate pardon").replace("--for 2h ", ""))
        deadline = time.monotonic() + PATIENCE
        while from_address(shop, "203.0.113.11", 1) != [200]:  # who has just refused may do so for up to a second
            assert time.monotonic() < deadline
            time.sleep(0.02)


# --- trial ------------------------------------------------------------------------------------------------------------


def test_trial_tells_whom_the_limit_would_refuse(kitchen: Kitchen, capsys: pytest.CaptureFixture[str]) -> None:
    """Just the requests that the limit refuses once it is in force."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    async def main(trial: ModuleType) -> None:
        in_force = Starlette(routes=[Route("/hello", lambda _: PlainTextResponse("hello"))])
        in_force.add_middleware(
            LimitGate, rules=[Rule("force", "3/hour", key=["caller"])], identify=trial.identify, store=kitchen.url
        )
        for customer, pause in [
            ("ann", 0),
            ("ann", 0),
            ("bob", 5),
            ("ann", 0),
            ("ann", 0),
            ("ann", 1200),
            ("bob", 9),
            ("ann", 0),
        ]:
            known = len(lines)
            assert (await ask(trial.app, "/hello", headers=of(customer))).status == 200
            refused = (await ask(in_force, "/hello", headers=of(customer))).status == 429
            assert [json.loads(line)["who"] for line in lines[known:]] == [customer] * refused
            if kitchen.clock:
                kitchen.clock.advance(pause)

    with kitchen.recipe("trial.py") as trial:
        trial.log.addHandler(Kept())
        trial.log.setLevel(logging.INFO)
        asyncio.run(main(trial))
        assert lines
        first = json.loads(lines[0])
        assert first.keys() == {"rules", "who", "path", "wait"}
        assert (first["rules"], first["who"], first["path"]) == (["trial"], "ann", "/hello")
        assert 0 < first["wait"] <= 1200
        trial.report(lines)
        assert capsys.readouterr().out.splitlines()[:2] == [f"{len(lines)} refused of 1 clients", f"{len(lines)} of ann"]
