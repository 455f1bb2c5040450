from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from starlette.applications import Starlette

from limitgate import LimitGate, Rule
from limitgate.http.request import Request
from tests.attacks import cpu
from tests.attacks.cpu import KINDS, SERVERS, Attack

MOST_STEPS = 40_000
"""Steps of Python's that a decision may take. The most that were found are 25,000; before anything was bounded 9,400,000."""
WIDE = 30.0
"""Times the milliseconds that are allowed: a machine may be slow and busy, but what grows with the input takes more."""


def steps(call: Callable[[], Any]) -> int:
    """How many steps of Python's a call takes: byte code instructions, of whatever duration, up to one beyond `MOST_STEPS`."""
    taken = 0

    def step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal taken
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        taken += event == "opcode"
        return step if taken <= MOST_STEPS else None

    before = sys.gettrace()
    sys.settrace(step)
    try:
        cpu.milliseconds(call, 1)
    finally:
        sys.settrace(before)
    return taken


@pytest.fixture(autouse=True, scope="module")
def _made() -> None:
    """What is found out once, such as tables of routes, is no part of a request's cost."""
    for site in cpu.sites():
        cpu.milliseconds(cpu.call_of(Attack("path", b"/", b"a", b"", 10), "gunicorn", site), 1)
        cpu.milliseconds(cpu.call_of(Attack("query", b"", b"a&", b"", 10), "uvicorn, httptools", site), 1)


def inputs(server: str, kind: str, mutations: int) -> list[tuple[str, Attack]]:
    """Inputs of a kind and sites that they are tried on, the same ones each time."""
    chosen = random.Random(f"{server} {kind}")
    attacks = cpu.starts(kind)
    for _ in range(mutations):
        attacks.append(cpu.mutated(chosen.choice(attacks), chosen))
    named = [name for name in cpu.sites() if name.startswith("flask") == (server == "gunicorn")]
    return [(named[place % len(named)], attack) for place, attack in enumerate(attacks)]


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("server", ["uvicorn, httptools", "gunicorn"])
def test_what_a_request_costs_does_not_grow_with_it(server: str, kind: str) -> None:
    """However large and odd a request is, a decision takes a bounded number of steps and little CPU."""
    for site, attack in inputs(server, kind, 30):
        call = cpu.call_of(attack, server, site)
        assert cpu.milliseconds(call, 3) < WIDE * cpu.BAR, (site, attack)
    for site, attack in inputs(server, kind, 6):
        assert steps(cpu.call_of(attack, server, site)) <= MOST_STEPS, (site, attack)


@pytest.mark.parametrize(
    ("kind", "piece"),
    [
        ("path", b"/a;"),
        ("path", b"/"),
        ("path", b"/a"),
        ("path", b"%00a"),
        ("query", b"a&"),
        ("query", b"%61&"),
        ("Forwarded", b',"'),
        ("X-Forwarded-For", b"10.0.0.1,"),
        ("API key", b"\xff"),
        ("Host", b"\xff"),
        ("many lines", b"a"),
    ],
)
@pytest.mark.parametrize("site", ["mounted", "tiers", "bearer", "callables"])
def test_four_times_the_input_takes_no_more_steps(kind: str, piece: bytes, site: str) -> None:
    """An input four times as long costs hardly more than the shorter one, counted in steps."""
    short, long = (Attack(kind, b"", piece, b"", size) for size in (16_000, 64_000))
    server = "uvicorn, httptools"
    cpu.milliseconds(cpu.call_of(short, server, site), 1)  # what is said once of such an input is said by then
    assert steps(cpu.call_of(long, server, site)) <= steps(cpu.call_of(short, server, site)) + 2_000


def test_the_search_finds_what_costs_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each of one byte costs a millisecond, the input that the search ends with repeats that byte."""
    spent = [0]

    def cost(request: Request) -> int:
        spent[0] = request.headers.get("x-id", "").count("K")
        return 1

    def milliseconds(call: Callable[[], Any], _: int = 3) -> float:
        call()
        return spent[0]

    gated = LimitGate(Starlette(), rules=[Rule("slow", "1000000/second", cost=cost)], store="memory://")
    monkeypatch.setattr(cpu, "sites", lambda: {"slow": (gated, "")})
    monkeypatch.setattr(cpu, "milliseconds", milliseconds)
    _, site, attack = cpu.dearest("hypercorn", "header as a key", 300, random.Random(1))
    assert site == "slow"
    assert b"K" in attack.piece


def test_every_kind_has_its_figure_from_before() -> None:
    """The table shows for each server and kind what was found before."""
    assert {name: len(before) for name, before in cpu.BEFORE.items()} == dict.fromkeys(SERVERS, len(KINDS))
