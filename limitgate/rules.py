"""Rules: which requests a limit is for, and the rule sets of the tiers. All text is taken apart here, at start-up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StrictBool, StrictStr, ValidationError, field_validator

from limitgate.callers import DEFAULT_TIER, Callers, KnownCaller, Text
from limitgate.errors import ConfigError
from limitgate.keys import check_part
from limitgate.limits import Limit, Windows, as_limit
from limitgate.paths import segments
from limitgate.request import Request

T = TypeVar("T")
OnError = Literal["open", "closed", "local"]
Cost = int | Callable[[Request], int]
Name = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9._-]{1,64}\z")]
Count = Annotated[int, Field(strict=True, ge=1)]

_METHOD = re.compile(r"[A-Za-z][A-Za-z-]*", re.ASCII)
_QUICK = {"qps": "second", "qpm": "minute", "qph": "hour", "qpd": "day"}


def check_cost(cost: object) -> int:
    """``cost`` as it may be charged. Raises `TypeError` if it is no integer, `ValueError` if it is negative."""
    if type(cost) is not int:
        raise TypeError(f"cost is a {type(cost).__name__}, expected an integer, or in a rule a callable that gives one")
    if cost < 0:
        raise ValueError(f"cost is {cost}, expected at least 0")
    return cost


def _cost_or_callable(value: object) -> Cost:
    return value if callable(value) else check_cost(value)


class Rule(BaseModel):
    """Limits for the requests that match, counted per key.

    ``Rule("api", "5/second", qpm=100, path="/api/**", key=["path", "ip"])``. Raises `ConfigError` for an unknown option, a
    value that makes no sense, a rule without limits, or a fixed cost that no limit could ever admit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    """Up to 64 letters, digits, dots, hyphens and underscores; once in a tier. Clients read it in ``violated-policies``."""
    limits: tuple[Annotated[Limit, PlainValidator(as_limit)], ...] = ()
    """Limits such as ``100/minute`` or ``10/s burst 20``; all of them have to have room."""
    qps: Count | None = None
    """Requests per second."""
    qpm: Count | None = None
    """Requests per minute."""
    qph: Count | None = None
    """Requests per hour."""
    qpd: Count | None = None
    """Requests per day."""
    path: StrictStr = "/**"
    """Paths that the rule is for: ``/login``, ``/items/{id}`` or ``/api/**``."""
    methods: frozenset[StrictStr] | None = None
    """Methods that the rule is for, all if not given. GET covers HEAD and WebSocket handshakes."""
    key: Annotated[tuple[StrictStr, ...], Field(min_length=1)] = ("ip",)
    """What buckets are told apart by, see docs/keys.md."""
    tier: Text | None = None
    """The tier that the rule belongs to; in a file, that of the file if not given."""
    cost: Annotated[Cost, PlainValidator(_cost_or_callable)] = 1
    """How many requests one counts for; in Python also a callable ``(request) -> int``."""
    on_error: OnError | None = None
    """What a request gets when the store fails; as the option of this name says if not given."""
    shadow: StrictBool = False
    """Count and report, but never refuse."""
    exempt: StrictBool = False
    """Switch every rule off for the requests that match."""
    lease: Annotated[int, Field(strict=True, ge=0)] = 0
    """Requests that a process may take in advance, for limits that say nothing about it; 0 to ask for every one."""

    def __init__(self, /, name: str, *limits: Limit | str, **options: Any) -> None:
        if limits:
            options["limits"] = (*limits, *options.get("limits", ()))
        try:
            super().__init__(name=name, **options)
        except ValidationError as error:
            raise ConfigError.explaining(error, f"rule {name!r}", Rule.model_fields) from error
        self._check()

    @field_validator("path")
    @classmethod
    def _path_is_a_pattern(cls, path: str) -> str:
        segments(path)
        return path

    @field_validator("key")
    @classmethod
    def _parts_are_known(cls, key: tuple[str, ...]) -> tuple[str, ...]:
        for part in key:
            check_part(part)
        return key

    @field_validator("methods")
    @classmethod
    def _methods_are_classes(cls, methods: frozenset[str] | None) -> frozenset[str] | None:
        if methods is None:
            return None
        if not methods or not all(_METHOD.fullmatch(method) for method in methods):
            raise ConfigError(f"{sorted(methods)} are no methods, expected for example [GET, POST]")
        upper = {method.upper() for method in methods}
        return frozenset(upper - {"HEAD"} | ({"GET"} if "HEAD" in upper else set()))

    @cached_property
    def windows(self) -> Windows:
        """The limits and the qps, qpm, qph and qpd, in this order."""
        given = {field: getattr(self, field) for field in _QUICK if getattr(self, field)}
        quick = [self._checked(field, Limit, f"{count}/{_QUICK[field]}") for field, count in given.items()]
        limits = (*self.limits, *quick)
        if self.lease:
            limits = tuple([limit if limit.lease else self._checked("lease", limit.leased, self.lease) for limit in limits])
        return self._checked("limits", Windows, limits)

    def _checked(self, field: str, make: Callable[..., T], value: object) -> T:
        """What ``make`` makes of a value, its complaint naming the rule and the field."""
        try:
            return make(value)
        except ConfigError as error:
            raise ConfigError(f"rule {self.name!r}: {field}: {error}", (field,), error.reason) from error

    def key_asks(self, label: str) -> bool:
        """Whether a part of the key, or an alternative in it, is ``label``."""
        return any(label in check_part(part) for part in self.key)

    def applies_to(self, method: str) -> bool:
        """Whether the rule is for this method, HEAD having become GET."""
        return self.methods is None or method in self.methods

    def cost_of(self, request: Request) -> int:
        """What this request costs. Raises `TypeError` or `ValueError` where a callable gives no valid cost."""
        return check_cost(self.cost(request)) if callable(self.cost) else self.cost

    def _check(self) -> None:
        limits = self.windows.limits
        if self.exempt and limits:
            raise ConfigError(f"rule {self.name!r} is exempt and has limits, expected one or the other", ("exempt",))
        if not self.exempt and not limits:
            raise ConfigError(f"rule {self.name!r} has no limit, expected limits, qps, qpm, qph or qpd", ("limits",))
        for limit in limits:
            if isinstance(self.cost, int) and self.cost > limit.burst:
                raise ConfigError(
                    f"rule {self.name!r}: cost {self.cost} never fits into {limit}, expected at most {limit.burst}",
                    ("cost",),
                )


