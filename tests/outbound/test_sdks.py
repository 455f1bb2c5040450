"""The clients of OpenAI and Anthropic through the transports for httpx2, against a service on this machine.

They are imported by those tests that need them: that takes as long as all other imports of tests together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from limitgate import RateLimited
from limitgate.httpx2 import AsyncRateLimitTransport, RateLimitTransport
from tests.support.doors import PATIENCE
from tests.support.service import Service, Told, serving

WORDS = ["one", "two", "six"]
QUESTION: Any = [{"role": "user", "content": "count"}]


def told(answer: dict[str, Any]) -> Told:
    return Told(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())


class Sdk:
    """A client of one provider, by httpx2's client and one of our transports."""

    http: Callable[..., Any] = httpx2.Client
    polite: Callable[..., Any] = RateLimitTransport
    provider: str
    base = ""
    answer: Told

    def __init__(self, url: str, *limits: str, max_retries: int = 0, **options: Any) -> None:
        http = type(self).http(transport=type(self).polite(*limits, **options))
        provider = pkgutil.resolve_name(self.provider)
        self.client = provider(
            api_key="secret", base_url=url + self.base, http_client=http, max_retries=max_retries, timeout=PATIENCE
        )

    def go(self, doing: Any) -> Any:
        return doing

    def asked(self, **options: Any) -> Any:
        """Ask the question."""
        raise NotImplementedError

    def text(self, answer: Any) -> str:
        """The text of an answer, or of a part of a stream."""
        raise NotImplementedError

    def ask(self) -> str:
        return self.text(self.go(self.asked()))

    def parts(self, between: Callable[[], Any]) -> list[str]:
        """The parts of a streamed answer, each of which is there before the next is sent."""
        with self.asked(stream=True) as stream:
            return [text for part in stream if (text := self.text(part)) and not between()]

    def refused(self) -> RateLimited:
        """Ask, and return the refusal."""
        raise NotImplementedError

    def close(self) -> None:
        self.client.close()


class OpenAI(Sdk):
    provider, base = "openai:OpenAI", "/v1"
    answer = told(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
        }
    )

    def asked(self, **options: Any) -> Any:
        return self.client.chat.completions.create(model="m", messages=QUESTION, **options)

    def text(self, answer: Any) -> str:
        choice = answer.choices[0]
        return (choice.delta if hasattr(choice, "delta") else choice.message).content or ""

    @staticmethod
    def events() -> Iterator[bytes]:
        for word in WORDS:
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            chunk["choices"] = [{"index": 0, "delta": {"content": word}}]
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def refused(self) -> RateLimited:
        """OpenAI's client leaves it alone."""
        with pytest.raises(RateLimited) as refused:
            self.ask()
        return refused.value


class Anthropic(Sdk):
    provider = "anthropic:Anthropic"
    answer = told(
        {
            "id": "1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "stop_reason": "end_turn",
            "content": [{"type": "text", "text": "hi"}],
            "usage": {"input_tokens": 1, "output_tokens": 1},
        }
    )

    def asked(self, **options: Any) -> Any:
        return self.client.messages.create(model="m", max_tokens=9, messages=QUESTION, **options)

    def text(self, answer: Any) -> str:
        if answer.type == "message":
            return answer.content[0].text
        return answer.delta.text if answer.type == "content_block_delta" else ""

    @staticmethod
    def events() -> Iterator[bytes]:
        for word in WORDS:
            event = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
            yield b"event: content_block_delta\ndata: " + json.dumps(event).encode() + b"\n\n"
        yield b'event: message_stop\ndata: {"type": "message_stop"}\n\n'

    def refused(self) -> RateLimited:
        """Anthropic's client takes whatever a transport raises for a lost connection, and keeps the cause."""
        with pytest.raises(pkgutil.resolve_name("anthropic:APIConnectionError")) as wrapped:
            self.ask()
        assert isinstance(wrapped.value.__cause__, RateLimited)
        return wrapped.value.__cause__


class Awaiting(Sdk):
    """The same in code that awaits."""

    http, polite = httpx2.AsyncClient, AsyncRateLimitTransport

    def __init__(self, *args: Any, **options: Any) -> None:
        self.runner = asyncio.Runner()
        super().__init__(*args, **options)

    def go(self, doing: Any) -> Any:
        async def finish() -> Any:
            async with asyncio.timeout(PATIENCE):
                return await doing

        return self.runner.run(finish())

    def parts(self, between: Callable[[], Any]) -> list[str]:
        async def read() -> list[str]:
            async with await self.asked(stream=True) as stream:
                return [text async for part in stream if (text := self.text(part)) and not between()]

        return self.go(read())

    def close(self) -> None:
        self.go(self.client.close())
        self.runner.close()


