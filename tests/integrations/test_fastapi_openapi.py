"""The OpenAPI document tells of every 429 that a route may answer with, and of no other."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.openapi.utils import get_openapi
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Route

from limitgate import LimitGate, MemoryStore, Rule, RuleSet, exempt, limit
from limitgate.fastapi import RateLimit
from limitgate.http.rate_fields import STYLES
from limitgate.routes.fastapi_openapi import PROBLEM
from tests.support.clock import Clock
from tests.support.fastapi_doors import client, gated

LIMIT = Depends(RateLimit("1/minute"))


def hello() -> str:
    return "hello"


def limited(app: FastAPI) -> list[str]:
    """The operations that have a 429 in the document."""
    return [
        f"{method.upper()} {path}"
        for path, operations in app.openapi()["paths"].items()
        for method, operation in operations.items()
        if "429" in operation["responses"]
    ]


def refusal(app: FastAPI, path: str = "/hello") -> Any:
    return app.openapi()["paths"][path]["get"]["responses"]["429"]


# --- limits of routes -------------------------------------------------------------------------------------------------


def on_route(app: FastAPI) -> None:
    app.get("/hello", dependencies=[LIMIT])(hello)


def as_parameter(app: FastAPI) -> None:
    app.get("/hello")(lambda decision=LIMIT: str(decision))


def below_another(app: FastAPI) -> None:
    def inner(decision: Annotated[Any, LIMIT]) -> None: ...

    def outer(inner: Annotated[Any, Depends(inner)]) -> None: ...

    app.get("/hello", dependencies=[Security(outer, scopes=["hello"])])(hello)


def on_router(app: FastAPI) -> None:
    router = APIRouter(dependencies=[LIMIT])
    router.get("/hello")(hello)
    app.include_router(router)


def on_inclusion(app: FastAPI) -> None:
    router, outer = APIRouter(), APIRouter()
    router.get("/hello")(hello)
    outer.include_router(router, dependencies=[LIMIT])
    app.include_router(outer)


def decorated(app: FastAPI) -> None:
    app.get("/hello")(limit("1/minute")(lambda: "hello"))


def decorated_above(app: FastAPI) -> None:
    limit("1/minute")(app.get("/hello")(lambda: "hello"))


def decorated_in_a_router(app: FastAPI) -> None:
    router, outer = APIRouter(), APIRouter()
    router.get("/hello")(limit("1/minute")(lambda: "hello"))
    outer.include_router(router)
    app.include_router(outer)


def twice(app: FastAPI) -> None:
    app.get("/hello", dependencies=[LIMIT, LIMIT])(limit("1/minute")(lambda: "hello"))


PLACES: list[Callable[[FastAPI], None]] = [
    on_route,
    as_parameter,
    below_another,
    on_router,
    on_inclusion,
    decorated,
    decorated_above,
    decorated_in_a_router,
    twice,
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("with_gate", [True, False])
def test_a_limited_route_has_a_429(place: Callable[[FastAPI], None], *, with_gate: bool) -> None:
    """Wherever the limit stands, its route documents the refusal, others do not, before the gate is built and without it."""
    app = FastAPI()
    place(app)
    app.get("/free")(hello)
    if with_gate:
        gated(app)
    assert limited(app) == ["GET /hello"]
    assert refusal(app)["description"] == "Too Many Requests"


def test_a_limited_application() -> None:
    """A dependency of the application is on all of its routes, those that it includes among them."""
    app, router = FastAPI(dependencies=[LIMIT]), APIRouter(prefix="/r")
    router.get("/{id}")(hello)
    app.get("/hello")(hello)
    app.include_router(router, prefix="/api")
    app.include_router(router, prefix="/v2")
    assert limited(app) == ["GET /hello", "GET /api/r/{id}", "GET /v2/r/{id}"]


def test_each_application_has_its_own_document() -> None:
    """A mounted application documents its own limits, and is not part of the outer one's document."""
    app, sub = FastAPI(), FastAPI()
    decorated(sub)
    app.mount("/sub", sub)
    gated(app)
    assert limited(sub) == ["GET /hello"]
    assert app.openapi()["paths"] == {}
    assert "429" in client(app).get("/sub/openapi.json").json()["paths"]["/hello"]["get"]["responses"]


