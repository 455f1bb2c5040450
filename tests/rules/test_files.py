from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, strategies as st

from limitgate import Caller, Limit, RuleSet, load_rules
from limitgate.errors import ConfigError
from tests.support.permissions import a_public_folder, without_privileges

DIGEST = f"sha256:{hashlib.sha256(b'demo-vip-key').hexdigest()}"

DEFAULT = """\
tier: default
rules:
  - name: api
    path: /api/**
    key: [path, ip]
    qps: 5
    qpm: 100
    qpd: 2000
  - name: login
    path: /login
    methods: [POST]
    key: [ip]
    limits: ["5/minute burst 3"]
    on_error: closed
  - name: health
    path: /healthz
    exempt: true
"""

VIP = f"""\
tier: vip
callers:                                   # who is of this tier
  - {{id: acme, api_key: "{DIGEST}"}}
  - {{id: billing, header: {{X-Caller: billing}}}}
rules:
  - name: api
    path: /api/**
    key: [caller]
    qps: 50
    qpm: 1000
    qpd: 100000
"""


def written(folder: Path, **files: str | bytes) -> Path:
    """A folder with these files; in their names two underscores stand for the dot."""
    for name, content in files.items():
        text = content if isinstance(content, bytes) else dedent(content).encode()
        (folder / name.replace("__", ".")).write_bytes(text)
    return folder


def names(rules: RuleSet, tier: str = "default") -> list[str]:
    return [rule.name for rule in rules.tiers[tier]]


def test_the_files_of_the_contract_are_read(tmp_path: Path) -> None:
    """The two files that the contract shows give the rules and callers that they say."""
    rules = load_rules(written(tmp_path, default__yaml=DEFAULT, vip__yaml=VIP))
    api, login, health = rules.tiers["default"]
    assert (api.name, api.path, api.key) == ("api", "/api/**", ("path", "ip"))
    assert api.every_limit == (Limit("5/s"), Limit("100/m"), Limit("2000/d"))
    assert (login.methods, login.on_error, login.limits) == ({"POST"}, "closed", (Limit("5/minute burst 3"),))
    assert health.exempt
    vip = rules.tiers["vip"]
    assert [rule.name for rule in vip] == ["api", "login", "health"]
    assert (vip[0].key, vip[0].qps, vip[0].tier) == (("caller",), 50, "vip")
    assert vip[1:] == (login, health)
    assert rules.callers.with_key("demo-vip-key") == Caller("acme", "vip")
    assert rules.callers.with_key("another-key") is None


@pytest.mark.parametrize("name", ["rules.yaml", "rules.yml", "rules.conf", "rules"])
def test_one_file_is_a_rule_set(tmp_path: Path, name: str) -> None:
    """A file that is named by itself is read whatever it is called, given as text or as a path."""
    (tmp_path / name).write_text(DEFAULT)
    assert names(load_rules(tmp_path / name)) == names(load_rules(str(tmp_path / name))) == ["api", "login", "health"]


def test_a_set_has_at_most_so_many_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all files count together, and nothing is read beyond."""
    monkeypatch.setattr("limitgate.rules.files.MAX_RULES", 4)
    written(tmp_path, a__yaml=DEFAULT, b__yaml=VIP)
    assert len(load_rules(tmp_path).tiers["vip"]) == 3
    written(tmp_path, c__yaml="tier: gold\nrules: [{name: api, qps: 9}]", d__yaml="{")
    with pytest.raises(ConfigError) as caught:
        load_rules(tmp_path)
    assert str(caught.value) == f"{tmp_path}: rules: 5 rules or more, expected at most 4"


def test_ten_thousand_rules_are_read(tmp_path: Path) -> None:
    """As many as one file holds."""
    entries = [f"- {{name: api{number}, path: /api/{number}/**, qps: 5}}" for number in range(10_000)]
    rules = load_rules(written(tmp_path, default__yaml="\n".join(["rules:", *entries])))
    assert len(rules.tiers["default"]) == 10_000


def test_in_a_folder_yaml_and_yml_are_read_and_nothing_else(tmp_path: Path) -> None:
    """Other files in the folder are left alone, broken or not, and so are folders in it, and what is hidden."""
    written(tmp_path, default__yaml=DEFAULT, vip__yml=VIP, notes__txt="{", old__yaml__bak="{", README__md="{")
    (tmp_path / "more.yaml").mkdir()
    (tmp_path / ".#default.yaml").symlink_to("ann@host.1234:5678")  # the lock of Emacs
    (tmp_path / "._vip.yml").write_bytes(b"\x00\x05\x16\x07")  # what macOS adds on other file systems
    assert set(load_rules(tmp_path).tiers) == {"default", "vip"}


def test_files_are_read_in_name_order(tmp_path: Path) -> None:
    """Rules stand in the order of their files' names, wherever a file says that a rule is of another tier."""
    rule = "rules: [{{name: {}, qps: 1, tier: default}}]"
    written(
        tmp_path,
        b__yaml="tier: b\n" + rule.format("second"),
        c__yml="tier: c\n" + rule.format("third"),
        a__yml="tier: a\n" + rule.format("first"),
        default__yaml="rules: [{name: fourth, qps: 1}]",
    )
    assert names(load_rules(tmp_path)) == ["first", "second", "third", "fourth"]


