"""The meaning of answers: for requests, for the breaker, for the connection. No sockets, no servers."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import MovedError, OutOfMemoryError, ReadOnlyError

from limitgate import RedisStore, StoreError
from limitgate.internal_errors import OwnError
from limitgate.stores.redis import wire
from limitgate.stores.redis.replies import Server, blames_server
from limitgate.stores.redis.session import Answered, Redirected, Session
from limitgate.stores.redis.wire import Call
from tests.support.crowds import a_plan

FAILURE = StoreError("no answer", "timeout")


class Late(Call):
    """A call that nobody waits for any more."""

    __slots__ = ()
    is_wanted = False


def a_server(address: tuple[str, int] | None = None) -> Server:
    """A server whose last call has failed."""
    server = Server(RedisStore("redis://127.0.0.1:1"), address)
    server.breaker.failed(FAILURE, 0.0)
    return server


def judged(server: Server, event: Any) -> tuple[Any, bool, bool]:
    """The answer, whether the breaker took it for a sign of life, and whether the connection goes on."""
    session: Session[Call] = Session()
    answer = server.judge(session, event)
    return answer, not server.breaker.in_trouble, session.is_open


def test_a_reading_is_a_sign_of_life() -> None:
    """And the connection goes on."""
    reply = [1_000_000, *[0] * (wire._HEAD - 1), *[0] * a_plan().charges[0].bucket.facts]
    answer, *alive = judged(a_server(), Answered(Call([a_plan()]), reply))
    assert ([reading.admitted for reading in answer], alive) == ([True], [True, True])
    _, *alive = judged(a_server(), Answered(Late([a_plan()]), reply))
    assert alive == [False, True], "an answer that comes too late for everybody is none"


@pytest.mark.parametrize("reply", [ReadOnlyError("You can't write"), "OK", [1, 2], None])
def test_an_answer_that_blames_the_server_retires_the_connection(reply: object) -> None:
    """Whether it is an error or of another shape."""
    failure, *alive = judged(a_server(), Answered(Call([a_plan()]), reply))
    assert (failure.fault, alive) == ("reply", [False, False])
    assert blames_server(failure)


def test_a_full_server_answers() -> None:
    """It is a sign of life, and the connection goes on."""
    failure, *alive = judged(a_server(), Answered(Call([a_plan()]), OutOfMemoryError("used memory > 'maxmemory'")))
    assert (failure.fault, alive) == ("oom", [True, True])
    assert not blames_server(failure)


def test_a_mistake_of_our_own_is_not_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call fails, and the connection goes on."""
    monkeypatch.setattr(wire, "answers", lambda *_: 1 / 0)
    failure, *alive = judged(a_server(), Answered(Call([a_plan()]), []))
    assert isinstance(failure, OwnError)
    assert alive == [True, True]


def test_only_nodes_of_a_cluster_redirect() -> None:
    """A single server that does so is a node of a cluster, which its URL has to say."""
    event = Redirected(Call([a_plan()]), MovedError("1 127.0.0.1:7000"))
    assert judged(a_server(("127.0.0.1", 7001)), event) == (event.reply, True, True)
    failure, *alive = judged(a_server(), event)
    assert (failure.fault, alive) == ("reply", [False, False])
    assert "redis+cluster://" in str(failure)
