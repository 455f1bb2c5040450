"""Log lines that a service would write, while a verb does what a service does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from limitgate.command.output import say
from limitgate.errors import StoreError


class _Lines(logging.Handler):
    """Keeps log lines, each with the reason that it ends with."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        reason = record.args[-1] if isinstance(record.args, tuple) and record.args else record.msg
        self.told.append((record.getMessage(), str(reason)))

    def drop(self, known: str) -> None:
        """Drop lines whose reason is known from a text."""
        self.told = [each for each in self.told if each[1] not in known]


@contextmanager
def told_at_the_end() -> Iterator[None]:
    """Print warnings of the service when a verb has ended, but for those that say no more than the store's own failure."""
    log, lines = logging.getLogger("limitgate"), _Lines()
    log.addHandler(lines)  # so that Python does not print them itself
    try:
        yield
    except StoreError as error:
        lines.drop(str(error))
        raise
    finally:
        log.removeHandler(lines)
        for line, _ in lines.told:
            say(line, err=True)
