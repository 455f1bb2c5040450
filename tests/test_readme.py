"""The README is held to its word: its code runs, its files load, its tables name what is there."""

from __future__ import annotations

import ast
import asyncio
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from flask import Flask

import limitgate
from limitgate import ConfigError, Settings, load_rules, open_store
from limitgate.headers import STYLES
from limitgate.keys import PARTS
from tests.redis_server import RedisServer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
REDIS = "redis://localhost:6379/0"
"""What the README calls the reader's Redis."""


def blocks(language: str) -> list[Any]:
    """The fenced blocks of a language, named by the line they stand on."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [pytest.param(block[1], id=f"line-{README.count(chr(10), 0, block.start()) + 1}") for block in found]


def rows(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose first head is ``first``."""
    table = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table, f"no table with the head {first}"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[1].splitlines()]


def asgi_asker(app: Any) -> tuple[list[tuple[str, str]], Callable[[list[tuple[str, str]]], list[int]]]:
    """The routes of an ASGI application as method and path, and a way to ask it for several of them."""
    routes = [(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()]

    async def ask(requests: list[tuple[str, str]]) -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            statuses = [(await client.request(method, path)).status_code for method, path in requests]
        await shut_down(app)
        return statuses

    return routes, lambda requests: asyncio.run(ask(requests))


async def shut_down(app: Any) -> None:
    """Send the lifespan events, so that the gate closes its connection."""
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        assert not message["type"].endswith("failed")

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)


def flask_asker(app: Flask) -> tuple[list[tuple[str, str]], Callable[[list[tuple[str, str]]], list[int]]]:
    """The same for Flask."""
    routes = [(method, rule.rule) for rule in app.url_map.iter_rules() for method in rule.methods or ()]
    return routes, lambda requests: [app.test_client().open(path, method=method).status_code for method, path in requests]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_in_the_readme_runs(
    code: str, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every piece of code runs and prints what it says; every application in it serves, and limits something."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code.replace(REDIS, own_redis.url), "README.md", "exec"), namespace)
    assert capsys.readouterr().out.splitlines() == re.findall(r"^# prints (.*)$", code, re.MULTILINE)
    if "app" not in namespace:
        return
    app = namespace["app"]
    routes, ask = flask_asker(app) if isinstance(app, Flask) else asgi_asker(app)
    own = [(method, path) for method, path in routes if method in ("GET", "POST") and re.search("hello|login|health", path)]
    assert own
    statuses = ask([request for request in own for _ in range(30)])
    assert {200, 429} == set(statuses)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_in_the_readme_loads(text: str, tmp_path: Path) -> None:
    """Every rule file loads, and one that has the name of a file in config/ says the same as that."""
    name = re.match(r"# (config/\S+\.yaml)\n", text)
    assert name
    (tmp_path / "rules.yaml").write_text(text)
    shown, real = load_rules(tmp_path / "rules.yaml"), load_rules(ROOT / name[1])
    assert shown.tiers == real.tiers
    assert shown.callers.with_key("demo-vip-key") == real.callers.with_key("demo-vip-key")
    assert shown.callers.list_keys == real.callers.list_keys


def test_there_is_something_to_test() -> None:
    """The blocks are found, so the tests above are about something."""
    assert len(blocks("python")) >= 6
    assert len(blocks("yaml")) == 2
    assert README.count("```") == 2 * sum(len(blocks(language)) for language in ("python", "yaml", "sh", "text"))


def test_options_table_is_complete_and_has_the_defaults() -> None:
    """The table of options names every setting, with the default it has."""
    table = {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in rows(README, "option")}
    assert table == {name: field.default for name, field in Settings.model_fields.items()}


def test_keys_table_is_complete() -> None:
    """The table of key parts names every part there is."""
    assert {row[0].strip("`") for row in rows(README, "part")} == {*PARTS, "header:NAME"}


def test_styles_table_is_complete() -> None:
    """The table of header styles names every style there is."""
    assert {row[0].strip("`") for row in rows(README, "style")} == set(STYLES)


def test_what_is_said_to_be_missing_is_missing() -> None:
    """The list of what is not there yet is struck from as soon as something is there."""
    missing = README.partition("## Not there yet")[2].partition("\n## ")[0]
    for scheme in re.findall(r"`(redis\+[a-z]+)://`", missing):
        with pytest.raises(ConfigError, match="store"):
            open_store(f"{scheme}://localhost:1")
    for algorithm in ("fixed_window", "sliding_window", "sliding_log"):
        with pytest.raises(ConfigError, match="algorithm"):
            limitgate.Limit("5/minute", algorithm=algorithm)
    for method in ("refund", "hit_up_to", "wait"):
        assert not hasattr(limitgate.AsyncLimiter, method)


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", *[f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")]])
def test_links_lead_somewhere(page: str) -> None:
    """Every link to a file of the repository leads to one that is there."""
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / page).read_text())
    assert all(((ROOT / page).parent / target).exists() for target in targets)


def test_make_targets_exist() -> None:
    """Every make command that is mentioned is one."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)\b", README)) <= targets


def test_architecture_has_a_place_for_every_module() -> None:
    """The table of modules names every module of the package, and none that is not there."""
    package = Path(limitgate.__file__).parent
    files = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.suffix in (".py", ".lua")}
    named = {name for row in rows(ARCHITECTURE, "module") for name in re.findall(r"`([a-z_/]+\.(?:py|lua))`", row[0])}
    assert named == {file for file in files if not file.endswith("__init__.py")} | {"stores/__init__.py", "routes/__init__.py"}


def test_names_in_the_readme_are_public() -> None:
    """Whatever the README imports from the package is one of its public names."""
    imported = {name.strip() for line in re.findall(r"from limitgate import (.*)", README) for name in line.split(",")}
    assert imported <= set(importlib.import_module("limitgate").__all__)
