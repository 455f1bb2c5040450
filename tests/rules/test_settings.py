from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import example, given, strategies as st

from limitgate import AsyncLimiter, Limiter, LimitGate, LimitGateWSGI, MemoryStore, Rule, Settings
from limitgate.errors import ConfigError
from limitgate.gate.lifecycle.build import GateOptions
from limitgate.rules.settings import warn_about_environment


@pytest.fixture(autouse=True)
def _nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No .env, no server and no variables of servers around the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["app"])
    monkeypatch.delenv("WEB_CONCURRENCY", raising=False)
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)


def plain(value: Any) -> Any:
    """A setting's value without the wrapping that hides secrets."""
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


pytestmark = pytest.mark.usefixtures("default_timeout")


@pytest.fixture(autouse=True)
def _default_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIMITGATE_FLEET")


DEFAULTS = {
    "enabled": True,
    "rules": None,
    "store": "memory://",
    "on_error": "open",
    "processes": 1,
    "timeout": 0.1,
    "trusted_proxies": (),
    "forwarded_header": "x-forwarded-for",
    "ipv6_prefix": 64,
    "api_key_header": "x-api-key",
    "identify": None,
    "headers": ("x-ratelimit",),
    "header_names": {},
    "shadow": False,
    "strict": False,
    "on_denied": None,
    "new_buckets": 1000,
    "body_limit": 65_536,
    "require_store": False,
    "reload": 0.0,
    "names": "masked",
    "refusal_logs": 60,
    "key_prefix": "limitgate",
    "observers": (),
    "fleet": True,
    "secret": None,
}


def test_the_defaults_are_those_of_the_contract() -> None:
    """Without any setting, everything is as documented."""
    assert {name: getattr(Settings(), name) for name in Settings.model_fields} == DEFAULTS


# (option, as text, as passed by code, what it then is)
GIVEN = [
    ("enabled", "false", False, False),
    ("enabled", "0", False, False),
    ("enabled", "true", True, True),
    ("rules", "config/", "config/", "config/"),
    ("rules", "config/default.yaml", Path("config"), None),
    ("store", "redis://localhost:6379/0", "redis://localhost:6379/0", "redis://localhost:6379/0"),
    ("store", "redis+cluster://h1:1,h2:2", "redis+cluster://h1:1,h2:2", "redis+cluster://h1:1,h2:2"),
    ("on_error", "closed", "closed", "closed"),
    ("observers", "prometheus, opentelemetry", ["prometheus", "opentelemetry"], ("prometheus", "opentelemetry")),
    ("on_error", "local", "local", "local"),
    ("processes", "4", 4, 4),
    ("processes", "100000", 100_000, 100_000),
    ("timeout", "0.5", 0.5, 0.5),
    ("timeout", "2", 2, 2.0),
    ("trusted_proxies", "10.0.0.0/8", ["10.0.0.0/8"], ("10.0.0.0/8",)),
    ("trusted_proxies", "10.0.0.0/8, ::1 ,unix,", ("10.0.0.0/8", "::1", "unix"), ("10.0.0.0/8", "::1", "unix")),
    ("trusted_proxies", '["10.0.0.0/8", "::1"]', "10.0.0.0/8,::1", ("10.0.0.0/8", "::1")),
    ("trusted_proxies", ' [ "unix" ] ', '["unix"]', ("unix",)),
    ("trusted_proxies", "", [], ()),
    ("trusted_proxies", "[]", (), ()),
    ("forwarded_header", "forwarded", "forwarded", "forwarded"),
    ("ipv6_prefix", "48", 48, 48),
    ("ipv6_prefix", "32", 32, 32),
    ("ipv6_prefix", "128", 128, 128),
    ("api_key_header", "authorization", "authorization", "authorization"),
    ("identify", "json:dumps", json.dumps, json.dumps),
    ("identify", "json.dumps", "json:dumps", json.dumps),
    ("headers", "draft-11", ["draft-11"], ("draft-11",)),
    ("headers", "x-ratelimit,draft-11", ["x-ratelimit", "draft-11"], ("x-ratelimit", "draft-11")),
    ("headers", '["x-ratelimit-windows"]', ("x-ratelimit-windows",), ("x-ratelimit-windows",)),
    ("headers", "", (), ()),
    ("header_names", "X-RateLimit-Limit=Quota", {"X-RateLimit-Limit": "Quota"}, {"X-RateLimit-Limit": "Quota"}),
    ("header_names", '{"X-RateLimit-Limit": "Quota"}', "X-RateLimit-Limit=Quota,", {"X-RateLimit-Limit": "Quota"}),
    ("header_names", "", {}, {}),
    ("shadow", "true", True, True),
    ("strict", "true", True, True),
    ("on_denied", "json:loads", json.loads, json.loads),
    ("new_buckets", "50", 50, 50),
    ("new_buckets", "0", 0, 0),
    ("body_limit", "1000", 1000, 1000),
    ("key_prefix", "shop", "shop", "shop"),
    ("require_store", "true", True, True),
    ("reload", "1.5", 1.5, 1.5),
    ("reload", "0", 0, 0.0),
    ("names", "full", "full", "full"),
    ("names", "off", "off", "off"),
    ("fleet", "false", False, False),
    ("refusal_logs", "0", 0, 0),
    ("refusal_logs", "10000", 10_000, 10_000),
    ("secret", "0123456789abcdef", "0123456789abcdef", "0123456789abcdef"),
]


