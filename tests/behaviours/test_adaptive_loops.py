"""`adaptive` on a rule where handlers hold up the event loop: no more than one is in flight at a time, and all are there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from limitgate import LimitGate, Rule
from limitgate.overload.adaptive_limit import AdaptiveLimit
from tests.support.doors import asgi_reply


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_loop_that_handlers_hold_up_refuses_most_of_a_crowd(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        time.sleep(0.02)  # noqa: ASYNC251 - as handlers do that do not await
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def main() -> None:
        gated = LimitGate(app, rules=[Rule("all", adaptive=True)])
        assert gated.gate is not None
        assert (await asgi_reply(gated)).status == 200
        tasks = [asyncio.create_task(asgi_reply(gated)) for _ in range(30)]
        crowd = [(await task).status for task in tasks]
        assert set(crowd) == {200, 503}
        assert crowd[-1] == 503
        (compiled_rule,) = gated.gate.rules.planner._every["default"]
        assert compiled_rule.places is not None
        limit: AdaptiveLimit = compiled_rule.places.limit
        assert limit.levels["normal"].lag == crowd.count(503)
        assert limit.levels["normal"].limit == limit.in_flight == 0

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
