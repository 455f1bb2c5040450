"""Served while rules change: ``tests.e2e.reloading:app`` and ``:flask_app``. Rules and options come from ``LIMITGATE_*``."""

from __future__ import annotations

import logging
import sys

import flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import limitgate.flask
from limitgate import LimitGate

logging.basicConfig(level=logging.INFO, format="%(process)d %(levelname)s %(message)s", stream=sys.stderr)

app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"))])
app.add_middleware(LimitGate)

if not any(word.endswith("reloading:app") for word in sys.argv):
    flask_app = flask.Flask(__name__)
    flask_app.add_url_rule("/", "hello", lambda: "hello")
    limitgate.flask.LimitGate(flask_app)
