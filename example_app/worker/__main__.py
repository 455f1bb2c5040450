"""``python -m example_app.worker fill --jobs 3000``, then ``python -m example_app.worker run --rate 100/second``."""

from __future__ import annotations

import argparse
import asyncio
import pkgutil

from example_app.worker.crew import lead
from example_app.worker.jobs import connect, fill
from example_app.worker.process import Options
from limitgate import AsyncLimiter, ConfigError, Limit


def _at_least_one(text: str) -> int:
    """A number of processes."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def _rate(text: str) -> Limit:
    """A limit that jobs can be paced by."""
    try:
        limit = Limit(text)
        AsyncLimiter("memory://").pace((), limit)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return limit


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_app.worker", description="Drain a Redis Stream at a fixed rate.")
    commands = parser.add_subparsers(dest="command", required=True)
    filling = commands.add_parser("fill", help="add jobs to the stream")
    filling.add_argument("--jobs", type=int, default=3000)
    running = commands.add_parser("run", help="work on the jobs of the stream")
    running.add_argument("--rate", type=_rate, default=Limit("100/second"), help="of all processes together")
    running.add_argument("--processes", type=_at_least_one, default=4)
    running.add_argument("--group", default="workers", help="the consumer group")
    running.add_argument("--idle", type=float, default=60, help="seconds after which a job of a dead worker is claimed")
    running.add_argument("--handler", default="example_app.worker.process:nothing", help="async function of a job's fields")
    running.add_argument("--seconds", type=float, help="how long to run; for ever if not given")
    running.add_argument("--until-empty", action="store_true", help="end when every job is done")
    for command in (filling, running):
        command.add_argument("--store", default="redis://localhost:6379/0", help="URL of a Redis")
        command.add_argument("--stream", default="jobs")
    return parser.parse_args()


async def _main(arguments: argparse.Namespace) -> None:
    if arguments.command == "fill":
        async with connect(arguments.store) as redis:
            await fill(redis, arguments.stream, arguments.jobs)
    else:
        pkgutil.resolve_name(arguments.handler)  # so that a mistake shows here, not in every process
        options = Options(*[getattr(arguments, name) for name in Options._fields])
        await lead(options, arguments.processes, seconds=arguments.seconds, until_empty=arguments.until_empty)


if __name__ == "__main__":
    asyncio.run(_main(_arguments()))
