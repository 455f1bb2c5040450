"""``python -m limitgate``: the command ``limitgate``."""

from limitgate.command import main

main()
