"""Budgets through the SDKs of OpenAI and Anthropic, against the scripted provider."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import aiohttp
import httpx
import httpx2
import pytest
import requests

import limitgate.aiohttp
import limitgate.httpx
import limitgate.requests
import limitgate.urllib3
from limitgate import AsyncLimiter, AsyncRedisStore, ConfigError, Limit, Limiter, MemoryStore, RedisStore, StoreError
from limitgate.httpx2 import AsyncRateLimitTransport, RateLimitTransport
from limitgate.limiter.lining import Place
from limitgate.llm import Budget, Usage
from tests.support.doors import PATIENCE, until
from tests.support.lazily import Lazily
from tests.support.provider import Act, Provider, serving
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic = Lazily("anthropic")
    openai = Lazily("openai")

QUESTION: Any = [{"role": "user", "content": "How many roads must a man walk down?"}]
ASKED = 9
SLOW = "100000/week"
"""A token drains in six seconds."""
STILL = 1_790_000_000.0
"""A time at which a provider whose clock stands still gives nothing back."""


class Client:
    """An SDK of a kind through our transport, whose calls are made alike."""

    def __init__(self, kind: str, url: str, budget: Budget, limiter: Any, **options: Any) -> None:
        self._is_async = kind == "async"
        self.runner = asyncio.Runner() if self._is_async else None
        transport, client = (
            (AsyncRateLimitTransport, httpx2.AsyncClient) if self._is_async else (RateLimitTransport, httpx2.Client)
        )
        self.limiter = limiter
        self.http: Any = client(transport=transport(budget=budget, limiter=limiter, **options))  # type: ignore[operator]
        shared: Any = {"api_key": "secret", "http_client": self.http, "max_retries": 0, "timeout": PATIENCE}
        self.openai: Any = (openai.AsyncOpenAI if self._is_async else openai.OpenAI)(base_url=f"{url}/v1", **shared)
        self.anthropic: Any = (anthropic.AsyncAnthropic if self._is_async else anthropic.Anthropic)(base_url=url, **shared)

    def run(self, answer: Any) -> Any:
        return self.runner.run(answer) if self.runner is not None else answer

    def chat(self, **options: Any) -> Any:
        return self.run(self.openai.chat.completions.create(model="m", messages=QUESTION, **options))

    def responses(self, **options: Any) -> Any:
        return self.run(self.openai.responses.create(model="m", input=QUESTION, **options))

    def messages(self, **options: Any) -> Any:
        return self.run(self.anthropic.messages.create(model="m", messages=QUESTION, **{"max_tokens": 100, **options}))

    def embeddings(self) -> Any:
        return self.run(self.openai.embeddings.create(model="m", input=QUESTION[0]["content"]))

    def read(self, stream: Any, events: int | None = None) -> int:
        """Read a stream to its end, or close it after some events; return how many there were."""

        async def read() -> int:
            many = 0
            async with stream:
                async for _ in stream:
                    many += 1
                    if many == events:
                        break
            return many

        if self.runner is not None:
            return self.runner.run(read())
        many = 0
        with stream:
            for _ in stream:
                many += 1
                if many == events:
                    break
        return many

    def used(self, key: str, *limits: Any) -> list[int]:
        windows = self.run(self.limiter.peek(key, *limits)).windows
        return [window.used for window in windows[: len(limits)]]

    def close(self) -> None:
        self.run(self.http.aclose() if self._is_async else self.http.close())
        if self.runner is not None:
            self.runner.close()


Made = Callable[..., Client]
ONCE_EACH = pytest.mark.parametrize("made", ["sync redis", "async memory"], indirect=True)
"""Each kind of client and each store once, where a test waits."""


@pytest.fixture(params=["sync memory", "async memory", "sync redis", "async redis"])
def made(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Made]:
    """Makes a client of a provider for a budget; counts under the key ``k``."""
    kind, kept = request.param.split()
    with contextlib.ExitStack() as opened:

        def make(provider: Provider, budget: Budget, **options: Any) -> Client:
            url = opened.enter_context(serving(provider))
            prefix = {"key_prefix": uuid4().hex, "timeout": 5}
            if kind == "sync":
                store: Any = MemoryStore() if kept == "memory" else RedisStore(redis_server.url)
                limiter: Any = Limiter(store, **prefix)
                opened.callback(store.close)
            else:
                store = MemoryStore() if kept == "memory" else AsyncRedisStore(redis_server.url)
                limiter = AsyncLimiter(store, **prefix)
            client = Client(kind, url, budget, limiter, **options)

            def close() -> None:
                if kind == "async":
                    client.run(store.aclose())
                client.close()

            opened.callback(close)
            return client

        yield make


def budget(**options: Any) -> Budget:
    return Budget(requests="1000/day", tokens=SLOW, key=lambda _: "k", **options)


def spent(client: Client) -> list[int]:
    return client.used("k", "1000/day", SLOW)


FORMS = ["chat", "responses", "messages"]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_costs_the_tokens_that_it_reports(made: Made, form: str) -> None:
    client = made(Provider(), budget())
    getattr(client, form)()
    assert spent(client) == [1, ASKED + 5]


def test_embeddings_cost_their_input(made: Made) -> None:
    client = made(Provider(), budget())
    client.embeddings()
    assert spent(client) == [1, ASKED]


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_costs_the_tokens_that_it_reports(made: Made, form: str) -> None:
    client = made(Provider(output=lambda _: 20), budget())
    options: Any = {"stream_options": {"include_usage": True}} if form == "chat" else {}
    client.read(getattr(client, form)(stream=True, **options))
    assert spent(client) == [1, ASKED + 20]


def test_a_stream_without_usage_costs_what_arrived(made: Made) -> None:
    client = made(Provider(output=lambda _: 20), budget())
    client.read(client.chat(stream=True))
    requests, tokens = spent(client)
    assert (requests, ASKED + 15 <= tokens <= ASKED + 25) == (1, True)


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_that_the_caller_leaves_costs_what_arrived(made: Made, form: str) -> None:
    client = made(Provider(output=lambda _: 200, between=0.01), budget())
    client.read(getattr(client, form)(stream=True), events=6)
    requests, tokens = spent(client)
    assert requests == 1
    assert ASKED < tokens < ASKED + 100


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_that_is_cut_costs_what_arrived(made: Made, form: str) -> None:
    client = made(Provider(output=lambda _: 200, script=[Act(cut_after=8)]), budget())
    with contextlib.suppress(Exception):
        client.read(getattr(client, form)(stream=True))
    requests, tokens = spent(client)
    assert requests == 1
    assert ASKED < tokens < ASKED + 100


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 529])
def test_a_failure_costs_a_request_and_no_tokens(made: Made, status: int) -> None:
    client = made(Provider(script=[Act(status=status)]), budget())
    with pytest.raises(openai.APIStatusError):
        client.chat()
    assert spent(client) == [1, 0]


def test_a_failed_connection_costs_no_tokens(made: Made) -> None:
    client = made(Provider(), budget())
    client.openai.base_url = "http://127.0.0.1:9/v1"
    with pytest.raises(openai.APIConnectionError):
        client.chat()
    assert spent(client) == [1, 0]


def test_an_estimate_is_reserved_while_the_request_is_under_way(made: Made) -> None:
    client = made(Provider(output=lambda _: 20, between=0.01), budget())
    stream = client.chat(stream=True, max_tokens=500, stream_options={"include_usage": True})
    assert spent(client) == [1, ASKED + 500]
    client.read(stream)
    assert spent(client) == [1, ASKED + 20]


def test_without_a_maximum_answers_of_the_key_are_the_estimate(made: Made) -> None:
    plan = budget()
    client = made(Provider(output=lambda _: 7), plan)
    for _ in range(20):
        client.chat()
    stream = client.chat(stream=True, stream_options={"include_usage": True})
    assert spent(client) == [21, 21 * ASKED + 21 * 7]
    client.read(stream)


def test_an_estimate_beyond_the_burst_is_cut_to_it(made: Made) -> None:
    client = made(Provider(), Budget(tokens="100/day", key=lambda _: "k"))
    client.chat(max_tokens=5_000)
    assert client.used("k", "100/day") == [ASKED + 5]


def test_a_refusal_of_the_provider_is_waited_for(made: Made) -> None:
    provider = Provider(script=[Act(status=429, fields={"retry-after": "1", "retry-after-ms": "50"})])
    client = made(provider, budget())
    assert client.chat().usage.completion_tokens == 5
    assert [call.status for call in provider.calls] == [429, 200]
    assert spent(client) == [2, ASKED + 5]


@pytest.mark.parametrize("form", FORMS)
def test_a_refusal_that_cannot_be_waited_for_reaches_the_sdk(made: Made, form: str) -> None:
    client = made(Provider(script=[Act(status=429, fields={"retry-after": "30", "retry-after-ms": None})]), budget(), timeout=1)
    error: Any = anthropic.RateLimitError if form == "messages" else openai.RateLimitError
    with pytest.raises(error) as caught:
        getattr(client, form)()
    assert caught.value.status_code == 429
    assert spent(client) == [1, 0]


@pytest.mark.parametrize("form", FORMS)
def test_a_refusal_of_the_budget_reaches_the_sdk(made: Made, form: str) -> None:
    provider = Provider()
    client = made(provider, Budget(requests="1 per 60 seconds", tokens=SLOW, key=lambda _: "k"), timeout=0)
    getattr(client, form)()
    error: Any = anthropic.RateLimitError if form == "messages" else openai.RateLimitError
    with pytest.raises(error, match="rate limited, retry in") as caught:
        getattr(client, form)()
    assert 55 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert len(provider.calls) == 1


@ONCE_EACH
def test_the_sdk_retries_after_a_refusal_of_the_budget(made: Made) -> None:
    client = made(Provider(), Budget(requests="1/second", tokens=SLOW, key=lambda _: "k"), timeout=0)
    client.chat()
    again = client.openai.with_options(max_retries=2)
    answer = client.run(again.chat.completions.create(model="m", messages=QUESTION))
    assert answer.usage.completion_tokens == 5


def test_x_should_retry_is_obeyed(made: Made) -> None:
    provider = Provider(script=[Act(status=429, fields={"retry-after-ms": "10", "x-should-retry": "false"})])
    client = made(provider, budget())
    with pytest.raises(openai.RateLimitError):
        client.chat()
    assert len(provider.calls) == 1


def test_nothing_remaining_pauses_the_key(made: Made) -> None:
    fields = {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "30s"}
    provider = Provider(limits={"tokens": (100_000, 86_400)}, script=[Act(fields=fields)])
    client = made(provider, budget(), timeout=1)
    client.chat()
    with pytest.raises(openai.RateLimitError):
        client.chat()
    assert len(provider.calls) == 1


def test_the_lower_remainder_holds(made: Made) -> None:
    """Other programs draw on the same account."""
    fields = {"x-ratelimit-remaining-tokens": "40000", "x-ratelimit-limit-tokens": "100000", "x-ratelimit-reset-tokens": "60s"}
    client = made(Provider(limits={"tokens": (100_000, 86_400)}, script=[Act(fields=fields)]), budget())
    client.chat(max_tokens=10)
    assert spent(client) == [1, pytest.approx(60_000, abs=100)]


@pytest.mark.parametrize("tokens", [-5, 1.5, "many", 10**12])
def test_absurd_usage_is_cut(made: Made, tokens: Any, caplog: pytest.LogCaptureFixture) -> None:
    usage = {"prompt_tokens": ASKED, "completion_tokens": tokens, "total_tokens": tokens}
    client = made(Provider(script=[Act(usage=usage)]), budget())
    with caplog.at_level(logging.WARNING, "limitgate.outbound"), contextlib.suppress(ValueError):
        client.run(client.openai.chat.completions.with_raw_response.create(model="m", messages=QUESTION, max_tokens=100))
    requests, used = spent(client)
    assert (requests, ASKED < used <= ASKED * 10 + 1_000) == (1, True)
    assert bool([each for each in caplog.messages if "implausible usage" in each]) is (tokens == 10**12)


def test_limits_that_the_provider_states_hold_in_every_process(made: Made) -> None:
    provider = Provider(limits={"requests": (600, 60), "tokens": (90_000, 60)}, clock=lambda: STILL)
    client = made(provider, Budget(requests="10/minute", limits="told", key=lambda _: "k"))
    client.chat()
    client.chat()
    kept = client.run(client.limiter.configuration("k told"))
    assert [str(limit) for limit in kept] == ["600/minute", "90000/minute"]
    # A new process reads them.
    other = Budget(requests="10/minute", limits="told", key=lambda _: "k", hold=None)
    reserve = other.areserve if client.runner else other.reserve
    reservation = client.run(reserve(client.limiter, {"messages": QUESTION}))
    assert [window.limit for window in reservation.decision.windows] == [600, 90_000]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_limits_that_are_told_take_one_call_a_second(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    config = MemoryStore.config
    monkeypatch.setattr(MemoryStore, "config", lambda store, request, *_: calls.append(request.key) or config(store, request))
    limiter: Any = Limiter(MemoryStore()) if kind == "sync" else AsyncLimiter(MemoryStore())
    plan = Budget(requests="10/minute", limits="told", key=lambda _: "k", hold=None)
    with asyncio.Runner() as runner:
        for _ in range(3):
            reserved = (plan.reserve if kind == "sync" else plan.areserve)(limiter, {"messages": QUESTION})
            if kind == "async":
                runner.run(reserved)
    assert len([key for key in calls if "configured" in key]) == 1


def test_a_kind_that_a_provider_adds_does_not_take_over_the_usage_of_another_one() -> None:
    """Tokens are many more than requests, which would wait for hours."""
    limiter, body = Limiter(MemoryStore(lambda: int(STILL * 1e6))), {"messages": QUESTION, "max_tokens": 50_000}
    options: Any = {"key": lambda _: "k", "hold": None, "limits": "told"}
    for _ in range(2):
        assert Budget(tokens="200000/minute", **options).reserve(limiter, body).decision.allowed
    both = Budget(requests="500/minute", tokens="200000/minute", **options).reserve(limiter, body).decision
    assert [window.used for window in both.windows] == [1, pytest.approx(150_000, abs=100)]
    three = Budget(requests="500/minute", input_tokens="9000/minute", **options).reserve(limiter, body).decision
    assert [window.used for window in three.windows] == [2, ASKED]


def test_told_limits_need_no_limits_of_their_own(made: Made) -> None:
    provider = Provider(limits={"requests": (5, 60)}, clock=lambda: STILL)
    client = made(provider, Budget(limits="told", key=lambda _: "k"), timeout=0)
    for _ in range(3):
        with contextlib.suppress(openai.RateLimitError):
            client.chat()
    kept = client.run(client.limiter.configuration("k told"))
    assert [str(limit) for limit in kept] == ["5/minute"]


def test_a_told_limit_keeps_the_burst_and_other_limits_of_ours(made: Made) -> None:
    provider = Provider(limits={"requests": (120, 60)}, clock=lambda: STILL)
    client = made(provider, Budget(requests=["60/minute burst 5", "9000/day"], limits="told", key=lambda _: "k"))
    for _ in range(2):
        client.chat()
    kept = client.run(client.limiter.configuration("k told"))
    assert [str(limit) for limit in kept] == ["120/minute"]
    other = Budget(requests=["60/minute burst 5", "8000/day"], limits="told", key=lambda _: "k", hold=None)
    reservation = client.run((other.areserve if client.runner else other.reserve)(client.limiter, {"messages": QUESTION}))
    assert [(window.limit, window.period) for window in reservation.decision.windows] == [(5, 60), (8_000, 86_400)]


def test_a_stream_is_drawn_to_what_the_provider_said_when_it_said_it(made: Made) -> None:
    """Not at the end of a stream, when more remains again."""
    fields = {"x-ratelimit-remaining-tokens": "40000", "x-ratelimit-limit-tokens": "100000", "x-ratelimit-reset-tokens": "60s"}
    client = made(Provider(limits={"tokens": (100_000, 86_400)}, script=[Act(fields=fields)]), budget())
    stream = client.chat(stream=True, max_tokens=10)
    assert spent(client) == [1, pytest.approx(60_000, abs=100)]
    client.read(stream)
    assert spent(client) == [1, pytest.approx(60_000, abs=100)]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_store_that_holds_no_more_counts_without_a_hold(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limitgate.algorithms.holds.most_entries", lambda _: 0)
    plan = Budget(tokens="1000/day", key=lambda _: "k")
    limiter: Any = Limiter(MemoryStore()) if kind == "sync" else AsyncLimiter(MemoryStore())
    with serving(Provider()) as url:
        client = Client(kind, url, plan, limiter, timeout=0)
        with pytest.raises(StoreError, match="cannot be held"):
            client.run(limiter.reserve("other", "1000/day", hold=60))
        client.chat(max_tokens=100)
        assert client.used("k", "1000/day") == [ASKED + 5]
        client.close()


def test_small_estimates_make_no_usage_absurd(made: Made) -> None:
    usage = {"prompt_tokens": 250, "completion_tokens": 900, "total_tokens": 1_150}
    client = made(Provider(output=lambda _: 1, script=[*[Act()] * 25, Act(usage=usage)]), budget())
    for _ in range(26):
        client.chat()
    assert spent(client) == [26, 25 * (ASKED + 1) + 1_150]


def test_an_implausible_limit_needs_two_answers(made: Made) -> None:
    fields = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59", "x-ratelimit-reset-requests": "1s"}
    provider = Provider(limits={"requests": (6_000, 60)}, script=[Act(), Act(fields=fields), Act(fields=fields)])
    client = made(provider, Budget(requests="6000/minute", limits="told", key=lambda _: "k"))
    for expected in (None, None, "60/minute"):
        client.chat()
        kept = client.run(client.limiter.configuration("k told"))
        assert (kept and str(kept[0])) == expected


def test_keys_are_by_host_credential_and_model(redis_server: RedisServer) -> None:
    plan = Budget(requests="10/minute", pools={"claude-opus-*": "opus"})

    def key(model: str, host: str = "h", **fields: str) -> str:
        body = b'{"model": "%s", "messages": []}' % model.encode()
        spending = plan.spending(None, body=body, host=host, field={k.replace("_", "-"): v for k, v in fields.items()}.get)
        assert spending is not None
        return spending.key

    assert key("a", authorization="Bearer x") == key("a", authorization="Bearer x")
    keys = [
        key("a"),
        key("b"),
        key("a", host="g"),
        key("a", authorization="Bearer x"),
        key("a", authorization="Bearer y"),
        key("a", x_api_key="z"),
        key("claude-opus-4"),
    ]
    assert len(set(keys)) == len(keys)
    assert key("claude-opus-4") == key("claude-opus-5")
    assert not any("Bearer" in each or each == "x" for each in keys)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_budget_without_a_client(kind: str) -> None:
    plan = Budget(requests="10/day", input_tokens="1000/day", output_tokens="500/day", key=lambda _: "k", hold=None)
    body = {"model": "m", "messages": QUESTION, "max_tokens": 100}
    limits = "10/day", "1000/day", "500/day"
    if kind == "sync":
        limiter = Limiter(MemoryStore())
        reservation = plan.reserve(limiter, body)
        assert [window.used for window in limiter.peek("k", *limits).windows] == [1, ASKED, 100]
        reservation.settle(Usage(20, 30))
        assert [window.used for window in limiter.peek("k", *limits).windows] == [1, 20, 30]
        with pytest.raises(RuntimeError), plan.reserve(limiter, body):
            raise RuntimeError
        assert [window.used for window in limiter.peek("k", *limits).windows] == [1, 20, 30]
        assert not plan.reserve(limiter, {**body, "max_tokens": 600}).decision.allowed
        return

    async def main() -> None:
        limiter = AsyncLimiter(MemoryStore())
        reservation = await plan.areserve(limiter, body)
        await reservation.settle({"prompt_tokens": 20, "completion_tokens": 30})
        assert [window.used for window in (await limiter.peek("k", *limits)).windows] == [1, 20, 30]
        with pytest.raises(RuntimeError):
            async with await plan.areserve(limiter, body):
                raise RuntimeError
        assert [window.used for window in (await limiter.peek("k", *limits)).windows] == [1, 20, 30]
        assert not (await plan.areserve(limiter, {**body, "max_tokens": 600})).decision.allowed

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_wrong_arguments_of_reserve_are_errors_and_reserve_nothing(kind: str) -> None:
    plan, body = Budget(tokens=SLOW, key=lambda _: "k"), {"messages": QUESTION}
    limiters: tuple[Any, Any] = Limiter(MemoryStore()), AsyncLimiter(MemoryStore())
    right, other = limiters if kind == "sync" else limiters[::-1]

    def reserve(*arguments: Any, **options: Any) -> Any:
        return plan.reserve(*arguments, **options) if kind == "sync" else asyncio.run(plan.areserve(*arguments, **options))

    for wrong in (other, None, "memory://"):
        with pytest.raises(TypeError, match=rf"limiter is .* expected an? {type(right).__name__}"):
            reserve(wrong, body)
    for text in ("text", None, 5, [body]):
        with pytest.raises(TypeError, match=r"body is .* expected the bytes of a request"):
            reserve(right, text)
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match=r"timeout is .* expected seconds of at least 0"):
            reserve(right, body, timeout=timeout)
    reserve(right, body, timeout=None)
    reserve(right, json.dumps(body).encode())


@pytest.mark.parametrize(("found", "reserved"), [(5, [5, 9]), ((5,), [5, 9]), ((5, 6), [5, 6]), (Usage(5, 6), [5, 6])])
def test_an_estimate_of_the_caller(found: Any, reserved: list[int]) -> None:
    budget = Budget(input_tokens="100/day", output_tokens="100/day", estimate=lambda _: found)
    decision = budget.reserve(Limiter(MemoryStore()), {"model": "m", "max_tokens": 9}).decision
    assert [window.used for window in decision.windows] == reserved


@pytest.mark.parametrize("found", [None, -1, 1.5, True, "5", (), (5, -6), (5, 6, 7), [5, 6]])
def test_an_estimate_that_is_none_is_an_error(found: Any) -> None:
    """A third number would be ignored."""
    budget = Budget(tokens="100/day", estimate=lambda _: found)
    with pytest.raises(ConfigError, match="expected input tokens, or input and output tokens"):
        budget.reserve(Limiter(MemoryStore()), {"model": "m"})


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_reservation_is_settled_once_and_tells_if_it_is_held(kind: str) -> None:
    clock = [1_790_000_000_000_000]
    store = MemoryStore(lambda: clock[0])
    plan = Budget(tokens=SLOW, key=lambda _: "k", hold=60)
    body = {"messages": QUESTION, "max_tokens": 100}

    async def main() -> None:
        limiter: Any = Limiter(store) if kind == "sync" else AsyncLimiter(store)

        async def done(result: Any) -> Any:
            return result if kind == "sync" else await result

        async def reserve() -> Any:
            return plan.reserve(limiter, body) if kind == "sync" else await plan.areserve(limiter, body)

        first = await reserve()
        assert await done(first.renew()) is True
        await done(first.settle(Usage(20, 30)))
        for _ in range(3):
            await done(first.settle(Usage(20, 30)))
            await done(first.cancel())
        assert await done(first.renew()) is False
        assert (await done(limiter.peek("k", SLOW))).windows[0].used == 50
        assert len(plan._answers.of("k")._answers) == 1
        late = await reserve()
        clock[0] += 61_000_000
        assert await done(late.renew()) is False
        # It was given back, and its real cost is owed.
        used = (await done(limiter.peek("k", SLOW))).windows[0].used
        await done(late.settle(Usage(500, 0)))
        assert (await done(limiter.peek("k", SLOW))).windows[0].used == used + 500

    asyncio.run(main())


@pytest.mark.parametrize("usage", [None, "many", {"prompt_tokens": -1}, {"tokens": 3}, 12])
def test_what_is_no_usage_is_an_error(usage: Any) -> None:
    plan = Budget(tokens=SLOW, key=lambda _: "k", hold=None)
    limiter = Limiter(MemoryStore())
    reservation = plan.reserve(limiter, {"messages": QUESTION, "max_tokens": 100})
    with pytest.raises(TypeError, match="expected the usage of a response"):
        reservation.settle(usage)
    reservation.settle(Usage(1, 1))
    assert limiter.peek("k", SLOW).windows[0].used == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a budget without limits"),
        ({"requests": "nonsense"}, "is not a limit"),
        ({"tokens": "20 at once"}, r"tokens: .* expected a limit per time"),
        ({"requests": Limit("5/day", algorithm="fixed_window")}, "can't book turns"),
        ({"requests": 500}, "requests: 500 is not a limit"),
        ({"requests": "5/minute", "hold": 0}, "hold is 0"),
        ({"requests": "5/minute", "hold": "2 days"}, "hold is '2 days'"),
        ({"requests": "5/minute", "limits": "heard"}, "expected 'given' or 'told'"),
        ({"requests": "5/minute", "key": "k"}, "key is 'k', expected a callable"),
        ({"requests": "5/minute", "pools": ["a"]}, "expected names by pattern"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Budget(**options)


def test_a_budget_stands_in_place_of_limits() -> None:
    with pytest.raises(ConfigError, match="expected the limits in the budget"):
        RateLimitTransport("5/second", budget=Budget(requests="5/minute"))
    with pytest.raises(ConfigError, match="expected a limitgate"):
        RateLimitTransport(budget="5/minute")
    with pytest.raises(ConfigError, match="both strict and a budget are given"):
        RateLimitTransport(budget=Budget(requests="5/minute"), strict=True)


def test_repeatable_is_obeyed(made: Made) -> None:
    provider = Provider(script=[Act(status=429, fields={"retry-after-ms": "10"})])
    client = made(provider, budget(), repeatable=lambda _: False)
    with pytest.raises(openai.RateLimitError):
        client.chat()
    assert len(provider.calls) == 1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("library", ["httpx", "requests", "urllib3", "aiohttp"])
def test_other_clients_take_budgets(library: str, *, streams: bool) -> None:
    body = {"model": "m", "messages": QUESTION, "stream": streams, "stream_options": {"include_usage": True}, "max_tokens": 500}
    with serving(Provider(output=lambda _: 20)) as url:
        assert USES[library](f"{url}/v1/chat/completions", json.dumps(body).encode(), budget()) == [1, ASKED + 20]


HEADERS = {"content-type": "application/json", "authorization": "Bearer x"}


def _left(limiter: Limiter) -> list[int]:
    return [window.used for window in limiter.peek("k", "1000/day", SLOW).windows]


def _by_httpx(url: str, body: bytes, plan: Budget) -> list[int]:
    limiter = Limiter(MemoryStore())
    with httpx.Client(transport=limitgate.httpx.RateLimitTransport(budget=plan, limiter=limiter)) as client:
        assert b"abc" in client.post(url, content=body, headers=HEADERS).content
    return _left(limiter)


def _by_requests(url: str, body: bytes, plan: Budget) -> list[int]:
    limiter = Limiter(MemoryStore())
    with requests.Session() as session:
        session.mount("http://", limitgate.requests.RateLimitAdapter(budget=plan, limiter=limiter))
        response = session.post(url, data=body, headers=HEADERS, stream=True)
        assert _left(limiter) == [1, ASKED + 500]
        assert b"abc" in b"".join(response.iter_content(7))
    return _left(limiter)


def _by_urllib3(url: str, body: bytes, plan: Budget) -> list[int]:
    limiter = Limiter(MemoryStore())
    with limitgate.urllib3.RateLimitPoolManager(budget=plan, limiter=limiter) as manager:
        assert b"abc" in manager.request("POST", url, body=body, headers=HEADERS).data
    return _left(limiter)


def _by_aiohttp(url: str, body: bytes, plan: Budget) -> list[int]:
    async def main() -> list[int]:
        limiter = AsyncLimiter(MemoryStore())
        middleware = limitgate.aiohttp.RateLimitMiddleware(budget=plan, limiter=limiter)
        async with aiohttp.ClientSession(middlewares=[middleware]) as session:
            async with session.post(url, data=body, headers=HEADERS) as response:
                assert b"abc" in await response.read()
            first = [window.used for window in (await limiter.peek("k", "1000/day", SLOW)).windows]
            await limiter.reset("k", "1000/day", SLOW)
            async with session.post(url, data=body, headers=HEADERS) as response:
                assert b"abc" in b"".join([line async for line in response.content])
            second = [window.used for window in (await limiter.peek("k", "1000/day", SLOW)).windows]
            await limiter.reset("k", "1000/day", SLOW)
            # Left without reading: the rest may have arrived.
            async with session.post(url, data=body, headers=HEADERS):
                pass
            await asyncio.sleep(0.05)
            third = [window.used for window in (await limiter.peek("k", "1000/day", SLOW)).windows]
            assert ASKED <= third[1] <= ASKED + 20
        assert first == second
        return first

    return asyncio.run(main())


USES = {"httpx": _by_httpx, "requests": _by_requests, "urllib3": _by_urllib3, "aiohttp": _by_aiohttp}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_small_tenant_does_not_wait_for_a_large_one(kind: str) -> None:
    """200 requests of one tenant and 5 of another, under 100 requests per second."""
    plan = Budget(requests="100/second burst 1", key=lambda _: "k", share=lambda body: body["user"], hold=None)
    bodies = [{"user": "large"}] * 60 + [{"user": "small"}] * 5
    order: list[str] = []
    if kind == "async":

        async def main() -> None:
            limiter = AsyncLimiter(MemoryStore())

            async def one(body: dict[str, str]) -> None:
                assert (await plan.areserve(limiter, body, timeout=PATIENCE)).decision.allowed
                order.append(body["user"])

            await asyncio.gather(*map(one, bodies))

        asyncio.run(main())
    else:
        limiter, gate = Limiter(MemoryStore()), threading.Barrier(len(bodies))

        def one(body: dict[str, str]) -> None:
            gate.wait()
            assert plan.reserve(limiter, body, timeout=PATIENCE).decision.allowed
            order.append(body["user"])

        with ThreadPoolExecutor(len(bodies)) as pool:
            list(pool.map(one, bodies))
    assert len(order) == len(bodies)
    # Threads begin in any order.
    assert max(place for place, user in enumerate(order) if user == "small") < 35


@pytest.mark.parametrize(("kept", "hold"), [("memory", None), ("redis", "2m"), ("redis", None), ("cluster", "2m")])
def test_tenants_take_turns_across_processes(
    kept: str, hold: str | None, redis_server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """As many budgets and limiters as there are processes; the small tenant is in one of them."""
    bodies = [[{"user": "large"}] * 12, [{"user": "large"}] * 12, [*[{"user": "large"}] * 12, *[{"user": "small"}] * 5]]
    order: list[str] = []

    async def main() -> None:
        shared, prefix = MemoryStore(), uuid4().hex
        url = redis_server.url if kept == "redis" else request.getfixturevalue("redis_cluster").url if kept == "cluster" else ""

        async def process(bodies: list[dict[str, str]]) -> None:
            limiter = AsyncLimiter(url or shared, key_prefix=prefix, timeout=5)
            plan = Budget(requests="20/second burst 1", key=lambda _: "k", share=lambda body: body["user"], hold=hold)

            async def one(body: dict[str, str]) -> None:
                assert (await plan.areserve(limiter, body, timeout=PATIENCE)).decision.allowed
                order.append(body["user"])

            await asyncio.gather(*map(one, bodies))
            await limiter.aclose()

        await asyncio.gather(*map(process, bodies))

    asyncio.run(main())
    assert len(order) == 41
    # By turns of processes it would be the last one of about 30.
    assert max(place for place, user in enumerate(order) if user == "small") < 20


@ONCE_EACH
def test_a_refusal_of_the_provider_empties_the_bucket(made: Made) -> None:
    """The provider has less room than its limit says, so that requests pass at the rate of the limit from then on."""
    provider = Provider(script=[Act(), Act(status=429, fields={"retry-after-ms": "1"})])
    client = made(provider, Budget(tokens="600/minute", requests="1000/day", key=lambda _: "k"), timeout=PATIENCE)
    client.chat(max_tokens=50)
    assert client.used("k", "600/minute")[0] < 100
    client.chat(max_tokens=1)
    assert client.used("k", "600/minute")[0] > 550
    # A day is too long to be guilty without a word of the provider.
    assert client.used("k", "1000/day")[0] == 3
    assert [call.status for call in provider.calls] == [200, 429, 200]


def test_a_refusal_with_room_left_empties_no_bucket(made: Made) -> None:
    plenty = {"retry-after-ms": "1", "x-ratelimit-limit-tokens": "600", "x-ratelimit-remaining-tokens": "500"}
    provider = Provider(script=[Act(status=429, fields={**plenty, "x-ratelimit-reset-tokens": "10s"})])
    client = made(provider, Budget(tokens="600/minute", key=lambda _: "k"), timeout=PATIENCE)
    client.chat(max_tokens=1)
    assert client.used("k", "600/minute")[0] <= 100 + ASKED + 5


def test_a_tenant_that_is_no_text_is_an_error() -> None:
    plan = Budget(requests="5/minute", key=lambda _: "k", share=lambda _: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="share returned None, expected text"):
        plan.reserve(Limiter(MemoryStore()), {})


class Answering(httpx2.AsyncBaseTransport):
    """Answers in several steps, each of which may be the last one of a task that is cancelled."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        for _ in range(3):
            await asyncio.sleep(0)

        async def body() -> AsyncIterator[bytes]:
            for event in range(3):
                await asyncio.sleep(0)
                yield b'data: {"choices": [{"delta": {"content": "abcd"}}], "id": %d}\n\n' % event
            yield b'data: {"usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'

        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body(), request=request)


