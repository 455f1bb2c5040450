"""``python -m handbook.site_check`` opens every page of build/site in a browser, in light and in dark.

It fails for what axe-core finds, for an error of a script, and for a request to another host.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from handbook.site import BUILD
from tests.support.browser import axe, chromium, violations

SITE = BUILD / "site"
SCHEMES = ("light", "dark")


class Files(SimpleHTTPRequestHandler):
    """Serves the site without a line per request."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        """Say nothing."""


@contextmanager
def served() -> Iterator[str]:
    """Serve the site on a free port. Yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(SITE))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def found_on(page: Any, url: str, source: str) -> list[str]:
    """Return what is wrong with one page."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(f"script: {error}"))
    page.goto(url, wait_until="networkidle")
    page.evaluate(source)
    return errors + violations(page)


def check(only: list[str]) -> int:
    """Print what is wrong with some pages, or all. Return how much that is."""
    pages = only or sorted(file.relative_to(SITE).parent.as_posix() for file in SITE.rglob("index.html"))
    found = 0
    with tempfile.TemporaryDirectory() as folder, chromium() as browser, served() as home:
        source = axe(Path(folder))
        for scheme in SCHEMES:
            context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
            elsewhere: set[str] = set()
            # Requests to others are counted, not sent.
            context.route(lambda url: not url.startswith(home), lambda route: route.abort())
            context.on("request", lambda request, seen=elsewhere: request.url.startswith(home) or seen.add(request.url))
            for name in pages:
                page = context.new_page()
                for line in found_on(page, f"{home}{name}/", source):
                    print(f"{name} in {scheme}: {line}")  # noqa: T201 - a program
                    found += 1
                page.close()
            for url in sorted(elsewhere):
                print(f"request to another host in {scheme}: {url}")  # noqa: T201 - a program
            found += len(elsewhere)
            context.close()
    print(f"{len(pages)} pages in {' and '.join(SCHEMES)}: {found} findings")  # noqa: T201 - a program
    return found


def main() -> None:
    """Check the pages that arguments name, such as `start`, or all. Exit with 1 if something is wrong."""
    if not SITE.is_dir():
        sys.exit("site-check: there is no build/site: run make site")
    try:
        sys.exit(int(check(sys.argv[1:]) > 0))
    except pytest.skip.Exception as error:
        sys.exit(f"site-check: {error}")


if __name__ == "__main__":
    main()
