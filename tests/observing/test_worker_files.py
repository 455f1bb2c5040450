"""Figures of several workers: as prometheus-client joins them, from the files that it writes itself."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from limitgate import prometheus
from limitgate.observing import worker_files
from tests.support.threads import repeated

BOUNDS = ("0.5", "1.0", "10.0", "+Inf")
GAUGES = ("livesum", "livemin", "livemax", "liveall", "sum", "min", "max", "all", "mostrecent", "livemostrecent")


class Worker:
    """A process that writes figures: of LimitGate's names, and of names of others."""

    def __init__(self, folder: Path, pid: int, chance: random.Random) -> None:
        self._folder, self._pid, self._chance = folder, pid, chance
        self._files: dict[str, MmapedDict] = {}

    def count(self) -> None:
        """Write some value, of a key that was there before or a further one."""
        chance = self._chance
        rule = chance.choice(["a", 'b"\\', "ü\n", "5%s%(rule)s%%"])
        kind = chance.choice(["counter", "histogram", "summary", *[f"gauge_{mode}" for mode in GAUGES]])
        family = f"{chance.choice(['limitgate', 'shop'])}_{kind}"
        if kind == "histogram":
            self._write(kind, family, f"{family}_sum", {"rule": rule}, chance.random())
            self._write(kind, family, f"{family}_bucket", {"rule": rule, "le": chance.choice(BOUNDS)}, chance.randrange(9))
        elif kind == "counter":
            self._write(kind, family, f"{family}_total", {"rule": rule, "pid": "7"}, chance.random())
        else:
            self._write(kind, family, family, {"rule": rule} if chance.random() < 0.8 else {}, chance.uniform(-2, 2))

    def _write(self, kind: str, family: str, sample: str, labels: dict[str, str], value: float) -> None:
        if kind not in self._files:
            self._files[kind] = MmapedDict(str(self._folder / f"{kind}_{self._pid}.db"))
        key = mmap_key(family, sample, labels.keys(), labels.values(), f"Meaning of {family}.")
        self._files[kind].write_value(key, value, self._chance.random())

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def both(folder: Path) -> tuple[Callable[[], bytes], Callable[[], bytes]]:
    """The text by prometheus-client, and by LimitGate."""
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    multiprocess.MultiProcessCollector(theirs, str(folder))
    prometheus.MultiProcessCollector(ours, str(folder))
    return (lambda: generate_latest(theirs)), (lambda: prometheus.generate_latest(ours))


def metrics_in(text: bytes) -> list[str]:
    """The metrics of a text, whose order is that of the files' kinds."""
    return sorted(text.decode().split("# HELP "))


@pytest.mark.parametrize("seed", range(10))
def test_the_figures_are_those_of_prometheus_client(tmp_path: Path, seed: int) -> None:
    """Whatever workers write, come and go: each metric has the same lines in the same order, to the last digit."""
    chance = random.Random(seed)
    theirs, ours = both(tmp_path)
    workers: dict[int, Worker] = {}
    assert ours() == theirs() == b""
    for _ in range(60):
        pid = chance.randrange(1, 5)
        workers.setdefault(pid, Worker(tmp_path, pid, chance))
        for _ in range(chance.choice([0, 1, 20])):
            workers[pid].count()
        if chance.random() < 0.1:
            workers.pop(pid).close()
            multiprocess.mark_process_dead(pid, str(tmp_path))
        assert metrics_in(ours()) == metrics_in(theirs())
    for worker in workers.values():
        worker.close()


def test_samples_are_the_same(tmp_path: Path) -> None:
    """For whoever collects without a text; some metrics by their names, too."""
    worker = Worker(tmp_path, 1, random.Random(7))
    for _ in range(100):
        worker.count()
    theirs, ours = (CollectorRegistry(), CollectorRegistry())
    multiprocess.MultiProcessCollector(theirs, str(tmp_path))
    prometheus.MultiProcessCollector(ours, str(tmp_path))
    of_both = [{metric.name: (metric.type, metric.samples) for metric in each.collect()} for each in (theirs, ours)]
    assert of_both[0] == of_both[1]
    names = ["limitgate_counter_total"]
    assert generate_latest(theirs.restricted_registry(names)) == prometheus.generate_latest(ours.restricted_registry(names))
    worker.close()


def test_a_file_in_the_place_of_another_is_read_anew(tmp_path: Path) -> None:
    """A pid may come again, with keys of the same length in another order."""
    theirs, ours = both(tmp_path)
    for rules in ("ab", "ba"):
        file = MmapedDict(str(tmp_path / "counter_1.db"))
        for value, rule in enumerate(rules, 1):
            file.write_value(mmap_key("limitgate_x", "limitgate_x_total", ["rule"], [rule], "X."), value, 0)
        assert ours() == theirs()
        file.close()
        (tmp_path / "counter_1.db").unlink()
    assert ours() == theirs() == b""


