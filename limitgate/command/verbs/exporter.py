"""The verb ``exporter``."""

from __future__ import annotations

import signal
import threading
from typing import Any

import click

from limitgate.command.listening import extra_for_verb
from limitgate.command.opened import on_store, store_options
from limitgate.command.output import say
from limitgate.fleet.reader import FleetReader
from limitgate.internal_errors import logged_errors


@click.command("exporter")
@store_options
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", default=9381, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on.")
def verb(*, host: str, port: int, **options: Any) -> None:
    """Serve the figures of all processes to Prometheus at /metrics, from the snapshots in the store.

    Counters are sums over all processes, including ended ones. The exporter keeps these totals in the store, so they never
    fall.

    For example: limitgate exporter --store redis://localhost --host 0.0.0.0
    """
    with extra_for_verb("prometheus", "prometheus_client"):
        from prometheus_client import CollectorRegistry, start_http_server

        from limitgate.fleet.exporter import EVERY, FleetCollector
    with on_store(options) as opened:
        reader = FleetReader(opened.store, opened.key_prefix, timeout=opened.timeout)
        collector = FleetCollector(reader, opened.store, opened.key_prefix, timeout=opened.timeout)
        collector.look()
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise click.UsageError(f"cannot listen on {host}:{port}: {error.strerror}, expected a free port") from error
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        say(f"http://{host}:{server.server_port}/metrics has the figures of {opened.key_prefix}")
        try:
            while not ended.wait(EVERY):
                with logged_errors():
                    collector.look()
        finally:
            server.shutdown()
            thread.join()
            collector.save()
