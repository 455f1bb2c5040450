"""What verbs print: nothing that stands in it is an order to a terminal, whoever has sent it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from limitgate.command.group import limitgate
from limitgate.command.output import print_json, print_table, say
from tests.support.command_line import CliRunner
from tests.support.redis_server import RedisServer

HOSTILE = "\x1b]0 title\x07\x1b[31mred\x9b1m\u202e"
"""Sets the title and the colour of a terminal, by 7 bits and by 8, and turns what follows."""
ENTRY = {"time": 1_800_000_000, "client": f"{HOSTILE}\nroot", "method": "GET", "path": f"/{HOSTILE}"}
RULES = "rules: [{name: api, key: ['header:X-Name', path, ip], qpm: 1}]"


def printed(verb: click.Command, *words: str) -> str:
    """As on a terminal, where click takes nothing out."""
    result = CliRunner().invoke(verb, words, color=True)
    assert result.exit_code in (0, 1), result.output
    return result.output


def is_harmless(text: str) -> bool:
    return text.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("show", "shown"),
    [
        (lambda: say(f"a {HOSTILE}", "b\nc"), "a \\x1b]0 title\\x07\\x1b[31mred\\x9b1m\\u202e\nb\\nc\n"),
        (lambda: say("of no encoding: \udcff"), "of no encoding: \\udcff\n"),
        (lambda: print_table(("Who", "Why"), [("two\nlines", "[red]")]), "Who         Why\ntwo\\nlines  [red]\n"),
        (lambda: print_json({"\x9b1m": "\u202e\udcff"}), '{\n  "\\u009b1m": "\\u202e\\udcff"\n}\n'),
    ],
)
def test_what_is_not_printable_is_escaped(show: Callable[[], None], shown: str) -> None:
    """In lines, in tables and in JSON, which means the same then."""
    assert printed(click.Command("show", callback=show)) == shown


@pytest.mark.parametrize("order", ["##[error]x", "##vso[task.setvariable variable=a]b", "##teamcity[x]", "a ###[group]x"])
def test_no_name_is_an_order_to_ci(order: str) -> None:
    """Of those that CI finds anywhere in a line; what is none is shown as it is."""

    def show() -> None:
        say(f"a {order}", "a ## [heading] #[x]")
        print_table(("Who", "Why"), [("::error::x", order), ("::1", " ::add-mask::y")])
        print_json([order])

    text = printed(click.Command("show", callback=show))
    assert not re.search(r"##[a-z]*\[", text)
    assert not [line for line in text.splitlines() if line.lstrip().startswith("::") and not line.startswith("::1 ")]
    assert "a ## [heading] #[x]\n" in text
    assert json.loads(text[text.rindex("[\n") :]) == [order]


def test_json_means_what_it_did() -> None:
    """Escapes of JSON stand for the same text, above 16 bits too."""
    value = {"path": HOSTILE, "tag": "\U000e0001", "letters": "naïve 限"}
    text = printed(click.Command("show", callback=lambda: print_json(value)))
    assert json.loads(text) == value
    assert "naïve 限" in text


@pytest.mark.parametrize("more", [[], ["--json"]], ids=str)
def test_a_log_and_a_request(more: list[str], tmp_path: Path) -> None:
    """Whatever a client has sent: its name and path in a log, and the path and headers of a request that is explained."""
    (tmp_path / "rules.yaml").write_text(RULES)
    log = tmp_path / "access.log"
    log.write_text((json.dumps(ENTRY) + "\n") * 3)
    rules = ["--rules", str(tmp_path / "rules.yaml"), *more]
    replayed = printed(limitgate, "replay", str(log), *rules)
    assert "title" in replayed
    assert is_harmless(replayed)
    compared = printed(limitgate, "replay", str(log), "--against", str(tmp_path / "rules.yaml"), *rules)
    assert is_harmless(compared)
    explained = printed(limitgate, "explain", "GET", f"/{HOSTILE}", "-H", f"X-Name: {HOSTILE}", *rules)
    assert "title" in explained
    assert is_harmless(explained)


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_rule_files(form: str, tmp_path: Path) -> None:
    """Names of files and of fields."""
    file = tmp_path / "\x1b[31mrules.yaml"
    file.write_text(
        'rules: [{name: api, qps: 5, "\\e[31mred": 1}]\ntests: [{given: {path: "/\\e[31mred"}, expect: {tier: "\\e"}}]'
    )
    checked = printed(limitgate, "check", str(file), "--format", form)
    assert "31mred" in checked
    assert is_harmless(checked)


def test_bans(redis_server: RedisServer) -> None:
    """The name of who is banned, and a reason that somebody else has written."""
    store = ["--store", redis_server.url, "--key-prefix", f"t{uuid.uuid4().hex}", "--timeout", "10"]
    assert is_harmless(printed(limitgate, "ban", HOSTILE, *store, "-y", "--reason", f"{HOSTILE}\nand nobody else"))
    for more in ([], ["--json"], ["--log"], ["--log", "--json"]):
        listed = printed(limitgate, "bans", *store, *more)
        assert "title" in listed
        assert is_harmless(listed)


FORGED = "x\n::error file=a::forged\r::warning::forged\x85::notice::forged\u2028::debug::forged"


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_no_name_forges_a_line(form: str, tmp_path: Path) -> None:
    """Names in files, of files and folders, and of clients begin no line, which may be an order to CI."""
    folder = tmp_path / FORGED.replace("/", "")
    folder.mkdir()
    name = json.dumps(FORGED)
    (folder / f"{FORGED}.yaml").write_text(
        f"rules: [{{name: api, qps: 5, {name}: 1, methods: [{name}]}}, {{name: {name}, qps: 5}}, {{name: b, qps: {name}}}]\n"
        f"callers: [{{id: {name}, api_key: {name}}}]"
    )
    (folder / "vip.yaml").write_text(f"tier: vip\nrules: [{{name: x, path: {name}, qps: 5, methods: [{name}]}}]\n")
    result = CliRunner().invoke(limitgate, ["check", str(folder), "--format", form])
    lines = [line for line in result.output.splitlines() if "forged" in line]
    assert lines
    own = ("::error file=/", "::warning file=/") if form == "github" else ()
    assert not [line for line in lines if line.strip().startswith("::") and not line.startswith(own or "\0")]


@pytest.mark.parametrize("file", ["::error::a.yaml", " ::error::a.yaml"])
def test_a_name_that_is_a_command_is_none(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the present folder begins a line."""
    monkeypatch.chdir(tmp_path)
    Path(file).write_text("rules: [{name: api, qps: 0}]")
    lines = CliRunner().invoke(limitgate, ["check", file]).output.splitlines()
    assert lines
    assert not [line for line in lines if line.strip().startswith("::")]


def test_errors_of_a_verb_forge_no_line(tmp_path: Path) -> None:
    """What was wrong with the words of a verb, or with the rules that they name, is one line each."""
    (tmp_path / "rules.yaml").write_text(f"rules: [{{name: api, qps: {json.dumps(FORGED)}}}]")
    for words in (
        ["explain", "GET", "/", "--rules", str(tmp_path / "rules.yaml")],
        ["explain", "--id", FORGED, "--app", FORGED],
    ):
        output = CliRunner().invoke(limitgate, words).output
        assert "forged" in output
        assert not [line for line in output.splitlines() if line.strip().startswith("::")]
