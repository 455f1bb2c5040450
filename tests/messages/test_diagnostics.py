"""What is logged with a code: each in its situation, once, and not in the innocent one beside it."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from limitgate import AsyncRedisStore, Caller, ConfigError, LimitGateWSGI, MemoryStore, RedisStore, Rule, RuleSet, StoreError
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.rules.callers import KnownCaller
from tests.support.clock import Clock
from tests.support.doors import PATIENCE, PEER, SITES, Site, wsgi_reply
from tests.support.impostor import Impostor
from tests.support.redis_server import RedisServer, free_port

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/diagnostics.md").read_text()
ACL = re.search(r"^ACL SETUSER .*$", (ROOT / "docs/deployment.md").read_text(), re.MULTILINE)[0].split()
CODES = {diagnosis.code for diagnosis in Diagnosis}
RULE = Rule("api", "99/minute burst 1", path="/api/**")
ERRORS = {"LG021", "LG022", "LG023", "LG024", "LG025", "LG034", "LG061", "LG062", "LG063", "LG071", "LG080", "LG082"}
"""What no waiting can cure, rules that cannot be used, and requests that fail."""
DIGEST = f"sha256:{'0' * 64}"
XFF = {"X-Forwarded-For": "203.0.113.77"}


@pytest.fixture(autouse=True)
def _nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No .env, no server and no variables of servers around the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["app"])
    monkeypatch.delenv("WEB_CONCURRENCY", raising=False)
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)


def test_every_code_is_explained() -> None:
    """The page has a section for each code, in order, with why it matters and what to do, and for no other."""
    sections = re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", DOCS, re.MULTILINE | re.DOTALL)
    assert [code for code, _ in sections] == sorted(CODES)
    for _, text in sections:
        assert re.search(r"\A\n\*\*.+?\*\*.*^\*Why it matters:\* .*^\*What to do:\* ", text, re.MULTILINE | re.DOTALL)


def test_a_code_is_one_thing() -> None:
    """No two diagnoses have the same code, and each line leads to its own place."""
    assert len(CODES) == len(Diagnosis)
    for diagnosis in Diagnosis:
        assert re.fullmatch("LG[0-9]{3}", diagnosis.code)
        assert diagnosis.line.startswith(f"{diagnosis.code} ")
        assert diagnosis.line.endswith(f" (limitgate doc {diagnosis.code})")
        assert "\n" not in diagnosis.line


CURES = {
    "LG001": "use Redis",
    "LG002": "name your proxies",
    "LG003": "%s",  # the name that was probably meant
    "LG004": "name your proxies",
    "LG005": "list digests of keys under callers, or set identify",
    "LG006": "add its address to trusted_proxies",
    "LG007": "'burst %d' limits it",
    "LG011": "let NTP slew the clock",
    "LG013": "add it to trusted_proxies; if it has that many customers, raise new_buckets",
    "LG015": "lower the server's concurrency limit or add workers",
    "LG017": "let NTP slew the clock",
    "LG018": "set maxmemory-policy to volatile-ttl or noeviction",
    "LG019": "set appendonly to yes",
    "LG020": "please report",
    "LG021": "ACL SETUSER <user> %s",
    "LG022": ": %s",  # what each hindrance says
    "LG023": ": %s",
    "LG024": ": %s",
    "LG025": ": %s",
    "LG026": ": %s",  # the message of the `ConfigError`
    "LG028": "set the option processes",
    "LG034": ": %s",  # the message of the `ConfigError`
    "LG035": "restart to apply them",
    "LG036": "see the observer's log",
    "LG039": "expected %s",  # the code that keeps it
    "LG049": "expected %s",  # what has an id
    "LG061": ": %s",
    "LG062": ": %s",
    "LG063": ": %s",
    "LG071": "expected identify to return a Caller or None",
    "LG072": "did you mean %s?",
    "LG073": "use x-ratelimit or draft-11",
    "LG074": "; %s",  # the tiers
    "LG080": "send its subrequests to one of the paths",
    "LG081": "set %s",  # the header
    "LG082": "expected %s",
    "LG083": "let the proxy send %s",
}
"""The advice in each line. Users who install with pip have no docs folder."""


@pytest.mark.parametrize("diagnosis", Diagnosis, ids=attrgetter("code"))
def test_a_line_carries_its_cure(diagnosis: Diagnosis) -> None:
    assert CURES[diagnosis.code] in diagnosis.line


# --- situations -------------------------------------------------------------------------------------------------------


class FarAway:
    """Stands for a store on another machine, whose clock differs by so many seconds."""

    clock_steps = 0
    healthy = True

    def __init__(self, ahead: float) -> None:
        self._store = MemoryStore(lambda: round((time.time() + ahead) * 1e6))

    def spend(self, plan: Any, timeout: float) -> Any:
        return self._store.spend(plan)

    async def aspend(self, plan: Any, timeout: float) -> Any:
        return self._store.spend(plan)

    def close(self) -> None:
        """Nothing to let go of."""

    async def aclose(self) -> None:
        """Nothing to let go of."""


class Failing(FarAway):
    """Stands for a store that fails in one way."""

    def __init__(self, fault: Any) -> None:
        super().__init__(0)
        self._fault = fault

    def spend(self, plan: Any, timeout: float) -> Any:
        raise StoreError("out of order", self._fault)

    async def aspend(self, plan: Any, timeout: float) -> Any:
        return self.spend(plan, timeout)


class Stage:
    """Where a situation is played: one door, an environment, a clock."""

    def __init__(
        self, door: Any, opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.caplog = caplog
        self.setenv = monkeypatch.setenv
        self.setattr = monkeypatch.setattr
        self.clock = Clock()
        self._door = door
        self._opened = opened

    def argv(self, *arguments: str) -> None:
        self.setattr(sys, "argv", list(arguments))

    def site(self, *rules: Rule, **options: Any) -> Site:
        if not rules and "rules" not in options:
            rules = (Rule("all", "99/minute"),)
        return self._opened.enter_context(self._door(*rules, **options))

    def redis(self, **options: str) -> RedisServer:
        """A Redis for this situation alone."""
        server = RedisServer(**options)
        self._opened.callback(server.stop)
        self._opened.callback(until_nobody_connects)
        return server

    def impostor(self, **words: bytes) -> Impostor:
        """A server of these words for this situation alone."""
        return self._opened.enter_context(Impostor(**words))

    def asked(self, *rules: Rule, peer: str | None = "192.0.2.1", headers: Any = (), **options: Any) -> Site:
        it = self.site(*rules, **options)
        for _ in range(3):
            it.ask("/api", peer=peer, headers=headers)
        return it


def until_nobody_connects() -> None:
    """Wait for threads that connect: Python leaves a socket open that is reset just before TLS begins."""
    for thread in threading.enumerate():
        if thread.name in ("limitgate-start", "limitgate-connect", "limitgate-probe", "limitgate-tls"):
            thread.join(PATIENCE)


Play = Callable[[Stage], object]


def workers(stage: Stage, arguments: tuple[str, ...], store: Any = "memory://", **options: Any) -> None:
    stage.argv(*arguments)
    stage.asked(store=store, **options)


def failing(stage: Stage, identify: Callable[[Any], Any]) -> None:
    it = stage.site(RULE, identify=identify)
    for _ in range(3):
        with contextlib.suppress(ArithmeticError, TypeError):
            it.ask("/api")


def variable(stage: Stage, name: str, value: str) -> None:
    stage.setenv(name, value)
    stage.asked()


def stepping(stage: Stage, seconds: float) -> None:
    it = stage.site(store=MemoryStore(stage.clock))
    for _ in range(3):
        stage.clock.advance(seconds)
        it.ask()


def inventing(stage: Stage, part: str, **options: Any) -> None:
    it = stage.site(Rule("a", "9/m", key=[part]), **options)
    for number in range(9):
        it.ask(headers={"X-Id": f"203{number}", "X-API-Key": f"203{number}"})
        it.ask(headers={"Host": f"203{number}"})


def leaping(stage: Stage, *seconds: float) -> None:
    """A Redis whose clock steps: ours does so the other way."""
    it = stage.site(store=stage.redis().url, timeout=5)
    it.ask()
    for each in seconds:
        stage.setattr(it.app.gate.store, "_clock", lambda each=each: time.monotonic() - each)
        it.statuses(3)


def filling(stage: Stage, maxmemory: str, policy: str) -> None:
    stage.asked(store=stage.redis(maxmemory=maxmemory, maxmemory_policy=policy).url, timeout=5)


def reconnecting(stage: Stage, end: Callable[[RedisServer], object]) -> None:
    """Connections to a Redis that end, twice."""
    server = stage.redis()
    it = stage.site(store=server.url, timeout=5)
    for _ in range(2):
        assert it.ask().status == 200
        end(server)
    assert it.ask().status == 200


def restart(server: RedisServer) -> None:
    server.kill()
    server.start()


def disconnect(server: RedisServer) -> None:
    with server.client() as client:
        client.client_kill_filter(_type="normal")


def permitted(stage: Stage, *words: str, **options: Any) -> None:
    """A Redis user made with the words of the documentation and others."""
    server = stage.redis()
    with server.client() as client:
        client.execute_command(*ACL, *words)
    it = stage.site(store=f"{server.url}?username=limitgate&password=PASSWORD", timeout=5, **options)
    it.statuses(9)


def told(stage: Stage, url: Any, code: str = "", timeout: float = 2, **options: Any) -> None:
    """Three requests on a store, and then time for what is told without them, if a gate is there that asks the store."""
    it = stage.asked(store=url, timeout=timeout, **options)
    deadline = time.monotonic() + 20
    is_awaited = code and it.app.gate is not None
    while is_awaited and not any(code in message for message in stage.caplog.messages) and time.monotonic() < deadline:
        it.idle(0.05)


def listening(
    stage: Stage, login: str = "", database: str = "", password: str = "", scheme: str = "redis", **options: Any
) -> None:
    """A Redis on a port, which may want a password, and requests to it by a URL."""
    port = free_port()
    while "203" in str(port):  # which stands for what a client has sent
        port = free_port()
    server = stage.redis(port=str(port), databases="4")
    if password:
        with server.client() as client:
            client.config_set("requirepass", password)
    told(stage, f"{scheme}://{login}127.0.0.1:{port}{database}", **options)


def told_by_impostor(stage: Stage, **words: bytes) -> None:
    """Requests to a server of these words."""
    server = stage.impostor(**words)
    told(stage, f"redis://{server.place}")


def without_login(stage: Stage, credentials: Callable[[], object]) -> None:
    """Requests to a Redis with credentials that give no login."""
    for kind in (AsyncRedisStore, RedisStore):
        with contextlib.suppress(ConfigError):  # each door has its kind
            told(stage, kind(stage.redis().url, credentials=credentials), code="LG063")


def behind_tls(stage: Stage, folder: Path, scheme: str, trust: str = "", **options: Any) -> None:
    """A Redis that speaks TLS with a certificate of its own, and requests to it by a URL."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    make += ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(make, cwd=folder, check=True, capture_output=True)
    port, files = free_port(), {"tls_cert_file": str(folder / "cert.pem"), "tls_key_file": str(folder / "key.pem")}
    stage.redis(tls_port=str(port), tls_auth_clients="no", **files)
    told(stage, f"{scheme}://127.0.0.1:{port}{trust.format(folder)}", **options)


