"""Rule sets that say the same have the same digest, in every process, and no others do."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from limitgate import Limit, Rule, RuleSet, load_rules
from limitgate.rules.callers import KnownCaller
from limitgate.rules.revision import canonical, digest, revision

YAML = """
tier: vip
callers:
  - {id: acme, header: {X-Caller: acme}}
  - {id: other, header: {X-Caller: other}, priority: high}
rules:
  - {name: api, path: /api/**, key: [path, ip], methods: [POST, GET], qps: 5, qpm: 100, reserve: 20%}
  - {name: login, path: /login, limits: ["5/minute burst 3"], charge_if: {status: [401]}}
"""


def _callers() -> list[KnownCaller]:
    return [
        KnownCaller(id="other", header={"x-caller": "other"}, tier="vip", priority="high"),
        KnownCaller(id="acme", header={"x-caller": "acme"}, tier="vip"),
    ]


def _rules() -> list[Rule]:
    return [
        Rule("api", "5/second", "100/minute", path=["/api/**"], key=["path", "ip"], methods=["get", "post"], reserve=0.2),
        Rule("login", Limit("5/minute", burst=3), path="/login", charge_if={"status": [401]}),
    ]


def test_yaml_and_python_that_say_the_same(tmp_path: Path) -> None:
    """Neither how a limit is spelled, nor where rules and callers stand makes a difference."""
    (tmp_path / "vip.yaml").write_text(YAML)
    in_python = RuleSet([rule.model_copy(update={"tier": "vip"}) for rule in _rules()], _callers())
    assert canonical(load_rules(tmp_path)) == canonical(in_python)


@pytest.mark.parametrize(
    "changed",
    [
        {"shadow": True},
        {"limits": (Limit("6/second"), Limit("100/minute"))},
        {"limits": (Limit("5/second", algorithm="fixed_window"), Limit("100/minute"))},
        {"key": ("ip",)},
        {"path": "/api/{id}"},
        {"methods": frozenset({"GET"})},
        {"exclude": ("/api/x",)},
        {"on_error": "closed"},
        {"tier": "vip"},
    ],
)
def test_digest_of_different_rules_differs(changed: dict[str, object]) -> None:
    """A change of any field is a change of the digest."""
    rules = [Rule("api", "5/second", "100/minute", path="/api/**", key=["path", "ip"], methods=["GET", "POST"])]
    assert digest(RuleSet([rules[0].model_copy(update=changed)])) != digest(RuleSet(rules))


def test_callers_and_their_limits_count() -> None:
    """Who is of a tier is a part of the rules."""
    one, other = _callers()
    limited = one.model_copy(update={"limits": {"api": (Limit("7/second"),)}})
    assert len({digest(RuleSet(_rules(), callers, ["vip"])) for callers in ([one], [other], [one, other], [limited])}) == 4


def test_the_order_of_rules_counts() -> None:
    """The first of rules that replace each other applies."""
    assert digest(RuleSet(_rules())) != digest(RuleSet(_rules()[::-1]))


class _Cost:
    def __call__(self, request: object) -> int:
        return 2


def test_digest_of_callables_uses_their_names() -> None:
    """No address in memory gets into the digest, so that processes agree."""
    rules = [Rule("a", lambda _: "1/second", cost=_Cost(), when=partial(bool)), Rule("b", "1/second", cost=_Cost())]
    form = canonical(RuleSet(rules))
    assert " at 0x" not in form
    assert "tests.rules.test_digest:_Cost" in form
    assert form == canonical(RuleSet([Rule("a", rules[0].limits_by, cost=_Cost(), when=partial(bool)), rules[1]]))


def test_digest_is_equal_in_all_processes() -> None:
    """Neither the order of sets nor the seed of hashes shows."""
    program = (
        "from limitgate import Rule, RuleSet; from limitgate.rules.revision import revision; "
        "print(revision(RuleSet([Rule('a', '1/second', methods=['GET', 'POST', 'PUT', 'DELETE'])])))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout


def test_the_revision_is_48_bits_of_the_digest() -> None:
    """A float holds it exactly, as Prometheus and OpenTelemetry do."""
    rules = RuleSet(_rules())
    assert f"{revision(rules):012x}" == digest(rules)[:12]
    assert int(float(revision(rules))) == revision(rules)
