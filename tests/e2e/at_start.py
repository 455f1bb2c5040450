"""Served for what is logged at start: ``tests.e2e.at_start:app`` and ``:flask_app``. Options come from ``LIMITGATE_*``."""

from __future__ import annotations

import logging
import os
import sys

import flask
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import limitgate.flask
from limitgate import LimitGate, Rule

logging.basicConfig(level=logging.INFO, format="%(process)d %(levelname)s %(message)s", stream=sys.stderr)
RULES = [Rule("all", "3/minute")]


async def who(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{os.getpid()} {request.client}")


app = Starlette(routes=[Route("/", who)])
app.add_middleware(LimitGate, rules=RULES)

if not any(word.endswith("at_start:app") for word in sys.argv):
    flask_app = flask.Flask(__name__)
    flask_app.add_url_rule("/", "who", lambda: str(os.getpid()))
    limitgate.flask.LimitGate(flask_app, rules=RULES)
