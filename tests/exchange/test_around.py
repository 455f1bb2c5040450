"""Middleware that is dropped where it is made, or copied."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import time
from types import SimpleNamespace
from typing import Any

import pytest

from limitgate import LimitGate, LimitGateWSGI, Rule
from limitgate.forward import ForwardGate
from limitgate.testing import off
from tests.support.doors import asgi_reply, wsgi_reply

RULES = [Rule("api", "5/minute")]
AT_ONCE = 1.0


@pytest.fixture(autouse=True)
def tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have gates be told of here."""
    monkeypatch.setattr("limitgate.exchange.application.AT_ONCE", AT_ONCE)


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


def wsgi(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b""]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("LG039")]


def test_a_gate_that_is_dropped_where_it_is_made_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As with Flask's extensions, whose result nobody needs."""
    LimitGate(asgi, rules=RULES)
    LimitGateWSGI(
        wsgi,
        rules=RULES,
    )
    assert [message.split()[2] for message in told(caplog)] == ["LimitGate", "LimitGateWSGI"]
    assert "app.add_middleware(LimitGate" in told(caplog)[0]
    assert "app.wsgi_app = LimitGateWSGI(app.wsgi_app" in told(caplog)[1]


def test_a_dropped_forward_gate_is_logged_under_its_public_name(caplog: pytest.LogCaptureFixture) -> None:
    """Its inner gate has a class that users don't know."""
    ForwardGate(rules=RULES)
    assert [message.split()[2] for message in told(caplog)] == ["ForwardGate"]


def test_a_gate_that_was_used_or_kept_for_a_while_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate that has answered may go at once, and one without a request after a while."""
    asyncio.run(asgi_reply(LimitGate(asgi, rules=RULES)))
    wsgi_reply(LimitGateWSGI(wsgi, rules=RULES))
    LimitGate(asgi, rules=RULES, enabled=False)
    kept = [LimitGate(asgi, rules=RULES), LimitGateWSGI(wsgi, rules=RULES)]
    now = time.time()
    monkeypatch.setattr("limitgate.exchange.application.time", SimpleNamespace(time=lambda: now + AT_ONCE))
    del kept
    assert told(caplog) == []


def fail(_: Any) -> Any:
    raise ZeroDivisionError


async def fail_later(_: Any) -> Any:
    await asyncio.sleep(0)
    raise ZeroDivisionError


ONLY_REQUESTS: dict[str, dict[str, Any]] = {
    "identify": {"rules": RULES, "identify": fail},
    "cost": {"rules": [Rule("api", "5/minute", cost=fail)]},
    "when": {"rules": [Rule("api", "5/minute", when=fail)]},
    "limits": {"rules": [Rule("api", fail)]},
    "no rule": {"rules": [Rule("api", "5/minute", path="/other")]},
    "exempt": {"rules": [*RULES, Rule("all", exempt=True)]},
    "denied": {"rules": [Rule("all", deny=True)]},
    "slots": {"rules": [Rule("api", "5 at once")]},
    "shed": {"rules": [Rule("api", adaptive=True)]},
    "no store": {"rules": RULES, "store": "redis://127.0.0.1:1"},
}


@pytest.mark.parametrize("options", ONLY_REQUESTS.values(), ids=ONLY_REQUESTS)
def test_a_gate_whose_only_request_met_no_store_is_not(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Also if an application's callable failed."""
    with contextlib.suppress(ZeroDivisionError):
        wsgi_reply(LimitGateWSGI(wsgi, **options))
    with contextlib.suppress(ZeroDivisionError):
        asyncio.run(asgi_reply(LimitGate(asgi, **options)))
    gc.collect()
    assert told(caplog) == []


@pytest.mark.parametrize(
    "options",
    [
        {"rules": RULES, "identify": fail_later},
        {"rules": [Rule("api", fail_later)]},
    ],
    ids=["identify", "limits"],
)
def test_a_gate_whose_only_request_failed_later_is_not(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.suppress(ZeroDivisionError):
        asyncio.run(asgi_reply(LimitGate(asgi, **options)))
    gc.collect()
    assert told(caplog) == []


def test_a_gate_that_was_used_while_switched_off_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with off():
        wsgi_reply(LimitGateWSGI(wsgi, rules=RULES))
        asyncio.run(asgi_reply(LimitGate(asgi, rules=RULES)))
    assert told(caplog) == []


def test_subclasses_take_what_they_like() -> None:
    """Only who is to be given an application misses it."""

    class Mine(LimitGate):
        def __init__(self) -> None:
            super().__init__(asgi, rules=RULES)

    mine = Mine()
    assert asyncio.run(asgi_reply(mine)).status == 200


@pytest.mark.parametrize("copied", [copy.copy, lambda gate: copy.copy(copy.copy(gate))])
def test_a_gate_can_be_copied(copied: Any) -> None:
    """The copy answers by the same buckets."""
    gate = LimitGate(asgi, rules=[Rule("api", "2/minute")])
    wsgi_gate = LimitGateWSGI(wsgi, rules=[Rule("api", "2/minute")])
    assert [asyncio.run(asgi_reply(each)).status for each in (gate, copied(gate), gate)] == [200, 200, 429]
    assert [wsgi_reply(each).status for each in (wsgi_gate, copied(wsgi_gate), wsgi_gate)] == [200, 200, 429]