@pytest.mark.parametrize(
    "unlimited",
    [
        exempt(limit("1/minute")(lambda: "hello")),
        limit("1/minute", methods=["POST"])(lambda: "hello"),
        limit("1/minute", shadow=True)(lambda: "hello"),
        lambda decision=Depends(RateLimit("1/minute", methods=["POST"])): str(decision),  # noqa: B008
        lambda decision=Depends(RateLimit("1/minute", shadow=True)): str(decision),  # noqa: B008
        exempt(lambda decision=LIMIT: str(decision)),
    ],
)
def test_a_route_that_is_never_refused_has_no_429(unlimited: Any) -> None:
    """Exempt routes, other methods and limits in shadow leave no trace in the document."""
    app = FastAPI()
    app.get("/hello")(unlimited)
    gated(app)
    assert limited(app) == []
    assert PROBLEM not in json.dumps(app.openapi())


def test_methods_are_told_apart() -> None:
    """Of one path those methods have a 429 that are limited, by the limit's own methods or a rule's."""
    app = FastAPI(dependencies=[Depends(RateLimit("1/minute", methods=["post"]))])
    for method in (app.get, app.post, app.put, app.delete):
        method("/hello")(hello)
    gated(app, Rule("puts", "1/minute", methods=["PUT"]))
    assert limited(app) == ["PUT /hello", "POST /hello"]


MINE: dict[int | str, dict[str, Any]] = {429: {"description": "Mine"}}


@pytest.mark.parametrize("place", [{"app": MINE}, {"router": MINE}, {"inclusion": MINE}, {"route": MINE}], ids=str)
def test_an_authors_own_429_stays(place: dict[str, Any]) -> None:
    """Where the author has described the refusal, that is what the document says."""
    app, router = FastAPI(responses=place.get("app")), APIRouter(responses=place.get("router"))
    router.get("/hello", dependencies=[LIMIT], responses=place.get("route"))(hello)
    app.include_router(router, responses=place.get("inclusion"))
    assert refusal(app) == {"description": "Mine"}
    assert PROBLEM not in json.dumps(app.openapi())


def test_routes_that_are_not_in_the_schema() -> None:
    """What is left out stays out."""
    app = FastAPI()
    app.get("/hello", dependencies=[LIMIT], include_in_schema=False)(hello)
    assert app.openapi()["paths"] == {}
    assert "components" not in app.openapi()


def test_calls_the_other_way_round() -> None:
    """Callbacks and webhooks are requests that the application makes; no rule of its own is for them."""
    app, called = FastAPI(), APIRouter()
    called.post("/called")(hello)
    app.webhooks.post("told")(hello)
    app.post("/hello", callbacks=called.routes)(hello)
    gated(app, Rule("all", "1/minute"))
    document = app.openapi()
    assert limited(app) == ["POST /hello"]
    assert "429" not in document["webhooks"]["told"]["post"]["responses"]
    assert "429" not in document["paths"]["/hello"]["post"]["callbacks"]["hello"]["/called"]["post"]["responses"]


# --- rules of the gate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "documented"),
    [
        ("/**", ["/items", "/items/special", "/items/{id}", "/items/{id}/parts/a-{part}", "/files/{rest}"]),
        ("/items/**", ["/items", "/items/special", "/items/{id}", "/items/{id}/parts/a-{part}"]),
        ("/items", ["/items"]),
        ("/items/{id}", ["/items/special", "/items/{id}"]),
        ("/items/special", ["/items/special"]),
        ("/items/7", ["/items/{id}"]),
        ("/items/seven", []),
        ("/items/7/parts/{part}", ["/items/{id}/parts/a-{part}"]),
        ("/items/7/parts/a-1", ["/items/{id}/parts/a-{part}"]),
        ("/items/7/parts/b-1", []),
        ("/files/any/{name}", ["/files/{rest}"]),
        ("/files/any/thing", ["/files/{rest}"]),
        ("/nowhere/**", []),
    ],
)
def test_rules_by_path(pattern: str, documented: list[str]) -> None:
    """A route has a 429 if a rule is for any of its paths, where the router takes these to it."""
    app, router = FastAPI(), APIRouter(prefix="/items")
    for path in ("", "/special", "/{id:int}", "/{id}/parts/a-{part}"):
        router.get(path)(hello)
    app.include_router(router)
    app.get("/files/{rest:path}")(hello)
    gated(app, Rule("rule", "1/minute", path=pattern))
    assert limited(app) == [f"GET {path}" for path in documented]


