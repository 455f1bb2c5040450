"""Rules that charge tokens of language models: estimated from the body, settled by what the response reports."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import path as url
from fastapi import Depends, FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from limitgate import Caller, ConfigError, Limiter, LimitGate, LimitGateWSGI, MemoryStore, Rule, StoreError, limit, load_rules
from limitgate.fastapi import RateLimit
from limitgate.flask import LimitGate as FlaskLimitGate
from limitgate.llm import input_tokens, output_tokens, tokens
from limitgate.rules.revision import digest
from limitgate.rules.rule import RuleSet
from tests.support.clock import Clock
from tests.support.django_app import WAYS
from tests.support.doors import Wire, asgi_reply, http_scope, run_wsgi, wsgi_environ, wsgi_reply

DAY = "100000/day"
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 300}
"""100 tokens in, 300 out."""
USAGE = {"prompt_tokens": 90, "completion_tokens": 7}
CHAT = {"object": "chat.completion", "choices": [{"message": {"content": "y" * 40}}]}
JSON = {"Content-Type": "application/json"}
SSE = {"Content-Type": "text/event-stream; charset=utf-8"}
HELLO = [b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % word for word in (b"a" * 40, b"b" * 40)]
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":90,"completion_tokens":7}}\n\ndata: [DONE]\n\n'


class Answer(NamedTuple):
    """What the application answers."""

    chunks: Sequence[bytes] = (json.dumps({**CHAT, "usage": USAGE}).encode(),)
    status: int = 200
    headers: Mapping[str, str] = JSON
    breaks: bool = False
    """Raise an error after the chunks."""
    settles: int | None = None


def asgi_of(answer: Answer, bodies: list[bytes]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append((await receive())["body"])
        if answer.settles is not None:
            scope["limitgate"].settle(answer.settles)
        lines = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": lines})
        for chunk in answer.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if answer.breaks:
            raise ZeroDivisionError
        await send({"type": "http.response.body", "body": b""})

    return app


def wsgi_of(answer: Answer, bodies: list[bytes], *, as_list: bool = False, writes: bool = False) -> Any:
    def chunks() -> Iterator[bytes]:
        yield from answer.chunks
        if answer.breaks:
            raise ZeroDivisionError

    def app(environ: Any, start_response: Any) -> Any:
        bodies.append(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        if answer.settles is not None:
            environ["limitgate"].settle(answer.settles)
        write = start_response(f"{answer.status} As Told", list(answer.headers.items()))
        if writes:
            for chunk in answer.chunks:
                write(chunk)
            return []
        return list(answer.chunks) if as_list else chunks()

    return app


DOORS = ("asgi", "wsgi", "wsgi list", "wsgi write")


def used(door: str, rule: Rule, answer: Answer, body: bytes = json.dumps(QUESTION).encode(), **more: Any) -> list[int]:
    """What is used of each limit after one request."""
    store, bodies = MemoryStore(Clock()), list[bytes]()
    options: Any = {"rules": [rule], "store": store}
    path = more.pop("path", "/v1/chat/completions")
    method = more.pop("method", "POST")
    with contextlib.suppress(ZeroDivisionError):
        if door == "asgi":
            asyncio.run(asgi_reply(LimitGate(asgi_of(answer, bodies), **options), path, method, body=body, **more))
        else:
            app = wsgi_of(answer, bodies, as_list=door == "wsgi list", writes=door == "wsgi write")
            wsgi_reply(LimitGateWSGI(app, **options), path, method, body=body, **more)
    assert bodies == [body]
    return [window.used for window in Limiter(store).bucket(rule).peek().windows]


def llm(*limits: Any, **options: Any) -> Rule:
    return Rule("llm", *(limits or ("50/day", (DAY, tokens))), key=["global"], **options)


# --- what is charged --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
def test_the_usage_replaces_the_estimate(door: str) -> None:
    assert used(door, llm(), Answer()) == [1, 97]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_input_and_output_have_their_own_limits(door: str) -> None:
    rule = llm("50/day", (DAY, input_tokens), ("90000/day", output_tokens), ("200000/day", tokens))
    assert used(door, rule, Answer()) == [1, 90, 7, 97]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
@pytest.mark.parametrize(
    ("kind", "answer", "expected"),
    [
        (SSE, Answer([*HELLO, LAST], headers=SSE), 97),
        # Of a stream without usage, the estimated input and 80 bytes of output.
        (SSE, Answer([*HELLO, b"data: [DONE]\n\n"], headers=SSE), 120),
        (SSE, Answer(HELLO[:1], headers=SSE, breaks=True), 110),
        (SSE, Answer([], headers=SSE, breaks=True), 100),
        (JSON, Answer([json.dumps(CHAT).encode()]), 110),
        (JSON, Answer([b""]), 100),
    ],
    ids=["usage", "no usage", "cut", "cut at once", "json without usage", "empty"],
)
def test_what_a_response_costs(door: str, kind: Any, answer: Answer, expected: int) -> None:
    del kind
    assert used(door, llm(), answer) == [1, expected]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
def test_a_failed_request_costs_no_tokens(door: str, status: int) -> None:
    assert used(door, llm(), Answer(status=status)) == [1, 0]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_an_error_of_the_application_costs_no_tokens(door: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    def wsgi(environ: Any, start_response: Any) -> Any:
        raise ZeroDivisionError

    store, body = MemoryStore(Clock()), json.dumps(QUESTION).encode()
    with contextlib.suppress(ZeroDivisionError):
        if door == "asgi":
            asyncio.run(asgi_reply(LimitGate(app, rules=[llm()], store=store), "/", "POST", body=body))
        else:
            wsgi_reply(LimitGateWSGI(wsgi, rules=[llm()], store=store), "/", "POST", body=body)
    assert [window.used for window in Limiter(store).bucket(llm()).peek().windows] == [1, 0]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)],
)
def test_compressed_responses_are_read(door: str, encoding: str, pack: Any) -> None:
    data = pack(b"".join([*HELLO, LAST]))
    answer = Answer([data[:30], data[30:]], headers={**SSE, "Content-Encoding": encoding})
    assert used(door, llm(), answer) == [1, 97]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_unknown_encodings_cost_what_arrived(door: str) -> None:
    for encoding, data in (("br", b"z" * 400), ("gzip", b"z" * 400)):
        answer = Answer([data], headers={**JSON, "Content-Encoding": encoding})
        assert used(door, llm(), answer) == [1, 200]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_requests_without_a_body_cost_no_tokens(door: str) -> None:
    """Neither a list of models, nor a stored response whose usage was charged when it was made."""
    for method in ("GET", "HEAD"):
        answer = Answer() if method == "GET" else Answer([])
        assert used(door, llm(), answer, b"", method=method, path="/v1/responses/1") == [1, 0]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_the_application_may_settle_by_itself(door: str) -> None:
    assert used(door, llm(), Answer(settles=5)) == [1, 5]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_embeddings_have_no_output(door: str) -> None:
    body = json.dumps({"model": "m", "input": "x" * 400}).encode()
    answer = Answer([json.dumps({"data": [], "usage": {"prompt_tokens": 88, "total_tokens": 88}}).encode()])
    assert used(door, llm(), answer, body, path="/v1/embeddings") == [1, 88]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_absurd_usage_is_capped_and_logged(door: str, caplog: pytest.LogCaptureFixture) -> None:
    def reporting(**usage: Any) -> Answer:
        return Answer([json.dumps({**CHAT, "usage": {**USAGE, **usage}}).encode()])

    rule = llm("50/day", ("9000000/day", input_tokens), ("8000000/day", output_tokens))
    with caplog.at_level(logging.WARNING, "limitgate"):
        assert used(door, rule, reporting(prompt_tokens=10**9, completion_tokens=10**9)) == [1, 100_000, 10_000]
        assert "a response reported implausible usage, which was reduced to 100000 input and 10000 output tokens" in caplog.text
        # An application may add documents to a question of a few words.
        assert used(door, rule, reporting(prompt_tokens=60_000)) == [1, 60_000, 7]
    wrong: Any
    for wrong in (-1, 1.5, "9", True, [], {}):
        assert used(door, rule, reporting(completion_tokens=wrong))[2] >= 10


# --- what is estimated ------------------------------------------------------------------------------------------------


def estimated(body: object, path: str = "/", headers: Any = (), rule: Rule | None = None) -> int:
    """What is charged while the request runs."""
    data, seen = body if isinstance(body, bytes) else json.dumps(body).encode(), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["limitgate"].windows[-1].used)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    gate = LimitGate(app, rules=[rule or llm(("1000000/day", tokens))], store=MemoryStore(Clock()), body_limit=1_000_000)
    reply = asyncio.run(asgi_reply(gate, path, "POST", headers, body=data))
    return seen[0] if seen else -reply.status


def test_estimates() -> None:
    assert estimated(QUESTION) == 400
    assert estimated({**QUESTION, "n": 3}) == 1000
    assert estimated({"model": "m", "messages": QUESTION["messages"]}) == 1100
    assert estimated(b"no json, but text" * 100) == 425 + 1000
    assert estimated(gzip.compress(b"x" * 100), headers={"Content-Encoding": "gzip"}) == len(gzip.compress(b"x" * 100)) + 1000
    assert estimated(b"--x\r\n", headers={"Content-Type": "multipart/form-data; boundary=x"}) == 1600 + 1000
    assert estimated([1, 2]) > 1000


def test_clients_cannot_hide_tokens() -> None:
    """Neither behind many values, nor by a wrong type or encoding."""
    text = "x" * 40_000
    padded = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": part} for part in [""] * 9_000 + [text]]}
    assert estimated(padded) > 10_000
    for headers in ({"Content-Type": "multipart/form-data; boundary=x"}, {"Content-Encoding": "br"}):
        assert estimated({**QUESTION, "messages": [{"role": "user", "content": text}]}, headers=headers) == 10_300


@pytest.mark.parametrize("maximum", [0, -5, 1.5, "9", None, 10**400, True])
def test_odd_maxima(maximum: object) -> None:
    if maximum == 10**400:
        body = json.dumps(QUESTION).replace("300", "9" * 400).encode()
        assert estimated(body) == 1_000_000
    else:
        assert estimated({**QUESTION, "max_tokens": maximum}) == 1100


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
@pytest.mark.parametrize("burst", ["1000/day", "1000/minute burst 50"])
def test_an_estimate_above_the_burst_is_cut_to_it(door: str, burst: str) -> None:
    """Otherwise, the request could never pass. It needs a full bucket, and pays for what it used."""
    large = json.dumps({**QUESTION, "max_tokens": 50_000}).encode()
    assert used(door, llm((burst, tokens)), Answer(), large) == [97]


def test_a_large_estimate_waits_for_a_full_bucket() -> None:
    clock = Clock()
    gate = LimitGate(asgi_of(Answer(), []), rules=[llm(("1000/minute", tokens))], store=MemoryStore(clock))
    large = json.dumps({**QUESTION, "max_tokens": 50_000}).encode()
    replies = [asyncio.run(asgi_reply(gate, "/", "POST", body=large)) for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 429]
    clock.advance(replies[1].wait)
    assert asyncio.run(asgi_reply(gate, "/", "POST", body=large)).status == 200


def test_a_limit_of_zero_refuses_what_costs_nothing() -> None:
    gate = LimitGate(asgi_of(Answer(), []), rules=[llm(("0/day", tokens))], store=MemoryStore(Clock()))
    assert asyncio.run(asgi_reply(gate)).status == 429


def test_low_priority_is_cut_to_its_room() -> None:
    rule = Rule("llm", ("1000/day", tokens), key=["global"], reserve="20%")
    gate = LimitGate(
        asgi_of(Answer(), []), rules=[rule], store=MemoryStore(Clock()), identify=lambda _: Caller("batch", priority="low")
    )
    assert asyncio.run(asgi_reply(gate, "/", "POST", body=json.dumps({**QUESTION, "max_tokens": 9_000}).encode())).status == 200


def test_output_without_a_maximum_is_learned_from_answers() -> None:
    """Of each caller and model by itself."""
    body = {"model": "m", "messages": QUESTION["messages"]}
    rule = llm(("1000000/day", tokens))
    seen: list[int] = []
    answering = asgi_of(Answer(), [])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["limitgate"].windows[0].used)
        await answering(scope, receive, send)

    gate = LimitGate(app, rules=[rule], store=MemoryStore(Clock()))

    async def main() -> None:
        for _ in range(21):
            await asgi_reply(gate, "/", "POST", body=json.dumps(body).encode())
        await asgi_reply(gate, "/", "POST", body=json.dumps({**body, "model": "other"}).encode())
        await asgi_reply(gate, "/", "POST", body=json.dumps(body).encode(), peer="192.0.2.9")

    asyncio.run(main())
    assert seen[0] == 1100
    assert seen[20] == 20 * 97 + 107
    assert [each - 97 * (21 + turn) for turn, each in enumerate(seen[21:])] == [1100, 1100]


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [0, 1, 2, 100])
def test_a_client_that_leaves_pays_for_what_arrived(events: int) -> None:
    store, rule = MemoryStore(Clock()), llm()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if events:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for chunk in (HELLO * 50)[:events]:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    gate = LimitGate(app, rules=[rule], store=store)
    wire = Wire({"type": "http.request", "body": json.dumps(QUESTION).encode()}, {"type": "http.disconnect"})
    asyncio.run(wire.call(gate, http_scope("/", "POST")))
    assert [window.used for window in Limiter(store).bucket(rule).peek().windows] == [1, 100 + 10 * events]


def test_a_cancelled_request_pays_for_what_arrived() -> None:
    store, rule = MemoryStore(Clock()), llm()
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": HELLO[0], "more_body": True})
        begun.set()
        await asyncio.sleep(3600)

    async def main() -> None:
        wire = Wire({"type": "http.request", "body": json.dumps(QUESTION).encode()})
        task = asyncio.create_task(wire.call(LimitGate(app, rules=[rule], store=store), http_scope("/", "POST")))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert [window.used for window in Limiter(store).bucket(rule).peek().windows] == [1, 110]


def test_a_wsgi_server_that_closes_early() -> None:
    store, rule = MemoryStore(Clock()), llm()
    gate = LimitGateWSGI(wsgi_of(Answer([*HELLO, LAST], headers=SSE), []), rules=[rule], store=store)
    chunks: Any = gate(wsgi_environ("/", "POST", body=json.dumps(QUESTION).encode()), lambda *_: lambda _: None)
    assert next(iter(chunks)) == HELLO[0]
    chunks.close()
    assert [window.used for window in Limiter(store).bucket(rule).peek().windows] == [1, 110]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("step", [1, 7, 5_000])
@pytest.mark.parametrize("reports", [True, False])
def test_streams_that_are_split_anywhere(door: str, step: int, *, reports: bool) -> None:
    """Inside of a character, too."""
    text = "\u00e4\u20ac\U0001f600"
    event = f'data: {{"choices":[{{"index":0,"delta":{{"content":"{text}"}}}}]}}\n\n'.encode()
    stream = event * 100 + LAST * reports
    chunks = [stream[at : at + step] for at in range(0, len(stream), step)]
    arrived = 100 + 100 * len(text.encode()) // 4
    assert used(door, llm(), Answer(chunks, headers=SSE)) == [1, 97 if reports else arrived]


def test_the_last_message_may_have_the_report() -> None:
    store, rule = MemoryStore(Clock()), llm()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": HELLO[0] + LAST[:20], "more_body": True})
        await send({"type": "http.response.body", "body": LAST[20:]})

    asyncio.run(asgi_reply(LimitGate(app, rules=[rule], store=store), "/", "POST", body=json.dumps(QUESTION).encode()))
    assert [window.used for window in Limiter(store).bucket(rule).peek().windows] == [1, 97]


@pytest.mark.parametrize("chunk", [HELLO[0], b"data: " + b"x" * 50_000], ids=["events", "an event without end"])
def test_memory_is_flat_while_a_stream_passes(chunk: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        message = {"type": "http.response.body", "body": chunk, "more_body": True}
        for sent in range(2_000):
            if sent == 200:
                tracemalloc.start()
            await send({**message, "body": bytes(bytearray(chunk))})
        await send({"type": "http.response.body", "body": b""})

    async def drop(_: Any) -> None:
        """As a server that has sent it."""

    wire = Wire({"type": "http.request", "body": json.dumps(QUESTION).encode()})
    gate = LimitGate(app, rules=[llm()], store=MemoryStore(Clock()))
    asyncio.run(gate(http_scope("/", "POST"), wire.receive, drop))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000  # of 100 MB; other threads may have something, too


def test_streams_are_passed_on_at_once() -> None:
    """Each event is sent before the application makes the next one."""
    wire = Wire({"type": "http.request", "body": json.dumps(QUESTION).encode()})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for number, chunk in enumerate(HELLO):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            assert wire.sent[-1]["body"] == chunk
            assert len(wire.sent) == number + 2
        await send({"type": "http.response.body", "body": b""})

    asyncio.run(wire.call(LimitGate(app, rules=[llm()], store=MemoryStore(Clock())), http_scope("/", "POST")))
    assert wire.reply().body == b"".join(HELLO)


# --- how it is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["name", "callable", "mapping", "of the rule", "quick"])
def test_ways_to_say_it(written: str) -> None:
    rules = {
        "name": llm("50/day", (DAY, "tokens")),
        "callable": llm("50/day", (DAY, tokens)),
        "mapping": llm(limits=["50/day", {"limit": DAY, "cost": "tokens"}]),
        "of the rule": llm(DAY, cost="tokens"),
        "quick": llm(qpd=100_000, cost=tokens),
    }
    for door in ("asgi", "wsgi"):
        assert used(door, rules[written], Answer())[-1] == 97


def test_yaml(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(
        "rules:\n  - name: llm\n    key: [global]\n    limits:\n      - 50/day\n      - {limit: 100000/day, cost: tokens}\n"
        "  - {name: day, key: [global], qpd: 90000, cost: output_tokens}\n"
    )
    read = load_rules(file)
    other = [llm(), Rule("day", qpd=90_000, cost=output_tokens, key=["global"])]
    assert digest(read) == digest(RuleSet(other))
    assert digest(read) != digest(RuleSet([other[0], Rule("day", qpd=90_000, cost=tokens, key=["global"])]))
    assert used("asgi", read.tiers["default"][0], Answer()) == [1, 97]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: llm(DAY, cost="token"), "cost is 'token'.* did you mean 'tokens'"),
        (lambda: llm(limits=[{"limit": DAY, "cost": "words"}]), "cost is 'words', expected an integer, or one of tokens"),
        (lambda: llm(("4 at once", tokens)), "counts tokens of requests in flight"),
        (lambda: llm({"limit": DAY, "lease": 10}, cost=tokens), "has a lease and its own cost|lease"),
        (
            lambda: Rule("x", "5/minute", cost=tokens, per="message"),
            "counts messages, so it reads no body.*or a cost without it",
        ),
        (lambda: Rule("x", exempt=True, cost=tokens), "is exempt"),
    ],
)
def test_mistakes(make: Any, said: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=said):
        make()


def test_slots_beside_tokens() -> None:
    """A request in flight takes one slot, whatever its tokens."""
    store, seen = MemoryStore(Clock()), []
    rule = llm(DAY, concurrency=4, cost=tokens)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append([window.used for window in scope["limitgate"].windows])
        await asgi_of(Answer(), [])(scope, receive, send)

    asyncio.run(asgi_reply(LimitGate(app, rules=[rule], store=store), "/", "POST", body=json.dumps(QUESTION).encode()))
    assert seen == [[400, 1]]
    assert [window.used for window in Limiter(store).bucket(rule).peek().windows] == [97, 0]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_tokens_beside_an_adaptive_limit(door: str) -> None:
    assert used(door, llm("50/day", (DAY, tokens), adaptive=True), Answer([*HELLO, LAST], headers=SSE)) == [1, 97]


def test_limits_of_a_caller() -> None:
    """They have the costs of the rule's limits, in the same order."""
    store, rule = MemoryStore(Clock()), Rule("llm", "50/day", (DAY, tokens), key=["caller"])
    bob = Caller("bob", limits={"llm": ["5/day", "500/day"]})
    gate = LimitGate(asgi_of(Answer(), []), rules=[rule], store=store, identify=lambda _: bob, headers=["openai"])
    reply = asyncio.run(asgi_reply(gate, "/", "POST", body=json.dumps(QUESTION).encode()))
    assert reply.rate["x-ratelimit-limit-tokens"] == "500"
    assert reply.rate["x-ratelimit-remaining-tokens"] == "100"
    reply = asyncio.run(asgi_reply(gate, "/", "POST", body=json.dumps(QUESTION).encode()))
    assert (reply.status, reply.rate["x-ratelimit-remaining-tokens"]) == (200, "3")


