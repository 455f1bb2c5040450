"""What deploy/ holds: the dashboard as the code makes it, alerts that fire when they should, files that fit together."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from handbook import dashboard
from limitgate.messages.diagnostics import Diagnosis
from limitgate.observing.instruments import INSTRUMENTS, Instrument
from tests.support.doors import PATIENCE, PROCESS_PATIENCE, until, uvicorn_process
from tests.support.markdown import ROOT, rows

DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
TESTS = DEPLOY / "prometheus" / "alerts.test.yml"
OF_THE_EXPORTER = set(re.findall(r'"(limitgate_fleet_\w+)"', (ROOT / "limitgate/fleet/exporter.py").read_text()))
"""Figures about the exporter itself. They have no labels."""
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: `make promtool` installs Debian's")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def alerts() -> list[dict[str, Any]]:
    return [alert for group in read(ALERTS)["groups"] for alert in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """The panels that show something; rows show nothing."""
    return [panel for panel in json.loads(dashboard.FILE.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def run(*arguments: str | Path) -> None:
    """Run promtool, which has to find nothing wrong."""
    done = subprocess.run(["promtool", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_as_the_code_has_it() -> None:
    """deploy/grafana/dashboards/limitgate.json is what ``make docs`` writes."""
    assert dashboard.FILE.read_text() == dashboard.text()


def test_every_figure_has_its_panel() -> None:
    """One that is added to the table is shown without more ado."""
    shown = {panel["description"]: " ".join([target["expr"] for target in panel["targets"]]) for panel in panels()}
    for instrument in INSTRUMENTS:
        assert re.search(rf"\b{instrument.prometheus_name}(_bucket)?\{{", shown[instrument.meaning]), instrument.name
        assert all(re.search(rf"\b{label}\b", shown[instrument.meaning]) for label in instrument.labels)


@pytest.mark.parametrize(
    ("instrument", "expression", "unit"),
    [
        (
            Instrument("limitgate.shed", "counter", "{request}", "New.", ("rule", "tier")),
            'sum by (rule, tier) (rate(limitgate_shed_total{job=~"$job", rule=~"$rule", tier=~"$tier"}[$__rate_interval]))',
            "reqps",
        ),
        (
            Instrument("limitgate.rule.limit", "gauge", "{request}", "New.", ("rule",), joined="max"),
            'max by (rule) (limitgate_rule_limit{job=~"$job", rule=~"$rule"})',
            "short",
        ),
        (
            Instrument("limitgate.lag", "gauge", "s", "New.", joined="max"),
            'max (limitgate_lag_seconds{job=~"$job"})',
            "s",
        ),
        (
            Instrument("limitgate.revision", "gauge", "1", "New.", joined="each"),
            'count(count_values("value", limitgate_revision{job=~"$job"}))',
            "short",
        ),
        (
            Instrument("limitgate.wait", "histogram", "s", "New.", bounds=(1.0,)),
            'histogram_quantile(0.5, sum by (le) (rate(limitgate_wait_seconds_bucket{job=~"$job"}[$__rate_interval])))',
            "s",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Instrument) else None,
)
def test_panels_follow_from_the_table(instrument: Instrument, expression: str, unit: str) -> None:
    """By kind, labels, unit, and how several processes make one."""
    panel = dashboard.panel(instrument)
    assert (panel.queries[0].expression, panel.unit) == (expression, unit)


def test_panels_lie_beside_one_another() -> None:
    """Each has a number of its own and its own place in the grid of 24 columns."""
    drawn = json.loads(dashboard.FILE.read_text())["panels"]
    assert len({panel["id"] for panel in drawn}) == len(drawn)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in drawn):
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not taken & cells
        assert all(x < 24 for x, _ in cells)
        taken |= cells


def test_alerts_and_panels_ask_for_figures_that_are_there() -> None:
    """By name, and for no other labels and values than the table has."""
    named = {each.prometheus_name: each for each in INSTRUMENTS}
    for expression in [*expressions(), *[alert["expr"] for alert in alerts()]]:
        selectors = re.findall(r"\b(limitgate_\w+?)(?:_bucket)?(?:\{(.*?)\}|(?=[\[)\s]))", expression)
        assert selectors, expression
        for name, chosen in selectors:
            if name in OF_THE_EXPORTER:
                assert not chosen, expression
                continue
            instrument = named[name]
            for label, operator, value in re.findall(r'(\w+)(=~?)"(.*?)"', chosen):
                assert label in {*instrument.labels, "job"}, expression
                known = instrument.values.get(label)
                pattern = value if operator == "=~" else re.escape(value)
                assert value.startswith("$") or known is None or any(re.fullmatch(pattern, each) for each in known), expression


def test_every_alert_is_tested_and_explained() -> None:
    """Each fires in a test and is quiet in another one; docs/operating.md says what to do about each."""
    cases = [case for test in read(TESTS)["tests"] for case in test["alert_rule_test"]]
    fire = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    names = {alert["alert"] for alert in alerts()}
    assert fire == quiet == names
    assert {row[0].strip("`") for row in rows("docs/operating.md", "alert")} == names
    assert all(alert["labels"]["severity"] in {"page", "ticket"} for alert in alerts())


@promtool
def test_alerts_fire_when_they_should() -> None:
    """By promtool: the rules, their unit tests, and the configuration that names them."""
    run("check", "rules", ALERTS)
    run("test", "rules", TESTS)
    run("check", "config", DEPLOY / "prometheus" / "prometheus.yml")


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus: `make promtool` installs Debian's")
def test_prometheus_scrapes_the_example_and_every_alert_has_figures(tmp_path: Path) -> None:
    """A real one, with the configuration of deploy/ but for the address, beside several workers of the example."""
    shared = tmp_path / "figures"
    shared.mkdir()
    environment = {
        "PROMETHEUS_MULTIPROC_DIR": str(shared),
        "LIMITGATE_STORE": "memory://",
        "LIMITGATE_RULES": str(ROOT / "config"),
    }
    with uvicorn_process("example_app.observed:app", tmp_path, workers=2, **environment) as url:
        config = read(DEPLOY / "prometheus" / "prometheus.yml")
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(ALERTS)]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [urlsplit(url).netloc]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        with prometheus(tmp_path) as asked:
            assert httpx.get(f"{url}/api/hello", timeout=PROCESS_PATIENCE).status_code == 200
            until(lambda: bool(asked('limitgate_requests_total{outcome="admitted", job="app"} > 0')), PROCESS_PATIENCE)
            until(lambda: bool(asked("rate(limitgate_rule_decisions_total[5m])")), PROCESS_PATIENCE)  # two scrapes
            for alert in alerts():
                figures = re.sub(r"\s*(==|>)\s*[\d.]+\s*$", "", alert["expr"].strip())
                # An adaptive rule, calls to Redis, the exporter.
                needs_more = alert["alert"] in {"LimitGateSheds", "LimitGateStoreSlow", "LimitGateExporterStoreDown"}
                assert asked(figures) or needs_more, alert["alert"]


@contextmanager
def prometheus(folder: Path) -> Iterator[Callable[[str], list[Any]]]:
    """A server with ``prometheus.yml`` of a folder. Gives what a query finds; nothing until it can be asked."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]

    def asked(query: str) -> list[Any]:
        try:
            answer = httpx.get(f"http://{address}/api/v1/query", params={"query": query}, timeout=PATIENCE)
        except httpx.TransportError:
            return []
        found: list[Any] = answer.json()["data"]["result"] if answer.status_code == 200 else []
        return found

    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            yield asked
        finally:
            process.terminate()
            process.wait()


