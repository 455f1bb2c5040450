"""Who observes is named or given; what is neither is a mistake that says what was expected."""

from __future__ import annotations

import subprocess
import sys

import pytest

from limitgate import AsyncLimiter, ConfigError, Limiter, LimitGate, LimitGateWSGI, Observer, Rule
from limitgate.observing.exporter import observers_of
from tests.support.observed import Recorder

RULES = [Rule("api", "5/minute")]
IMPORTED = """
import sys
from limitgate import LimitGate, Rule
LimitGate(None, rules=[Rule("api", "1/second")], observers=[{names}])
print(*sorted(sys.modules.keys() & {{"prometheus_client", "limitgate.prometheus", "limitgate.opentelemetry"}}))
"""


@pytest.mark.parametrize(("names", "imported"), [("", ""), ("'prometheus'", "limitgate.prometheus prometheus_client")])
def test_nothing_is_imported_for_one_that_is_not_used(names: str, imported: str) -> None:
    """A package is loaded where its observer is named, and nowhere else."""
    program = IMPORTED.format(names=names)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == imported


@pytest.mark.parametrize("make", [LimitGate, LimitGateWSGI])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["statsd"], "observers: 'statsd' is unknown, expected one of prometheus, opentelemetry"),
        ([Recorder], "is not an observer, expected one with the methods add, set and record"),
        ([object()], "is not an observer"),
    ],
)
def test_what_is_no_observer(make: type, wrong: list[object], message: str) -> None:
    """A name or an object that cannot observe is told when the gate is made."""
    with pytest.raises(ConfigError, match=message):
        make(None, rules=RULES, observers=wrong)


def test_the_variable_of_an_unknown_observer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMITGATE_OBSERVERS", "prom")
    with pytest.raises(ConfigError, match=r"^observers: 'prom' is unknown, .*\(from the variable LIMITGATE_OBSERVERS\)$"):
        LimitGate(None, rules=RULES)


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_limiters_take_the_same(kind: type) -> None:
    """A text of names is read as in an environment variable."""
    with pytest.raises(ConfigError, match="'statsd' is unknown"):
        kind("memory://", observers="prometheus, statsd")
    assert kind("memory://", observers=[Recorder()])


def test_a_missing_package_says_which_extra_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every module that needs an extra does."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "limitgate.prometheus", raising=False)
    with pytest.raises(ConfigError, match=r"observer 'prometheus': .*pip install 'limitgate\[prometheus\]'"):
        observers_of(["prometheus"])


def test_an_observer_given_twice_is_told_once() -> None:
    """Equal observers are one."""
    recorder = Recorder()
    assert observers_of([recorder, recorder]) == (recorder,)
    assert len(observers_of(["prometheus", "prometheus"])) == 1
    assert isinstance(recorder, Observer)


def test_the_environment_names_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    """LIMITGATE_OBSERVERS is a list as any other."""
    monkeypatch.setenv("LIMITGATE_OBSERVERS", "prometheus,statsd")
    with pytest.raises(ConfigError, match="'statsd' is unknown"):
        LimitGate(None, rules=RULES)
