"""A scripted provider of language models, an ASGI application: OpenAI's chat, Responses and embeddings, Anthropic's Messages.

It counts requests and tokens per credential and model, sends rate fields in the style of a provider, and does what its script
says: fail, cut a stream, stall, lie. ``with serving(Provider(...)) as url`` serves it on loopback; the SDK of OpenAI takes
``url + "/v1"``, that of Anthropic ``url``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import uvicorn

from tests.support.doors import PATIENCE

TOKEN = "abc "
"""The text of an output token: four bytes."""
KINDS = ("requests", "tokens", "input_tokens", "output_tokens")


class Act(NamedTuple):
    """What the provider does with one request, in place of an ordinary answer."""

    status: int | None = None
    """Fail with it; a 429 is sent whatever is left."""
    delay: float = 0.0
    """Seconds before the answer."""
    cut_after: int | None = None
    """Close the connection after this many events of a stream."""
    stall_after: int | None = None
    """Send nothing after this many events, until the client disconnects."""
    fields: Mapping[str, str | None] = {}
    """Fields sent instead of the true ones; None leaves one out."""
    usage: Any = ...
    """The ``usage`` of the answer instead of the true one."""
    output: int | None = None
    """Tokens of the answer."""


class Call(NamedTuple):
    """A request and what became of it."""

    at: float
    path: str
    model: str
    status: int
    input: int
    output: int
    body: dict[str, Any]
    headers: dict[str, str]


class Meter:
    """Counts against ``limit`` per ``period`` seconds by a ``fixed`` or ``sliding`` window or a ``bucket``."""

    def __init__(self, limit: int, period: float, counting: str) -> None:
        self.limit, self.period, self.counting = limit, period, counting
        self._level, self._since = 0.0, -math.inf
        self._log: deque[tuple[float, int]] = deque()

    def used(self, now: float) -> float:
        if self.counting == "sliding":
            while self._log and self._log[0][0] <= now - self.period:
                self._log.popleft()
            return sum(amount for _, amount in self._log)
        if self.counting == "fixed":
            if now // self.period > self._since // self.period:
                self._level, self._since = 0.0, now
            return self._level
        self._level = max(0.0, self._level - (now - self._since) * self.limit / self.period) if self._level else 0.0
        self._since = now
        return self._level

    def take(self, amount: int, now: float) -> None:
        """Count an amount; a negative amount is a refund."""
        used = self.used(now)
        self._log.append((now, amount))
        self._level, self._since = max(0.0, used + amount), now

    def reset(self, now: float) -> float:
        """Seconds until it is full again, or until its window ends."""
        used = self.used(now)
        if self.counting == "fixed":
            return self.period - now % self.period
        if self.counting == "sliding":
            return self._log[-1][0] + self.period - now if self._log else 0.0
        return used * self.period / self.limit

    def wait(self, amount: int, now: float) -> float:
        """Seconds until an amount fits; 0 if it does."""
        over = self.used(now) + amount - self.limit
        if over <= 0:
            return 0.0
        if self.counting == "fixed":
            return self.reset(now)
        if self.counting == "bucket":
            return over * self.period / self.limit
        for at, each in self._log:
            over -= each
            if over <= 0:
                return at + self.period - now
        return self.period


@dataclass
class Provider:
    """The application. ``limits`` maps kinds, see `KINDS`, to a count and a period in seconds."""

    limits: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    style: str = "openai"
    """``openai``, ``azure``, ``anthropic`` or ``groq``."""
    counting: str = "bucket"
    charges: str = "actual"
    """``actual``: an answer is charged with its tokens at once. ``maximum``: with its maximum, corrected at its end."""
    output: Callable[[dict[str, Any]], int] = lambda _: 5
    """Output tokens that a request gets, if its maximum allows."""
    tokens: Callable[[str], int] = lambda text: max(1, len(text.encode()) // 4)
    """Tokens of an input text."""
    latency: Callable[[int], float] = lambda _: 0.0
    """Seconds before an answer of a status."""
    between: float = 0.0
    """Seconds between events of a stream."""
    script: list[Act] = field(default_factory=list)
    """What to do with the next requests."""
    clock: Callable[[], float] = time.time
    calls: list[Call] = field(default_factory=list)
    skew: float = 0.0
    """Seconds that the provider's clock is ahead."""
    _meters: dict[tuple[str, str], dict[str, Meter]] = field(default_factory=dict)

    @property
    def refused(self) -> int:
        return sum(call.status == 429 for call in self.calls)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
        raw = b""
        while (message := await receive())["type"] == "http.request":
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        act = self.script.pop(0) if self.script else Act()
        if act.delay:
            await asyncio.sleep(act.delay)
        reply = self._answer(scope["path"], headers, raw, act)
        fields = {**reply.fields, **act.fields}
        await asyncio.sleep(self.latency(reply.status))
        sent = [(name.encode(), value.encode("latin-1")) for name, value in fields.items() if value is not None]
        await send({"type": "http.response.start", "status": reply.status, "headers": sent})
        for number, chunk in enumerate(reply.chunks):
            if number == act.cut_after:
                return
            if number == act.stall_after:
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
            if number and self.between and await _leaves(receive, self.between):
                break
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        reply.settle()

    def _answer(self, path: str, headers: dict[str, str], raw: bytes, act: Act) -> _Reply:
        now = self.clock()
        kind = next((kind for end, kind in _PATHS.items() if path.endswith(end)), None)
        try:
            body = json.loads(raw)
            asked = _Asked(self, kind or "", body, act)
        except (ValueError, TypeError, AttributeError, KeyError):
            self.calls.append(Call(now, path, "", 400, 0, 0, {}, headers))
            return self._failure(400, "your request could not be read")
        meters = self._meters_of(headers, asked.model)
        charged = asked.maximum if self.charges == "maximum" and asked.maximum else asked.output
        charge = {"requests": 1, "tokens": asked.input + charged, "input_tokens": asked.input, "output_tokens": charged}
        waits = {name: meter.wait(min(charge[name], meter.limit), now) for name, meter in meters.items()}
        tightest = max(waits, key=waits.__getitem__, default="requests")
        status = act.status or (404 if kind is None else 429 if waits and waits[tightest] > 0 else 200)
        if status == 200:
            for name, meter in meters.items():
                meter.take(charge[name], now)
        spent = (asked.input, asked.output) if status == 200 else (0, 0)
        self.calls.append(Call(now, path, asked.model, status, *spent, body, headers))
        fields = self._fields(meters, now)
        if status != 200:
            return self._failure(status, tightest, fields, waits.get(tightest, 0.0))

        def settle() -> None:
            for name in ("tokens", "output_tokens"):
                if name in meters and charged != asked.output:
                    meters[name].take(asked.output - charged, self.clock())

        kind_of_body = "text/event-stream; charset=utf-8" if asked.streams else "application/json"
        return _Reply(200, {"content-type": kind_of_body, **fields}, asked.chunks(), settle)

    def _meters_of(self, headers: dict[str, str], model: str) -> dict[str, Meter]:
        credential = headers.get("authorization") or headers.get("x-api-key") or headers.get("api-key") or ""
        made = {name: Meter(*limit, self.counting) for name, limit in self.limits.items()}
        return self._meters.setdefault((credential, model), made)

    def _fields(self, meters: dict[str, Meter], now: float) -> dict[str, str]:
        fields = {"x-request-id": f"req_{len(self.calls)}"}
        if self.style == "groq":
            fields["x-groq-region"] = "us-west-1"
        fields["date"] = datetime.fromtimestamp(now + self.skew, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        for name, meter in meters.items():
            left, reset = max(0, math.floor(meter.limit - meter.used(now))), meter.reset(now)
            if self.style == "anthropic":
                prefix = f"anthropic-ratelimit-{name.replace('_', '-')}-"
                left = left if name == "requests" else min(meter.limit, round(left, -3))
                at = datetime.fromtimestamp(now + self.skew + reset, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
                fields |= {f"{prefix}limit": str(meter.limit), f"{prefix}remaining": str(left), f"{prefix}reset": at}
            else:
                written = str(math.ceil(reset)) if self.style == "azure" else go_duration(reset)
                fields[f"x-ratelimit-limit-{name}"] = str(meter.limit)
                fields[f"x-ratelimit-remaining-{name}"] = str(left)
                fields[f"x-ratelimit-reset-{name}"] = written
        return fields

    def _failure(self, status: int, why: str, fields: Mapping[str, str] = {}, wait: float = 0.0) -> _Reply:
        own = {**fields, "content-type": "application/json"}
        if status == 429:
            own["retry-after"] = str(max(1, math.ceil(wait)))
            if self.style in ("openai", "azure"):
                own["retry-after-ms"] = str(max(1, math.ceil(wait * 1000)))
            why = f"Rate limit reached on {why}. Please try again in {go_duration(wait)}."
        if self.style == "anthropic":
            kind = _ANTHROPIC_ERRORS.get(status, "api_error")
            said: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": why}, "request_id": "req_1"}
        elif self.style == "azure":
            said = {"error": {"code": str(status), "message": why}}
        else:
            code = "rate_limit_exceeded" if status == 429 else None
            said = {
                "error": {"message": why, "type": "tokens" if status == 429 else "server_error", "param": None, "code": code}
            }
        return _Reply(status, own, [json.dumps(said).encode()])


class _Reply(NamedTuple):
    status: int
    fields: Mapping[str, str]
    chunks: Sequence[bytes]
    settle: Callable[[], None] = lambda: None


_PATHS = {"/chat/completions": "chat", "/responses": "responses", "/messages": "messages", "/embeddings": "embeddings"}
_ANTHROPIC_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class _Asked:
    """A request in one of the four forms, with its answer."""

    def __init__(self, provider: Provider, kind: str, body: dict[str, Any], act: Act) -> None:
        self.kind, self.model = kind, str(body["model"])
        given = [body.get(name) for name in ("system", "instructions", "messages", "input")]
        self.input = provider.tokens("".join(_texts(given)))
        self.choices = body.get("n") or 1
        most = max([body.get(name) or 0 for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")])
        each = provider.output(body) if act.output is None else act.output
        self.is_cut = 0 < most < each
        self.each = 0 if kind == "embeddings" else most if self.is_cut else each
        self.output, self.maximum = self.each * self.choices, most * self.choices
        self.streams = bool(body.get("stream"))
        self.count = len(body["input"]) if kind == "embeddings" and isinstance(body["input"], list) else 1
        self.includes_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.usage = self._usage() if act.usage is ... else act.usage

    def _usage(self) -> dict[str, Any]:
        total = self.input + self.output
        if self.kind == "embeddings":
            return {"prompt_tokens": self.input, "total_tokens": self.input}
        if self.kind == "chat":
            return {"prompt_tokens": self.input, "completion_tokens": self.output, "total_tokens": total}
        usage: dict[str, Any] = {"input_tokens": self.input, "output_tokens": self.output}
        if self.kind == "messages":
            return {**usage, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        details = {
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {**usage, **details, "total_tokens": total}

    def chunks(self) -> list[bytes]:
        if not self.streams:
            return [json.dumps(getattr(self, f"_{self.kind}")()).encode()]
        return list(getattr(self, f"_{self.kind}_events")())

    def _embeddings(self) -> dict[str, Any]:
        data = [{"object": "embedding", "index": index, "embedding": [0.5, -0.25]} for index in range(self.count)]
        return {"object": "list", "data": data, "model": self.model, "usage": self.usage}

    # --- chat ---------------------------------------------------------------------------------------------------------

    def _chat(self) -> dict[str, Any]:
        reason = "length" if self.is_cut else "stop"
        message = {"role": "assistant", "content": TOKEN * self.each, "refusal": None}
        choices = [{"index": index, "message": message, "finish_reason": reason} for index in range(self.choices)]
        about = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1_790_000_000, "model": self.model}
        return {**about, "choices": choices, "usage": self.usage}

    def _chat_events(self) -> Iterator[bytes]:
        about = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": self.model}

        def event(choices: list[dict[str, Any]], usage: Any = None) -> bytes:
            return _event({**about, "choices": choices, **({"usage": usage} if self.includes_usage else {})})

        def choice(index: int, delta: dict[str, Any], reason: str | None = None) -> list[dict[str, Any]]:
            return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}]

        for index in range(self.choices):
            yield event(choice(index, {"role": "assistant", "content": "", "refusal": None}))
        for _ in range(self.each):
            for index in range(self.choices):
                yield event(choice(index, {"content": TOKEN}))
        for index in range(self.choices):
            yield event(choice(index, {}, "length" if self.is_cut else "stop"))
        if self.includes_usage:
            yield event([], self.usage)
        yield b"data: [DONE]\n\n"

    # --- Responses ----------------------------------------------------------------------------------------------------

    def _responses(self, status: str = "", *, is_over: bool = True) -> dict[str, Any]:
        status = status or ("incomplete" if self.is_cut else "completed")
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 1_790_000_000,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "model": self.model,
            "output": [self._item(status, TOKEN * self.each)] if is_over else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": self.usage if is_over else None,
            "metadata": {},
        }

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [{"type": "output_text", "text": text, "annotations": []}]
        return {"id": "msg_1", "type": "message", "status": status, "role": "assistant", "content": content}

    def _responses_events(self) -> Iterator[bytes]:
        number = 0

        def event(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return _event({"type": kind, "sequence_number": number, **fields}, kind)

        at: dict[str, Any] = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        whole = TOKEN * self.each
        yield event("response.created", response=self._responses("in_progress", is_over=False))
        yield event("response.output_item.added", output_index=0, item=self._item("in_progress", None))
        yield event("response.content_part.added", **at, part={"type": "output_text", "text": "", "annotations": []})
        for _ in range(self.each):
            yield event("response.output_text.delta", **at, delta=TOKEN, logprobs=[])
        yield event("response.output_text.done", **at, text=whole, logprobs=[])
        yield event("response.content_part.done", **at, part={"type": "output_text", "text": whole, "annotations": []})
        over = self._responses()
        yield event("response.output_item.done", output_index=0, item=over["output"][0])
        yield event(f"response.{over['status']}", response=over)

    # --- Messages -----------------------------------------------------------------------------------------------------

    def _messages(self) -> dict[str, Any]:
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [{"type": "text", "text": TOKEN * self.each}],
            "stop_reason": "max_tokens" if self.is_cut else "end_turn",
            "stop_sequence": None,
            "usage": self.usage,
        }

    def _messages_events(self) -> Iterator[bytes]:
        def event(kind: str, **fields: Any) -> bytes:
            return _event({"type": kind, **fields}, kind)

        over, usage = self._messages(), self.usage
        first = {**usage, "output_tokens": 1} if isinstance(usage, dict) else usage
        last = {"output_tokens": usage.get("output_tokens")} if isinstance(usage, dict) else usage
        yield event("message_start", message={**over, "content": [], "stop_reason": None, "usage": first})
        yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield event("ping")
        for _ in range(self.each):
            yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": TOKEN})
        yield event("content_block_stop", index=0)
        yield event("message_delta", delta={"stop_reason": over["stop_reason"], "stop_sequence": None}, usage=last)
        yield event("message_stop")


def _event(data: dict[str, Any], kind: str = "") -> bytes:
    written = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {kind}\n" if kind else "").encode() + f"data: {written}\n\n".encode()


def _texts(value: Any) -> Iterator[str]:
    """The texts in messages: contents, and nothing else."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        yield from _texts(value.get("content") or value.get("text"))


def go_duration(seconds: float) -> str:
    """As Go's time.Duration prints it, in whole milliseconds."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    whole, rest = divmod(milliseconds, 1000)
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{whole}.{rest:03}".rstrip("0").rstrip(".") + "s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text


async def _leaves(receive: Any, seconds: float) -> bool:
    """Whether the client disconnects within so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
            return True
    return False


@contextlib.contextmanager
def serving(provider: Provider) -> Iterator[str]:
    """Serve on a free port of loopback, on a thread; the URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(provider, log_level="critical", lifespan="off", timeout_graceful_shutdown=1, date_header=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listening.close()