def test_charge_if_decides_about_requests_too() -> None:
    rule = llm("50/day", (DAY, tokens), charge_if={"status_not": ["5xx"]})
    assert used("asgi", rule, Answer(status=500)) == [0, 0]
    assert used("wsgi", rule, Answer(status=404)) == [1, 0]
    assert used("wsgi", rule, Answer()) == [1, 97]


def test_nested_gates_read_the_response_each_for_itself() -> None:
    store, outer, inner = MemoryStore(Clock()), llm(), Rule("inner", (DAY, output_tokens), key=["global"])
    within = LimitGate(asgi_of(Answer(), []), rules=[inner], store=store)
    gate = LimitGate(within, rules=[outer], store=store)
    asyncio.run(asgi_reply(gate, "/", "POST", body=json.dumps(QUESTION).encode()))
    used_by = [[window.used for window in Limiter(store).bucket(rule).peek().windows] for rule in (outer, inner)]
    assert used_by == [[1, 97], [7]]


# --- frameworks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["whole", "stream", "async stream", "failed"])
def test_django(way: str, kind: str) -> None:
    async def events() -> AsyncIterator[bytes]:
        for chunk in (*HELLO, LAST):
            yield chunk

    def view(request: Any) -> Any:
        assert json.loads(request.body) == QUESTION
        if kind in ("whole", "failed"):
            return HttpResponse(Answer().chunks[0], content_type="application/json", status=200 if kind == "whole" else 500)
        return StreamingHttpResponse(iter([*HELLO, LAST]), content_type="text/event-stream")

    async def streaming(request: Any) -> Any:
        return StreamingHttpResponse(events(), content_type="text/event-stream")

    if kind == "async stream" and way != "asgi":
        pytest.skip("Django streams async iterators under ASGI only")
    store, rule = MemoryStore(Clock()), llm()
    with WAYS[way].project(url("x", streaming if kind == "async stream" else view), rules=[rule], store=store) as project:
        response = project.ask("/x", "POST", data=json.dumps(QUESTION), content_type="application/json")
        assert response.status_code == (500 if kind == "failed" else 200)
        response.close()
    assert [window.used for window in Limiter(store).bucket(rule).peek().windows] == [1, 0 if kind == "failed" else 97]