def test_a_file_without_a_tier_is_the_default(tmp_path: Path) -> None:
    """The tier may be left out of the file that is for everybody."""
    rules = load_rules(written(tmp_path, any__yaml="rules: [{name: a, qps: 1}]"))
    assert {tier: names(rules, tier) for tier in rules.tiers} == {"default": ["a"]}


def test_a_tier_may_be_alone_and_may_have_only_callers(tmp_path: Path) -> None:
    """A tier without rules of its own has the default's, and a default without a file has none."""
    text = f"tier: vip\ncallers: [{{id: a, api_key: '{DIGEST}'}}]"
    rules = load_rules(written(tmp_path, vip__yaml=text))
    assert rules.tiers == {"default": (), "vip": ()}
    assert rules.callers.with_key("demo-vip-key") == Caller("a", "vip")


def test_a_caller_may_be_of_another_tier_than_its_file(tmp_path: Path) -> None:
    """A caller that names a described tier is of it."""
    text = f"callers: [{{id: a, api_key: '{DIGEST}', tier: vip}}]"
    rules = load_rules(written(tmp_path, default__yaml=text, vip__yaml="tier: vip"))
    assert rules.callers.with_key("demo-vip-key") == Caller("a", "vip")


def test_anchors_aliases_and_merges_work(tmp_path: Path) -> None:
    """What YAML offers for repeating oneself less can be used."""
    text = """\
    rules:
      - &api {name: a, path: /a, qps: 5, key: &who [api_key|ip]}
      - {<<: *api, name: b, path: /b}
      - {name: c, qpm: 9, key: *who}
    """
    rules = load_rules(written(tmp_path, default__yaml=text)).tiers["default"]
    assert [(rule.name, rule.path, rule.qps, rule.key) for rule in rules] == [
        ("a", "/a", 5, ("api_key|ip",)),
        ("b", "/b", 5, ("api_key|ip",)),
        ("c", "/**", None, ("api_key|ip",)),
    ]


def test_a_limit_can_be_written_as_a_mapping(tmp_path: Path) -> None:
    """A limit's burst and algorithm may stand beside it."""
    text = "rules: [{name: a, limits: [{limit: 10/s, burst: 20}, {limit: 9/m, algorithm: token_bucket}]}]"
    (rule,) = load_rules(written(tmp_path, default__yaml=text)).tiers["default"]
    assert rule.limits == (Limit("10/s burst 20"), Limit("9/m", algorithm="token_bucket"))


ONE_RULE = """\
tier: default
rules:
  - name: api
    path: /api/**
    qps: 5
  - name: login
    {}
"""
ONE_CALLER = """\
tier: vip
callers:
  - id: acme
    {}
rules:
  - name: api
    qps: 5
"""


# (file, where the message says that the mistake is)
def test_which_requests_a_rule_is_for_is_read_from_a_file(tmp_path: Path) -> None:
    """All but ``when``, which is code."""
    text = """\
    rules:
      - {name: all, qpm: 5, path: [/a/**, /b], exclude: [/a/x]}
      - {name: d, limits: [5/week], path: /a/d, replaces: [all]}
      - {name: e, qps: 5, path: /a/e, replaces: "*"}
      - {name: office, exempt: true, clients: [10.0.0.0/8]}
      - {name: scraper, deny: true, clients: [203.0.113.9]}
    """
    every, d, e, office, scraper = load_rules(written(tmp_path, default__yaml=text)).tiers["default"]
    assert (every.path, every.exclude) == (("/a/**", "/b"), ("/a/x",))
    assert (d.replaces, e.replaces, str(d.every_limit[0])) == (("all",), ("*",), "5/week")
    assert (office.exempt, office.clients, scraper.deny) == (True, ("10.0.0.0/8",), True)


