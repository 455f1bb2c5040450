"""Imports run one way. A module may import only from modules of lower layers."""

from __future__ import annotations

import ast
from pathlib import Path

import limitgate

STORES = {
    "stores",
    *(
        f"stores.{module}"
        for module in (
            "base",
            "batch",
            "batcher",
            "breaker",
            "cluster",
            "cluster_threads",
            "connections",
            "corrections",
            "dialer",
            "faults",
            "leases",
            "line",
            "listening",
            "loops",
            "memory",
            "node",
            "packed",
            "patience",
            "pipeline",
            "redis",
            "redis_async",
            "refusals",
            "resolver",
            "scripted",
            "slots",
            "spare",
            "threads",
            "wire",
        )
    ),
}
LAYERS = (
    {"algorithms.base"},
    {
        "algorithms.gcra",
        "algorithms.sliding_log",
        "algorithms.warm_up",
        "diagnosis",
        "errors",
        "forks",
        "inbox",
        "outbound",
        "outbound.answers",
    },
    {
        "algorithms.ban",
        "algorithms.concurrency",
        "algorithms.each",
        "algorithms.fixed_window",
        "algorithms.kept",
        "algorithms.register",
        "algorithms.sliding_window",
        "durations",
    },
    {"algorithms"},
    {"limits"},
    {"windows"},
    {"configured", "plan", "priorities"},
    {"decision", "newcomers", "paths", *STORES},
    {"request"},
    {"client", "headers"},
    {"callers"},
    {"identity"},
    {"keys"},
    {"rules"},
    {"config", "decorators", "lint"},
    {"routes"},
    {"openapi", "overview", "planner", "routes.django", "routes.flask", "routes.starlette", "settings"},
    {"steps"},
    {"visit"},
    {"holding"},
    {"fallback", "pacing", "slot", "turns"},
    {"gate"},
    {"exchange", "front", "verbs"},
    {"reservation"},
    {"limiter"},
    {"django.options", "django.request", "middleware", "outbound.courtesy"},
    {"django.middleware", "django.rest", "outbound.urllib3"},
    {"django.checks"},
    {"", "django", "django.apps", "fastapi", "flask", "httpx", "requests", "urllib3"},
)


def _modules() -> dict[str, Path]:
    root = Path(limitgate.__file__).parent
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py")}
    return {name.removesuffix("__init__").removesuffix("."): path for path, name in names.items()}


def _imported(path: Path) -> set[str]:
    """The modules of ours that a module imports when it is itself imported."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "limitgate":
            inside = (node.module or "").partition(".")[2]
            names = {f"{inside}.{alias.name}".strip(".") for alias in node.names}
            found |= (names & set(_modules())) or {inside}
    return found


def test_every_module_has_a_layer() -> None:
    """A new module is given its place before anything imports it."""
    assert set().union(*LAYERS) == set(_modules())


def test_imports_run_one_way() -> None:
    """No module imports from its own layer or from one above it, but for the stores among themselves."""
    level = {module: place for place, layer in enumerate(LAYERS) for module in layer}
    wrong = [
        f"{module} imports {imported}"
        for module, path in _modules().items()
        for imported in _imported(path)
        if level[imported] >= level[module] and not (module.startswith("stores") and imported.startswith("stores"))
    ]
    assert not wrong
