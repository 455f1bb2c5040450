"""The same parsers under atheris, which sees which branches an input takes.

``python -m tests.attacks.atheris_fuzz --seconds 300``, after ``pip install ".[fuzz]"``; where atheris cannot be imported, it
says so and does nothing. Each input goes to one parser, chosen by its first byte.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None


def _written(folder: Path, parsers: int, seeds_of_all: Sequence[bytes], tokens: Sequence[bytes]) -> list[str]:
    """The corpus, once for each parser, and the tokens as libFuzzer wants them; the arguments that name both."""
    seeds = folder / "corpus"
    seeds.mkdir()
    for place, data in enumerate(seeds_of_all):
        for parser in range(parsers):
            (seeds / f"{place}-{parser}").write_bytes(bytes([parser]) + data)
    words = ['"' + "".join(f"\\x{byte:02x}" for byte in token) + '"' for token in tokens]
    (folder / "words").write_text("\n".join(words))
    return [f"-dict={folder / 'words'}", str(seeds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    told = parser.parse_args()
    if atheris is None:
        print("atheris cannot be imported here, nothing is done")
        return 0
    with atheris.instrument_imports(include=["limitgate"]):
        from tests.attacks.mutations import LONGEST, TOKENS, corpus
        from tests.attacks.parsers import PARSERS

    parsers = list(PARSERS.values())

    def one_input(data: bytes) -> None:
        if data:
            parsers[data[0] % len(parsers)](data[1:])

    with tempfile.TemporaryDirectory() as folder:
        arguments = _written(Path(folder), len(parsers), corpus(), TOKENS)
        limits = [f"-max_total_time={told.seconds}", f"-max_len={LONGEST}", "-timeout=10", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *limits, *arguments], one_input)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
