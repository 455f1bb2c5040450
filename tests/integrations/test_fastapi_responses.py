"""Whatever a FastAPI route answers with has its rate fields, is neither buffered nor broken, and is replaced if refused."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pydantic
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

from limitgate import Rule, limit
from limitgate.fastapi import RateLimit
from tests.support.doors import Wire, http_scope
from tests.support.fastapi_doors import client, gated, refused_by, used

done: list[str] = []


class Item(pydantic.BaseModel):
    name: str
    secret: str = "secret"


class Shown(pydantic.BaseModel):
    name: str


router = APIRouter(prefix="/{tenant}", dependencies=[Depends(RateLimit("1/day", name="dependency", key=["path"]))])


@router.get("/model", response_model=Shown)
@limit("9/day", name="model")
async def model(tenant: str) -> Item:
    return Item(name=tenant)


@router.get("/dict")
@limit("9/day", name="dict")
def plain_dict() -> dict[str, int]:
    return {"one": 1}


@router.get("/none", status_code=204)
@limit("9/day", name="none")
async def none() -> None:
    return None


@router.get("/own-fields")
@limit("9/day", name="own-fields")
async def own_fields(response: Response) -> list[int]:
    response.headers["X-Own"] = "1"
    response.set_cookie("own", "2")
    return [1]


@router.get("/response")
@limit("9/day", name="response")
async def response() -> Response:
    return HTMLResponse("<p>hello", 201, {"X-Own": "1"})


@router.get("/redirect")
@limit("9/day", name="redirect")
async def redirect() -> RedirectResponse:
    return RedirectResponse("/elsewhere")


@router.get("/background")
@limit("9/day", name="background")
async def background(tasks: BackgroundTasks) -> str:
    tasks.add_task(done.append, "background")
    return "begun"


@router.get("/file")
@limit("9/day", name="file")
def file() -> FileResponse:
    return FileResponse(Path(__file__), filename="this.py")


@router.get("/stream")
@limit("9/day", name="stream")
async def stream() -> StreamingResponse:
    async def words() -> AsyncIterator[str]:
        for word in ("one ", "two ", "three"):
            yield word

    return StreamingResponse(words(), media_type="text/plain")


@router.get("/events")
@limit("9/day", name="events")
def events() -> StreamingResponse:
    def lines() -> Iterator[str]:
        for number in range(3):
            yield f"data: {number}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


BODIES: dict[str, tuple[int, Any]] = {
    "model": (200, b'{"name":"acme"}'),
    "dict": (200, b'{"one":1}'),
    "none": (204, b""),
    "own-fields": (200, b"[1]"),
    "response": (201, b"<p>hello"),
    "redirect": (307, b""),
    "background": (200, b'"begun"'),
    "file": (200, Path(__file__).read_bytes()),
    "stream": (200, b"one two three"),
    "events": (200, b"data: 0\n\ndata: 1\n\ndata: 2\n\n"),
}

if find_spec("fastapi.sse"):  # since FastAPI 0.135
    from fastapi.sse import EventSourceResponse, ServerSentEvent

    @router.get("/sse", response_class=EventSourceResponse)
    @limit("9/day", name="sse")
    async def sse() -> AsyncIterable[ServerSentEvent]:
        for number in range(3):
            yield ServerSentEvent(data=number, id=str(number))

    @router.get("/lines")
    @limit("9/day", name="lines")
    def lines() -> Iterator[Item]:
        for name in ("one", "two"):
            yield Item(name=name)

    BODIES["sse"] = 200, b"data: 0\nid: 0\n\ndata: 1\nid: 1\n\ndata: 2\nid: 2\n\n"
    BODIES["lines"] = 200, b'{"name":"one","secret":"secret"}\n{"name":"two","secret":"secret"}\n'


def fields(reply: Any) -> dict[str, str]:
    """The fields of a response that do not depend on the time of day."""
    return {name: value for name, value in reply.headers.items() if "ratelimit" not in name and name != "date"}


def test_every_kind_of_response_is_asked_for() -> None:
    """The table has all routes in it."""
    assert set(BODIES) == {route.path.rpartition("/")[2] for route in router.routes}


@pytest.mark.parametrize("kind", BODIES)
def test_a_limited_response_is_as_without_limits(kind: str) -> None:
    """Status, fields and body are the application's own, with rate fields on top; the second is refused, charged nowhere."""
    bare, app = FastAPI(), FastAPI()
    for one in (bare, app):
        one.include_router(router, prefix="/api")
    store = gated(app, Rule("rule", "9/day"))
    gated(bare, enabled=False)
    path = f"/api/acme/{kind}"
    expected = client(bare, follow_redirects=False).get(path)
    it = client(app, follow_redirects=False)
    admitted, refused = it.get(path), it.get(path)
    assert (admitted.status_code, admitted.content) == BODIES[kind] == (expected.status_code, expected.content)
    assert fields(admitted) == fields(expected)
    assert [admitted.headers[f"x-ratelimit-{part}"] for part in ("limit", "remaining")] == ["1", "0"]
    assert refused_by(refused) == ["dependency"]
    assert used(store) == {"rule": 1, kind: 1, "dependency": 1}


