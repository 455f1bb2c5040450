"""The clients of OpenAI and Anthropic understand the scripted provider, and what LimitGate reads is what it counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from limitgate.llm.estimate import estimate_of
from limitgate.llm.provider_fields import limit_of, told
from limitgate.llm.usage import Usage, reader_for
from tests.support.doors import PATIENCE
from tests.support.lazily import Lazily
from tests.support.provider import TOKEN, Act, Meter, Provider, go_duration, serving

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic = Lazily("anthropic")
    openai = Lazily("openai")

QUESTION: Any = [{"role": "user", "content": "How many roads must a man walk down?"}]
ASKED = 9  # 36 bytes


class Client:
    """One of the forms, by the SDK."""

    def __init__(self, url: str) -> None:
        self.http = httpx2.Client()
        options: Any = {"api_key": "secret", "http_client": self.http, "max_retries": 0, "timeout": PATIENCE}
        self.openai = openai.OpenAI(base_url=f"{url}/v1", **options)
        self.anthropic = anthropic.Anthropic(base_url=url, **options)

    def chat(self, **options: Any) -> Any:
        return self.openai.chat.completions.create(model="m", messages=QUESTION, **options)

    def responses(self, **options: Any) -> Any:
        return self.openai.responses.create(model="m", input=QUESTION, **options)

    def messages(self, **options: Any) -> Any:
        return self.anthropic.messages.create(model="m", messages=QUESTION, **{"max_tokens": 100, **options})

    def embeddings(self, **options: Any) -> Any:
        return self.openai.embeddings.create(model="m", input=QUESTION[0]["content"], **options)


@pytest.fixture
def use() -> Iterator[Callable[..., Client]]:
    """Makes clients of a provider, which is served meanwhile."""
    with contextlib.ExitStack() as opened:

        def made(provider: Provider) -> Client:
            client = Client(opened.enter_context(serving(provider)))
            opened.enter_context(client.http)
            return client

        yield made


Uses = Callable[[Provider], Client]


def test_answers(use: Uses) -> None:
    """Each form, whole."""
    client = use(Provider())
    chat, response, message, vectors = client.chat(n=2), client.responses(), client.messages(), client.embeddings()
    assert [choice.message.content for choice in chat.choices] == [TOKEN * 5] * 2
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (ASKED, 10, ASKED + 10)
    assert (response.output_text, response.status, response.usage.output_tokens) == (TOKEN * 5, "completed", 5)
    assert (message.content[0].text, message.stop_reason, message.usage.output_tokens) == (TOKEN * 5, "end_turn", 5)
    assert (len(vectors.data), vectors.usage.prompt_tokens) == (1, ASKED)


def test_answers_that_a_maximum_cuts(use: Uses) -> None:
    client = use(Provider())
    assert client.chat(max_completion_tokens=3).choices[0].finish_reason == "length"
    assert client.responses(max_output_tokens=3).incomplete_details.reason == "max_output_tokens"
    assert client.messages(max_tokens=3).usage.output_tokens == 3


def test_streams(use: Uses) -> None:
    """Each form, event by event, with usage where the form has it."""
    client = use(Provider())
    chunks = list(client.chat(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TOKEN * 5
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [5]
    assert not any(chunk.usage for chunk in client.chat(stream=True))
    events = list(client.responses(stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TOKEN * 5
    assert (events[-1].type, events[-1].response.usage.input_tokens) == ("response.completed", ASKED)
    assert list(client.responses(stream=True, max_output_tokens=2))[-1].type == "response.incomplete"
    events = list(client.messages(stream=True))
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == TOKEN * 5
    assert [event.usage.output_tokens for event in events if event.type == "message_delta"] == [5]
    with client.anthropic.messages.stream(model="m", messages=QUESTION, max_tokens=100) as stream:
        assert stream.get_final_message().usage.output_tokens == 5


@pytest.mark.parametrize("form", ["chat", "responses", "messages"])
@pytest.mark.parametrize("streams", [False, True])
def test_what_passes_is_what_was_counted(use: Uses, form: str, *, streams: bool) -> None:
    """The estimate of the body that the SDK sends, and the usage in the bytes that it receives."""
    provider = Provider()
    client = use(provider)
    seen: list[Any] = []
    client.http.event_hooks = {"request": [lambda request: seen.append((request.url.path, request.read()))]}
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if form == "chat" and streams else {}
    options[{"responses": "max_output_tokens"}.get(form, "max_tokens")] = 50
    with contextlib.ExitStack() as opened:
        answer = getattr(client, form)(stream=streams, **options)
        if streams:
            list(opened.enter_context(answer))
    path, body = seen[-1]
    assert estimate_of(body, path=path) == ("m", ASKED, 50, False)
    url = str(client.anthropic.base_url).rstrip("/") + path
    with client.http.stream("POST", url, content=body) as response:
        reader = reader_for(response.headers["content-type"])
        for chunk in response.iter_raw():
            reader.feed(chunk)
    assert reader.finish() == Usage(provider.calls[-1].input, provider.calls[-1].output) == Usage(ASKED, 5)


@pytest.mark.parametrize(
    ("style", "error"), [("openai", openai), ("azure", openai), ("groq", openai), ("anthropic", anthropic)]
)
def test_a_refusal(use: Uses, style: str, error: Any) -> None:
    """It is the SDK's error for a 429, and the fields say when there is more."""
    kinds = ("input_tokens", "output_tokens") if style == "anthropic" else ("tokens",)
    provider = Provider({"requests": (2, 60), **dict.fromkeys(kinds, (100_000, 60))}, style)
    client = use(provider)
    ask = client.messages if style == "anthropic" else client.chat
    ask()
    ask()
    with pytest.raises(error.RateLimitError) as refused:
        ask()
    response = refused.value.response
    said = told(429, response.headers.get, provider.clock())
    assert provider.refused == 1
    requests, *tokens = said.windows
    assert (requests.kind, requests.limit, requests.remaining) == ("requests", 2, 0)
    assert requests.reset_after == pytest.approx(60, abs=3)
    assert [window.kind for window in tokens] == list(kinds)
    assert all(window.remaining >= 99_000 for window in tokens)
    assert said.retry_after == pytest.approx(30, abs=3)
    assert said.exhausted == requests.reset_after


