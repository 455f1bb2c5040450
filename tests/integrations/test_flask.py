"""LimitGate as a Flask extension: where its options come from, who is asking, what runs for whom."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import flask
import flask.sessions
import httpx
import pytest
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.routing import BaseConverter
from werkzeug.test import TestResponse

import limitgate
from limitgate import Caller, ConfigError, LimitGateWSGI, MemoryStore, Request, Rule, Settings, exempt, limit
from limitgate.flask import LimitGate
from tests.support.clock import Clock
from tests.support.doors import threaded_wsgi

ONE = [Rule("one", "1/minute")]


def site(name: str = "site", **config: Any) -> flask.Flask:
    """An application with one view, which says how much is left."""
    app = flask.Flask(name, static_folder=None)
    app.config.update(config)
    app.secret_key = "secret"

    @app.get("/hello")
    def hello() -> Any:
        decision = flask.request.environ["limitgate"]
        return {"remaining": decision and decision.remaining}

    return app


def gated(app: flask.Flask | None = None, *rules: Rule, **options: Any) -> flask.Flask:
    """The application with the extension, on a clock that stands still."""
    app = app or site()
    LimitGate(app, **{"rules": rules or ONE, "store": MemoryStore(Clock()), **options})
    return app


def hello(**_: object) -> str:
    return "hello"


def statuses(app: flask.Flask, *paths: str, **more: Any) -> list[int]:
    return [app.test_client().get(path, **more).status_code for path in paths]


def refused_by(reply: TestResponse) -> list[str]:
    assert reply.status_code == 429
    assert reply.mimetype == "application/problem+json"
    policies: list[str] = reply.get_json(force=True)["violated-policies"]
    return policies


def printed(app: flask.Flask) -> list[str]:
    """What ``flask limitgate`` prints."""
    result = app.test_cli_runner().invoke(args=["limitgate"])
    assert result.exit_code == 0, result
    return result.output.splitlines()


# --- the extension ----------------------------------------------------------------------------------------------------


def test_given_the_application() -> None:
    """``LimitGate(app, ...)`` limits the application, and puts what limits it into ``app.extensions``."""
    app = gated()
    first, second = app.test_client().get("/hello"), app.test_client().get("/hello")
    assert (first.status_code, first.json) == (200, {"remaining": 0})
    assert first.headers["X-RateLimit-Remaining"] == "0"
    assert refused_by(second) == ["one"]
    assert second.headers["Retry-After"] == "60"
    assert isinstance(app.extensions["limitgate"], LimitGateWSGI)
    assert app.extensions["limitgate"] is app.wsgi_app


def test_one_object_serves_several_applications() -> None:
    """Applications that share the object count by themselves, unless it was given a store object to share."""
    apart, together = LimitGate(rules=ONE), LimitGate(rules=ONE, store=MemoryStore(Clock()))
    for extension, expected in ((apart, [200, 200, 429, 429]), (together, [200, 429, 429, 429])):
        apps = [site("a"), site("b")]
        for app in apps:
            extension.init_app(app)
        assert [status for app in (*apps, *apps) for status in statuses(app, "/hello")] == expected


@pytest.mark.parametrize("same", [True, False], ids=["same object", "another"])
def test_a_second_time_is_a_mistake(*, same: bool) -> None:
    """An application takes one LimitGate; a second one raises ConfigError and changes nothing."""
    app = site()
    extension = LimitGate(app, rules=ONE)
    before = app.wsgi_app
    with pytest.raises(ConfigError, match="site has LimitGate already, expected one init_app"):
        (extension if same else LimitGate(rules=ONE)).init_app(app)
    assert app.wsgi_app is before


def test_a_mistake_leaves_the_application_as_it_was() -> None:
    """Where the options make no sense, the application is not changed, so that it can be given better ones."""
    app = site(LIMITGATE_RULES="nowhere/")
    extension = LimitGate()
    with pytest.raises(ConfigError, match="nowhere"):
        extension.init_app(app)
    assert (app.extensions, "limitgate" in app.cli.commands) == ({}, False)
    assert app.wsgi_app == flask.Flask.wsgi_app.__get__(app)
    app.config["LIMITGATE_RULES"] = ONE
    extension.init_app(app)
    assert statuses(app, "/hello", "/hello") == [200, 429]


# --- options ----------------------------------------------------------------------------------------------------------


def identify(request: Request) -> Caller | None:
    return None


EVERY_OPTION = {
    "enabled": "true",
    "rules": ONE,
    "store": "memory://",
    "on_error": "local",
    "processes": 2,
    "timeout": 0.5,
    "trusted_proxies": ["10.0.0.0/8", "unix"],
    "forwarded_header": "forwarded",
    "ipv6_prefix": 56,
    "api_key_header": "authorization",
    "identify": "tests.integrations.test_flask:identify",
    "headers": "draft-11, x-ratelimit",
    "header_names": {"X-RateLimit-Limit": "X-Quota"},
    "shadow": True,
    "strict": True,
    "on_denied": "tests.integrations.test_flask:identify",
    "new_buckets": 7,
    "body_limit": 7,
    "key_prefix": "shop",
    "require_store": False,
    "reload": 1.5,
    "names": "full",
    "refusal_logs": 7,
    "observers": ["prometheus"],
    "fleet": False,
    "secret": "sixteen bytes or more",
}


def test_every_option_is_read_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting has a key in ``app.config``, and means there what it means as an option or variable."""
    assert EVERY_OPTION.keys() == Settings.model_fields.keys()
    reached: dict[str, Any] = {}

    class Reached:
        def __init__(self, _: Any, **options: Any) -> None:
            reached.update(options)

        def answer_by_handlers(self, _: Any) -> None:
            """As `LimitGateWSGI`."""

    monkeypatch.setattr("limitgate.flask.LimitGateWSGI", Reached)
    LimitGate(site(**{f"LIMITGATE_{name.upper()}": value for name, value in EVERY_OPTION.items()}))
    assert callable(reached.pop("identify"))
    assert reached == {name: value for name, value in EVERY_OPTION.items() if name != "identify"}