@pytest.mark.parametrize("wait", [False, True])
def test_a_request_that_is_cancelled_at_any_step_leaves_no_reservation(*, wait: bool) -> None:
    ends = set()

    async def ask(steps: int) -> bool:
        limiter = AsyncLimiter(MemoryStore())
        plan = Budget(tokens=SLOW, requests="1 per 2 seconds burst 1" if wait else "100/hour", key=lambda _: "k")
        transport = AsyncRateLimitTransport(budget=plan, limiter=limiter, transport=Answering())
        async with httpx2.AsyncClient(transport=transport) as client:
            if wait:
                await limiter.hit("k", "1 per 2 seconds burst 1")
            task = asyncio.create_task(client.post("http://h/", json={"messages": QUESTION, "max_tokens": 500}))
            for _ in range(steps):
                await asyncio.sleep(0)
            was_over = task.done()
            task.cancel()
            await asyncio.wait([task])
            for _ in range(20):
                await asyncio.sleep(0)
            used = (await limiter.peek("k", SLOW)).windows[0].used
            held = (await limiter.reserve("k", SLOW, cost=0, hold=60)).decision
            assert held.allowed
            # Given back up to a microsecond, or the input as estimated and the output that has arrived.
            assert used <= 1 or ASKED <= used <= ASKED + 10
            ends.add(used if used > 1 else 0)
            return was_over

    async def main() -> None:
        for steps in range(30 if wait else 400):
            if await ask(steps):
                break
        else:
            assert wait

    asyncio.run(main())
    assert ends == {0} if wait else len(ends) >= 3, ends