class RuleSet:
    """Rules by tier, and the callers that are known to be of one. Raises `ConfigError` where they contradict each other.

    Rules without a tier are of tier ``default``, which is for everybody. Any other tier is laid over it: a rule of the same
    name replaces the default's, the others stay, new ones are added.
    """

    def __init__(self, rules: Iterable[Rule], callers: Iterable[KnownCaller] = (), tiers: Iterable[str] = ()) -> None:
        own: dict[str, dict[str, Rule]] = {tier: {} for tier in (DEFAULT_TIER, *tiers)}
        for place, rule in enumerate(rules):
            tier = rule.tier or DEFAULT_TIER
            of_tier = own.setdefault(tier, {})
            if rule.name in of_tier:
                message = f"rule {rule.name!r} is there twice in tier {tier!r}, expected different names"
                raise ConfigError(message, ("rules", place, "name"))
            of_tier[rule.name] = rule
        default = own[DEFAULT_TIER]
        self.tiers: dict[str, tuple[Rule, ...]] = {
            tier: tuple({**default, **of_tier}.values()) for tier, of_tier in own.items()
        }
        self.callers = Callers(callers)

    def __repr__(self) -> str:
        return f"RuleSet({', '.join(f'{tier}: {len(rules)} rules' for tier, rules in self.tiers.items())})"