def test_options_beat_the_configuration_beats_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the constructor is given wins, then ``app.config``, then the environment."""
    monkeypatch.setenv("LIMITGATE_HEADERS", "x-ratelimit-windows")
    monkeypatch.setenv("LIMITGATE_SHADOW", "true")
    asked = site(), site(LIMITGATE_HEADERS=["draft-11"]), site(LIMITGATE_HEADERS=["draft-11"])
    styles = {}, {}, {"headers": ["x-ratelimit"]}
    for app, own, field in zip(asked, styles, ["X-RateLimit-Limit-Minute", "RateLimit", "X-RateLimit-Limit"]):
        LimitGate(app, rules=ONE, **own)
        replies = [app.test_client().get("/hello") for _ in range(2)]
        assert [(reply.status_code, field in reply.headers) for reply in replies] == [(200, True)] * 2
    app = site(LIMITGATE_SHADOW=False)
    LimitGate(app, rules=ONE)
    assert statuses(app, "/hello", "/hello") == [200, 429]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("LIMITGATE_RULE", "LIMITGATE_RULE is unknown, did you mean 'LIMITGATE_RULES'[?] expected one of LIMITGATE_API"),
        ("LIMITGATE_TRUSTED_PROXY", "did you mean 'LIMITGATE_TRUSTED_PROXIES'[?]"),
        (
            "LIMITGATE_QPS",
            "is unknown, expected one of LIMITGATE_API_KEY_HEADER, .*, LIMITGATE_TRUSTED_PROXIES",
        ),
        ("LIMITGATE_", "expected one of LIMITGATE_API_KEY_HEADER, "),
        ("LIMITGATE_rules", "LIMITGATE_rules is unknown"),
    ],
)
def test_an_unknown_key_in_the_configuration(key: str, expected: str) -> None:
    """A key that is no setting raises ConfigError, which names those that it may have been meant to be."""
    with pytest.raises(ConfigError, match=f"^app.config: .*{expected}"):
        LimitGate(site(**{key: 1}), rules=ONE)


def test_other_mistakes_in_options() -> None:
    """An unknown option is a TypeError, a value that makes no sense a ConfigError, and missing rules are told."""
    with pytest.raises(TypeError, match="unknown option 'rule'"):
        LimitGate(site(), rule=ONE)
    with pytest.raises(ConfigError, match="timeout: expected"):
        LimitGate(site(LIMITGATE_TIMEOUT="soon"), rules=ONE)
    with pytest.raises(ConfigError, match="rules are missing"):
        LimitGate(site())


def test_what_can_be_read_only_once_is_read_once() -> None:
    """Rules may come out of a generator, for the gates of several applications and for the command alike."""
    extension = LimitGate(rules=(rule for rule in ONE))
    for app in (site("a"), site("b")):
        extension.init_app(app)
        assert statuses(app, "/hello", "/hello") == [200, 429]
        assert any("one" in line for line in printed(app))


def test_switched_off() -> None:
    """With ``LIMITGATE_ENABLED=False`` nothing is limited and no rules are needed, and the command says so."""
    app = site(LIMITGATE_ENABLED=False)
    app.add_url_rule("/limited", view_func=limit("1/minute", name="own")(lambda: "hello"), endpoint="limited")
    LimitGate(app)
    assert statuses(app, "/limited", "/limited") == [200, 200]
    assert printed(app) == ["LimitGate is disabled."]


# --- who is asking ----------------------------------------------------------------------------------------------------


def by_session(_: Request) -> Caller | None:
    return Caller(flask.session["user"]) if "user" in flask.session else None


def test_identify_reads_the_session() -> None:
    """Whoever has logged in has a bucket of its own, whatever client it comes with."""
    app = gated(None, Rule("mine", "1/minute", key=["caller"]), identify=by_session)
    found = {}
    for user in ("ann", "bob", "ann"):
        client = app.test_client()
        with client.session_transaction() as session:
            session["user"] = user
        found.setdefault(user, []).append(client.get("/hello").status_code)
    assert found == {"ann": [200, 429], "bob": [200]}


def test_identify_gets_both_kinds_of_request() -> None:
    """``identify`` is given the neutral request, and may ask Flask's for what only the framework knows."""
    seen: list[Any] = []

    def look(request: Request) -> None:
        assert isinstance(request, Request)
        own = flask.request
        seen.append(
            (request.path, request.client, own.path, own.remote_addr, own.endpoint, own.cookies.get("a"), own.args["q"])
        )
        assert flask.current_app.name == "site"
        assert flask.url_for("hello") == "/hello"

    app = gated(identify=look, trusted_proxies=["127.0.0.1"])
    for path in ("/hello", "/nowhere"):
        client = app.test_client()
        client.set_cookie("a", "b")
        client.get(f"{path}?q=1", headers={"X-Forwarded-For": "203.0.113.9"})
    assert seen == [
        ("/hello", "203.0.113.9", "/hello", "127.0.0.1", "hello", "b", "1"),
        ("/nowhere", "203.0.113.9", "/nowhere", "127.0.0.1", None, "b", "1"),
    ]
    assert not flask.has_request_context()
    assert not flask.has_app_context()


