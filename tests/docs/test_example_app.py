"""The example and its twin, in process: the same questions to both, the same answers from both."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from example_app import content, demo, main, wsgi
from limitgate import AsyncRedisStore, MemoryStore, RedisStore, StoreError
from tests.support.clock import Clock
from tests.support.doors import http_scope, uvicorn_process
from tests.support.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
VIP = {"X-API-Key": "demo-vip-key"}
CLIENT, OTHER_CLIENT = "192.0.2.7", "192.0.2.8"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def rate(self) -> tuple[str, str]:
        return self.headers["x-ratelimit-limit"], self.headers["x-ratelimit-remaining"]


class Twin:
    """One of the two applications, fresh, on a clock of its own, as a client sees it."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.clock = Clock()
        options.setdefault("store", MemoryStore(self.clock))
        self._ask = {"asgi": self._ask_asgi, "wsgi": self._ask_wsgi}[kind]
        self.app: Any = {"asgi": main, "wsgi": wsgi}[kind].create_app(**options)

    def get(self, path: str, ip: str = CLIENT, **headers: str) -> Answer:
        return self._ask("GET", path, ip, headers)

    def post(self, path: str, ip: str = CLIENT, body: str = "") -> Answer:
        return self._ask("POST", path, ip, {}, body)

    def _ask_asgi(self, method: str, path: str, ip: str, headers: dict[str, str], body: str = "") -> Answer:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=(ip, 50000))
            async with httpx.AsyncClient(transport=transport, base_url="http://service.test") as client:
                return await client.request(method, path, headers=headers, content=body)

        response = asyncio.run(ask())
        return Answer(response.status_code, dict(response.headers), response.text)

    def _ask_wsgi(self, method: str, path: str, ip: str, headers: dict[str, str], body: str = "") -> Answer:
        response = self.app.test_client().open(
            path,
            method=method,
            headers=headers,
            data=body,
            base_url="http://service.test",
            environ_overrides={"REMOTE_ADDR": ip},
        )
        return Answer(response.status_code, {name.lower(): value for name, value in response.headers}, response.text)


Make = Callable[..., Twin]


