"""Packages of npm that tests need and nothing ships."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def installed(folder: Path, *packages: str) -> Path:
    """Install packages with their versions; returns node_modules. Skips the test with the reason if npm cannot."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"there is no npm, which installs {', '.join(packages)}")
    command = [npm, "install", "--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
    command += ["--prefix", str(folder), *packages]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=folder)
    if done.returncode:
        pytest.skip(f"npm cannot install {', '.join(packages)}: {done.stderr[-200:]}")
    return folder / "node_modules"
