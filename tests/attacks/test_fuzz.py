from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from tests.attacks.mutations import TOKENS, corpus, mutated
from tests.attacks.parsers import PARSERS

SEEDS = corpus()
made_of_tokens = st.lists(st.sampled_from(TOKENS), max_size=20).map(b"".join)
mutations = st.integers(0, 2**64).map(lambda seed: mutated(random.Random(seed), SEEDS))
client_bytes = st.one_of(mutations, made_of_tokens, st.binary(max_size=300))


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("name", PARSERS)
def test_no_bytes_of_a_client_break_a_parser_fuzz(name: str) -> None:
    """Whatever a client sends, nothing is raised, and what was made of it is bounded and consistent."""
    parser = PARSERS[name]

    @given(client_bytes)
    def fuzzed(data: bytes) -> None:
        parser(data)

    for data in SEEDS:
        parser(data)
    fuzzed()


def test_the_fuzzer_finds_what_breaks_a_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that raises is found, so that no findings mean something."""
    from tests.attacks.fuzz import fuzz

    def brittle(data: bytes) -> None:
        assert b";x/" not in data

    findings = fuzz(brittle, 20_000, seed=1)
    assert findings
    assert all(b";x/" in data for data, _ in findings)


def test_the_fuzzer_runs_as_a_program() -> None:
    """It drives every parser, prints a table, and ends with status 0 where nothing was found."""
    command = [sys.executable, "-m", "tests.attacks.fuzz", "--inputs", "1500", "--seed", "1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert all(f"| {name.removeprefix('fuzz_')} |" in done.stdout for name in PARSERS)