@pytest.fixture(params=["asgi", "wsgi"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(content, "PAUSE", 0)
    return lambda **options: Twin(request.param, **options)


@pytest.fixture
def twin(make: Make) -> Twin:
    return make()


def test_hello_is_limited_to_five_per_second(twin: Twin) -> None:
    """Five requests at once pass and count down, the sixth gets a 429 that says when to come back."""
    passed = [twin.get("/api/hello") for _ in range(5)]
    assert [(answer.status, answer.rate) for answer in passed] == [(200, ("5", str(left))) for left in (4, 3, 2, 1, 0)]
    refused = twin.get("/api/hello")
    assert refused.status == 429
    assert refused.rate == ("5", "0")
    assert int(refused.headers["x-ratelimit-reset"]) == twin.clock.now // 1_000_000 + 1
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json["violated-policies"] == ["api"]
    assert twin.get("/api/hello", OTHER_CLIENT).status == 200


def test_hello_is_admitted_again_after_a_fifth_of_a_second(twin: Twin) -> None:
    """One request is earned back every 200 ms, and not a microsecond earlier."""
    while twin.get("/api/hello").status == 200:
        pass
    twin.clock.advance(us=199_999)
    assert twin.get("/api/hello").status == 429
    twin.clock.advance(us=1)
    assert twin.get("/api/hello").status == 200


def test_hello_says_what_is_left(twin: Twin) -> None:
    """The answer is JSON and names every limit of the caller's tier with what remains of it."""
    assert twin.get("/api/hello").json == {
        "message": "Hello!",
        "rule": "api",
        "remaining": 4,
        "limits": [
            {"limit": 5, "seconds": 1, "remaining": 4},
            {"limit": 100, "seconds": 60, "remaining": 99},
            {"limit": 2000, "seconds": 86400, "remaining": 1999},
        ],
    }
    assert [limit["limit"] for limit in twin.get("/api/hello", **VIP).json["limits"]] == [50, 1000, 100_000]


def test_the_minute_is_limited_too(twin: Twin) -> None:
    """At five per second a minute's hundred, and what it earns meanwhile, are used up and then refuse."""
    admitted = 0
    for second in range(60):
        twin.clock.advance(seconds=1)
        admitted += sum(twin.get("/api/hello").status == 200 for _ in range(5))
        if admitted < 5 * (second + 1):
            break
    # 5 a second are taken and 5/3 a second come back: 100 + elapsed * 5/3 >= 5 * (elapsed + 1) holds up to 28 s.
    assert (admitted, second) == (100 + 29 * 100 // 60, 29)


def test_a_vip_may_send_more(twin: Twin) -> None:
    """A VIP is counted per caller, from any address: fifty at once, then 429; the default tier is untouched by it."""
    answers = [twin.get("/api/hello", f"192.0.2.{number}", **VIP) for number in range(51)]
    assert [answer.status for answer in answers] == [200] * 50 + [429]
    assert answers[0].rate == ("50", "49")
    assert twin.get("/api/hello").rate == ("5", "4")


@pytest.mark.parametrize("key", ["demo-vip-key2", "DEMO-VIP-KEY", ""])
def test_an_unlisted_key_is_no_key(twin: Twin, key: str) -> None:
    """Inventing API keys opens no bucket: such a request is counted with those that send none."""
    assert twin.get("/api/hello").rate == ("5", "4")
    assert twin.get("/api/hello", **{"X-API-Key": key}).rate == ("5", "3")


@pytest.mark.parametrize(("trusted", "limit"), [((), "5"), ((CLIENT,), "50")])
def test_a_caller_known_by_header_needs_a_trusted_peer(make: Make, trusted: tuple[str, ...], limit: str) -> None:
    """`X-Caller: billing` makes a VIP where it comes from a trusted peer, and nothing where it does not."""
    twin = make(trusted_proxies=trusted)
    assert twin.get("/api/hello", **{"X-Caller": "billing"}).rate[0] == limit
    assert twin.get("/api/hello", **{"X-Caller": "nobody"}).rate[0] == "5"


def test_a_forged_address_is_not_believed(twin: Twin) -> None:
    """Without trusted proxies a client cannot get a fresh bucket by naming another address."""
    answers = [twin.get("/api/hello", **{"X-Forwarded-For": f"198.51.100.{number}"}) for number in range(6)]
    assert [answer.status for answer in answers] == [200] * 5 + [429]


def test_items_share_the_bucket_of_their_route(twin: Twin) -> None:
    """Asking for another item is no way around the limit, and leaves that of /api/hello alone."""
    answers = [twin.get(f"/api/items/{number}") for number in range(6)]
    assert [answer.status for answer in answers] == [200] * 5 + [429]
    assert answers[3].json == {"id": "3", "name": "Item 3"}
    assert twin.get("/api/hello").rate == ("5", "4")


def test_login_is_strict(twin: Twin) -> None:
    """Three logins pass at once, the fourth waits 12 s, as five per minute says; other clients are not affected."""
    answers = [twin.post("/login") for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert answers[3].headers["retry-after"] == "12"
    assert answers[3].json["violated-policies"] == ["login"]
    assert twin.post("/login", OTHER_CLIENT).status == 200
    twin.clock.advance(us=11_999_999)
    assert twin.post("/login").status == 429
    twin.clock.advance(us=1)
    assert twin.post("/login").status == 200


def test_slow_guessing_is_limited_by_the_decorator(twin: Twin) -> None:
    """Who logs in as often as the minute allows runs into the twenty per hour beside the view."""
    answers = []
    while not answers or answers[-1].status == 200:
        twin.clock.advance(seconds=12)
        answers.append(twin.post("/login"))
    # Each 12 s one is taken and a fifteenth comes back: 20 + 12 * (n - 1) / 180 >= n holds up to n = 21.
    assert len(answers) == 22
    assert answers[-1].json["violated-policies"] == ["login-hourly"]


def test_login_is_refused_while_the_store_is_down(make: Make) -> None:
    """Without a store nobody may guess passwords, while the rest of the service goes on."""

    class Broken(MemoryStore):
        def spend(self, plan: Any, timeout: float = 0) -> Any:
            raise StoreError("down")

    twin = make(store=Broken())
    answer = twin.post("/login")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json["type"].endswith("#temporary-reduced-capacity")
    answer = twin.get("/api/hello")
    assert answer.status == 200
    assert "x-ratelimit-limit" not in answer.headers
    assert twin.get("/healthz").status == 200


def test_healthz_is_never_limited(twin: Twin) -> None:
    """A hundred health checks at once pass, none of them with a rate header."""
    answers = [twin.get("/healthz") for _ in range(100)]
    assert {(answer.status, answer.text) for answer in answers} == {(200, "ok")}
    assert not any(name.startswith(("x-ratelimit", "ratelimit", "retry-after")) for name in answers[-1].headers)


def test_start_page_says_what_to_try(twin: Twin) -> None:
    """The start page has a command for everything there is, addressed to the host it was asked from, and all of them work."""
    answer = twin.get("/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    commands = [html.unescape(command) for command in re.findall(r"<pre>(.*?)</pre>", answer.text)]
    urls = [re.search(r"http://service\.test(/[^ ?']*)", command) for command in commands]
    paths = [url[1] for url in urls if url]
    assert len(paths) == len(commands)
    assert set(paths) == {"/api/hello", "/api/items/7", "/login", "/api/stream", "/healthz"}
    assert any("X-API-Key: demo-vip-key" in command for command in commands)
    asked = [twin.post(path) if "-X POST" in command else twin.get(path) for path, command in zip(paths, commands, strict=True)]
    assert {answer.status for answer in asked} == {200}
    assert "x-ratelimit-limit" not in answer.headers


def test_start_page_shows_a_forged_host_as_text(twin: Twin) -> None:
    """Whatever stands in the Host header cannot become markup."""
    assert "<script>" not in twin.get("/", Host="<script>alert(1)</script>").text


def test_start_page_allows_nothing_but_its_own_script_and_style(twin: Twin) -> None:
    """Every page has a nonce of its own, and no attribute that the policy would block."""
    pages = [twin.get("/") for _ in range(2)]
    policies = [page.headers["content-security-policy"] for page in pages]
    assert policies[0] != policies[1]
    assert policies[0].startswith("default-src 'none'; script-src 'nonce-")
    assert "frame-ancestors 'none'" in policies[0]
    nonce = re.search("nonce-([^']+)'", policies[0])
    assert nonce is not None
    assert pages[0].text.count(f'nonce="{nonce[1]}"') == len(re.findall("<(?:style|script)", pages[0].text))
    assert not re.search(r"\sstyle=|\son[a-z]+=", pages[0].text)
    assert "{{" not in pages[0].text


def test_the_state_shows_what_is_left_and_charges_nothing(twin: Twin) -> None:
    """The page's bars show the buckets of whoever looks: those that the next request is counted by."""
    twin.get("/api/hello")
    twin.post("/login")
    for _ in range(2):
        windows = twin.get("/demo/state").json["windows"]
        assert [(each["rule"], each["limit"], each["remaining"], each["full_after"]) for each in windows] == [
            ("api", 5, 4, 1),
            ("api", 100, 99, 60),
            ("api", 2000, 1999, 86400),
            ("login", 3, 2, 36),
        ]
    assert twin.get("/demo/state", **VIP).json["windows"][0]["remaining"] == 50
    assert twin.get("/demo/state", OTHER_CLIENT).json["windows"][0]["remaining"] == 5


@pytest.mark.parametrize("rules", ["rules: [{name: mine, qpm: 7}]", None])
def test_without_these_rules_there_is_nothing_to_show(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rules: str | None
) -> None:
    """Other rules, or none in force, leave the start page whole."""
    if rules is None:
        monkeypatch.setenv("LIMITGATE_ENABLED", "false")
    else:
        (tmp_path / "mine.yaml").write_text(rules)
        monkeypatch.setenv("LIMITGATE_RULES", str(tmp_path / "mine.yaml"))
    twin = make()
    assert twin.get("/demo/state").json == {"windows": []}
    assert twin.get("/").status == 200


def test_a_wrong_password_counts_like_a_right_one(twin: Twin) -> None:
    """Three guesses are answered. Then the right password has to wait, too."""
    assert [twin.post("/login", body="password=1234").status for _ in range(3)] == [401] * 3
    assert twin.post("/login", body="password=sesame").status == 429
    twin.clock.advance(seconds=12)
    assert twin.post("/login", body="password=sesame").status == 200
    assert twin.post("/login", OTHER_CLIENT, body="password=%ff&password=&=\0").status == 401


def test_the_guard_refuses_what_a_crowd_asks_too_much(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard all are answered. With it, some are refused with 503 at once, and all are told of."""
    monkeypatch.setattr(demo, "BETWEEN", 0)
    monkeypatch.setattr(demo, "WORK", 0.01)
    monkeypatch.setattr(demo, "CROWD", 30)
    twin = make()
    statuses = {}
    for guard in ("off", "on"):
        lines = [json.loads(line) for line in twin.get(f"/demo/crowd?guard={guard}").text.splitlines()]
        assert sorted(line["number"] for line in lines) == [*range(30)]
        statuses[guard] = {line["status"] for line in lines}
    assert statuses == {"off": {200}, "on": {200, 503}}


def test_the_documentation_is_shown_as_it_is_written(twin: Twin) -> None:
    """Pages in docs/ and no other files."""
    assert twin.get("/docs/rules.md").text == (ROOT / "docs" / "rules.md").read_text()
    assert [twin.get(f"/docs/{name}").status for name in ("..%2fREADME.md", "nothing.md", "benchmark.svg")] == [404] * 3


def test_stream_has_rate_headers_and_every_chunk(twin: Twin) -> None:
    """A streaming response is limited, carries the rate headers and arrives whole."""
    answer = twin.get("/api/stream")
    assert answer.text == "".join(f"chunk {number} of 5\n" for number in range(1, 6))
    assert answer.rate == ("5", "4")
    assert [twin.get("/api/stream").status for _ in range(5)] == [200] * 4 + [429]


def test_asgi_stream_sends_its_first_chunk_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk is on its way while the rest has not been made."""
    monkeypatch.setattr(content, "PAUSE", 3600)

    async def first_two_messages() -> list[Any]:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        running = asyncio.ensure_future(main.create_app()(http_scope("/api/stream"), asyncio.Event().wait, messages.put))
        received = [await asyncio.wait_for(messages.get(), 5) for _ in range(2)]
        running.cancel()
        await asyncio.wait([running])
        return received

    start, body = asyncio.run(first_two_messages())
    assert (b"x-ratelimit-remaining", b"4") in start["headers"]
    assert (body["body"], body["more_body"]) == (b"chunk 1 of 5\n", True)


def test_wsgi_stream_sends_its_first_chunk_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk is on its way while the rest has not been made."""
    monkeypatch.setattr(content, "PAUSE", 3600)
    response = wsgi.create_app().test_client().get("/api/stream")
    assert response.headers["X-RateLimit-Remaining"] == "4"
    assert next(response.iter_encoded()) == b"chunk 1 of 5\n"
    response.close()


def test_rules_are_found_from_any_folder(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The example finds its rules wherever it is started, unless LIMITGATE_RULES names others."""
    monkeypatch.chdir(tmp_path)
    assert make().get("/api/hello").rate == ("5", "4")
    (tmp_path / "mine.yaml").write_text("rules: [{name: mine, qpm: 7}]")
    monkeypatch.setenv("LIMITGATE_RULES", "mine.yaml")
    assert make().get("/api/hello").rate == ("7", "6")


def test_nothing_is_limited_where_limitgate_is_switched_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With LIMITGATE_ENABLED=false every route answers, the decorated one included, without rate headers."""
    monkeypatch.setenv("LIMITGATE_ENABLED", "false")
    twin = make()
    assert [twin.post("/login").status for _ in range(6)] == [200] * 6
    answer = twin.get("/api/hello")
    assert answer.json["limits"] == []
    assert "x-ratelimit-limit" not in answer.headers


def test_the_twins_limit_together_on_redis(own_redis: RedisServer) -> None:
    """On one Redis both twins are one service: logins at one of them are used up at the other."""

    async def two_logins_at_asgi() -> list[int]:
        store = AsyncRedisStore(own_redis.url)
        transport = httpx.ASGITransport(main.create_app(store=store), client=(CLIENT, 50000))
        async with httpx.AsyncClient(transport=transport, base_url="http://service.test") as client:
            statuses = [(await client.post("/login")).status_code for _ in range(2)]
        await store.aclose()
        return statuses

    store = RedisStore(own_redis.url)
    twin = Twin("wsgi", store=store)
    assert twin.post("/login").status == 200
    assert asyncio.run(two_logins_at_asgi()) == [200, 200]
    assert twin.post("/login").status == 429
    store.close()


def test_make_run_serves_the_example(own_redis: RedisServer, tmp_path: Path) -> None:
    """As `LIMITGATE_STORE=… make run` has it: limited by what is in Redis, where nothing that a client sent can be read."""
    with make_run(tmp_path, LIMITGATE_STORE=own_redis.url) as client:
        assert [client.post("/login").status_code for _ in range(4)] == [200, 200, 200, 429]
        assert client.get("/api/hello", headers=VIP).headers["x-ratelimit-limit"] == "50"
        assert client.get("/healthz").text == "ok"
        # The bucket of the VIP is empty after a second, while the server may still be ending.
        with own_redis.client() as redis:
            keys = redis.keys("*")
    names = [re.sub(r":[0-9a-f]{32}$", "", key.decode()) for key in keys]
    # Snapshots come after two seconds.
    limits = sorted(name for name in names if ":fleet" not in name)
    assert limits == ["limitgate:api", "limitgate:login", "limitgate:login-hourly", "limitgate:refusal-ids"]


def test_make_run_believes_no_forged_address(tmp_path: Path) -> None:
    """With `make run` neither uvicorn nor the gate takes a client's word for the address it comes from."""
    with make_run(tmp_path) as client:
        answers = [client.post("/login", headers={"X-Forwarded-For": f"192.0.2.{number}"}) for number in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]


def test_make_run_takes_another_port() -> None:
    """If 8000 is taken, as README says."""
    for given, port in ((), "8000"), (("PORT=8001",), "8001"):
        words = ["make", "--dry-run", "run", *given]
        environment = {name: each for name, each in os.environ.items() if name != "PORT"}
        shown = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
        assert f" --host 127.0.0.1 --port {port} " in shown


@contextmanager
def make_run(folder: Path, **environment: str) -> Iterator[httpx.Client]:
    """The server of `make run` with its options, but on a free port."""
    recipe = re.search(r"^run:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    _, target, *options = shlex.split(recipe[1].replace("$(PORT)", "8000"))
    with uvicorn_process(target, folder, *options, **environment) as url, httpx.Client(base_url=url) as client:
        assert ":8000" not in url
        yield client
