"""How a polite caller goes about a request: the conversation on a scripted other side, in time that goes on by itself."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from limitgate import Adaptive, AsyncLimiter, ConfigError, Configured, Limit, Limiter, MemoryStore, RateLimited, StoreError
from limitgate.limits.decision import Window
from limitgate.outbound import throttle
from limitgate.outbound.response_fields import LONGEST, Answer
from limitgate.outbound.throttle import ClientThrottle, arun, run
from limitgate.process import waiting as waits
from tests.support.observed import Recorder
from tests.support.virtual import World

FINE = Answer(200)
REFUSED = Answer(429)


class Request(NamedTuple):
    key: str | None = "shop"
    name: str = ""
    in_memory: bool = True
    idempotent: bool = True
    method: str = "GET"


class Response:
    """What the other side gives; somebody has to take it, read it away or close it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.status = answer.status
        self.headers: dict[str, str] = {}
        self.ends: list[str] = []


class Side:
    """Another service, and the door to it. Answers as told, then with 200; notes when it was asked for what."""

    def __init__(self, world: World, *answers: Answer) -> None:
        self.world = world
        self.answers = list(answers)
        self.asked: list[tuple[float, Any]] = []
        self.given: list[Response] = []

    @property
    def times(self) -> list[float]:
        return [round(at, 3) for at, _ in self.asked]

    def send(self, request: Request) -> tuple[Response, Answer]:
        self.asked.append((self.world.now, request))
        response = Response(self.answers.pop(0) if self.answers else FINE)
        self.given.append(response)
        return response, response.answer

    def discard(self, response: Response) -> Response:
        response.ends.append("discarded")
        return response

    def close(self, response: Response) -> None:
        response.ends.append("closed")

    def sleep(self, seconds: float) -> None:
        assert 0 <= seconds <= LONGEST
        self.world.sleep(seconds)

    def repeatable(self, request: Request) -> bool:
        return request.in_memory

    def is_unanswered(self, error: BaseException) -> bool:
        return isinstance(error, ConnectionError)


class AsyncSide(Side):
    """The same for those who await. It may take some time to answer."""

    takes = 0.0

    async def send(self, request: Request) -> tuple[Response, Answer]:  # type: ignore[override]
        found = super().send(request)
        await asyncio.sleep(self.takes)
        return found

    async def discard(self, response: Response) -> Response:  # type: ignore[override]
        return super().discard(response)

    async def close(self, response: Response) -> None:  # type: ignore[override]
        super().close(response)

    async def sleep(self, seconds: float) -> None:  # type: ignore[override]
        assert 0 <= seconds <= LONGEST
        await asyncio.sleep(seconds)


class Kind(NamedTuple):
    """Code that awaits, or code that does not."""

    limiter: Any
    side: type[Side]
    go: Callable[[World, Any], Any]


