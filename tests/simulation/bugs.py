"""Past bugs, put back by a switch: each makes the simulation find something, see test_simulation.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from limitgate.algorithms import gcra
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.limits.template import PlanTemplate
from limitgate.stores.memory import MemoryStore
from limitgate.stores.redis import leases, replies
from limitgate.stores.redis.aio.batch import Batch
from limitgate.stores.redis.aio.batcher import Batcher
from limitgate.stores.redis.breaker import Breaker
from limitgate.stores.redis.deny_cache import LONGEST, DenyCache, _Refusal
from limitgate.stores.redis.leases import _Held
from limitgate.stores.redis.session import Session

Patch = tuple[Any, str, Any]


def _sent_again_and_again() -> list[Patch]:
    """A call on a lost connection is sent again as often as connections are lost, and charged as often."""
    return [(Session, "may_repeat", lambda *_: True)]


def _refund_sent_again() -> list[Patch]:
    """A refund on a lost connection is sent again, so that it may be given back twice."""

    def repeated(self: Batch) -> Batch:
        again = Batch([request for request in self.requests if not request[2].done()], self.shape)
        again.follow(self)
        again.asking, again.is_repeated = self.asking, True
        return again

    def send_again(self: Batcher, batch: Batch, lost: Exception) -> None:
        self._replies.unanswered(batch)
        again = batch.repeated()
        if again.requests:
            self._replies.outgoing(again)
            self._resends.append(again)

    return [(Batch, "repeated", repeated), (Batcher, "_send_again", send_again)]


def _refusal_for_other_costs() -> list[Patch]:
    """A refusal that is remembered refuses smaller costs, too."""
    answer = DenyCache.answer_plain

    def answer_plain(self: DenyCache, plan: Any, at: float) -> Any:
        found = answer(self, plan, at)
        if found is not None or not plan.template.is_of_debts:
            return found
        debts: list[int] = []
        for key, (bucket, *_) in zip(plan.keys, plan.template.buckets):
            refusal = self.refusals.get(key)
            if refusal is None or refusal.bucket is not bucket or at - refusal.sent >= LONGEST:
                return None
            debts += bucket.capacities
        reading = plan.template.reading(plan.keys, refusal.now, debts, False)
        reading.source = "cache"
        return reading

    return [(DenyCache, "answer_plain", answer_plain)]


def _refusal_after_a_reset() -> list[Patch]:
    """A refusal is still repeated after the process itself has reset or refunded the bucket, or lifted the ban."""
    learn = DenyCache.learn

    def learns(self: DenyCache, plan: Any, reading: Any, sent: float, heard: float) -> None:
        if not plan.gives_back:
            learn(self, plan, reading, sent, heard)

    return [(DenyCache, "learn", learns), (DenyCache, "forget", lambda *_: None)]


def _refusal_without_time() -> list[Patch]:
    """A refusal is repeated as if no time had passed since."""

    def later(self: Any, elapsed_us: int) -> Any:
        return self.states

    return [(_Refusal, "later", later)]


def _lease_without_time() -> list[Patch]:
    """A lease is used up although it has drained in Redis."""
    return [(_Held, "forward", lambda *_: None), (leases, "LONGEST", 60.0)]


def _wait_rounded_down() -> list[Patch]:
    """``retry_after`` is rounded down to milliseconds."""
    refused = PlanTemplate.refused

    def rounded(self: PlanTemplate, reading: Any, settlement: Any) -> Any:
        decision = refused(self, reading, settlement)
        if decision is not None and decision.retry_after < 1e6:
            object.__setattr__(decision, "retry_after", int(decision.retry_after * 1000) / 1000)
        return decision

    return [(PlanTemplate, "refused", rounded)]


def _refund_of_what_has_drained() -> list[Patch]:
    """A refund returns what has drained since the charge, too: more than was there."""
    adjustment = gcra.apply_adjustment

    def whole(debts: Any, back: Any, elapsed_us: int, grace_us: Any, bucket: Any) -> Any:
        return adjustment(debts, back, 0, grace_us, bucket)

    return [(gcra, "apply_adjustment", whole)]


def _mixed_answers() -> list[Patch]:
    """Requests of one batch get each other's answers."""
    hand_out = Batcher._hand_out

    def mixed(self: Batcher, batch: Batch, outcomes: Any, silence: float) -> None:
        if outcomes is not batch.plans and all(each is not replies.DECLINED for each in outcomes):
            outcomes = outcomes[::-1]
        hand_out(self, batch, outcomes, silence)

    return [(Batcher, "_hand_out", mixed)]


