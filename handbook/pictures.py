"""The pictures of pages and of `top` in docs/, taken in a real browser. The clock stands still, so that they change little."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group
from werkzeug.test import Client

from example_app import wsgi
from handbook import fleet
from limitgate import MemoryStore
from limitgate.command import fleet_screen
from limitgate.fleet.reader import FleetReader
from limitgate.page import PageWSGI

_BASE = "http://127.0.0.1:8000"
_SHOWN = b"redis://localhost:6379/0"
_FONT_FACES = re.compile(r"@font-face \{.*?\}", re.DOTALL)
Take = Callable[[Any], None]


def take(docs: Path) -> None:
    """Write the pictures, or say why not."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        sys.stderr.write("pictures of pages are left as they are: there is no chromium, see scripts/ensure-chromium\n")
        return
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - of the extra `test`

    with sync_playwright() as running, _utc():
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, scheme in (("page", "light"), ("page-dark", "dark")):
            _photograph(browser, docs / f"{name}.png", _page, (1180, 880), scheme)
        _photograph(browser, docs / "example.png", _example, (1080, 760))
        _photograph(browser, docs / "top.png", _top, (1080, 640))
        browser.close()


@contextmanager
def _utc() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    os.environ.pop("TZ")
    if before is not None:
        os.environ["TZ"] = before
    time.tzset()


def _photograph(browser: Any, file: Path, show: Take, size: tuple[int, int], scheme: str = "light") -> None:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=scheme,
        timezone_id="UTC",
        locale="en-GB",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.clock.set_fixed_time(fleet.NOW * 1000)
    show(page)
    page.screenshot(path=file)
    context.close()


def _page(page: Any) -> None:
    """The live page of the made-up fleet."""
    _serve(page, PageWSGI(fleet.store(), guard=lambda _: "ann"))
    page.goto(f"{_BASE}/")
    page.locator("#who tbody tr").first.wait_for()


def _example(page: Any) -> None:
    """The start page of the example, after eight requests."""
    _serve(page, wsgi.create_app(store=MemoryStore(lambda: round(fleet.NOW * 1e6))))
    page.goto(f"{_BASE}/")
    page.get_by_role("button", name="Send 8 requests").click()
    page.get_by_text(re.compile("refused by rule api")).wait_for()


def _top(page: Any) -> None:
    """The terminal, as rich draws it."""
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    figures = FleetReader(fleet.store()).read()
    figures["store"]["latency"] = 0.0004
    console.print(Group(*fleet_screen.top_view(figures, 24)))
    drawn = _FONT_FACES.sub("", console.export_svg(title="limitgate top --store redis://localhost"))
    page.set_content(f"<body style='margin: 0'>{drawn}</body>")
    page.set_viewport_size({"width": 1080, "height": round(page.locator("svg").bounding_box()["height"])})


def _serve(page: Any, app: Any) -> None:
    """Answer the browser by a WSGI application, without a server."""
    client = Client(app)

    def answer(route: Any) -> None:
        asked = route.request
        url = urlsplit(asked.url)
        response = client.open(
            url.path,
            method=asked.method,
            query_string=url.query,
            headers={"Host": url.netloc},
            data=asked.post_data_buffer,
            environ_overrides={"REMOTE_ADDR": "127.0.0.1"},
        )
        # What is measured would be another each time.
        body = re.sub(rb'"latency": ?[0-9.e-]+', b'"latency":0.0004', response.data)
        body = body.replace(b"memory://, prefix", _SHOWN + b", prefix").replace(
            b'"store": "memory://"', b'"store": "%s"' % _SHOWN
        )
        headers = {name: value for name, value in response.headers if name.lower() != "content-length"}
        route.fulfill(status=response.status_code, headers=headers, body=body)

    page.route(f"{_BASE}/**", answer)
