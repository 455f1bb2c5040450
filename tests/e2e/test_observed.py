"""Metrics of several workers add up to the request, also where one of them is killed."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.doors import PATIENCE, server_process, until, uvicorn_process

WORKERS = 4
Serve = Callable[[Path], contextlib.AbstractContextManager[str]]


@contextlib.contextmanager
def uvicorn(folder: Path) -> Iterator[str]:
    with uvicorn_process("tests.e2e.observed:app", folder, workers=WORKERS, PROMETHEUS_MULTIPROC_DIR=shared(folder)) as url:
        yield url


@contextlib.contextmanager
def gunicorn(folder: Path) -> Iterator[str]:
    conf = folder / "gunicorn.conf.py"
    conf.write_text("from limitgate.prometheus import child_exit\n")
    command = [sys.executable, "-m", "gunicorn", "tests.e2e.observed:application", "-w", str(WORKERS), "-c", str(conf)]
    log, environment = folder / "gunicorn.log", {"PROMETHEUS_MULTIPROC_DIR": shared(folder)}

    def ready(text: str) -> bool:
        return text.count("Booting worker") == WORKERS

    with server_process([*command, "-b", "127.0.0.1:0"], log, ready, environment) as url:
        yield url


def shared(folder: Path) -> str:
    """The folder that workers share."""
    (folder / "figures").mkdir()
    return str(folder / "figures")


def get(url: str, path: str) -> tuple[int, str]:
    """Status and body of a request on a connection of its own, so that any worker may answer it."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def figures(url: str) -> dict[tuple[str, ...], float]:
    """All samples of /metrics, by name and labels."""
    text = get(url, "/metrics")[1]
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {(one.name, *(f"{name}={value}" for name, value in sorted(one.labels.items()))): one.value for one in samples}


def send(url: str, requests: int) -> Counter[int]:
    """The statuses of requests, some at a time."""

    def ask(_: int) -> int:
        return get(url, "/api")[0]

    with ThreadPoolExecutor(8) as threads:
        return Counter(threads.map(ask, range(requests)))


def counted(now: dict[tuple[str, ...], float]) -> dict[int, float]:
    """Admitted and refused requests by the figures."""
    total, rule = "limitgate_requests_total", "limitgate_rule_decisions_total"
    found = {
        200: now.get((total, "decided_by=store", "outcome=admitted"), 0),
        429: now.get((total, "decided_by=store", "outcome=refused"), 0),
    }
    assert found[200] == now.get((rule, "outcome=admitted", "rule=api", "tier=default"), 0)
    assert found[429] == now.get((rule, "outcome=refused", "rule=api", "tier=default"), 0)
    return found


@pytest.mark.parametrize("serve", [uvicorn, gunicorn], ids=["uvicorn", "gunicorn"])
def test_the_figures_of_workers_add_up(serve: Serve, tmp_path: Path) -> None:
    """What a load generator counted and what /metrics says is equal, to the request, after a worker was killed, too."""
    with serve(tmp_path) as url:
        sent = send(url, 150)
        assert set(sent) == {200, 429}
        until(lambda: adds_up(url, sent))
        before = figures(url)
        killed = int(get(url, "/pid")[1])
        revisions = [place for place in before if place[0] == "limitgate_config_revision"]
        assert len({before[place] for place in revisions}) == 1
        assert ("limitgate_config_revision", f"pid={killed}") in revisions
        os.kill(killed, signal.SIGKILL)
        until(lambda: ("limitgate_config_revision", f"pid={killed}") not in tried(url))
        assert counted(figures(url)) == {200: sent[200], 429: sent[429]}
        sent += send(url, 150)
        until(lambda: adds_up(url, sent))
        last = figures(url)
    assert last["limitgate_store_up", "store=memory"] == 1
    assert last["limitgate_rule_limit", "rule=api", "tier=default", "window=day"] == 20
    assert last["limitgate_rule_utilization_count", "rule=api", "tier=default"] == 300


def adds_up(url: str, sent: Counter[int]) -> bool:
    """True if all that was sent is counted; never more is."""
    now = tried(url)
    if not now:
        return False
    found = counted(now) if is_whole(now) else {200: 0.0, 429: 0.0}
    assert found[200] <= sent[200]
    assert found[429] <= sent[429]
    return found == {200: sent[200], 429: sent[429]}


def is_whole(now: dict[tuple[str, ...], float]) -> bool:
    """True if no worker was just handing over: requests and rules agree."""
    total = sum(value for place, value in now.items() if place[0] == "limitgate_rule_decisions_total")
    return total == sum(
        value for place, value in now.items() if place[0] == "limitgate_requests_total" and "decided_by=store" in place
    )


def tried(url: str) -> dict[tuple[str, ...], float]:
    """The figures, nothing while the worker that is asked is the one that has just been killed."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return figures(url)
    return {}