KINDS = {
    "sync": Kind(Limiter, Side, lambda _, flow: run(flow)),
    "async": Kind(AsyncLimiter, AsyncSide, lambda world, flow: world.run(arun(flow))),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backoffs are as long as they may be."""
    monkeypatch.setattr(random, "uniform", lambda _, longest: longest)


def caring(*limits: Any, limiter: Any, **options: Any) -> ClientThrottle[Request, Any]:
    given = {"key": lambda request: request.key, "timeout": 60, "repeatable": lambda it: it.idempotent}
    return ClientThrottle(limits, limiter, type(limiter), **{**given, **options})


class Caller:
    """A process with a caller in it, who asks one thing after the other."""

    def __init__(self, kind: Kind, world: World, *limits: Any, store: Any = None, **options: Any) -> None:
        self.world = world
        self.kind = kind
        self.limiter = kind.limiter(MemoryStore(world) if store is None else store)
        self.throttle = caring(*limits, limiter=self.limiter, **options)

    def ask(self, side: Side, request: Request | None = None) -> Any:
        return self.kind.go(self.world, self.throttle.exchange(side, request or Request()))

    def refused(self, side: Side, request: Request | None = None) -> RateLimited:
        with pytest.raises(RateLimited) as refused:
            self.ask(side, request)
        return refused.value


# --- turns ------------------------------------------------------------------------------------------------------------


def test_requests_wait_their_turn(kind: Kind, world: World) -> None:
    """What the limit holds goes at once, then one after the other; each key has turns of its own."""
    caller, side = Caller(kind, world, "2/second burst 1"), kind.side(world)
    assert [caller.ask(side).status for _ in range(3)] == [200] * 3
    caller.ask(side, Request("other"))
    assert side.times == [0, 0.5, 1, 1]


def test_without_limits_nobody_waits(kind: Kind, world: World) -> None:
    """Only the other side is heeded then."""
    caller, side = Caller(kind, world), kind.side(world)
    for _ in range(5):
        caller.ask(side)
    assert side.times == [0] * 5


def test_a_turn_beyond_the_timeout_is_refused_at_once(kind: Kind, world: World) -> None:
    """Nothing is sent, and nothing taken."""
    caller, side = Caller(kind, world, "1 per 10 seconds", timeout=4), kind.side(world)
    caller.ask(side)
    refused = caller.refused(side)
    assert (side.times, world.now) == ([0], 0)
    assert (refused.decision.retry_after, refused.response) == (6, None)
    world.advance(6)
    caller.ask(side)
    assert side.times == [0, 10]


def test_with_a_timeout_of_0_nobody_waits(kind: Kind, world: World) -> None:
    """What has no room now is refused now; so is what is paused, and what the other side refuses."""
    caller, side = Caller(kind, world, "1/second", timeout=0), kind.side(world, REFUSED, Answer(429, 5))
    assert caller.refused(side).response is side.given[0]
    assert caller.refused(side).response is None
    world.advance(1)
    assert caller.refused(side).decision.retry_after == 5
    world.advance(1)
    assert caller.refused(side).decision.retry_after == 4
    assert side.times == [0, 1]


def test_without_a_timeout_it_takes_as_long_as_it_takes(kind: Kind, world: World) -> None:
    """Turns, pauses and retries alike."""
    caller, side = Caller(kind, world, "1/hour", timeout=None, longest_pause=LONGEST), kind.side(world, Answer(429, 7_000))
    caller.ask(side)
    assert side.times == [0, 7_000]


def test_a_key_of_none_passes_untouched(kind: Kind, world: World) -> None:
    """It waits for nothing, and gets the refusal as any other response."""
    caller, side = Caller(kind, world, "1/day"), kind.side(world, Answer(429, 50), Answer(429, 50))
    assert [caller.ask(side, Request(None)).status for _ in range(3)] == [429, 429, 200]
    assert [response.ends for response in side.given] == [[], [], []]
    assert side.times == [0, 0, 0]


def test_a_key_function_that_raises(kind: Kind, world: World) -> None:
    """It is the caller's own mistake, and nothing is sent."""

    def key(_: Request) -> str:
        raise LookupError("no tenant")

    side = kind.side(world)
    with pytest.raises(LookupError, match="no tenant"):
        Caller(kind, world, "1/day", key=key).ask(side)
    for limits in ((), ("1/day",)):
        with pytest.raises(TypeError, match="key is 42"):
            Caller(kind, world, *limits, key=lambda _: 42).ask(side)
    assert side.asked == []


def test_what_the_other_side_raises_is_raised(kind: Kind, world: World) -> None:
    """A request that fails has used its turn: nobody knows how far it came."""

    class Broken(kind.side):  # type: ignore[name-defined,misc]
        def send(self, request: Request) -> Any:
            super_send = super().send(request)
            if asyncio.iscoroutine(super_send):
                super_send.close()
                self.asked.append((self.world.now, request))
            raise ConnectionError("reset")

    caller = Caller(kind, world, "1 per 10 seconds")
    with pytest.raises(ConnectionError):
        caller.ask(Broken(world))
    side = kind.side(world)
    caller.ask(side)
    assert side.times == [10]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_refused_request_comes_back(kind: Kind, world: World) -> None:
    """After the time that the other side named; the refusal was read away."""
    caller, side = Caller(kind, world), kind.side(world, Answer(429, 3))
    response = caller.ask(side)
    assert side.times == [0, 3]
    assert (response, response.ends) == (side.given[1], [])
    assert side.given[0].ends == ["discarded"]


@pytest.mark.parametrize("answer", [REFUSED, Answer(429, 0), Answer(429, 0, 30), Answer(429, None, 0)], ids=str)
def test_whoever_names_no_time_is_left_alone_for_a_second_and_longer_each_time(
    kind: Kind, world: World, answer: Answer
) -> None:
    """Twice as long after each refusal, up to a minute."""
    caller, side = Caller(kind, world, timeout=None), kind.side(world, *[answer] * 9)
    caller.ask(side)
    waits = [after - before for before, after in zip(side.times, side.times[1:])]
    assert waits == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60], abs=0.01)