def test_identify_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ``identify`` that a variable names has Flask's means, too."""
    module = types.ModuleType("who")
    module.by_session = by_session  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "who", module)
    monkeypatch.setenv("LIMITGATE_IDENTIFY", "who:by_session")
    assert statuses(gated(), "/hello", "/hello") == [200, 429]


@pytest.mark.parametrize("read", [lambda: flask.request.form, lambda: flask.request.json, lambda: flask.request.data])
def test_identify_cannot_take_the_body_from_the_view(read: Callable[[], Any]) -> None:
    """Reading the body in ``identify`` raises, as the view would find nothing left of it."""
    app = gated(identify=lambda _: read())
    with pytest.raises(RuntimeError, match="reading from the input stream is disabled"):
        app.test_client().post("/hello", json={"a": 1})


def test_what_identify_hands_over_reaches_the_view() -> None:
    """What ``identify`` puts into the environ the view finds there; changes to the session are not saved."""
    app = site()

    @app.post("/user")
    def user() -> Any:
        assert "before" not in flask.session
        return {"user": flask.request.environ["site.user"], "body": flask.request.get_json()}

    def hand_over(request: Request) -> Caller:
        flask.session["before"] = flask.g.before = True
        request.environ["site.user"] = "ann"
        return Caller("ann")

    gated(app, identify=hand_over)
    reply = app.test_client().post("/user", json=[1])
    assert reply.json == {"user": "ann", "body": [1]}
    assert "Set-Cookie" not in reply.headers


