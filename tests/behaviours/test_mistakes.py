"""Mistakes of people who are new to LimitGate: each is told at once, with what to do about it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django.conf
import fastapi
import flask
import httpx
import httpx2
import pytest
import redis
import requests
from django.core.handlers.exception import convert_exception_to_response
from fastapi import Depends
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from werkzeug.test import Client

import limitgate.httpx2
from limitgate import (
    Adaptive,
    AsyncLimiter,
    AsyncRedisStore,
    Ban,
    Caller,
    ConfigError,
    Configured,
    Limit,
    Limiter,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    RedisStore,
    Request,
    Rule,
    RuleSet,
    Settings,
    exempt,
    limit,
    load_rules,
    usage,
)
from limitgate.django.middleware import options as django_options
from limitgate.fastapi import RateLimit
from limitgate.flask import LimitGate as FlaskLimitGate
from limitgate.httpx import AsyncRateLimitTransport, RateLimitTransport
from limitgate.llm import Budget
from limitgate.requests import RateLimitAdapter
from limitgate.testing import FrozenClock, frozen, off
from tests.support.doors import asgi_reply

RULES = [Rule("api", "5/minute")]
Mistake = Callable[[], Any]
A_LIST_OF_LIMITS = "expected each limit separately, such as '5/second', '100/minute'"
PARENTHESES = "@limit takes limits in parentheses: @limit('5/minute')"


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


def wsgi(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return [b""]


async def later(_: Any) -> Any:
    return None


def view(request: Any) -> str:
    return "hello"


def endpoint_of_another_request(request: Request) -> str:
    return "hello"


def view_of_two(request: Any, number: int) -> str:
    return f"hello {number}"


def gate(**options: Any) -> LimitGate:
    return LimitGate(asgi, **{"rules": RULES, **options})


def asked(*rules: Rule, **options: Any) -> None:
    asyncio.run(asgi_reply(gate(rules=list(rules) or RULES, **options)))


def asked_wsgi(*rules: Rule, **options: Any) -> None:
    Client(LimitGateWSGI(wsgi, rules=list(rules) or RULES, **options)).get("/")


def served(app: Any) -> None:
    asyncio.run(asgi_reply(app))


def decorated_by_limit_alone() -> None:
    """As with ``@limit`` above a Starlette endpoint, which takes one argument."""
    served(Starlette(routes=[Route("/", limit(view))], middleware=[Middleware(LimitGate, rules=RULES)]))


def added(middleware: Any, **options: Any) -> None:
    app = fastapi.FastAPI()
    app.add_middleware(middleware, rules=RULES, **options)
    served(app)


def in_flask(**config: Any) -> None:
    app = flask.Flask("app")
    app.config.update(config)
    FlaskLimitGate(app)


def by_function(app: fastapi.FastAPI) -> fastapi.FastAPI:
    app.middleware("http")(LimitGate)
    return app


def twice_in_flask() -> None:
    app = flask.Flask("app")
    FlaskLimitGate(app, rules=RULES)
    FlaskLimitGate(app, rules=RULES)


def by(decorator: Any) -> None:
    """As with a decorator whose parentheses were forgotten, or that is none."""

    @decorator
    def hello() -> None: ...


def depending_on(dependency: Any) -> None:
    fastapi.FastAPI().get("/", dependencies=[Depends(dependency)])(view)


def sent_by(client: httpx.Client) -> None:
    with client:
        client.get("http://localhost/")


async def sent_later_by(client: httpx.AsyncClient) -> None:
    async with client:
        await client.get("http://localhost/")


def awaited_in_a_dependency() -> None:
    app = fastapi.FastAPI()

    @app.get("/", dependencies=[Depends(RateLimit("5/minute"))])
    def hello() -> None: ...

    served(app)


LIMITS = {
    "no unit that there is": (lambda: Limit("10/month"), "such as '30 days' for a month"),
    "no unit at all": (lambda: Limit("100"), "expected for example '100/minute'"),
    "several limits in one text": (lambda: Limit("100/minute, 5/second"), A_LIST_OF_LIMITS),
    "several limits in one list": (lambda: Rule("a", ["5/minute"]), A_LIST_OF_LIMITS),
    "a count that is no whole number": (lambda: Limit("1.5/second"), "such as '3 per 2 seconds'"),
    "a burst of nothing": (lambda: Limit("5/minute burst 0"), "expected a burst of at least 1"),
    "a number instead of text": (lambda: Limit(5), "expected for example '100/minute'"),
    "a number as text": (lambda: Limit("5/minute", burst="20"), "a whole number, not '20'"),
    "an algorithm with hyphens": (lambda: Limit("5/m", algorithm="sliding-window"), "did you mean 'sliding_window'?"),
    "a count beyond all": (lambda: Limit(f"{10**30}/second"), "expected at most 1,000,000 requests per second"),
    "a period beyond all": (lambda: Limit(f"5 per {10**30} seconds"), "expected a period of at most 366 days"),
    "slots beyond all": (lambda: Limit(f"{10**30} at once"), "expected at most 10,000 at once"),
    "a burst beyond all": (lambda: Limit(f"1/second burst {10**30}"), "expected a burst that refills within ten years"),
    "a count with commas": (lambda: Limit("1,000/minute"), "expected the count in digits alone, such as '1000/minute'"),
    "a period without a unit": (lambda: Limit("100/60"), "expected a unit after the period, such as '100 per 60 seconds'"),
    "numbers for text": (lambda: Limit(5, 60), "expected Limit('5/minute', burst=10)"),
    "a period by itself": (lambda: Limit(count=5, period="minute"), "or in text '5 per 15 minutes burst 10'"),
    "a period of no length": (lambda: Limit("5/0 seconds"), "expected a period of at least 1 second"),
}

IN_PYTHON = {
    "a decorator with parentheses that has none": (exempt, "expected @exempt on a line"),
    "middleware around nothing": (
        lambda: fastapi.FastAPI().add_middleware(LimitGate(rules=RULES)),
        "expected app.add_middleware(LimitGate, rules=...)",
    ),
    "WSGI middleware around nothing": (
        lambda: LimitGateWSGI(rules=RULES),
        "expected app.wsgi_app = LimitGateWSGI(",
    ),
    "a rule without a name": (lambda: Rule("5/minute"), "the name of a rule comes before its limits"),
    "a rule without limits": (lambda: Rule("api"), "expected limits, qps, qpm, qph, qpd, concurrency or adaptive"),
    "a misspelt field of a limit": (
        lambda: Limit("5/m", algoritm="gcra"),
        "did you mean 'algorithm'? expected Limit('5/minute'",
    ),
    "a misspelt field of a ban": (lambda: Ban(aftr=9), "did you mean 'after'? expected Ban(after=20"),
    "a misspelt field of an adaptive limit": (lambda: Adaptive(tolerence=2), "did you mean 'tolerance'? expected Adaptive("),
    "a misspelt field of a budget": (lambda: Budget(token="9/m"), "did you mean 'tokens'? expected Budget(requests="),
    "a misspelt field": (lambda: Rule("api", qpn=5), "did you mean 'qpm'?"),
    "another limiter's field": (lambda: Rule("api", rate="5/m"), "did you mean 'limits'?"),
    "another limiter's fields": (lambda: Rule("api", times=5, seconds=1), "times: unknown field, did you mean 'limits'?"),
    "a limit for a count": (lambda: Rule("api", qps="5/second"), "write text such as '5/second' under limits"),
    "one limit for a list": (lambda: Rule("api", limits="5/m"), "a list such as ['5/second'"),
    "one method for a list": (lambda: Rule("api", qpm=5, methods="POST"), "a list such as ['POST']"),
    "a count as text": (lambda: Rule("api", qpm="5"), "qpm: expected a whole number, not '5'"),
    "a key part in capitals": (lambda: Rule("api", qpm=5, key=["IP"]), "key[0]: key part 'IP' is unknown, did you mean 'ip'?"),
    "a key part by its header": (
        lambda: Rule("api", qpm=5, key=["path", "X-Id"]),
        "key[1]: key part 'X-Id' is unknown, did you mean 'header:x-id'? expected one of path, ip",
    ),
    "several headers": (lambda: Rule("api", qpm=5, key=["headers: X-Id"]), "did you mean 'header:x-id'?"),
    "a header of an environ in a key": (lambda: Rule("api", qpm=5, key=["HTTP_X_ID"]), "did you mean 'header:x-id'?"),
    "the header of API keys": (lambda: Rule("api", qpm=5, key=["X-API-Key"]), "did you mean 'api_key'?"),
    "the header of a proxy": (lambda: Rule("api", qpm=5, key=["X-Real-IP"]), "did you mean 'ip'?"),
    "a pointer by itself": (lambda: Rule("api", qpm=5, key=["/user/id"]), "did you mean 'json:/user/id'?"),
    "an alternative by its header": (lambda: Rule("api", qpm=5, key=["ip|user-agent"]), "did you mean 'header:user-agent'?"),
    "a key function": (lambda: Rule("api", qpm=5, key=[view]), "'caller' with the option identify"),
    "a cookie for a key": (lambda: Rule("api", qpm=5, key=["cookie:session"]), "'caller' with the option identify"),
    "a path without a slash": (lambda: Rule("api", qpm=5, path="api/**"), "does not begin with '/'"),
    "a path of Flask": (lambda: Rule("api", qpm=5, path="/items/<int:id>"), "expected '/items/{id}'"),
    "a path of Starlette": (lambda: Rule("api", qpm=5, path="/files/{p:path}"), "expected '/files/**'"),
    "a star for the rest": (lambda: Rule("api", qpm=5, path=["/a", "/b/*"]), "path[1]: path '/b/*' has the segment '*'"),
    "a cost as text": (lambda: Rule("api", qpm=5, cost="2"), "rule 'api': cost is '2', expected an integer, or one of tokens"),
    "a cost that never fits": (lambda: Rule("api", qpm=5, cost=9), "expected at most 5"),
    "a cost that is async": (lambda: Rule("api", qpm=5, cost=later), "expected a plain function (request) -> int"),
    "a condition that is async": (lambda: Rule("api", qpm=5, when=later), "expected a plain function (request) -> bool"),
    "a condition without a request": (
        lambda: Rule("api", qpm=5, when=lambda: True),
        "expected a callable (request)",
    ),
    "limits by nothing": (
        lambda: Rule("api", lambda: "5/minute"),
        "expected a callable (request)",
    ),
    "a network of one host": (lambda: Rule("api", qpm=5, clients=["10.0.0.1/8"]), "clients[0]: '10.0.0.1/8' is not an address"),
    "an exempt rule with limits": (lambda: Rule("api", qpm=5, exempt=True), "expected one or the other"),
    "an outcome that is no list": (lambda: Rule("a", qpm=5, charge_if={"status": 401}), "a list such as [401, 403]"),
    "a share without percent": (lambda: Rule("api", qpm=50, reserve=20), "such as '20%' or 0.2"),
    "an option of a limit misspelt": (
        lambda: Rule("api", limits=[{"limit": "5/day", "algoritm": "fixed_window"}]),
        "limits[0]: unknown field 'algoritm' of a limit, did you mean 'algorithm'?",
    ),
    "a rule to replace that is not there": (
        lambda: gate(rules=[Rule("api", qpm=5), Rule("b", qpm=9, replaces=["apy"])]),
        "rules[1].replaces[0]: there is no rule 'apy', did you mean 'api'?",
    ),
    "one name for two rules": (lambda: gate(rules=[*RULES, *RULES]), "rules[1].name: rule 'api' is duplicated"),
}

OPTIONS = {
    "no rules": (lambda: LimitGate(asgi), "expected rules=... or LIMITGATE_RULES"),
    "one rule for a list": (lambda: gate(rules=RULES[0]), "expected a list: rules=[Rule('api', ...)]"),
    "limits for rules": (lambda: gate(rules=["5/minute"]), "expected the path of a file or a folder, a list of Rule"),
    "YAML for its path": (lambda: gate(rules="rules:\n  - name: api\n"), "expected the path of a rule file"),
    "a folder that is not there": (lambda: gate(rules="no/such"), f"a folder of rule files, relative to {Path.cwd()}"),
    "a misspelt option": (lambda: gate(trusted_proxy=["10.0.0.1"]), "did you mean 'trusted_proxies'?"),
    "another limiter's option": (lambda: gate(storage_uri="redis://h"), "did you mean 'store'?"),
    "another limiter's option on WSGI": (lambda: LimitGateWSGI(wsgi, fail_open=True), "did you mean 'on_error'?"),
    "an option of settings": (lambda: Settings(rule=[]), "did you mean 'rules'?"),
    "milliseconds": (lambda: gate(timeout=100), "expected at most 60 (in seconds), not 100"),
    "a proxy by its name": (
        lambda: gate(trusted_proxies=["::1", "nginx"]),
        "trusted_proxies[1]: 'nginx' is not an address or CIDR",
    ),
    "a header with its colon": (lambda: gate(forwarded_header="X-Forwarded-For:"), "expected it as it is sent"),
    "a header of an environ": (lambda: gate(api_key_header="HTTP_X_API_KEY"), "expected it as it is sent"),
    "a style in capitals": (
        lambda: gate(headers=["X-RateLimit"]),
        "headers[0]: header style 'X-RateLimit' is unknown, did you mean",
    ),
    "headers switched on": (lambda: gate(headers=True), "a list such as ['x-ratelimit']"),
    "a name with dots alone": (lambda: gate(identify="app.who"), "expected the text 'package.module:name'"),
    "an answer for what makes it": (lambda: gate(on_denied={"detail": "no"}), "on_denied: expected a callable"),
    "a handler of refusals": (
        lambda: gate(on_denied=view_of_two),
        "on_denied: view_of_two cannot be called with (scope, receive, send), expected a callable (scope, receive, send)",
    ),
    "a handler of refusals on WSGI": (
        lambda: LimitGateWSGI(wsgi, rules=RULES, on_denied=view),
        "expected a callable (environ, start_response); register a handler (request, error)",
    ),
    "a cost that is none": (
        lambda: asked(Rule("api", "5/minute", cost=lambda _: None)),
        "the cost of rule 'api' returned a NoneType, expected an integer",
    ),
    "a policy that is none": (lambda: gate(on_error="fail"), "expected 'open', 'closed' or 'local'"),
    "identify without a request": (
        lambda: gate(identify=lambda: None),
        "expected a callable (request)",
    ),
    "identify that gives text": (lambda: asked(identify=lambda _: "ann"), "identify gave a str, expected a Caller or None"),
    "a cost below nothing": (
        lambda: asked(Rule("api", "5/m", cost=lambda _: -1)),
        "the cost of rule 'api' returned -1, expected at",
    ),
    "a parameter by a framework's name": (lambda: asked(identify=lambda r: Caller(r.query_params["u"])), "query, caller"),
    "a cookie by a framework's name": (
        lambda: asked_wsgi(Rule("api", "5/m", when=lambda r: "a" in r.cookies)),
        "werkzeug.Request(request.environ)",
    ),
    "a file without its option": (lambda: LimitGate(asgi, "config/"), "options have names"),
    "an application by its name": (lambda: LimitGate("shop.main:app", rules=RULES), "'shop.main:app' is not an application"),
    "an application by its name on WSGI": (
        lambda: LimitGateWSGI("shop:app", rules=RULES),
        "'shop:app' is not an application, expected app.wsgi_app =",
    ),
    "identify that is async on WSGI": (lambda: asked_wsgi(identify=later), "expected a plain function under WSGI"),
    "limits that cannot be read": (
        lambda: asked(Rule("api", lambda _: "often")),
        "invalid limits at run time",
    ),
    "limits by async code on WSGI": (lambda: asked_wsgi(Rule("api", later)), "expected a plain function under WSGI"),
    "a caller's id that is a number": (lambda: Caller(42), "expected text for both"),
    "a caller's id that is empty": (
        lambda: Caller(""),
        "expected unique text, or None instead of the Caller",
    ),
    "a caller's limits without rules": (lambda: Caller("a", limits="5/m"), "such as {'api': '500/minute'}"),
    "rules for their path": (lambda: load_rules(RULES), "in Python use RuleSet([...])"),
    "a file for a rule set": (lambda: RuleSet("config/"), "load_rules reads files"),
    "rules where a request goes": (lambda: usage("api"), "expected a framework's request, a scope or an environ"),
}

STORES = {
    "no scheme": (lambda: gate(store="localhost:6379"), "store: no scheme, expected memory://, redis://"),
    "a URL in quotes": (lambda: gate(store='"redis://h"'), "the URL has quotes around it, expected none"),
    "another scheme": (lambda: Limiter("redis-cluster://h"), "did you mean redis+cluster://?"),
    "Valkey's own scheme": (lambda: gate(store="valkey://h"), "did you mean redis://?"),
    "a word for a database": (
        lambda: gate(store="redis://h/zero"),
        "is not a number, expected for example redis://localhost:6379/0",
    ),
    "a variable left": (lambda: Limiter("redis://${HOST}:6379"), "an unexpanded variable"),
    "a user for a password": (lambda: Limiter("redis://hunter2@h"), "expected a colon before a password"),
    "several hosts": (lambda: Limiter("redis://h1,h2"), "redis+cluster://h1:7000,h2:7000"),
    "a scheme with a letter twice": (lambda: gate(store="reddis://h"), "did you mean redis://?"),
    "a misspelt scheme of several": (lambda: gate(store="redis+sentinal://h"), "did you mean redis+sentinel://?"),
    "a misspelt scheme with TLS": (lambda: gate(store="redisss://h"), "did you mean rediss://?"),
    "TLS as a suffix": (lambda: gate(store="redis+tls://h"), "did you mean rediss://?"),
    "Valkey's own scheme with TLS": (lambda: gate(store="valkeys://h"), "did you mean rediss://?"),
    "no master": (lambda: Limiter("redis+sentinel://h"), "redis+sentinel://h1:26379,h2:26379/mymaster"),
    "a socket with two slashes": (lambda: Limiter("unix://run/redis.sock"), "unix:///run/redis.sock"),
    "a misspelt option of a URL": (lambda: Limiter("redis://h?timout=1"), "did you mean 'socket_timeout'?"),
    "TLS without its scheme": (lambda: Limiter("redis://h?ssl_ca_certs=/ca.pem"), "expected rediss://"),
    "a client of redis-py": (lambda: gate(store=redis.Redis()), "expected a URL or an async store, such as AsyncRedisStore"),
    "a sync store on ASGI": (lambda: gate(store=RedisStore("redis://h")), "such as AsyncRedisStore"),
    "an async store on WSGI": (lambda: LimitGateWSGI(wsgi, rules=[], store=AsyncRedisStore("redis://h")), "such as RedisStore"),
    "a misspelt option of a store": (lambda: MemoryStore(max_bucket=9), "did you mean 'max_buckets'?"),
    "a misspelt option of a store on Redis": (lambda: RedisStore("redis://h", credential=view), "did you mean 'credentials'?"),
    "an option that belongs into the URL": (lambda: AsyncRedisStore("redis://h", db=1), "whose URL has other options"),
    "a class for a store": (lambda: gate(store=MemoryStore), "the class MemoryStore, expected an instance"),
    "a client of redis-py for a URL": (lambda: RedisStore(redis.Redis()), "expected a URL such as redis://localhost:6379/0"),
    "a URL for a memory store": (lambda: MemoryStore("memory://"), "expected a callable that returns Unix time"),
}

PLACES = {
    "@limit without parentheses": (decorated_by_limit_alone, PARENTHESES),
    "@limit without parentheses on a view of two": (lambda: limit(view_of_two), PARENTHESES),
    "a misspelt option of @limit": (lambda: limit(qpn=5), "did you mean 'qpm'?"),
    "a key for each method": (lambda: limit("5/minute", per_method=True), "did you mean 'key'?"),
    "@limit on a router": (lambda: limit("5/minute")(fastapi.APIRouter()), "expected a rule with their path"),
    "@limit on an application": (lambda: limit("5/minute")(fastapi.FastAPI()), "expected a rule with their path"),
    "@limit on a blueprint": (lambda: limit("5/minute")(flask.Blueprint("shop", "shop")), "expected a rule with their path"),
    "@exempt on a router": (lambda: exempt(fastapi.APIRouter()), "expected a rule with their path"),
    "@limit on what is no endpoint": (lambda: limit("5/minute")(view)("ann"), "that is not an endpoint, Limiter.limited"),
    "a dependency without its limits": (lambda: depending_on(RateLimit), "expected Depends(RateLimit('5/minute'))"),
    "another limiter's option of @limit": (lambda: limit("5/minute", key_func=view), "did you mean 'key'?"),
    "a path for @limit": (lambda: limit("5/minute", path="/login"), "expected one of methods, "),
    "@limit without limits": (lambda: limit()(view), "expected limits, qps, qpm, qph, qpd, concurrency or adaptive"),
    "@limit without a gate": (lambda: limit("5/minute")(view)("request"), "expected app.add_middleware(LimitGate, rules=...)"),
    "@limit on a plain class": (lambda: limit("5/minute")(type("Form", (), {})), "expected one or a function"),
    "@exempt with parentheses": (lambda: exempt("health"), "expected a function or class"),
    "one name on one view": (lambda: limit("1/s", name="a")(limit("9/m", name="a")(view)), "expected different names"),
    "a dependency without a gate": (awaited_in_a_dependency, "expected app.add_middleware(LimitGate, rules=...)"),
    "a function of the request for a dependency": (
        lambda: RateLimit("5/minute", key=[lambda request: request.client.host]),
        "expected a function (request: fastapi.Request)",
    ),
    "a function of the request within Depends": (
        lambda: RateLimit("5/minute", key=["ip", Depends(lambda request: request.client.host)]),
        "expected a function (request: fastapi.Request)",
    ),
    "a dependency that is no list": (lambda: RateLimit("5/minute", key=view), "expected a list, for example [current_user]"),
    "times and seconds of a dependency": (
        lambda: RateLimit(times=2, seconds=5),
        "unexpected keyword argument 'times', limits are text such as '5 per 15 minutes' or '10/s burst 20'; expected one of",
    ),
    "minutes of a decorator": (lambda: limit(5, minutes=1), "limits are text such as"),
    "a misspelt option of a dependency": (lambda: RateLimit("5/minute", coost=2), "did you mean 'cost'?"),
    "ASGI middleware around Flask": (lambda: LimitGate(flask.Flask("app"), rules=RULES), "limitgate.flask.LimitGate(app)"),
    "ASGI middleware in Django": (
        lambda: LimitGate(convert_exception_to_response(view), rules=RULES),
        "expected 'limitgate.django.LimitGateMiddleware' there",
    ),
    "WSGI middleware in Django": (
        lambda: LimitGateWSGI(convert_exception_to_response(view), rules=RULES),
        "expected 'limitgate.django.LimitGateMiddleware' there",
    ),
    "ASGI middleware around WSGI": (lambda: LimitGate(wsgi, rules=RULES), "expected LimitGateWSGI around it"),
    "WSGI middleware around FastAPI": (lambda: LimitGateWSGI(fastapi.FastAPI(), rules=RULES), "app.add_middleware(LimitGate"),
    "WSGI middleware in FastAPI": (lambda: added(LimitGateWSGI), "app.add_middleware(LimitGate, rules=...)"),
    "Flask's extension in FastAPI": (lambda: added(FlaskLimitGate), "limitgate.LimitGate is for ASGI"),
    "rules' own request in an endpoint": (
        lambda: fastapi.FastAPI().get("/")(endpoint_of_another_request),
        "expected fastapi.Request in an endpoint",
    ),
    "a decorator for a dependency": (
        lambda: fastapi.FastAPI().get("/", dependencies=[Depends(limit("5/minute"))])(view),
        "expected Depends(RateLimit(...)) of limitgate.fastapi",
    ),
    "a misspelt key of Flask": (lambda: in_flask(LIMITGATE_RULE=RULES), "did you mean 'LIMITGATE_RULES'?"),
    "no rules in Flask": (in_flask, "expected rules=... or LIMITGATE_RULES"),
    "options behind Flask's application": (
        lambda: FlaskLimitGate().init_app(flask.Flask("app"), rules=RULES),
        "expected LimitGate(rules=...), which takes the options, and then init_app(app)",
    ),
    "middleware for a function of FastAPI's": (
        lambda: served(by_function(fastapi.FastAPI())),
        "expected app.add_middleware(LimitGate, rules=...)",
    ),
    "a key for all of Flask": (
        lambda: FlaskLimitGate(view, app=flask.Flask("app")),  # type: ignore[misc]
        "expected LimitGate(app, rules=...): the key belongs to a rule",
    ),
    "twice in Flask": (twice_in_flask, "expected one init_app for each application"),
}

WITHOUT_HTTP = {
    "no limits": (lambda: Limiter("memory://").hit("ann"), "expected at least one, for example '10/second'"),
    "no key": (lambda: Limiter("memory://").hit("5/minute"), "expected at least one, for example '10/second'"),
    "a number for a key": (lambda: Limiter("memory://").hit(42, "5/minute"), "key is 42, expected text"),
    "a list of limits": (lambda: Limiter("memory://").hit("ann", ["5/m"]), A_LIST_OF_LIMITS),
    "a limit before its key": (
        lambda: Limiter("memory://").hit("5/minute", "user", "42"),
        "expected the key before its limits: 'user:42', '5/minute'",
    ),
    "a rule for a limit": (
        lambda: Limiter("memory://").hit("ann", RULES[0]),
        "an object of Rule is not a limit, expected for example '100/minute'",
    ),
    "a list of parts for a function's key": (
        lambda: Limiter("memory://").limited("5/m", key=["ip"]),
        "expected text, or a function of the call's arguments that returns it",
    ),
    "half a request": (lambda: Limiter("memory://").hit("ann", "5/m", cost=0.5), "expected an integer"),
    "a duration as text": (
        lambda: Limiter("memory://").ban("ann", "1 fortnight"),
        "seconds is '1 fortnight', expected seconds, or text",
    ),
    "a timeout as text": (lambda: Limiter("memory://", timeout="2m"), "expected seconds above 0, at most 60"),
    "a wait as text": (
        lambda: Limiter("memory://").wait("a", "5/m", timeout="5 x"),
        "timeout is '5 x', expected seconds, or text",
    ),
    "turns in a window": (
        lambda: Limiter("memory://").wait("ann", Limit("5/m", algorithm="fixed_window")),
        "expected another algorithm, or a timeout of 0",
    ),
    "a rate for a slot": (lambda: Limiter("memory://").slot("ann", "5/minute"), "expected for example 20 or '20 at once'"),
    "an async function for a sync limiter": (lambda: Limiter("memory://").limited("5/m")(later), "an AsyncLimiter instead"),
    "a sync function for an async limiter": (lambda: AsyncLimiter("memory://").limited("5/m")(view), "a Limiter instead"),
    "a limited function without parentheses": (lambda: by(Limiter("memory://").limited), "takes its limits in parentheses"),
    "an async transport for a sync client": (
        lambda: sent_by(httpx.Client(transport=AsyncRateLimitTransport("5/m"))),
        "expected RateLimitTransport in httpx.Client",
    ),
    "a sync transport for an async client": (
        lambda: asyncio.run(sent_later_by(httpx.AsyncClient(transport=RateLimitTransport("5/m")))),
        "expected AsyncRateLimitTransport in httpx.AsyncClient",
    ),
    "a limiter for async code under with": (lambda: AsyncLimiter("memory://").__enter__(), "expected async with, or a Limiter"),
    "a limiter for sync code under async with": (
        lambda: Limiter("memory://").__aenter__(),
        "expected with, or an AsyncLimiter",
    ),
    "a frozen clock told in text": (
        lambda: FrozenClock().advance("-1m"),
        "seconds is '-1m', expected seconds, or",
    ),
    "a context manager for a decorator": (lambda: by(off()), "expected a with block, or the fixtures of pytest"),
    "a context manager for a decorator, without parentheses": (lambda: by(off), "expected a with block, with off():"),
    "a name that nobody configured": (
        lambda: Limiter("memory://").hit("a", Configured("x")),
        "expected a call of configure",
    ),
    "a bucket by its rule's name": (lambda: Limiter("memory://").bucket("api"), "expected a Rule, or an endpoint with @limit"),
    "a bucket by an address without its name": (
        lambda: Limiter("memory://").bucket(RULES[0], "203.0.113.7"),
        "expected limiter.bucket(rule, ip='203.0.113.7')",
    ),
    "a bucket without its caller": (
        lambda: Limiter("memory://").bucket(Rule("api", "5/m", key=["caller"])),
        "expected caller=, or ip=",
    ),
    "a store for a limiter": (lambda: AsyncRateLimitTransport("5/m", store="redis://h"), "did you mean 'limiter'?"),
    "another limiter's name of a store": (lambda: RateLimitAdapter("5/m", storage_uri="redis://h"), "did you mean 'limiter'?"),
    "an async scheme": (lambda: Limiter("async+redis://localhost:6379"), "did you mean redis://?"),
    "a limiter of the other kind": (
        lambda: AsyncRateLimitTransport("5/m", limiter=Limiter("memory://")),
        "expected AsyncLimiter or the URL of a store",
    ),
    "a transport for limits": (
        lambda: RateLimitTransport(httpx.HTTPTransport()),
        "is not a limit, expected for example '100/minute'",
    ),
    "a key of text outbound": (lambda: RateLimitAdapter("5/m", key="api"), "expected a callable"),
    "a policy that is none, outbound": (
        lambda: RateLimitAdapter("5/m", on_error="wait"),
        "expected one of open, closed",
    ),
    "limits for all keys": (lambda: Limiter("memory://", default_limits=["5/m"]), "for routes use rules and @limit"),
    "an async limiter for a key": (lambda: AsyncLimiter("memory://", "ann"), "whose methods take key and limits"),
    "a transport of httpx in requests": (
        lambda: RateLimitTransport("5/m").send(requests.Request("GET", "http://localhost/").prepare()),
        "expected RateLimitAdapter of limitgate.requests",
    ),
    "an async transport of httpx in requests": (
        lambda: AsyncRateLimitTransport("5/m").send(requests.Request("GET", "http://localhost/").prepare()),
        "expected RateLimitAdapter of limitgate.requests",
    ),
    "an adapter of requests in httpx": (
        lambda: sent_by(httpx.Client(transport=RateLimitAdapter("5/m"))),
        "expected RateLimitTransport of limitgate.httpx",
    ),
    "an adapter of requests in httpx2": (
        lambda: sent_by(httpx2.Client(transport=RateLimitAdapter("5/m"))),
        "or of limitgate.httpx2 in httpx2.Client",
    ),
    "a transport of httpx2 in requests": (
        lambda: limitgate.httpx2.RateLimitTransport("5/m").send(requests.Request("GET", "http://localhost/").prepare()),
        "the transports of limitgate.httpx2 are for httpx2, expected RateLimitAdapter of limitgate.requests",
    ),
    "a sync transport in an async client of httpx2": (
        lambda: asyncio.run(limitgate.httpx2.RateLimitTransport("5/m").handle_async_request()),
        "expected AsyncRateLimitTransport in httpx2.AsyncClient",
    ),
    "a clock by the wrong unit": (lambda: frozen(1_700_000_000_000).__enter__(), "expected"),
}

OF_OTHERS = {
    "limiter.limit": (lambda: Limiter("memory://").limit, "expected @limiter.limited('5/minute') above a function"),
    "limiter.check": (lambda: AsyncLimiter("memory://").check, "expected limiter.hit('user:42', '5/minute')"),
    "limiter.test": (lambda: Limiter("memory://").test, "expected limiter.peek('user:42', '5/minute')"),
    "limiter.acquire": (lambda: AsyncLimiter("memory://").acquire, "expected limiter.wait('user:42', '5/minute')"),
    "limiter.unban": (lambda: Limiter("memory://").unban, "expected limiter.pardon('user:42')"),
    "limit of a gate": (lambda: gate().limit, "expected @limit('5/minute') of limitgate, below the route decorator"),
    "limit of the middleware": (lambda: LimitGateWSGI.limit, "expected @limit('5/minute') of limitgate"),
    "limit of an extension": (lambda: FlaskLimitGate().limit, "expected @limit('5/minute') of limitgate"),
    "reset of an extension": (lambda: FlaskLimitGate().reset, "expected reset() of limitgate.testing in tests"),
    "the gate of an extension": (lambda: FlaskLimitGate().gate, "expected app.extensions['limitgate'].gate"),
    "request.ip": (lambda: asked(Rule("a", "5/m", when=lambda request: request.ip)), "a request has no 'ip', expected client"),
    "request.remote_addr": (
        lambda: asked_wsgi(Rule("a", "5/m", cost=lambda request: request.remote_addr)),
        "expected client, the address behind trusted proxies",
    ),
    "request.query_params": (
        lambda: asked(Rule("a", "5/m", cost=lambda request: request.query_params)),
        "expected request.query.get('page')",
    ),
    "request.cookies": (
        lambda: asked(identify=lambda request: request.cookies),
        "starlette.requests.Request(request.scope)",
    ),
    "clock.tick": (lambda: FrozenClock().tick(60), "the clock has no 'tick', expected clock.advance(seconds)"),
}

TOLD = {**LIMITS, **IN_PYTHON, **OPTIONS, **STORES, **PLACES, **WITHOUT_HTTP, **OF_OTHERS}


@pytest.mark.parametrize(("mistake", "cure"), TOLD.values(), ids=TOLD)
def test_a_mistake_is_told_with_its_cure(mistake: Mistake, cure: str) -> None:
    """The message says what was expected, whoever made the mistake and wherever."""
    with pytest.raises((AttributeError, TypeError, ValueError)) as caught:  # a ConfigError is a ValueError
        mistake()
    assert cure in str(caught.value)
    assert not isinstance(caught.value.__cause__, ValidationError)  # of which a traceback would show twice as much


IN_YAML = {
    "a tab": ("rules:\n\t- name: api\n", 2, "expected spaces instead of tabs"),
    "one rule for a list": ("rule:\n  - name: api\n    qpm: 5\n", 1, "rule: unknown field, did you mean 'rules'?"),
    "names for a list": ("rules:\n  api:\n    qpm: 5\n", 1, "rules: expected a list such as [{name: api, qpm: 100}]"),
    "fields of one rule apart": (
        "rules:\n  - name: api\n   qpm: 5\n",
        3,
        "expected all fields of a rule below each other, with equal indentation",
    ),
    "a field below its rule's dash": ("rules:\n  - name: api\n  qpm: 5\n", 3, "with equal indentation"),
    "text for a header": (
        "callers:\n  - {id: a, header: X-A}\n",
        2,
        "callers[0].header: expected a mapping such as {X-Caller: billing}",
    ),
    "several tiers in one file": (
        "rules:\n  - {name: api, qpm: 5}\n---\ntier: vip\nrules: []\n",
        3,
        "each tier has its own file",
    ),
    "nothing": ("", 1, "empty, expected tier, callers and rules"),
    "a list at the top": ("- name: api\n  qpm: 5\n", 1, "expected a mapping with tier, callers and rules"),
    "a name for a rule": ("rules:\n  - api\n", 2, "rules[0]: expected a mapping, for example {name: api"),
    "no name": ("rules:\n  - path: /a\n    qpm: 5\n", 2, "rules[0]: a rule has no name"),
    "a number for a name": ("rules:\n  - name: 404\n    qpm: 5\n", 2, "use quotes for text"),
    "a misspelt field": ("rules:\n  - name: api\n    qpn: 5\n", 3, "rules[0].qpn: unknown field, did you mean 'qpm'?"),
    "a burst by itself": (
        "rules:\n  - name: api\n    qpm: 5\n    burst: 9\n",
        4,
        "rules[0].burst: unknown field, did you mean 'limits'? limits are text such as '5 per 15 minutes' or '10/s burst 20'",
    ),
    "a limit that is none": (
        "rules:\n  - name: api\n    limits: [5/m, 5/year]\n",
        3,
        "rules[0].limits[1]: '5/year' is not a limit",
    ),
    "a time of day": (
        "rules:\n  - name: api\n    limits: [1:30]\n",
        3,
        "rules[0].limits[0]: 1:30 is 90 in YAML, expected 90 for the number, or '1:30' in quotes",
    ),
    "a header as a mapping": ("rules:\n  - name: api\n    qpm: 5\n    key: [header: X-Id]\n", 4, "such as header:X-Id"),
    "a policy that YAML reads": (
        "rules:\n  - name: api\n    qpm: 5\n    on_error: off\n",
        4,
        "expected 'open', 'closed' or 'local'",
    ),
    "a star without quotes": (
        "rules:\n  - name: api\n    path: */items\n",
        3,
        "expected quotes around text",
    ),
    "a field twice": ("rules:\n  - name: api\n    qpm: 5\n    qpm: 6\n", 4, "rules[0].qpm: duplicate field, expected it once"),
    "a tier without a file": (
        "rules:\n  - name: api\n    qpm: 5\n    tier: vip\n",
        4,
        "rules[0].tier: no file describes tier 'vip'",
    ),
    "a key in the clear": (
        "callers:\n  - {id: a, api_key: demo}\n",
        2,
        "callers[0].api_key: expected sha256: and 64 hex digits, as sha256sum prints them before its dash",
    ),
    "a caller whom nobody knows": ("callers:\n  - id: a\n", 2, "neither api_key nor header, expected one of them"),
    "a rule for a caller": (
        "callers:\n  - {id: a, header: {X-A: b}, limits: {apy: 5/m}}\nrules:\n  - {name: api, qpm: 5}\n",
        2,
        "callers[0].limits.apy: caller 'a': there is no rule 'apy' with limits, did you mean 'api'?",
    ),
    "code": ("rules:\n  - name: api\n    qpm: 5\n    when: is_staff\n", 4, "expected a plain function (request) -> bool"),
}


@pytest.mark.parametrize(("text", "line", "cure"), IN_YAML.values(), ids=IN_YAML)
def test_a_mistake_in_a_file_is_told_with_its_place_and_cure(text: str, line: int, cure: str, tmp_path: Path) -> None:
    """File and line come first, then the field, spelled as one would write it."""
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="expected") as caught:
        load_rules(file)
    assert str(caught.value).startswith(f"{file}:{line}: ")
    assert cure in str(caught.value)


VARIABLES = {
    "LIMITGATE_TIMEOUT": ("soon", "'1d' or '1w', not 'soon' (from the variable LIMITGATE_TIMEOUT)"),
    "LIMITGATE_ENABLED": ("off?", "expected true or false"),
    "LIMITGATE_TRUSTED_PROXIES": ("[10.0.0.1]", 'in JSON ["10.0.0.1", "::1"] or separated by commas'),
    "LIMITGATE_HEADERS": (
        "x-ratelimit draft-11",
        "headers: 'x-ratelimit draft-11' contains spaces, expected commas between entries",
    ),
    "LIMITGATE_RULES": ("", "rules are missing, expected rules=... or LIMITGATE_RULES"),
    "LIMITGATE_STORE": ("", "store: empty, expected memory://"),
    "LIMITGATE_PROCESSES": ("auto", "expected a whole number"),
    "LIMITGATE_IDENTIFY": ("app.who", "expected the text 'package.module:name'"),
    "LIMITGATE_ENV_FILE": ("no/such", "expected the path of one"),
}


@pytest.mark.parametrize(("variable", "value", "cure"), [(name, *told) for name, told in VARIABLES.items()], ids=VARIABLES)
def test_a_mistake_in_the_environment_is_told_with_its_cure(
    variable: str, value: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match="expected") as caught:
        LimitGate(asgi, **({} if variable == "LIMITGATE_RULES" else {"rules": RULES}))
    assert cure in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "cure"),
    [
        ("LIMITGATE_STOR", "did you mean LIMITGATE_STORE?"),
        ("LIMITGATE_REDIS_URL", "did you mean LIMITGATE_STORE?"),
        ("LIMITGATE_COLOUR", "remove it, or see help(limitgate.Settings)"),
    ],
)
def test_a_variable_that_is_none_is_told_with_the_one_that_is(
    variable: str, cure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, "x")
    with caplog.at_level(logging.WARNING, "limitgate"):
        gate()
    assert f"{variable} is not a setting of LimitGate and is ignored; {cure}" in caplog.text


def test_a_refusal_that_is_taken_for_true_is_told() -> None:
    """As where ``hit`` says yes or no, by the line that does it."""
    limiter = Limiter("memory://")
    assert limiter.hit("ann", "1/minute")
    with pytest.warns(RuntimeWarning, match=r"expected decision\.allowed") as caught:
        assert limiter.hit("ann", "1/minute")
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_a_slot_that_nobody_enters_is_told(kind: type[Limiter | AsyncLimiter]) -> None:
    with pytest.warns(RuntimeWarning, match=r"never entered.* with limiter\.slot") as caught:
        kind("memory://").slot("ann", 1)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("settled", ["RULES", "STORE"])
def test_an_option_that_is_a_setting_of_django_by_itself_is_told(monkeypatch: pytest.MonkeyPatch, settled: str) -> None:
    monkeypatch.setattr("limitgate.django.middleware.settings", type("Fake", (), {f"LIMITGATE_{settled}": "config/"}))
    with pytest.raises(ConfigError, match=rf"LIMITGATE_{settled}, which has no effect, expected LIMITGATE = {{'{settled}'"):
        django_options()


def test_an_option_of_django_that_there_is_not_is_told_with_the_one_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(django.conf, "settings", type("Fake", (), {"LIMITGATE": {"RULES": [], "STORAGE_URI": "redis://h"}}))
    monkeypatch.setattr("limitgate.django.middleware.settings", django.conf.settings)
    with pytest.raises(ValueError, match=r"unknown option 'STORAGE_URI', did you mean 'store'[?]"):
        django_options()


def test_a_file_for_other_callers_that_names_no_tier_is_told(tmp_path: Path) -> None:
    for name in ("a.yaml", "vip.yaml"):
        (tmp_path / name).write_text("rules:\n  - {name: api, qpm: 5}\n")
    with pytest.raises(ConfigError, match=r"vip\.yaml:1: tier: .* and tier: NAME in files for other callers"):
        load_rules(tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "cure"),
    [
        ("limitgate", "RateLimitExceeded", "expected RateLimited"),
        ("limitgate", "RateLimiter", "from limitgate.fastapi import RateLimit"),
        ("limitgate", "SlowAPIMiddleware", "expected LimitGate"),
        ("limitgate", "get_remote_address", "expected nothing, because limits count by the client's address"),
        ("limitgate.fastapi", "RateLimiter", "import RateLimit, whose limits are text: RateLimit('2 per 5 seconds')"),
        ("limitgate.fastapi", "limit", "expected from limitgate import limit"),
        ("limitgate.flask", "Limiter", "expected from limitgate.flask import LimitGate"),
    ],
)
def test_a_name_that_is_not_where_it_is_imported_from_is_told_with_what_stands_for_it(
    module: str, name: str, cure: str
) -> None:
    """What another limiter calls so, or what is in another module."""
    with pytest.raises(ImportError, match=re.escape(f"{name} is not in {module}, ")) as caught:
        exec(f"from {module} import {name}")
    assert cure in str(caught.value)
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec(f"from {module} import Nothing")


def test_names_that_there_are_not_are_in_no_list_of_an_object() -> None:
    """Editors complete from it what is typed."""
    limiter = Limiter("memory://")
    assert "hit" in dir(limiter)
    assert {"limit", "check"}.isdisjoint(dir(limiter))
    assert not hasattr(limiter, "check")


def test_there_are_sixty_and_more() -> None:
    """The list grows with what people ask."""
    assert len(TOLD) + len(IN_YAML) + len(VARIABLES) >= 100
