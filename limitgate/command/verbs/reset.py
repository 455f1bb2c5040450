"""The verb ``reset``: forget what one client has used."""

from __future__ import annotations

from typing import Unpack

import click

from limitgate.command.change import confirm
from limitgate.command.client_state import StateOptions, change_options, on_store, state_of
from limitgate.command.decisions import decision_fields, print_decision
from limitgate.command.output import print_json, say


@click.command("reset")
@change_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def verb(*, as_json: bool, yes: bool, dry_run: bool, reason: str | None, **options: Unpack[StateOptions]) -> None:
    """Forget what one client has used, so that its buckets are full. A ban stays: see pardon.

    The client is named by a rule and the parts of its key, or by a Limiter's key and its limits.

    For example: limitgate reset --store redis://localhost --rules config/ --rule api --ip 203.0.113.7 --reason "ticket 7"
    """
    with on_store(options) as (limiter, journal):
        state = state_of(limiter, options, needs_limits=True)
        if dry_run:
            decision = state.peek()
        else:
            confirm(f"Forget what {state.name} has used?", yes=yes)
            decision = state.reset(reason)
            journal.note("reset", state.name, state.keys, reason)
    if as_json:
        print_json(decision_fields(decision))
        return
    say(f"{state.name}: {'would be reset; now a request' if dry_run else 'reset; a request'}")
    print_decision(decision)
