"""What users of FastAPI complain about in other limiters, each complaint as a test. Numbers are those of their issues."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, WebSocket
from fastapi.responses import StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.applications import Starlette
from starlette.routing import Mount

from limitgate import ConfigError, LimitGate, MemoryStore, Rule, limit
from limitgate.fastapi import RateLimit
from tests.support.clock import Clock
from tests.support.doors import Wire, asgi_reply, handshake, http_scope
from tests.support.fastapi_doors import client, gated, refused_by, statuses, used


def hello() -> dict[str, str]:
    return {"message": "hello"}


def included(app: FastAPI) -> str:
    router, inner = APIRouter(prefix="/r"), APIRouter()
    inner.get("/hello/{id}")(hello)
    router.include_router(inner, prefix="/inner")
    app.include_router(router, prefix="/api")
    return "/api/r/inner/hello/"


def mounted(app: FastAPI) -> str:
    sub = FastAPI()
    prefix = included(sub)
    app.mount("/mnt", Starlette(routes=[Mount("/deep", app=sub)]))
    return f"/mnt/deep{prefix}"


def plain(app: FastAPI) -> str:
    app.get("/hello/{id}")(hello)
    return "/hello/"


LIMITS = {
    "rule": ([Rule("it", "2/minute", key=["path", "ip"])], []),
    "dependency": ([], [Depends(RateLimit("2/minute", name="it", key=["path", "ip"]))]),
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("build", [plain, included])
def test_included_routers_are_limited(build: Any, limits: Any) -> None:
    """Rules and the application's dependencies are for included routers, too; each template, not each URL, has its limit.

    slowapi #281: default limits were skipped for routers. #217, #227: each URL had a limit of its own.
    """
    rules, dependencies = limits
    app = FastAPI(dependencies=dependencies)
    path = build(app)
    gated(app, *rules)
    assert statuses(app, *[f"{path}{number}" for number in range(4)]) == [200, 200, 429, 429]


def test_mounted_applications_are_limited() -> None:
    """Rules are for mounted applications, too, by the whole template. slowapi #133: mounts got around the limit."""
    app = FastAPI()
    path = mounted(app)
    gated(app, Rule("it", "2/minute", key=["path", "ip"]))
    assert statuses(app, *[f"{path}{number}" for number in range(4)]) == [200, 200, 429, 429]


@pytest.mark.parametrize("how", ["decorator", "dependency"])
def test_handlers_of_one_name_have_limits_of_their_own(how: str) -> None:
    """Each place that is limited counts by itself. slowapi #173, #75, #93, #191: handlers of one name shared their limits."""
    app = FastAPI()

    def add(path: str, text: str) -> None:
        async def handler() -> str:
            return path

        if how == "decorator":
            app.get(path)(limit(text)(handler))
        else:
            app.get(path, dependencies=[Depends(RateLimit(text))])(handler)

    add("/few", "1/minute")
    add("/many", "3/minute")
    add("/as-many", "3/minute")
    gated(app)
    assert statuses(app, *["/few"] * 2) == [200, 429]
    assert statuses(app, *["/many"] * 4) == [200, 200, 200, 429]
    assert statuses(app, *["/as-many"] * 4) == [200, 200, 200, 429]


def test_streams_and_static_files_are_whole(tmp_path: Any) -> None:
    """Large responses pass as they are. slowapi #249, #260: the start of the response was sent again with each piece."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 70_000

    (tmp_path / "large").write_bytes(b"y" * 200_000)
    app = FastAPI(dependencies=[Depends(RateLimit("9/minute"))])
    app.get("/stream")(lambda: StreamingResponse(pieces()))
    app.mount("/static", StaticFiles(directory=tmp_path))
    gated(app, Rule("rule", "9/minute"))
    for path, size in (("/stream", 210_000), ("/static/large", 200_000)):
        wire = asyncio.run(Wire({"type": "http.request"}).call(app, http_scope(path)))
        assert wire.types.count("http.response.start") == 1
        assert len(wire.reply().body) == size
        assert wire.reply().rate["x-ratelimit-remaining"] == {"/stream": "8", "/static/large": "7"}[path]


@pytest.mark.parametrize("denial", [True, False])
def test_websockets_are_limited(*, denial: bool) -> None:
    """Rules, decorators and dependencies limit WebSockets like other routes. slowapi: they could not be limited."""
    app = FastAPI()
    for path, limits in (("/rule", []), ("/decorator", []), ("/dependency", [Depends(RateLimit("1/minute"))])):

        async def endpoint(socket: WebSocket) -> None:
            await socket.accept()
            await socket.close()

        app.websocket(path, dependencies=limits)(limit("1/minute")(endpoint) if path == "/decorator" else endpoint)
    gated(app, Rule("rule", "1/minute", path="/rule"))
    for path in ("/rule", "/decorator", "/dependency"):
        found = [asyncio.run(handshake(app, path, denial=denial)).status for _ in range(2)]
        assert found == [101, 429 if denial else 1013]


def test_a_dict_has_its_fields() -> None:
    """A dict that is returned has rate fields. slowapi #18: they took a Response as parameter or result."""
    app = FastAPI()
    app.get("/decorator")(limit("9/minute")(hello))
    app.get("/dependency", dependencies=[Depends(RateLimit("9/minute"))])(hello)
    gated(app)
    for path in ("/decorator", "/dependency"):
        reply = client(app).get(path)
        assert reply.json() == {"message": "hello"}
        assert {name for name in reply.headers if "ratelimit" in name} == {
            f"x-ratelimit-{part}" for part in ("limit", "remaining", "reset")
        }