@pytest.mark.parametrize("damaged", [1, 2])
def test_after_a_scrape_that_failed_nothing_is_missing(tmp_path: Path, damaged: int) -> None:
    """The keys and files that were met before the one that could not be read count as soon as it can be."""
    theirs, ours = both(tmp_path)

    def write(pid: int, rule: str) -> None:
        file = MmapedDict(str(tmp_path / f"counter_{pid}.db"))
        file.write_value(mmap_key("limitgate_x", "limitgate_x_total", ["rule"], [rule], "X."), pid, 0)
        file.close()

    for pid in (1, 2):
        write(pid, "a")
    assert ours() == theirs()
    for pid in {1, 2, 3} - {damaged}:
        write(pid, "b")
    path = tmp_path / f"counter_{damaged}.db"
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + b"\xff\xff\xff\x7f" + whole[12:])
    with pytest.raises(ValueError, match="is damaged"):
        ours()
    path.write_bytes(whole)
    assert ours() == theirs()


def test_keys_are_taken_apart_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all workers the first time, and again only such as are new; one of each form is read as JSON."""
    read: list[str] = []
    taken: list[int] = []
    loads, take_apart = worker_files.json.loads, worker_files._Forms.take_apart

    def counting(self: Any, content: bytes, start: int, sizes: list[int], series: Any) -> None:
        known = len(sizes)
        take_apart(self, content, start, sizes, series)
        taken.append(len(sizes) - known)

    monkeypatch.setattr(worker_files.json, "loads", lambda text: read.append(text) or loads(text))
    monkeypatch.setattr(worker_files._Forms, "take_apart", counting)
    _, ours = both(tmp_path)
    files = [MmapedDict(str(tmp_path / f"counter_{pid}.db")) for pid in (1, 2, 3)]
    keys = [mmap_key("limitgate_x", "limitgate_x_total", ["rule"], [rule], "X.") for rule in ("a", "b", "c", "d", "é")]
    for file in files:
        for key in keys[:3]:
            file.write_value(key, 1, 0)
    assert b'{rule="a"} 3.0\n' in ours()
    assert (taken, len(read)) == ([3], 1)
    files[1].write_value(keys[0], 5, 0)
    assert b'{rule="a"} 7.0\n' in ours()
    assert (taken, len(read)) == ([3], 1)
    for file in files[1:]:
        file.write_value(keys[3], 5, 0)
    assert b'{rule="d"} 10.0\n' in ours()
    assert (taken, len(read)) == ([3, 1], 1)
    files[0].write_value(keys[4], 2, 0)  # in JSON with a backslash
    assert '{rule="é"} 2.0\n'.encode() in ours()
    assert (taken, len(read)) == ([3, 1, 1], 2)
    for file in files:
        file.close()


TEXTS = st.one_of(
    st.sampled_from(
        ["a", "b", "default", "", "a b", '"', "\\", "\n", "%s", "%", '": "', '", "', "{", "}", "\x7f", "é", "\u2028", "🙂"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
LABELS = ({"rule": TEXTS, "tier": TEXTS}, {"code": TEXTS, "rule": TEXTS}, {"zone": TEXTS}, {})
"""Labels that stand before that of a bucket's bound, behind it, or nowhere."""


@st.composite
def entries(draw: st.DrawFn) -> list[tuple[str, str, float]]:
    """Entries of a series: the kind of the file, the key and the value. Names of labels are mostly sorted."""
    kind = draw(st.sampled_from(["counter", "histogram", "histogram", "gauge_livemax", "gauge_liveall", "gauge_livesum"]))
    family = draw(st.sampled_from(["limitgate_x", "limitgate_y", "shop_x"])) + f"_{kind}"
    labels = draw(st.fixed_dictionaries(draw(st.sampled_from(LABELS))))
    samples = [(f"{family}_sum", labels), *[(f"{family}_bucket", {**labels, "le": bound}) for bound in BOUNDS]]
    if kind != "histogram":
        samples = [(family + "_total" * (kind == "counter"), labels)]
    meaning = draw(st.sampled_from(["X.", 'Of "a", \\ and }, "b"]']))
    write: Callable[..., str] = draw(
        st.sampled_from([json.dumps, partial(json.dumps, sort_keys=True), partial(json.dumps, ensure_ascii=False)])
    )
    values = st.one_of(st.integers(0, 9).map(float), st.floats(-1e3, 1e3).map((0.0).__add__))  # -0.0 is written as 0.0
    return [(kind, write([family, name, of, meaning]), draw(values)) for name, of in samples]


