"""Runs the tests of rule files through a gate on a simulated clock, without a store."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import ceil, inf
from typing import Any
from urllib.parse import unquote

from limitgate.command.output import logs_from
from limitgate.errors import Field
from limitgate.gate.admission import Admission
from limitgate.gate.offline import offline_gate
from limitgate.http.request import DescribedRequest
from limitgate.rules.document import Document
from limitgate.rules.files import Given, RuleFile, RuleFiles
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import GateSettings
from limitgate.stores import MemoryStore

BEGINNING = 1_767_225_600
"""A Thursday on which windows of every length start."""
_SECOND = 1_000_000
_CLOSE = 0.001
"""Tolerance in seconds."""


Failure = tuple[Document, Field, str]


def failures(read: RuleFiles) -> Iterator[Failure]:
    """Yield ``(document, field, message)`` for each failed expectation."""
    settings = GateSettings()
    with logs_from(logging.CRITICAL):  # the review reports what a gate logs about rules, with file and line
        for file in read.files:
            if file.tests:
                yield from _failures_in(file, read.rules, settings)


def _failures_in(file: RuleFile, rules: RuleSet, settings: GateSettings) -> Iterator[Failure]:
    bench = _Bench(rules, settings)
    for place, test in file.tests.items():
        answer = bench.answer(test.given)
        for name in (name for name in type(test.expect).model_fields if name in test.expect.model_fields_set):
            expected, actual = getattr(test.expect, name), answer[name]
            if not _fits(expected, actual):
                whole = ", ".join(f"{name}: {_shown(value)}" for name, value in answer.items())
                message = f"expected {_shown(expected)}, got {_shown(actual)}, in the answer {{{whole}}}"
                yield file.document, ("tests", place, "expect", name), message


class _Bench:
    """A gate for the tests of one file. Requests stay in flight until the clock advances."""

    def __init__(self, rules: RuleSet, settings: GateSettings) -> None:
        self._gate = offline_gate(rules, MemoryStore(lambda: self._now), settings)
        self._now = BEGINNING * _SECOND
        self._in_flight: list[Admission] = []

    def answer(self, given: Given) -> dict[str, Any]:
        if given.at is not None:
            self._go_on_to(BEGINNING * _SECOND + round(given.at * _SECOND))
        headers = {name.lower(): value for name, value in given.headers.items()}
        request = DescribedRequest(given.method.upper(), unquote(given.path.partition("?")[0]), given.ip, headers)
        admission = self._gate.check(request, waits=False)
        self._in_flight.append(admission)
        decision = admission.decision
        return {
            "allowed": admission.refusal is None,
            "rule": None if decision is None else decision.rule,
            "remaining": None if decision is None else decision.remaining,
            "tier": self._gate.rules.planner.subject(request, None).tier,
            "retry_after": 0.0 if decision is None else decision.retry_after if decision.retry_after < inf else None,
        }

    def _go_on_to(self, now: int) -> None:
        if now > self._now:
            for admission in self._in_flight:
                if admission.end():
                    self._gate.refunds.settle(admission)
            self._in_flight.clear()
            self._now = now


def _fits(expected: object, actual: object) -> bool:
    if isinstance(expected, float) and isinstance(actual, float):
        return expected == ceil(actual) if expected.is_integer() else abs(expected - actual) < _CLOSE
    return expected == actual or (expected == inf and actual is None)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
