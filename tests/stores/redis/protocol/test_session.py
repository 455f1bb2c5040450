"""A connection's conversation, replayed as bytes: no sockets, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import AskError, MovedError, NoScriptError, OutOfMemoryError, ResponseError, TryAgainError

from limitgate.stores.redis import wire
from limitgate.stores.redis.session import NEED_DATA, Answered, MustClose, Redirected, Resend, Session
from limitgate.stores.redis.wire import Call, Reader
from tests.support.crowds import a_plan, giving_back

OK, NOSCRIPT = b"+OK\r\n", b"-NOSCRIPT No matching script.\r\n"
PUSH = b">2\r\n+invalidate\r\n*1\r\n+key\r\n"


def a_session() -> Session[Call]:
    return Session()


def on_its_way(session: Session[Call], count: int = 1) -> list[Call]:
    calls = [Call([a_plan()]) for _ in range(count)]
    for call in calls:
        session.send(call)
    return calls


def commands(data: bytes) -> list[Any]:
    """The first words of the commands in what is sent."""
    reader = Reader(notEnoughData=None, replyError=ValueError)
    reader.feed(data)
    return list(iter(lambda: (reader.gets() or [None])[0], None))


def events(session: Session[Call], data: bytes) -> list[Any]:
    """The events that follow from bytes, the last one being `MustClose` if there is one."""
    session.receive_data(data)
    heard: list[Any] = []
    while (event := session.next_event()) is not NEED_DATA:
        heard.append(event)
        if isinstance(event, MustClose):
            break
    return heard


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_answers_come_in_the_order_of_the_calls(size: int) -> None:
    """However the bytes are cut into pieces, and whatever is pushed in between."""
    session = a_session()
    calls = on_its_way(session, 3)
    data = PUSH + b":1\r\n" + PUSH + b"$2\r\nab\r\n*2\r\n:1\r\n:2\r\n" + PUSH
    heard = [event for at in range(0, len(data), size) for event in events(session, data[at : at + size])]
    assert heard == [Answered(calls[0], 1), Answered(calls[1], b"ab"), Answered(calls[2], [1, 2])]
    assert not session.flying
    assert session.is_quiet()


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", OutOfMemoryError),
        (b"-READONLY You can't write against a read only replica.\r\n", ResponseError),
        (b"-ERR what?\r\n", ResponseError),
    ],
)
def test_an_error_is_an_answer(reply: bytes, kind: type[Exception]) -> None:
    """Of redis-py's class, by which its meaning is told."""
    session = a_session()
    (call,) = on_its_way(session)
    (event,) = events(session, reply)
    assert event.call is call
    assert isinstance(event.reply, kind)
    assert session.is_open


# --- the script -------------------------------------------------------------------------------------------------------


def test_an_unknown_script_is_sent_behind_the_calls_on_their_way() -> None:
    """No call that is new may overtake one that is sent again, so none is due until all are answered."""
    session = a_session()
    first, second = on_its_way(session, 2)
    for call in (first, second):
        assert events(session, NOSCRIPT) == [Resend(call)]
        assert commands(session.send(call)) == [b"EVAL"]
        assert session.is_settling
    assert events(session, b":1\r\n") == [Answered(first, 1)]
    assert session.is_settling
    assert events(session, b":2\r\n") == [Answered(second, 2)]
    assert not session.is_settling


def test_a_server_that_never_knows_the_script() -> None:
    """Says so once more to its text: that is an answer."""
    session = a_session()
    (call,) = on_its_way(session)
    assert events(session, NOSCRIPT) == [Resend(call)]
    session.send(call)
    ((answered, reply),) = events(session, NOSCRIPT)
    assert answered is call
    assert isinstance(reply, NoScriptError)


# --- clusters ---------------------------------------------------------------------------------------------------------


def test_asking_has_a_reply_of_its_own() -> None:
    """The second one counts, also where the first is an error."""
    for first in (OK, b"-ERR unknown command\r\n"):
        session, call = a_session(), Call([a_plan()])
        call.asking = True
        assert commands(session.send(call)) == [b"ASKING", b"EVALSHA"]
        assert events(session, first) == []
        assert events(session, b":7\r\n") == [Answered(call, 7)]


def test_asking_where_the_script_is_unknown() -> None:
    """The call is announced again."""
    session, call = a_session(), Call([a_plan()])
    call.asking = True
    session.send(call)
    assert events(session, OK + NOSCRIPT) == [Resend(call)]
    assert commands(session.send(call)) == [b"ASKING", b"EVAL"]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-MOVED 866 127.0.0.1:7002\r\n", MovedError),
        (b"-ASK 866 127.0.0.1:7002\r\n", AskError),
        (b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n", TryAgainError),
    ],
)
def test_a_redirection_is_no_answer(reply: bytes, kind: type[Exception]) -> None:
    """The node has not carried the call out; the connection goes on."""
    session = a_session()
    first, second = on_its_way(session, 2)
    redirected, answered = events(session, reply + b":1\r\n")
    assert isinstance(redirected, Redirected)
    assert redirected.call is first
    assert type(redirected.reply) is kind
    assert answered == Answered(second, 1)
    assert session.is_open


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"HTTP/1.1 400\r\n", b"*-7\r\n", b"%1\r\n*1\r\n:1\r\n:2\r\n"])
def test_what_is_no_reply_ends_the_connection(data: bytes) -> None:
    """Calls on it get no answer, and are not sent again: something was heard."""
    session = a_session()
    (call,) = on_its_way(session)
    assert isinstance(events(session, data)[-1], MustClose)
    assert list(session.flying) == [call]
    assert not session.may_repeat(call)
    assert not session.is_open


