"""``python -m limitgate``: the command of that name."""

from limitgate.command import main

main()