def waiting_in(limiter: Limiter, key: str) -> int:
    """The requests that wait in the line of a key."""
    place = Place(limiter, key, "", (0, 0), 60)
    place.join()
    state: Any = place.leave(is_taken=False)
    return state.waiting


def test_a_request_that_waits_meets_a_pause_and_has_reserved_nothing() -> None:
    limiter = Limiter(MemoryStore())
    plan = Budget(requests="1 per 2 seconds burst 1", tokens=SLOW, key=lambda _: "k")
    with serving(Provider()) as url, ThreadPoolExecutor(1) as pool:
        client = Client("sync", url, plan, limiter, timeout=5)
        client.chat()
        waiting = pool.submit(client.chat, max_tokens=500)
        until(lambda: waiting_in(limiter, "k") > 0)
        limiter.ban("k", 60)
        with pytest.raises(openai.RateLimitError):
            waiting.result()
        assert waiting_in(limiter, "k") == 0
        # Tokens drain meanwhile.
        assert client.used("k", SLOW)[0] <= ASKED + 5
        client.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_response_that_is_read_already_is_settled(kind: str) -> None:
    answer = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 30, "total_tokens": 50}}
    mock = httpx2.MockTransport(lambda _: httpx2.Response(200, json=answer))
    limiter: Any = Limiter(MemoryStore()) if kind == "sync" else AsyncLimiter(MemoryStore())
    client = Client(kind, "http://h", budget(), limiter, transport=mock)
    client.chat()
    assert spent(client) == [1, 50]
    client.close()