@given(st.lists(st.tuples(st.integers(1, 3), entries()), max_size=30), st.integers(1, 9))
def test_keys_of_all_kinds_are_those_of_prometheus_client(
    written: list[tuple[int, list[tuple[str, str, float]]]], every: int
) -> None:
    """Whatever stands in labels, in whatever order, while files grow: by a collector that knows some, and by a new one."""
    with TemporaryDirectory() as folder, ExitStack() as opened:
        files: dict[str, MmapedDict] = {}
        theirs, ours = both(Path(folder))
        for number, (pid, series) in enumerate(written, 1):
            for kind, key, value in series:
                name = f"{kind}_{pid}.db"
                if name not in files:
                    files[name] = MmapedDict(str(Path(folder) / name))
                    opened.callback(files[name].close)
                files[name].write_value(key, value, 0)
            if number % every == 0 or number == len(written):
                assert metrics_in(ours()) == metrics_in(theirs()) == metrics_in(both(Path(folder))[1]())


@given(st.data())
def test_a_damaged_file_is_told_or_read_as_by_prometheus_client(data: st.DataObject) -> None:
    """Never with figures of its own, whether the file was read before or not."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "histogram_1.db"
        file = MmapedDict(str(path))
        for rule in data.draw(st.lists(st.sampled_from(["a", "b", "cc", "é"]), min_size=1, max_size=4, unique=True)):
            for bound in BOUNDS:
                labels = {"rule": rule, "le": bound}
                file.write_value(mmap_key("limitgate_x", "limitgate_x_bucket", [*labels], [*labels.values()], "X."), 1, 0)
        used = file._used
        file.close()
        theirs, ours = both(Path(folder))
        assert ours() == theirs()
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, used - 1))] = data.draw(
                st.one_of(st.sampled_from(b'"{}[],: 5\\'), st.integers(0, 255))
            )
        path.write_bytes(content)
        for read in (ours, both(Path(folder))[1]):
            try:
                text = read()
            except ValueError:
                continue
            assert text == theirs()


def test_scrapes_beside_one_another(tmp_path: Path) -> None:
    """Under WSGI threads may ask at the same time, while a worker's keys grow."""
    _, ours = both(tmp_path)
    file = MmapedDict(str(tmp_path / "counter_1.db"))
    with repeated(ours):
        for number in range(300):
            file.write_value(mmap_key("limitgate_x", "limitgate_x_total", ["rule"], [str(number)], "X."), 1, 0)
    assert ours().count(b"} 1.0\n") == 300
    file.close()


def test_what_is_no_such_file_is_told(tmp_path: Path) -> None:
    """A file that is being made has nothing yet; one that is cut off is damaged."""
    theirs, ours = both(tmp_path)
    (tmp_path / "counter_1.db").touch()
    assert ours() == b""
    file = MmapedDict(str(tmp_path / "counter_1.db"))
    file.write_value(mmap_key("limitgate_x", "limitgate_x_total", ["rule"], ["a"], "X."), 1, 0)
    file.close()
    assert ours() == theirs()
    whole = (tmp_path / "counter_1.db").read_bytes()
    (tmp_path / "counter_1.db").write_bytes(whole[:8] + b"\xff\xff\xff\x7f" + whole[12:])
    with pytest.raises(ValueError, match="is damaged"):
        ours()
    shutil.rmtree(tmp_path)
    assert ours() == b""


@pytest.mark.parametrize("kind", ["counter", "gauge_mostrecent", "other"])
def test_what_is_no_workers_file_neither_hangs_nor_fails_a_scrape(tmp_path: Path, kind: str) -> None:
    """A FIFO, a folder, a symbolic link in a circle or to nothing, a device and a socket have no figures."""
    worker = Worker(tmp_path, 1, random.Random(1))
    for _ in range(20):
        worker.count()
    worker.close()
    before = both(tmp_path)[1]()
    os.mkfifo(tmp_path / f"{kind}_91.db")
    (tmp_path / f"{kind}_92.db").mkdir()
    (tmp_path / f"{kind}_93.db").symlink_to(tmp_path / f"{kind}_93.db")
    (tmp_path / f"{kind}_94.db").symlink_to("/dev/zero")
    (tmp_path / f"{kind}_95.db").symlink_to(tmp_path / "nothing")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / f"{kind}_96.db"))
        assert metrics_in(both(tmp_path)[1]()) == metrics_in(before)