def test_background_tasks_run_for_admitted_requests_only() -> None:
    """A task that the endpoint has added runs after the response; a refused request has none."""
    del done[:]
    app = FastAPI()
    app.include_router(router)
    gated(app)
    assert [client(app).get("/acme/background").status_code for _ in range(3)] == [200, 429, 429]
    assert done == ["background"]


@pytest.mark.parametrize("kind", ["stream", "events", "sse", "lines"] if "sse" in BODIES else ["stream", "events"])
def test_nothing_is_held_back(kind: str) -> None:
    """What a generator has yielded is sent before the next piece is asked for."""
    go_on = asyncio.Event()

    async def pieces() -> AsyncIterator[str]:
        yield "one\n"
        await go_on.wait()
        yield "two\n"

    app = FastAPI(dependencies=[Depends(RateLimit("9/minute"))])
    media = {"stream": "text/plain", "events": "text/event-stream"}
    if kind in media:
        app.get("/pieces")(limit("9/minute")(lambda: StreamingResponse(pieces(), media_type=media[kind])))
    elif kind == "sse":
        app.get("/pieces", response_class=EventSourceResponse)(limit("9/minute")(pieces))
    else:
        app.get("/pieces")(limit("9/minute")(typed(pieces)))
    gated(app, Rule("rule", "9/minute"))

    async def watch() -> None:
        wire = Wire({"type": "http.request"})
        asking = asyncio.create_task(wire.call(app, http_scope("/pieces")))
        await wire.until_sent(2)
        assert b"one" in wire.sent[1]["body"]
        assert dict(wire.sent[0]["headers"])[b"x-ratelimit-remaining"] == b"8"
        go_on.set()
        await asking
        assert b"two" in wire.reply().body

    asyncio.run(watch())


def typed(pieces: Any) -> Any:
    async def items() -> AsyncIterable[Item]:
        async for piece in pieces():
            yield Item(name=piece)

    return items


def test_a_file_is_sent_in_parts() -> None:
    """A request for a range of a file gets that range."""
    app = FastAPI()
    app.include_router(router)
    gated(app)
    reply = client(app).get("/acme/file", headers={"Range": "bytes=3-9"})
    assert (reply.status_code, reply.content) == (206, Path(__file__).read_bytes()[3:10])
    assert reply.headers["x-ratelimit-remaining"] == "0"


def test_static_files(tmp_path: Path) -> None:
    """Mounted files are limited by rules, and whole."""
    (tmp_path / "page.html").write_text("<p>hello")
    app = FastAPI()
    app.mount("/static", StaticFiles(directory=tmp_path))
    gated(app, Rule("files", "1/minute", path="/static/**", key=["path"]))
    assert client(app).get("/static/page.html").text == "<p>hello"
    assert refused_by(client(app).get("/static/other.html")) == ["files"]


def test_a_response_that_fails_keeps_its_fields() -> None:
    """An error response of the application's has rate fields, too, and one from outside of the gate has none."""
    app = FastAPI(dependencies=[Depends(RateLimit("9/minute"))])
    app.get("/json")(lambda: JSONResponse({}, 503))
    app.get("/error")(lambda: 1 / 0)
    gated(app)
    assert client(app).get("/json").headers["x-ratelimit-remaining"] == "8"
    assert "x-ratelimit-remaining" not in client(app, raise_server_exceptions=False).get("/error").headers