def test_backoffs_differ_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who were refused together do not all come back together."""
    monkeypatch.undo()
    waits = [throttle._backoff(1) for _ in range(200)]
    assert 0.5 <= min(waits) < 0.6
    assert 0.9 < max(waits) <= 1


def test_who_is_refused_again_backs_off_alone(kind: Kind, world: World) -> None:
    """Others go by what the other side says; who was refused twice may be the reason itself."""
    caller, side = Caller(kind, world, timeout=5.5), kind.side(world, *[Answer(429, 2)] * 3)
    assert caller.refused(side).decision.retry_after == 4
    assert side.times == [0, 2, 4]
    caller.ask(side)
    assert side.times == [0, 2, 4, 6]


def test_the_timeout_is_for_everything(kind: Kind, world: World) -> None:
    """Turns, pauses and retries together: what would come later is refused at once."""
    caller, side = Caller(kind, world, "1 per 3 seconds", timeout=5), kind.side(world, FINE, Answer(429, 1.5))
    caller.ask(side)
    refused = caller.refused(side)  # its turn is at 3, the pause until 4.5, and the next turn at 6
    assert (side.times, round(world.now, 3)) == ([0, 3], 4.5)
    assert refused.decision.retry_after == pytest.approx(1, abs=0.01)
    assert refused.response is side.given[1]
    caller, side = Caller(kind, world, timeout=5), kind.side(world, Answer(429, 3), Answer(429, 3))
    refused = caller.refused(side, Request("other"))
    assert side.times == pytest.approx([4.5, 7.5], abs=0.01)
    assert (refused.decision.retry_after, refused.response) == (3, side.given[1])
    assert world.now == pytest.approx(7.5, abs=0.01)


def test_a_pause_beyond_the_timeout_is_refused_at_once(kind: Kind, world: World) -> None:
    """Who asks during a pause is told how long it lasts."""
    caller, side = Caller(kind, world, timeout=5), kind.side(world, Answer(429, 60))
    refused = caller.refused(side)
    assert (refused.decision.allowed, refused.decision.retry_after, refused.response) == (False, 60, side.given[0])
    world.advance(50)
    refused = caller.refused(side)
    assert (round(refused.decision.retry_after, 3), refused.response) == (10, None)
    world.advance(5)
    caller.ask(side)
    assert side.times == [0, 60]


UNREPEATABLE = [Request(in_memory=False), Request(idempotent=False)]


@pytest.mark.parametrize("request_", UNREPEATABLE, ids=["gone", "not idempotent"])
def test_what_may_not_be_repeated_is_raised(kind: Kind, world: World, request_: Request) -> None:
    """At once, with the time to come back; the pause holds for others nonetheless."""
    caller, side = Caller(kind, world), kind.side(world, Answer(429, 3))
    refused = caller.refused(side, request_)
    assert (refused.decision.retry_after, refused.response, world.now) == (3, side.given[0], 0)
    assert side.given[0].ends == ["discarded"]
    caller.ask(side, request_)
    assert side.times == [0, 3]


def test_a_predicate_that_raises(kind: Kind, world: World) -> None:
    """It is the caller's own mistake; the refusal has been read away, so nothing leaks."""

    def repeatable(_: Request) -> bool:
        raise LookupError("no idea")

    side = kind.side(world, REFUSED)
    with pytest.raises(LookupError):
        Caller(kind, world, repeatable=repeatable).ask(side)
    assert side.given[0].ends == ["discarded"]


def test_a_refusal_that_cannot_be_read_is_closed(kind: Kind, world: World) -> None:
    """Whatever goes wrong while it is read away."""
    side = kind.side(world, REFUSED)
    side.discard = mock.Mock(side_effect=ValueError("odd"))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="odd"):
        Caller(kind, world).ask(side)
    assert side.given[0].ends == ["closed"]


# --- pauses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(), ("1000/second",)], ids=["no limits", "limits"])
def test_a_pause_is_of_its_key(kind: Kind, world: World, limits: tuple[str, ...]) -> None:
    """All requests of the key wait, others do not."""
    caller, side = Caller(kind, world, *limits), kind.side(world, Answer(503, 4))
    assert caller.ask(side).status == 503
    caller.ask(side, Request("other"))
    caller.ask(side)
    assert side.times == [0, 0, 4]


@pytest.mark.parametrize("limits", [(), ("1000/second",)], ids=["no limits", "limits"])
def test_what_one_process_hears_holds_in_all(kind: Kind, world: World, limits: tuple[str, ...]) -> None:
    """Those that share the store, and no others."""
    store = MemoryStore(world)
    one, two = (Caller(kind, world, *limits, store=store) for _ in range(2))
    side = kind.side(world, Answer(503, 4))
    one.ask(side)
    Caller(kind, world, *limits).ask(side)
    two.ask(side)
    assert side.times == [0, 0, 4]


def test_a_pardon_is_noticed_within_a_second(kind: Kind, world: World) -> None:
    """Whoever waits for the end of a ban that it was not told of itself looks again every second."""
    store, asked = MemoryStore(world), []
    caller, side = Caller(kind, world, store=store), kind.side(world)
    looking = type(caller.limiter).banned

    def banned(limiter: Any, key: str) -> Any:
        asked.append(world.now)
        if len(asked) == 3:
            Limiter(store).pardon(key)
        return looking(limiter, key)

    Limiter(store).ban("shop", 50)
    with mock.patch.object(type(caller.limiter), "banned", banned):
        caller.ask(side)
    assert asked == [0, 1, 2]
    assert side.times == [2]


@pytest.mark.parametrize("limits", [(), ("1000/second",)], ids=["no limits", "limits"])
@pytest.mark.parametrize("timeout", [None, 60])
def test_a_permanent_ban_is_refused_at_once(kind: Kind, world: World, limits: tuple[str, ...], timeout: float | None) -> None:
    """Without a timeout, too: there is no end to wait for."""
    store = MemoryStore(world)
    caller, side = Caller(kind, world, *limits, store=store, timeout=timeout), kind.side(world)
    Limiter(store).ban("shop")
    with pytest.raises(RateLimited, match="banned permanently"):
        caller.ask(side)
    assert (side.times, world.now) == ([], 0)


@pytest.mark.parametrize("fails", [False, True], ids=["store", "no store"])
def test_the_longest_pause_holds(kind: Kind, world: World, *, fails: bool) -> None:
    """What is said later may make it longer, and never shorter."""
    store = Failing(world)
    store.fails = fails
    caller, side = Caller(kind, world, store=store), kind.side(world)
    for pause in (5, 9, 2):
        kind.go(world, caller.throttle._heed("shop", pause, Answer(503, pause)))
    caller.ask(side)
    assert side.times == [9]