def test_what_a_context_sets_off() -> None:
    """A context for ``identify`` is torn down like any other, once more per request; nothing else runs once more."""
    app, ran = site(), []
    app.before_request(lambda: ran.append("before"))
    app.after_request(lambda response: ran.append("after") or response)
    app.teardown_request(lambda _: ran.append("teardown"))
    app.teardown_appcontext(lambda _: ran.append("app teardown"))
    once = ["teardown", "app teardown"]
    gated(app, identify=lambda _: ran.append("identify"))
    assert statuses(app, "/hello") == [200]
    assert ran == ["identify", *once, "before", "after", *once]
    ran.clear()
    assert statuses(app, "/hello") == [429]
    assert ran == ["identify", *once]


def test_a_handler_of_refusals_costs_other_requests_nothing() -> None:
    """What raises refusals for it is there from the first one on, once, before functions that were there; without one never."""
    app, handled, ran = gated(site()), gated(site()), []
    handled.before_request(lambda: ran.append("before"))
    handled.register_error_handler(429, lambda _: ("handled", 429))
    own = list(handled.before_request_funcs[None])
    assert statuses(app, "/hello", "/hello") == [200, 429]
    assert None not in app.before_request_funcs
    assert statuses(handled, "/hello") == [200]
    assert handled.before_request_funcs[None] == own
    for _ in range(2):
        assert handled.test_client().get("/hello").text == "handled"
        assert handled.before_request_funcs[None][1:] == own
    assert ran == ["before"]


def test_an_identify_that_fails_leaves_no_context_behind() -> None:
    """What ``identify`` raises goes to the server, teardown functions are told of it, and the next request is served."""
    app, told = site(), []
    app.teardown_request(told.append)
    app.teardown_appcontext(lambda _: None)
    failing = iter([True, False])

    def fail(_: Request) -> None:
        if next(failing):
            raise LookupError("no such user")

    gated(app, identify=fail)
    with pytest.raises(LookupError, match="no such user"):
        app.test_client().get("/hello")
    assert [str(error) for error in told] == ["no such user"]
    assert not flask.has_request_context()
    assert not flask.has_app_context()
    assert statuses(app, "/hello") == [200]


def test_an_async_identify_is_told() -> None:
    """Under WSGI ``identify`` cannot be async: told at start, or at the first request where only its result shows it."""

    async def later(_: Request) -> None:
        pass

    def hidden(request: Request) -> Any:
        return later(request)

    with pytest.raises(ConfigError, match="identify is async, expected a plain function under WSGI"):
        gated(identify=later)
    with pytest.raises(TypeError, match="identify is async"):
        gated(identify=hidden).test_client().get("/hello")


class Picky(BaseConverter):
    """A converter that fails in a way which Werkzeug does not expect."""

    def to_python(self, value: str) -> Any:
        raise ArithmeticError(value)


class Broken(flask.sessions.SecureCookieSessionInterface):
    """A store of sessions that does not answer."""

    def open_session(self, *_: object) -> Any:
        raise ConnectionError


