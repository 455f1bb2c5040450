"""The verb ``bans``: who is banned, for how much longer, and why."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Unpack

import click

from limitgate.command.client_state import StoreOptions, on_store, store_options
from limitgate.command.decisions import seconds
from limitgate.command.journal import Journal
from limitgate.command.output import print_json, print_table, say


@click.command("bans")
@store_options
@click.option("--log", "events", is_flag=True, help="Show the latest bans, pardons and resets instead, newest first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def verb(*, events: bool, as_json: bool, **options: Unpack[StoreOptions]) -> None:
    """List the bans that were set by this command: of whom, masked, for how much longer, and why.

    Bans that a program sets by a Limiter are not listed.

    For example: limitgate bans --store redis://localhost
    """
    with on_store(options) as (_, journal):
        if events:
            _print_events(journal, as_json=as_json)
            return
        bans = journal.bans()
    now = time.time()
    if as_json:
        print_json([{"key": ban.key, "retry_after": ban.retry_after(now), "reason": ban.reason} for ban in bans])
    elif bans:
        rows = [(ban.key, seconds(ban.retry_after(now)), ban.by, ban.reason or "") for ban in bans]
        print_table(("Who", "Ends in", "By", "Reason"), rows)
    else:
        say("nobody is banned by this command")


def _print_events(journal: Journal, *, as_json: bool) -> None:
    events = journal.events()
    if as_json:
        print_json([event._asdict() for event in events])
        return
    rows = [(f"{datetime.fromtimestamp(each.at, UTC):%Y-%m-%d %H:%M:%S} UTC", *each[1:4], each.reason or "") for each in events]
    print_table(("When", "By", "What", "Who", "Reason"), rows)
