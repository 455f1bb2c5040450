"""Served for what is logged at start: ``tests.e2e.at_start:app``. Options come from ``LIMITGATE_*``."""

from __future__ import annotations

import logging
import os
import sys

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import LimitGate, Rule

logging.basicConfig(level=logging.INFO, format="%(process)d %(levelname)s %(message)s", stream=sys.stderr)


async def who(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{os.getpid()} {request.client}")


app = Starlette(routes=[Route("/", who)])
app.add_middleware(LimitGate, rules=[Rule("all", "3/minute")])