def test_a_router_that_fails() -> None:
    """Where the router cannot read a path, the document is made all the same: no request with it gets to a route."""

    class Broken(Route):
        def matches(self, scope: Any) -> Any:
            raise ValueError("my convertor is broken")

    app = FastAPI(routes=[Broken("/broken", hello)])
    app.get("/items/{id}")(hello)
    gated(app, Rule("rule", "1/minute", path="/items/7"))
    assert limited(app) == []


def test_rules_that_exempt_a_route() -> None:
    """Where a rule exempts all of a route, its own limits do not count either; where only some paths, they do."""
    app = FastAPI(dependencies=[LIMIT])
    for path in ("/healthz", "/ping/{id}", "/hello"):
        app.get(path)(hello)
    gated(app, Rule("health", path="/healthz/**", exempt=True), Rule("one", path="/ping/1", exempt=True), Rule("r", "1/minute"))
    assert limited(app) == ["GET /ping/{id}", "GET /hello"]


@pytest.mark.parametrize(
    ("rule", "documented"),
    [
        (Rule("r", "1/minute", tier="free"), True),
        (Rule("r", "1/minute", shadow=True), False),
        (Rule("r", "1/minute", per="message"), False),
        (Rule("r", "1/minute", methods=["POST"]), False),
        (Rule("r", "1/minute", methods=["HEAD"]), True),
    ],
)
def test_rules_of_every_kind(rule: Rule, *, documented: bool) -> None:
    """Rules of any tier may refuse; those in shadow, for other methods, and for messages do not refuse a request."""
    app = FastAPI()
    app.get("/hello")(hello)
    gated(app, rule)
    assert bool(limited(app)) is documented


