"""Creates the meter of a request that is charged tokens of a language model."""

from __future__ import annotations

from collections.abc import Sequence

from limitgate.gate.admission import Admission
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.llm.metering import ResponseMeter


def meter_response(admission: Admission, compiled_rules: Sequence[CompiledRule]) -> None:
    """Have the response read along if one of these rules has charged tokens."""
    rules = list({id(each.rule): each.rule for each in compiled_rules if each.rule.token_kinds}.values())
    if not rules or admission.meter is not None:
        return
    request = admission.request
    expected = rules[0].estimates.of(request)
    # A request without a body, such as for a list of models, uses no model.
    if any(expected):
        answers = [rule.estimates.answers(request) for rule in rules]
        admission.meter = ResponseMeter(expected, answers, admission.settlement.note_usage)
