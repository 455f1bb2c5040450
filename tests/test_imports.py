"""Imports run one way, annotations included: a folder imports from those above it in this list, in no circle."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import limitgate

LAYERS = (
    "messages",
    "errors internal_errors process",
    "algorithms",
    "limits",
    "overload",
    "http",
    "rules",
    "observing",
    "routes stores",
    "gate.flow",
    "gate.planning keys",
    "gate",
    "gate.lifecycle",
    "exchange",
    "middleware limiter",
    "llm outbound django fastapi flask opentelemetry prometheus",
    "aiohttp httpx httpx2 requests urllib3 testing",
    "replay",
    "command",
    "command.verbs",
    "__main__",
)
LEVELS = {folder: place for place, layer in enumerate(LAYERS) for folder in layer.split()}
ROOT = Path(limitgate.__file__).parent


@cache
def _modules() -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    return {name.removesuffix("__init__").removesuffix("."): path for path, name in names.items()}


def _imported(path: Path) -> set[str]:
    """Modules of ours that a module imports, whenever it does so, for its annotations too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "limitgate":
            inside = (node.module or "").partition(".")[2]
            names = {f"{inside}.{alias.name}".strip(".") for alias in node.names}
            found |= (names & set(_modules())) or {inside}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("limitgate.")}
    return found


def _level(module: str) -> int:
    """Place of the layer that a module is in: that of the innermost folder which has one."""
    while module not in LEVELS:
        module = module.rpartition(".")[0]
    return LEVELS[module]


def test_folders_import_from_those_above_them() -> None:
    """The package itself, which gives everybody's names, is imported by none."""
    wrong = [
        f"{module} imports {imported or 'limitgate'}"
        for module, path in _modules().items()
        if module
        for imported in _imported(path)
        if not imported or _level(imported) > _level(module)
    ]
    assert not wrong


def test_no_modules_form_a_circle() -> None:
    """A module can be read without those that need it. Raises `graphlib.CycleError`, which names the circle."""
    assert list(TopologicalSorter({module: _imported(path) - {module} for module, path in _modules().items()}).static_order())