def test_leases_are_read_from_a_file(tmp_path: Path) -> None:
    """A limit's own lease stands beside it, a rule's is for the limits that have none of their own."""
    text = """\
        rules:
          - {name: own, limits: [{limit: 1000/second, lease: 50}]}
          - name: shared
            lease: 50
            limits: ["1000/second", {limit: 100/minute, lease: 7}]
            qpd: 2000
          - {name: none, limits: ["1000/second"]}
    """
    rules = load_rules(written(tmp_path, rules__yaml=text)).tiers["default"]
    assert [[limit.lease for limit in rule.every_limit] for rule in rules] == [[50], [50, 7, 50], [0]]
    assert rules[0].limits == (Limit("1000/second", lease=50),)


MISTAKES = [
    # unknown fields
    ("tier: default\nrulez:\n  - name: a\n", "2: rulez"),
    ("rules: []\nversion: 2\n", "2: version"),
    (ONE_RULE.format("qps: 1\n    burts: 3"), "8: rules[1].burts"),
    (ONE_RULE.format("qps: 1\n    Path: /x"), "8: rules[1].Path"),
    (ONE_RULE.format("qps: 1\n    limit: 5/s"), "8: rules[1].limit"),
    (ONE_RULE.format("limits:\n      - 5/s\n      - {limit: 5/s, brust: 9}"), "9: rules[1].limits[1]"),
    (ONE_RULE.format("qps: 1\n    self: me"), "8: rules[1].self"),
    (ONE_RULE.format("qps: 1\n    on: x"), r"8: (rules\[1\]\S+)"),
    (ONE_RULE.format("qps: 1\n    5: x"), r"8: (rules\[1\]\S+)"),
    (ONE_CALLER.format(f'api_key: "{DIGEST}"\n    apikey: x'), "5: callers[0].apikey"),
    (ONE_CALLER.format(f'api_key: "{DIGEST}"\n    qps: 5'), "5: callers[0].qps"),
    (ONE_CALLER.format(f'api_key: "{DIGEST}"\n    limits: 5/minute'), "5: callers[0].limits"),
    (ONE_CALLER.format(f'api_key: "{DIGEST}"\n    limits: {{api: often}}'), "5: callers[0].limits.api"),
    (ONE_CALLER.format(f'api_key: "{DIGEST}"\n    limits:\n      apy: 5/minute'), "6: callers[0].limits.apy"),
    # limits and counts
    (ONE_RULE.format("limits: [often]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits: [5/s, 5/fortnight]"), "7: rules[1].limits[1]"),
    (ONE_RULE.format("limits:\n      - 5/s\n      - -1/s"), "9: rules[1].limits[1]"),
    (ONE_RULE.format("limits: [-5/s]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits: [5/0 seconds]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits: [5]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits: 5/s"), "7: rules[1].limits"),
    (ONE_RULE.format("limits: {limit: 5/s}"), "7: rules[1].limits"),
    (ONE_RULE.format("limits: []"), "7: rules[1].limits"),
    (ONE_RULE.format("limits:"), "7: rules[1].limits"),
    (ONE_RULE.format("limits: [{limit: 5/s, burst: 0}]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits: [{limit: 5/s, burst: many}]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits: [{limit: 5/s, algorithm: magic}]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits: [{limit: 5/s, lease: 6}]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits: [{limit: 5/s, lease: -1}]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits: [{limit: 5/s, lease: true}]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits:\n    - 5/m\n    - {limit: 5/s, lease: many}"), "9: rules[1].limits[1]"),
    (ONE_RULE.format("limits: [{limit: 5/s, lease: 5}, 9/m]"), "7: rules[1].limits"),
    (ONE_RULE.format("qpm: 9\n    limits: [{limit: 5/s, lease: 5}]"), "8: rules[1].limits"),
    (ONE_RULE.format("limits: [2000000/s]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("limits: [1 per 400 days]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("path: /login"), "6: rules[1].limits"),
    (ONE_RULE.format("qps: -1"), "7: rules[1].qps"),
    (ONE_RULE.format("qpm: -3"), "7: rules[1].qpm"),
    (ONE_RULE.format('qph: "5"'), "7: rules[1].qph"),
    (ONE_RULE.format("qpd: five"), "7: rules[1].qpd"),
    (ONE_RULE.format("qps: 5.0"), "7: rules[1].qps"),
    (ONE_RULE.format("qps: 1e3"), "7: rules[1].qps"),
    (ONE_RULE.format("qps: true"), "7: rules[1].qps"),
    (ONE_RULE.format("qps: [5]"), "7: rules[1].qps"),
    (ONE_RULE.format("qps: 2000000"), "7: rules[1].qps"),
    (ONE_RULE.format("qps: 5\n    cost: 6"), "8: rules[1].cost"),
    (ONE_RULE.format("qps: 5\n    cost: -1"), "8: rules[1].cost"),
    (ONE_RULE.format('qps: 5\n    cost: "1"'), "8: rules[1].cost"),
    (ONE_RULE.format("qps: 5\n    cost: true"), "8: rules[1].cost"),
    (ONE_RULE.format("qps: 5\n    lease: 6"), "8: rules[1].lease"),
    (ONE_RULE.format("lease: 6\n    limits: [50/s, 5/m]"), "7: rules[1].lease"),
    (ONE_RULE.format("qps: 5\n    lease: -1"), "8: rules[1].lease"),
    (ONE_RULE.format("qps: 5\n    lease: true"), "8: rules[1].lease"),
    (ONE_RULE.format('qps: 5\n    lease: "1"'), "8: rules[1].lease"),
    (ONE_RULE.format("qps: 5\n    lease: 1.5"), "8: rules[1].lease"),
    (ONE_RULE.format("qps: 5\n    lease:"), "8: rules[1].lease"),
    # how requests are counted
    (ONE_RULE.format("qps: 5\n    algorithm: magic"), "8: rules[1].algorithm"),
    (ONE_RULE.format("qps: 5\n    algorithm: 5"), "8: rules[1].algorithm"),
    (ONE_RULE.format("qps: 5\n    algorithm: ban"), "8: rules[1].algorithm"),
    (ONE_RULE.format("limits: [5/s burst 9]\n    algorithm: fixed_window"), "8: rules[1].algorithm"),
    (ONE_RULE.format("qps: 20000\n    algorithm: sliding_log"), "8: rules[1].algorithm"),
    (ONE_RULE.format("exempt: true\n    algorithm: gcra"), "8: rules[1].algorithm"),
    (ONE_RULE.format("algorithm: gcra\n    limits: [{limit: 5/s, algorithm: fixed_window}]"), "7: rules[1].algorithm"),
    (ONE_RULE.format("qps: 5\n    algorithm: fixed_window\n    lease: 2"), "9: rules[1].lease"),
    (ONE_RULE.format("qpd: 5\n    align: utc"), "8: rules[1].align"),
    (ONE_RULE.format("qpd: 5\n    align: utc\n    algorithm: sliding_window"), "8: rules[1].align"),
    (ONE_RULE.format("qpd: 5\n    algorithm: fixed_window\n    align: Mars/Olympus"), "9: rules[1].align"),
    (ONE_RULE.format("qpd: 5\n    algorithm: fixed_window\n    align: 1"), "9: rules[1].align"),
    (ONE_RULE.format("qps: 5\n    algorithm: fixed_window\n    align: Europe/Berlin"), "9: rules[1].align"),
    (ONE_RULE.format("limits: [{limit: 5/d, align: utc}]"), "7: rules[1].limits[0]"),
    # outcomes and messages
    (ONE_RULE.format("qps: 5\n    charge_if: 401"), "8: rules[1].charge_if"),
    (ONE_RULE.format("qps: 5\n    charge_if: [401]"), "8: rules[1].charge_if"),
    (ONE_RULE.format("qps: 5\n    charge_if: {}"), "8: rules[1].charge_if"),
    (ONE_RULE.format("qps: 5\n    charge_if: {status: 401}"), "8: rules[1].charge_if.status"),
    (
        ONE_RULE.format("qps: 5\n    charge_if:\n      status:\n        - 401\n        - 6xx"),
        "11: rules[1].charge_if.status[1]",
    ),
    (ONE_RULE.format('qps: 5\n    charge_if:\n      status: ["401"]'), "9: rules[1].charge_if.status[0]"),
    (ONE_RULE.format("qps: 5\n    charge_if:\n      status: [on]"), "9: rules[1].charge_if.status[0]"),
    (ONE_RULE.format("qps: 5\n    charge_if:\n      status: [401]\n      status_not: [5xx]"), "8: rules[1].charge_if"),
    (ONE_RULE.format("qps: 5\n    charge_if:\n      status: [401]\n      statsu: [5xx]"), "10: rules[1].charge_if.statsu"),
    (ONE_RULE.format("qps: 5\n    charge_if: {status: [401]}\n    lease: 2"), "8: rules[1].charge_if"),
    (ONE_RULE.format("qps: 5\n    per: message\n    charge_if: {status: [401]}"), "9: rules[1].charge_if"),
    (ONE_RULE.format("exempt: true\n    charge_if: {status: [401]}"), "8: rules[1].charge_if"),
    (ONE_RULE.format("exempt: true\n    per: message"), "8: rules[1].per"),
    (ONE_RULE.format("qps: 5\n    per: packet"), "8: rules[1].per"),
    (ONE_RULE.format("qps: 5\n    per: 5"), "8: rules[1].per"),
    # names
    ("rules:\n  - qps: 5\n", "2: rules[0]"),
    ("rules:\n  - name:\n    qps: 5\n", "2: rules[0].name"),
    ("rules:\n  - name: 5\n    qps: 5\n", "2: rules[0].name"),
    ("rules:\n  - name: 2026-01-01\n    qps: 5\n", "2: rules[0].name"),
    ("rules:\n  - name: a b\n    qps: 5\n", "2: rules[0].name"),
    (ONE_RULE.format("qps: 5").replace("login", "api"), "6: rules[1].name"),
    # the other fields of a rule
    (ONE_RULE.format("qps: 5\n    path: login"), "8: rules[1].path"),
    (ONE_RULE.format("qps: 5\n    path: /a/*"), "8: rules[1].path"),
    (ONE_RULE.format("qps: 5\n    path: [/a, b]"), "8: rules[1].path[1]"),
    (ONE_RULE.format("qps: 5\n    exclude: [/a, b]"), "8: rules[1].exclude[1]"),
    (ONE_RULE.format("qps: 5\n    exclude: [/a, 5]"), "8: rules[1].exclude[1]"),
    (ONE_RULE.format("qps: 5\n    clients: 10.0.0.1"), "8: rules[1].clients"),
    (ONE_RULE.format("qps: 5\n    clients: [10.0.0.1/8]"), "8: rules[1].clients[0]"),
    (ONE_RULE.format("qps: 5\n    when: app:is_search"), "8: rules[1].when"),
    (ONE_RULE.format("qps: 5\n    replaces:\n      - api\n      - apy"), "10: rules[1].replaces[1]"),
    (ONE_RULE.format("qps: 5\n    replaces: api"), "8: rules[1].replaces"),
    (ONE_RULE.format("qps: 5\n    deny: true"), "8: rules[1].deny"),
    (ONE_RULE.format("limits: [100/month]"), "7: rules[1].limits[0]"),
    (ONE_RULE.format("qps: 5\n    methods: POST"), "8: rules[1].methods"),
    (ONE_RULE.format("qps: 5\n    methods: []"), "8: rules[1].methods"),
    (ONE_RULE.format("qps: 5\n    methods: [5]"), "8: rules[1].methods[0]"),
    (ONE_RULE.format("qps: 5\n    key: ip"), "8: rules[1].key"),
    (ONE_RULE.format("qps: 5\n    key: []"), "8: rules[1].key"),
    (ONE_RULE.format("qps: 5\n    key: [cookie]"), "8: rules[1].key[0]"),
    (ONE_RULE.format("qps: 5\n    on_error: shut"), "8: rules[1].on_error"),
    (ONE_RULE.format("qps: 5\n    shadow: 1"), "8: rules[1].shadow"),
    (ONE_RULE.format('qps: 5\n    exempt: "yes"'), "8: rules[1].exempt"),
    (ONE_RULE.format("qps: 5\n    exempt: true"), "8: rules[1].exempt"),
    # tiers
    ("tier: 5\nrules: []\n", "1: tier"),
    ("rules: []\ntier: ''\n", "2: tier"),
    ("tier:\n", "1: tier"),
    (ONE_RULE.format("qps: 5\n    tier: gold"), "8: rules[1].tier"),
    (ONE_CALLER.format(f'api_key: "{DIGEST}"\n    tier: gold'), "5: callers[0].tier"),
    # callers
    (ONE_CALLER.format("tier: vip"), "3: callers[0]"),
    (ONE_CALLER.format("header: {}"), "3: callers[0]"),
    (ONE_CALLER.format("api_key: demo-vip-key"), "4: callers[0].api_key"),
    (ONE_CALLER.format('api_key: "sha256:123"'), "4: callers[0].api_key"),
    (ONE_CALLER.format(f'api_key: "{DIGEST.removeprefix("sha256:")}"'), "4: callers[0].api_key"),
    (ONE_CALLER.format("api_key: 5"), "4: callers[0].api_key"),
    (ONE_CALLER.format("header: X-Caller"), "4: callers[0].header"),
    (ONE_CALLER.format("header: {X-Caller: 5}"), "4: callers[0].header.X-Caller"),
    (ONE_CALLER.format(f'api_key: "{DIGEST}"').replace("acme", "5"), "3: callers[0].id"),
    (f'callers:\n  - api_key: "{DIGEST}"\n', "2: callers[0].id"),
    (f'callers:\n  - {{id: a, api_key: "{DIGEST}"}}\n  - id: b\n    api_key: "{DIGEST}"\n', "4: callers[1].api_key"),
    # shapes
    ("", "1"),
    ("# nothing here\n", "1"),
    ("---\n", "[12]"),
    ("null\n", "1"),
    ("# a comment\n- name: api\n", "2"),
    ("rules\n", "1"),
    ("5\n", "1"),
    ("rules: 5\n", "1: rules"),
    ("tier: a\nrules:\n", "2: rules"),
    ("rules: {name: a, qps: 5}\n", "1: rules"),
    ("rules:\n  - 5\n", "2: rules[0]"),
    ("rules:\n  - {name: a, qps: 5}\n  - api\n", "3: rules[1]"),
    ("callers: acme\n", "1: callers"),
    ("callers:\n  - acme\n", "2: callers[0]"),
    # a field that stands there twice
    ("tier: a\nrules: []\ntier: b\n", "[13]: tier"),
    (ONE_RULE.format("qps: 5\n    path: /a\n    qps: 6"), "[79]: (rules.1..)?qps"),
    (ONE_RULE.format("qps: 5\n    limits: [{limit: 5/s, burst: 9, limit: 6/s}]"), "8: (rules.1..limits.0..)?limit"),
    (ONE_CALLER.format("header: {X-A: a, X-A: b}"), "4: (callers.0..header.)?X-A"),
]
PLACES = [where for _, where in MISTAKES]


def prefix_of(where: str) -> str:
    """The regular expression that a message must begin with: a line and a field, brackets of a place as they are."""
    line, _, field = where.partition(": ")
    spelled = field if "(" in field else field.replace("[", r"\[").replace("]", r"\]").replace(".", r"\.")
    return f"{line}: {spelled}: " if field else f"{line}: "


@pytest.mark.parametrize(("text", "where"), MISTAKES, ids=PLACES)
def test_file_with_a_mistake_raises_config_error(tmp_path: Path, text: str, where: str) -> None:
    """The error begins with the file, the line and the field, and says what would have been right."""
    file = written(tmp_path, rules__yaml=text) / "rules.yaml"
    with pytest.raises(ConfigError, match="expected") as caught:
        load_rules(file)
    message = str(caught.value)
    assert message.startswith(f"{file}:")
    assert re.match(prefix_of(where), message.removeprefix(f"{file}:")), message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rules:\n  - name: a\n   qps: 5\n", 3),
        ("rules:\n  - name: [a\n", 3),
        ('tier: "a\n', 2),
        ("rules:\n\t- name: a\n", 2),
        ("tier: *nowhere\n", 1),
        ("tier: a\n---\ntier: b\n", 2),
        ("a: b: c\n", 1),
        ("tier: !!python/object:os.system x\n", 1),
        ("tier: a\nrules:\n  - !!python/object/apply:os.system ['true']\n", 3),
        ("tier: !!python/name:os.system\n", 1),
        ("tier: a\nrules: !unknown []\n", 2),
        ("? {a: b}\n: c\n", 1),
        ("? [a, b]\n: c\n", 1),
        ("tier: 2026-99-99\n", 1),
        ("rules:\n  - {name: a, qps: 5, <<: 7}\n", 2),
    ],
)
def test_rule_file_with_invalid_yaml_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    """A mistake in the syntax, and whatever YAML could build besides plain data, is an error with file and line."""
    file = written(tmp_path, rules__yaml=text) / "rules.yaml"
    with pytest.raises(ConfigError, match="expected") as caught:
        load_rules(file)
    assert str(caught.value).startswith(f"{file}:{line}: ")