def by_user(stage: Stage, *users: object) -> None:
    """Requests of these users under rules that count by user."""
    rules = [Rule("a", "9/m", key=["user"]), Rule("b", "9/m", key=["user|ip", "method"])]
    it = stage.site(*rules)
    gate = LimitGateWSGI(hello, rules=rules) if it.door == "wsgi" else None  # the application of a site lets only text pass
    for user in users:
        if gate is None:
            it.ask(user=user)
        else:
            wsgi_reply(lambda environ, start, user=user: gate({**environ, "REMOTE_USER": user}, start))


def hello(_: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def rewritten(stage: Stage, name: str, *texts: str, looks: int = 3) -> None:
    """A rule file, or a file of variables, in which one text after the other is written while the gate looks."""
    with TemporaryDirectory() as folder:
        rules, variables = Path(folder, "rules.yaml"), Path(folder, "variables")
        rules.write_text("rules: [{name: all, qpm: 99}]")
        variables.write_text("LIMITGATE_KEY_PREFIX=one")
        stage.setenv("LIMITGATE_ENV_FILE", str(variables))
        it = stage.site(rules=rules, reload=86400)
        for text in ("", *texts):
            if text:
                Path(folder, name).write_text(text)
            for _ in range(looks):
                it.app.gate.poller.poll()


SITUATIONS: dict[str, list[Play]] = {
    "LG001": [
        lambda stage: workers(stage, ("uvicorn", "app:app", "--workers", "4")),
        lambda stage: workers(stage, ("gunicorn", "-w4", "app:app")),
    ],
    "LG002": [lambda stage: variable(stage, "FORWARDED_ALLOW_IPS", "*")],
    "LG003": [lambda stage: variable(stage, "LIMITGATE_STOER", "memory://")],
    "LG004": [
        lambda stage: stage.asked(trusted_proxies=["0.0.0.0/0"]),
        lambda stage: stage.asked(trusted_proxies=["::/0"]),
        lambda stage: stage.asked(trusted_proxies=["10.0.0.0/8", "0.0.0.0/1", "128.0.0.0/1"]),
        lambda stage: stage.asked(trusted_proxies=["::ffff:0:0/96"]),
        lambda stage: stage.asked(trusted_proxies=["2000::/4", "3000::/4"]),
    ],
    "LG005": [
        lambda stage: stage.asked(Rule("a", "9/m", key=["api_key"]), Rule("b", "9/m", key=["ip", "api_key|ip"])),
        lambda stage: stage.asked(
            rules=RuleSet([Rule("a", "9/m", key=["api_key"])], [KnownCaller(id="a", header={"X-A": "a"})])
        ),
    ],
    "LG006": [
        lambda stage: stage.asked(headers=XFF),
        lambda stage: stage.asked(headers=XFF, trusted_proxies=["10.0.0.0/8"]),
        lambda stage: stage.asked(headers=XFF, peer=None),
        lambda stage: stage.asked(headers=XFF, peer="testclient"),
        lambda stage: stage.asked(Rule("api", "60/minute", key=["global"], adaptive=True), headers=XFF),
        lambda stage: stage.asked(headers={"Forwarded": "for=203.0.113.77"}),
        lambda stage: stage.asked(headers={"CF-Connecting-IP": "203.0.113.77"}, forwarded_header="CF-Connecting-IP"),
        lambda stage: stage.asked(headers={"Forwarded": "for=203.0.113.77"}, forwarded_header="forwarded"),
    ],
    "LG007": [
        lambda stage: stage.asked(Rule("api", "60/minute"), strict=True),
        lambda stage: variable(stage, "LIMITGATE_STRICT", "true"),
        lambda stage: stage.asked(Rule("api", "60/minute", "1/second burst 1", "100/hour"), strict=True),
        lambda stage: stage.asked(
            rules=RuleSet([Rule("api", "60/minute")], tiers=["vip"]), identify=lambda _: None, strict=True
        ),
    ],
    "LG011": [lambda stage: stepping(stage, -5)],
    "LG013": [
        lambda stage: inventing(stage, "header:x-id", new_buckets=2),
        lambda stage: inventing(stage, "host", new_buckets=2),
        lambda stage: inventing(stage, "api_key", new_buckets=2),
        lambda stage: inventing(stage, "header:x-id", new_buckets=2, trusted_proxies=["10.0.0.0/8"]),
    ],
    "LG015": [lambda stage: stage.asked(store=Failing("overload"))],
    "LG017": [lambda stage: leaping(stage, 60), lambda stage: leaping(stage, 3600, 7200)],
    "LG018": [
        lambda stage: filling(stage, "100mb", "allkeys-lru"),
        lambda stage: filling(stage, "100mb", "allkeys-random"),
        lambda stage: filling(stage, "100mb", "volatile-lru"),
    ],
    "LG019": [lambda stage: reconnecting(stage, restart)],
    "LG021": [
        lambda stage: permitted(stage, "-get"),
        lambda stage: permitted(stage, "-eval"),
        lambda stage: permitted(stage, "-evalsha"),
        lambda stage: permitted(stage, "resetkeys", "~other:*"),
        lambda stage: permitted(stage, key_prefix="mine"),
    ],
    "LG022": [
        lambda stage: listening(stage, password="p"),
        lambda stage: listening(stage, ":q@", password="p"),
        lambda stage: listening(stage, "u:p@", password="p"),
        lambda stage: listening(stage, password="p", scheme="redis+cluster"),
        lambda stage: listening(stage, database="/m", password="p", scheme="redis+sentinel"),
    ],
    "LG023": [lambda stage: listening(stage, database="/4"), lambda stage: listening(stage, ":p@", "/9", password="p")],
    "LG024": [
        lambda stage: listening(stage, scheme="rediss", code="LG024", timeout=0.5),
        lambda stage: behind_tls(stage, Path.cwd(), "redis", code="LG024"),
        lambda stage: behind_tls(stage, Path.cwd(), "rediss", code="LG024"),
    ],
    "LG025": [
        lambda stage: listening(stage, database="/m", scheme="redis+sentinel"),
        lambda stage: told_by_impostor(stage, EVALSHA=b"-MOVED 1 127.0.0.1:1\r\n"),
    ],
    "LG026": [
        lambda stage: stage.asked(Rule("a", lambda _: "often", qpm=9)),
        lambda stage: stage.asked(Rule("a", "9/m"), identify=lambda _: Caller("b", limits={"a": "often"})),
    ],
    "LG028": [
        lambda stage: workers(stage, ("uvicorn", "--workers", "4"), FarAway(0), on_error="local"),
        lambda stage: workers(stage, ("uvicorn", "-w4"), FarAway(0), rules=[Rule("a", "9/m", on_error="local")]),
    ],
    "LG034": [
        lambda stage: rewritten(stage, "rules.yaml", "rules: ["),
        lambda stage: rewritten(stage, "rules.yaml", "tier: default"),
    ],
    "LG035": [
        lambda stage: rewritten(stage, "variables", "LIMITGATE_KEY_PREFIX=two"),
        lambda stage: rewritten(stage, "variables", "LIMITGATE_IPV6_PREFIX=often"),
    ],
    "LG049": [
        lambda stage: by_user(stage, {"name": "Ada"}, {"name": "Bob"}, "ada", object()),
        lambda stage: by_user(stage, object()),
        lambda stage: by_user(stage, ("acme", None)),
    ],
    "LG061": [lambda stage: told_by_impostor(stage, EVAL=b"-ERR unknown command 'EVAL'\r\n")],
    "LG063": [
        lambda stage: without_login(stage, lambda: "secret-203"),
        lambda stage: without_login(stage, lambda: 1 / 0),
        lambda stage: without_login(stage, lambda: ("user", "secret-203", 0)),
    ],
    "LG062": [lambda stage: told(stage, stage.redis(replicaof="127.0.0.1 1").url, code="LG062")],
    "LG071": [
        lambda stage: failing(stage, lambda _: 1 // 0),
        lambda stage: failing(stage, lambda _: "ada"),
    ],
    "LG074": [
        lambda stage: stage.asked(RULE, identify=lambda _: Caller("ada", "gold")),
        lambda stage: stage.asked(RULE, Rule("api", "9/m", tier="vip"), identify=lambda _: Caller("ada", "VIP")),
    ],
    "LG072": [
        lambda stage: stage.asked(forwarded_header="x_forwarded_for"),
        lambda stage: stage.asked(forwarded_header="X_Real-IP"),
    ],
    "LG073": [
        lambda stage: stage.site(Rule("api", "5 per 90 seconds"), headers=["x-ratelimit-windows"]),
        lambda stage: stage.site(Rule("api", "5/week", "9 per 2 days"), headers=["x-ratelimit-windows"]),
    ],
}

INNOCENT: dict[str, list[Play]] = {
    "LG001": [
        lambda stage: workers(stage, ("uvicorn", "app:app", "--workers", "1")),
        lambda stage: workers(stage, ("uvicorn", "app:app")),
        lambda stage: workers(stage, ("uvicorn", "--workers", "4"), "redis://127.0.0.1:1"),
    ],
    "LG002": [lambda stage: variable(stage, "FORWARDED_ALLOW_IPS", "10.0.0.1")],
    "LG003": [
        lambda stage: variable(stage, "LIMITGATE_STORE", "memory://"),
        lambda stage: variable(stage, "LIMITGATED", "1"),
    ],
    "LG004": [
        lambda stage: stage.asked(trusted_proxies=["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "unix"]),
        lambda stage: stage.asked(trusted_proxies=["fc00::/7", "::1", "fe80::/10"]),
        lambda stage: stage.asked(trusted_proxies=["0.0.0.0/1"]),
        lambda stage: stage.asked(trusted_proxies=["2000::/4"]),
        lambda stage: stage.asked(),
    ],
    "LG005": [
        lambda stage: stage.asked(Rule("a", "9/m", key=["header:x-api-key"])),
        lambda stage: stage.asked(Rule("a", "9/m", key=["api_key"]), identify=lambda _: None),
        lambda stage: stage.asked(rules=RuleSet([Rule("a", "9/m", key=["api_key"])], [KnownCaller(id="a", api_key=DIGEST)])),
    ],
    "LG006": [
        lambda stage: stage.asked(),
        lambda stage: stage.asked(headers={"X-Forwarded-For": ""}),
        lambda stage: stage.asked(headers={"X-Real-IP": "203.0.113.77"}),
        lambda stage: stage.asked(headers=XFF, trusted_proxies=["192.0.2.0/24"]),
        lambda stage: stage.asked(headers=XFF, peer=None, trusted_proxies=["unix"]),
        # the server has believed its proxy already, and put the client in the peer's place
        lambda stage: stage.asked(headers=XFF, peer="203.0.113.77"),
        lambda stage: stage.asked(headers={"X-Forwarded-For": "198.51.100.1, 203.0.113.77"}, peer="::ffff:203.0.113.77"),
        lambda stage: stage.asked(headers={"Forwarded": "for=203.0.113.77;proto=https"}, peer="203.0.113.77"),
        # nobody asks for the address
        lambda stage: stage.asked(Rule("all", "9/m", key=["global"]), headers=XFF),
    ],
    "LG007": [
        lambda stage: stage.asked(Rule("api", "60/minute")),
        lambda stage: stage.asked(RULE, Rule("b", "1/day"), strict=True),
        lambda stage: stage.asked(Rule("api", "60/minute", "1/second burst 1"), strict=True),
        lambda stage: stage.asked(Rule("api", "60/minute burst 5", cost=5), strict=True),
        lambda stage: stage.asked(Rule("free", exempt=True), strict=True),
    ],
    "LG011": [lambda stage: stepping(stage, 5), lambda stage: stepping(stage, -0.5)],
    "LG013": [
        lambda stage: inventing(stage, "header:x-id"),
        lambda stage: inventing(stage, "header:x-id", new_buckets=0),
        lambda stage: inventing(stage, "header:x-id", new_buckets=2, trusted_proxies=["192.0.2.1"]),
        lambda stage: inventing(stage, "api_key", new_buckets=2, identify=lambda _: None),
        lambda stage: inventing(stage, "ip", new_buckets=2),
        lambda stage: stage.asked(Rule("a", "9/m", key=["header:x-id"]), headers={"X-Id": "203"}, new_buckets=2),
    ],
    "LG017": [
        leaping,
        lambda stage: leaping(stage, 1.5),
        lambda stage: leaping(stage, -3600),  # as after a pause of an hour: it may have stood still meanwhile
    ],
    "LG018": [
        lambda stage: filling(stage, "100mb", "noeviction"),
        lambda stage: filling(stage, "100mb", "volatile-ttl"),
        lambda stage: filling(stage, "0", "allkeys-lru"),
        permitted,
    ],
    "LG019": [lambda stage: reconnecting(stage, disconnect), lambda stage: permitted(stage, "-info")],
    "LG021": [
        permitted,
        lambda stage: permitted(stage, "-info"),
        lambda stage: permitted(stage, "+@all", "~*"),
        lambda stage: permitted(stage, "resetkeys", "~mine:*", key_prefix="mine"),
    ],
    "LG022": [
        lambda stage: listening(stage, ":p@", password="p"),
        lambda stage: told(stage, f"redis://127.0.0.1:{free_port()}"),
    ],
    "LG023": [lambda stage: listening(stage, database="/3"), listening],
    "LG024": [
        lambda stage: behind_tls(stage, Path.cwd(), "rediss", "?ssl_ca_certs={}/cert.pem"),
        lambda stage: told(stage, f"rediss://127.0.0.1:{free_port()}"),
        listening,
    ],
    "LG025": [listening],
    "LG026": [
        lambda stage: stage.asked(Rule("a", lambda _: "9/m")),
        lambda stage: stage.asked(Rule("a", lambda _: None)),
        lambda stage: stage.asked(Rule("a", "9/m"), identify=lambda _: Caller("b", limits={"c": "often"})),
    ],
    "LG028": [
        lambda stage: workers(stage, ("uvicorn", "--workers", "4"), FarAway(0), on_error="local", processes=4),
        lambda stage: workers(stage, ("uvicorn", "--workers", "4"), FarAway(0), on_error="closed"),
        lambda stage: workers(stage, ("uvicorn", "--workers", "4"), on_error="local"),
        lambda stage: workers(stage, ("uvicorn",), FarAway(0), on_error="local"),
    ],
    "LG034": [
        lambda stage: rewritten(stage, "rules.yaml", "rules: [{name: all, qpm: 9}]"),
        lambda stage: rewritten(stage, "rules.yaml", "rules: [", looks=1),
    ],
    "LG035": [
        lambda stage: rewritten(stage, "variables", "LIMITGATE_KEY_PREFIX=one\nOTHER=1"),
        lambda stage: rewritten(stage, "rules.yaml", "rules: [{name: all, qpm: 9}]"),
    ],
    "LG061": [listening],
    "LG062": [
        lambda stage: told_by_impostor(stage, EVALSHA=b"-LOADING Redis is loading the dataset in memory\r\n"),
        listening,
    ],
    "LG063": [listening],
    "LG015": [lambda stage: stage.asked(store=Failing("timeout")), lambda stage: stage.asked(store=Failing("oom"))],
    "LG049": [
        lambda stage: by_user(stage, 5, UUID(int=7), {"sub": "ada"}, ("acme", 5), "ada", SimpleNamespace(email="a@b.example")),
        lambda stage: by_user(stage, None, "", True, {}, SimpleNamespace(is_authenticated=False)),
    ],
    "LG071": [
        lambda stage: stage.asked(RULE, identify=lambda _: None),
        lambda stage: stage.asked(RULE, identify=lambda _: Caller("ada")),
    ],
    "LG074": [
        lambda stage: stage.asked(RULE, Rule("api", "9/m", tier="vip"), identify=lambda _: Caller("ada", "vip")),
        lambda stage: stage.asked(RULE, identify=lambda _: Caller("ada")),
    ],
    "LG072": [lambda stage: stage.asked(forwarded_header="x-real-ip"), lambda stage: stage.asked()],
    "LG073": [
        lambda stage: stage.site(Rule("api", "5 per 90 seconds", qpm=9), headers=["x-ratelimit-windows"]),
        lambda stage: stage.site(Rule("api", "5 per 90 seconds"), headers=["x-ratelimit-windows", "draft-11"]),
        lambda stage: stage.asked(Rule("api", "5 per 90 seconds")),
        lambda stage: stage.site(Rule("api", concurrency=5), headers=["x-ratelimit-windows"]),
    ],
}


@pytest.fixture(params=SITES, ids=attrgetter("door"))
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Stage]:
    with contextlib.ExitStack() as opened:
        yield Stage(request.param, opened, monkeypatch, caplog)


def cases(plays: dict[str, list[Play]]) -> list[Any]:
    """All situations, named by their code and number."""
    return [pytest.param(code, play, id=f"{code}-{n}") for code, several in plays.items() for n, play in enumerate(several)]


def codes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The codes in the log."""
    return [message.split()[0] for message in caplog.messages if message.startswith("LG")]


@pytest.mark.parametrize(("code", "play"), cases(SITUATIONS))
def test_it_is_said_once(stage: Stage, caplog: pytest.LogCaptureFixture, code: str, play: Play) -> None:
    """In its situation a diagnosis is one line, however many requests come, and it holds nothing that a client sent."""
    with caplog.at_level(logging.DEBUG, "limitgate"):
        play(stage)
    assert codes(caplog).count(code) == 1
    (record,) = [record for record in caplog.records if record.getMessage().startswith(code)]
    assert (record.name, record.levelname) == ("limitgate", "ERROR" if code in ERRORS else "WARNING")
    assert not re.search("203|192[.]0|testclient", record.getMessage())


@pytest.mark.parametrize(("code", "play"), cases(INNOCENT))
def test_it_is_not_said_in_vain(stage: Stage, caplog: pytest.LogCaptureFixture, code: str, play: Play) -> None:
    """In an innocent situation that looks much the same nothing is said."""
    with caplog.at_level(logging.DEBUG, "limitgate"):
        play(stage)
    assert code not in codes(caplog)


def test_every_code_has_its_situation() -> None:
    """No diagnosis is left without a test."""
    assert SITUATIONS.keys() == INNOCENT.keys()
    elsewhere = {"LG020", "LG036", "LG039", "LG080", "LG081", "LG082", "LG083"}  # the last are in tests/forward
    assert SITUATIONS.keys() | elsewhere == CODES


@pytest.mark.parametrize("play", [play for code in sorted(SITUATIONS) for play in SITUATIONS[code]])
def test_nothing_is_said_where_it_is_switched_off(stage: Stage, caplog: pytest.LogCaptureFixture, play: Play) -> None:
    """A gate that is not enabled looks at nothing. A store has looked before."""
    stage.setenv("LIMITGATE_ENABLED", "false")
    with caplog.at_level(logging.DEBUG, "limitgate"), contextlib.suppress(AttributeError):
        play(stage)
    assert [code for code in codes(caplog) if code != "LG011"] == []


def test_once_is_once_under_threads(caplog: pytest.LogCaptureFixture) -> None:
    """Of many threads that find the same at once, one says it."""
    once = Once(Diagnosis.SERVER_TRUSTS_ALL)
    with ThreadPoolExecutor(20) as threads:
        for _ in range(100):
            threads.submit(once.log)
    assert codes(caplog) == ["LG002"]


@pytest.mark.parametrize(
    ("before", "logged"), [(0, True), (1, True), (2, False), (7, True), (62, False), (63, True), (1023, True)]
)
def test_requests_are_searched_for_a_proxy_ever_more_seldom(
    stage: Stage, caplog: pytest.LogCaptureFixture, *, before: int, logged: bool
) -> None:
    """The first, second, fourth, eighth and so on; a proxy writes its header into all of them."""
    it = stage.site(Rule("all", "9999/second"))
    for _ in range(before):
        it.ask()
    it.ask(headers=XFF)
    assert codes(caplog) == ["LG006"] * logged


@pytest.mark.parametrize("key", ["global", "ip"])
def test_a_probe_hides_no_proxy_from_an_adaptive_limit(stage: Stage, caplog: pytest.LogCaptureFixture, key: str) -> None:
    """All requests have one path, and the first comes from a health check that passes no proxy."""
    it = stage.site(Rule("api", "9999/second", key=[key], adaptive=True))
    it.ask()
    assert codes(caplog) == []
    for _ in range(3):
        it.ask(headers=XFF)
    assert codes(caplog) == ["LG006"]


def test_a_client_that_names_itself_hides_no_proxy(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A request whose header names its own peer, as servers leave it that have resolved it, does not end the search."""
    it = stage.site(Rule("all", "9999/second"))
    it.ask(headers={"x-forwarded-for": PEER})
    assert codes(caplog) == []
    it.ask(headers=XFF)
    assert codes(caplog) == ["LG006"]
