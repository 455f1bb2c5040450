"""``python -m tests.faults.overload [words of names ...]`` prints what became of each attack, as a Markdown table.

With ``--seconds 3`` attacks are shorter than the eight seconds of the issue. ``--list`` prints names alone.
"""

from __future__ import annotations

import sys

from tests.faults.overload.attack import Setting, long_paths
from tests.faults.overload.outcome import HEAD
from tests.redis_server import RedisServer

if __name__ == "__main__":
    server = RedisServer()
    sys.stdout.write(HEAD)
    sys.stdout.write(long_paths(Setting(*sys.argv[1:3]), server.url).row() + "\n")
    server.stop()
