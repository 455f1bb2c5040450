"""A module whose package is not installed says which extra brings it."""

from __future__ import annotations

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
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
try:
    import {module}
except ModuleNotFoundError as error:
    print(error, error.name, sep="\\n")
"""


def told_without(packages: list[str], module: str) -> list[str]:
    """The error of an import without these packages, and the name of the one that is missing."""
    program = WITHOUT.format(packages=packages, module=module)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


@pytest.mark.parametrize(("module", "package", "brought_by"), MODULES)
def test_a_missing_extra_is_named(module: str, package: str, brought_by: str) -> None:
    """The error says what to install, and is the one that the import would have raised."""
    message, name = told_without([package], module)
    assert message == f"{package} is not installed, expected: pip install 'limitgate[{brought_by}]'"
    assert name.partition(".")[0] == package
    assert brought_by in EXTRAS


@pytest.mark.parametrize(
    ("module", "packages", "brought_by"),
    [
        ("limitgate.flask", ["flask", "click", "werkzeug"], "flask"),
        ("limitgate.fastapi", ["fastapi", "starlette"], "fastapi"),
        ("limitgate.django", ["django", "asgiref"], "django"),
        ("limitgate.django.rest", ["rest_framework"], "rest"),
        ("limitgate.httpx", ["httpx", "http_sf"], "httpx"),
        ("limitgate.httpx2", ["httpx2", "http_sf"], "httpx2"),
        ("limitgate.aiohttp", ["aiohttp", "http_sf"], "aiohttp"),
        ("limitgate.requests", ["requests", "urllib3", "http_sf"], "requests"),
        ("limitgate.urllib3", ["urllib3", "http_sf"], "urllib3"),
    ],
)
def test_of_several_the_one_that_people_know_is_named(module: str, packages: list[str], brought_by: str) -> None:
    """The framework or client that the module is for, in whatever order they are imported."""
    expected = f"{packages[0]} is not installed, expected: pip install 'limitgate[{brought_by}]'"
    assert told_without(packages, module) == [expected, packages[0]]


def test_what_is_missing_elsewhere_is_left_alone() -> None:
    """A module that a package of an extra lacks itself is told as Python does."""
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'nothing'$"), extra("flask", "flask"):
        raise ModuleNotFoundError("No module named 'nothing'", name="nothing")
