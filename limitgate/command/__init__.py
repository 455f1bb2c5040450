"""The command ``limitgate``, of the extra ``cli``. A verb is imported when it is asked for.

Verbs print facts that other modules find: they read options, call these, and choose the exit status.
"""

from __future__ import annotations

import sys

from limitgate.messages.extras import extra


def main() -> None:
    """Run the command. Where the extra is missing, say in one line what installs it, and exit with 2."""
    try:
        with extra("cli", "click", "rich"):
            from limitgate.command.group import limitgate  # noqa: PLC0415 - what it needs may not be installed
    except ModuleNotFoundError as error:
        sys.exit(_told(error))
    limitgate(prog_name="limitgate")


def _told(error: ModuleNotFoundError) -> int:
    sys.stderr.write(f"limitgate: {error}\n")
    return 2