def test_flask() -> None:
    app, store, rule = Flask(__name__), MemoryStore(Clock()), llm()
    FlaskLimitGate(app, rules=[rule], store=store)

    @app.post("/v1/chat/completions")
    def complete() -> Any:
        return app.response_class(iter([*HELLO, LAST]), mimetype="text/event-stream")

    with app.test_client().post("/v1/chat/completions", json=QUESTION) as response:
        assert response.get_data() == b"".join([*HELLO, LAST])
    assert [window.used for window in Limiter(store).bucket(rule).peek().windows] == [1, 97]


def test_decorators() -> None:
    """The limit of a route takes part in the decision of the gate."""

    @limit("50/day", (DAY, tokens), name="route", key=["global"])
    async def complete(request: Any) -> JSONResponse:
        assert await request.json() == QUESTION
        assert [window.used for window in request.scope["limitgate"].windows] == [1, 400]
        return JSONResponse({**CHAT, "usage": USAGE})

    app = Starlette(routes=[Route("/x", complete, methods=["POST"])])
    app.add_middleware(LimitGate, rules=[Rule("all", "9/day", path="/other")], store=MemoryStore(Clock()))
    reply = asyncio.run(asgi_reply(app, "/x", "POST", JSON, json.dumps(QUESTION).encode()))
    assert reply.status == 200


