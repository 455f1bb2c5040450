"""Rule files that are made to do harm. ``python -m tests.attacks.bombs`` loads them all within 512 MiB and a minute."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from limitgate import load_rules
from limitgate.errors import ConfigError
from limitgate.rules.document import MAX_BYTES

MEMORY = 512 << 20
CPU_SECONDS = 60

RULE = "rules: [{{name: a, qps: {}}}]"


def _laughs(levels: int, most: str) -> str:
    """A list whose aliases stand for ten to the power of ``levels`` values; ``most`` is what is made of it."""
    first = "&a0 [x, x, x, x, x, x, x, x, x, x]"
    more = [f"&a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
    return most.format(", ".join([first, *more]))


BOMBS = {
    "a billion laughs": _laughs(9, "rules: [{}]"),
    "a billion laughs in a name": _laughs(9, "? [{}]\n: 1"),
    "a billion laughs in a nested name": _laughs(9, "rules: [{{ ? {{ ? [{}] : 1 }} : 1 }}]"),
    "a billion laughs in merge keys": "a: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9)),
    "a merge of itself": "rules: &a {<<: *a}",
    "a list of itself": "rules: &a [*a]",
    "a mapping of itself": "rules: &a {b: *a}",
    "a name that holds itself": "? &a [*a]\n: 1",
    "deep lists": "rules: " + "[" * 20_000,
    "deep mappings": "{a: " * 20_000,
    "deep sequences": "- " * 20_000,
    "deep names": "? " * 20_000,
    "deep and closed": "rules: " + "[" * 500 + "]" * 500,
    "many values": "rules: [" + "1," * 101_000 + "]",
    "too many bytes": "#" * (MAX_BYTES + 1),
    "a huge scalar": "rules: " + "x" * (MAX_BYTES - 100),
    "a huge name": "x" * (MAX_BYTES - 100) + ": 1",
    "a huge quoted scalar": 'rules: "' + "\\x41" * (MAX_BYTES // 4 - 100) + '"',
    "a huge number": RULE.format("9" * 500_000),
    "a huge hexadecimal number": RULE.format("0x" + "f" * 500_000),
    "a huge binary number": RULE.format("0b" + "1" * 500_000),
    "a huge octal number": RULE.format("0" + "7" * 500_000),
    "a huge number of base 60": RULE.format("1" + ":0" * 400_000),
    "a huge fraction of base 60": RULE.format("1" + ":0" * 400_000 + ".5"),
    "a fraction of base 60 beyond all numbers": RULE.format("1" + ":0" * 200 + ".5"),
    "a huge number as a name": "rules: [{name: 0x" + "f" * 5_000 + ", qps: 1}]",
    "a huge number as a cost": "rules: [{name: a, qps: 1, cost: 0x" + "f" * 5_000 + "}]",
    "a long number that is none": RULE.format("!!int " + "9" * 5_000),
    "no number": RULE.format('!!int ""'),
    "no sign of a number": RULE.format('!!int "-"'),
    "no fraction": RULE.format('!!float ""'),
    "no truth": RULE.format("!!bool perhaps"),
    "no time": RULE.format("!!timestamp never"),
    "an impossible time": RULE.format("2001-99-99"),
    "no binary": RULE.format('!!binary "\\xff"'),
    "an unknown tag": RULE.format("!unknown 1"),
    "a set": "rules: !!set {a, b}",
    "pairs": "rules: !!pairs [a: 1]",
    "no pairs": "rules: !!omap [1]",
    "a value": "rules: [{name: a, qps: =}]",
    "twice the same": "rules: []\nrules: []",
    "twice the same in a rule": "rules: [{name: a, qps: 1, qps: 100000}]",
    "twice the same tier": "tier: vip\n'tier': default\nrules: []",
    "two documents": "rules: []\n---\nrules: []",
    "an alias of nothing": "rules: *a",
    "a directive": "%YAML 9.9\n---\nrules: []",
    "a tag directive": "%TAG ! tag:yaml.org,2002:python/\n---\nrules: !name:os.system",
    "control characters": "rules: \x00\x01\x02",
    "surrogates": 'rules: [{name: "\\ud800", qps: 1}]',
    "an escaped line end": 'rules: [{name: "a\\r\\nb", qps: 1}]',
    "an emoji": 'rules: [{name: "\U0001f4a3", qps: 1}]',
    "an infinity": RULE.format(".inf"),
    "no number at all": RULE.format(".nan"),
}


def load_all() -> list[str]:
    """The bombs that went off: that were loaded, or were no ConfigError of the file."""
    went_off = []
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rules.yaml"
        for name, bomb in BOMBS.items():
            file.write_bytes(bomb.encode("utf-8", "surrogatepass"))
            try:
                load_rules(file)
                went_off.append(name)
            except ConfigError as error:
                if not str(error).startswith(f"{file}:"):
                    went_off.append(f"{name}: in no file")
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
                went_off.append(f"{name}: {type(error).__name__}")
    return went_off


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    sys.exit("\n".join(load_all()) or 0)
