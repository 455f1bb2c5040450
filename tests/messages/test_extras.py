"""A module whose package is not installed says which extra brings it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from limitgate.messages.text import extra

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODULES = [
    ("limitgate.fastapi", "fastapi", "fastapi"),
    ("limitgate.flask", "flask", "flask"),
    ("limitgate.django", "django", "django"),
    ("limitgate.django.rest", "rest_framework", "rest"),
    ("limitgate.httpx", "httpx", "httpx"),
    ("limitgate.httpx", "http_sf", "httpx"),
    ("limitgate.httpx2", "httpx2", "httpx2"),
    ("limitgate.httpx2", "http_sf", "httpx2"),
    ("limitgate.aiohttp", "aiohttp", "aiohttp"),
    ("limitgate.aiohttp", "http_sf", "aiohttp"),
    ("limitgate.requests", "requests", "requests"),
    ("limitgate.requests", "http_sf", "requests"),
    ("limitgate.urllib3", "urllib3", "urllib3"),
    ("limitgate.urllib3", "http_sf", "urllib3"),
    ("limitgate.prometheus", "prometheus_client", "prometheus"),
    ("limitgate.opentelemetry", "opentelemetry", "opentelemetry"),
    ("limitgate.forward.rate_limit_service", "grpc", "envoy"),
]
WITHOUT = """
import importlib, json, os, sys
import limitgate

class Missing:
    def __init__(self, packages):
        self.packages = packages
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for packages, module in json.load(sys.stdin):
    assert sys.modules.keys().isdisjoint([module, *packages])
    if not os.fork():
        sys.meta_path.insert(0, Missing(packages))
        try:
            importlib.import_module(module)
            print("imported", flush=True)
        except ModuleNotFoundError as error:
            print(error, error.name, sep="\t", flush=True)
        os._exit(0)
    os.wait()
"""


def told_without(cases: list[tuple[list[str], str]]) -> list[str]:
    """For packages and a module: the error of its import without these packages, and the name of the one that is missing.

    A process that has imported what all modules need is forked for each.
    """
    asked = json.dumps(cases)
    return subprocess.check_output([sys.executable, "-c", WITHOUT], input=asked, text=True).splitlines()


def expected(package: str, brought_by: str) -> str:
    return f"{package} is not installed, expected: pip install 'limitgate[{brought_by}]'"


def test_import_without_a_package_names_its_extra() -> None:
    """The error says what to install, and is the one that the import would have raised."""
    for (module, package, brought_by), line in zip(
        MODULES, told_without([([package], module) for module, package, _ in MODULES]), strict=True
    ):
        message, name = line.split("\t")
        assert (message, name.partition(".")[0]) == (expected(package, brought_by), package), module
        assert brought_by in EXTRAS


def test_import_without_several_packages_names_the_known_one() -> None:
    """The framework or client that the module is for, in whatever order they are imported."""
    modules = [
        ("limitgate.flask", ["flask", "click", "werkzeug"], "flask"),
        ("limitgate.fastapi", ["fastapi", "starlette"], "fastapi"),
        ("limitgate.django", ["django", "asgiref"], "django"),
        ("limitgate.django.rest", ["rest_framework"], "rest"),
        ("limitgate.httpx", ["httpx", "http_sf"], "httpx"),
        ("limitgate.httpx2", ["httpx2", "http_sf"], "httpx2"),
        ("limitgate.aiohttp", ["aiohttp", "http_sf"], "aiohttp"),
        ("limitgate.requests", ["requests", "urllib3", "http_sf"], "requests"),
        ("limitgate.urllib3", ["urllib3", "http_sf"], "urllib3"),
    ]
    named = [f"{expected(packages[0], brought_by)}\t{packages[0]}" for _, packages, brought_by in modules]
    assert told_without([(packages, module) for module, packages, _ in modules]) == named


def test_extra_missing_package_of_another_is_left_alone() -> None:
    """A module that a package of an extra lacks itself is told as Python does."""
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'nothing'$"), extra("flask", "flask"):
        raise ModuleNotFoundError("No module named 'nothing'", name="nothing")
