"""Cuts the figures to a screen. The option ``names`` determines how names appear. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from limitgate.fleet.tally import EVERYBODY
from limitgate.messages.text import SAYABLE, Names, masked

MOST_PROCESSES = 60
"""Maximum of listed processes, those with problems first; others are counted."""
MOST_RULES = 40
MOST_WHO = 12
MOST_BANS = 50
MOST_HISTORY = 60

Figures = Mapping[str, Any]
_VALUE = re.compile(r"[^\s=,:]+$")


def shown_figures(figures: Figures, names: Names) -> dict[str, Any]:
    """Return all figures, masking names that services wrote in full."""
    if names == "full":
        return dict(figures)
    shown = {**figures, "rules": [_rule(each, names) for each in figures.get("rules", ())]}
    if shown.get("headline"):
        shown["headline"] = _who(shown["headline"], names)
    shown["bans"] = [{**each, "key": _ban(str(each["key"]), names)} for each in figures.get("bans", ())]
    return shown


def _rule(rule: Mapping[str, Any], names: Names) -> dict[str, Any]:
    return {**rule, **{part: [_who(each, names) for each in rule[part]] for part in ("most_refused", "most_used")}}


def _who(entry: Mapping[str, Any], names: Names) -> dict[str, Any]:
    who, key = str(entry["who"]), str(entry["key"])
    return {**entry, "who": f"#{key[:8]}" if names == "off" else _masked(who)}


def _masked(who: str) -> str:
    """Mask a name. Return masked names (with an ellipsis), routes, digests (with ``#``) and `EVERYBODY` unchanged."""
    if who.startswith("#") or who == EVERYBODY:
        return who
    return " ".join([word if _is_shown(word) else _VALUE.sub(lambda value: masked(value[0]), word) for word in who.split(" ")])


def _is_shown(word: str) -> bool:
    return "…" in word or word.partition("=")[0] in SAYABLE


def _ban(key: str, names: Names) -> str:
    rule, space, who = key.partition(" ")
    return rule if names == "off" else f"{rule}{space}{_masked(who)}" if who else rule


def screen(figures: Figures) -> dict[str, Any]:
    """Shorten the figures of a large fleet, because they are sent every two seconds."""
    rules: Sequence[Mapping[str, Any]] = figures.get("rules", ())
    processes: Sequence[Mapping[str, Any]] = figures.get("processes", ())
    kept = [{name: each[name] for name in _OF_RULE} for each in rules[:MOST_RULES]]
    refused = [
        {**each, "rule": rule["name"], "tier": rule["tier"], "shadow": rule["shadow"]}
        for rule in rules
        for each in rule["most_refused"][:MOST_WHO]
    ]
    refused.sort(key=lambda each: (each["shadow"], each["error"] - each["count"], each["rule"], each["who"]))
    down = sum(1 for each in processes if not each["store"]["up"])
    return {
        **{name: figures.get(name) for name in _WHOLE},
        "history": list(figures.get("history", ()))[-MOST_HISTORY:],
        "rules": kept,
        "rules_in_all": len(rules),
        "most_refused": refused[:MOST_WHO],
        "processes": [_process(each) for each in processes[:MOST_PROCESSES]],
        "processes_in_all": len(processes),
        "processes_down": down,
        "processes_behind": sum(1 for each in processes if not each["follows"]),
        "bans": list(figures.get("bans", ()))[:MOST_BANS],
        "bans_in_all": len(figures.get("bans", ())),
    }


_WHOLE = (
    *("at", "prefix", "store", "requests_per_second", "refused_per_second", "headline"),
    *("last_load_error", "adaptive", "empty"),
)
_OF_RULE = "name", "tier", "shadow", "admitted", "refused", "would_refuse", "utilization"


def _process(process: Mapping[str, Any]) -> dict[str, Any]:
    revisions = list(dict.fromkeys([each["revision"] for each in process["gates"]]))
    return {**{name: process[name] for name in _OF_PROCESS}, "up": process["store"]["up"], "revisions": revisions}


_OF_PROCESS = (
    *("id", "host", "pid", "version", "follows", "uptime", "requests_per_second", "refused_per_second"),
    *("last_error", "last_error_at", "clock_ahead"),
)


def as_bytes(value: object) -> bytes:
    """Return JSON without line breaks, for events, and without infinite numbers."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
