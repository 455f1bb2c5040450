"""The command `limitgate`: how it is started, what it says of itself, and its exit statuses."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

import limitgate
from limitgate.command import group
from limitgate.errors import ConfigError, StoreError
from tests.support.command_line import CliRunner

STARTS = {
    "limitgate": [str(Path(sys.executable).with_name("limitgate"))],
    "python -m limitgate": [sys.executable, "-m", "limitgate"],
}


def run(*words: str, start: str = "python -m limitgate") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STARTS[start], *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the command a verb that does what a test says."""

    def give(does: Any) -> CliRunner:
        module = SimpleNamespace(verb=click.Command("probe", callback=does))
        monkeypatch.setitem(group.VERBS, "probe", "Probe.")
        monkeypatch.setitem(sys.modules, "limitgate.command.verbs.probe", module)
        return CliRunner()

    return give


@pytest.mark.parametrize("verb", group.VERBS)
def test_numbers_out_of_range(verb: str) -> None:
    """Every numeric option refuses what is no finite number, or a wrong one, as wrong usage."""
    command = group.limitgate.get_command(click.Context(group.limitgate), verb)
    assert command is not None
    numeric = [each for each in command.params if isinstance(each.type, click.types.IntParamType | click.types.FloatParamType)]
    for option in numeric:
        for value in ("nan", "-inf", "inf", "-1", "1e9", *(["0"] if option.name == "timeout" else [])):
            result = CliRunner().invoke(group.limitgate, [verb, option.opts[0], value])
            assert (result.exit_code, f"Invalid value for '{option.opts[0]}'" in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("start", STARTS)
def test_it_says_what_it_does(start: str) -> None:
    """Both ways to start it are the same, and list every verb with a line."""
    helped, versioned = run("--help", start=start), run("--version", start=start)
    assert helped.returncode == versioned.returncode == 0
    assert all(name in helped.stdout and line in helped.stdout for name, line in group.VERBS.items())
    assert versioned.stdout == f"limitgate {version('limitgate')}\n"


@pytest.mark.parametrize("words", [["nonsense"], ["--nonsense"], []], ids=str)
def test_wrong_usage_exits_with_2(words: list[str]) -> None:
    """A verb or option that does not exist, or none at all."""
    assert run(*words).returncode == 2


@pytest.mark.parametrize(("error", "status"), [(ConfigError("a.yaml:1: wrong"), 1), (StoreError("no answer"), 3)])
def test_errors_are_a_line_and_a_status(verb: Any, error: Exception, status: int) -> None:
    """No traceback for what an operator can mend."""

    def does() -> None:
        raise error

    result = verb(does).invoke(group.limitgate, ["probe"])
    assert (result.exit_code, result.stdout, result.stderr) == (status, "", f"limitgate: {error}\n")


def test_warnings_of_the_service_are_told_unless_the_error_says_the_same(verb: Any) -> None:
    """One line about a store that does not answer is enough; what else is odd is told at the end."""
    log = logging.getLogger("limitgate.store")

    def warns() -> None:
        log.warning("odd: %s", "\x1b[31m")
        log.info("not odd")
        click.echo("found")

    def fails() -> None:
        log.error("LG022 %s rejects the login: %s", "Redis", "the password is wrong")
        log.error("LG024 %s and its URL disagree on TLS: %s", "Redis", "use rediss://")
        raise StoreError("no connection to Redis: the password is wrong")

    result = verb(warns).invoke(group.limitgate, ["probe"])
    assert (result.exit_code, result.output) == (0, "found\nodd: \\x1b[31m\n")
    result = verb(fails).invoke(group.limitgate, ["probe"])
    assert result.exit_code == 3
    assert result.output.splitlines() == [
        "LG024 Redis and its URL disagree on TLS: use rediss://",
        "limitgate: no connection to Redis: the password is wrong",
    ]


def test_every_mistake_is_a_line(verb: Any) -> None:
    """Of a verb that reads rules, those that were found with the first, too."""

    def does() -> None:
        raise ConfigError.first_of([ConfigError("a.yaml:1: wrong"), ConfigError("a.yaml:2: wrong, too")])

    result = verb(does).invoke(group.limitgate, ["probe"])
    assert (result.exit_code, result.stderr) == (1, "limitgate: a.yaml:1: wrong\nlimitgate: a.yaml:2: wrong, too\n")


@pytest.mark.parametrize("name", group.VERBS)
def test_every_verb_is_helped_by_an_example(name: str) -> None:
    """With how it is called, which is a verb that there is."""
    result = CliRunner().invoke(group.limitgate, [name, "--help"], terminal_width=200)
    assert result.exit_code == 0
    assert f"For example: limitgate {name}" in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", group.VERBS)
def test_every_verb_has_a_form_for_programs(name: str) -> None:
    """What prints facts has ``--json``; a schema is JSON anyway, and a server prints none."""
    command = group.limitgate.get_command(click.Context(group.limitgate), name)
    assert command is not None
    without = {"schema", "serve", "exporter", "page"}
    assert name in without or "--json" in [option for each in command.params for option in each.opts]


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    """As `head` does when it has seen enough."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "limitgate", "schema"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")  # 128 + SIGPIPE, as of any tool


@pytest.mark.parametrize("words", ["schema", "check --json config/", "replay LOG --rules config/"])
def test_a_disk_that_is_full_is_a_line(words: str, tmp_path: Path) -> None:
    """What stands on it is no whole answer."""
    (tmp_path / "LOG").write_text('203.0.113.7 - - [28/Nov/2026:10:05:03 +0000] "GET /mine HTTP/1.1" 200 1\n')
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "limitgate", *words.replace("LOG", str(tmp_path / "LOG")).split()]
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert process.returncode == 1
    assert process.stderr == "Error: the output cannot be written: No space left on device\n"


def test_an_interruption_finds_nothing(verb: Any) -> None:
    """Ctrl-C ends a verb with the status that shells give it."""

    def does() -> None:
        raise KeyboardInterrupt

    result = verb(does).invoke(group.limitgate, ["probe"])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "\n")


def test_a_shell_completes_verbs_and_options() -> None:
    """By click's own means, which docs/command.md says how to switch on."""
    given = {"_LIMITGATE_COMPLETE": "bash_complete", "COMP_CWORD": "1", "COMP_WORDS": "limitgate ch"}
    process = subprocess.run(
        STARTS["limitgate"], env={**os.environ, **given}, capture_output=True, text=True, timeout=60, check=True
    )
    assert "check" in process.stdout.split(",")[1]


@pytest.mark.parametrize("package", ["click", "rich", "packaging"])
def test_without_its_extra_it_says_what_to_install(package: str) -> None:
    """One line, no traceback, before a verb changes anything. click comes with uvicorn, rich does not."""
    code = f"""if True:
        import sys
        sys.modules[{package!r}] = None
        from limitgate.command import main
        for words in [], *([verb] for verb in sys.argv[1:]):
            sys.argv[1:] = words
            try:
                main()
            except SystemExit as end:
                print(end.code)
    """
    verbs = list(group.VERBS)
    result = subprocess.run([sys.executable, "-c", code, *verbs], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "2\n" * (1 + len(verbs))
    told = f"limitgate: {package} is not installed, expected: pip install 'limitgate[cli]'\n"
    assert result.stderr == told * (1 + len(verbs))


@pytest.mark.parametrize(
    ("words", "package", "brought_by"),
    [
        (("serve",), "uvicorn", "serve"),
        (("serve", "--grpc", "9383"), "grpc", "envoy"),
        (("page",), "uvicorn", "page"),
        (("exporter",), "prometheus_client", "prometheus"),
    ],
)
def test_verbs_with_an_extra_of_their_own_name_it(words: tuple[str, ...], package: str, brought_by: str) -> None:
    """Exit status 2, and what to install."""
    program = f"import sys; sys.modules[{package!r}] = None; from limitgate.command import main; main()"
    command = [sys.executable, "-c", program, *words, "--store", "redis://localhost:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"Error: {package} is not installed, expected: pip install 'limitgate[{brought_by}]'\n" in done.stderr


def test_it_starts_without_what_a_verb_may_need() -> None:
    """Redis' client, asyncio, pydantic and rich take longer to import than the command may take to start."""
    code = "import sys, limitgate.command.group; print(*{'redis', 'pydantic', 'rich', 'asyncio'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "\n"


@pytest.mark.parametrize("words", ["check config/", "explain GET /api/hello --rules config/", "replay LOG --rules config/"])
def test_verbs_that_ask_no_store_need_no_client_of_redis(words: str, tmp_path: Path) -> None:
    """Nor the SDK of OpenTelemetry, which it imports where that is installed: half of the time in which they start."""
    (tmp_path / "LOG").write_text("")
    words = words.replace("LOG", str(tmp_path / "LOG"))
    code = f"import sys; from limitgate.command.group import limitgate; limitgate({words.split()}, standalone_mode=False)"
    code += "; print({'redis', 'opentelemetry'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.endswith("\nset()\n")


def test_rules_without_tests_are_checked_without_a_gate(tmp_path: Path) -> None:
    """Nor what makes its options and goes on in event loops: a fifth of the time that ``check`` takes."""
    (tmp_path / "rules.yaml").write_text("rules: [{name: api, limits: [5/minute], adaptive: true, max_delay: 2}]")
    words = ["check", str(tmp_path)]
    code = f"import sys; from limitgate.command.group import limitgate; limitgate({words}, standalone_mode=False)"
    code += "; print({'asyncio', 'pydantic_settings', 'rich', 'limitgate.gate', 'limitgate.stores'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "no errors" in result.stdout
    assert result.stdout.endswith("\nset()\n")


@pytest.mark.parametrize("verb", ["status", "top"])
def test_verbs_on_a_store_start_without_settings(verb: str) -> None:
    """Nor pydantic, which makes them, nor what shows a live view: half of the time in which they start."""
    words = [verb, "--store", "redis://127.0.0.1:1"]
    code = f"import sys; from limitgate.command.group import limitgate; limitgate({words}, standalone_mode=False)"
    code += "; print({'pydantic', 'rich', 'opentelemetry.sdk', 'limitgate.rules', 'limitgate.gate.gate'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "cannot reach Redis" in result.stderr
    assert result.stdout == "set()\n"


@pytest.mark.parametrize(
    ("variables", "words", "told"),
    [
        ({"LIMITGATE_KEY_PREFIX": "x" * 65}, ["--store", "redis://127.0.0.1:1"], "at most 64 characters"),
        ({}, ["--store", "redis://127.0.0.1:1", "--key-prefix", ""], "expected text that is not empty"),
        ({"limitgate_store": "redis://127.0.0.1:1"}, [], "cannot reach Redis"),
        ({"LIMITGATE_ENV_FILE": "service.env"}, [], "cannot reach Redis"),
        ({"LIMITGATE_ENV_FILE": "other.env"}, ["--store", "redis://127.0.0.1:1"], "'other.env' is not a file"),
        ({}, [], "Missing option '--store'"),
    ],
)
def test_where_a_verb_finds_store_and_prefix(
    variables: dict[str, str], words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIMITGATE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "service.env").write_text("LIMITGATE_STORE=redis://127.0.0.1:1")
    assert told in CliRunner().invoke(group.limitgate, ["status", *words], env=variables).stderr


def test_a_misspelt_verb_is_told_with_the_one_that_is() -> None:
    result = CliRunner().invoke(group.limitgate, ["chek", "config/"])
    assert (result.exit_code, "No such command 'chek', did you mean 'check'?" in result.stderr) == (2, True)


@pytest.mark.parametrize(("name", "home"), limitgate._ELSEWHERE.items())
def test_a_name_of_an_extra_is_told_with_its_module(name: str, home: str) -> None:
    """It is not in the package itself, but there."""
    with pytest.raises(ImportError, match=f"expected: from limitgate.{home} import {name}$"):
        getattr(limitgate, name)
    spec = find_spec(f"limitgate.{home}")  # which needs no settings of Django
    assert spec is not None
    assert re.search(rf"\b{name}\b", Path(str(spec.origin)).read_text())


def test_every_public_name_is_there() -> None:
    """Public names are imported when they are asked for; what is none is an `AttributeError`."""
    assert set(limitgate.__all__) == set(limitgate._HOMES) <= set(dir(limitgate))
    assert all(getattr(limitgate, name) is not None for name in limitgate.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = limitgate.nonsense
