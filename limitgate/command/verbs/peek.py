"""The verb ``peek``: one client's state, as it is now."""

from __future__ import annotations

from typing import Unpack

import click

from limitgate.command.client_state import StateOptions, on_store, state_of, state_options
from limitgate.command.decisions import decision_fields, print_decision
from limitgate.command.exits import FOUND
from limitgate.command.output import print_json, say


@click.command("peek")
@state_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@click.pass_context
def verb(ctx: click.Context, *, as_json: bool, **options: Unpack[StateOptions]) -> None:
    """Show one client's state, and whether a request would be admitted. Charges nothing.

    The client is named by a rule and the parts of its key, or by a Limiter's key and its limits. Exit status 1: a request would
    be refused.

    For example: limitgate peek --store redis://localhost --rules config/ --rule api --ip 203.0.113.7
    """
    with on_store(options) as (limiter, _):
        decision = state_of(limiter, options, needs_limits=False).peek()
    if as_json:
        print_json(decision_fields(decision))
    elif len(options["words"]) == 1 and decision.allowed:
        say("not banned; limits after the key show what is left of them")
    else:
        print_decision(decision)
    ctx.exit(0 if decision.allowed else FOUND)
