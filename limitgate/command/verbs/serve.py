"""The verb ``serve``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import click
from click.core import ParameterSource

from limitgate.command.listening import clear_socket, extra_for_verb, listen
from limitgate.command.output import logs_from, say
from limitgate.command.stored import settings_of, store_of
from limitgate.forward.gate import ForwardGate
from limitgate.forward.served import GRPC
from limitgate.rules.settings import PREFIX, GateSettings

KEEP_ALIVE_S = 3700
"""Seconds; longer than Envoy's hour, so that proxies close idle connections first."""
GRACE_S = 10
"""Seconds for subrequests in flight after SIGTERM."""
_HERE = ("127.0.0.1", "::1")
_NO_PROXY = (
    "limitgate: warning: no trusted proxy, so no proxy can describe requests, and rules match the paths of subrequests, "
    "such as /nginx; expected --trusted-proxy PEER"
)
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


@click.command("serve")
@click.option("--rules", metavar="PATH", help="The rules: a file or a folder.  [env var: LIMITGATE_RULES]")
@click.option("--store", metavar="URL", help="Store of the limits.  [env var: LIMITGATE_STORE]")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", show_default=True, help="Address of --port and --grpc.")
@click.option("--port", default=9382, type=click.IntRange(0, 65535), show_default=True, help="Port to listen on.")
@click.option("--uds", metavar="PATH", help="Unix socket to listen on, instead of --port.")
@click.option("--grpc", type=click.IntRange(1, 65535), metavar="PORT", help="Port of Envoy's rate limit service (extra envoy).")
@click.option(
    "--trusted-proxy",
    multiple=True,
    metavar="ADDRESS",
    help="Trusted proxy: address, CIDR, list or unix. Default: unix with --uds; 127.0.0.1 and ::1 for --port and --grpc, if "
    "--host is one of them.  [env var: LIMITGATE_TRUSTED_PROXIES]",
)
@click.option("--reload", metavar="SECONDS", help="Polling interval of rule files.  [env var: LIMITGATE_RELOAD]")
@click.option("--workers", default=1, type=click.IntRange(1, 256), show_default=True, help="Number of processes.")
def verb(  # noqa: PLR0917 - click passes them by name
    rules: str | None,
    store: str | None,
    host: str,
    port: int,
    uds: str | None,
    grpc: int | None,
    trusted_proxy: tuple[str, ...],
    reload: str | None,
    workers: int,
) -> None:
    """Serve the rules to nginx, Caddy, Traefik, Envoy or HAProxy, which ask before they pass a request on.

    docs/proxies.md has a configuration for each. Other options come from LIMITGATE_*. /healthz answers without the store.
    /metrics is for Prometheus, if prometheus-client is installed. SIGTERM finishes the requests in flight.

    For example: limitgate serve --rules config/ --store redis://localhost:6379/0 --uds /run/limitgate/gate.sock
    """
    with extra_for_verb("serve", "uvicorn"):
        import uvicorn
        from uvicorn.config import LOGGING_CONFIG

        if grpc is not None:
            from limitgate.forward import rate_limit_service  # noqa: F401 - an extra
    given = {"rules": rules, "store": store, "reload": reload, "trusted_proxies": ",".join(trusted_proxy) or None}
    _check_options({**given, "rules": None})
    _check_places(host, port, uds, grpc)
    os.environ.update({f"{PREFIX}{name}".upper(): value for name, value in given.items() if value is not None})
    settings, trusted = GateSettings(), ""
    if not settings.trusted_proxies:
        trusted = os.environ[f"{PREFIX}TRUSTED_PROXIES"] = _trusted(host, uds, grpc)
    if not settings.observers and find_spec("prometheus_client") is not None:
        os.environ[f"{PREFIX}OBSERVERS"] = "prometheus"
    if grpc is not None:
        os.environ[GRPC] = f"[{host}]:{grpc}" if ":" in host else f"{host}:{grpc}"
    _check()
    if not (settings.trusted_proxies or trusted):
        say(_NO_PROXY, err=True)
    where: dict[str, Any] = {"uds": uds} if uds else {"host": host, "port": port}
    with _multiprocess_metrics(workers), _lines_at_once():
        uvicorn.run(
            "limitgate.forward.served:application",
            factory=True,
            workers=workers,
            ws="none",
            lifespan="on",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            log_config={
                **LOGGING_CONFIG,
                "loggers": {
                    **LOGGING_CONFIG["loggers"],
                    "limitgate": {"handlers": ["default"], "level": "INFO", "propagate": False},
                },
            },
            **where,
        )


def _check_options(given: dict[str, Any]) -> None:
    if opened := store_of(settings_of(given).store):
        opened.close()


def _check_places(host: str, port: int, uds: str | None, grpc: int | None) -> None:
    # The server would exit with `NO_STORE`.
    if uds:
        unused = [f"--{name}" for name in (("port",) if grpc else ("port", "host")) if _is_given(name)]
        if unused:
            raise click.UsageError(f"expected either --uds or {unused[0]}, not both")
        clear_socket(uds)
    for each in [*([] if uds else [port]), *([] if grpc is None else [grpc])]:
        listen(host, each).close()


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _trusted(host: str, uds: str | None, grpc: int | None) -> str:
    """Return the trusted peers. Only this machine reaches a unix socket or a loopback address."""
    opens_port = not uds or grpc is not None
    here = _HERE if opens_port and host in (*_HERE, "localhost") else ()
    return ",".join([*(["unix"] if uds else []), *here])


def _check() -> None:
    """Report errors before workers start, because a failed worker is restarted."""
    with logs_from(logging.CRITICAL):
        if not GateSettings().rules:
            raise click.UsageError("no rules are given, expected --rules PATH, or the variable LIMITGATE_RULES")
        ForwardGate(reload=0, observers=())


@contextmanager
def _multiprocess_metrics(workers: int) -> Iterator[None]:
    """Have workers keep metrics in files, so that each worker can serve the sums."""
    is_needed = workers > 1 and not os.environ.get(_MULTIPROCESS)
    with TemporaryDirectory(prefix="limitgate-") if is_needed else nullcontext() as folder:
        if folder is not None:
            os.environ[_MULTIPROCESS] = folder
        yield


@contextmanager
def _lines_at_once() -> Iterator[None]:
    log = logging.getLogger("limitgate")
    kept, log.handlers[:] = log.handlers[:], []
    try:
        yield
    finally:
        log.handlers[:] = kept