def test_fastapi_dependency() -> None:
    store = MemoryStore(Clock())
    per_route = RateLimit("50/day", (DAY, tokens), name="route", key=["global"])
    app = FastAPI()
    app.add_middleware(LimitGate, rules=[Rule("all", "9/day")], store=store)

    @app.post("/x", dependencies=[Depends(per_route)])
    async def complete(question: dict[str, Any]) -> dict[str, Any]:
        return {**CHAT, "usage": USAGE}

    reply = asyncio.run(asgi_reply(app, "/x", "POST", JSON, json.dumps(QUESTION).encode()))
    assert reply.status == 200, reply.body
    assert [window.used for window in Limiter(store).bucket(per_route).peek().windows] == [1, 97]


def test_a_body_beyond_the_limit_gets_413() -> None:
    gate: Any = LimitGateWSGI(wsgi_of(Answer(), []), rules=[llm()], store=MemoryStore(Clock()))
    assert run_wsgi(gate, wsgi_environ("/", "POST", body=b"x" * 70_000)).status == 413


# --- faults -----------------------------------------------------------------------------------------------------------


class Failing:
    """A store that fails as long as it is told to."""

    def __init__(self) -> None:
        self.fails = False
        self.memory = MemoryStore(Clock())

    def spend(self, plan: Any, timeout: float) -> Any:
        if self.fails:
            raise StoreError("out of order", "timeout")
        return self.memory.spend(plan, timeout)

    async def aspend(self, plan: Any, timeout: float) -> Any:
        return self.spend(plan, timeout)

    def close(self) -> None:
        """Nothing to let go of."""

    async def aclose(self) -> None:
        """Nothing to let go of."""