def test_rules_in_whatever_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule set, a file, and what the environment names are read; an application may list its middleware itself."""
    (tmp_path / "rules.yaml").write_text("rules: [{name: r, path: /hello, qpm: 1}]")
    file = str(tmp_path / "rules.yaml")
    for options in ({"rules": RuleSet([Rule("r", "1/minute", path="/hello")])}, {"rules": file}, {"rules": Path(file)}):
        app = FastAPI(middleware=[Middleware(GZipMiddleware), Middleware(LimitGate, **options)])
        app.get("/hello")(hello)
        app.get("/free")(hello)
        assert limited(app) == ["GET /hello"]
    monkeypatch.setenv("LIMITGATE_RULES", file)
    app = FastAPI()
    app.get("/hello")(hello)
    app.add_middleware(LimitGate)
    assert limited(app) == ["GET /hello"]


@pytest.mark.parametrize(
    "options",
    [{"rules": "/nowhere"}, {}, {"rules": [5]}, {"rules": 5}, {"rules": [], "heads": 1}, {"rules": [], "timeout": -1}],
)
def test_rules_that_cannot_be_loaded(options: dict[str, Any]) -> None:
    """Mistakes are told when the application starts; the document is made, with the limits of routes."""
    app = FastAPI()
    app.get("/hello", dependencies=[LIMIT])(hello)
    app.get("/free")(hello)
    app.add_middleware(LimitGate, **options)
    assert limited(app) == ["GET /hello"]


def test_rules_that_can_be_read_once() -> None:
    """Rules from an iterator are left for the gate: making the document first does not switch them off."""
    app = FastAPI()
    app.get("/hello")(hello)
    app.add_middleware(LimitGate, rules=iter([Rule("r", "1/minute")]), store=MemoryStore(Clock()))
    assert limited(app) == []
    assert [client(app).get("/hello").status_code for _ in range(2)] == [200, 429]


def test_a_subclass_of_the_gate() -> None:
    """A class made from LimitGate is one; other middleware is none."""

    class Mine(LimitGate):
        pass

    app = FastAPI()
    app.get("/hello")(hello)
    app.add_middleware(GZipMiddleware)
    assert limited(app) == []
    app.add_middleware(Mine, rules=[Rule("r", "1/minute")])
    app.openapi_schema = None
    assert limited(app) == ["GET /hello"]


def test_a_gate_in_shadow() -> None:
    """A gate that never refuses documents nothing, and neither do the limits of routes behind it."""
    app = FastAPI()
    on_route(app)
    gated(app, Rule("r", "1/minute"), shadow=True)
    assert limited(app) == []


def test_two_gates() -> None:
    """Each may refuse, and the fields are those of both."""
    app = FastAPI()
    app.get("/hello")(hello)
    app.get("/outer")(hello)
    gated(app, Rule("inner", "1/minute", path="/hello"), headers=["draft-11"])
    gated(app, Rule("outer", "1/minute"))
    rate = ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"]
    assert list(refusal(app)["headers"]) == ["Retry-After", *rate, "RateLimit-Policy", "RateLimit"]
    assert list(refusal(app, "/outer")["headers"]) == ["Retry-After", *rate]


# --- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("styles", [(), *[(style,) for style in STYLES], tuple(STYLES)], ids=str)
def test_the_documented_fields_are_those_that_are_sent(styles: tuple[str, ...]) -> None:
    """A refusal has just the fields that the document names, and each is of the type that it says."""
    app = FastAPI()
    app.get("/hello", dependencies=[Depends(RateLimit("9/minute", qpd=50))])(limit("1/second", "1 per 7 seconds")(hello))
    gated(app, Rule("rule", "9/hour"), headers=styles)
    described = client(app).get("/openapi.json").json()["paths"]["/hello"]["get"]["responses"]["429"]["headers"]
    refused = [client(app).get("/hello") for _ in range(2)][1]
    assert refused.status_code == 429
    sent = {name: value for name, value in refused.headers.items() if "ratelimit" in name or name == "retry-after"}
    assert sent.keys() <= {name.lower() for name in described}
    if "x-ratelimit-windows" not in styles:
        assert len(sent) == len(described)
    for name, field in described.items():
        assert field["description"]
        if name.lower() in sent:
            assert sent[name.lower()].isdigit() is (field["schema"]["type"] == "integer")


def test_the_fields_of_windows_go_by_the_limits_of_the_route() -> None:
    """With a field for each unit of time, those are documented that the route has limits in."""
    app = FastAPI()
    on_route(app)
    gated(app, Rule("day", qpd=5), Rule("other", qps=5, path="/other"), headers=["x-ratelimit-windows"])
    assert [name for name in refusal(app)["headers"] if "Remaining" in name] == [
        "X-RateLimit-Remaining-Minute",
        "X-RateLimit-Remaining-Day",
    ]


def test_the_documented_body_is_the_one_that_is_sent() -> None:
    """A refusal's body has the properties that the schema names, of the types that it says, and all that it requires."""
    app = FastAPI()
    on_route(app)
    gated(app)
    document = client(app).get("/openapi.json").json()
    assert refusal(app)["content"] == {"application/problem+json": {"schema": {"$ref": f"#/components/schemas/{PROBLEM}"}}}
    schema = document["components"]["schemas"][PROBLEM]
    refused = [client(app).get("/hello") for _ in range(3)][2]
    assert refused.headers["content-type"] == "application/problem+json"
    body = refused.json()
    assert body.keys() == schema["properties"].keys() == set(schema["required"])
    types = {"string": str, "integer": int, "array": list}
    assert all(type(body[name]) is types[described["type"]] for name, described in schema["properties"].items())


def test_an_answer_of_ones_own_is_not_described() -> None:
    """With ``on_denied`` the body is the author's: the fields are documented, the body is not."""
    app = FastAPI()
    on_route(app)
    gated(app, on_denied=hello)
    assert refusal(app).keys() == {"description", "headers"}
    assert PROBLEM not in json.dumps(app.openapi())


