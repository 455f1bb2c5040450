"""Adds up snapshots to the figures of a fleet. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from limitgate.fleet.sketch import Top, merge
from limitgate.fleet.snapshot import STEP, STEPS, RuleState, Snapshot, read_limits
from limitgate.gate.journal import Ban

MOST_WHO = 20
"""Maximum of listed clients per rule."""
AWAY = 30.0
"""Clock difference in seconds that is reported."""
NOW = 15.0
"""A client counts as refused for this many seconds after a refusal."""
Figures = dict[str, Any]
_Revisions = frozenset[int | None]


class Fleet:
    """Figures of the processes with one key prefix. Remembers 15 minutes, so that ended processes stay in the history."""

    def __init__(self, key_prefix: str) -> None:
        self._key_prefix = key_prefix
        self._steps: dict[int, dict[str, tuple[int, int]]] = {}

    def figures(
        self, every: Sequence[Snapshot], unreadable: Sequence[str], bans: Iterable[Ban], now: float, store: Mapping[str, Any]
    ) -> Figures:
        """Return the figures except ``empty``. ``now`` is Unix time by the store's clock."""
        living = [each for each in every if not each.ended]
        gates: dict[str, list[Snapshot]] = {}
        for each in living:
            gates.setdefault(each.process or each.id, []).append(each)
        revisions = _revisions_of_most(gates.values())
        processes = sorted(
            [_process(id_, of_process, revisions, now) for id_, of_process in gates.items()],
            key=lambda each: (each["follows"], each["host"], each["pid"], each["id"]),
        )
        self._note_steps(every, now)
        rules = _rules(living, now)
        failed = [each for each in processes if each["last_load"]["error"]]
        load_error = max(failed, key=lambda each: each["last_load"]["at"], default=None)
        return {
            "at": now,
            "prefix": self._key_prefix,
            "store": store,
            "requests_per_second": sum([each.rates[0] for each in living]),
            "refused_per_second": sum([each.rates[1] for each in living]),
            "history": self._history(now),
            "headline": _headline(rules, now),
            "rules": rules,
            "processes": processes,
            "revision": _one(revisions),
            "revisions": dict(Counter([_shown(_revisions(each)) for each in gates.values()])),
            "last_load_error": None
            if load_error is None
            else {**load_error["last_load"], "host": load_error["host"], "pid": load_error["pid"]},
            "bans": [{**each.fields(now), "digest": each.digest} for each in bans if each.until > now],
            "adaptive": _adaptive(living),
            "unreadable": list(unreadable),
        }

    def _note_steps(self, every: Iterable[Snapshot], now: float) -> None:
        """Note the history, corrected by the clock difference, because a process' clock may be wrong by hours."""
        for snapshot in every:
            ahead = round(_ahead(snapshot, now) / STEP)
            for step, requests, refused in snapshot.history:
                self._steps.setdefault(step - ahead, {})[snapshot.id] = requests, refused
        oldest = int(now // STEP) - STEPS
        for step in [each for each in self._steps if each < oldest]:
            del self._steps[step]

    def _history(self, now: float) -> list[dict[str, int]]:
        current = int(now // STEP)
        found = []
        for step in range(current - STEPS, current):
            of_step = self._steps.get(step, {}).values()
            requests, refused = sum([each[0] for each in of_step]), sum([each[1] for each in of_step])
            found.append({"at": step * STEP, "seconds": STEP, "admitted": max(0, requests - refused), "refused": refused})
        return found


def _process(id_: str, gates: Sequence[Snapshot], of_most: _Revisions, now: float) -> dict[str, Any]:
    latest = max(gates, key=lambda each: each.at)
    failing = max(gates, key=lambda each: each.last_error_at or -math.inf)
    load = max([each.load for each in gates], key=lambda each: (not each.ok, each.at))
    down = next((each.store for each in gates if not each.store.up), latest.store)
    revisions = _revisions(gates)
    return {
        "host": latest.host,
        "pid": latest.pid,
        "id": id_,
        "version": latest.version,
        "revision": _one(revisions),
        # A gate without requests doesn't report, so a process may have fewer gates than others.
        "follows": revisions <= of_most or revisions >= of_most,
        "rules_from": ", ".join(dict.fromkeys([each.source for each in gates])),
        "start": latest.start,
        "uptime": max(0.0, latest.at - latest.start),
        "requests": sum([each.requests for each in gates]),
        "refused": sum([each.refused for each in gates]),
        "requests_per_second": sum([each.rates[0] for each in gates]),
        "refused_per_second": sum([each.rates[1] for each in gates]),
        "store": {"up": down.up, "latency": down.latency, "breaker": down.breaker, "scheme": down.scheme},
        "last_error": failing.last_error,
        "last_error_at": failing.last_error_at,
        "last_load": {"ok": load.ok, "at": load.at, "error": load.error},
        "clock_ahead": round(_ahead(latest, now), 3),
        "gates": [
            {"revision": each.revision, "rules_from": each.source, "requests": each.requests, "refused": each.refused}
            for each in gates
        ],
    }


def _revisions(gates: Iterable[Snapshot]) -> _Revisions:
    return frozenset([each.revision for each in gates])


def _one(revisions: _Revisions) -> int | None:
    return next(iter(revisions)) if len(revisions) == 1 else None


def _shown(revisions: _Revisions) -> str:
    return ", ".join(sorted(map(str, revisions)))


def _revisions_of_most(processes: Iterable[Sequence[Snapshot]]) -> _Revisions:
    ranks: dict[_Revisions, tuple[int, float]] = {}
    for gates in processes:
        revisions = _revisions(gates)
        count, at = ranks.get(revisions, (0, 0.0))
        ranks[revisions] = count + 1, max([at, *[each.load.at for each in gates]])
    return max(ranks, key=lambda each: ranks[each], default=frozenset())


def _rules(living: Iterable[Snapshot], now: float) -> list[dict[str, Any]]:
    together: dict[tuple[str, str], list[RuleState]] = {}
    for snapshot in living:
        ahead = _ahead(snapshot, now)
        for rule in snapshot.rules:
            state = _shifted(rule, ahead) if ahead else rule
            together.setdefault((rule.name, rule.tier), []).append(state)
    found = [
        {
            "name": name,
            "tier": tier,
            "shadow": _is_shadow(states),
            "admitted": sum([each.admitted for each in states]),
            "refused": sum([each.refused for each in states]),
            "would_refuse": sum([each.would_refuse or 0 for each in states]),
            "utilization": max([each.utilization for each in states]),
            "limits": next((read_limits(each.limits) for each in states if each.limits), []),
            "most_refused": _listed([each.refusals for each in states], states, 1),
            "most_used": _listed([each.used for each in states], states, 0),
        }
        for (name, tier), states in together.items()
    ]
    return sorted(found, key=lambda each: (-each["utilization"], -each["refused"], each["name"], each["tier"]))


def _is_shadow(states: Sequence[RuleState]) -> bool:
    """Return whether a rule is a shadow rule. Old versions, and processes without rules yet, don't report this."""
    others = [each for each in states if each.would_refuse is None]
    return len(others) < len(states) and not any(each.refused for each in others)


def _listed(tops: Sequence[Top], states: Sequence[RuleState], kind: int) -> list[dict[str, Any]]:
    per_second: dict[str, float] = {}
    for state in states:
        for key, rate in state.rates[kind].items():
            per_second[key] = per_second.get(key, 0.0) + rate
    return [
        {
            "who": next((each.names[entry.key] for each in states if each.names.get(entry.key)), f"#{entry.key[:8]}"),
            "count": entry.hits,
            "error": entry.error,
            "since": entry.since,
            "last": entry.last,
            "per_second": per_second.get(entry.key, 0.0),
            "key": entry.key,
        }
        for entry in merge(tops, MOST_WHO).entries
    ]


def _ahead(snapshot: Snapshot, now: float) -> float:
    ahead = snapshot.at - now
    return ahead if abs(ahead) > AWAY else 0.0


def _shifted(rule: RuleState, ahead: float) -> RuleState:
    used, refusals = (
        top._replace(entries=[each._replace(since=each.since - ahead, last=each.last - ahead) for each in top.entries])
        for top in (rule.used, rule.refusals)
    )
    return replace(rule, used=used, refusals=refusals)


def _adaptive(living: Iterable[Snapshot]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[int]] = {}
    for snapshot in living:
        for name, tier, limit, in_flight in snapshot.adaptive:
            each = found.setdefault((name, tier), [0, 0])
            each[0] += limit
            each[1] += in_flight
    return [
        {"rule": name, "tier": tier, "limit": limit, "in_flight": in_flight}
        for (name, tier), (limit, in_flight) in sorted(found.items())
    ]


def _headline(rules: Iterable[Mapping[str, Any]], now: float) -> dict[str, Any] | None:
    """Return the client that is refused most, or if none is refused, one that a shadow rule would refuse."""
    found = [
        ((not rule["shadow"], each["per_second"], each["count"] - each["error"]), rule, each)
        for rule in rules
        for each in rule["most_refused"]
        if now - each["last"] <= NOW
    ]
    if not found:
        return None
    _, rule, most = max(found, key=lambda each: each[0])
    return {"who": most["who"], "rule": rule["name"], "tier": rule["tier"], "shadow": rule["shadow"]} | {
        name: most[name] for name in ("count", "error", "since", "last", "per_second", "key")
    }