def test_what_no_call_waits_for_ends_the_connection() -> None:
    """Such bytes would be taken for the answer to the next call."""
    session = a_session()
    (call,) = on_its_way(session)
    answered, end = events(session, b":1\r\n:2\r\n")
    assert answered == Answered(call, 1)
    assert isinstance(end, MustClose)
    assert isinstance(events(a_session(), b":1\r\n")[0], MustClose)


def test_a_connection_with_half_a_reply_left_is_not_quiet() -> None:
    """But one that was told something by push is."""
    session = a_session()
    on_its_way(session)
    assert not session.is_quiet()
    events(session, b":1\r\n" + PUSH)
    assert session.is_quiet()
    events(session, b"*1\r\n")
    assert not session.is_quiet()


def test_a_retired_connection_ends_with_its_last_answer() -> None:
    """It takes no further calls meanwhile."""
    session = a_session()
    first, second = on_its_way(session, 2)
    assert events(session, b"-BUSY\r\n")[0].call is first
    session.retire()
    assert not session.is_open
    answered, end = events(session, b":2\r\n")
    assert answered == Answered(second, 2)
    assert isinstance(end, MustClose)


def test_whoever_asks_only_while_there_may_be_more_misses_no_event() -> None:
    """Nothing is asked after an answer that was all there was; the end of a connection that was retired by it is heard."""
    session = a_session()
    first, second = on_its_way(session, 2)
    assert not session.has_more
    session.receive_data(b":1\r\n")
    assert session.has_more
    assert session.next_event() == Answered(first, 1)
    assert not session.has_more
    session.receive_data(b":2\r\n")
    assert session.next_event() == Answered(second, 2)
    session.retire()
    assert session.has_more
    assert isinstance(session.next_event(), MustClose)
    for end in (Session.give_up, lambda each: each.receive_data(b"")):
        lost = a_session()
        end(lost)
        assert lost.has_more
        assert isinstance(lost.next_event(), MustClose)


# --- lost connections -------------------------------------------------------------------------------------------------


def test_an_unheard_call_may_be_sent_again_once() -> None:
    """On another connection, of which the same is not said any more."""
    session = a_session()
    first, _ = on_its_way(session, 2)
    assert isinstance(events(session, b"")[-1], MustClose)
    assert [session.may_repeat(call) for call in session.flying] == [True, True]
    other, again = a_session(), first.repeated()
    other.send(again)
    other.receive_data(b"")
    assert not other.may_repeat(again)
    assert again.plans == first.plans


@pytest.mark.parametrize("heard", [b":1\r\n", b"*5\r\n:1\r\n", PUSH])
def test_once_something_was_heard_nothing_is_sent_again(heard: bytes) -> None:
    """Then the connection was alive, and most likely Redis has carried the calls out."""
    session = a_session()
    on_its_way(session, 2)
    events(session, heard)
    events(session, b"")
    assert session.flying
    assert not any(session.may_repeat(call) for call in session.flying)


def test_an_idle_connection_that_has_ended_does_not_cost_a_call() -> None:
    """What was heard before a call was sent says nothing about it."""
    session = a_session()
    on_its_way(session)
    events(session, b":1\r\n")
    (call,) = on_its_way(session)
    events(session, b"")
    assert session.may_repeat(call)


def test_a_connection_that_is_given_up_sends_nothing_again() -> None:
    """Redis may only be slow."""
    session = a_session()
    (call,) = on_its_way(session)
    session.give_up()
    assert isinstance(session.next_event(), MustClose)
    assert not session.may_repeat(call)


def test_what_gives_back_is_never_sent_again() -> None:
    """It might be given back twice; the others of its call are."""
    plans = [a_plan(), giving_back("key"), a_plan()]
    again = Call(plans).repeated()
    assert (again.plans, again.is_repeated) == ([plans[0], plans[2]], True)


def test_a_call_that_cannot_be_sent_leaves_no_trace() -> None:
    """Its neighbours are answered."""
    session = a_session()
    (first,) = on_its_way(session)
    with pytest.raises(wire.UNSENDABLE):
        session.send(Call([a_plan(key="\ud800")]))
    (second,) = on_its_way(session)
    assert events(session, b":1\r\n:2\r\n") == [Answered(first, 1), Answered(second, 2)]