def test_the_styles_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that the environment asks for are documented."""
    monkeypatch.setenv("LIMITGATE_HEADERS", "draft-11")
    app = FastAPI()
    on_route(app)
    gated(app)
    assert list(refusal(app)["headers"]) == ["Retry-After", "RateLimit-Policy", "RateLimit"]


def test_the_rest_of_the_document_is_as_ever() -> None:
    """But for the 429 and its schema, the document is what FastAPI makes of the same routes without limits."""
    app, bare = FastAPI(title="it"), FastAPI(title="it")

    def same(name: str, limit: list[float] = [], user: int | None = None) -> dict[str, float]:  # noqa: B006
        """Say something."""
        return {}

    for one, dependencies in ((app, [LIMIT]), (bare, [])):
        one.post("/same/{name}", dependencies=dependencies, tags=["x"])(same)
    document, expected = app.openapi(), bare.openapi()
    assert app.openapi() is document
    del document["paths"]["/same/{name}"]["post"]["responses"]["429"]
    del document["components"]["schemas"][PROBLEM]
    assert document == expected


# --- how it gets there ------------------------------------------------------------------------------------------------


def test_a_document_made_by_the_author() -> None:
    """``app.openapi`` may be replaced as FastAPI's documentation shows; what it is made of has the 429."""
    app = FastAPI()
    on_route(app)

    def custom() -> dict[str, Any]:
        schema = get_openapi(title="mine", version="1", routes=app.routes)
        schema["info"]["x-logo"] = {"url": "logo.png"}
        return schema

    app.openapi = custom  # type: ignore[method-assign]
    assert limited(app) == ["GET /hello"]
    assert client(app).get("/openapi.json").json()["info"] == {"title": "mine", "version": "1", "x-logo": {"url": "logo.png"}}


def test_a_class_that_makes_the_document() -> None:
    """A subclass may make it, too, and take things out again."""

    class Mine(FastAPI):
        def openapi(self) -> dict[str, Any]:
            schema = super().openapi()
            schema["paths"]["/hello"]["get"]["responses"].pop("429")
            return schema

    app = Mine()
    on_route(app)
    app.get("/other", dependencies=[LIMIT])(hello)
    assert limited(app) == ["GET /other"]


BESIDE_ANOTHER = """
import functools
from fastapi.openapi import utils
ours = utils.get_openapi_path
@functools.wraps(ours)
def theirs(**given):
    return ours(**given)
utils.get_openapi_path = theirs
import fastapi, limitgate, limitgate.fastapi
app = fastapi.FastAPI()
app.get("/hello")(limitgate.limit("1/minute")(lambda: "hello"))
app.add_middleware(limitgate.LimitGate, rules=[])
print("429" in app.openapi()["paths"]["/hello"]["get"]["responses"])
"""


def test_another_library_adds_to_documents_too() -> None:
    """Whoever else has put something around FastAPI's function keeps it, and the 429 is there all the same."""
    done = subprocess.run([sys.executable, "-c", BESIDE_ANOTHER], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_routes_that_come_later() -> None:
    """A route that is added when the document was made already is in the next one, limits included."""
    app = FastAPI()
    gated(app, Rule("late", "1/minute", path="/late"))
    app.get("/early")(hello)
    assert limited(app) == []
    app.get("/late")(hello)
    app.openapi_schema = None
    assert limited(app) == ["GET /late"]


PROGRAM = """
import {first}, {second}
app = fastapi.FastAPI()
app.get("/hello")(limitgate.limit("1/minute")(lambda: "hello"))
app.add_middleware(limitgate.LimitGate, rules=[])
before = "429" in app.openapi()["paths"]["/hello"]["get"]["responses"]
app.openapi_schema = None
app.build_middleware_stack()
print(before, "429" in app.openapi()["paths"]["/hello"]["get"]["responses"])
"""


@pytest.mark.parametrize(
    ("first", "second", "printed"),
    [
        ("fastapi", "limitgate", "False True"),
        ("limitgate", "fastapi", "False True"),
        ("fastapi", "limitgate.fastapi", "True True"),
        ("limitgate.fastapi", "fastapi", "True True"),
    ],
)
def test_nobody_has_to_ask_for_it(first: str, second: str, printed: str) -> None:
    """The 429 is there once the gate is built, or before with ``import limitgate.fastapi``; the order of imports is all one."""
    program = PROGRAM.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == f"{printed}\n", done.stderr
