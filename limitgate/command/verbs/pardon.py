"""The verb ``pardon``: lift a ban."""

from __future__ import annotations

from typing import Unpack

import click

from limitgate.command.change import confirm
from limitgate.command.client_state import StateOptions, change_options, on_store, state_of
from limitgate.command.output import print_json, say


@click.command("pardon")
@change_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def verb(*, as_json: bool, yes: bool, dry_run: bool, reason: str | None, **options: Unpack[StateOptions]) -> None:
    """Lift the ban of one client. What it has used before is not forgotten: see reset.

    Processes that have just refused the client may do so for a second more.

    For example: limitgate pardon --store redis://localhost --rules config/ --rule api --ip 203.0.113.7
    """
    with on_store(options) as (limiter, journal):
        state = state_of(limiter, options, needs_limits=False)
        if not dry_run:
            confirm(f"Lift the ban of {state.name}?", yes=yes)
            state.pardon(reason)
            journal.note("pardon", state.name, state.keys, reason)
    if as_json:
        print_json({"key": state.name, "retry_after": 0.0, "reason": reason})
    else:
        say(f"{state.name}: {'would be pardoned' if dry_run else 'pardoned'}")