def test_a_store_that_fails_at_the_end_keeps_the_estimate() -> None:
    store, rule = Failing(), llm()
    answering = asgi_of(Answer(), [])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        store.fails = True
        await answering(scope, receive, send)

    gate = LimitGate(app, rules=[rule], store=store)
    assert asyncio.run(asgi_reply(gate, "/", "POST", body=json.dumps(QUESTION).encode())).status == 200
    assert [window.used for window in Limiter(store.memory).bucket(rule).peek().windows] == [1, 400]
    assert gate.gate is not None
    assert gate.gate.uncorrected == 1


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
@pytest.mark.parametrize(("on_error", "status"), [("open", 200), ("closed", 503), ("local", 200)])
def test_a_store_that_fails_at_the_beginning(door: str, on_error: Any, status: int) -> None:
    """Under ``local``, the process settles its own limits."""
    store, seen = Failing(), list[int]()
    store.fails = True
    options: Any = {"rules": [llm(("1000/day", tokens))], "store": store, "on_error": on_error, "headers": ["openai"]}
    body = json.dumps({**QUESTION, "max_tokens": 800}).encode()
    gate: Any = (LimitGate(asgi_of(Answer(), []), **options), LimitGateWSGI(wsgi_of(Answer(), []), **options))
    for _ in range(2):
        if door == "asgi":
            reply = asyncio.run(asgi_reply(gate[0], "/", "POST", body=body))
        else:
            reply = wsgi_reply(gate[1], "/", "POST", body=body)
        assert reply.status == status
        if on_error == "local":
            seen.append(int(reply.rate["x-ratelimit-remaining-tokens"]))
    # The second request fits only because the first one was settled.
    assert seen in ([], [100, 3])


