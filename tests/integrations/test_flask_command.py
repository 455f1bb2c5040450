"""``flask limitgate`` shows which limits apply to which route, just as the gate applies them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import flask
import flask.views
import pytest
from werkzeug.routing import Rule as URLRule

from limitgate import Caller, Request, Rule, RuleSet, exempt, limit
from limitgate.flask import routes_of
from limitgate.routes.overview import applied
from tests.integrations.test_flask import gated, hello, printed, site
from tests.support.doors import run_wsgi, wsgi_environ


class Cart(flask.views.MethodView):
    """Limited as a whole, and once more for one method."""

    decorators = (limit("9/minute", name="cart"),)

    def get(self) -> Any:
        return "hello"

    @limit("2/minute", name="order")
    def post(self) -> Any:
        return "hello"


def shop() -> flask.Flask:
    """An application that has something of everything."""
    app = site("shop")
    app.add_url_rule("/items/<int:id>", "item", hello, methods=["GET", "PUT"])
    app.add_url_rule("/items/special", "special", hello)
    app.add_url_rule("/files/<path:name>", "file", hello)
    app.add_url_rule("/cart/", view_func=Cart.as_view("cart"))
    app.add_url_rule("/health", "health", exempt(lambda: "hello"))
    app.add_url_rule("/<any('a>b', 'c'):it>.html", "page", hello)
    app.url_map.add(URLRule("/links/<it>", endpoint="item", build_only=True))
    return app


SHOP_RULES = [
    Rule("items", path="/items/**", qps=100, qpm=1000, key=["path", "ip"]),
    Rule("items", path="/items/**", qps=500, key=["caller"], tier="vip"),
    Rule("special", "10/minute", path="/items/special", shadow=True),
    Rule("readme", "20/minute", path="/files/readme"),
    Rule("writes", "30/minute", methods=["POST", "PUT"], on_error="closed"),
    Rule("gone", "1/minute", path="/old/**"),
    Rule("free", path="/cart", exempt=True, tier="vip"),
]


def by_header(request: Request) -> Caller:
    return Caller("ann", request.headers.get("x-tier", "default"))


def test_the_command_shows_every_route() -> None:
    """``flask limitgate`` lists the routes with methods, tiers, rules and decorators, and the rules that match none."""
    assert printed(gated(shop(), *SHOP_RULES, identify=by_header)) == [
        "Route                       Methods  Tier     Rule     Limits                   Key       Notes",
        "--------------------------  -------  -------  -------  -----------------------  --------  ------------------",
        "/<any('a>b', 'c'):it>.html  GET      all      -",
        "/cart/                      GET      default  cart     9/minute                 ip",
        "                                     vip      free     exempt",
        "                            POST     default  writes   30/minute                ip        on_error closed",
        "                                              cart     9/minute                 ip",
        "                                              order    2/minute                 ip",
        "                                     vip      free     exempt",
        "/files/<path:name>          GET      all      readme   20/minute                ip        only /files/readme",
        "/health                     GET      all      @exempt  exempt",
        "/hello                      GET      all      -",
        "/items/<int:id>             GET      default  items    100/second, 1000/minute  path, ip",
        "                                     vip      items    500/second               caller",
        "                            PUT      default  items    100/second, 1000/minute  path, ip",
        "                                              writes   30/minute                ip        on_error closed",
        "                                     vip      items    500/second               caller",
        "                                              writes   30/minute                ip        on_error closed",
        "/items/special              GET      default  items    100/second, 1000/minute  path, ip",
        "                                              special  10/minute                ip        shadow",
        "                                     vip      items    500/second               caller",
        "                                              special  10/minute                ip        shadow",
        "",
        "These rules match no route:",
        "",
        "Rule  Path     Tier",
        "----  -------  -------",
        "gone  /old/**  default",
    ]


REQUESTS = {
    "/items/<int:id>": ["/items/1", "/items/22"],
    "/items/special": ["/items/special"],
    "/files/<path:name>": ["/files/readme", "/files/a/b"],
    "/cart/": ["/cart/"],
    "/health": ["/health"],
    "/hello": ["/hello"],
    "/<any('a>b', 'c'):it>.html": ["/c.html"],
}


@pytest.mark.parametrize("tier", ["default", "vip"])
def test_the_command_says_what_the_gate_does(tier: str) -> None:
    """Whatever is listed for all paths of a route applies to each request to it, and nothing does that is not listed."""
    app = gated(shop(), *SHOP_RULES, identify=by_header)
    of_tier = RuleSet(SHOP_RULES).tiers[tier]
    checked = 0
    for route in routes_of(app):
        found = [(path, method) for path in REQUESTS[route.template] for method in route.methods if method != "OPTIONS"]
        for path, method in found:
            listed = applied(of_tier, route, method)
            limiting = [each for each in listed if each.rule != "exempt" and not each.rule.exempt]
            environ = wsgi_environ(path, method, headers={"X-Tier": tier})
            run_wsgi(app, environ)
            decision = environ["limitgate"]
            names = {window.rule for window in decision.windows} if decision else set()
            assert {each.rule.name for each in limiting if each.wholly} <= names <= {each.rule.name for each in limiting}
            checked += 1
    assert checked == 2 * 2 + 1 + 2 + 2 + 1 + 1 + 1


def test_the_command_says_that_nothing_is_refused() -> None:
    """With the option ``shadow`` the limits are listed all the same, and a line below says that they refuse nobody."""
    assert printed(gated(shadow=True))[2:] == [
        "/hello  GET      one   1/minute  ip",
        "",
        "The option shadow is on: nothing is refused.",
    ]


def test_the_command_on_hosts_and_subdomains() -> None:
    """A route of one host or subdomain is shown with it."""
    app = flask.Flask("hosts", static_folder=None, host_matching=True)
    app.add_url_rule("/<it>", "it", hello, host="api.example.com")
    gated(app, Rule("one", "1/minute", path="/a"))
    assert printed(app)[2] == "//api.example.com/<it>  GET      one   1/minute  ip   only /a"
    app = flask.Flask("subdomains", static_folder=None, subdomain_matching=True)
    app.add_url_rule("/<it>", "it", hello, subdomain="api")
    gated(app, Rule("one", "1/minute", path="/a"))
    assert printed(app)[2] == "//api.*/<it>  GET      one   1/minute  ip   only /a"


def test_the_command_follows_werkzeugs_redirects() -> None:
    """A path that Werkzeug redirects to a route is one of that route's; one that it knows nothing of is not."""
    app = site()
    app.add_url_rule("/items/<int:id>/", "item", hello)
    gated(app, Rule("one", "1/minute", path="/items/1"), Rule("none", "1/minute", path="/items/special"))
    assert printed(app)[3:] == [
        "/items/<int:id>/  GET      one   1/minute  ip   only /items/1",
        "",
        "These rules match no route:",
        "",
        "Rule  Path",
        "----  --------------",
        "none  /items/special",
    ]