def test_nobody_else_waits_for_the_store() -> None:
    """While a request waits for the store in a dependency, others are answered. slowapi #3, #55, #130: Redis blocked them."""

    class Waits(MemoryStore):
        async def aspend(self, plan: Any, timeout: float = 0) -> Any:
            asked.set()
            await go_on.wait()
            return self.spend(plan)

    async def ask() -> None:
        wire = Wire()
        waiting = asyncio.create_task(wire.call(app, http_scope("/hello")))
        await asked.wait()
        assert (await asgi_reply(app, "/free")).status == 200
        assert not wire.sent
        go_on.set()
        await waiting
        assert wire.reply().status == 200

    asked, go_on = asyncio.Event(), asyncio.Event()
    app = FastAPI()
    app.get("/hello", dependencies=[Depends(RateLimit("1/minute"))])(hello)
    app.get("/free")(lambda: "free")
    gated(app, store=Waits(Clock()))
    asyncio.run(ask())


def test_a_limit_may_go_by_the_authenticated_user() -> None:
    """A dependency limits by the user, found by an async function. slowapi #13, #236: neither could be."""

    async def user(authorization: Annotated[str, Header()]) -> str:
        await asyncio.sleep(0)
        return authorization

    app = FastAPI()
    app.get("/me", dependencies=[Depends(RateLimit("1/minute", key=[user]))])(hello)
    gated(app)
    asked = [statuses(app, "/me", headers={"Authorization": name}) for name in ("ann", "bob", "ann")]
    assert asked == [[200], [200], [429]]


def test_the_key_that_was_given_is_the_key() -> None:
    """Each client has its own limit and is told how long to wait. fastapi-limiter #80: the identifier was ignored."""
    app = FastAPI()
    app.get("/hello", dependencies=[Depends(RateLimit("2/minute", name="it"))])(hello)
    gated(app)
    peers = [f"192.0.2.{number}" for number in range(1, 5)]
    replies = [client(app, peer).get("/hello") for peer in peers * 3]
    assert [reply.status_code for reply in replies] == [200] * 8 + [429] * 4
    assert refused_by(replies[-1]) == ["it"]
    assert replies[-1].headers["retry-after"] == "30"


def test_redis_away_is_no_error() -> None:
    """Without Redis routes are served. slowapi #213, #253, fastapi-limiter #54: each was an error 500."""
    app = FastAPI(dependencies=[Depends(RateLimit("9/minute"))])
    app.get("/hello")(limit("9/minute")(hello))
    app.add_middleware(LimitGate, rules=[Rule("rule", "9/minute")], store="redis://127.0.0.1:1")
    with client(app) as it:
        assert [it.get("/hello").status_code for _ in range(3)] == [200] * 3


def test_a_refused_request_costs_nothing() -> None:
    """A limit is not used up by what another one refuses. limits, Flask-Limiter: the day's limit was gone after a minute."""
    app = FastAPI()
    limits = [Depends(RateLimit(text, name=name)) for name, text in (("day", "100/day"), ("minute", "2/minute"))]
    app.get("/hello", dependencies=limits)(hello)
    store = gated(app)
    statuses(app, *["/hello"] * 50)
    assert used(store) == {"day": 2, "minute": 2}


def test_a_dependency_is_no_decorator() -> None:
    """Said where it is made, above and below the route's decorator, of functions of any kind and of classes."""

    async def awaited() -> str:
        return "hello"

    for decorated in (hello, awaited, FastAPI().get("/")(hello), type("Endpoint", (), {})):
        with pytest.raises(ConfigError, match=r"not a decorator, expected dependencies=\[Depends\(RateLimit\('5/minute'\)\)\]"):
            RateLimit("5/minute")(decorated)  # type: ignore[arg-type]
