"""The JSON Schema of rule files: as the code has them, and never stricter than what reads them."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st
from jsonschema import Draft7Validator

from handbook import schema
from limitgate import Rule, load_rules
from limitgate.errors import ConfigError
from limitgate.limits.limit import ABBREVIATIONS, SECONDS, limit_of_rule
from limitgate.rules.document import Document
from tests.rules.test_files import DEFAULT, MISTAKES, VIP
from tests.support.cases import case
from tests.support.markdown import ROOT

SCHEMA = json.loads(schema.FILE.read_text())
VALIDATOR = Draft7Validator(SCHEMA)
SHIPPED = sorted((ROOT / "config").glob("*.yaml"))


def accepts(data: Any) -> bool:
    return bool(VALIDATOR.is_valid(data))


def files_in_docs() -> list[str]:
    """The rule files that pages show."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"```ya?ml\n(.*?)```", page.read_text(), re.DOTALL)]
    return [block for block in blocks if re.search(r"^(rules|callers|tests):", block, re.MULTILINE)]


def test_the_schema_is_as_the_code_has_it() -> None:
    """limitgate/rules/schema.json is what ``make docs`` writes, and a schema of the draft that it names."""
    assert schema.FILE.read_text() == schema.text()
    Draft7Validator.check_schema(SCHEMA)


def test_every_field_is_there_with_a_description() -> None:
    """An editor completes all of them and says what they are; nothing else is completed."""
    assert all(set(forms) == set(model.model_fields) for model, forms in schema.FORMS.items())
    rule = SCHEMA["definitions"]["rule"]["properties"]
    assert set(rule) == set(Rule.model_fields)
    assert all(field["description"].endswith((".", ")")) for field in rule.values())
    assert "``" not in json.dumps(SCHEMA)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_editors_find_the_schema_of_the_files_that_we_ship(file: Path) -> None:
    """By their first line, in a checkout; and they are right by it."""
    found = re.match(r"# yaml-language-server: \$schema=(\S+)\n", file.read_text())
    assert found is not None
    assert (file.parent / found[1]).resolve() == schema.FILE.resolve()
    assert accepts(yaml.safe_load(file.read_text()))


def test_files_of_the_tests_and_of_the_pages_are_accepted() -> None:
    """Whatever we tell people to write."""
    shown = files_in_docs()
    assert len(shown) >= 10
    for text in (DEFAULT, VIP, *shown):
        assert [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))] == []


def test_what_the_schema_refuses_is_a_mistake(tmp_path: Path) -> None:
    """And most mistakes are underlined while they are typed, by the line that the command names."""
    file = tmp_path / "rules.yaml"
    for text, _ in MISTAKES:
        with suppress(yaml.YAMLError):
            if not accepts(yaml.safe_load(text)):
                file.write_text(text)
                with case(text), pytest.raises(ConfigError):
                    load_rules(file)


@pytest.mark.parametrize(
    "rule",
    [
        {"qps": 5},
        {"name": "a b", "qps": 5},
        {"name": "a"},
        {"name": "a", "qps": -1},
        {"name": "a", "qps": True},
        {"name": "a", "qps": 5, "burts": 3},
        {"name": "a", "limits": ["often"]},
        {"name": "a", "limits": ["-1/s"]},
        {"name": "a", "limits": ["5/fortnight"]},
        {"name": "a", "limits": [{"limit": "5/s", "brust": 3}]},
        {"name": "a", "limits": "5/s"},
        {"name": "a", "qps": 5, "path": "api"},
        {"name": "a", "qps": 5, "key": ["cookie"]},
        {"name": "a", "qps": 5, "on_error": "shut"},
        {"name": "a", "qps": 5, "algorithm": "magic"},
        {"name": "a", "qps": 5, "when": "app:is_search"},
        {"name": "a", "qps": 5, "charge_if": {"status": ["6xx"]}},
        {"name": "a", "qps": 5, "charge_if": {}},
        {"name": "a", "qps": 5, "max_delay": "soon"},
        {"name": "a", "qps": 5, "max_delay": 61},
        {"name": "a", "qps": 5, "reserve": "half"},
        {"name": "a", "adaptive": 7},
        {"name": "a", "adaptive": {"min": 0}},
        {"name": "a", "adaptive": {"most": 5}},
        {"name": "a", "adaptive": {"tolerance": 1}},
        {"name": "a", "adaptive": {"delay": 0}},
        {"name": "a", "adaptive": {"delay": 10.5}},
        {"name": "a", "qps": 5, "ban": True},
        {"name": "a", "qps": 5, "ban": {"after": 20, "within": "10m"}},
        {"name": "a", "qps": 5, "ban": {"after": 0, "within": "10m", "for": "1h"}},
        {"name": "a", "qps": 5, "ban": {"after": 2.5, "within": "10m", "for": "1h"}},
        {"name": "a", "qps": 5, "ban": {"after": 20, "within": 0, "for": "1h"}},
        {"name": "a", "qps": 5, "ban": {"after": 20, "within": "10m", "for": "never"}},
        {"name": "a", "qps": 5, "ban": {"after": 20, "within": "10m", "for": "1h", "growing": 0.5}},
        {"name": "a", "qps": 5, "ban": {"after": 20, "within": "10m", "for": "1h", "longest": "1d"}},
    ],
)
def test_a_mistake_in_one_field_is_underlined(rule: dict[str, Any]) -> None:
    """Wrong names, types, limits and choices."""
    assert not accepts({"rules": [rule]})


