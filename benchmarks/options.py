"""README's rule with another key, another algorithm or one option more, beside the peers that can do the same.

`options` is the one list: `make bench` measures them, `make bench-count` counts their instructions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette

from benchmarks.contenders import (
    PATH,
    README,
    Asking,
    Quotas,
    asgi_ratelimit,
    flask,
    flask_limiter,
    limits_limiter,
    quota_texts,
    rule,
    starlette,
    throttled,
)
from benchmarks.cpu import in_memory, on_redis
from benchmarks.drive import CLIENTS, Crowd, Crowds, address, scope
from benchmarks.figures import Failed, Outcome, Outcomes
from benchmarks.readme import PROXY, options as settings
from benchmarks.rounds import Plan, alternate
from limitgate import Adaptive, Caller, LimitGate, Request, Rule
from tests.support.redis_server import RedisServer

PLAIN = "README's rule"
PROXIED = "behind a trusted proxy"
FLASK = "Flask"
_T = TypeVar("_T")
_Of = Callable[[Any], _T]
"""Finds something in an ASGI scope."""


class Peer(NamedTuple):
    """An application behind a peer that does the same as LimitGate with an option."""

    name: str
    build: Callable[[str], Any]
    """Takes the URL of a Redis on a unix socket, or "" for the peer's memory store."""
    bare: str = "Starlette"


class Option(NamedTuple):
    """Options of a gate, and the peers that can do the same."""

    gate: Mapping[str, Any]
    peers: Sequence[Peer] = ()
    """Candidates for the cheapest peer."""

    def app(self, store: Any, **others: Any) -> Starlette:
        """An application behind the gate; ``store`` is a store, the URL of a Redis, or "" for memory."""
        app = starlette()
        app.add_middleware(LimitGate, **{**settings(store), "key_prefix": f"limitgate-{id(app)}", **self.gate, **others})
        return app


def options(quotas: Quotas = README) -> Mapping[str, Option]:
    """All by name, README's rule first. Where an option is about one limit, that is the quota of a minute."""
    minute = {"minute": quotas["minute"]}
    (per_minute,) = quota_texts(minute)
    crowd = {unit: count * CLIENTS for unit, count in quotas.items()}

    def plain(**option: Any) -> Mapping[str, Any]:
        return {"rules": [rule(quotas, **option)]}

    def by(*key: str, **option: Any) -> Mapping[str, Any]:
        return {"rules": [rule(quotas, key)], **option}

    def one_limit(**option: Any) -> Mapping[str, Any]:
        return {"rules": [rule(minute, ["ip"], **option)]}

    def asgi(user: _Of[str], zone: str | None = None, *, quotas: Quotas = quotas, when: _Of[bool] = _always) -> Peer:
        """asgi-ratelimit counts for each path, unless a zone is named."""
        return Peer("asgi-ratelimit", lambda url: asgi_ratelimit(url, quotas, _users(user, when), zone))

    def asked(
        zone: str, user: _Of[str], *, quotas: Quotas = quotas, cost: _Of[int] = _one, strategy: str = "fixed-window"
    ) -> Peer:
        """User, windows and cost are arguments of limits."""
        return Peer("limits", lambda url: _asking(limits_limiter(url, quotas, strategy), zone, user, cost))

    return {
        PLAIN: Option(plain(), [asgi(_address)]),
        "ip": Option(by("ip"), [asgi(_address, "ip")]),
        "global": Option({"rules": [rule(crowd, ["global"])]}, [asgi(_everybody, "global", quotas=crowd)]),
        "api_key": Option(by("api_key"), [asgi(_api_key, "api_key")]),
        "path+api_key": Option(by("path", "api_key"), [asgi(_api_key)]),
        "api_key|ip": Option(by("api_key|ip"), [asgi(_api_key_or_address, "api_key|ip")]),
        "header": Option(by("header:x-tenant"), [asgi(_tenant, "header")]),
        "path+ip+header": Option(by("path", "ip", "header:x-tenant"), [asgi(_address_and_tenant)]),
        "caller by identify": Option(by("caller", identify=_caller), [asgi(_api_key, "caller")]),
        "caller's own limits": Option(
            by("caller", identify=partial(_caller, limits={"api": per_minute})), [asked("own", _api_key, quotas=minute)]
        ),
        "limits by callable": Option(
            {"rules": [Rule("api", lambda _: per_minute, path="/api/**", key=["ip"])]},
            [asked("callable", _address, quotas=minute)],
        ),
        "cost by callable": Option(plain(cost=_one), [asked("cost", _address, cost=_one)]),
        "when": Option(plain(when=_always), [asgi(_address, "when", when=_always)]),
        "two rules, ip and api_key": Option(
            {"rules": [rule(quotas, ["ip"]), Rule("keys", *quota_texts(quotas), path="/api/**", key=["api_key"])]},
            [Peer("asgi-ratelimit", partial(_asgi_ratelimit_twice, quotas=quotas))],
        ),
        "draft-11": Option(by("path", "ip", headers=["draft-11"])),
        "x-ratelimit and draft-11": Option(by("path", "ip", headers=["x-ratelimit", "draft-11"])),
        "fixed_window": Option(
            one_limit(algorithm="fixed_window"),
            [asgi(_address, "fixed_window", quotas=minute), asked("fixed_window", _address, quotas=minute)],
        ),
        "sliding_window": Option(
            one_limit(algorithm="sliding_window"),
            [
                asked("sliding_window", _address, quotas=minute, strategy="sliding-window-counter"),
                Peer("throttled-py", partial(throttled, quotas=minute, using="sliding_window")),
            ],
        ),
        "sliding_log": Option(
            one_limit(algorithm="sliding_log"), [asked("sliding_log", _address, quotas=minute, strategy="moving-window")]
        ),
        "max_delay": Option(one_limit(max_delay=1), [Peer("throttled-py", partial(throttled, quotas=minute, timeout=1))]),
        "charge_if": Option(
            plain(charge_if={"status": [401]}),
            [Peer("Flask-Limiter", partial(flask_limiter, quotas=quotas, default_limits_deduct_when=_is_unauthorized), FLASK)],
        ),
        "concurrency": Option({"rules": [Rule("api", path="/api/**", key=["ip"], concurrency=50)]}),
        "adaptive": Option(plain(adaptive=Adaptive(min=100))),
        "shadow": Option(plain(shadow=True)),
        PROXIED: Option(by("path", "ip", trusted_proxies=[PROXY])),
        "lease of 50": Option({"rules": [rule(crowd, ["global"], lease=50)]}),
    }


