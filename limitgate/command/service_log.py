"""Log lines that a service would write, while a verb does what a service does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from limitgate.command.output import say
from limitgate.errors import StoreError


class _Lines(logging.Handler):
    """Keeps the messages of log records."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.told.append(record.getMessage())


@contextmanager
def told_at_the_end() -> Iterator[None]:
    """Print warnings of the service when a verb has ended; none where the store has failed: that error says the same."""
    log, lines = logging.getLogger("limitgate"), _Lines()
    log.addHandler(lines)  # so that Python does not print them itself
    try:
        yield
    except StoreError:
        lines.told.clear()
        raise
    finally:
        log.removeHandler(lines)
        for line in lines.told:
            say(line, err=True)