def _charged_partly() -> list[Patch]:
    """A refused request is charged to its limits with room."""
    make = MemoryStore._make

    def make_all(self: MemoryStore, homes: Any, reading: Any, now: int) -> None:
        make(self, homes, reading._replace(admitted=True), now)

    return [(MemoryStore, "_make", make_all)]


def _breaker_stays_open() -> list[Patch]:
    """The circuit breaker does not close after a probe that was answered."""
    succeeded = Breaker.succeeded

    def closes_early_only(self: Breaker) -> None:
        if self.is_closed:
            succeeded(self)

    return [(Breaker, "succeeded", closes_early_only)]


def _slot_of_a_cancelled_call() -> list[Patch]:
    """A call that is cancelled or fails while it takes a slot leaves it taken."""
    return [(SlotKeeper, "release_later", lambda *_: None)]


def _step_back_pays() -> list[Patch]:
    """A step back of the server's clock drains buckets as if the time had passed."""
    advance = gcra.advance

    def by_any_step(debts: Any, elapsed_us: int, bucket: Any, now: int | None = None) -> Any:
        return advance(debts, abs(elapsed_us), bucket, now)

    return [(gcra, "advance", by_any_step)]


def _no_timeout_in_flight() -> list[Patch]:
    """A sent call waits for its reply without a timeout."""
    return [(Batch, "overdue", lambda *_: [])]


def _dropped_connection() -> list[Patch]:
    """A connection that the network has dropped while it was idle costs requests."""
    return [(Session, "is_doubtful", False)]


def _refused_in_flight() -> list[Patch]:
    """The wait of a remembered refusal counts from the answer, as if the call had not taken any time."""
    learn = DenyCache.learn

    def learns(self: DenyCache, plan: Any, reading: Any, sent: float, heard: float) -> None:
        learn(self, plan, reading, heard, heard)

    return [(DenyCache, "learn", learns)]


BUGS: dict[str, Callable[[], list[Patch]]] = {
    "breaker-stays-open": _breaker_stays_open,
    "charged-partly": _charged_partly,
    "dropped-connection": _dropped_connection,
    "lease-without-time": _lease_without_time,
    "mixed-answers": _mixed_answers,
    "no-timeout-in-flight": _no_timeout_in_flight,
    "refund-of-what-has-drained": _refund_of_what_has_drained,
    "refund-sent-again": _refund_sent_again,
    "refusal-after-a-reset": _refusal_after_a_reset,
    "refusal-for-other-costs": _refusal_for_other_costs,
    "refusal-counted-from-the-answer": _refused_in_flight,
    "refusal-without-time": _refusal_without_time,
    "sent-again-and-again": _sent_again_and_again,
    "slot-of-a-cancelled-call": _slot_of_a_cancelled_call,
    "step-back-pays": _step_back_pays,
    "wait-rounded-down": _wait_rounded_down,
}


@contextmanager
def put_back(name: str) -> Iterator[None]:
    """The engine has a past bug again, in a ``with`` block."""
    patches = BUGS[name]()
    before = [(owner, attribute, owner.__dict__[attribute]) for owner, attribute, _ in patches]
    try:
        for owner, attribute, value in patches:
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)