def test_without_its_extra_the_package_says_what_to_install() -> None:
    code = "import sys; sys.modules['http_sf'] = None; from limitgate.llm import tokens, Usage, Budget"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert "expected: pip install 'limitgate[httpx2]'" in result.stderr


def test_budgets_can_be_pickled() -> None:
    plan = Budget(requests="5/minute", tokens=SLOW, pools={"a*": "a"}, limits="told")
    transport = RateLimitTransport(budget=pickle.loads(pickle.dumps(plan)), limiter="redis://127.0.0.1:9/0")
    again = pickle.loads(pickle.dumps(transport))
    assert isinstance(again, RateLimitTransport)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Budget(requests="5/minute", key=lambda _: "k"))


def test_a_process_that_is_killed_leaves_nothing_behind(redis_server: RedisServer) -> None:
    prefix = uuid4().hex
    code = f"""
import os, signal
from limitgate import Limiter, RedisStore
from limitgate.llm import Budget
plan = Budget(tokens="{SLOW}", key=lambda _: "k", hold=0.5)
plan.reserve(Limiter(RedisStore({redis_server.url!r}), key_prefix={prefix!r}), {{"messages": [], "max_tokens": 700}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE)
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        limiter = Limiter(store, key_prefix=prefix, timeout=5)
        plan = Budget(tokens=SLOW, key=lambda _: "k", hold=60)
        first = limiter.peek("k", SLOW).windows[0].used
        until = time.monotonic() + PATIENCE
        while limiter.peek("k", SLOW).windows[0].used and time.monotonic() < until:
            time.sleep(0.05)
            plan.reserve(limiter, {"messages": []}).cancel()
        assert first in (0, 700)
        assert limiter.peek("k", SLOW).windows[0].used == 0


def test_a_store_that_fails_at_the_end_is_logged_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer()
    with serving(Provider()) as url, contextlib.closing(RedisStore(server.url)) as store:
        client = Client("sync", url, budget(), Limiter(store, timeout=0.3))
        stream = client.chat(stream=True)
        server.stop()
        with caplog.at_level(logging.WARNING, "limitgate.outbound"):
            client.read(stream)
        assert [each for each in caplog.messages if "could not be settled" in each]
        client.close()


def test_a_budget_on_a_cluster(redis_cluster: RedisCluster) -> None:
    with serving(Provider()) as url, contextlib.closing(RedisStore(redis_cluster.url)) as store:
        client = Client("sync", url, budget(), Limiter(store, timeout=5, key_prefix=uuid4().hex))
        client.chat()
        client.read(client.messages(stream=True))
        assert spent(client) == [2, 2 * ASKED + 10]
        client.close()


def test_without_redis_a_budget_is_counted_in_the_process() -> None:
    provider = Provider()
    with serving(provider) as url:
        limiter = Limiter("redis://127.0.0.1:9/0", timeout=0.05)
        client = Client("sync", url, Budget(requests="2 per 60 seconds", tokens=SLOW, key=lambda _: "k"), limiter, timeout=0)
        client.chat()
        client.chat()
        with pytest.raises(openai.RateLimitError):
            client.chat()
        closed = Client("sync", url, budget(), limiter, on_error="closed")
        with pytest.raises((StoreError, openai.APIConnectionError)):
            closed.chat()
        assert len(provider.calls) == 2
        client.close()
        closed.close()
        limiter.close()
