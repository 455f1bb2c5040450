"""Logs the refusals of a gate."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from limitgate.gate.admission import Admission
from limitgate.gate.permits import Permits
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.limits.decision import Decision
from limitgate.messages.text import Names
from limitgate.observing.episodes import Episodes, log


class RefusalLog:
    """Logs refusing buckets, at most ``per_minute`` lines. ``names`` defines how much of a name is shown."""

    def __init__(self, per_minute: int, names: Names) -> None:
        self.episodes = Episodes(per_minute)
        """If `count` returns False, the caller has to call `begin`."""
        self._names = names

    def begin(  # noqa: PLR0917 - keywords would be slower
        self,
        admission: Admission,
        decision: Decision,
        key: str,
        now: int,
        refusal_id: str | None,
        compiled_rules: Sequence[CompiledRule],
    ) -> None:
        """Start an episode of refusals by the bucket ``key``. ``now`` is Unix time in µs.

        ``compiled_rules`` belong to the plan.
        """
        name = partial(self._name, admission, decision.rule, compiled_rules)
        self.episodes.begin(key, decision.rule, now, refusal_id, name)

    def note_shadows(self, admission: Admission, decision: Decision, now: int, compiled_rules: Sequence[CompiledRule]) -> None:
        """Record refusals by shadow rules. ``now`` is Unix time in µs."""
        full = [charge for charge, _, after in decision.evidence if after is None and not charge.enforced]
        for key, rule in {charge.key.removesuffix(charge.bucket.suffix): charge.rule for charge in full}.items():
            if not self.episodes.count(key, now) and log.isEnabledFor(logging.INFO):
                name = partial(self._name, admission, rule, compiled_rules)
                self.episodes.begin(key, rule, now, None, name, is_shadow=True)

    def note_ban(self, rule: str, who: str, seconds: float, after: int, within: float) -> None:
        """Record a ban for ``seconds`` after ``after`` refusals within ``within`` seconds."""
        facts = {"rule": rule, "who": who, "seconds": seconds, "after": after, "within": within}
        shown = rule, f" {who}" if who else "", seconds, after, within
        self.episodes.tell("rule %s bans%s for %g s: refused %d times within %g s", shown, facts)

    def note_shed(self, permits: Permits) -> None:
        """Record a refusal by an adaptive limit."""
        self._note_no_place(permits.in_force[-1][0], is_shadow=False)

    def note_shed_by_shadows(self, permits: Permits) -> None:
        """Record refusals by adaptive limits of shadow rules."""
        for compiled_rule in permits.would_refuse:
            self._note_no_place(compiled_rule.name, is_shadow=True)

    def _note_no_place(self, rule: str | None, *, is_shadow: bool) -> None:
        key, now = f"adaptive {rule}", time.time_ns() // 1000
        if not self.episodes.count(key, now) and log.isEnabledFor(logging.INFO):
            self.episodes.begin(key, rule, now, None, lambda: "what is more than the process can do", is_shadow=is_shadow)

    def _name(self, admission: Admission, rule: str | None, compiled_rules: Sequence[CompiledRule]) -> str:
        refusing = next((each for each in compiled_rules if each.rule.name == rule), None)
        if refusing is None or admission.settlement.is_over:
            return ""
        subject = admission.rules.planner.subject(admission.request, admission.identified)
        return refusing.named(subject, self._names)