@promtool
def test_every_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    """Promtool reads it, with a period and a choice in the place of Grafana's variables."""
    written = [re.sub(r"\$\w+", ".*", each.replace("$__rate_interval", "5m")) for each in expressions()]
    recorded = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(written)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    run("check", "rules", file)


COMPOSE = read(DEPLOY / "compose.yaml")
SERVICES = COMPOSE["services"]


def ports() -> dict[str, int]:
    """The port that each service listens on."""
    return {name: int(service["ports"][0].rpartition(":")[2]) for name, service in SERVICES.items() if "ports" in service}


def mounts(service: str) -> dict[str, Path]:
    """What a service finds at each of its folders."""
    parts = [volume.split(":") for volume in SERVICES[service]["volumes"]]
    return {inside: (DEPLOY / outside).resolve() for outside, inside, _ in parts}


def test_services_are_what_they_should_be() -> None:
    """Images of a fixed version, ports for this machine only, files that are there and cannot be written."""
    assert set(SERVICES) == {"app", "redis", "prometheus", "grafana"}
    for name, service in SERVICES.items():
        assert "build" in service or re.search(r":v?\d+\.\d+", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert all(volume.endswith(":ro") for volume in service.get("volumes", ())), name
        assert set(service.get("depends_on", ())) <= set(SERVICES), name
        assert "volumes" not in service or all(path.is_dir() for path in mounts(name).values()), name


def test_services_find_one_another() -> None:
    """The application Redis, Prometheus the application and its alerts, Grafana Prometheus and its dashboard."""
    assert urlsplit(SERVICES["app"]["environment"]["LIMITGATE_STORE"]).netloc == "redis:6379"
    prometheus = mounts("prometheus")["/etc/prometheus"]
    config = read(prometheus / "prometheus.yml")
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == [f"app:{ports()['app']}"]
    assert [prometheus / name for name in config["rule_files"]] == [ALERTS]
    provisioning = mounts("grafana")["/etc/grafana/provisioning"]
    source = read(provisioning / "datasources" / "prometheus.yml")["datasources"][0]
    assert urlsplit(source["url"]).netloc == f"prometheus:{ports()['prometheus']}"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    provider = read(provisioning / "dashboards" / "limitgate.yml")["providers"][0]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (mounts("grafana")[provider["options"]["path"]] / Path(home).name) == dashboard.FILE
    assert Path(home).parent == Path(provider["options"]["path"])


def test_the_image_of_the_application_has_what_it_starts() -> None:
    """Files that are copied are there, the server starts the observed example, and workers share a folder that begins empty."""
    app = SERVICES["app"]
    context = (DEPLOY / app["build"]["context"]).resolve()
    lines = (context / app["build"]["dockerfile"]).read_text().splitlines()
    copied = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    assert all((context / source).exists() for sources in copied for source in sources[:-1])
    command = json.loads(lines[-1].removeprefix("CMD "))
    module, _, name = command[1].partition(":")
    assert hasattr(import_module(module), name)
    assert command[command.index("--port") + 1] == str(ports()["app"])
    assert [each.partition(":")[0] for each in app["tmpfs"]] == [app["environment"]["PROMETHEUS_MULTIPROC_DIR"]]
    assert mounts("app") == {"/srv/config": ROOT / "config"}


async def metrics() -> str:
    """What the observed example answers where Prometheus asks."""
    path = read(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"][0]["metrics_path"]
    transport = httpx.ASGITransport(import_module("example_app.observed").create_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        assert (await client.get("/api/hello")).status_code == 200
        response = await client.get(path)
    assert response.status_code == 200
    return response.text


def test_the_example_serves_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of every rule of config/, at the path that prometheus.yml names."""
    monkeypatch.setenv("LIMITGATE_STORE", "memory://")
    text = asyncio.run(metrics())
    for rule, tier in (("api", "default"), ("api", "vip"), ("login", "default")):
        assert f'limitgate_rule_decisions_total{{outcome="refused",rule="{rule}",tier="{tier}"}}' in text
    assert len([line for line in text.splitlines() if line.startswith("limitgate_diagnostics_total")]) == len(Diagnosis)
