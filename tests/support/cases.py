"""Tables of cases in one test: a pytest item for each row would take longer than its assertions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*what: object) -> Iterator[None]:
    """Within it, an error names the case."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {what}")
        raise
