"""The dashboard has the fields that Grafana's own schema knows, of the types that it wants."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from handbook import dashboard
from tests.support.npm import installed

SCHEMA, TYPESCRIPT = "@grafana/schema@13.2.3", "typescript@5.9.3"
_ENUM = re.compile(r"export declare enum (\w+) \{([^}]*)\}")
_MEMBER = re.compile(r"(\w+)\s*=\s*(\"[^\"]*\"|'[^']*'|-?\d+)")


def _with_unions(types: str) -> str:
    """JSON has the values of enums, not their members."""
    for enum in _ENUM.finditer(types):
        for name, value in _MEMBER.findall(enum[2]):
            types = types.replace(f"{enum[1]}.{name};", f"{value};")
    return _ENUM.sub(
        lambda enum: f"export type {enum[1]} = {' | '.join(value for _, value in _MEMBER.findall(enum[2]))};", types
    )


def _errors(folder: Path, modules: Path, **texts: str) -> str:
    """What the compiler says of dashboards, each in a file of its name."""
    for name, text in texts.items():
        (folder / f"{name}.ts").write_text(
            f'import type {{ Dashboard }} from "./schema";\nexport const dashboard: Dashboard = {text};\n'
        )
    command = [modules / ".bin" / "tsc", "--noEmit", "--strict", "--skipLibCheck", *[f"{name}.ts" for name in texts]]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, timeout=120).stdout


def test_the_dashboard_is_as_its_schema_wants(tmp_path: Path) -> None:
    """A field that Grafana does not know, or of another type, would be passed over by it in silence."""
    modules = installed(tmp_path, SCHEMA, TYPESCRIPT)
    types = modules / "@grafana" / "schema" / "dist" / "types" / "raw" / "dashboard" / "x" / "types.gen.d.ts"
    (tmp_path / "schema.ts").write_text(_with_unions(types.read_text()))
    text = dashboard.text()
    said = _errors(tmp_path, modules, right=text, wrong=text.replace('"panels"', '"pannels"', 1))
    assert [line for line in said.splitlines() if not line.startswith(("wrong.ts", " "))] == []
    assert "'\"pannels\"' does not exist in type 'Dashboard'" in said