def test_python_tags_build_nothing(tmp_path: Path) -> None:
    """A rule file cannot run anything."""
    trace = tmp_path / "trace"
    text = f"tier: !!python/object/apply:os.mkdir ['{trace}']\n"
    with pytest.raises(ConfigError):
        load_rules(written(tmp_path, rules__yaml=text) / "rules.yaml")
    assert not trace.exists()


BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)
MERGES = "\n".join(["a0: &a0 {k: v}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)])


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        MERGES,
        "rules: &a [*a]\n",
        "rules: &a {b: *a}\n",
        "tier: &a\n  ? *a\n  : b\n",
        "[" * 2_000 + "]" * 2_000,
        "{a: " * 2_000,
        "- " * 20_000,
        "rules:\n  - name: a\n    qps: 5\n    limits: " + "[" * 1_000 + "]" * 1_000,
        "x" * (2 << 20),
        "x: " + "9" * 100_000,
    ],
    ids=range(11),
)
def test_rule_file_built_to_exhaust_memory_is_refused_fast(tmp_path: Path, text: str) -> None:
    """Aliases that multiply, structures without end and files of any size are errors, not a process that hangs."""
    file = written(tmp_path, rules__yaml=text) / "rules.yaml"
    began = time.thread_time()
    with pytest.raises(ConfigError, match="expected") as caught:
        load_rules(file)
    assert str(caught.value).startswith(f"{file}:")
    assert time.thread_time() - began < 30