@pytest.mark.parametrize("broken", [True, False], ids=["session", "converter"])
def test_requests_that_no_context_can_be_made_for_are_charged(*, broken: bool) -> None:
    """A request that fails as soon as Flask touches it is charged first, and Flask answers it as it would without a gate."""
    app = site()
    app.url_map.converters["picky"] = Picky
    app.add_url_rule("/<picky:it>/x", "picky", hello)
    app.register_error_handler(500, lambda _: ("sorry", 500))
    if broken:
        app.session_interface = Broken()
    gated(app, Rule("two", "2/minute"), identify=by_session)
    replies = [app.test_client().get("/a/x") for _ in range(3)]
    assert [(reply.status_code, reply.text) for reply in replies[:2]] == [(500, "sorry")] * 2
    assert refused_by(replies[2]) == ["two"]
    assert not flask.has_app_context()


# --- what runs for whom -----------------------------------------------------------------------------------------------


def test_a_refused_request_does_not_enter_the_application() -> None:
    """Without a handler of it, neither hooks nor teardown functions run for a refused request, and its body is not read."""
    app, ran = site(), []
    app.before_request(lambda: ran.append("before"))
    app.after_request(lambda response: ran.append("after") or response)
    app.teardown_request(lambda _: ran.append("teardown"))
    app.register_error_handler(Exception, lambda _: ran.append("handler"))
    gated(app)
    assert statuses(app, "/hello") == [200]
    assert ran == ["before", "after", "teardown"]
    reply = app.test_client().post("/hello", data=b"body", buffered=True)
    assert refused_by(reply) == ["one"]
    assert reply.request.environ["wsgi.input"].read() == b"body"
    assert ran == ["before", "after", "teardown"]


def test_a_refusal_by_the_applications_own_means() -> None:
    """``on_denied`` may answer by Flask: a view's return value, the application's hooks and its session."""
    app = site()
    app.after_request(lambda response: response.headers.set("Access-Control-Allow-Origin", "*") or response)

    def too_many(environ: Any, start_response: Any) -> Iterable[bytes]:
        with app.request_context(environ):
            retry_after = environ["limitgate"].retry_after
            flask.session["refused"] = True
            response = app.process_response(app.make_response(({"wait": retry_after}, 429)))
        return response(environ, start_response)

    gated(app, on_denied=too_many)
    first, second = app.test_client().get("/hello"), app.test_client().get("/hello")
    assert "Access-Control-Allow-Origin" in first.headers
    assert (second.status_code, second.json) == (429, {"wait": 60})
    assert second.headers["Retry-After"] == "60"
    assert second.headers["X-RateLimit-Remaining"] == "0"
    assert second.headers["Access-Control-Allow-Origin"] == "*"
    assert second.headers["Set-Cookie"].startswith("session=")


def blueprints() -> flask.Flask:
    """Two blueprints with a view of one name each, the one nested in the other, which is there twice."""
    app = site()

    def add(to: flask.Blueprint) -> None:
        @to.get("/<int:id>")
        @limit("1/minute")
        def show(id: int) -> Any:  # noqa: A002
            return {"id": id, "remaining": flask.request.environ["limitgate"].remaining}, {"X-Own": "1"}

    inner, outer = flask.Blueprint("inner", "inner"), flask.Blueprint("outer", "outer")
    add(inner)
    add(outer)
    outer.register_blueprint(inner, url_prefix="/in")
    app.register_blueprint(outer, url_prefix="/one")
    app.register_blueprint(outer, url_prefix="/two", name="again")
    return app


def test_blueprints() -> None:
    """Views of one name in two blueprints do not share; one view is one place, however often its blueprint is registered."""
    app = gated(blueprints(), Rule("all", "100/minute"))
    reply = app.test_client().get("/one/1")
    assert (reply.json, reply.headers["X-Own"]) == ({"id": 1, "remaining": 0}, "1")
    assert reply.headers["X-RateLimit-Limit"] == "1"
    assert statuses(app, "/one/2", "/two/1", "/one/in/1", "/one/in/2", "/two/in/1") == [429, 429, 200, 429, 429]


def test_keys_know_the_route_of_a_blueprint() -> None:
    """``path`` in a key is the whole template, blueprint prefixes included."""
    app = site()
    pages = flask.Blueprint("pages", "pages")
    pages.add_url_rule("/<name>", "show", lambda name: name)
    app.register_blueprint(pages, url_prefix="/a")
    app.register_blueprint(pages, url_prefix="/b", name="other")
    gated(app, Rule("each", "1/minute", key=["path"]))
    assert statuses(app, "/a/x", "/a/y", "/b/x", "/b/y", "/hello") == [200, 429, 200, 429, 200]


