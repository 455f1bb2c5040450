from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from limitgate import load_rules
from limitgate.errors import ConfigError
from tests.attacks.bombs import BOMBS

HOSTILE = [
    "!!python/object/apply:pathlib.Path.touch [{}]",
    "!!python/object/new:pathlib.Path [{}]",
    "!!python/name:os.system",
    "!!python/module:os",
    '!!python/object/apply:os.system ["touch {}"]',
    "!!python/object/apply:subprocess.check_output [[touch, {}]]",
    "!!python/object/apply:builtins.eval [\"open('{}', 'w')\"]",
    "!!python/object/new:type {{args: [a, [], {{}}]}}",
    '!<tag:yaml.org,2002:python/object/apply:os.system> ["touch {}"]',
    "!!python/tuple [1, 2]",
]


@pytest.mark.parametrize("bomb", [name for name, bomb in BOMBS.items() if len(bomb) < 10_000])
def test_a_yaml_bomb_is_a_mistake_like_any_other(tmp_path: Path, bomb: str) -> None:
    """It is a ConfigError of a few lines that names the file, however much it would become."""
    file = tmp_path / "rules.yaml"
    file.write_bytes(BOMBS[bomb].encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"rules\.yaml") as caught:
        load_rules(file)
    assert len(str(caught.value)) < 1000


def test_yaml_bombs_take_little_memory_and_time() -> None:
    """All of them together are refused within half a gigabyte and a minute of CPU."""
    command = [sys.executable, "-m", "tests.attacks.bombs"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("tag", HOSTILE)
@pytest.mark.parametrize("place", ["{}", "rules: {}", "rules: [{}]", "rules: [{{name: a, qps: {}}}]", "? {}\n: 1", "tier: {}"])
def test_no_code_runs_from_a_rule_file(tmp_path: Path, tag: str, place: str) -> None:
    """Tags that make objects of Python are refused, and nothing that they name has run."""
    touched = tmp_path / "touched"
    file = tmp_path / "rules.yaml"
    file.write_text(place.format(tag.format(touched)))
    with pytest.raises(ConfigError):
        load_rules(file)
    assert not touched.exists()


def test_a_file_without_end_is_a_mistake() -> None:
    """Of a file that is too long no more is read than shows that it is."""
    with pytest.raises(ConfigError, match="expected at most"):
        load_rules("/dev/zero")


def test_a_merged_rule_is_what_it_says(tmp_path: Path) -> None:
    """Merge keys work where they are harmless, and cannot bring in what a rule does not know."""
    file = tmp_path / "rules.yaml"
    file.write_text("rules:\n- &a {name: a, qps: 1}\n- {<<: *a, name: b}\n")
    assert [rule.name for rule in load_rules(file).tiers["default"]] == ["a", "b"]
    file.write_text("rules:\n- &a {name: a, qps: 1}\n- {<<: [*a, {surprise: 1}], name: b}\n")
    with pytest.raises(ConfigError, match="surprise"):
        load_rules(file)


@pytest.mark.parametrize("text", ["rules: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]", "{a: 1, b: 2, c: 3, d: 4, e: 5, f: 6}"])
def test_values_are_counted_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A file with too many values is given up when the first of them too many is read, not after all of them are built up."""
    monkeypatch.setattr("limitgate.rules.document.MAX_NODES", 5)
    file = tmp_path / "rules.yaml"
    file.write_text(f"{text[:-1]}, &unread{text[-1]}")
    with pytest.raises(ConfigError, match="more than 5 values"):
        load_rules(file)
