"""An extra and a free place to listen, for verbs that serve."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from limitgate.messages.text import extra


@contextmanager
def extra_for_verb(name: str, *packages: str) -> Iterator[None]:
    """`extra` with a `click.UsageError`."""
    try:
        with extra(name, *packages):
            yield
    except ModuleNotFoundError as error:
        raise click.UsageError(str(error)) from error


def listen(host: str, port: int) -> socket.socket:
    """Raises `click.UsageError`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[4][:2], family=found[0])
    except OSError as error:
        raise click.UsageError(f"cannot listen on {host}:{port}: {error.strerror}, expected a free port") from error


def clear_socket(path: str) -> None:
    """Remove the unix socket of an ended process. Raises `click.UsageError`."""
    place = Path(path)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            if place.is_socket():
                with suppress(ConnectionRefusedError):
                    probe.connect(path)
                    raise click.UsageError(f"cannot listen on {path}: a process listens there, expected a free path")
            else:
                probe.bind(path)
            place.unlink()
        except OSError as error:
            why = error.strerror or error
            raise click.UsageError(f"cannot listen on {path}: {why}, expected a short path in a folder that exists") from error
