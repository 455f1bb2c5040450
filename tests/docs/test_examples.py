"""tests/support/examples.py runs the pages' code; here it is shown that it notices what does not hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from limitgate import ConfigError
from tests.support import examples
from tests.support.markdown import Block

ASGI = """
from limitgate import LimitGate, Rule

async def greet(scope, receive, send):
    if scope["type"] == "http":
        status = 500 if scope["path"] == "/broken" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": scope["method"].encode()})
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})

app = LimitGate(greet, rules=[Rule("all", "3/minute", key=["header:x-who"])])
"""
WSGI = """
from limitgate import LimitGateWSGI, Rule

def greet(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [environ["wsgi.input"].read(100)]

application = LimitGateWSGI(greet, rules=[Rule("all", "3/minute", methods=["GET", "POST"])])
"""
FLASK = """
from flask import Flask
from limitgate import LimitGateWSGI, Rule

app = Flask(__name__)
app.get("/hello")(lambda: "hello")
app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules=[Rule("all", "3/minute")])
"""


def run(code: str, folder: Path) -> None:
    examples.run(Block("README.md", 0, "python", code), folder, "redis://127.0.0.1:1")


@pytest.mark.parametrize(
    "code",
    [
        "print(1)\nprint(2)  # prints 1\n# prints 2",
        "import os\nos.environ['LIMITGATE_RULES'] = 'config/'",
        "def test_it(monkeypatch):\n    monkeypatch.setenv('LIMITGATE_RULES', 'config/')",
        "async def nothing(): ...",
        f"{ASGI}# GET /",
        f"{ASGI}# GET / -> 200 (3 times), 429",
        f"{ASGI}# WS /\n# GET / with X-Who: ann",
        f"{ASGI}# WS / -> 101 (3 times), 429",
        f"{ASGI}# GET / with X-Who: ann -> 200 (3 times)\n# GET / -> 200 (3 times), 429",
        f"{ASGI}# GET / -> 200\n# GET /broken -> 500, 500, 429",
        f'{WSGI}# POST / with {{"user": "ann"}} -> 200 (3 times), 429',
        FLASK,
    ],
)
def test_what_holds_passes(code: str, tmp_path: Path) -> None:
    """Programs that do what they say pass, ASGI and WSGI, and leave no trace in the environment."""
    before = dict(os.environ)
    run(code, tmp_path)
    assert os.environ == before


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print(1)", AssertionError),
        ("# prints 1", AssertionError),
        ("import nowhere", ImportError),
        ("def test_it():\n    assert False", AssertionError),
        ("# GET /hello", AssertionError),
        (f"{ASGI}# GET / twice", AssertionError),
        (f"{ASGI}# GET / -> often", AssertionError),
        (f"{ASGI}# GET / -> 200, 429", AssertionError),
        (f"{ASGI}# GET / -> 200 (3 times)", AssertionError),
        (f"{ASGI}# GET /broken", AssertionError),
        (ASGI, AssertionError),
        (ASGI.replace('"3/minute"', '"3000/minute"') + "# GET /", AssertionError),
        (f"{WSGI}# PUT /", AssertionError),
        (FLASK.replace("/hello", "/<name>").replace('lambda: "', 'lambda name: "'), AssertionError),
        (FLASK.replace("3/minute", "3/fortnight"), ConfigError),
    ],
)
def test_what_does_not_hold_is_noticed(code: str, error: type[Exception], tmp_path: Path) -> None:
    """Programs that do something else than they say, or that limit nothing, do not pass."""
    with pytest.raises(error):
        run(code, tmp_path)


def test_files_of_a_page_lie_beside_each_other(tmp_path: Path) -> None:
    """A block has the rule files of the project and those that its page shows before it."""
    run(
        "from limitgate import load_rules\nprint(load_rules('config/'))  # prints RuleSet(default: 3 rules, vip: 3 rules)",
        tmp_path,
    )


def test_django_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Several examples can set Django up, and what is wrong with one is told."""
    code = "from django.conf import settings\nsettings.configure()\nprint(settings.configured)  # prints "
    run(f"{code}True", tmp_path)
    with pytest.raises(AssertionError, match="AssertionError"):
        run(f"{code}False", tmp_path)