def test_async_views_streams_and_error_handlers() -> None:
    """What an application can answer, it answers with the rate fields: coroutines, streams, and its own errors."""
    app = site()

    @app.get("/async")
    async def later() -> Any:
        return "hello"

    @app.get("/stream")
    def stream() -> Any:
        return flask.Response(flask.stream_with_context(f"{word} " for word in ("hello", flask.request.path)))

    @app.get("/error")
    def error() -> Any:
        raise LookupError

    app.register_error_handler(LookupError, lambda _: ({"error": "lost"}, 418))
    app.register_error_handler(404, lambda _: ("not here", 404))
    gated(app, Rule("all", "100/minute"))
    client = app.test_client()
    replies = [client.get(path) for path in ("/async", "/stream", "/error", "/nowhere")]
    assert [(reply.status_code, reply.text.strip()) for reply in replies] == [
        (200, "hello"),
        (200, "hello /stream"),
        (418, '{"error":"lost"}'),
        (404, "not here"),
    ]
    assert [reply.headers["X-RateLimit-Remaining"] for reply in replies] == ["99", "98", "97", "96"]


# --- other middleware -------------------------------------------------------------------------------------------------


def opaque(wsgi_app: Any) -> Any:
    """Middleware as a function, of which nobody can tell what is inside."""

    def middleware(environ: Any, start_response: Any) -> Any:
        environ["tagged"] = True
        return wsgi_app(environ, start_response)

    return middleware


