"""The configurations in deploy/: complete, and as docs/proxies.md has them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from limitgate.command.verbs.serve import verb
from limitgate.forward.dialects import DIALECTS
from tests.support.markdown import ROOT, text_of
from tests.support.proxies import DEPLOY, FILES, RATE_LIMIT

PAGE = text_of("docs/proxies.md")
SHIPPED = [*FILES.values(), RATE_LIMIT, "limitgate.lua", "httproute.yaml"]


@pytest.mark.parametrize("file", SHIPPED)
def test_the_page_names_each_file(file: str) -> None:
    assert f"[{file}](../deploy/{file})" in PAGE


@pytest.mark.parametrize("file", [each for each in SHIPPED if each != "httproute.yaml"])
def test_each_file_says_what_happens_without_an_answer(file: str) -> None:
    """And how to close, where the proxy can do both."""
    head = (DEPLOY / ("haproxy.cfg" if file == "limitgate.lua" else file)).read_text()[:800]
    assert re.search(
        r"Without an answer within 250 ms the request (passes\. To refuse|gets)|Without an answer the request gets", head
    )


def milliseconds(file: str, *options: str) -> list[int]:
    """The times that a configuration has for these options."""
    times = [re.findall(rf"\b{option}:? (?:= )?([\d.]+)(ms|s|)\b", (DEPLOY / file).read_text()) for option in options]
    assert [len(found) for found in times] == [1] * len(options), (file, options)
    return [round(float(number) * (1000 if unit == "s" else 1)) for ((number, unit),) in times]


def test_a_request_waits_for_at_most_250_ms() -> None:
    """To connect, and for an answer. Traefik has no such options."""
    assert sum(milliseconds("nginx.conf", "proxy_connect_timeout", "proxy_read_timeout")) == 250
    assert sum(milliseconds("Caddyfile", "dial_timeout", "response_header_timeout")) == 250
    assert milliseconds("limitgate.lua", "timeout_ms") == [250]
    haproxy = (DEPLOY / "haproxy.cfg").read_text().partition("listen limitgate")[2]
    assert re.findall(r"timeout (\w+) (\d+)ms", haproxy) == [("connect", "100"), ("server", "150")]
    assert "retries 0" in haproxy
    for file in ("envoy.yaml", RATE_LIMIT):
        assert milliseconds(file, "timeout") == [250]


def test_the_page_names_what_closes() -> None:
    for line, file in (
        ("error_page 502 504 = @limitgate_open;", "nginx.conf"),
        ("failure_mode_allow", "envoy.yaml"),
        ("failure_mode_deny", RATE_LIMIT),
        ("local fails_open", "limitgate.lua"),
    ):
        assert line in PAGE
        assert line in (DEPLOY / file).read_text()


def test_the_lines_that_are_easy_to_forget_are_there() -> None:
    lines = re.findall(r"^\| `(proxy_[^`]+;)`", PAGE, re.MULTILINE)
    assert len(lines) == 3
    assert [line for line in lines if line not in (DEPLOY / "nginx.conf").read_text()] == []


def test_the_page_has_every_dialect_and_option() -> None:
    assert [name for name in DIALECTS if f"`/{name.decode()}`" not in PAGE] == []
    options = [option for parameter in verb.params for option in parameter.opts]
    assert [option for option in options if f"`{option}`" not in PAGE] == []


def test_the_route_of_kubernetes_is_valid() -> None:
    """By the schema of the Gateway API, which also refuses what it doesn't know."""
    schema = json.loads(Path(ROOT, "tests/data/httproute.schema.json").read_text())
    route = yaml.safe_load((DEPLOY / "httproute.yaml").read_text())
    jsonschema.validate(route, schema)
    external = route["spec"]["rules"][0]["filters"][0]["externalAuth"]
    assert external["http"]["path"] == "/envoy"
    external["http"]["pathPrefix"] = "/envoy"
    with pytest.raises(jsonschema.ValidationError, match="pathPrefix"):
        jsonschema.validate(route, schema)