# --- refusals for the clients of providers ----------------------------------------------------------------------------


def refused(styles: list[str], *limits: Any, **options: Any) -> Any:
    """The last of three replies, from both doors."""
    found = []
    body = json.dumps({**QUESTION, "max_tokens": 600}).encode()
    rule = Rule("llm", *(limits or ("9/day", ("1000/day", tokens))), key=["global"], **options)
    for door in ("asgi", "wsgi"):
        gated: Any = {"rules": [rule], "store": MemoryStore(Clock()), "headers": styles}
        never = Answer([json.dumps({**CHAT, "usage": {"prompt_tokens": 90, "completion_tokens": 900}}).encode()])
        for _ in range(3):
            if door == "asgi":
                reply = asyncio.run(asgi_reply(LimitGate(asgi_of(never, []), **gated), "/", "POST", body=body))
            else:
                reply = wsgi_reply(LimitGateWSGI(wsgi_of(never, []), **gated), "/", "POST", body=body)
        assert reply.status == 429
        assert len(reply.body) == int(reply.headers["content-length"])
        found.append(reply)
    assert found[0].json() | {"instance": ""} == found[1].json() | {"instance": ""}
    return found[0]


def test_refusals_of_openai() -> None:
    reply = refused(["openai"])
    error = reply.json()["error"]
    assert error == {
        "message": "Rate limit llm reached on tokens. Please try again in 59616.000s.",
        "type": "tokens",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("59616", "59616000")
    # What other clients read is still there.
    assert reply.json()["violated-policies"] == ["llm"]
    assert reply.headers["content-type"] == "application/problem+json"
    assert refused(["openai"], "2/day", (DAY, tokens)).json()["error"]["type"] == "requests"


def test_refusals_of_anthropic() -> None:
    reply = refused(["anthropic"], ("100000/day", input_tokens), ("1000/day", output_tokens))
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert "reached on output tokens" in reply.json()["error"]["message"]
    both = refused(["anthropic", "openai"]).json()["error"]
    assert (both["type"], both["code"]) == ("rate_limit_error", "rate_limit_exceeded")


def test_refusals_that_waiting_does_not_end() -> None:
    reply = refused(["openai"], "0/day")
    assert reply.headers["x-should-retry"] == "false"
    assert "retry-after-ms" not in reply.headers
    assert reply.json()["error"]["message"] == "Rate limit llm reached on requests. Waiting does not help."


def test_refusals_that_lead_to_a_ban() -> None:
    reply = refused(["openai"], "1/day", ban={"after": 2, "within": "1d", "for": "100d"})
    assert int(reply.headers["retry-after-ms"]) == 100 * 86_400_000
    assert reply.json()["error"]["message"].endswith("try again in 8640000.000s.")


def test_other_styles_have_no_error() -> None:
    reply = refused(["x-ratelimit", "draft-11"])
    assert "error" not in reply.json()
    assert "retry-after-ms" not in reply.headers


def test_handlers_keep_the_fields_by_which_clients_retry() -> None:
    async def on_denied(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 429, "headers": []})
        await send({"type": "http.response.body", "body": b"own"})

    gate = LimitGate(
        asgi_of(Answer(), []),
        rules=[Rule("llm", "1/day")],
        store=MemoryStore(Clock()),
        headers=["openai"],
        on_denied=on_denied,
    )
    replies = [asyncio.run(asgi_reply(gate)) for _ in range(2)]
    assert replies[1].body == b"own"
    assert replies[1].headers["retry-after-ms"] == "86400000"


def test_an_address_that_cannot_be_read_is_refused_before_a_charge() -> None:
    """Also where only the answers of an address are asked for, and no key."""
    store, rule = MemoryStore(Clock()), llm()
    gate = LimitGate(asgi_of(Answer(), []), rules=[rule], store=store, trusted_proxies=["0.0.0.0/0"])
    headers = {"X-Forwarded-For": ", ".join(["10.0.0.1"] * 40)}
    reply = asyncio.run(asgi_reply(gate, "/", "POST", headers, json.dumps(QUESTION).encode()))
    assert reply.status == 431
    assert [window.used for window in Limiter(store).bucket(rule).peek().windows] == [0, 0]
