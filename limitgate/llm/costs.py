"""Costs of a language model's requests behind a gate: ``("200000/minute", tokens)``. Pure.

Costs are estimated from the body and settled by the response, see `limitgate.llm.metering`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from limitgate.http.body import UNREAD
from limitgate.http.request import BodyWanted, Request
from limitgate.llm.estimate import AT_FIRST, Answers, Estimate, Percentile, estimate_of

TokenKind = Literal["tokens", "input_tokens", "output_tokens"]
FAILED = 400
"""Responses from this status on cost no tokens."""
NOT_OF_MODELS = Estimate(None, 0, 0)
"""Estimate of a request without a body."""


def tokens(request: Request) -> int:
    """Cost of a limit on input and output tokens: ``("200000/minute", tokens)``.

    In rule files ``{limit: 200000/minute, cost: tokens}``. The reported usage replaces the estimate.
    """
    estimate = estimate_for(request)
    return estimate.input + _output(estimate)


def input_tokens(request: Request) -> int:
    """Cost of a limit on input tokens, see `tokens`."""
    return estimate_for(request).input


def output_tokens(request: Request) -> int:
    """Cost of a limit on output tokens, see `tokens`."""
    return _output(estimate_for(request))


COSTS: dict[TokenKind, Callable[[Request], int]] = {
    "tokens": tokens,
    "input_tokens": input_tokens,
    "output_tokens": output_tokens,
}


def kind_of(cost: object) -> TokenKind | None:
    return next((kind for kind, function in COSTS.items() if function is cost), None)


def count_of(kind: TokenKind, into: int, out: int) -> int:
    return into if kind == "input_tokens" else out if kind == "output_tokens" else into + out


def estimate_for(request: Request) -> Estimate:
    """Return the estimate, computed once. Raises `BodyWanted`."""
    known: Estimate | None = request.estimate
    if known is None:
        if request.document is UNREAD:
            raise BodyWanted
        known = request.estimate = _estimated(request)
        # The application has its own copy.
        request.raw_body = b""
    return known


def _estimated(request: Request) -> Estimate:
    body = request.raw_body
    if not body:
        return NOT_OF_MODELS
    # JSON counts as JSON whatever its headers say, because clients may lie, and applications may ignore headers.
    if isinstance(request.document, dict):
        return estimate_of(body, path=request.path, document=request.document)
    headers = request.headers
    return estimate_of(
        body,
        path=request.path,
        content_type=headers.get("content-type", ""),
        content_encoding=headers.get("content-encoding", ""),
    )


def _output(estimate: Estimate) -> int:
    return AT_FIRST if estimate.output is None else estimate.output


class TokenEstimates:
    """Estimates for one rule.

    If a request doesn't limit its output, the output is estimated from earlier answers of the model to the same caller (or
    address).
    """

    def __init__(self) -> None:
        self._answers: Answers[Any] = Answers()

    def of(self, request: Request) -> tuple[int, int]:
        """Raises `BodyWanted`."""
        estimate, answers = estimate_for(request), self.answers(request)
        return estimate.input, answers.value if estimate.output is None else estimate.output

    def answers(self, request: Request) -> Percentile:
        """Return answers to similar requests. Only the first call raises `HeadersTooLargeError`."""
        caller = request.caller
        who = ("ip", request.client) if caller is None else ("caller", caller.id)
        return self._answers.of((who, estimate_for(request).model))