def test_who_slept_through_a_turn_while_a_pause_came_looks_again(kind: Kind, world: World) -> None:
    """Another process was told off meanwhile: the turn is not used, and there is another one after the pause."""
    store = MemoryStore(world)
    caller, side = Caller(kind, world, "1 per 3 seconds", store=store), kind.side(world)
    caller.ask(side)
    with mock.patch.object(type(caller.limiter), "wait", _meanwhile(store, type(caller.limiter).wait)):
        caller.ask(side)
    assert side.times == [0, 8]


def _meanwhile(store: MemoryStore, wait: Any) -> Any:
    """Whoever books a turn, another process is told to stay away for 8 s just afterwards."""

    async def waiting(*args: Any, **options: Any) -> Any:
        task = asyncio.ensure_future(wait(*args, **options))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if Limiter(store).banned("shop").allowed:  # it is told once
            Limiter(store).ban("shop", 8)
        return await task

    def blocking(*args: Any, **options: Any) -> Any:
        sleeping = waits.sleep

        def sleep(seconds: float, wake: threading.Event | None = None) -> None:
            if Limiter(store).banned("shop").allowed:  # it is told once
                Limiter(store).ban("shop", 8)
            sleeping(seconds, wake)

        with mock.patch.object(waits, "sleep", sleep):
            return wait(*args, **options)

    return waiting if inspect.iscoroutinefunction(wait) else blocking


def test_whoever_waits_hears_of_a_pause_at_once_in_its_own_process(world: World) -> None:
    """Nobody is sent in a pause, however short the turn was; afterwards they go one by one, not all together."""
    side = AsyncSide(world, Answer(503, 5))
    side.takes = 0.3
    caller = Caller(KINDS["async"], world, "4/second burst 1")

    async def main() -> None:
        await asyncio.gather(*[arun(caller.throttle.exchange(side, Request())) for _ in range(6)])

    world.run(main())
    assert side.times[:2] == [0, 0.25]
    assert side.times[2] == pytest.approx(5.3, abs=0.01)
    gaps = [after - before for before, after in zip(side.times[2:], side.times[3:])]
    assert min(gaps) >= 0.249


def test_a_success_that_was_the_last_pauses(kind: Kind, world: World) -> None:
    """Who has nothing left is not asked until there is something again."""
    caller, side = Caller(kind, world, "1000/second"), kind.side(world, Answer(200, None, 7))
    assert caller.ask(side).status == 200
    caller.ask(side)
    assert side.times == [0, 7]


@pytest.mark.parametrize(("exhausted", "at"), [(10, 0.2), (12, 0.2), (12.5, 12.5)])
def test_a_bucket_as_empty_as_ours_is_no_reason_to_pause(kind: Kind, world: World, exhausted: float, at: float) -> None:
    """Their count is the one that we keep, too, and our turns are spaced as they want them; unless it is about more."""
    caller, side = Caller(kind, world, "50 per 10 seconds"), kind.side(world, *[FINE] * 49, Answer(200, None, exhausted))
    for _ in range(51):
        caller.ask(side)
    assert side.times == pytest.approx([0] * 50 + [at], abs=0.001)


def test_a_slow_answer_tells_of_when_it_was_asked_for(world: World) -> None:
    """Our bucket was as empty then, and is full again only because the answer took so long."""
    caller, side = Caller(KINDS["async"], world, "1/second burst 1"), AsyncSide(world, Answer(200, None, 1))
    side.takes = 10
    caller.ask(side)
    caller.ask(side)
    assert side.times == [0, 10]


def test_a_bucket_of_ours_that_is_full_again_explains_nothing(kind: Kind, world: World) -> None:
    """What was empty once is not for ever."""
    caller = Caller(kind, world, "2/second")
    side = kind.side(world, FINE, FINE, Answer(200, None, 1.5))
    for _ in range(2):
        caller.ask(side)
    world.advance(30)
    caller.ask(side)
    caller.ask(side)
    assert side.times == [0, 0, 30, 31.5]


def test_a_bucket_of_ours_that_has_something_again_explains_nothing(kind: Kind, world: World) -> None:
    """Somebody else has used up what they count together with ours."""
    caller = Caller(kind, world, "10 per 10 seconds")
    side = kind.side(world, *[FINE] * 10, Answer(200, None, 5))
    for _ in range(10):
        caller.ask(side)
    world.advance(5)
    caller.ask(side)
    caller.ask(side)
    assert side.times == pytest.approx([0] * 10 + [5, 10], abs=0.001)


def test_who_names_a_wait_is_heeded_however_empty_we_are(kind: Kind, world: World) -> None:
    """A 503 with Retry-After is about more than a count."""
    caller, side = Caller(kind, world, "1/second"), kind.side(world, Answer(503, 5, 1))
    caller.ask(side)
    caller.ask(side)
    assert side.times == [0, 5]


def test_a_year_is_kept(kind: Kind, world: World) -> None:
    """The longest pause there is can be told to a store, where somebody wants that."""
    store = MemoryStore(world)
    caller, side = Caller(kind, world, store=store, longest_pause=LONGEST), kind.side(world, Answer(429, LONGEST))
    assert caller.refused(side).decision.retry_after == LONGEST
    assert Caller(kind, world, store=store).refused(side).decision.retry_after == LONGEST


