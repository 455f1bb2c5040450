"""A real browser: Debian's chromium, driven by Playwright, and axe-core, which finds what people cannot use."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.npm import installed

AXE = "axe-core@4.14.1"
_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", each => violations.push(`${each.violatedDirective} ${each.blockedURI}`));
"""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser with a profile of its own. Skips the test with the reason if there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium; scripts/ensure-chromium installs one")
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page in a fresh context, once it has loaded; its errors and violations of its policy fail the test."""
    context = browser.new_context(**options)
    context.add_init_script(_VIOLATIONS)
    context.set_default_timeout(20_000)
    page, errors = context.new_page(), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if _is_error(message) else None)
    try:
        page.goto(url)
        yield page
        if not options.get("bypass_csp"):
            assert page.evaluate("violations") == []
        assert errors == []
    finally:
        context.close()


def _is_error(message: Any) -> bool:
    """The console reports answers such as 429, which are what pages show."""
    return message.type == "error" and not message.text.startswith("Failed to load resource")


def until(page: Any, expression: str) -> None:
    """Wait for something on a page. Playwright's own way needs ``eval`` there, which the policy of our pages forbids."""
    deadline = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def axe(folder: Path) -> str:
    """The source of axe-core."""
    return (installed(folder, AXE) / "axe-core" / "axe.min.js").read_text()


def violations(page: Any, only: Sequence[str] = ()) -> list[str]:
    """What axe-core finds on a page that has evaluated it: the rule and the first element of each."""
    rules = {"runOnly": list(only)} if only else {}
    found = page.evaluate("options => axe.run(document, options)", {"resultTypes": ["violations"], **rules})
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found["violations"]]
