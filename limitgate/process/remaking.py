"""Copies and pickles of objects with connections, locks and threads: creates a new object from the same arguments."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

IN_MEMORY = "what it has counted is in the memory of this process, expected the URL of a store on Redis"


class Remade:
    """Base of objects that are pickled and copied by their constructor arguments.

    Raises a `TypeError` that names an argument that can't be pickled, or state that the copy would lack.
    """

    _made_of: tuple[Sequence[Any], Mapping[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the arguments."""
        made = super().__new__(cls)
        made._made_of = args, kwargs
        return made

    @property
    def state_here(self) -> str:
        """State that a copy would lack, with a remedy; empty if none."""
        return ""

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_state("pickled")
        args, kwargs = self._made_of
        for place, value in enumerate(args, 1):
            self._check_argument(f"argument {place}", value)
        for name, value in kwargs.items():
            self._check_argument(name, value)
        return _made, (type(self), args, kwargs)

    def __copy__(self) -> Self:
        self._check_state("copied")
        args, kwargs = self._made_of
        return type(self)(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> Self:
        return self.__copy__()

    def _check_state(self, done: str) -> None:
        if self.state_here:
            raise TypeError(f"a {type(self).__qualname__} cannot be {done}: {self.state_here}")

    def _check_argument(self, name: str, value: object) -> None:
        if isinstance(value, Remade):
            value.__reduce__()
            return
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - classes raise various errors
            refused = getattr(value, "__qualname__", None) or f"an object of {type(value).__qualname__}"
        else:
            return
        cure = "a function of a module" if callable(value) else "one that can"
        raise TypeError(f"a {type(self).__qualname__} cannot be pickled, because its {name} cannot: {refused}, expected {cure}")


class Unpicklable:
    """Base of objects that belong to one process."""

    made_by: str
    """Call that makes another one."""

    def __reduce__(self) -> NoReturn:
        raise unpicklable(self.made_by)


def unpicklable(made_by: str) -> TypeError:
    """Return the error for a pickle, or a copy, of an object that belongs to this process."""
    return TypeError(
        f"{made_by} cannot be pickled: its state is in the memory of this process, expected the call in each process"
    )


def _made(kind: type[Remade], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Remade:
    return kind(*args, **kwargs)
