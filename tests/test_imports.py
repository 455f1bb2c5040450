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
    "llm.estimate llm.usage llm.costs llm.metering",
    "rules",
    "fleet.sketch fleet.tally",
    "observing",
    "routes stores",
    "fleet",
    "gate.flow",
    "gate.planning keys",
    "gate",
    "gate.lifecycle fleet.publisher fleet.figures fleet.reader fleet.exporter",
    "exchange",
    "middleware limiter",
    "fleet.actions llm outbound django fastapi flask forward opentelemetry prometheus",
    "aiohttp httpx httpx2 requests urllib3 testing",
    "page",
    "replay",
    "command",
    "command.verbs",
    "__main__",
)
LEVELS = {folder: place for place, layer in enumerate(LAYERS) for folder in layer.split()}
ROOT = Path(limitgate.__file__).parent
MOST_IMPORTS = 20
MOST_LINES_OF_THE_GATE, MOST_METHODS_OF_THE_GATE = 400, 20


@cache
def _modules() -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    return {name.removesuffix("__init__").removesuffix("."): path for path, name in names.items()}


@cache
def _imported(path: Path) -> frozenset[str]:
    """Modules of ours that a module imports, whenever it does so, for its annotations too."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "limitgate":
            inside = (node.module or "").partition(".")[2]
            names = {f"{inside}.{alias.name}".strip(".") for alias in node.names}
            found |= (names & _modules().keys()) or {inside}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("limitgate.")}
    return frozenset(found)


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


def test_no_module_imports_more_of_ours_than_a_reader_can_follow() -> None:
    imports = {module: _imported(path) - {module} for module, path in _modules().items()}
    assert not {module: len(each) for module, each in imports.items() if len(each) > MOST_IMPORTS}


def test_the_gate_stays_short() -> None:
    text = (ROOT / "gate" / "gate.py").read_text()
    (gate,) = [each for each in ast.parse(text).body if isinstance(each, ast.ClassDef) and each.name == "Gate"]
    methods = [
        each for each in gate.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.decorator_list
    ]
    assert len(text.splitlines()) <= MOST_LINES_OF_THE_GATE
    assert len(methods) <= MOST_METHODS_OF_THE_GATE
