"""The verb ``ban``: refuse everything of one client."""

from __future__ import annotations

from typing import Unpack

import click

from limitgate.command.change import DURATION, confirm
from limitgate.command.client_state import StateOptions, change_options, on_store, state_of
from limitgate.command.decisions import seconds
from limitgate.command.output import print_json, say


@click.command("ban")
@change_options
@click.option("--for", "duration", type=DURATION, metavar="DURATION", help="Such as 90s, 30m, 1h or 7d; without it, for ever.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def verb(
    *, duration: float | None, as_json: bool, yes: bool, dry_run: bool, reason: str | None, **options: Unpack[StateOptions]
) -> None:
    """Refuse everything that one client asks under a rule, or by a Limiter's key. A longer ban that it has stays.

    Every process heeds it within a second. What was used before is not forgotten.

    For example: limitgate ban --store redis://localhost --rules config/ --rule api --ip 203.0.113.7 --for 1h --reason scraper
    """
    how_long = "for ever" if duration is None else f"for {seconds(duration)}"
    with on_store(options) as (limiter, journal):
        state = state_of(limiter, options, needs_limits=False)
        if not dry_run:
            confirm(f"Ban {state.name} {how_long}?", yes=yes)
            state.ban(duration, reason)
            journal.note("ban", state.name, state.keys, reason, duration, bans=True)
    if as_json:
        print_json({"key": state.name, "retry_after": duration, "reason": reason})
    else:
        say(f"{state.name}: {'would be banned' if dry_run else 'banned'} {how_long}")