words = ["", "*", "5/s", "10/minute burst 3", "20 at once", "2s", "20%", "open", "local", "/a", "/a/**", "/{x}", "gcra"]
more_words = ["fixed_window", "utc", "first-request", "high", "low", "message", "vip", "default", "a"]
limits = [["5/s"], ["5/s", "9 per 2 MINUTES"], ["20 at once"], ["7/d", {"limit": "9/s", "lease": 2}]]
options = [{"burst": 9}, {"algorithm": "sliding_log"}, {"borrow": True}, {"warm_up": "3s"}, {"lease": 0, "align": None}]
lists = [["ip"], ["path", "api_key | ip"], ["header:X-A|caller"], ["GET", "post"], ["/a", "/b/**"], ["10.0.0.0/8"], ["*"], []]
mappings = [{}, {"status": [401, "5xx"]}, {"status_not": [404]}, {"status": [], "status_not": [500]}]
values = (
    st.sampled_from([None, True, False, 0, 1, 5, 0.2, 2.5])
    | st.sampled_from([*words, *more_words])
    | st.sampled_from([*limits, *([{"limit": "5/s", **option}] for option in options), *lists, ["other"], *mappings])
)
fields = st.dictionaries(st.sampled_from(sorted(Rule.model_fields)), values, max_size=3)


@given(fields, st.sampled_from([{"qps": 5}, {"limits": ["100/hour"]}, {"exempt": True}, {"concurrency": 3}, {}]))
def test_the_schema_accepts_whatever_the_service_accepts_property(
    tmp_path: Path, fields: dict[str, Any], base: dict[str, Any]
) -> None:
    """Editors never underline what is right."""
    data = {"rules": [{"name": "other", "qps": 1}, {"name": "r", **base, **fields}]}
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(data))
    try:
        load_rules(file)
    except ConfigError:
        return
    assert [error.message for error in VALIDATOR.iter_errors(Document(file).data)] == []


units = st.sampled_from([*SECONDS, *ABBREVIATIONS, *(f"{unit}s" for unit in (*SECONDS, *ABBREVIATIONS)), "month", ""])
texts = st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(["", " ", "\t"]),
    st.sampled_from(["5", "05", "0", "", "1.5", "-1"]),
    st.sampled_from(["/", " / ", " per ", "per", " PER ", " at once", " at  ONCE", "/per"]),
    st.sampled_from(["", "2", "15 ", "0 "]),
    units | units.map(str.upper) | units.map(str.title),
    st.sampled_from(["", " ", " burst 9", " BURST 9 ", " burst", "burst 9", " burst 0"]),
)


@given(texts)
def test_the_pattern_of_limits_is_that_of_limits_property(text: str) -> None:
    """In any spelling: letters of either case, blanks, plurals and abbreviations. A rule may say the algorithm for months."""
    try:
        limit_of_rule(text)
    except ConfigError:
        is_limit = False
    else:
        is_limit = True
    assert accepts({"rules": [{"name": "a", "limits": [text]}]}) is is_limit