def test_the_command_on_methods() -> None:
    """HEAD and OPTIONS that Flask adds are not shown; a route that takes any method is shown with the usual ones."""
    app = flask.Flask("methods", static_folder=None)
    app.add_url_rule("/head", "head", hello, methods=["HEAD"])
    app.add_url_rule("/options", "options", hello, methods=["OPTIONS"])
    app.add_url_rule("/post", "post", hello, methods=["POST"])
    app.url_map.add(URLRule("/any", endpoint="head"))
    gated(app, Rule("get", "1/minute", methods=["GET"]))
    assert printed(app)[2:] == [
        "/any      DELETE, PATCH, POST, PUT  -",
        "          GET                       get   1/minute  ip",
        "/head     HEAD                      get   1/minute  ip",
        "/options  OPTIONS                   -",
        "/post     POST                      -",
    ]


APP = """
from flask import Flask
from limitgate import limit
from limitgate.flask import LimitGate

gate = LimitGate()

def create_app():
    app = Flask(__name__, static_folder=None)
    app.config.from_prefixed_env()
    app.add_url_rule("/hello", "hello", limit("5/hour", name="own")(lambda: "hello"))
    gate.init_app(app)
    return app
"""


def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    """``flask limitgate`` finds an application factory, whose configuration may come from ``FLASK_LIMITGATE_*``."""
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "limits.yaml").write_text("rules: [{name: all, qpm: 60}]")
    command = [sys.executable, "-m", "flask", "--app", "shop", "limitgate"]
    environment = {"FLASK_LIMITGATE_RULES": "limits.yaml"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[2:] == [
        "/hello  GET      all   60/minute  ip",
        "                 own   5/hour     ip",
    ]
