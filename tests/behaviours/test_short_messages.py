"""What is told of many rules, tiers, callers and clients, or of a long text in a rule file, stays short."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import ConfigError, LimitGateWSGI, Rule, RuleSet, load_rules
from limitgate.command.group import limitgate
from limitgate.routes.overview import overview
from limitgate.routes.starlette import routes_of
from tests.support.command_line import CliRunner

MANY = 300
SHORT = 1_500
"""Characters of a line that people still read."""
LONG = "z" * 100_000


def many(**options: Any) -> list[Rule]:
    return [Rule(f"rule-of-a-tenant-{number}", "9/minute", **options) for number in range(MANY)]


def answering(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return []


def at_start() -> None:
    """The line that says what is on, with all proxies and tiers."""
    proxies = [f"2001:db8:{number:x}::/48" for number in range(MANY)]
    rules = RuleSet([Rule("api", "9/minute", tier=f"tenant-{number}") for number in range(MANY)])
    LimitGateWSGI(answering, rules=rules, trusted_proxies=proxies)


def other_rules(folder: Path) -> None:
    """The line about rules that were read anew."""
    file = folder / "rules.yaml"
    head = "rules:\n" + "".join(f"  - {{name: tenant-{number}, qpm: 9}}\n" for number in range(MANY))
    file.write_text(head)
    gate = LimitGateWSGI(answering, rules=file, reload=3600.0).gate
    assert gate is not None
    assert gate.poller is not None
    file.write_text(head.replace("tenant", "customer"))
    for _ in range(2):
        gate.poller.poll()


def test_the_log_line_at_start(caplog: pytest.LogCaptureFixture) -> None:
    """It says how many there are besides those that it names."""
    caplog.set_level(logging.INFO, "limitgate")
    at_start()
    assert any("more" in line for line in caplog.messages)
    assert max(map(len, caplog.messages)) < SHORT


def test_log_lines_about_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rules that are new, and those that are gone."""
    caplog.set_level(logging.INFO, "limitgate")
    other_rules(tmp_path)
    (line,) = [line for line in caplog.messages if line.startswith("rules read again")]
    assert line.count(f"… and {MANY - 10} more") == 2
    assert len(line) < SHORT


RULES = "rules:\n  - name: api\n    qpm: 9\n"


@pytest.mark.parametrize(
    "text",
    [
        "rules:\n" + "".join(f"  - {{name: rule-of-a-tenant-{number}, qpm: 9, replaces: [none]}}\n" for number in range(MANY)),
        "rules:\n"
        + "".join(f"  - {{name: rule-of-a-tenant-{number}, qpm: 9}}\n" for number in range(MANY))
        + f"callers: [{{id: a, api_key: 'sha256:{'0' * 64}', limits: {{no: 1/day}}}}]",
        RULES + f"    path: {LONG}\n",
        RULES + f"    path: /{LONG}/../x\n",
        RULES + f"    path: /{LONG}/<x>\n",
        RULES + f"    path: /x/<{LONG}>\n",
        RULES + f"    exclude: [{LONG}]\n",
        RULES + f"    methods: ['{LONG}!']\n",
        RULES + f"    key: [{LONG}]\n",
        RULES + f"    clients: [{LONG}]\n",
        RULES + f"    replaces: [{LONG}]\n",
        f"rules: *{LONG}\n",
        f"rules: !{LONG[:900]} x\n",
    ],
    ids=range(13),
)
def test_mistakes_in_rule_files(tmp_path: Path, text: str) -> None:
    """Whatever stands there, and however many rules there are to choose from."""
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="expected") as caught:
        load_rules(file)
    assert max(len(str(mistake)) for mistake in caught.value.every) < SHORT


def test_a_tier_out_of_many(tmp_path: Path) -> None:
    """That no file describes."""
    for number in range(200):
        (tmp_path / f"{number}.yaml").write_text(f"tier: tier-of-a-tenant-{number}\nrules: [{{name: api, qpm: 9, tier: none}}]")
    with pytest.raises(ConfigError, match=r"no file describes tier 'none', expected one of .*… and 191 more") as caught:
        load_rules(tmp_path)
    assert max(len(str(mistake)) for mistake in caught.value.every) < SHORT


def test_a_rule_out_of_many_for_the_command(tmp_path: Path) -> None:
    """Which is near the one that was meant."""
    (tmp_path / "rules.yaml").write_text(
        "rules:\n" + "".join(f"  - {{name: rule-of-a-tenant-{number}, qpm: 9}}\n" for number in range(MANY))
    )
    command = ["peek", "--store", "redis://127.0.0.1:1", "--rules", str(tmp_path), "--rule", "rule-of-a-tenat-7", "--ip", "::1"]
    result = CliRunner().invoke(limitgate, command)
    assert result.exit_code == 2
    assert "did you mean 'rule-of-a-tenant-7'? expected one of rule-of-a-tenant-0, " in result.stderr
    assert len(result.stderr) < SHORT


def test_tables_of_routes() -> None:
    """A list of clients, of paths, or of rules that are replaced."""
    clients = [f"2001:db8:{number:x}::/48" for number in range(MANY)]
    names = [f"rule-of-a-tenant-{number}" for number in range(MANY)]
    paths = [f"/nowhere/{number}" for number in range(MANY)]
    rules = [
        *many(path="/no"),
        Rule("clients", "9/minute", clients=clients),
        Rule("replaces", "9/minute", replaces=names),
        Rule("paths", "9/minute", path=["/x", *paths]),
        Rule("excluded", "9/minute", path=paths),
    ]
    table = overview([RuleSet(rules)], routes_of(Starlette(routes=[Route("/x", PlainTextResponse("x"))])))
    assert table.count(f"… and {MANY - 10} more") == 3
    assert max(map(len, table.splitlines())) < SHORT