@pytest.mark.parametrize("door", ["keyword", "environment", "dotenv"])
@pytest.mark.parametrize("row", GIVEN, ids=[f"{row[0]}={row[1]}" for row in GIVEN])
def test_every_option_can_be_given_in_three_ways(
    door: str, row: tuple[str, str, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option comes from the code, from the environment or from .env, and means the same."""
    option, text, value, expected = row
    if door == "keyword":
        settings = Settings(**{option: value})
        expected = value if expected is None else expected
    else:
        expected = text if expected is None else expected
        if door == "environment":
            monkeypatch.setenv(f"LIMITGATE_{option.upper()}", text)
        else:
            (tmp_path / ".env").write_text(f"LIMITGATE_{option.upper()}='{text}'\n")
        settings = Settings()
    assert plain(getattr(settings, option)) == expected
    others = {name: getattr(settings, name) for name in Settings.model_fields if name != option}
    assert others == {name: default for name, default in DEFAULTS.items() if name != option}


def test_every_option_is_in_the_table() -> None:
    """No option is left out of the table above."""
    assert {row[0] for row in GIVEN} == set(Settings.model_fields) == set(DEFAULTS)


def test_the_code_beats_the_environment_which_beats_dotenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an option that is given in several ways, the one nearest to the code counts."""
    (tmp_path / ".env").write_text("LIMITGATE_KEY_PREFIX=dotenv\nLIMITGATE_TIMEOUT=3\nLIMITGATE_ON_ERROR=local\n")
    monkeypatch.setenv("LIMITGATE_KEY_PREFIX", "environment")
    monkeypatch.setenv("LIMITGATE_TIMEOUT", "2")
    settings = Settings(key_prefix="code")
    assert (settings.key_prefix, settings.timeout, settings.on_error) == ("code", 2.0, "local")


def test_a_keyword_that_is_the_default_still_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code says counts, even where it says what would have been anyway."""
    monkeypatch.setenv("LIMITGATE_SHADOW", "true")
    monkeypatch.setenv("LIMITGATE_TRUSTED_PROXIES", "10.0.0.0/8")
    settings = Settings(shadow=False, trusted_proxies=())
    assert (settings.shadow, settings.trusted_proxies) == (False, ())


@pytest.mark.parametrize("door", [LimitGate, LimitGateWSGI])
def test_middleware_reads_no_file_unasked(
    door: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .env that lies in the working folder is for `Settings`; middleware reads it where a variable names it."""
    (tmp_path / ".env").write_text("LIMITGATE_ENABLED=false\nLIMITGATE_ON_ERROR=panic\n")
    made = door(lambda *_: None, rules=[Rule("a", "1/s")])
    assert made.gate is not None
    with pytest.raises(ConfigError, match="on_error"):
        Settings()
    (tmp_path / "limits.env").write_text("LIMITGATE_ENABLED=false\n")
    monkeypatch.setenv("LIMITGATE_ENV_FILE", "limits.env")
    assert door(lambda *_: None, rules=[Rule("a", "1/s")]).gate is None
    assert Settings().enabled is False
    monkeypatch.setenv("LIMITGATE_ENV_FILE", "nowhere.env")
    for make in (lambda: door(lambda *_: None, rules=[]), Settings):
        with pytest.raises(ConfigError, match=r"LIMITGATE_ENV_FILE: 'nowhere.env' is not a file, expected"):
            make()
    assert not caplog.messages


def test_dotenv_of_others_is_tolerated(tmp_path: Path) -> None:
    """A .env that other programs share is read for ours alone."""
    (tmp_path / ".env").write_text(
        "# comment\n\nDATABASE_URL=postgres://x\nexport DEBUG=1\nRULES=/elsewhere\nstore=other\nTIMEOUT=never\n"
        'JSON={"a": 1}\nLIMITGATE_KEY_PREFIX=mine\nSECRET=short\nLIMITGATEX=1\n'
    )
    settings = Settings()
    assert {name: getattr(settings, name) for name in Settings.model_fields} == {**DEFAULTS, "key_prefix": "mine"}


def test_variables_of_others_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the prefix, a variable is not ours."""
    for name in Settings.model_fields:
        monkeypatch.setenv(name.upper(), "nonsense")
    assert {name: getattr(Settings(), name) for name in Settings.model_fields} == DEFAULTS


def test_an_object_is_taken_as_it_is() -> None:
    """A store, a list of rules and callables come through unchanged."""
    store, rules = MemoryStore(), [Rule("a", "1/s")]
    settings = Settings(store=store, rules=rules, identify=len, on_denied=print)
    assert settings.store is store
    assert settings.rules is rules
    assert (settings.identify, settings.on_denied) == (len, print)


@pytest.mark.parametrize("option", ["rule", "Rules", "trust", "limitgate_store", "env_file", "_env_file", "_secrets_dir"])
def test_an_unknown_option_is_a_type_error(option: str) -> None:
    """A misspelt keyword is refused like in any function, with the known ones."""
    with pytest.raises(TypeError, match=f"'{option}', .*expected one of .*trusted_proxies"):
        Settings(**{option: "x"})


@pytest.mark.parametrize("door", [LimitGate, LimitGateWSGI])
def test_both_doors_refuse_an_unknown_option(door: Any) -> None:
    """A misspelt keyword is refused where the middleware is added."""
    with pytest.raises(TypeError, match="'trusted_proxy'"):
        door(lambda *_: None, rules=[Rule("a", "1/s")], trusted_proxy="10.0.0.1")


# (option, as text or None if it can only come from code, as passed by code)
MISTAKES = [
    ("enabled", "maybe", "maybe"),
    ("on_error", "panic", "panic"),
    ("on_error", "OPEN", None),
    ("processes", "0", 0),
    ("processes", "-4", -4),
    ("processes", "100001", 100_001),
    ("processes", "1.5", 1.5),
    ("processes", "auto", None),
    ("timeout", "0", 0),
    ("timeout", "-1", -0.1),
    ("timeout", "61", 61),
    ("timeout", "soon", "soon"),
    ("timeout", "nan", float("nan")),
    ("timeout", "inf", float("inf")),
    ("timeout", "", None),
    ("trusted_proxies", "10.0.0.0/33", ["10.0.0.0/33"]),
    ("trusted_proxies", "10.0.0.1/8", ["10.0.0.1/8"]),
    ("trusted_proxies", "*", ["*"]),
    ("trusted_proxies", "fe80::1%eth0", ["fe80::%1/64"]),
    ("trusted_proxies", "nginx", ("10.0.0.1", "nginx")),
    ("trusted_proxies", "[5]", [5]),
    ("trusted_proxies", '["10.0.0.1"', '["10.0.0.1"'),
    ("trusted_proxies", '[{"a": 1}]', 5),
    ("ipv6_prefix", "31", 31),
    ("ipv6_prefix", "129", 129),
    ("ipv6_prefix", "/64", "/64"),
    ("ipv6_prefix", "64.5", 64.5),
    ("forwarded_header", "", ""),
    ("api_key_header", "", ""),
    ("headers", "draft-12", ["draft-12"]),
    ("headers", "x-ratelimit draft-11", ["X-RateLimit"]),
    ("headers", "true", [True]),
    ("headers", "draft-11,x-ratelimit,draft-11", ("x-ratelimit", "x-ratelimit")),
    ("identify", "no.such.module:f", "no.such.module:f"),
    ("identify", "json:nothing", "json:nothing"),
    ("identify", "json:__name__", 5),
    ("identify", "dumps", []),
    ("identify", ".", "."),
    ("identify", ".json:dumps", ".json:dumps"),
    ("on_denied", "no.such.module:f", 5),
    ("shadow", "perhaps", 2),
    ("strict", "perhaps", 2),
    ("require_store", "perhaps", 2),
    ("reload", "-1", -1),
    ("reload", "0.001", 0.001),
    ("reload", "inf", float("nan")),
    ("names", "some", "none"),
    ("refusal_logs", "-1", 10_001),
    ("new_buckets", "-1", -1),
    ("new_buckets", "many", "many"),
    ("body_limit", "0", 0),
    ("body_limit", "1048577", 1_048_577),
    ("key_prefix", "", ""),
    ("key_prefix", "x" * 65, "x" * 65),
    ("secret", "short", "short"),
    ("secret", "x" * 65, "\u00e9" * 33),
]


@pytest.mark.parametrize(("option", "text", "value"), MISTAKES)
def test_option_with_a_mistake_raises_config_error(option: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the option and says what would have been right, from the code as from the environment."""
    if value is not None:
        with pytest.raises(ConfigError, match=option):
            Settings(**{option: value})
    monkeypatch.setenv(f"LIMITGATE_{option.upper()}", text)
    with pytest.raises(ConfigError, match="expected") as caught:
        Settings()
    assert option in str(caught.value)


@pytest.mark.parametrize("secret", ["tooshort", "much-too-long-" * 10, 1234567])
def test_a_secret_is_never_repeated(secret: Any) -> None:
    """A secret appears neither in an error nor where settings are printed."""
    with pytest.raises(ConfigError) as caught:
        Settings(secret=secret)
    assert str(secret) not in "".join(traceback.format_exception(caught.value))
    assert "0123456789abcdef" not in repr(Settings(secret="0123456789abcdef"))


def test_a_password_is_never_repeated() -> None:
    """That of a store's URL is neither where settings are printed nor in what led to an error about something else."""
    url = "redis://:s3cret@localhost/0"
    assert "s3cret" not in repr(Settings(store=url))
    with pytest.raises(ConfigError) as caught:
        Settings(store=url, timeout=-1)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@given(
    st.dictionaries(st.sampled_from(sorted(DEFAULTS)), st.one_of(st.none(), st.text(max_size=9), st.integers(), st.floats()))
)
@example({"identify": "."})
def test_any_options_are_settings_or_a_mistake_fuzz(options: dict[str, Any]) -> None:
    """Whatever is given for an option, it is a setting or a ConfigError, and never another error."""
    with suppress(ConfigError):
        Settings(**options)


def test_settings_cannot_be_changed() -> None:
    """What was checked at start-up stays as it was."""
    with pytest.raises(ValueError, match="frozen"):
        Settings().timeout = 5


def test_the_doors_take_exactly_the_settings() -> None:
    """The options that type checkers know of are those that there are."""
    assert set(get_type_hints(GateOptions)) == set(Settings.model_fields)
    assert GateOptions.__required_keys__ == frozenset()


def warnings_for(caplog: pytest.LogCaptureFixture, store: str = "memory://") -> list[str]:
    """What is logged when a gate on this store is built."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "limitgate"):
        _made = LimitGate(lambda *_: None, rules=[Rule("a", "1/s")], store=store)
    assert all(record.levelno == logging.WARNING and record.name == "limitgate" for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_settings_without_problems_log_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every known setting in the environment passes without a word."""
    for name in Settings.model_fields:
        monkeypatch.setenv(f"LIMITGATE_{name.upper()}", "x")
    monkeypatch.setenv("LIMITGATE", "x")
    warn_about_environment()
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["LIMITGATE_TRUSTED_PROXY", "LIMITGATE_STORES", "LIMITGATE_"])
def test_an_unknown_variable_is_pointed_out(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt variable is no reason not to start, but it is said once, without its value."""
    monkeypatch.setenv(name, "hush")
    (warning,) = warnings_for(caplog)
    assert name in warning
    assert "hush" not in warning


def test_an_unknown_entry_of_ours_in_dotenv_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt setting in a file of variables is said like one in the environment, others' entries are not."""
    (tmp_path / ".env").write_text("DEBUG=1\nLIMITGATE_TRUSTED_PROXY=10.0.0.1\nLIMITGATE_STORE=memory://\n")
    monkeypatch.setenv("LIMITGATE_ENV_FILE", ".env")
    with caplog.at_level(logging.WARNING, "limitgate"):
        _made = LimitGateWSGI(lambda *_: [], rules=[Rule("a", "1/s")])  # one that is dropped is told of
    assert ["LIMITGATE_TRUSTED_PROXY" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("arguments", "concurrency", "workers"),
    [
        (["uvicorn", "app:app", "--workers", "4"], None, 4),
        (["uvicorn", "--workers", "4", "app:app"], None, 4),
        (["uvicorn", "app:app", "--workers=4"], None, 4),
        (["gunicorn", "-w", "4", "app:app"], None, 4),
        (["gunicorn", "-w4", "app:app"], None, 4),
        (["gunicorn", "app:app"], "4", 4),
        (["gunicorn", "-w", "3", "app:app"], "2", 3),
        (["uvicorn", "--workers", "1", "--workers", "16"], None, 16),
        (["uvicorn", "app:app"], None, None),
        (["uvicorn", "app:app"], "1", None),
        (["uvicorn", "app:app"], "", None),
        (["uvicorn", "app:app"], "auto", None),
        (["uvicorn", "app:app", "--workers", "1"], None, None),
        (["uvicorn", "app:app", "--workers"], None, None),
        (["uvicorn", "app:app", "--workers", "many"], None, None),
        (["uvicorn", "app:app", "--workers=-4"], None, None),
        (["uvicorn", "app:app", "--port", "8000"], None, None),
        (["uvicorn", "app:app", "--ws-max-size", "16"], None, None),
        (["uvicorn", "app:app", "--workers=\u00b2"], None, None),
        (["celery", "--workers-max=4"], None, None),
        ([], None, None),
    ],
)
def test_memory_store_with_several_workers_is_logged(
    arguments: list[str],
    concurrency: str | None,
    workers: int | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the server was told to start several processes, each would limit by itself, and that is said."""
    monkeypatch.setattr(sys, "argv", arguments)
    if concurrency is not None:
        monkeypatch.setenv("WEB_CONCURRENCY", concurrency)
    found = warnings_for(caplog)
    assert len(found) == (workers is not None)
    assert all(f"{workers} workers" in warning and "memory://" in warning for warning in found)
    assert warnings_for(caplog, "redis://localhost") == []


def test_workers_in_gunicorn_s_variable_are_pointed_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes options as the command line does."""
    monkeypatch.setenv("GUNICORN_CMD_ARGS", "--workers=3 --forwarded-allow-ips='*'")
    assert [warning.split(" with")[0] for warning in warnings_for(caplog)][1:] == ["LG001 3 workers"]
    assert warnings_for(caplog)[0].startswith("LG002")


@pytest.mark.parametrize(("value", "warns"), [("*", True), ("127.0.0.1", False), ("10.0.0.0/8,::1", False), ("", False)])
@pytest.mark.parametrize("is_option", [False, True])
def test_server_that_trusts_every_proxy_is_logged(
    value: str, warns: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, is_option: bool
) -> None:
    """By an option or a variable of the server every client chooses its address, and that is reported."""
    monkeypatch.setattr(sys, "argv", ["uvicorn", "app:app", *(["--forwarded-allow-ips", value] if is_option else [])])
    if not is_option:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", value)
    assert any(warning.startswith("LG002") for warning in warnings_for(caplog)) is warns


@pytest.mark.parametrize("door", [LimitGate, LimitGateWSGI])
def test_middleware_creation_logs_suspicious_settings(
    door: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is odd is said when the middleware is built, and not at all where it is switched off."""
    monkeypatch.setenv("LIMITGATE_STOER", "x")
    monkeypatch.setattr(sys, "argv", ["uvicorn", "--workers", "2"])
    with caplog.at_level(logging.WARNING, "limitgate"):
        _made = door(lambda *_: None, rules=[Rule("a", "1/s")])  # one that is dropped is told of
        assert len(caplog.records) == 2
        caplog.clear()
        door(lambda *_: None, enabled=False)
        assert caplog.records == []


def test_identify_from_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import string in the environment is the callable that tells who asks."""
    monkeypatch.setenv("LIMITGATE_IDENTIFY", f"{__name__}:everybody_is_vip")
    monkeypatch.setenv("LIMITGATE_HEADERS", "x-ratelimit")
    monkeypatch.setenv("LIMITGATE_STORE", "memory://")
    sent: list[tuple[str, str]] = []

    def app(environ, start_response) -> list[bytes]:
        start_response("200 OK", [])
        return []

    def start_response(_: str, headers: list[tuple[str, str]]) -> None:
        sent.extend(headers)

    gate = LimitGateWSGI(app, rules=[Rule("a", "1/s"), Rule("a", "7/s", tier="vip")])
    gate({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"}, start_response)
    assert ("X-RateLimit-Limit", "7") in sent


def everybody_is_vip(_: object) -> Any:
    from limitgate import Caller

    return Caller("somebody", "vip")


@pytest.mark.parametrize("door", [LimitGate, LimitGateWSGI])
def test_rules_must_come_from_somewhere(door: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rules there is no gate, unless it is switched off; LIMITGATE_RULES will do."""
    with pytest.raises(ConfigError, match=r"rules.* expected .*LIMITGATE_RULES"):
        door(lambda *_: None)
    monkeypatch.setenv("LIMITGATE_ENABLED", "false")
    door(lambda *_: None)
    monkeypatch.setenv("LIMITGATE_ENABLED", "true")
    (tmp_path / "rules.yaml").write_text("rules: [{name: a, qps: 1}]")
    monkeypatch.setenv("LIMITGATE_RULES", "rules.yaml")
    door(lambda *_: None)


@pytest.mark.parametrize("rules", [5, [5], ["config/"], [Rule("a", "1/s"), None], Rule("a", "1/s"), {"a": 1}, {}])
def test_rules_of_another_kind_are_a_mistake(rules: Any) -> None:
    """Rules are a path, a list of rules or a rule set; anything else is said at start."""
    with pytest.raises(ConfigError, match="expected"):
        LimitGateWSGI(lambda *_: [], rules=rules)


def test_warnings_are_seen_where_no_logging_is_set_up() -> None:
    """Whoever serves with nothing configured still reads on stderr what will surprise them."""
    program = "from limitgate import LimitGate, Rule; LimitGate(None, rules=[Rule('all', '9/minute')])"
    environment = {**os.environ, "WEB_CONCURRENCY": "2"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stderr.startswith("LG001 2 workers with memory:// count separately")


@pytest.mark.parametrize("url", ["", "redis//x", "nosuch://x", "redis://host:99999999", "redis+cluster://"])
def test_a_store_of_the_environment_that_cannot_be_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable, as with other options; given in code it names the option."""
    monkeypatch.setenv("LIMITGATE_STORE", url)
    gates: list[Any] = [LimitGate, LimitGateWSGI]
    for gate in gates:
        with pytest.raises(ConfigError, match=r"^store: .*expected .*\(from the variable LIMITGATE_STORE\)$"):
            gate(print, rules=[])
        with pytest.raises(ConfigError, match=r"^store: .*expected ") as caught:
            gate(print, rules=[], store=url)
        assert "variable" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "wanted"), [("localhost", "loopback"), ("Local", "loopback"), ("lan", "private"), ("internal", "private")]
)
def test_lists_of_proxies_by_other_names(entry: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{wanted}'"):
        Settings(rules=[], trusted_proxies=[entry])


@pytest.mark.parametrize("entry", ["cloudfront", "CloudFront", "aws"])
def test_a_proxy_without_a_list_is_no_other_one(entry: str) -> None:
    """CloudFront's addresses are not Cloudflare's."""
    with pytest.raises(ConfigError, match=f"; LimitGate has no list of {entry}, so save its ranges to a file$"):
        Settings(rules=[], trusted_proxies=[entry])


def test_a_list_of_proxies_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As editors under Windows write it."""
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbf10.0.0.0/8\r\n")
    assert Settings(rules=[], trusted_proxies=[f"file:{tmp_path}/list"]).trusted_proxies


def test_credentials_are_an_option_of_a_store() -> None:
    with pytest.raises(TypeError, match=r"RedisStore\(url, credentials=\.\.\.\)"):
        Settings(rules=[], credentials=print)
    for limiter, store in ((Limiter, "Limiter(RedisStore"), (AsyncLimiter, "AsyncLimiter(AsyncRedisStore")):
        with pytest.raises(TypeError, match=re.escape(f"expected {store}(url, credentials=...))")):
            limiter("redis://localhost", credentials=print)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "name", ["Set-Cookie", "content-length", "Content-Type", "Location", "Retry-After", "Vary", "X-Frame-Options", "Connection"]
)
def test_a_header_with_a_meaning_is_no_name_for_a_rate_field(name: str) -> None:
    """The client or the server would act on it."""
    with pytest.raises(ConfigError, match="expected another name"):
        Settings(rules=[], header_names={"X-RateLimit-Limit": name})


def test_a_name_of_another_style() -> None:
    with pytest.raises(ConfigError, match="it is of the style draft-11, expected 'draft-11' in headers"):
        Settings(rules=[], header_names={"RateLimit": "X"})
