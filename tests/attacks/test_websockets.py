from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import websockets.asyncio.client
import websockets.exceptions

from limitgate import LimitGate, Rule
from tests.attacks.served import hello
from tests.attacks.test_aborts import all_gone, tasks
from tests.support.doors import PATIENCE, handshake, uvicorn_process

FLOOD = 60


async def _flood(url: str) -> Counter[int]:
    """What becomes of many handshakes at once: 101, or the status of the refusal."""

    async def one() -> int:
        try:
            async with websockets.asyncio.client.connect(url, open_timeout=PATIENCE, proxy=None):
                return 101
        except websockets.exceptions.InvalidStatus as refused:
            return refused.response.status_code

    return Counter(await asyncio.gather(*[one() for _ in range(FLOOD)]))


def test_a_flood_of_handshakes_is_limited(tmp_path: Path) -> None:
    """On a real server as many sockets open as the rule allows, all others get a 429, and no task is left of them."""
    with uvicorn_process("tests.attacks.served:app", tmp_path, "--no-proxy-headers", "--lifespan", "off") as url:
        before = tasks(url)
        assert asyncio.run(_flood(url.replace("http", "ws", 1) + "/chat")) == {101: 5, 429: FLOOD - 5}
        assert asyncio.run(_flood(url.replace("http", "ws", 1) + "//chat;x")) == {429: FLOOD}
        all_gone(url, before)


@pytest.mark.parametrize(("denial", "refused"), [(True, 429), (False, 1013)])
def test_a_flood_of_handshakes_in_process(denial: object, refused: int) -> None:
    """With the denial extension the refused get a 429, without it close code 1013; the application hears nothing of them."""
    ran: list[str] = []

    async def noting(scope, receive, send) -> None:
        ran.append(scope["path"])
        await hello(scope, receive, send)

    async def flood() -> Counter[int]:
        gated = LimitGate(noting, rules=[Rule("chat", "5/day", path="/chat", methods=["GET"])])
        replies = [handshake(gated, path, denial=bool(denial)) for path in ("/chat", "//chat", "/chat/", "/chat;x") * 15]
        found = Counter(reply.status for reply in await asyncio.gather(*replies))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return found

    assert asyncio.run(flood()) == {101: 5, refused: FLOOD - 5}
    assert len(ran) == 5