@pytest.mark.parametrize(
    "answer", [Answer(429, LONGEST), Answer(404, LONGEST), Answer(200, None, LONGEST)], ids=["429", "404", "200"]
)
def test_no_response_keeps_everybody_away_for_long(
    kind: Kind, world: World, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    """A pause of a year is cut to an hour for all on the store, which is logged; that refusal itself tells what was said."""
    store = MemoryStore(world)
    caller, other = (Caller(kind, world, store=store) for _ in range(2))
    side = kind.side(world, answer)
    if answer.refused:
        assert caller.refused(side).decision.retry_after == LONGEST
    else:
        caller.ask(side)
    assert any("was reduced to 3600 s" in message for message in caplog.messages)
    assert [each.refused(side).decision.retry_after for each in (caller, other)] == [3600, 3600]
    world.advance(3600)
    assert [each.ask(side).status for each in (caller, other)] == [200, 200]


@pytest.mark.parametrize("longest", [0, -1, math.nan, 10**400, "1 x", None, True])
def test_a_longest_pause_that_is_none(kind: Kind, world: World, longest: Any) -> None:
    """Anything but seconds above 0 is a mistake."""
    with pytest.raises(ConfigError, match=r"longest_pause is .*, expected seconds"):
        Caller(kind, world, longest_pause=longest)


@pytest.mark.parametrize("status", [429, 503])
def test_a_pardon_reaches_who_heard_the_pause(kind: Kind, world: World, status: int) -> None:
    """A caller that heard a pause itself, and one that waits through it, go on within a second of a pardon."""
    store = MemoryStore(world)
    caller, side = Caller(kind, world, store=store, timeout=0), kind.side(world, Answer(status, 900))
    if status == 429:
        caller.refused(side)
    else:
        caller.ask(side)
    assert caller.refused(side).decision.retry_after == 900
    Limiter(store).pardon(Request().key)
    world.advance(1)
    assert caller.ask(side).status == 200


def test_a_pause_that_the_store_has_not_heard_of_is_kept(kind: Kind, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store failed when the pause was heard, what it knows later does not end it."""
    caller, side = Caller(kind, world, timeout=0), kind.side(world, Answer(503, 900))

    def failing(*_: Any) -> Any:
        raise StoreError("gone", "connection")

    with monkeypatch.context() as patch:
        patch.setattr(caller.limiter, "ban", failing)
        caller.ask(side)
    world.advance(10)
    assert caller.refused(side).decision.retry_after == 890


def test_memory_is_bounded(kind: Kind, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys there are, few are remembered; what is forgotten here is known to the store."""
    monkeypatch.setattr(throttle, "REMEMBERED", 20)
    caller, side = Caller(kind, world, "1/second"), kind.side(world, *[Answer(503, 50)] * 200)
    for number in range(200):
        caller.ask(side, Request(f"host-{number}"))
        assert len(caller.throttle._paused) <= 20 >= len(caller.throttle._empty)
    caller.ask(side, Request("host-0"))
    assert side.times[-1] == 50


def test_what_is_over_is_forgotten_first(kind: Kind, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that hold are remembered as long as there is room for them."""
    monkeypatch.setattr(throttle, "REMEMBERED", 20)
    caller, side = Caller(kind, world), kind.side(world, Answer(503, 1000), *[Answer(503, 50)] * 20)
    for number in range(20):
        caller.ask(side, Request(f"host-{number}"))
    world.advance(100)
    caller.ask(side, Request("host-20"))
    assert list(caller.throttle._paused) == ["host-0", "host-20"]


def test_what_is_heard_is_logged(kind: Kind, world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each pause, in one line whatever the key is."""
    caplog.set_level("INFO", "limitgate.outbound")
    caller, side = Caller(kind, world), kind.side(world, Answer(429, 3))
    caller.ask(side, Request("shop\nevil"))
    assert caplog.messages == ["'shop\\nevil' answered 429, so no request is sent for 3 s"]


# --- the store fails --------------------------------------------------------------------------------------------------


class Failing(MemoryStore):
    """A store that fails while it is told to; ``on`` says from which call on."""

    fails = False
    calls = 0

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        self.calls += 1
        if self.fails:
            raise StoreError("gone")
        return super().spend(plan, timeout)


@pytest.fixture
def store(world: World) -> Failing:
    return Failing(world)


def test_locally_while_the_store_fails(kind: Kind, world: World, store: Failing) -> None:
    """Turns go on in this process, and pauses too."""
    caller, side = Caller(kind, world, "1/second", store=store), kind.side(world, FINE, FINE, Answer(503, 7))
    store.fails = True
    for _ in range(4):
        caller.ask(side)
    assert side.times == [0, 1, 2, 9]


def test_open_while_the_store_fails(kind: Kind, world: World, store: Failing) -> None:
    """Nobody waits for turns; what the other side says holds nonetheless."""
    caller, side = Caller(kind, world, "1/second", store=store, on_error="open"), kind.side(world, FINE, FINE, Answer(503, 7))
    store.fails = True
    for _ in range(4):
        caller.ask(side)
    assert side.times == [0, 0, 0, 7]


@pytest.mark.parametrize("limits", [(), ("1/second",)], ids=["no limits", "limits"])
def test_closed_while_the_store_fails(kind: Kind, world: World, store: Failing, limits: tuple[str, ...]) -> None:
    """Nothing is sent."""
    caller, side = Caller(kind, world, *limits, store=store, on_error="closed"), kind.side(world)
    store.fails = True
    with pytest.raises(StoreError):
        caller.ask(side)
    assert side.asked == []
    store.fails = False
    caller.ask(side)
    assert side.times == [0]


@pytest.mark.parametrize("on_error", ["local", "open", "closed"])
def test_noting_a_pause_never_spoils_a_response(kind: Kind, world: World, store: Failing, on_error: str) -> None:
    """The response is there, and the pause is at least known here."""

    class Breaking(kind.side):  # type: ignore[name-defined,misc]
        def send(self, request: Request) -> Any:
            store.fails = True
            return super().send(request)

    caller, side = Caller(kind, world, store=store, on_error=on_error), Breaking(world, Answer(503, 7))
    assert caller.ask(side).status == 503
    assert side.given[0].ends == []
    store.fails = False
    caller.ask(side)
    assert side.times == [0, 7]


def test_configured_limits_count_locally_as_they_were_seen_last(kind: Kind, world: World, store: Failing) -> None:
    """Where nobody has seen them yet, nobody knows how many there may be."""
    Limiter(store).configure("shop", "2/second burst 1", Limit("100/day"))
    orders = Configured("shop")
    caller, late = (Caller(kind, world, orders, store=store) for _ in range(2))
    side = kind.side(world)
    caller.ask(side)
    store.fails = True
    for _ in range(3):
        caller.ask(side)
    assert side.times == [0, 0, 0.5, 1]
    with pytest.raises(StoreError):
        late.ask(side)
    Caller(kind, world, orders, store=store, on_error="open").ask(side)
    assert len(side.asked) == 5


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["send", "discard", "sleep", "ban"])
def test_whoever_is_cancelled_leaves_nothing_open(world: World, step: str) -> None:
    """Wherever it is: what has been answered is closed, and others go on."""
    caller, side = Caller(KINDS["async"], world, timeout=None), AsyncSide(world, Answer(429, 3))

    async def hang(*_: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        where = caller.limiter if step == "ban" else side
        with mock.patch.object(where, step, hang):
            task = asyncio.create_task(arun(caller.throttle.exchange(side, Request())))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        ends = [response.ends for response in side.given]
        assert ends == {"send": [], "discard": [["closed"]], "sleep": [["discarded"]], "ban": [["closed"]]}[step]
        await arun(caller.throttle.exchange(side, Request()))

    world.run(main())


def test_whoever_leaves_a_line_gives_the_turn_back(world: World) -> None:
    """Those behind move up."""
    caller, side = Caller(KINDS["async"], world, "1/second"), AsyncSide(world)

    async def main() -> None:
        tasks = [asyncio.create_task(arun(caller.throttle.exchange(side, Request(name=name)))) for name in "abcd"]
        await asyncio.sleep(0.5)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        await arun(caller.throttle.exchange(side, Request(name="e")))

    world.run(main())
    assert [(round(at, 2), request.name) for at, request in side.asked] == [(0, "a"), (1, "c"), (2, "d"), (3, "e")]


def test_steps_can_be_dropped_anywhere(world: World) -> None:
    """An event loop that is closed in the middle drops them: nothing is awaited any more, and nobody complains."""
    for count in range(1, 6):
        caller, side = Caller(KINDS["sync"], world, "10/second"), Side(world, Answer(429, 3))
        flow = caller.throttle.exchange(side, Request())
        given = next(flow)
        for _ in range(count - 1):
            given = flow.send(given)
        flow.close()
        assert len(side.given) <= 1


def test_results_of_steps_that_take_no_steps() -> None:
    """Drivers give what is returned, at once if there is nothing to do."""

    def steps() -> Iterator[Any]:
        return 5
        yield

    assert run(steps()) == 5  # type: ignore[arg-type]
    assert asyncio.run(arun(steps())) == 5  # type: ignore[arg-type]


# --- mistakes ---------------------------------------------------------------------------------------------------------


MISTAKES: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((), {"on_error": "ignore"}, "on_error is 'ignore', expected one of"),
    ((), {"timeout": -1}, "timeout is -1, expected seconds"),
    ((), {"timeout": 10**400}, "timeout is 1000.*, expected seconds"),
    ((), {"timeout": math.nan}, "timeout is nan, expected seconds"),
    ((), {"timeout": "5 x"}, "timeout is '5 x', expected seconds"),
    (("5/fortnight",), {}, "expected"),
    (("5 at once",), {}, "expected"),
    ((Limit("5/second", algorithm="fixed_window"),), {}, "can't book turns"),
]


@pytest.mark.parametrize(("limits", "options", "complaint"), MISTAKES, ids=[each[2][:20] for each in MISTAKES])
def test_mistakes_show_at_once(kind: Kind, limits: tuple[Any, ...], options: dict[str, Any], complaint: str) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match=complaint):
        caring(*limits, limiter=kind.limiter("memory://"), **options)


@pytest.mark.parametrize("wrong", [MemoryStore(), None, 5, "limiter of the other kind"], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_limiter_shows_at_once(kind: Kind, wrong: Any) -> None:
    """A store, or a limiter for the other kind of code."""
    if isinstance(wrong, str):
        wrong = (AsyncLimiter if kind.limiter is Limiter else Limiter)("memory://")
    with pytest.raises(ConfigError, match=f"expected {kind.limiter.__name__} or the URL of a store"):
        ClientThrottle((), wrong, kind.limiter, key=lambda request: request.key, repeatable=lambda _: True)


# --- overloaded hosts -------------------------------------------------------------------------------------------------


class Mortal(AsyncSide):
    """A host that may be dead; to be asked by tasks."""

    is_dead = False

    async def send(self, request: Request) -> tuple[Response, Answer]:  # type: ignore[override]
        found = await super().send(request)
        if self.is_dead:
            raise ConnectionError("refused")
        return found


async def offer(caller: Caller, side: Side, requests: int) -> list[str]:
    """Offer 20 requests a second, whatever becomes of them. Returns that of each."""

    async def outcome() -> str:
        try:
            await arun(caller.throttle.exchange(side, Request()))
        except RateLimited:
            return "refused"
        except ConnectionError:
            return "failed"
        return "answered"

    tasks = []
    for _ in range(requests):
        tasks.append(asyncio.create_task(outcome()))
        await asyncio.sleep(0.05)
    return await asyncio.gather(*tasks)


def test_a_dead_host_is_spared_and_found_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs next to nothing after half a minute, and gets all requests again half a minute after it is back."""
    monkeypatch.setattr(random, "random", random.Random(1).random)

    async def main() -> None:
        caller, side = Caller(KINDS["async"], world, throttle=True, adaptive=True), Mortal(world)
        assert await offer(caller, side, 300) == ["answered"] * 300
        side.is_dead = True
        await offer(caller, side, 600)
        dead = await offer(caller, side, 200)
        assert dead.count("refused") >= 180
        side.is_dead = False
        await offer(caller, side, 600)
        back = await offer(caller, side, 200)
        assert back.count("answered") >= 190

    world.run(main())


def overloaded(throttle: ClientThrottle[Request, Any], key: str = "shop") -> None:
    """Have a host be known as one that answers nothing."""
    assert throttle._loads
    for _ in range(1000):
        throttle._loads[key].end(None, "failed", is_accepted=False)


def test_what_a_host_is_spared_takes_no_turn(kind: Kind, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it tell of other hosts, nor of requests without a key."""
    monkeypatch.setattr(random, "random", lambda: 0.0)
    caller, side = Caller(kind, world, "1/hour", timeout=0, throttle=True), kind.side(world)
    overloaded(caller.throttle)
    refused = caller.refused(side)
    assert (refused.decision.retry_after, refused.decision.limit, refused.response) == (1, 0, None)
    caller.ask(side, Request(None))
    caller.ask(side, Request("depot"))
    assert len(side.asked) == 2
    caller.throttle.forget()
    caller.ask(side)


def test_a_long_key_is_remembered_as_a_short_one(kind: Kind, world: World) -> None:
    """The other side may choose it, by its redirects."""
    caller = Caller(kind, world, throttle=True)
    caller.ask(kind.side(world), Request("x" * 100_000))
    assert caller.throttle._loads
    assert max(map(len, caller.throttle._loads._hosts)) < 300


def test_a_request_that_comes_back_is_another_one(kind: Kind, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was refused there and then is refused here gets the response that there was."""
    monkeypatch.setattr(random, "random", lambda: 0.0)
    caller, side = Caller(kind, world, throttle=True), kind.side(world, Answer(429, 0.1))
    assert caller.throttle._loads
    for _ in range(9):
        caller.throttle._loads["shop"].end(None, "failed", is_accepted=False)
    assert caller.refused(side).response is side.given[0]
    assert len(side.asked) == 1


def test_refusals_for_a_host_are_counted(kind: Kind, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the observers of the limiter, as decided by nobody else."""
    monkeypatch.setattr(random, "random", lambda: 0.0)
    recorder = Recorder()
    limiter = kind.limiter(MemoryStore(world), observers=[recorder])
    throttle = caring("1/second", limiter=limiter, throttle=True)
    overloaded(throttle)
    for _ in range(3):
        with pytest.raises(RateLimited):
            kind.go(world, throttle.exchange(kind.side(world), Request()))
    assert recorder.new("requests") == {("refused", "nobody"): 3}
    assert recorder.new("rule.decisions") == {("(limiter)", "default", "refused"): 3}


def test_places_in_flight_come_back_whatever_happens(world: World) -> None:
    """Also to a request that is cancelled, fails, or whose event loop is gone."""

    async def main() -> None:
        caller, side = Caller(KINDS["async"], world, adaptive=Adaptive(min=2, max=2)), Mortal(world)
        side.takes = 1.0

        def ask() -> Any:
            return asyncio.create_task(arun(caller.throttle.exchange(side, Request())))

        async def is_full() -> None:
            await asyncio.sleep(0.01)
            with pytest.raises(RateLimited) as refused:
                await ask()
            decision = refused.value.decision
            assert (decision.limit, decision.reset_after, refused.value.response) == (2, 0.0, None)
            assert decision.windows == (Window(None, 2, 0, 0, 2, 0.0, decision.retry_after),)

        tasks = [ask(), ask()]
        await is_full()
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks = [ask(), ask()]
        await is_full()
        side.is_dead = True
        assert [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)] == [ConnectionError] * 2
        side.is_dead = False
        flow = caller.throttle.exchange(side, Request())
        wish = next(flow)
        while wish.__name__ != "send":
            wish = flow.send(await wish)
        wish.close()
        flow.close()
        tasks = [ask(), ask()]
        await is_full()
        assert [each.status for each in await asyncio.gather(*tasks)] == [200, 200]

    world.run(main())


def test_a_place_is_taken_after_the_turn(world: World) -> None:
    """Whoever waits for its turn is not in flight."""

    async def main() -> None:
        caller, side = Caller(KINDS["async"], world, "1/second", adaptive=Adaptive(min=1, max=1)), AsyncSide(world)
        asking = [arun(caller.throttle.exchange(side, Request())) for _ in range(5)]
        assert [each.status for each in await asyncio.gather(*asking)] == [200] * 5

    world.run(main())


class Pool(AsyncSide):
    """A host with ten connections to something that takes 40 to 60 ms. Whoever comes waits for one."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.connections = asyncio.Semaphore(10)
        self.latencies: list[float] = []

    async def send(self, request: Request) -> tuple[Response, Answer]:  # type: ignore[override]
        came = self.world.now
        async with self.connections:
            await asyncio.sleep(random.uniform(0.04, 0.06))
        self.latencies.append(self.world.now - came)
        return await super().send(request)


def test_a_host_gets_what_it_can_do(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """At three times the capacity of a host it serves at capacity, and nobody waits there for long."""
    generator = random.Random(5)
    monkeypatch.setattr(random, "uniform", generator.uniform)
    monkeypatch.setattr(random, "random", generator.random)

    async def main() -> None:
        caller, side = Caller(KINDS["async"], world, adaptive=True), Pool(world)

        async def ask() -> None:
            with suppress(RateLimited):
                await arun(caller.throttle.exchange(side, Request()))

        tasks = []
        for _ in range(5000):
            tasks.append(asyncio.create_task(ask()))
            await asyncio.sleep(generator.expovariate(600))
        await asyncio.gather(*tasks)
        served = sorted(side.latencies[1000:])
        assert len(side.latencies) / world.now > 0.95 * 200
        assert served[int(0.99 * len(served))] < 3 * 0.06

    world.run(main())


# --- anything ---------------------------------------------------------------------------------------------------------

answers = st.sampled_from(
    [FINE, FINE, FINE, REFUSED, Answer(429, 2), Answer(429, 0.5), Answer(503, 3), Answer(200, None, 4), Answer(200, None, 0.2)]
)
arrivals = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.05, 0.4, 3.0]), st.sampled_from("ab"), answers), max_size=25)


@given(history=arrivals, burst=st.sampled_from([1, 3]), processes=st.sampled_from([1, 2]), timeout=st.sampled_from([0, 2, 20]))
def test_whatever_happens_everybody_is_polite_property(
    history: list[tuple[float, str, Answer]], burst: int, processes: int, timeout: float
) -> None:
    """Nobody is sent in a pause that was heard, none above the limit; who waits ends in time, and takes its own response."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(patch)
        store = MemoryStore(world)
        callers = [
            Caller(KINDS["async"], world, f"5/second burst {burst}", store=store, timeout=timeout) for _ in range(processes)
        ]
        side = AsyncSide(world, *[answer for _, _, answer in history])

        waits: list[float] = []

        async def one(number: int, key: str) -> None:
            began = world.now
            with_ = callers[number % processes].throttle
            try:
                response = await arun(with_.exchange(side, Request(key)))
            except RateLimited as refused:
                waits.append(refused.decision.retry_after)
                response = refused.response
            ends = (response.status == 429, response.ends) if response else (False, [])
            assert ends in [(True, ["discarded"]), (False, [])]
            assert world.now <= began + timeout + 0.01

        async def main() -> None:
            tasks = []
            for number, (pause, key, _) in enumerate(history):
                await asyncio.sleep(pause)
                tasks.append(asyncio.create_task(one(number, key)))
            await asyncio.gather(*tasks)

        world.run(main())
        assert all(0 < wait < 70 for wait in waits)
        for key in "ab":
            sent = [(at, response) for (at, request), response in zip(side.asked, side.given) if request.key == key]
            known = 0 if processes == 1 else throttle._HEARD + 0.001  # to those who have booked a turn elsewhere
            for (at, _), (then, response) in _later(sent):
                assert at <= then + known or at >= then + _least(response.answer) - 0.001
            times = [at for at, _ in sent]
            for first, at in enumerate(times):
                assert all(then - at >= (count - burst) / 5 - 0.001 for count, then in enumerate(times[first:]))


def _later(sent: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Everything that was sent after the answer to something else was heard."""
    for place, before in enumerate(sent):
        yield from ((after, before) for after in sent[place + 1 :] if after[0] > before[0])


def _least(answer: Answer) -> float:
    """For how long an answer has to be heeded whatever else is known: what is left may be known better here."""
    return answer.retry_after or (1 if answer.refused else 0)


@pytest.mark.parametrize("repeatable", [True, False, None, "yes"])
def test_repeatable_is_a_callable(kind: Kind, world: World, repeatable: Any) -> None:
    """The error comes when the client is made, not with the first refusal."""
    with pytest.raises(ConfigError, match=r"repeatable is .*, expected a callable .*such as lambda request: True"):
        Caller(kind, world, repeatable=repeatable)
