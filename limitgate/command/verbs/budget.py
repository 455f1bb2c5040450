"""The verb ``budget``."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain, repeat
from typing import Any

import click

from limitgate.command.opened import on_store, store_options
from limitgate.command.output import FOUND, ban_in_force, json_option, print_json, print_table, say, seconds
from limitgate.limiter.budget_texts import Budget, matching, names, state_of_budget
from limitgate.limiter.calls import carry_out
from limitgate.limiter.limiter import Limiter
from limitgate.limits.decision import SECOND
from limitgate.limits.limit import Limit
from limitgate.messages.text import listed

_DIGEST = re.compile(r"(?<= )([0-9a-f]{6})[0-9a-f]{18}(?= )")


@click.command("budget")
@click.argument("key", metavar="[KEY]", required=False)
@store_options
@json_option
@click.pass_context
def verb(ctx: click.Context, /, *, key: str | None, as_json: bool, **options: Any) -> None:
    """Show a budget for a language model: what is used and reserved, what the provider reports, and how many requests wait.

    KEY has words of the budget's key: the host, the digest of the credential, the model, or what key= of the Budget returns.
    Without KEY, lists the keys of the last day. Exit status 1: a request would have to wait.

    For example: limitgate budget --store redis://localhost 'api.openai.com gpt-5'
    """
    with on_store(options) as opened:
        if key is None:
            _print_names(carry_out(opened.limiter, names(opened.limiter)), as_json=as_json)
            return
        name, budget = _found(opened.limiter, key)
    fields = _fields(budget)
    if as_json:
        print_json(fields)
    else:
        _print(name, budget, fields)
    ctx.exit(0 if budget.decision.allowed else FOUND)


def _print_names(found: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json([*map(_short, found)])
    elif found:
        say(*map(_short, found))
    else:
        say("the store has no budgets of the last day")


def _found(limiter: Limiter, key: str) -> tuple[str, Budget]:
    budget: Budget | None = carry_out(limiter, state_of_budget(limiter, key))
    if budget is not None:
        return key, budget
    known: list[str] = carry_out(limiter, names(limiter))
    found = matching(key, known)
    budget = carry_out(limiter, state_of_budget(limiter, found[0])) if len(found) == 1 else None
    if budget is not None:
        return found[0], budget
    if not known:
        raise click.UsageError(f"the store has no budget of {key!r:.80}, nor any other of the last day")
    what = f"{len(found)} budgets have the words {key!r:.80}" if found else f"the store has no budget of {key!r:.80}"
    raise click.UsageError(f"{what}, expected one of: {listed([_short(name) for name in found or known], '; ')}")


def _short(name: str) -> str:
    return _DIGEST.sub(r"\1*", name)


def _fields(budget: Budget) -> dict[str, Any]:
    reserved, tenants = [0] * len(budget.limits), Counter[str]()
    for row in budget.live:
        tenants.update(row.tenants if budget.waiting else {})
        reserved = [total + more for total, more in zip(reserved, chain(row.reserved, repeat(0)))]
    windows = [
        {
            "kind": kind,
            "period": window.period,
            "limit": window.limit,
            "used": window.used,
            "reserved": held,
            "told": _told(budget, kind, limit),
            "reset_after": window.reset_after,
        }
        for (kind, limit), window, held in zip(budget.limits, budget.decision.windows, reserved)
    ]
    return {
        "windows": windows,
        "reserved_ago": budget.reserved_ago,
        "waiting": budget.waiting,
        "tenants": dict(tenants),
        "held": budget.held,
        "pause": ban_in_force(budget.decision),
    }


def _told(budget: Budget, kind: str, limit: Limit) -> dict[str, Any] | None:
    said = next((each for each in budget.said if each.kind == kind and each.period in (None, limit.period)), None)
    if said is None:
        return None
    ago = max(0.0, (budget.now - budget.said_at) / SECOND)
    reset_after = None if said.reset_after is None else max(0.0, said.reset_after - ago)
    return {"limit": said.limit, "remaining": said.remaining, "reset_after": reset_after, "ago": ago}


def _print(name: str, budget: Budget, fields: dict[str, Any]) -> None:
    rows = []
    for (kind, limit), window, found in zip(budget.limits, budget.decision.windows, fields["windows"]):
        told, held = found["told"] or {"remaining": None, "reset_after": None}, found["reserved"]
        says = "-" if told["remaining"] is None else f"{told['remaining']:,} remaining"
        if told["reset_after"] is not None:
            says += f", full in {seconds(told['reset_after'])}"
        rows.append((kind, limit, f"{window.used:,}", f"{held:,}", f"{window.remaining:,}", seconds(window.reset_after), says))
    say(f"{_short(name)}:")
    print_table(("Counts", "Limit", "Used", "Reserved", "Remaining", "Full in", "Provider says"), rows)
    tenants = Counter[str](fields["tenants"]).most_common()
    who = f", of {listed([f'{tenant} ({many:,})' for tenant, many in tenants])}" if tenants else ""
    if budget.reserved_ago is not None:
        say(f"reserved as of {seconds(budget.reserved_ago)} ago")
    say(f"{budget.waiting:,} {'request waits' if budget.waiting == 1 else 'requests wait'}{who}")
    if pause := fields["pause"]:
        say(f"paused for {seconds(pause)}, by the provider's request or by a ban")
    left = budget.held - sum([row.held for row in budget.live])
    if left > 0:
        say(f"{left:,} more {'reservation' if left == 1 else 'reservations'} may belong to processes that have ended")
