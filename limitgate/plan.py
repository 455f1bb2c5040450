"""What goes to a store and what comes back: plain data, the language between rules, stores and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from limitgate import gcra
from limitgate.limits import Windows

Verb = Literal["spend", "peek", "reset"]


class Charge(NamedTuple):
    """What a request would take from one bucket."""

    key: str
    """The bucket's key in the store: digests only, nothing that a client sent."""
    windows: Windows
    cost: int
    binding: bool
    """Whether this bucket may refuse the request; a shadow rule's may not."""
    rule: str | None
    """The rule's name, None in a Limiter."""


class Plan(NamedTuple):
    """All buckets that one request touches. They are charged together or not at all."""

    charges: tuple[Charge, ...]
    verb: Verb = "spend"


class Reading(NamedTuple):
    """What a store reports: its clock in Unix µs and, per charge and window, the debt in ticks as it stood before."""

    now: int
    debts: Sequence[Sequence[int]]


def fitting(charges: Sequence[Charge], debts: Sequence[Sequence[int]]) -> list[bool]:
    """Which charges fit, each by itself."""
    return [gcra.fits(charge.windows, owed, charge.cost) for charge, owed in zip(charges, debts, strict=True)]


def admitted(charges: Sequence[Charge], fit: Sequence[bool]) -> bool:
    """Whether the request passes: every binding charge fits. Then each charge that fits is taken, else none."""
    return all(fits or not charge.binding for charge, fits in zip(charges, fit, strict=True))
