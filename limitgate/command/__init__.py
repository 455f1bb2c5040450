"""The command ``limitgate``, of the extra ``cli``."""

from __future__ import annotations

import sys

from limitgate.messages.text import extra, require


def main() -> None:
    """Run the command. Without the extra, print how to install it, and exit with 2."""
    try:
        with extra("cli", "click", "rich", "packaging"):
            # Verbs import these late, so look for them before one of them changes anything.
            require("rich")
            require("packaging")
            from limitgate.command.group import limitgate
    except ModuleNotFoundError as error:
        sys.stderr.write(f"limitgate: {error}\n")
        sys.exit(2)
    limitgate(prog_name="limitgate")