def visit(name: str, number: int) -> dict[str, Any]:
    """The scope of a request to the option of this name: every client has an API key, and is a tenant."""
    client = number % CLIENTS
    fields = [(b"x-api-key", b"key-%d" % client), (b"x-tenant", b"tenant-%d" % client)]
    if name != PROXIED:
        return scope(PATH, address(client), fields=fields)
    return scope(PATH, PROXY, fields=[*fields, (b"x-forwarded-for", address(client).encode())])


def measured(server: RedisServer, concurrency: int, plan: Plan) -> Outcomes:
    """All options and their peers on both stores, named as `peer_of`, `in_memory` and `on_redis` say."""
    broken: dict[str, Outcome] = {}
    with Crowds() as crowd_of:
        crowds: dict[str, Crowd] = {
            "Starlette": crowd_of.asgi(starlette(), visit=partial(visit, PLAIN)),
            FLASK: _in_one_thread(crowd_of, flask()),
        }
        for store, url in ((in_memory, ""), (on_redis, server.url)):
            for name, option in options().items():
                crowds[store(name)] = crowd_of.asgi(option.app(url), visit=partial(visit, name))
                for peer in option.peers:
                    called = store(peer_of(name, peer))
                    try:
                        app = peer.build(url)
                    except Exception as error:  # noqa: BLE001 - whatever keeps it from being built is what is to be shown
                        broken[called] = Failed(type(error).__name__)
                    else:
                        is_asgi = peer.bare != FLASK
                        crowds[called] = (
                            crowd_of.asgi(app, visit=partial(visit, name)) if is_asgi else _in_one_thread(crowd_of, app)
                        )
        return {**broken, **alternate(crowds, concurrency, plan, server)}


def peer_of(name: str, peer: Peer) -> str:
    """What a peer is called where it does the same as the option of this name."""
    return f"{peer.name} for {name}"


def _in_one_thread(crowd_of: Crowds, app: Any) -> Crowd:
    """One thread, however many requests are to be sent at once: under more of them each takes more CPU."""
    crowd = crowd_of.wsgi(app)
    return lambda numbers, _: crowd(numbers, 1)


# --- what is found in a request ---------------------------------------------------------------------------------------


def _caller(request: Request, **others: Any) -> Caller:
    return Caller(request.headers["x-api-key"], **others)


def _one(_: Any) -> int:
    return 1


def _always(_: Any) -> bool:
    return True


def _address(scope: Any) -> str:
    address: str = scope["client"][0]
    return address


def _everybody(_: Any) -> str:
    return "everybody"


def _api_key(scope: Any) -> str:
    return _sent(scope, b"x-api-key")


def _api_key_or_address(scope: Any) -> str:
    return _api_key(scope) or _address(scope)


def _tenant(scope: Any) -> str:
    return _sent(scope, b"x-tenant")


def _address_and_tenant(scope: Any) -> str:
    return f"{_address(scope)}:{_tenant(scope)}"


def _sent(scope: Any, field: bytes) -> str:
    for name, value in scope["headers"]:
        if name == field:
            return str(value, "latin-1")
    return ""


# --- peers ------------------------------------------------------------------------------------------------------------


def _users(user: _Of[str], when: _Of[bool] = _always) -> Callable[[Any], Awaitable[tuple[str, str]]]:
    """What asgi-ratelimit asks for a request's user and group; the rule is for one of two groups."""

    async def authenticate(scope: Any) -> tuple[str, str]:
        return user(scope), "default" if when(scope) else "free"

    return authenticate


def _asgi_ratelimit_twice(url: str, quotas: Quotas) -> Any:
    """Two of its middlewares, as one counts for one user."""
    inner = asgi_ratelimit(url, quotas, _users(_api_key), "second rule")
    return asgi_ratelimit(url, quotas, _users(_address), "first rule", inner)


def _asking(limits: tuple[Any, Sequence[Any]], zone: str, user: _Of[str], cost: _Of[int]) -> Any:
    """An application behind limits; the zone keeps what is measured apart on one Redis."""
    limiter, windows = limits

    async def admits(scope: Any) -> bool:
        who, much = user(scope), cost(scope)
        for window in windows:
            if not await limiter.hit(window, zone, who, cost=much):
                return False
        return True

    return Asking(starlette(), admits)


def _is_unauthorized(response: Any) -> bool:
    return bool(response.status_code == 401)
