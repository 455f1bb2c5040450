"""Messages of a server while a request waits for its turn: kept in order for the application, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from limitgate.exchange.asgi import MOST_KEPT, ReceiveBuffer
from tests.support.virtual import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


class Server:
    """Hands out messages at their times, and counts how often it is asked."""

    def __init__(self, *messages: tuple[float, Any]) -> None:
        self.messages = list(messages)
        self.asked = 0

    async def receive(self) -> Any:
        self.asked += 1
        if not self.messages:
            await asyncio.get_running_loop().create_future()
        pause, message = self.messages[0]
        await asyncio.sleep(pause)
        self.messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message


def body(part: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": part, "more_body": more}


GONE = {"type": "http.disconnect"}
Listen = Callable[..., tuple[bool, list[Any], Server]]


@pytest.fixture
def listen(world: World) -> Listen:
    """Listens for so many seconds, then reads so many messages: whether the client stayed, and what was read."""

    def listen(*messages: tuple[float, Any], seconds: float = 1, reads: int = 0) -> tuple[bool, list[Any], Server]:
        async def main() -> tuple[bool, list[Any], Server]:
            server = Server(*messages)
            buffer = ReceiveBuffer(server.receive)
            stays = await buffer.stays_until(asyncio.ensure_future(asyncio.sleep(seconds)))
            read = [await buffer.receive() for _ in range(reads)]
            buffer.close()
            return stays, read, server

        return world.run(main())

    return listen


def test_what_comes_meanwhile_is_read_first(listen: Listen) -> None:
    """All messages reach the application, in order, those that came while it waited and those after."""
    parts = [body(b"1"), body(b"2"), body(b"3"), body(b"4", more=False)]
    stays, read, server = listen((0.1, parts[0]), (0.2, parts[1]), (1, parts[2]), (1, parts[3]), reads=4)
    assert (stays, read, server.asked) == (True, parts, 4)


def test_no_more_is_kept_than_a_few_messages(listen: Listen) -> None:
    """Of an upload a few parts are kept, then nobody asks for more until the application does."""
    parts = [(0.01, body(bytes([number]))) for number in range(20)]
    stays, read, server = listen(*parts, reads=0)
    assert (stays, server.asked) == (True, MOST_KEPT)
    _, read, server = listen(*parts, reads=20)
    assert (read, server.asked) == ([message for _, message in parts], 20)


def test_who_leaves_is_heard(listen: Listen, world: World) -> None:
    """A client that leaves is noticed at once, and the application could read of it, too."""
    stays, read, _ = listen((0, body(b"", more=False)), (0.25, GONE), reads=2)
    assert (stays, read, world.now) == (False, [body(b"", more=False), GONE], 0.25)


def test_who_leaves_as_the_turn_comes_had_it(world: World) -> None:
    """Where both happen at once the request goes on."""

    async def main() -> bool:
        buffer, moment = ReceiveBuffer(Server((0, GONE)).receive), asyncio.get_running_loop().create_future()
        listening = asyncio.ensure_future(buffer.stays_until(moment))
        await asyncio.sleep(0)
        moment.set_result(None)
        return await listening

    assert world.run(main())


def test_a_message_on_its_way_is_not_lost(listen: Listen) -> None:
    """What is just being received when the turn comes is handed to the application, whose own call was not made twice."""
    stays, read, server = listen((1.5, body(b"late")), (0.1, GONE), reads=2)
    assert (stays, read, server.asked) == (True, [body(b"late"), GONE], 2)


def test_a_reader_that_is_cancelled_loses_nothing(world: World) -> None:
    """An application that gives up on a message meanwhile can ask for it again."""

    async def main() -> Any:
        buffer = ReceiveBuffer(Server((2, body(b"late"))).receive)
        await buffer.stays_until(asyncio.ensure_future(asyncio.sleep(1)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.receive(), 0.1)
        return await buffer.receive()

    assert world.run(main()) == body(b"late")


def test_two_readers_get_a_message_each(world: World) -> None:
    """Where two tasks of an application read at once, none of them gets the other's."""

    async def main() -> Any:
        server = Server((2, body(b"1")), (1, body(b"2")))
        buffer = ReceiveBuffer(server.receive)
        await buffer.stays_until(asyncio.ensure_future(asyncio.sleep(1)))
        return await asyncio.gather(buffer.receive(), buffer.receive())

    assert world.run(main()) == [body(b"1"), body(b"2")]


def test_a_server_that_fails_fails_the_application(listen: Listen, world: World) -> None:
    """What a server raises is for the application to see, when it asks; the turn is waited for all the same."""
    assert listen((0.1, LookupError("no such stream")))[0]
    assert world.now == 1
    with pytest.raises(LookupError, match="no such stream"):
        listen((0.1, LookupError("no such stream")), reads=1)


def test_nobody_listens_after_the_end(world: World) -> None:
    """A call that nobody will hear of is cancelled."""

    async def main() -> None:
        buffer = ReceiveBuffer(Server().receive)
        await buffer.stays_until(asyncio.ensure_future(asyncio.sleep(1)))
        buffer.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    world.run(main())
