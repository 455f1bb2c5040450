"""LimitGate installs beside what people have, in the newest version of that: pip finds versions of all they share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

BESIDE = (
    ("arq",),  # on its own, as others do not allow the redis-py that it needs
    (
        "celery[redis]",
        "rq",
        "saq",
        "limits[redis]",
        "slowapi",
        "Flask-Limiter[redis]",
        "django-redis",
        "openai",
        "anthropic",
        "fastapi",
    ),
)
"""Packages that are asked about together, which is faster than one after the other."""
CERTIFIED = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
"""With the certificates of the machine, which conftest.py takes from all others."""
PATIENT = 120.0
"""Seconds for one question to the registry, of which almost all is spent waiting."""


def resolved(*requirements: str) -> dict[str, str] | None:
    """Versions that pip would install, None if there are none that go together. Skips where pip reaches no registry."""
    ask = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--disable-pip-version-check"]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"  # more than a pipe holds: who ends early would leave the beginning of it
        ask += ["--report", str(report), *requirements]
        try:
            pip = subprocess.run(ask, capture_output=True, text=True, timeout=PATIENT, check=False, env=CERTIFIED)
        except subprocess.TimeoutExpired:
            pytest.skip("the registry does not answer in time")
        if pip.returncode == 0:
            installed = [each["metadata"] for each in json.loads(report.read_text())["install"]]
            return {each["name"].lower(): each["version"] for each in installed}
    if "ResolutionImpossible" in pip.stderr:
        return None
    pytest.skip(f"pip reaches no registry: {pip.stderr.strip()[-200:]}")


def impossible(pinned: Sequence[str]) -> list[str]:
    """Which packages do not go together with LimitGate. If several do not go together, that may be their own affair."""
    if resolved("limitgate", *pinned) is not None:
        return []
    return [name for name in pinned if resolved("limitgate", name) is None] if len(pinned) > 1 else list(pinned)


def test_eleven_of_eleven_install_beside_limitgate() -> None:
    """In their newest versions: else pip may take one so old that it has no upper bounds yet."""
    newest = resolved("--no-deps", "--ignore-installed", *chain(*BESIDE))
    assert newest is not None
    assert len(newest) == 11
    pinned = [[f"{name}=={newest[name.partition('[')[0].lower()]}" for name in names] for names in BESIDE]
    with ThreadPoolExecutor(len(pinned)) as threads:
        assert list(chain(*threads.map(impossible, pinned))) == []
