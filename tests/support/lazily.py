"""Packages that take long to import, for modules whose few tests need them: each process of the suite imports all modules."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazily:
    """A module that is imported when a test first uses a name of it."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for fixtures and mocks in everything that a module of tests has
            raise AttributeError(name)
        return getattr(import_module(self._module), name)