def test_limits_are_told(use: Uses) -> None:
    """OpenAI's reset gives the period. Anthropic and Groq document theirs, Azure's is unknown."""
    found = {}
    for style in ("openai", "azure", "anthropic", "groq"):
        provider = Provider({"requests": (86_400, 60), "tokens": (200_000, 60)}, style, tokens=lambda _: 7000)
        client = use(provider)
        asking = client.anthropic.messages if style == "anthropic" else client.openai.chat.completions
        raw = asking.with_raw_response.create(model="m", messages=QUESTION, max_tokens=9)
        found[style] = [
            (limit := limit_of(each)) and str(limit) for each in told(200, raw.headers.get, provider.clock()).windows
        ]
    assert found == {
        "openai": [None, "200000/minute"],  # one of 86,400 requests is less than the resolution
        "azure": [None, None],
        "anthropic": ["86400/minute", "200000/minute"],
        "groq": ["86400/day", "200000/minute"],
    }


def test_failures(use: Uses) -> None:
    provider = Provider(style="anthropic", script=[Act(529), Act(500), Act(429, fields={"x-should-retry": "false"})])
    client = use(provider)
    with pytest.raises(anthropic.APIStatusError) as overloaded:
        client.messages()
    assert (overloaded.value.status_code, overloaded.value.body["error"]["type"]) == (529, "overloaded_error")
    with pytest.raises(anthropic.InternalServerError):
        client.messages()
    with pytest.raises(anthropic.RateLimitError) as refused:
        client.messages()
    assert told(429, refused.value.response.headers.get, provider.clock()).may_retry is False
    assert client.messages().usage.output_tokens == 5


def test_a_stream_that_is_cut(use: Uses) -> None:
    """The SDK raises; the reader has what arrived."""
    client = use(Provider(script=[Act(cut_after=4), Act(cut_after=4)]))
    with pytest.raises(openai.APIConnectionError):
        list(client.chat(stream=True))
    url = f"{client.openai.base_url}chat/completions"
    reader = reader_for("text/event-stream")
    asked = {"model": "m", "messages": QUESTION, "stream": True}
    with contextlib.suppress(httpx2.RemoteProtocolError), client.http.stream("POST", url, json=asked) as response:
        for chunk in response.iter_raw():
            reader.feed(chunk)
        pytest.fail("the stream was not cut")
    assert (reader.finish(), reader.arrived, reader.settle(9)) == (None, 3, Usage(9, 3))


def test_a_stream_that_stalls(use: Uses) -> None:
    client = use(Provider(script=[Act(stall_after=2)]))
    with pytest.raises(openai.APITimeoutError):
        list(client.openai.with_options(timeout=0.2).chat.completions.create(model="m", messages=QUESTION, stream=True))


def test_a_lie(use: Uses) -> None:
    lie = {"prompt_tokens": 10**9, "completion_tokens": -1, "total_tokens": 0}
    client = use(Provider(script=[Act(usage=lie, fields={"x-ratelimit-limit-tokens": "-1"})]))
    assert client.chat().usage.completion_tokens == -1
    assert client.http.post(f"{client.openai.base_url}chat/completions", content=b"{").status_code == 400


@pytest.mark.parametrize("counting", ["fixed", "sliding", "bucket"])
def test_meters(counting: str) -> None:
    """Nothing passes above the limit, and what is refused passes after the wait."""
    meter, now = Meter(10, 60, counting), 600.0
    for _ in range(5):
        assert meter.wait(2, now) == 0
        meter.take(2, now)
        now += 1
    wait = meter.wait(2, now)
    assert wait == {"fixed": 55, "sliding": 55, "bucket": pytest.approx(7)}[counting]
    assert meter.wait(2, now + wait - 0.1) > 0
    assert meter.wait(2, now + wait + 0.001) == 0
    assert meter.used(now + 60.001) == 0 or counting == "bucket"
    assert meter.reset(now) <= 60


def test_a_maximum_is_charged_and_corrected(use: Uses) -> None:
    provider = Provider({"tokens": (1000, 3600)}, charges="maximum")
    client = use(provider)
    client.messages(max_tokens=900)
    client.messages(max_tokens=900)
    with pytest.raises(openai.RateLimitError):
        client.chat(max_tokens=990)
    assert [call.status for call in provider.calls] == [200, 200, 429]


def test_durations() -> None:
    written = {0: "0s", 0.012: "12ms", 1: "1s", 7.66: "7.66s", 60: "1m0s", 360: "6m0s", 3723: "1h2m3s", 3600.5: "1h0m0.5s"}
    assert {seconds: go_duration(seconds) for seconds in written} == written
