"""Both pages in a real browser: what a person does, on a phone, in the dark, by the keyboard alone."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handbook.site_check import found_on
from limitgate import RedisStore
from tests.support.attempts import at_best
from tests.support.browser import axe, chromium, opened, until, violations
from tests.support.doors import uvicorn_process
from tests.support.fleet import REVISION, digest, rule, snapshot, write
from tests.support.redis_server import RedisServer

PHONE: Any = {"width": 360, "height": 740}
LOOKS: list[dict[str, Any]] = [{"color_scheme": "dark"}, {"forced_colors": "active"}]
COLOURS = "color-contrast", "link-in-text-block"
"""Rules of axe-core that depend on the look."""
MARKUP = "ip=<img src=x onerror=alert(1)>"
NARROW = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For this module alone: Playwright's loop runs in this thread as long as it is there."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """That of axe-core."""
    return axe(tmp_path_factory.mktemp("axe"))


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The example on its own store."""
    with uvicorn_process("example_app.main:app", tmp_path_factory.mktemp("example")) as url:
        yield url


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The live page of a fleet with a straggler, a busy rule and a client whose name is markup."""
    redis = RedisServer()
    with contextlib.closing(RedisStore(redis.url)) as store:
        rates: Any = ({}, {digest(MARKUP): 41.5})
        busy = rule(refused=[(MARKUP, 900), ("ip=20….7", 400)], last=600, utilization=1.0, rates=rates)
        write(
            store,
            snapshot(1, rules=[busy, rule(tier="vip")]),
            snapshot(2, revision=REVISION - 1, last_error="no route", last_error_at=time.time() - 600),
            snapshot(3, host="web-1", pid=4001),
            seconds=600,
        )
        with uvicorn_process("tests.page.app:app", tmp_path_factory.mktemp("live"), LIMITGATE_STORE=redis.url) as url:
            yield url
    redis.stop()


def cells(page: Any, where: str, many: int) -> list[str]:
    """Statuses once all are painted."""
    until(page, f"document.querySelectorAll('#{where} li[class]').length === {many}")
    return page.locator(f"#{where} li").all_inner_texts()


def test_the_example_shows_a_limiter_at_work(browser: Any, example: str) -> None:
    """A press of a button paints what passes and what does not; headers, rule and command stand beside it.

    A crowd without the overload guard is answered in the end; with it, some are told at once to come back.
    """
    with opened(browser, example) as page:
        page.get_by_role("button", name="Send 60 requests to each").click()

        def statuses() -> list[str]:
            page.get_by_role("button", name="Send 8 requests").click()
            found = cells(page, "send-cells", 8)
            return [] if "200" in found and found[-1] == "429" else found

        assert at_best(statuses) == []
        page.get_by_text(re.compile("refused by rule api")).wait_for()
        assert "HTTP/1.1 429 Too Many Requests\nRetry-After: 1" in page.locator("#send-response").inner_text()
        assert "qps: 5" in page.locator("#send-rule").inner_text()
        assert page.locator("#buckets .bucket").count() == 3
        until(page, "document.querySelector('#buckets dd:last-child').textContent === '5 of 5'")
        page.get_by_text("VIP key", exact=True).click()
        page.get_by_role("button", name="Send 8 requests").click()
        assert cells(page, "send-cells", 8) == ["200"] * 8
        assert "-H 'X-API-Key: demo-vip-key'" in page.locator("#send-curl").inner_text()
        assert "qps: 50" in page.locator("#send-rule").inner_text()
        page.get_by_role("button", name="Guess 4 passwords").click()
        assert cells(page, "login-cells", 4) == ["401"] * 3 + ["429"]
        page.get_by_role("button", name="Log in").click()
        page.get_by_text(re.compile("^Refused by rule login")).wait_for()
        page.locator("#live-section").wait_for()
        page.get_by_text(re.compile("^60 answered, the slowest after")).wait_for()
        page.get_by_text(re.compile("told at once to come back later")).wait_for()
        assert page.locator("#plot-on rect").count() == 60


def test_the_live_page_answers_the_questions(browser: Any, live: str) -> None:
    """Who is refused most, by which rule, since when, is the store well, do all run the same rules; names are text."""
    with opened(browser, live) as page:
        assert "redis" in page.title() or "unix" in page.title()
        page.get_by_text(re.compile("^Redis answers in")).wait_for()
        said = page.locator("#headline").inner_text()
        assert re.search(r"is refused most now, by rule api, since [\d:]{8} UTC .*, 41.5 times a second", said)
        assert "41.5" in page.locator("#who tbody tr", has_text="onerror").inner_text()
        assert page.locator("#revisions").inner_text() == "1 of 3 processes has other rules: web-2:4002."
        assert page.locator("#processes tbody tr").count() == 3
        assert "differs" in page.locator("#processes tbody tr").first.inner_text()
        assert re.search(r"no route \(1\d min ago\)", page.locator("#processes tbody tr").first.inner_text())
        assert page.locator("img").count() == 0
        assert page.locator("#refused-chart svg").get_attribute("aria-label").startswith("refused per second over 15 minutes")
        page.get_by_text("Table of refused requests").click()
        assert page.locator("#refused-table tbody tr").count() > 10
        page.get_by_label("Path or refusal id").fill("/api/x")
        page.get_by_role("button", name="Explain").click()
        page.get_by_text(re.compile("^Cannot explain: the page knows no rules")).wait_for()
        assert page.evaluate("document.querySelectorAll('[style]').length") == 0
        headed = "show({...shown, at: 1040.9, headline: {...shown.headline, %s}}), $('headline').textContent"
        assert ", since 00:16:40 UTC (40 s)" in page.evaluate(headed % "since: 1000.2")
        assert ", since 1969-12-31 00:16 UTC (" in page.evaluate(headed % "since: 1000.2 - 86400")
        assert ", since ? UTC (" in page.evaluate(headed % "since: 1e15")
        assert "would be refused most now, by the shadow rule api (vip)," in page.evaluate(headed % "tier: 'vip', shadow: true")
        assert re.search(r"^[\d:]{8}$", page.locator("#who tbody tr").first.locator("td").nth(3).inner_text())
        page.get_by_text("Rates of the last 2 seconds, times in UTC.").wait_for()


def test_a_client_is_banned_by_the_keyboard(browser: Any, live: str) -> None:
    """The question has the focus, Escape takes it back, Enter answers it; the ban is listed, and lifted."""
    with opened(browser, live) as page:
        page.locator("#who tbody tr").first.wait_for()
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Ban":
                break
        page.keyboard.press("Enter")
        assert page.evaluate("document.getElementById('dialog').contains(document.activeElement)")
        page.keyboard.press("Escape")
        assert page.evaluate("[document.getElementById('dialog').open, document.activeElement.textContent]") == [False, "Ban"]
        page.keyboard.press("Enter")
        page.get_by_label("Reason, for the journal").press_sequentially("scraping")
        page.keyboard.press("Enter")
        page.get_by_text("Done. Every process follows within a second.").wait_for()
        row = page.locator("#bans tbody tr")
        row.wait_for()
        assert "ann" in row.inner_text()
        assert "scraping" in row.inner_text()
        until(page, "!document.getElementById('dialog').open")
        row.get_by_role("button").click()
        page.locator("#yes").click()
        page.get_by_text("No client is banned.").wait_for()


@pytest.mark.parametrize("which", ["example", "live"])
def test_everybody_can_use_it(browser: Any, which: str, source: str, request: pytest.FixtureRequest) -> None:
    """axe-core finds nothing in light, in dark, with forced colours and on a phone; nothing has to be scrolled sideways."""
    url = request.getfixturevalue(which)
    with opened(browser, url, bypass_csp=True, reduced_motion="reduce") as page:
        page.locator("#who tbody tr" if which == "live" else "#buckets .bucket").first.wait_for()
        page.evaluate(source)
        assert violations(page) == []
        for look in LOOKS:
            page.emulate_media(**look)
            assert violations(page, only=COLOURS) == []
        page.set_viewport_size(PHONE)
        assert page.evaluate(NARROW)
        assert violations(page) == []
    with opened(browser, url, viewport=PHONE, is_mobile=True, has_touch=True) as page:
        page.locator("#who tbody tr" if which == "live" else "#buckets .bucket").first.wait_for()
        assert page.evaluate(NARROW)


def test_a_phone_shows_tiers_and_actions(browser: Any, live: str) -> None:
    """Rules of one name are told apart, and no button has to be scrolled to."""
    with opened(browser, live, viewport=PHONE) as page:
        page.locator("#who tbody tr").first.wait_for()
        assert page.locator("#rules tbody th").all_inner_texts() == ["api", "api (vip)"]
        for button in page.locator("#who td button").all():
            box = button.bounding_box()
            assert box["x"] + box["width"] <= PHONE["width"]


def test_a_hidden_page_asks_nothing(browser: Any, live: str) -> None:
    """Its stream is closed, and opened anew when it is seen again."""
    with opened(browser, live) as page:
        asked: list[str] = []
        page.locator("#who tbody tr").first.wait_for()
        until(page, "source && source.readyState === 1")
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        page.evaluate(hide % "true" + "document.dispatchEvent(new Event('visibilitychange'))")
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(2500)
        assert asked == []
        assert page.evaluate("source") is None
        with page.expect_request("**/events"):
            page.evaluate(hide % "false" + "document.dispatchEvent(new Event('visibilitychange'))")


def test_where_streams_fail_it_asks(browser: Any, live: str) -> None:
    """A proxy that refuses the stream leaves the page with figures of a moment ago."""
    with opened(browser, "about:blank") as page:
        page.route("**/events", lambda route: route.fulfill(status=502))
        page.goto(live)
        until(page, "failures > 1")
        with page.expect_response("**/figures?screen=1") as answer:
            pass
        assert json.loads(answer.value.body())["processes_in_all"] == 3


def test_an_empty_page_and_a_store_that_is_gone_say_so(browser: Any, source: str, tmp_path: Path) -> None:
    """First there is nothing to show, and why; then the store does not answer. What was known is kept, as of the past."""
    redis = RedisServer()
    with (
        uvicorn_process("tests.page.app:app", tmp_path, LIMITGATE_STORE=redis.url, PERIOD_S="0.3") as url,
        opened(browser, url, bypass_csp=True) as page,
    ):
        page.get_by_text(re.compile("^Nothing to show: no process has written a snapshot")).wait_for()
        with redis.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
        page.get_by_text(re.compile("^Redis answers but refuses to write, so limits are not kept there: .*replica")).wait_for()
        with redis.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        with contextlib.closing(RedisStore(redis.url)) as store:
            write(store, snapshot(), seconds=600)
        page.get_by_text(re.compile("is refused most now, by rule api")).wait_for()
        redis.stop()
        page.get_by_text(
            re.compile(r"^Redis does not answer: .*[^.]\. If a process gets no answer, on_error applies: open,")
        ).wait_for()
        page.get_by_text(re.compile("was refused most, by rule api")).wait_for()
        known = page.get_by_text(re.compile(r"^Last known at [\d:]{8} UTC$"))
        before = known.inner_text()
        page.wait_for_timeout(1500)
        assert known.inner_text() == before
        assert not re.search(r"\d", page.locator("#refused-now").inner_text())
        page.evaluate(source)
        assert violations(page) == []


def test_the_check_of_the_site_finds_faults(browser: Any, source: str, tmp_path: Path) -> None:
    """`make site-check` reports what axe-core finds on a page, and errors of scripts."""
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><html lang=en><title>t</title><main><h1>t</h1><img src=a.png></main><script>x.y()</script>")
    with contextlib.closing(browser.new_page()) as opened_page:
        found = found_on(opened_page, page.as_uri(), source)
    assert [each.partition(":")[0] for each in found] == ["script", "image-alt"]
