"""Runs the previous and the present version side by side on one Redis: `make upgrade`, or `make upgrade FROM=v1.0.0`.

Two processes of each version hit the same keys for 60 seconds, and other keys that only their version uses. Nothing admits more
than its limit grants. All are refused at times, and the keys of the present version and of both admit as many as those of the
previous one. A client within its limit is never refused,
each version sees the bans of the other, and nothing is logged. Exit status 1: a difference was found.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = float(os.environ.get("UPGRADE_SECONDS", "60"))
STARTING = 10
"""Seconds that the processes have to start."""
PER_VERSION = 2

WORKER = """
import json, logging, sys, time
from limitgate import Limit, Limiter

url, start, until, name = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
logged = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("limitgate").addHandler(handler)

KEYS = {
    "gcra": ("50/second",),
    "windows": ("30/second", "1000/minute"),
    "sliding": (Limit("40/second", algorithm="sliding_window"),),
    "log": (Limit("20/second", algorithm="sliding_log"),),
    "quiet": ("1000/second",),
}
KEYS |= {f"{key} of {name.partition('-')[0]}": limits for key, limits in KEYS.items()}
admitted, refused = dict.fromkeys(KEYS, 0), dict.fromkeys(KEYS, 0)
errors, bans = [], 0
with Limiter(url, timeout=10) as limiter:
    limiter.ban(f"banned by {name}", 600)
    time.sleep(max(0, start - time.time()))
    while time.time() < until:
        for key, limits in KEYS.items():
            try:
                decision = limiter.hit(key, *limits)
            except Exception as error:
                errors.append(repr(error))
                continue
            (admitted if decision.allowed else refused)[key] += 1
        time.sleep(0.004)
    seen = [not limiter.banned(f"banned by {other}").allowed for other in ("old-0", "old-1", "new-0", "new-1")]
print(json.dumps({"admitted": admitted, "refused": refused, "errors": errors, "bans": seen, "logged": logged}))
"""

BOUNDS = {"gcra": (50, 50), "windows": (1000 / 60, 1000), "sliding": (40, 40), "log": (20, 20)}
"""Per second, and at once."""


def built(ref: str, folder: Path) -> Path:
    """Install a version of the repository in an environment of its own, and return its Python."""
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(source)], check=True)
    subprocess.run(["git", "checkout", "--quiet", ref], cwd=source, check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(source)], check=True)
    return python


def previous() -> str:
    """Return the version to compare with. Exits if there is none."""
    if len(sys.argv) > 1:
        return sys.argv[1]
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        sys.exit("upgrade: no release to compare with, expected a tag or a commit: make upgrade FROM=v1.0.0")
    return found


def findings(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return what is wrong."""
    found = []
    admitted: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for name, result in results.items():
        admitted.update(result["admitted"])
        refused.update(result["refused"])
        if result["errors"] or result["logged"]:
            found.append(f"{name}: {result['errors'] or result['logged']}")
        if not all(result["bans"]):
            found.append(f"{name} did not see every ban: {result['bans']}")
    print(json.dumps({"admitted": admitted, "refused": refused}))
    for key, (rate, burst) in BOUNDS.items():
        granted = rate * SECONDS + burst
        names = key, f"{key} of old", f"{key} of new"
        found += [
            f"{name}: {admitted[name]} admitted, at most {granted:.0f} are granted"
            for name in names
            if admitted[name] > granted + 1
        ]
        old = admitted[f"{key} of old"]
        found += [
            f"{name}: {admitted[name]} admitted, {old} by the old version alone"
            for name in names
            if admitted[name] < 0.97 * old
        ]
        found += [f"{name}: nothing refused, so this proves nothing" for name in names if not refused[name]]
    found += [
        f"{name}: {refused[name]} refused within the limit" for name in refused if name.startswith("quiet") and refused[name]
    ]
    return found


def main() -> None:
    """Run both versions and report."""
    ref = previous()
    server = shutil.which("redis-server") or sys.exit("upgrade: no redis-server found: run make redis")
    with tempfile.TemporaryDirectory(prefix="limitgate-upgrade-") as name:
        folder = Path(name)
        pythons = {"old": built(ref, folder), "new": Path(sys.executable)}
        socket = folder / "redis.sock"
        command = [str(server), "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", name]
        redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not socket.exists():
                time.sleep(0.05)
            (folder / "worker.py").write_text(WORKER)
            start = time.time() + STARTING
            workers = {
                f"{version}-{number}": subprocess.Popen(
                    [
                        str(python),
                        str(folder / "worker.py"),
                        f"unix://{socket}",
                        str(start),
                        str(start + SECONDS),
                        f"{version}-{number}",
                    ],
                    stdout=subprocess.PIPE,
                    cwd=folder,
                    text=True,
                )
                for version, python in pythons.items()
                for number in range(PER_VERSION)
            }
            results = {each: json.loads(process.communicate(timeout=SECONDS + 60)[0]) for each, process in workers.items()}
        finally:
            redis.terminate()
            redis.wait(10)
    found = findings(results)
    print(f"upgrade: {ref} and the present code, {SECONDS:.0f} s: {len(found)} differences")
    for each in found:
        print(f"  {each}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
