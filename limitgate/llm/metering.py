"""Reads the usage in a response, for requests charged by tokens. Pure."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

from limitgate.llm.costs import FAILED
from limitgate.llm.estimate import Percentile
from limitgate.llm.usage import Reader, Usage, bounded, reader_for

LEAST_INPUT, LEAST_OUTPUT = 10_000, 1_000
"""Usage is plausible up to a hundred times these, because applications add input."""
MOST_CHUNKS, LONGEST_CHUNK = 128, 1024
"""Maximum of chunks kept before reading, and of bytes in each."""
_log = logging.getLogger("limitgate")


class ResponseMeter:
    """Reads one response, and passes its usage to ``settle``.

    ``expected`` has the estimated tokens. ``answers`` gets the output tokens.
    """

    def __init__(
        self, expected: tuple[int, int], answers: Sequence[Percentile], settle: Callable[[tuple[int, int]], None]
    ) -> None:
        self._expected = expected
        self._answers = answers
        self._settle = settle
        self._reader: Reader | None = None
        self._is_over = False
        self.feed: Callable[[bytes], object] = bool
        """Never raises."""
        self.kept: list[bytes] = []
        """Chunks for the next `read`."""

    def starts(self, status: int | None, content_type: str, content_encoding: str) -> None:
        """Note the start of the response. A failed request costs no tokens."""
        if status is not None and status >= FAILED:
            self._end(Usage(0, 0))
        else:
            self._reader = reader_for(content_type, content_encoding)
            self.feed = self._reader.feed

    def read(self) -> None:
        """Read the chunks that are kept."""
        if self._reader is not None:
            self._reader.feed_all(self.kept)
        self.kept.clear()

    def over(self, status: int | None = None) -> None:
        """Settle once. ``status`` is used if the start of the response wasn't noted."""
        if self._is_over:
            return
        self.read()
        into, out = self._expected
        if self._reader is None:
            # The application may have done the work for a client that left.
            self._end(Usage(0, 0) if status is not None and status >= FAILED else Usage(into, 0))
            return
        reported = self._reader.finish()
        found = self._reader.settle(into)
        usage = bounded(found, max(into, LEAST_INPUT), max(out, LEAST_OUTPUT))
        if usage.is_capped:
            _log.warning(
                "a response reported implausible usage, which was reduced to %d input and %d output tokens",
                usage.input,
                usage.output,
            )
        elif reported is not None:
            for answers in self._answers:
                answers.add(usage.output)
        self._end(usage)

    def _end(self, usage: Usage) -> None:
        self._is_over, self._reader, self.feed = True, None, bool
        self._settle(usage[:2])

    def along(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.feed(chunk)
            yield chunk
        self.over()

    async def aalong(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            self.feed(chunk)
            yield chunk
        self.over()
