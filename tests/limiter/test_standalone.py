"""LimitGate where nothing but what it requires is installed: no framework, none of the tests' tools."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BLOCK = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def required(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The distributions that one brings along, itself included."""
    found = {canonicalize_name(name)}
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras})
        if wanted:
            found |= required(requirement.name, frozenset(requirement.extras))
    return found


def run_alone(program: str, folder: Path) -> str:
    """Run a program for which nothing is installed but LimitGate and what it requires; what it prints."""
    brought = required("limitgate")
    others = {
        module
        for module, owners in packages_distributions().items()
        if not brought & {canonicalize_name(owner) for owner in owners}
    }
    code = BLOCK.format(blocked=others) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_blocked_is_what_is_not_required(tmp_path: Path) -> None:
    """The test environment has frameworks, and the programs here cannot import them."""
    program = """
    for module in ("django", "fastapi", "flask", "starlette", "werkzeug", "uvicorn", "httpx", "pytest"):
        try:
            __import__(module)
        except ModuleNotFoundError:
            print(module)
    """
    assert len(run_alone(program, tmp_path).split()) == 8


def test_it_limits_without_any_framework(tmp_path: Path) -> None:
    """Both doors, the decorators and the limiter work with the runtime dependencies alone."""
    program = """
    import asyncio
    from limitgate import *

    rules = [Rule("all", "2/day", path="/hello")]

    async def asgi(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(app):
        async def send(message):
            if "status" in message:
                print("asgi", message["status"])
        scope = {"type": "http", "method": "GET", "path": "/hello", "headers": [], "client": ("192.0.2.1", 1)}
        await app(scope, None, send)

    gate = LimitGate(asgi, rules=rules)
    for _ in range(3):
        asyncio.run(ask(gate))

    def wsgi(environ, start_response):
        start_response("200 OK", [])
        return [b""]

    gate = LimitGateWSGI(wsgi, rules=rules)
    for _ in range(3):
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/hello", "REMOTE_ADDR": "192.0.2.1"}
        gate(environ, lambda status, headers: print("wsgi", status[:3]))

    @limit("1/minute")
    def decorated():
        pass

    try:
        decorated()
    except ConfigError:
        print("guarded")
    with Limiter("memory://") as limiter:
        print(limiter.hit("key", "1/minute").allowed, RedisStore("redis://127.0.0.1:1") is not None)
    """
    asked = ["200", "200", "429"]
    expected = [f"{door} {status}" for door in ("asgi", "wsgi") for status in asked] + ["guarded", "True True"]
    assert run_alone(program, tmp_path).splitlines() == expected


def test_importing_it_imports_no_framework(tmp_path: Path) -> None:
    """Where frameworks are installed, `import limitgate` loads none of them."""
    program = "import sys, limitgate; print({'django', 'fastapi', 'flask', 'starlette', 'werkzeug'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "set()"