class AsyncOpenAI(Awaiting, OpenAI):
    provider = "openai:AsyncOpenAI"


class AsyncAnthropic(Awaiting, Anthropic):
    provider = "anthropic:AsyncAnthropic"


@pytest.fixture(params=[OpenAI, AsyncOpenAI, Anthropic, AsyncAnthropic])
def kind(request: pytest.FixtureRequest) -> type[Sdk]:
    return request.param


@pytest.fixture
def service(kind: type[Sdk]) -> Iterator[Service]:
    """A provider, which answers every question."""
    with serving() as service:
        service.script = lambda _: service.answers.pop(0) if service.answers else kind.answer
        yield service


@pytest.fixture
def use(kind: type[Sdk], service: Service) -> Iterator[Callable[..., Sdk]]:
    """Makes clients of the provider, closed after the test."""
    with contextlib.ExitStack() as opened:
        yield lambda *limits, **options: opened.enter_context(contextlib.closing(kind(service.url, *limits, **options)))


Uses = Callable[..., Sdk]
SLOW_DOWN = Told(429, {"Retry-After": "0.2"}, b'{"error": {"message": "slow down"}}')


def test_questions_wait_for_their_turn(use: Uses, service: Service) -> None:
    """Over one connection, and the answers are what they would be."""
    client, began = use("20/second burst 1"), time.monotonic()
    assert [client.ask() for _ in range(4)] == ["hi"] * 4
    assert all(each.at - began >= turn / 20 for turn, each in enumerate(service.asked))
    assert service.lines == 1


def test_a_refusal_is_waited_for(use: Uses, service: Service) -> None:
    """Where a POST may be repeated, the SDK does not learn of a 429: the transport asks again, no sooner than it may."""
    client = use(repeatable=lambda _: True)
    service.answers = [SLOW_DOWN]
    assert client.ask() == "hi"
    assert [each.method for each in service.asked] == ["POST", "POST"]
    assert service.asked[0].body == service.asked[1].body
    assert service.gaps[0] > 0.19


def test_a_refusal_that_is_not_waited_for(use: Uses, service: Service) -> None:
    """It reaches the caller, with what the provider said; and the next question waits out the pause."""
    client = use()
    service.answers = [SLOW_DOWN]
    refused = client.refused()
    assert (refused.decision.retry_after, refused.response.status_code) == (0.2, 429)
    assert refused.response.json() == {"error": {"message": "slow down"}}
    assert client.ask() == "hi"
    assert service.gaps[0] > 0.19


def test_our_own_refusal_sends_nothing(use: Uses, service: Service) -> None:
    client = use("1/hour", timeout=0)
    assert client.ask() == "hi"
    refused = client.refused()
    assert 3500 < refused.decision.retry_after <= 3600
    assert refused.response is None
    assert len(service.asked) == 1


def test_a_streamed_answer_comes_part_by_part(use: Uses, kind: type[Sdk], service: Service) -> None:
    """Each part is there before the provider has sent the next one; and a stream takes a turn as any other question."""
    read = threading.Semaphore(0)

    def slowly() -> Iterator[bytes]:
        for number, event in enumerate(kind.events()):
            assert number in {0, len(WORDS) + 1} or read.acquire(timeout=PATIENCE)
            yield event

    service.answers = [Told(200, {"Content-Type": "text/event-stream", "Connection": "close"}, slowly(), "close")]
    client = use("1/hour", timeout=0)
    assert client.parts(read.release) == WORDS
    client.refused()


def test_an_overloaded_provider_is_spared(use: Uses, service: Service) -> None:
    """As any host: what the SDK repeats by itself is refused here after a while."""
    client = use(throttle=True, max_retries=0)
    error = pkgutil.resolve_name(f"{client.provider.partition(':')[0]}:APIError")
    service.script = lambda _: Told(503, {}, b"{}")
    for _ in range(60):
        with contextlib.suppress(RateLimited, error):
            client.ask()
    assert len(service.asked) < 60
