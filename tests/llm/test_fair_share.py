"""Tenants of a process take turns by tokens."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from limitgate.llm.fair_share import FairLine


def order(line: FairLine, requests: list[tuple[str, int]]) -> list[str]:
    """The tenants in the order in which they are called, of requests that join while the first one is being served."""
    waiting = {line.join(tenant, tokens): tenant for tenant, tokens in requests}
    called = []
    while waiting:
        (now,) = [ticket for ticket in waiting if ticket.is_called]
        called.append(waiting.pop(now))
        line.leave(now, is_taken=True)
    assert len(line) == 0
    return called


def test_one_tenant_is_served_in_its_order() -> None:
    line = FairLine()
    tickets = [line.join("a", 10) for _ in range(5)]
    for ticket in tickets:
        assert [each.is_called for each in tickets].count(True) == tickets.index(ticket) + 1
        line.leave(ticket, is_taken=True)


def test_a_tenant_with_many_requests_delays_another_by_one() -> None:
    called = order(FairLine(), [("many", 100)] * 1_000 + [("few", 100)] * 5)
    assert called.index("few") == 1
    # They alternate until the few are served.
    assert called[:10].count("few") == 5


def test_turns_are_by_tokens() -> None:
    called = order(FairLine(), [("large", 1_000)] * 10 + [("small", 100)] * 100)
    assert Counter(called[:44])["large"] == pytest.approx(4, abs=1)


def test_an_idle_tenant_saves_up_no_turns() -> None:
    line = FairLine()
    first = line.join("a", 10)
    others = [line.join("a", 10) for _ in range(100)]
    for ticket in [first, *others[:50]]:
        line.leave(ticket, is_taken=True)
    late = [line.join("b", 10) for _ in range(20)]
    called = []
    pending = dict.fromkeys(others[50:], "a") | dict.fromkeys(late, "b")
    while pending:
        (now,) = [ticket for ticket in pending if ticket.is_called]
        called.append(pending.pop(now))
        line.leave(now, is_taken=True)
    assert 9 <= called[:20].count("b") <= 11


def test_a_request_that_took_nothing_does_not_count() -> None:
    line = FairLine()
    head = line.join("x", 1)
    refused = line.join("a", 1_000_000)
    line.leave(refused, is_taken=False)
    a, b = line.join("a", 10), line.join("b", 10)
    line.leave(head, is_taken=True)
    assert a.is_called
    line.leave(a, is_taken=True)
    assert b.is_called


def test_who_leaves_early_is_skipped() -> None:
    line = FairLine()
    head, gone, last = line.join("a", 1), line.join("b", 1), line.join("c", 1)
    line.leave(gone, is_taken=False)
    line.leave(head, is_taken=True)
    assert last.is_called
    assert not gone.is_called
    line.leave(last, is_taken=True)
    assert len(line) == 0


def test_a_wait_ends_after_its_timeout() -> None:
    line = FairLine()
    line.join("a", 1)
    assert not line.wait(line.join("b", 1), 0.01)

    async def awaited() -> bool:
        return await line.await_(line.join("c", 1), 0.01)

    assert asyncio.run(awaited()) is False


def test_a_waiter_of_an_event_loop_that_has_ended_is_skipped() -> None:
    line = FairLine()
    head = line.join("a", 1)
    waiting: Any = line.await_(line.join("b", 1), None)

    async def begin() -> None:
        waiting.send(None)

    asyncio.run(begin())
    last = line.join("c", 1)
    line.leave(head, is_taken=True)
    assert last.is_called
    waiting.close()


def test_threads_and_tasks_share_a_line() -> None:
    line, served = FairLine(), Counter[str]()
    inside = threading.Semaphore(1)

    def serve(tenant: str) -> None:
        assert inside.acquire(blocking=False), "two at once"
        served[tenant] += 1
        inside.release()

    def thread(number: int) -> None:
        ticket = line.join(tenant := f"t{number % 3}", 10)
        assert line.wait(ticket, 30)
        serve(tenant)
        line.leave(ticket, is_taken=True)

    async def task(number: int) -> None:
        ticket = line.join(tenant := f"a{number % 3}", 10)
        assert await line.await_(ticket, 30)
        serve(tenant)
        line.leave(ticket, is_taken=True)

    async def tasks() -> None:
        await asyncio.gather(*map(task, range(300)))

    with ThreadPoolExecutor(8) as pool:
        threads = [pool.submit(thread, number) for number in range(300)]
        asyncio.run(tasks())
        for each in threads:
            each.result()
    assert sum(served.values()) == 600
    assert len(line) == 0


def test_several_tenants_are_called_at_once_and_each_only_once() -> None:
    line = FairLine(2)
    first, again, second, third = line.join("a", 10), line.join("a", 10), line.join("b", 10), line.join("c", 10)
    assert [each.is_called for each in (first, again, second, third)] == [True, False, True, False]
    # Those who wait take turns by tokens: c's first is before a's second.
    line.leave(first, is_taken=True)
    assert third.is_called
    assert not again.is_called
    line.leave(second, is_taken=True)
    assert again.is_called
    for each in (third, again):
        line.leave(each, is_taken=True)
    assert len(line) == 0


def test_a_tenant_whose_first_leaves_keeps_its_place() -> None:
    line = FairLine()
    head, gone, next_one = line.join("x", 10), line.join("a", 10), line.join("a", 10)
    line.leave(gone, is_taken=False)
    line.leave(head, is_taken=True)
    assert next_one.is_called


def test_a_tenant_keeps_its_turn_though_an_event_loop_has_ended() -> None:
    line = FairLine()
    head, gone, last = line.join("x", 1), line.join("a", 1), line.join("a", 1)
    waiting: Any = line.await_(gone, None)

    async def begin() -> None:
        waiting.send(None)

    asyncio.run(begin())
    line.leave(head, is_taken=True)
    assert last.is_called
    waiting.close()