class Tagging:
    """Middleware that calls what is inside by a name of its own."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __call__(self, environ: Any, start_response: Any) -> Any:
        environ["tagged"] = True
        return self.inside(environ, start_response)


@pytest.mark.parametrize("inside", [opaque, Tagging, ProxyFix, lambda app: DispatcherMiddleware(app, {"/x": site("x")})])
@pytest.mark.parametrize("outside", [opaque, Tagging, ProxyFix, lambda app: app])
def test_between_other_middleware(inside: Callable[[Any], Any], outside: Callable[[Any], Any]) -> None:
    """Decorators and routes are known whatever middleware is around the application already, or is put there later."""
    app = site()
    app.add_url_rule("/<it>", "limited", limit("1/minute", name="own", key=["path"])(hello))
    app.wsgi_app = inside(app.wsgi_app)  # type: ignore[method-assign]
    gated(app, Rule("all", "100/minute"))
    app.wsgi_app = outside(app.wsgi_app)  # type: ignore[method-assign]
    assert statuses(app, "/a", "/b", "/hello", "/hello") == [200, 429, 200, 200]


def test_an_application_mounted_below_one_with_the_extension() -> None:
    """A mount that was there before the extension is limited by it, decorators included."""
    app, mounted = site(), site("mounted")
    mounted.add_url_rule("/limited", "limited", limit("1/minute", name="own")(lambda: "hello"))
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/x": mounted})  # type: ignore[method-assign]
    gated(app, Rule("all", "100/minute"))
    assert statuses(app, "/x/limited", "/x/limited", "/x/hello") == [200, 429, 200]


def test_two_applications_with_the_extension() -> None:
    """One that is mounted in another: both limit, a response has each field once, and a view is told of both."""
    styles = ["x-ratelimit", "draft-11"]
    app, mounted = site(), gated(site("mounted"), Rule("inner", "2/minute"), headers=styles)
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/x": mounted})  # type: ignore[method-assign]
    gated(app, Rule("outer", "9/minute"), headers=styles)
    replies = [app.test_client().get("/x/hello") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert [reply.headers.getlist("X-RateLimit-Remaining") for reply in replies] == [["1"], ["0"], ["0"]]
    assert replies[2].headers.getlist("RateLimit") == ['"outer";r=6;t=20, "inner";r=0;t=30']
    assert (replies[2].headers.getlist("Retry-After"), refused_by(replies[2])) == (["30"], ["inner"])
    assert app.test_client().get("/hello").headers.getlist("RateLimit") == ['"outer";r=5;t=27']


# --- on real servers --------------------------------------------------------------------------------------------------


def test_on_a_threaded_server() -> None:
    """Through a real server: sessions tell callers apart, a stream arrives whole, a refusal is complete."""
    app = site()

    @app.get("/login/<user>")
    @exempt
    def login(user: str) -> Any:
        flask.session["user"] = user
        return "welcome"

    @app.get("/stream")
    @limit("2/day", name="stream", key=["caller"])
    def stream() -> Any:
        return flask.Response(flask.stream_with_context(f"{word} " for word in ("one", "two", flask.session["user"])))

    LimitGate(app, rules=[Rule("all", "1000/day")], identify=by_session)
    found = {}
    with threaded_wsgi(app) as url:
        for user in ("ann", "bob"):
            with httpx.Client(base_url=url) as client:
                assert client.get(f"/login/{user}").text == "welcome"
                replies = [client.get("/stream") for _ in range(3)]
            found[user] = [reply.status_code for reply in replies]
            assert replies[0].text == f"one two {user} "
            assert replies[2].json()["violated-policies"] == ["stream"]
            assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["1", "0", "0"]
    assert found == {"ann": [200, 200, 429], "bob": [200, 200, 429]}


def test_the_other_limitgate_is_not_taken_for_this_one() -> None:
    """The ASGI middleware of the same name says what to use where it gets a Flask application."""
    app = flask.Flask(__name__)
    for wrong in (app, app.wsgi_app):
        with pytest.raises(ConfigError, match=r"limitgate\.flask\.LimitGate"):
            limitgate.LimitGate(wrong, rules=[])


def test_a_limit_above_the_route_applies() -> None:
    """The gate finds it, though the route leads past it."""
    app = flask.Flask(__name__)
    LimitGate(app, rules=[])

    @limit("1/minute")
    @app.get("/above-the-route")
    def view() -> str:
        return "hello"

    assert [app.test_client().get("/above-the-route").status_code for _ in range(2)] == [200, 429]


def test_teardown_functions_that_count_on_before_request() -> None:
    """They run after ``identify``, too, without what ``before_request`` sets; no request fails because of that."""
    app = flask.Flask(__name__)
    LimitGate(app, rules=[Rule("calls", "2/minute", key=["caller"])], identify=lambda _: Caller("ann"))

    @app.before_request
    def connect() -> None:
        flask.g.db = "db"

    @app.teardown_request
    def disconnect(_: object) -> None:
        flask.g.db.upper()

    app.add_url_rule("/", view_func=lambda: "hello")
    assert [app.test_client().get("/").status_code for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize("settings", [{}, {"TRUSTED_HOSTS": [".example"]}, {"host": True}, {"subdomain": True}])
@pytest.mark.parametrize("host", ["localhost", ".".join(["a"] * 3000) + ".example", "a" * 300, "a..1" * 1000])
def test_the_route_is_known_for_any_host(settings: dict[str, Any], host: str) -> None:
    """A decorated view that Flask runs for a host, however long, is one that the gate has seen; else it would raise."""
    ran = []
    app = flask.Flask("hosts", static_folder=None, host_matching="host" in settings, subdomain_matching="subdomain" in settings)
    app.config.update(settings if "TRUSTED_HOSTS" in settings else {})
    app.testing = True

    @limit("1/day", key=["global"])
    def view(**_: str) -> str:
        ran.append(host)
        return "hello"

    app.add_url_rule("/x", view_func=view, **({"host": "<name>"} if "host" in settings else {}))
    app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules=[Rule("other", "1/day", path="/other")], store=MemoryStore())  # type: ignore[method-assign]
    statuses = [app.test_client().get("/x", headers={"Host": host}).status_code for _ in range(2)]
    assert statuses in ([200, 429], [400, 400], [400, 429], [404, 404])
    assert len(ran) == statuses.count(200)