@pytest.mark.parametrize(
    "content",
    [b"tier: \xff\xfe\n", b"tier: caf\xe9\n", b"\x00\x01\x02", b"tier: a\x07b\n", b"\xff\xfeb", b"\x7fELF\x02\x01\x01\x00"],
)
def test_rule_file_that_is_not_text_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file in another encoding than UTF-8, or of no text at all, is an error that names it."""
    file = written(tmp_path, rules__yaml=content) / "rules.yaml"
    with pytest.raises(ConfigError, match="expected") as caught:
        load_rules(file)
    assert str(caught.value).startswith(f"{file}:")
    if content.startswith(b"tier"):
        assert str(caught.value).startswith(f"{file}:1: ")
        assert str(caught.value).endswith("; expected text in UTF-8, without control characters")


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    """Files written by editors that begin them with a byte order mark are read."""
    assert names(load_rules(written(tmp_path, rules__yaml=b"\xef\xbb\xbf" + DEFAULT.encode()))) == ["api", "login", "health"]


def test_a_windows_line_end_does_no_harm(tmp_path: Path) -> None:
    """Lines are counted the same however they end."""
    text = DEFAULT.replace("qpd: 2000", "qpd: -1").replace("\n", "\r\n").encode()
    with pytest.raises(ConfigError, match=r"rules\.yaml:8: rules\[0\]\.qpd: "):
        load_rules(written(tmp_path, rules__yaml=text))


def test_two_files_of_one_tier_are_a_mistake(tmp_path: Path) -> None:
    """A tier is described by one file; the message names both."""
    written(tmp_path, a__yaml="tier: vip\n", b__yaml="# the other\ntier: vip\n")
    with pytest.raises(ConfigError, match="expected one file") as caught:
        load_rules(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'b.yaml'}:2: tier: ")
    assert str(tmp_path / "a.yaml") in str(caught.value)


def test_two_files_that_leave_the_tier_out_are_a_mistake(tmp_path: Path) -> None:
    """Leaving the tier out means default, so only one file can."""
    written(tmp_path, a__yaml="rules: []\n", b__yaml="rules: []\n")
    with pytest.raises(ConfigError, match=r"'default'.*expected one file") as caught:
        load_rules(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'b.yaml'}:1: tier: ")


def test_contradictions_between_files_are_found_in_the_later_one(tmp_path: Path) -> None:
    """One name, API key or undescribed tier is a mistake of the file that comes second, at its own place."""
    key = f"api_key: '{DIGEST}'"
    written(tmp_path, a__yaml="rules:\n  - {name: x, qps: 1}\n  - {name: y, qps: 1}\n" + f"callers:\n  - {{id: one, {key}}}\n")
    for text, where in [
        ("tier: b\nrules:\n  - {name: z, qps: 1}\n  - name: y\n    qps: 1\n    tier: default\n", "4: rules[1].name: "),
        (f"tier: b\ncallers:\n  - id: two\n    {key}\n", "4: callers[0].api_key: "),
        ("tier: b\nrules:\n  - {name: z, qps: 1}\n  - {name: y, qps: 1, tier: gold}\n", "4: rules[1].tier: "),
    ]:
        written(tmp_path, b__yaml=text)
        with pytest.raises(ConfigError, match="expected") as caught:
            load_rules(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path / 'b.yaml'}:{where}")


def test_an_undescribed_tier_is_named_with_the_described_ones(tmp_path: Path) -> None:
    """Whoever misspells a tier is told which there are."""
    written(tmp_path, default__yaml="rules: [{name: a, qps: 1, tier: vpi}]", vip__yaml=VIP)
    with pytest.raises(ConfigError, match="'vpi', expected one of default, vip"):
        load_rules(tmp_path)


@pytest.mark.parametrize("name", ["missing", "missing.yaml", "missing/deeper"])
def test_a_missing_path_is_a_mistake(tmp_path: Path, name: str) -> None:
    """Rules that are not there are an error at start-up, never an app without limits."""
    with pytest.raises(ConfigError, match="expected") as caught:
        load_rules(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_a_mistake(path: str) -> None:
    """Not the folder in which the process runs, which an empty path would be."""
    with pytest.raises(ConfigError, match=r"rules: '.*' is no path, expected that of a rule file or a folder"):
        load_rules(path)


def test_an_empty_folder_is_a_mistake(tmp_path: Path) -> None:
    """A folder without rule files is an error that says what they are called."""
    written(tmp_path, rules__json="{}")
    with pytest.raises(ConfigError, match=r"expected \*\.yaml or \*\.yml") as caught:
        load_rules(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")


def test_a_link_that_leads_nowhere_is_a_mistake(tmp_path: Path) -> None:
    """A rule file in a folder that cannot be found is not passed over in silence."""
    written(tmp_path, default__yaml=DEFAULT)
    (tmp_path / "vip.yaml").symlink_to(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="expected") as caught:
        load_rules(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'vip.yaml'}: ")


def test_a_pipe_is_a_mistake_and_not_waited_for(tmp_path: Path) -> None:
    """Nobody writes to it, so whoever read it would wait for ever."""
    os.mkfifo(written(tmp_path, default__yaml=DEFAULT) / "vip.yaml")
    with pytest.raises(ConfigError, match="expected a file") as caught:
        load_rules(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'vip.yaml'}: ")


@pytest.fixture
def public_folder() -> Iterator[Path]:
    with a_public_folder() as folder:
        yield folder


def test_a_folder_that_may_not_be_read_is_a_mistake(public_folder: Path) -> None:
    """A folder without permission to list it is an error that names it."""
    folder = public_folder / "config"
    folder.mkdir()
    written(folder, default__yaml=DEFAULT)
    folder.chmod(0o000)
    try:
        with without_privileges(), pytest.raises(ConfigError, match="expected") as caught:
            load_rules(folder)
    finally:
        folder.chmod(0o755)
    assert str(caught.value).startswith(f"{folder}: ")


def test_a_file_that_may_not_be_read_is_a_mistake(public_folder: Path) -> None:
    """A file without permission to read it is an error that names it."""
    file = written(public_folder, default__yaml=DEFAULT) / "default.yaml"
    file.chmod(0o000)
    with without_privileges(), pytest.raises(ConfigError, match="expected") as caught:
        load_rules(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_an_api_key_written_by_mistake_is_not_repeated(tmp_path: Path) -> None:
    """A key that was put down in the clear does not end up in the log as well."""
    text = "tier: vip\ncallers:\n  - {id: acme, api_key: sk_live_51H8}\n"
    with pytest.raises(ConfigError, match="api_key") as caught:
        load_rules(written(tmp_path, vip__yaml=text))
    assert "sk_live_51H8" not in str(caught.value)


lines = st.lists(
    st.sampled_from(
        [
            "tier: vip",
            "rules:",
            "  - name: a",
            "    qps: 5",
            "    limits: [5/s]",
            "    key: [ip]",
            "callers:",
            "  - id: x",
            "    api_key: y",
            "- ",
            "  ",
            "{",
            "]",
            "? a",
            ": b",
            "&a",
            "*a",
            "!!set",
            "<<: *a",
            "1: 2",
            "true: x",
            "~: x",
            "'",
            "|",
            "[[",
            "1.5: {2: 3}",
        ]
    ),
    max_size=10,
).map("\n".join)


@given(st.one_of(lines, st.text(max_size=60), st.binary(max_size=60)))
def test_any_file_is_rules_or_a_mistake_fuzz(tmp_path: Path, text: str | bytes) -> None:
    """Whatever a file holds, it is a rule set or a ConfigError that names the file, and never another error."""
    file = tmp_path / "fuzz.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        assert load_rules(file).tiers
    except ConfigError as error:
        assert str(error).startswith(f"{file}")  # noqa: PT017 - any text may be right or wrong


def test_further_mistakes_are_notes_of_the_first(tmp_path: Path) -> None:
    """Whoever starts the service reads of all of them in its traceback; the error itself stays one line."""
    text = "rules:\n  - {name: a, qps: -1, qpm: -1}\n  - {name: b, qps: 5, cost: 6}\n"
    with pytest.raises(ConfigError) as caught:
        load_rules(written(tmp_path, rules__yaml=text))
    error, file = caught.value, tmp_path / "rules.yaml"
    assert str(error).startswith(f"{file}:2: rules[0].qps: ")
    assert [str(other).partition(": ")[2].partition(": ")[0] for other in error.others] == ["rules[0].qpm", "rules[1].cost"]
    assert error.__notes__ == [str(other) for other in error.others]
    assert (error.file, error.line, error.field) == (str(file), 2, ("rules", 0, "qps"))


def test_config_error_with_many_errors_has_few_notes(tmp_path: Path) -> None:
    """A traceback of a file made of mistakes can still be read."""
    with pytest.raises(ConfigError) as caught:
        load_rules(written(tmp_path, rules__yaml="rules:\n" + "  - {name: 5}\n" * 50))
    assert len(caught.value.others) == 49
    assert len(caught.value.__notes__) == 20
