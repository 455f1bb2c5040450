"""A page for servers that tests start: ``uvicorn tests.page.app:app``, on the store of ``LIMITGATE_STORE``."""

from __future__ import annotations

import os
from typing import Any

from limitgate.page import Page, asgi

asgi.PERIOD_S = float(os.environ.get("PERIOD_S", asgi.PERIOD_S))
"""Seconds between events."""

_page: Any = None


async def app(scope: Any, receive: Any, send: Any) -> None:
    global _page  # noqa: PLW0603 - made by the process that serves
    if _page is None:
        _page = Page(os.environ["LIMITGATE_STORE"], guard=lambda _: "ann", actions=True)
    await _page(scope, receive, send)
