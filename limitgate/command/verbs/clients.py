"""The verbs ``peek``, ``reset``, ``ban``, ``pardon`` and ``bans``."""

from __future__ import annotations

import math
import sys
import time
from datetime import UTC, datetime
from typing import Any

import click

from limitgate.algorithms.ban import FOR_EVER
from limitgate.command.client_state import change_options, state_of, state_options
from limitgate.command.opened import on_store, store_options
from limitgate.command.output import (
    FOUND,
    ban_in_force,
    decision_fields,
    json_option,
    print_decision,
    print_json,
    print_table,
    say,
    seconds,
)
from limitgate.errors import ConfigError
from limitgate.gate.journal import Journal
from limitgate.limits.limit import seconds_of

_LONGEST = FOR_EVER / 1e6
"""Seconds."""


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    unconfirmed = click.UsageError(f"{question} Standard input is closed, expected -y")
    if sys.stdin is None:
        raise unconfirmed
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort as abort:
        if isinstance(abort.__context__, EOFError):
            click.echo(err=True)  # end the line of the question
            raise unconfirmed from None
        raise


class _Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            found = seconds_of(text)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        if not 0 < found <= _LONGEST:
            self.fail(f"{text!r:.80} is not a duration, expected more than 0, at most 100 years", param, ctx)
        return found


def _say_hint(hint: str | None) -> None:
    if hint is not None:
        say("", hint)


@click.command("peek")
@state_options
@json_option
@click.pass_context
def peek(ctx: click.Context, /, *, as_json: bool, **options: Any) -> None:
    """Show one client's state, and whether a request would be admitted. Charges nothing.

    Name the client by a rule and the parts of its key, or by a Limiter's key and limits. Exit status 1: a request would be
    refused.

    For example: limitgate peek --store redis://localhost --rules config/ --rule api --ip 203.0.113.7
    """
    with on_store(options, options["rules"]) as opened:
        state = state_of(opened, options, "peek")
        decision = state.bucket.peek()
        hint = state.hint(decision)
    if as_json:
        print_json(decision_fields(decision))
    elif len(options["words"]) == 1 and decision.allowed:
        say("not banned; add limits after the key to see their usage")
    else:
        print_decision(decision)
        _say_hint(hint)
    ctx.exit(0 if decision.allowed else FOUND)


@click.command("reset")
@change_options
@json_option
def reset(*, as_json: bool, yes: bool, dry_run: bool, reason: str | None, **options: Any) -> None:
    """Reset one client's usage, so that its buckets are full. Doesn't lift a ban: see pardon.

    Name the client by a rule and the parts of its key, or by a Limiter's key and limits.

    For example: limitgate reset --store redis://localhost --rules config/ --rule api --ip 203.0.113.7 --reason "ticket 7"
    """
    with on_store(options, options["rules"]) as opened:
        state = state_of(opened, options, "reset")
        hint = state.hint()
        if dry_run:
            decision = state.bucket.peek()
        else:
            _confirm(f"Reset the usage of {state.typed}?", yes=yes)
            decision = state.bucket.reset(reason=reason)
            opened.journal.note("reset", state.name, state.keys, reason)
    if as_json:
        print_json(decision_fields(decision))
        return
    say(f"{state.name}: {'would be reset' if dry_run else 'reset'}")
    print_decision(decision)
    _say_hint(hint)


@click.command("ban")
@change_options
@click.option(
    "--for",
    "duration",
    type=_Duration(),
    metavar="DURATION",
    help="How long, such as 90s, 30m, 1h or 7d; default: permanently.",
)
@json_option
def ban(*, duration: float | None, as_json: bool, yes: bool, dry_run: bool, reason: str | None, **options: Any) -> None:
    """Refuse all requests of one client under a rule, or of a Limiter's key. Doesn't shorten an existing ban.

    Takes effect in every process within a second. Keeps the client's usage.

    For example: limitgate ban --store redis://localhost --rules config/ --rule api --ip 203.0.113.7 --for 1h --reason scraper
    """
    how_long = _how_long(duration)
    in_force = duration
    with on_store(options, options["rules"]) as opened:
        state = state_of(opened, options, "ban")
        hint = state.hint()
        if not dry_run:
            _confirm(f"Ban {state.typed} {how_long}?", yes=yes)
            in_force = ban_in_force(state.bucket.ban(duration, reason=reason))
            opened.journal.note("ban", state.name, state.keys, reason, duration, bans=True)
    if as_json:
        print_json({"key": state.name, "retry_after": in_force, "reason": reason})
    else:
        is_longer = duration is not None and in_force is not None and in_force > duration + 1
        earlier = ", by an earlier ban" if is_longer else ""
        say(f"{state.name}: {'would be banned' if dry_run else 'banned'} {_how_long(in_force)}{earlier}")
        _say_hint(hint)


def _how_long(duration: float | None) -> str:
    return "permanently" if duration is None or duration == math.inf else f"for {seconds(duration)}"


@click.command("pardon")
@change_options
@json_option
@click.pass_context
def pardon(ctx: click.Context, /, *, as_json: bool, yes: bool, dry_run: bool, reason: str | None, **options: Any) -> None:
    """Lift the ban of one client. Keeps the client's usage: see reset.

    Processes that have just refused the client may refuse it for one more second. Exit status 1: the client was not banned.

    For example: limitgate pardon --store redis://localhost --rules config/ --rule api --ip 203.0.113.7
    """
    with on_store(options, options["rules"]) as opened:
        state = state_of(opened, options, "pardon")
        peeked = state.bucket.peek()
        hint, was_banned = state.hint(peeked), peeked.is_ban
        if not dry_run:
            _confirm(f"Lift the ban of {state.typed}?", yes=yes)
            state.bucket.pardon(reason=reason)
            if was_banned:
                opened.journal.note("pardon", state.name, state.keys, reason)
            else:
                opened.journal.remove(state.keys)
    if as_json:
        print_json({"key": state.name, "retry_after": 0.0, "reason": reason, "was_banned": was_banned})
    elif was_banned:
        say(f"{state.name}: {'would be pardoned' if dry_run else 'pardoned'}")
        _say_hint(hint)
    else:
        say(f"{state.name}: {'is' if dry_run else 'was'} not banned")
    ctx.exit(0 if was_banned or dry_run else FOUND)


@click.command("bans")
@store_options
@click.option("--log", "events", is_flag=True, help="Show the latest bans, pardons and resets instead, newest first.")
@json_option
def bans(*, events: bool, as_json: bool, **options: Any) -> None:
    """List the bans set by commands and rules: the client (masked), the remaining time, and the reason.

    Doesn't list bans that a program sets with a Limiter.

    For example: limitgate bans --store redis://localhost
    """
    with on_store(options) as opened:
        if events:
            _print_events(opened.journal, as_json=as_json)
            return
        bans = opened.journal.bans()
    now = time.time()
    if as_json:
        print_json([{**ban.fields(now), "digest": ban.digest} for ban in bans])
    elif bans:
        rows = [(ban.key, seconds(ban.retry_after(now)), ban.by, ban.reason or "") for ban in bans]
        print_table(("Client", "Ends in", "By", "Reason"), rows)
    else:
        say("no ban set by a command or a rule is in force")


def _print_events(journal: Journal, *, as_json: bool) -> None:
    events = journal.events()
    if as_json:
        print_json([event._asdict() for event in events])
        return
    rows = [(f"{datetime.fromtimestamp(each.at, UTC):%Y-%m-%d %H:%M:%S} UTC", *each[1:4], each.reason or "") for each in events]
    print_table(("When", "By", "What", "Client", "Reason"), rows)
