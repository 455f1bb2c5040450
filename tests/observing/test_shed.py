"""Metrics of adaptive limits, as observers get them."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from limitgate import Adaptive, LimitGate, LimitGateWSGI, Rule
from limitgate.observing.counts import ShedSeries
from limitgate.observing.series import count_series
from limitgate.overload.adaptive_limit import Permit
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter, WaitingThread
from limitgate.overload.lag import heartbeats
from limitgate.overload.options import Terms
from limitgate.rules.rule import RuleSet
from tests.support.doors import SITES, ASGISite, Site, WSGISite, asgi_reply, until, wsgi_reply
from tests.support.observed import Recorder

ALL = ("all", "default")
NONE = {(*ALL, priority, reason): 0 for priority in ("high", "normal", "low") for reason in ("limit", "lag", "thinned")}


def places_of(gated: Any) -> ConcurrencyLimiter:
    (compiled_rule,) = gated.gate.rules.planner._every["default"]
    assert isinstance(compiled_rule.places, ConcurrencyLimiter)
    return compiled_rule.places


def gated(*rules: Rule) -> tuple[Recorder, LimitGateWSGI]:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"done"]

    recorder = Recorder()
    return recorder, LimitGateWSGI(app, rules=list(rules), observers=[recorder])


def test_all_series_of_a_rule_are_there_from_the_start() -> None:
    rules = [Rule("all", adaptive=Adaptive(min=2, max=9), max_delay=1)]
    recorder, _ = gated(*rules)
    assert recorder.of("rule.adaptive_limit") == {ALL: 9}
    assert recorder.of("rule.adaptive_base") == recorder.of("rule.in_flight") == recorder.of("rule.waiting") == {ALL: 0}
    assert recorder.of("rule.shed") == NONE
    of_rule = [place for place in recorder.told if place[1][:2] == ALL]
    assert count_series(RuleSet(rules)) == len(of_rule) + 10  # a histogram of 9 buckets has a sum and a count besides


def test_requests_are_counted_by_what_an_adaptive_limit_says_of_them() -> None:
    """The rule has decided, and nobody was asked; a rule that counts, too, has decided once."""
    for rates, source in (((), "nobody"), (("9/minute",), "store")):
        recorder, app = gated(Rule("all", *rates, adaptive=Adaptive(min=2, max=2)))
        assert wsgi_reply(app).status == 200
        begun = [places_of(app).limit.begin(0.0, "other") for _ in range(2)]
        assert wsgi_reply(app).status == 503
        assert recorder.new("requests") == {("admitted", source): 1, ("refused", "nobody"): 1}
        assert recorder.new("rule.decisions") == {(*ALL, "admitted"): 1, (*ALL, "refused"): 1}
        assert recorder.new("rule.shed") == {(*ALL, "normal", "limit"): 1}
        assert recorder.of("rule.in_flight") == {ALL: 2}
        assert all(isinstance(each, Permit) for each in begun)


def test_a_shadow_has_not_refused() -> None:
    """The series that tells so is there before."""
    recorder, app = gated(Rule("all", adaptive=Adaptive(min=1, max=1), shadow=True))
    assert recorder.of("requests")["shadow_refused", "nobody"] == 0
    places_of(app).limit.begin(0.0, "other")
    assert wsgi_reply(app).status == 200
    assert recorder.new("requests") == {("shadow_refused", "nobody"): 1}
    assert recorder.new("rule.decisions") == {(*ALL, "shadow_refused"): 1}


@pytest.mark.parametrize("rates", [(), ("9/minute",)])
@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_a_request_that_has_waited_for_its_place_is_delayed(door: type[Site], rates: tuple[str, ...]) -> None:
    """The decision says how long, the outcome and the figures that it did, and no store has made it wait."""
    recorder = Recorder()
    rules = [Rule("all", adaptive=Adaptive(min=1, max=1), max_delay=60), *(Rule("api", rate) for rate in rates)]
    with door(*rules, observers=[recorder]) as site, ThreadPoolExecutor() as threads:
        assert recorder.of("requests")["delayed", "nobody"] == 0
        places = site.app.gate.rules.planner._every["default"][0].places
        permit = places.begin("other", "normal", None, WaitingThread)
        waiting = threads.submit(site.ask)
        until(lambda: places.limit.waiting == 1)
        places.end(permit)
        assert waiting.result().status == 200
        assert site.seen[0].delay > 0
        assert recorder.new("requests") == {("delayed", "nobody"): 1}
        assert recorder.new("rule.decisions") == {(each.name, "default", "admitted"): 1 for each in rules}
        assert (places.limit.in_flight, places.limit.waiting) == (0, 0)


def test_a_request_that_another_rule_refuses_is_not_counted() -> None:
    recorder, app = gated(Rule("all", adaptive=True), Rule("api", "1/hour"))
    assert [wsgi_reply(app).status for _ in range(2)] == [200, 429]
    assert recorder.new("rule.decisions") == {
        (*ALL, "admitted"): 1,
        ("api", "default", "admitted"): 1,
        ("api", "default", "refused"): 1,
    }


def test_lag_of_the_event_loop_is_told() -> None:
    recorder = Recorder()
    app = LimitGate(ASGISite.answering(200, [], b"", []), rules=[Rule("all", adaptive=True)], observers=[recorder])

    async def main() -> None:
        assert (await asgi_reply(app)).status == 200
        assert recorder.of("adaptive.lag")[()] >= 0

    asyncio.run(main())


def test_the_child_of_a_fork_counts_anew() -> None:
    """Whichever of the two begins anew before the other: what the parent has refused is for the parent to tell."""
    places = ConcurrencyLimiter(Terms(Adaptive(min=1, max=1)))
    shed = ShedSeries(ALL, places)
    for _ in range(3):
        places.limit.begin(0.0, "other")
    shed.look()
    assert sum(shed.values) == 2
    if not (child := os.fork()):
        try:
            shed.look()
            assert sum(shed.values) == 2
            for _ in range(2):
                places.limit.begin(0.0, "other")
            shed.look()
            assert sum(shed.values) == 3
        except BaseException:  # noqa: BLE001 - nobody else hears of it
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_lag_behind_a_proxy_is_told() -> None:
    """By the word of the one that is trusted, under threads too."""
    recorder = Recorder()
    with WSGISite(Rule("all", adaptive=True), trusted_proxies=["10.0.0.1"], observers=[recorder]) as site:
        headers = {"X-Request-Start": f"t={time.time() - 5:.3f}"}
        assert site.ask(headers=headers, peer="10.0.0.1").status == 503
        assert heartbeats.are_known
        assert set(recorder.of("adaptive.lag")) == {()}
