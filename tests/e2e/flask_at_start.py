"""Served for what is logged at start, as `tests.e2e.at_start`: ``tests.e2e.flask_at_start:app``."""

from __future__ import annotations

import logging
import os
import sys

import flask

import limitgate.flask
from limitgate import Rule

logging.basicConfig(level=logging.INFO, format="%(process)d %(levelname)s %(message)s", stream=sys.stderr)

app = flask.Flask(__name__)
app.add_url_rule("/", "who", lambda: str(os.getpid()))
limitgate.flask.LimitGate(app, rules=[Rule("all", "3/minute")])
