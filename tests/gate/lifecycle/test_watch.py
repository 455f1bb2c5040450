"""Changes of files: every way in which a file changes is seen, none is believed before it stands still. No test waits."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from limitgate import ConfigError, load_rules
from limitgate.gate.lifecycle import reload
from limitgate.gate.lifecycle.reload import SETTLED, Reading, WatchedFiles, WatchedRules

OLD, NEW, NEWER = (f"rules:\n- {{name: api, qps: {count}}}\n" for count in (5, 6, 7))
VIP = "tier: vip\nrules:\n- {name: api, qps: 50}\n"


class Clock:
    """A clock that the test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(path: Path) -> WatchedRules:
    """The rule files at a path, in use as they are now, and looked at so often that nothing about them is new."""
    files = WatchedRules(path, load_rules(path).files_digest, Clock())
    assert not files.has_changed()
    assert not files.has_changed()
    return files


def limits(files: WatchedRules) -> dict[str, list[str]]:
    """The limits that a load gives, by tier."""
    rules = files.load()
    assert rules is not None
    return {tier: [str(limit) for rule in of_tier for limit in rule.every_limit] for tier, of_tier in rules.tiers.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one rule file, ``default.yaml``, of 5 per second."""
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "default.yaml").write_text(OLD)
    return folder


def run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=60)


# --- ways in which files change ---------------------------------------------------------------------------------------


def in_place(folder: Path) -> None:
    (folder / "default.yaml").write_text(NEW)


def in_place_at_the_same_times(folder: Path) -> None:
    """As `rsync --inplace --times` and `cp --preserve` do: size, inode and time of the last write stay."""
    file = folder / "default.yaml"
    times = file.stat()
    file.write_text(NEW)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def by_rename(folder: Path) -> None:
    """Most editors, `sed -i`, `mv`, `rsync`, `kubectl cp`: a new file is put in the place of the old one."""
    other = folder / ".default.yaml.tmp"
    other.write_text(NEW)
    (other).replace(folder / "default.yaml")


def by_backup_and_rename(folder: Path) -> None:
    """Vim with 'backupcopy' off: the old file becomes the backup, and a new one is written under its name."""
    file = folder / "default.yaml"
    file.rename(folder / "default.yaml~")
    file.write_text(NEW)
    (folder / "default.yaml~").unlink()


def by_sed(folder: Path) -> None:
    run("sed", "-i", "s/qps: 5/qps: 6/", "default.yaml", cwd=folder)


def by_vim(folder: Path) -> None:
    run("vim", "-es", "-u", "NONE", "-c", "set backupcopy=no", "-c", "%s/5/6/", "-c", "wq", "default.yaml", cwd=folder)


def by_moving_the_folder(folder: Path) -> None:
    other = folder.with_name("other")
    other.mkdir()
    (other / "default.yaml").write_text(NEW)
    folder.rename(folder.with_name("old"))
    other.rename(folder)


def by_copying_over(folder: Path) -> None:
    other = folder.with_name("other.yaml")
    other.write_text(NEW)
    shutil.copy2(other, folder / "default.yaml")


def by_a_link_to_another_file(folder: Path) -> None:
    file = folder / "default.yaml"
    file.unlink()
    (folder / "new.txt").write_text(NEW)
    file.symlink_to("new.txt")


WAYS = (
    in_place,
    in_place_at_the_same_times,
    by_rename,
    by_backup_and_rename,
    by_sed,
    pytest.param(by_vim, marks=pytest.mark.skipif(shutil.which("vim") is None, reason="there is no vim here")),
    by_moving_the_folder,
    by_copying_over,
    by_a_link_to_another_file,
)


@pytest.mark.parametrize("change", WAYS)
@pytest.mark.parametrize("of_folder", [True, False], ids=["folder", "file"])
def test_a_change_is_seen_once_it_stands_still(folder: Path, change: Callable[[Path], None], *, of_folder: bool) -> None:
    """The second look believes what the first has seen, and no further one takes it for new again."""
    files = watched(folder if of_folder else folder / "default.yaml")
    change(folder)
    assert [files.has_changed() for _ in range(4)] == [False, True, False, False]
    assert limits(files) == {"default": ["6/second"]}


@pytest.mark.skipif(shutil.which("rsync") is None, reason="there is no rsync here")
@pytest.mark.parametrize("option", ["--archive", "--inplace", "--checksum"])
def test_watched_file_replaced_by_rsync_is_detected(folder: Path, option: str) -> None:
    """Whether it renames or writes in place, and whatever times it sets."""
    files, source = watched(folder), folder.with_name("source")
    source.mkdir()
    (source / "default.yaml").write_text(NEW + "\n")
    run("rsync", "--archive", option, f"{source}/", f"{folder}/", cwd=folder)
    assert [files.has_changed() for _ in range(3)] == [False, True, False]


def test_watched_file_changed_by_git_is_detected(folder: Path) -> None:
    """A checkout that changes one file and brings another."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
    run("git", "init", ".", cwd=folder)
    for name, text in (("one", OLD), ("two", NEW)):
        (folder / "default.yaml").write_text(text)
        if name == "two":
            (folder / "vip.yaml").write_text(VIP)
        run("git", "add", "--all", cwd=folder)
        run("git", *identity, "commit", "--message", name, cwd=folder)
        run("git", "tag", name, cwd=folder)
    run("git", "checkout", "one", cwd=folder)
    files = watched(folder)
    run("git", "checkout", "two", cwd=folder)
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    assert limits(files) == {"default": ["6/second"], "vip": ["50/second"]}
    run("git", "checkout", "one", cwd=folder)
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    assert limits(files) == {"default": ["5/second"]}


def config_map(folder: Path, version: str, **files: str) -> None:
    """Change a volume as the kubelet does: a folder of this version, and a link that is swapped by a rename."""
    (folder / version).mkdir(parents=True)
    for name, text in files.items():
        (folder / version / f"{name}.yaml").write_text(text)
    (folder / "..data_tmp").symlink_to(version)
    (folder / "..data_tmp").replace(folder / "..data")
    for name in files:
        if not (folder / f"{name}.yaml").is_symlink():
            (folder / f"{name}.yaml").symlink_to(f"..data/{name}.yaml")
    for file in folder.glob("*.yaml"):
        if file.stem not in files:
            file.unlink()


@pytest.mark.parametrize("of_folder", [True, False], ids=["folder", "file"])
def test_a_config_map_is_seen_again_and_again(tmp_path: Path, *, of_folder: bool) -> None:
    """The files in the folder stay the same links; what is above them leads elsewhere."""
    folder = tmp_path / "config"
    config_map(folder, "..2026_1", default=OLD)
    files = watched(folder if of_folder else folder / "default.yaml")
    for version, text, limit in (("..2026_2", NEW, "6/second"), ("..2026_3", NEWER, "7/second")):
        config_map(folder, version, default=text)
        assert [files.has_changed() for _ in range(3)] == [False, True, False]
        assert limits(files) == {"default": [limit]}
    config_map(folder, "..2026_4", default=OLD, vip=VIP)
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    assert limits(files) == {"default": ["5/second"], **({"vip": ["50/second"]} if of_folder else {})}


def test_a_path_that_is_a_link_is_followed_each_time(tmp_path: Path) -> None:
    """A deployment by a link to the present release."""
    for name, text in (("one", OLD), ("two", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "default.yaml").write_text(text)
    (tmp_path / "current").symlink_to("one")
    files = watched(tmp_path / "current")
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(tmp_path / "current")
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    assert limits(files) == {"default": ["6/second"]}


def test_files_that_come_go_and_are_renamed_are_seen(folder: Path) -> None:
    """A folder is what is in it."""
    files = watched(folder)
    (folder / "vip.yaml").write_text(VIP)
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    assert limits(files) == {"default": ["5/second"], "vip": ["50/second"]}
    (folder / "vip.yaml").rename(folder / "zzz.yml")
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    (folder / "zzz.yml").unlink()
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    assert limits(files) == {"default": ["5/second"]}


def test_watched_folder_ignores_other_files(folder: Path) -> None:
    """Backups of editors, notes, folders."""
    files = watched(folder)
    (folder / "default.yaml~").write_text(NEW)
    (folder / ".default.yaml.swp").write_text(NEW)
    (folder / ".#default.yaml").symlink_to("ann@host.1234:5678")
    (folder / "notes.txt").write_text("x")
    (folder / "folder.yaml").mkdir()
    assert not any(files.has_changed() for _ in range(3))


def test_the_same_content_is_no_change(folder: Path) -> None:
    """Touched, copied over itself, its rights changed, written anew."""
    files, file = watched(folder), folder / "default.yaml"
    for change in (file.touch, lambda: file.chmod(0o640), lambda: file.write_text(OLD), lambda: by_rename(folder)):
        change()
        file.write_text(OLD)
        assert not any(files.has_changed() for _ in range(3))


def test_watched_file_being_written_is_not_loaded(folder: Path) -> None:
    """First it is empty, then there is half of it: neither stands still from one look to the next."""
    files, file = watched(folder), folder / "default.yaml"
    seen = []
    for text in ("", NEW[:10], NEW + "- {nam", NEW + VIP, NEW):
        file.write_text(text)
        seen.append(files.has_changed())
    assert not any(seen)
    assert files.has_changed()
    assert limits(files) == {"default": ["6/second"]}


def test_files_that_change_one_after_the_other_change_together(folder: Path) -> None:
    """A set of which one half has been written is none, as long as the other half follows before the second look."""
    (folder / "vip.yaml").write_text(VIP)
    files = watched(folder)
    (folder / "default.yaml").write_text(NEW)
    assert not files.has_changed()
    (folder / "vip.yaml").write_text(VIP.replace("50", "60"))
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    assert limits(files) == {"default": ["6/second"], "vip": ["60/second"]}


def test_watched_file_changed_and_restored_is_no_change(folder: Path) -> None:
    """Even if a look has seen it."""
    files = watched(folder)
    in_place(folder)
    assert not files.has_changed()
    (folder / "default.yaml").write_text(OLD)
    assert not any(files.has_changed() for _ in range(3))


def test_watched_file_deleted_is_a_change_and_an_error(folder: Path) -> None:
    """A folder without rule files, none at all, and a link that leads nowhere."""
    files, file = watched(folder), folder / "default.yaml"
    file.unlink()
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    with pytest.raises(ConfigError, match="no rule file in this folder"):
        files.load()
    folder.rmdir()
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    with pytest.raises(ConfigError, match="No such file"):
        files.load()
    folder.mkdir()
    file.symlink_to("nowhere")
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    with pytest.raises(ConfigError, match=r"default\.yaml: No such file"):
        files.load()
    file.unlink()
    file.write_text(OLD)
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    assert limits(files) == {"default": ["5/second"]}


def test_a_file_that_changes_between_look_and_load_is_looked_at_again(folder: Path) -> None:
    """What is loaded is what was seen twice, whether it has a mistake or not."""
    files, file = watched(folder), folder / "default.yaml"
    for meanwhile in (NEWER, "rules: ["):
        file.write_text(NEW)
        assert [files.has_changed() for _ in range(2)] == [False, True]
        file.write_text(meanwhile)
        assert files.load() is None
        assert [files.has_changed() for _ in range(3)] == [False, True, False]


def test_the_path_stays_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the working folder; the operator reads the path as it was given."""
    monkeypatch.chdir(folder.parent)
    files = watched(Path("config"))
    monkeypatch.chdir("/")
    in_place(folder)
    assert [files.has_changed() for _ in range(2)] == [False, True]
    assert limits(files) == {"default": ["6/second"]}
    assert files.name == "config"


# --- what is read at a look -------------------------------------------------------------------------------------------


def test_a_change_within_a_tick_of_the_clock_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On file systems whose clock is coarse, nothing but the content tells it from the change before."""
    clock = Clock()
    files = WatchedRules(folder, load_rules(folder).files_digest, clock)
    monkeypatch.setattr(reload, "_stamp", str)
    assert [files.has_changed() for _ in range(2)] == [False, False]
    clock.now += SETTLED
    in_place(folder)
    assert [files.has_changed() for _ in range(3)] == [False, True, False]


def test_files_that_have_settled_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look asks the file system only, until something changes."""
    clock = Clock()
    files = WatchedRules(folder, load_rules(folder).files_digest, clock)
    assert [files.has_changed() for _ in range(2)] == [False, False]
    clock.now += SETTLED + 1
    reads: list[Path] = []
    read = reload.read_bytes
    monkeypatch.setattr(reload, "read_bytes", lambda file: reads.append(file) or read(file))
    assert not any(files.has_changed() for _ in range(5))
    assert reads == []
    in_place(folder)
    assert [files.has_changed() for _ in range(2)] == [False, True]
    assert len(reads) == 2


def test_any_content_is_new_where_none_is_known(tmp_path: Path) -> None:
    """And one that was forgotten is new again."""
    file = tmp_path / "a"
    file.write_text("x")
    files = WatchedFiles(lambda: [file])
    assert [files.has_changed() for _ in range(3)] == [False, True, False]
    files.forget()
    assert [files.has_changed() for _ in range(2)] == [True, False]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2))))
def test_watched_content_is_loaded_after_two_equal_polls_property(looks: list[tuple[int, int]]) -> None:
    """By a model: a reading equal to the one before it, of a content other than the one believed last."""
    judge, known, last = WatchedFiles(list, b"0"), b"0", None
    for at, (stamp, content) in enumerate(looks):
        reading = Reading((str(stamp),), str(content).encode())
        expected = reading == last and reading.digest != known
        assert judge._is_new(reading, float(at)) is expected
        known, last = (reading.digest if expected else known), reading
