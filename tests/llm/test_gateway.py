"""Unmodified clients of OpenAI and Anthropic through the gateway of docs/recipes.md, in front of a scripted provider."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from limitgate import Limiter, RedisStore, Rule
from tests.support.doors import PATIENCE, uvicorn_process
from tests.support.lazily import Lazily
from tests.support.markdown import blocks
from tests.support.provider import Act, Provider, serving
from tests.support.redis_server import RedisServer

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic = Lazily("anthropic")
    openai = Lazily("openai")

FORWARDING = """
import os

import httpx2
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

provider = httpx2.AsyncClient(base_url=os.environ["PROVIDER"])


async def forward(request):
    headers = {"content-type": "application/json", "accept-encoding": "identity", "authorization": "Bearer of-the-gateway"}
    asked = provider.build_request("POST", request.url.path, content=await request.body(), headers=headers)
    answer = await provider.send(asked, stream=True)

    async def chunks():
        try:
            async for chunk in answer.aiter_raw():
                yield chunk
        except httpx2.RemoteProtocolError:
            pass  # as many gateways do
        finally:
            await answer.aclose()

    return StreamingResponse(chunks(), answer.status_code, {"content-type": answer.headers["content-type"]})


model = Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])
"""
RULE = Rule("llm", "60/minute", ("10000/minute", "tokens"), path="/v1/**", key=["caller"])
"""As it is in the recipe."""
QUESTION: Any = [{"role": "user", "content": "How many roads must a man walk down?"}]


class Gateway:
    """The recipe on two workers and a Redis, in front of a provider."""

    def __init__(self, url: str, provider: Provider, redis: RedisServer) -> None:
        self.url, self.provider = url, provider
        self._limiter = Limiter(RedisStore(redis.url), timeout=PATIENCE)

    def openai(self, key: str = "sk-ann", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(api_key=key, base_url=f"{self.url}/v1", **{"max_retries": 0, **options})

    def anthropic(self, key: str = "sk-ann", **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(auth_token=key, base_url=self.url, **{"max_retries": 0, **options})

    def used(self, rule: Rule = RULE) -> list[int]:
        """What of each limit is used, and stays so: the limits of the tests are per day."""
        return [window.used for window in self._limiter.bucket(rule, caller="ann").peek().windows]

    def settles_at(self, *used: int, rule: Rule = RULE) -> None:
        """A stream is settled a moment before its client has the end of it, one that breaks off a moment after."""
        deadline = time.monotonic() + PATIENCE
        while self.used(rule) != [*used] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.used(rule) == [*used]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@contextlib.contextmanager
def gateway(redis: RedisServer, folder: Path, *replaced: tuple[str, str], workers: int = 2) -> Iterator[Gateway]:
    """The recipe as it stands, except for its store, its application and what is ``replaced``."""
    code = next(block.text for block in blocks("docs/recipes.md", "python") if block.file == "gateway.py")
    for before, after in (("redis://localhost:6379/0", redis.url), *replaced):
        assert before in code
        code = code.replace(before, after)
    (folder / "gateway.py").write_text(code)
    (folder / "model.py").write_text(FORWARDING)
    with redis.client() as client:
        client.flushall()
    with (
        serving(provider := Provider()) as url,
        uvicorn_process(
            "gateway:app", folder, "--app-dir", str(folder), workers=workers, PROVIDER=url, LIMITGATE_TIMEOUT="20"
        ) as served,
    ):
        yield Gateway(served, provider, redis)


PER_DAY = ('"60/minute", ("10000/minute", "tokens")', '"60/day", ("10000/day", "tokens")')
DAILY = Rule("llm", "60/day", ("10000/day", "tokens"), path="/v1/**", key=["caller"])
ANTHROPIC = (
    ('"60/minute", ("10000/minute", "tokens")', '"60/day", ("8000/day", "input_tokens"), ("2000/day", "output_tokens")'),
    ('headers=["openai"]', 'headers=["anthropic"]'),
)
OF_ANTHROPIC = Rule("llm", "60/day", ("8000/day", "input_tokens"), ("2000/day", "output_tokens"), path="/v1/**", key=["caller"])


@pytest.fixture(scope="module")
def opened(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(redis, tmp_path_factory.mktemp("gateway"), PER_DAY) as it:
        yield it


@pytest.fixture
def of_openai(opened: Gateway, redis: RedisServer) -> Gateway:
    with redis.client() as client:
        client.flushall()
    opened.provider.calls.clear()
    opened.provider.script.clear()
    opened.provider.output = lambda _: 5
    return opened


def test_chat(of_openai: Gateway) -> None:
    raw = of_openai.openai().chat.completions.with_raw_response.create(model="m", messages=QUESTION, max_tokens=100)
    assert raw.headers["x-ratelimit-limit-requests"] == "60"
    assert raw.headers["x-ratelimit-remaining-requests"] == "59"
    assert raw.headers["x-ratelimit-remaining-tokens"] == str(10_000 - 109)
    usage = raw.parse().usage
    assert usage is not None
    assert of_openai.used(DAILY) == [1, usage.total_tokens] == [1, 14]


@pytest.mark.parametrize("includes_usage", [True, False])
def test_chat_streams(of_openai: Gateway, *, includes_usage: bool) -> None:
    of_openai.provider.output = lambda _: 30
    more: Any = {"stream_options": {"include_usage": True}} if includes_usage else {}
    with of_openai.openai().chat.completions.create(model="m", messages=QUESTION, stream=True, **more) as stream:
        text = "".join([chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices])
    assert text == "abc " * 30
    # A token of the provider is four bytes, as in an estimate.
    of_openai.settles_at(1, 39, rule=DAILY)


def test_responses(of_openai: Gateway) -> None:
    client = of_openai.openai()
    answer = client.responses.create(model="m", input="How many roads must a man walk down?")
    assert answer.usage is not None
    assert of_openai.used(DAILY) == [1, answer.usage.total_tokens]
    with client.responses.create(model="m", input="How many roads must a man walk down?", stream=True) as stream:
        assert list(stream)[-1].type == "response.completed"
    of_openai.settles_at(2, 2 * answer.usage.total_tokens, rule=DAILY)


def test_embeddings(of_openai: Gateway) -> None:
    answer = of_openai.openai().embeddings.create(model="m", input="How many roads must a man walk down?")
    assert of_openai.used(DAILY) == [1, answer.usage.total_tokens] == [1, 9]


def test_a_stream_that_the_client_leaves(of_openai: Gateway) -> None:
    of_openai.provider.output, of_openai.provider.between = lambda _: 1_000, 0.002
    try:
        with of_openai.openai().chat.completions.create(model="m", messages=QUESTION, stream=True, max_tokens=9_000) as stream:
            for number, _ in enumerate(stream):
                if number == 20:
                    break
        deadline = time.monotonic() + PATIENCE
        while of_openai.used(DAILY)[1] > 2_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        # It got 19 tokens. The gateway may have sent some more.
        assert 9 + 19 <= of_openai.used(DAILY)[1] <= 1_009
    finally:
        of_openai.provider.between = 0.0


def test_a_stream_that_the_provider_cuts(of_openai: Gateway) -> None:
    of_openai.provider.output = lambda _: 100
    of_openai.provider.script.append(Act(cut_after=21))
    with of_openai.openai().chat.completions.create(model="m", messages=QUESTION, stream=True) as stream:
        assert len(list(stream)) == 21
    of_openai.settles_at(1, 9 + 20, rule=DAILY)


@pytest.mark.parametrize("status", [400, 429, 500])
def test_failures_of_the_provider_cost_no_tokens(of_openai: Gateway, status: int) -> None:
    of_openai.provider.script.append(Act(status=status))
    with pytest.raises(openai.APIStatusError) as caught:
        of_openai.openai().chat.completions.create(model="m", messages=QUESTION)
    assert caught.value.status_code == status
    of_openai.settles_at(1, 0, rule=DAILY)


def test_a_refusal_is_a_rate_limit_error_of_openai(of_openai: Gateway) -> None:
    client = of_openai.openai()
    of_openai.provider.output = lambda _: 9_000
    client.chat.completions.create(model="m", messages=QUESTION, max_tokens=9_500)
    with pytest.raises(openai.RateLimitError, match=r"Rate limit llm reached on tokens\. Please try again in") as caught:
        client.chat.completions.create(model="m", messages=QUESTION, max_tokens=9_500)
    assert (caught.value.code, caught.value.type, caught.value.status_code) == ("rate_limit_exceeded", "tokens", 429)
    assert len(of_openai.provider.calls) == 1


def test_all_workers_share_the_limit(of_openai: Gateway) -> None:
    """Of 40 requests at once, no more get in than their estimates allow, and all is settled."""
    statuses: list[int] = []

    async def main() -> None:
        async with httpx2.AsyncClient(base_url=of_openai.url, timeout=PATIENCE) as http:

            async def ask() -> None:
                body = {"model": "m", "messages": QUESTION, "max_tokens": 991}
                reply = await http.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer sk-ann"})
                statuses.append(reply.status_code)

            await asyncio.gather(*[ask() for _ in range(40)])

    asyncio.run(main())
    admitted = statuses.count(200)
    assert set(statuses) == {200, 429}
    assert len(of_openai.provider.calls) == admitted
    of_openai.settles_at(admitted, 14 * admitted, rule=DAILY)


def test_max_retries_waits_as_told(redis: RedisServer, tmp_path: Path) -> None:
    """The client comes back when there is room, so that nobody notices the refusal."""
    fast = ('"60/minute", ("10000/minute", "tokens")', '"60/second", ("1000/second", "tokens")')
    with gateway(redis, tmp_path, fast, workers=1) as it:
        it.provider.output = lambda _: 900
        client = it.openai(max_retries=2)
        for _ in range(4):
            assert client.chat.completions.create(model="m", messages=QUESTION, max_tokens=900).usage
        assert [call.status for call in it.provider.calls] == [200] * 4


# --- Anthropic --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_anthropic(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(redis, tmp_path_factory.mktemp("anthropic"), *ANTHROPIC) as it:
        it.provider.style = "anthropic"
        yield it


def test_messages(of_anthropic: Gateway, redis: RedisServer) -> None:
    with redis.client() as store:
        store.flushall()
    client = of_anthropic.anthropic()
    raw = client.messages.with_raw_response.create(model="m", messages=QUESTION, max_tokens=100)
    assert raw.headers["anthropic-ratelimit-requests-remaining"] == "59"
    assert raw.headers["anthropic-ratelimit-input-tokens-remaining"] == str(8_000 - 9)
    assert raw.headers["anthropic-ratelimit-output-tokens-remaining"] == str(2_000 - 100)
    assert raw.headers["anthropic-ratelimit-output-tokens-reset"].endswith("Z")
    assert of_anthropic.used(OF_ANTHROPIC) == [1, 9, 5]
    with client.messages.stream(model="m", messages=QUESTION, max_tokens=100) as stream:
        assert stream.get_final_text() == "abc " * 5
    of_anthropic.settles_at(2, 18, 10, rule=OF_ANTHROPIC)
    with client.messages.create(model="m", messages=QUESTION, max_tokens=100, stream=True) as events:
        assert [event.type for event in events][-1] == "message_stop"
    of_anthropic.settles_at(3, 27, 15, rule=OF_ANTHROPIC)


def test_a_refusal_is_a_rate_limit_error_of_anthropic(of_anthropic: Gateway, redis: RedisServer) -> None:
    with redis.client() as store:
        store.flushall()
    client = of_anthropic.anthropic()
    of_anthropic.provider.output = lambda _: 1_500
    client.messages.create(model="m", messages=QUESTION, max_tokens=1_500)
    with pytest.raises(anthropic.RateLimitError, match=r"Rate limit llm reached on output tokens\. Please") as caught:
        client.messages.create(model="m", messages=QUESTION, max_tokens=1_500)
    body: Any = caught.value.body
    assert body["error"]["type"] == "rate_limit_error"
    assert int(caught.value.response.headers["retry-after"]) > 60
