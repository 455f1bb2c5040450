"""Folders and processes of the tests' own that go when the tests do, even if these are killed without a word."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

_OUTLIVE = """
while read -r word; do
    [ "$word" = over ] && exit
    process=$word
done
[ -z "$process" ] || { kill "$process"; sleep 1; kill -9 "$process"; } 2>/dev/null
rm -rf "$0"
"""
"""A shell's work: hear which process to end, and end it and remove a folder if nobody says that all is over."""


class Guard:
    """A new temporary folder, and maybe a process. Both go when the guard is dismissed, or with the process that made it."""

    def __init__(self, prefix: str, process: int | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            command = ["/bin/sh", "-c", _OUTLIVE, str(self.folder)]
            self._shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except BaseException:
            shutil.rmtree(self.folder)
            raise
        if process is not None:
            self.watch(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    def watch(self, process: int) -> None:
        """See to the process with this id, in place of the one before: it is ended unless the guard is dismissed."""
        self._shell.stdin.write(f"{process}\n".encode())
        self._shell.stdin.flush()

    def dismiss(self) -> None:
        """Remove the folder. The process has been ended."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._shell.returncode is None:
            self._shell.communicate(b"over\n")
