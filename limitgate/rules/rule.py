"""`Rule` and `RuleSet`: which requests a limit applies to. All text is parsed at start-up."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial
from inspect import isawaitable
from itertools import islice
from typing import Annotated, Any, Literal, Self, TypeVar, Unpack
from weakref import WeakValueDictionary

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    PrivateAttr,
    StrictBool,
    StrictStr,
    ValidationError,
)

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.algorithms.fixed_window import ALIGNED
from limitgate.errors import MOST_MISTAKES, ConfigError, Field as Place
from limitgate.http.client_ip import Networks
from limitgate.http.paths import PathIndex, covers, segments
from limitgate.http.request import Request
from limitgate.limits.bucket import Bucket, Priority, graded, parts_of, share_of
from limitgate.limits.limit import NAMES, SECONDS, Limit, limit_of_rule, seconds_of
from limitgate.limits.plan import NO_COST, REQUESTS, TOKENS, check_cost, own_cost
from limitgate.llm.costs import COSTS, FAILED, TokenEstimates, TokenKind, count_of, kind_of
from limitgate.messages.text import expected_of, meant
from limitgate.overload.options import Adaptive, Terms, as_adaptive
from limitgate.process.callables import is_async
from limitgate.rules.callers import DEFAULT_TIER, Callers, KnownCaller, Text
from limitgate.rules.options import (
    AnyLimit,
    Ban,
    ChargeIf,
    Cost,
    LimitsBy,
    OnError,
    Per,
    RuleOptions,
    When,
    as_ban,
    check_part,
    check_takes_request,
    each_is,
    gives_limits,
)

T = TypeVar("T")
Name = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9._-]{1,64}\z")]
NameOrEvery = Annotated[StrictStr, Field(pattern=r"^(?:\*|[A-Za-z0-9._-]{1,64})\z")]
Count = Annotated[int, Field(strict=True, ge=0)]

MAX_DELAY = 60.0
"""Seconds."""
_DELAY_EXPECTED = f"expected more than 0 and at most {MAX_DELAY:g} seconds"

EVERY = "*"

METHOD = re.compile(r"[A-Za-z][A-Za-z-]*", re.ASCII)
_METHODS = ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE")
_METHODS_OF_WEBDAV = ("COPY", "LOCK", "MKCOL", "MOVE", "PROPFIND", "PROPPATCH", "REPORT", "SEARCH", "UNLOCK")
_EVERY_METHOD = ("ALL", "ANY")
_HANDSHAKES = ("WEBSOCKET", "WS")
NEED_COUNTS = ("key", "cost", "on_error", "charge_if", "ban", "lease", "algorithm", "align")
"""Options that need buckets."""
_QUICK = {"qps": "{}/second", "qpm": "{}/minute", "qph": "{}/hour", "qpd": "{}/day", "concurrency": "{} at once"}


def _cost_or_callable(value: object) -> Cost:
    if isinstance(value, str):
        if value not in COSTS:
            expected = expected_of(value, [*COSTS]).replace("expected", "expected an integer, or", 1)
            raise TypeError(f"cost is {value!r:.80}, {expected}")
        return COSTS[value]
    if not callable(value):
        return check_cost(value)
    if is_async(value):
        raise ConfigError(f"{value!r:.80} is async, expected a plain function (request) -> int")
    return check_takes_request(value)


def _delay(value: object) -> float | None:
    if value is None or (seconds := seconds_of(value)) <= MAX_DELAY:
        return None if value is None else seconds
    raise ConfigError(f"{value!r:.80} is not a delay, {_DELAY_EXPECTED}")


def _paths(value: object) -> str | tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not patterns:
        raise ConfigError(f"{value!r:.80} is not a path, expected for example '/api/**', or a list of such patterns")
    if isinstance(value, str):
        _check_pattern(value)
    else:
        ConfigError.check_each(patterns, _check_pattern)
    return tuple(patterns) if len(patterns) > 1 else str(patterns[0])


def _check_pattern(pattern: object) -> None:
    if not isinstance(pattern, str):
        raise ConfigError(f"{pattern!r:.80} is not a path, expected text such as '/api/**'")
    segments(pattern)


def _named_parts(value: object) -> object:
    if isinstance(value, list | tuple):
        ConfigError.check_each(value, _check_named_part)
    else:
        _check_named_part(value)
    return value


def _check_named_part(part: object) -> None:
    if callable(part):
        raise ConfigError("a callable, expected names such as 'ip'; for custom keys use 'caller' with the option identify")
    if isinstance(part, dict):
        raise ConfigError("a mapping, expected text without a space after the colon, such as header:X-Id")


def _known_algorithm(algorithm: str | None) -> str | None:
    if algorithm is not None and algorithm not in NAMES:
        raise ConfigError(f"{algorithm!r:.80} is not an algorithm, {expected_of(algorithm, NAMES)}")
    return algorithm


def _classes(methods: frozenset[str] | None) -> frozenset[str] | None:
    if methods is None:
        return None
    if not methods or not all(METHOD.fullmatch(method) for method in methods):
        raise ConfigError(f"{sorted(methods)!s:.80} are not methods, expected for example [GET, POST]")
    upper = {method.upper() for method in methods}
    return frozenset(upper - {"HEAD"} | ({"GET"} if "HEAD" in upper else set()))


def _condition(value: object) -> When | None:
    if value is not None and (not callable(value) or is_async(value)):
        what = "is async" if callable(value) else "is not callable"
        raise ConfigError(f"{value!r:.80} {what}, expected a plain function (request) -> bool, in Python rules only")
    return None if value is None else check_takes_request(value)


_placed_rules: WeakValueDictionary[int, Rule] = WeakValueDictionary()


def placed_rules() -> list[Rule]:
    """Return the limits of decorators, dependencies and throttles.

    A throttle with a rate is included after its first request.
    """
    return list(_placed_rules.values())


class Rule(BaseModel, extra="forbid", frozen=True):
    """Limits for matching requests, counted per key.

    ``Rule("api", "5/second", qpm=100, path="/api/**", key=["path", "ip"])``. Raises `ConfigError` for an unknown option, an
    invalid value, a rule without limits, or a fixed cost above a limit.
    """

    name: Name
    """Up to 64 letters, digits, dots, hyphens and underscores; unique in a tier. Clients see it in ``violated-policies``."""
    limits: tuple[Annotated[Limit, PlainValidator(limit_of_rule)], ...] = ()
    """Limits such as ``100/minute`` or ``10/s burst 20``; all must have room. A limit can have its own cost: ``{limit:
    200000/minute, cost: 900}``. In Python also a callable.
    """
    qps: Count | None = None
    """Requests per second; 0 refuses all."""
    qpm: Count | None = None
    """Requests per minute."""
    qph: Count | None = None
    """Requests per hour."""
    qpd: Count | None = None
    """Requests per day."""
    concurrency: Count | None = None
    """Maximum of requests in flight; each counts until its response or WebSocket ends."""
    adaptive: Annotated[Adaptive | None, PlainValidator(as_adaptive)] = None
    """Limits requests in flight to the number that this process can sustain: true, or a mapping. See docs/overload.md."""
    path: Annotated[str | tuple[str, ...], PlainValidator(_paths)] = "/**"
    """Paths: ``/login``, ``/items/{id}``, ``/api/**``, or a list."""
    exclude: Annotated[tuple[StrictStr, ...], each_is(_check_pattern)] = ()
    """Patterns to exclude from ``path``."""
    methods: Annotated[frozenset[StrictStr] | None, AfterValidator(_classes)] = None
    """Methods; all if omitted. GET includes HEAD and WebSocket handshakes. HEAD alone means both."""
    clients: Annotated[tuple[StrictStr, ...], each_is(lambda entry: Networks([entry]))] = ()
    """Addresses and CIDRs of clients, as seen behind trusted proxies; all if omitted."""
    when: Annotated[When | None, PlainValidator(_condition)] = None
    """Condition, in Python only: a plain function ``(request) -> bool``."""
    replaces: Annotated[tuple[NameOrEvery, ...], BeforeValidator(lambda value: (value,) if value == EVERY else value)] = ()
    """Rules that this rule replaces for its requests; ``"*"`` means all with limits, except ``@limit``."""
    key: Annotated[tuple[StrictStr, ...], Field(min_length=1), BeforeValidator(_named_parts), each_is(check_part)] = ("ip",)
    """Parts of a request that select its bucket. See docs/keys.md."""
    tier: Text | None = None
    """Tier whose callers the rule applies to; in a file, by default the file's."""
    cost: Annotated[Cost, PlainValidator(_cost_or_callable)] = 1
    """Cost of a request; ``tokens``, ``input_tokens`` or ``output_tokens`` for language models, see docs/budgets.md; in Python
    also a callable ``(request) -> int``.
    """
    body: StrictBool = False
    """Read the JSON body for callables as ``request.json``. Implied by ``json:`` keys and costs in tokens."""
    on_error: OnError | None = None
    """Behaviour while the store fails; if omitted, that of the option ``on_error``."""
    charge_if: ChargeIf | None = None
    """Outcomes that are charged. Other requests are refunded at their end."""
    ban: Annotated[Ban | None, PlainValidator(as_ban)] = None
    """Bans clients after too many refusals: ``{after: 20, within: 10m, for: 1h}``; in Python a ``Ban``."""
    per: Per = "request"
    """Count requests, or each message from a client over a WebSocket."""
    shadow: StrictBool = False
    """Count and report, but never refuse."""
    exempt: StrictBool = False
    """Exempt matching requests from every rule; with ``clients``, an allow list."""
    deny: StrictBool = False
    """Answer matching requests with 403, without a charge; with ``clients``, a deny list."""
    lease: Annotated[int, Field(strict=True, ge=0)] = 0
    """Requests that a process takes in advance, unless a limit has its own ``lease``; 0: none."""
    algorithm: Annotated[StrictStr | None, AfterValidator(_known_algorithm)] = None
    """Algorithm of limits that don't name one. See docs/algorithms.md."""
    align: StrictStr | None = None
    """Start of a ``fixed_window``, unless a limit has its own. A time zone needs windows of whole days."""
    max_delay: Annotated[float | None, PlainValidator(_delay)] = None
    """Longest wait of a request for its turn: seconds, or ``2s``. 0 is valid only with ``adaptive``."""
    priority: Priority | None = None
    """Priority under this rule; by default that of the caller."""
    reserve: Annotated[Fraction, PlainValidator(share_of)] | None = None
    """Share of each limit that only high priority may use, such as ``20%``. For low priority, the share is twice as large."""

    _limits_by: LimitsBy | None = PrivateAttr(None)
    _own_costs: Mapping[int, Cost] = PrivateAttr({})

    def __init__(self, /, name: str, *limits: AnyLimit, **options: Unpack[RuleOptions]) -> None:
        fields: dict[str, Any] = {**options}
        more = fields.get("limits", ())
        if limits or gives_limits(more):
            fields["limits"] = (*limits, *((more,) if gives_limits(more) else more))
        fields, limits_by = _without_callables(name, fields)
        fields, own_costs = _without_costs(name, fields)
        try:
            super().__init__(name=name, **fields)
        except ValidationError as error:
            inside = error.errors(include_url=False)[0]["loc"][1:]  # only charge_if has fields
            known = ChargeIf.model_fields if inside else Rule.model_fields
            raise ConfigError.explaining(error, f"rule {name!r}", known) from None
        except TypeError as error:
            raise TypeError(f"rule {name!r}: {error}") from error
        self._limits_by, self._own_costs = limits_by, own_costs  # type: ignore[misc]  # frozen for users only
        if not self.has_limits and self.methods and not self.methods.issubset(map(str.upper, fields["methods"])):
            reason = "HEAD counts as GET, so the rule would apply to GET, too; expected GET instead, or no HEAD"
            raise ConfigError(f"rule {name!r}: methods: {reason}", ("methods",))
        self._check()

    @property
    def limits_by(self) -> LimitsBy | None:
        """The callable that returns a request's limits. Written limits replace invalid results."""
        return self._limits_by

    def limits_by_body(self, request: Request) -> Any:
        limits_by: Any = self._limits_by
        return limits_by(request.with_json())

    def having_limits(self, limits: Sequence[Limit]) -> Rule:
        """Return this rule with run-time limits, and the options that they support. Raises `ConfigError`."""
        suited = tuple([self._suited(limit) for limit in limits])
        parts = self._checked("limits", partial(parts_of, costed=self._own_costs), suited)
        # `model_construct` takes ten times as long, and makes another set and dictionary for each rule.
        rule = Rule.__new__(Rule)
        become = object.__setattr__
        become(rule, "__dict__", {**self._but_limits, "limits": suited, "every_limit": suited, "_parts": parts})
        become(rule, "__pydantic_fields_set__", self.__pydantic_fields_set__)
        become(rule, "__pydantic_extra__", None)
        become(rule, "__pydantic_private__", {"_limits_by": None, "_own_costs": self._own_costs})
        rule._refuse(rule._wrong_limits())  # noqa: SLF001 - it is one of ours
        return rule

    @cached_property
    def _but_limits(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in Rule.model_fields if name != "limits"}
        return fields | dict.fromkeys(_QUICK) | {"algorithm": None, "align": None, "lease": 0}

    def _suited(self, limit: Limit) -> Limit:
        if self.algorithm and not limit.says_algorithm:
            limit = limit.having(algorithm=self.algorithm)
        if self.align is not None and limit.algorithm == "fixed_window" and limit.align is None:
            is_unable = self.align not in ALIGNED and limit.period % SECONDS["day"]
            limit = limit if is_unable else limit.having(align=self.align)
        if self.lease and not (limit.lease or limit.borrow) and ALGORITHMS[limit.algorithm] is gcra:
            limit = limit.leased(min(self.lease, limit.burst))
        return limit

    @cached_property
    def every_limit(self) -> tuple[Limit, ...]:
        """The ``limits``, then those of qps, qpm, qph, qpd and concurrency."""
        given = {field: getattr(self, field) for field in _QUICK if getattr(self, field) is not None}
        quick = [self._checked(field, Limit, _QUICK[field].format(count)) for field, count in given.items()]
        limits = [*self.limits, *quick]
        if self.algorithm:
            limits = self._each(limits, [limit for limit in limits if not limit.says_algorithm], algorithm=self.algorithm)
        if self.align is not None:
            fixed = [limit for limit in limits if limit.algorithm == "fixed_window" and limit.align is None]
            days = [limit for limit in fixed if not limit.period % SECONDS["day"]]
            limits = self._each(limits, days if days and self.align not in ALIGNED else fixed, align=self.align)
        if self.lease:
            limits = self._each(limits, [limit for limit in limits if not limit.lease], lease=self.lease)
        return tuple(limits)

    @property
    def limit_fields(self) -> list[Place]:
        written: list[Place] = [("limits", place) for place in range(len(self.limits))]
        return written + [(name,) for name in _QUICK if getattr(self, name) is not None]

    def _each(self, limits: Sequence[Limit], some: Sequence[Limit], **option: object) -> list[Limit]:
        ((field, value),) = option.items()
        if not some and field != "lease" and self.limits_by is None:
            why = f"has no effect, because every limit has its own {field}, expected none here"
            if field == "align" and not any(limit.algorithm == "fixed_window" for limit in limits):
                why = "is for a fixed_window, but no limit is one, expected algorithm: fixed_window"
            raise ConfigError.at((field,), f"{value!r:.80} {why}", f"rule {self.name!r}")

        def having(limit: Limit) -> Limit:
            return self._checked(field, lambda given: limit.having(**{field: given}), value)

        return [having(limit) if limit in some else limit for limit in limits]

    @cached_property
    def _parts(self) -> tuple[tuple[Bucket, int | None], ...]:
        return self._checked("limits", partial(parts_of, costed=self._own_costs), self.every_limit)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple([bucket for bucket, _ in self._parts])

    @cached_property
    def bucket_costs(self) -> tuple[Cost | None, ...]:
        """Own cost of each bucket; None stands for the request's cost. Empty if no limit has its own cost."""
        # A place of a request in flight has no tokens.
        of_rule = [None if bucket.has_slots or kind_of(self.cost) is None else self.cost for bucket in self.buckets]
        costs = [other if place is None else self._own_costs[place] for (_, place), other in zip(self._parts, of_rule)]
        return tuple(costs) if any(cost is not None for cost in costs) else ()

    @cached_property
    def token_kinds(self) -> tuple[TokenKind | None, ...]:
        """Kind of tokens of each bucket, or None. Empty without costs in tokens."""
        kinds = tuple(map(kind_of, self.bucket_costs))
        return kinds if any(kinds) else ()

    @cached_property
    def bucket_units(self) -> tuple[str, ...]:
        """Unit of each bucket, see `limitgate.limits.plan.TOKENS`. An unknown unit is empty."""
        if kinds := self.token_kinds:
            return tuple([kind or (REQUESTS if place is None else "") for kind, (_, place) in zip(kinds, self._parts)])
        many = len(self._own_costs)
        units = iter(TOKENS.get(many, ("tokens",) * many))
        return tuple([REQUESTS if place is None else next(units) for _, place in self._parts])

    @cached_property
    def estimates(self) -> TokenEstimates:
        """Estimates for costs in tokens."""
        return TokenEstimates()

    def cost_in_tokens(self, bucket: Bucket, cost: int, status: int | None, usage: tuple[int, int] | None) -> int:
        """Return the final cost of a charge of ``cost``, by status, and by usage if known."""
        kind = next((kind for own, kind in zip(self.buckets, self.token_kinds) if own.ids == bucket.ids), None)
        if kind is None:
            return cost
        if status is not None and status >= FAILED:
            return 0
        return cost if usage is None else count_of(kind, *usage[:2])

    @cached_property
    def own_costs(self) -> Mapping[int, Cost]:
        return self._own_costs

    def final_cost(self, bucket: Bucket, cost: int, told: int | Sequence[int]) -> int:
        """Return the final cost of a charge of ``cost`` by reported costs.

        If limits have their own costs, this is one number or one per limit.
        """
        if not self.bucket_costs:
            return told if isinstance(told, int) else cost
        own = [own for own, limit_cost in zip(self.buckets, self.bucket_costs) if limit_cost is not None]
        place = next((place for place, each in enumerate(own) if each.ids == bucket.ids), None)
        if place is None:
            return cost
        each_cost = [told] * len(own) if isinstance(told, int) else told
        return each_cost[place] if place < len(each_cost) else cost

    def buckets_for(self, priority: Priority) -> tuple[Bucket, ...]:
        return self.buckets if self.reserve is None else self._graded[self.priority or priority]

    @cached_property
    def _graded(self) -> dict[Priority, tuple[Bucket, ...]]:
        return self._checked("reserve", partial(graded, self.buckets), self.reserve or Fraction())

    def _checked(self, field: str, make: Callable[..., T], value: object) -> T:
        try:
            return make(value)
        except ConfigError as error:
            raise ConfigError.at((field, *error.field), error.reason, f"rule {self.name!r}") from error

    def key_asks(self, label: str) -> bool:
        """True if the key has this part, perhaps as an alternative."""
        return any(label in check_part(part) for part in self.key)

    @cached_property
    def kind(self) -> Literal["rule", "limit"]:
        return "rule"

    @cached_property
    def given_parts(self) -> tuple[str, ...]:
        """Key parts that the application passes with each request."""
        return ()

    @property
    def counted_by(self) -> tuple[str, ...]:
        """All parts of the keys."""
        return (*(part for part in self.key if part != "global" or not self.given_parts), *self.given_parts)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a changed copy without cached values."""
        copied = super().model_copy(update=update, deep=deep)
        for name in vars(copied).keys() - type(self).model_fields.keys() - {"kind", "given_parts"}:
            del vars(copied)[name]
        return copied

    def placed(self, given_parts: tuple[str, ...] = ()) -> Self:
        """Register this rule as a limit in code."""
        vars(self).update(kind="limit", given_parts=given_parts)
        _placed_rules[id(self)] = self
        return self

    @cached_property
    def rule_set(self) -> RuleSet:
        return RuleSet([self])

    @cached_property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    @cached_property
    def _excluded(self) -> PathIndex[str]:
        index: PathIndex[str] = PathIndex()
        for pattern in self.exclude:
            index.add(segments(pattern), pattern)
        return index

    def excludes(self, path: str) -> bool:
        """True if ``exclude`` matches a path."""
        return bool(self.exclude) and bool(self._excluded.find(path))

    @property
    def is_conditional(self) -> bool:
        """True if more than tier, method and path select the rule."""
        return bool(self.clients) or self.when is not None

    @cached_property
    def networks(self) -> Networks:
        return Networks(self.clients)

    @cached_property
    def reads_body(self) -> bool:
        """True if a decision needs the request's body."""
        if self.body or any(map(kind_of, (self.cost, *self._own_costs.values()))):
            return True
        return any(label.startswith("json:") for part in self.key for label in check_part(part))

    def admits_client(self, request: Request) -> bool:
        """True if ``clients`` match a request."""
        return not self.clients or self.networks.hold(request.client)

    def admits(self, request: Request) -> bool:
        """True if ``clients`` and ``when`` match a request. Errors of ``when`` propagate."""
        if self.clients and not self.networks.hold(request.client):
            return False
        if self.when is None:
            return True
        answer: Any = self.when(request.with_json() if self.reads_body else request)
        if isawaitable(answer):
            getattr(answer, "close", bool)()  # avoids a second warning about a coroutine that is never awaited
            raise TypeError(f"when of rule {self.name!r} is async, expected a plain function (request) -> bool")
        return bool(answer)

    def supersedes(self, other: Rule, *, is_decorator: bool) -> bool:
        """True if this rule replaces another rule, or a ``@limit``."""
        if other is self:
            return False
        return other.name in self.replaces or (EVERY in self.replaces and other.has_limits and not is_decorator)

    @property
    def has_limits(self) -> bool:
        """True unless the rule is exempt or denies."""
        return not (self.exempt or self.deny)

    @property
    def has_counts(self) -> bool:
        return bool(self.every_limit) or self.limits_by is not None

    @property
    def needs_asyncio(self) -> str | None:
        needed = {"max_delay": self.max_delay is not None, "adaptive": self.adaptive is not None, "per": self.per == "message"}
        needed["body"] = self.reads_body
        return next((option for option, is_given in needed.items() if is_given), None)

    @property
    def terms(self) -> Terms:
        """Terms of the adaptive limit."""
        return Terms(self.adaptive or Adaptive(), self.max_delay or 0.0, self.reserve)

    def applies_to(self, method: str) -> bool:
        """True if the rule applies to this method; HEAD has become GET.

        If the method is unknown (empty), all limits apply, but no exemption with methods.
        """
        return self.methods is None or method in self.methods or not (method or self.exempt)

    def misspelt_methods(self) -> Iterator[tuple[str, str]]:
        for method in sorted((self.methods or frozenset()).difference(_METHODS, _METHODS_OF_WEBDAV)):
            if method in _EVERY_METHOD:
                yield method, "no methods, which means all"
            elif method in _HANDSHAKES:
                yield method, "'GET', the method of handshakes"
            elif (near := meant(method, _METHODS)) is not None:
                yield method, repr(near)

    @property
    def has_own_cost(self) -> bool:
        """True if `Decision.settle` applies."""
        return self.cost != 1 or bool(self._own_costs)

    @property
    def max_wait_us(self) -> int:
        """Longest delay in µs, 0 for none."""
        return math.ceil((self.max_delay or 0) * 1_000_000)

    def cost_of(self, request: Request) -> int:
        return self._cost_by(self.cost, request)

    def costs_of(self, request: Request) -> int | tuple[int, ...]:
        """Return one cost per bucket, for limits with own costs. Raises `TypeError` or `ValueError`."""
        own_costs = self.bucket_costs
        if not own_costs:
            return self.cost_of(request)
        kinds = self.token_kinds or (None,) * len(own_costs)
        into, out = self.estimates.of(request) if any(kinds) else (0, 0)
        # Costs in tokens are not those of slots.
        other = 1 if kind_of(self.cost) else self.cost_of(request)
        return tuple(
            [
                count_of(kind, into, out) if kind else other if own is None else self._cost_by(own, request)
                for own, kind in zip(own_costs, kinds)
            ]
        )

    @property
    def fixed_costs(self) -> int | tuple[int, ...] | None:
        """`costs_of`; None if a cost depends on the request."""
        costs = [self.cost if own is None else own for own in self.bucket_costs] or [self.cost]
        fixed = [cost for cost in costs if isinstance(cost, int)]
        if len(fixed) < len(costs):
            return None
        return tuple(fixed) if self.bucket_costs else fixed[0]

    def _cost_by(self, by: Cost, request: Request) -> int:
        if not callable(by):
            return by
        cost = by(request.with_json() if self.reads_body else request)
        if type(cost) is not int:
            raise TypeError(f"the cost of rule {self.name!r} returned a {type(cost).__name__}, expected an integer")
        if cost < 0:
            raise ValueError(f"the cost of rule {self.name!r} returned {cost}, expected at least 0")
        return cost

    def _check(self) -> None:
        mistakes = []
        for wrong in (self._wrong_requests(), self._wrong_charges() if self.has_limits else self._wrong_without_limits()):
            try:
                self._refuse(wrong)
            except ConfigError as error:
                mistakes.append(error)
        if mistakes:
            raise ConfigError.first_of(mistakes)

    def _refuse(self, mistakes: Iterable[tuple[str, str]]) -> None:
        for field, what in mistakes:
            raise ConfigError(f"rule {self.name!r} {what}", (field,))

    def _wrong_charges(self) -> Iterator[tuple[str, str]]:
        if self.charge_if and self.per == "message":
            yield "charge_if", "counts messages, which have no status, expected no charge_if"
        if self.adaptive is not None:
            yield from self._wrong_adaptive()
        elif not self.has_counts:
            yield "limits", "has no limit, expected limits, qps, qpm, qph, qpd, concurrency or adaptive"
        yield from self._wrong_limits()
        if any(bucket.lease for bucket, cost in zip(self.buckets, self.bucket_costs) if cost is not None):
            yield "limits", "has a limit with a lease and its own cost, expected one of the two"
        if any(bucket.has_slots and kind for bucket, kind in zip(self.buckets, self.token_kinds)):
            yield "limits", "counts tokens of requests in flight, expected a cost in tokens on limits per time only"
        buckets = self.buckets_for("low")
        for bucket, own in zip(buckets, self.bucket_costs or [None] * len(buckets)):
            cost, field = (self.cost, "cost") if own is None else (own, "limits")
            for limit in bucket.limits:
                if isinstance(cost, int) and cost > limit.most and limit.period and limit.count:
                    message = f"rule {self.name!r}: cost {cost} exceeds {limit}, expected at most {limit.most}"
                    raise ConfigError(message, (field,))

    def _wrong_adaptive(self) -> Iterator[tuple[str, str]]:
        if self.per == "message":
            yield "per", "is adaptive, so it limits requests in flight and not messages, expected no per"
        for field in () if self.limit_fields or self.limits_by else NEED_COUNTS:
            if field in self.model_fields_set and (field == "key" or getattr(self, field) != DEFAULTS[field]):
                what = "is adaptive, so it limits all requests of a process together"
                yield field, f"{what}, expected no {field}, or an additional limit that uses it"

    def _wrong_limits(self) -> Iterator[tuple[str, str]]:
        if self.charge_if and any(bucket.lease for bucket in self.buckets):
            yield "charge_if", "has a lease, which can't be refunded exactly, expected no charge_if"
        if any(bucket.has_slots for bucket in self.buckets) and (self.charge_if or self.per == "message"):
            field = "charge_if" if self.charge_if else "per"
            yield field, f"limits requests in flight, where {field} has no effect, expected no {field}"
        if self.max_delay is not None:
            yield from self._wrong_delay(self.max_delay)
        yield from self._wrong_reserve()
        _ = self.buckets_for("low")

    def _wrong_requests(self) -> Iterator[tuple[str, str]]:
        for field in ("clients", "exclude", "replaces"):
            if not getattr(self, field) and field in self.model_fields_set:
                raise ConfigError(f"rule {self.name!r}: {field} is empty, expected values, or no {field}", (field,))
        around = [segments(pattern) for pattern in self.exclude]
        if around and all(any(covers(each, segments(path)) for each in around) for path in self.paths):
            yield "exclude", "excludes all of its path, expected some paths to remain"
        if self.reads_body and (self.exempt or self.per == "message"):
            what, field = ("is exempt", "exempt") if self.exempt else ("counts messages", "per")
            named = "body" if self.body else "cost" if self.token_kinds else "key"
            yield named, f"{what}, so it reads no body, expected no {field}, or a {named} without it"
        if self.name in self.replaces:
            yield "replaces", "replaces itself, expected other rules"

    def _wrong_without_limits(self) -> Iterator[tuple[str, str]]:
        field, what = ("exempt", "is exempt") if self.exempt else ("deny", "denies")
        if self.exempt and self.deny:
            yield "deny", "is exempt and denies, expected one or the other"
        if self.has_counts or self.adaptive is not None:
            yield field, f"{what} and has limits, expected one or the other"
        for field in ("charge_if", "ban", "max_delay", "reserve", "priority", "replaces", "per"):
            if getattr(self, field) not in (None, (), 0, "request"):
                yield field, f"{what}, expected no {field}, because it has no limits"

    def _wrong_reserve(self) -> Iterator[tuple[str, str]]:
        if self.reserve is None:
            if self.priority is not None and not (self.adaptive and self.max_delay):
                yield "priority", "has no reserve, expected no priority, or a reserve"
        elif any(limit.lease for limit in self.every_limit):
            yield "reserve", "has a lease, which all priorities share, expected no reserve"
        elif any(limit.borrow for limit in self.every_limit):
            yield "reserve", "has a limit with borrow, which lets any priority use everything, expected no reserve"
        elif self.max_delay and self.has_counts:
            yield "reserve", "has a max_delay, which queues requests regardless of priority, expected no reserve"

    def _wrong_delay(self, max_delay: float) -> Iterator[tuple[str, str]]:
        if not max_delay:  # 0 is valid beside ``adaptive``, and the default of `Limiter.adaptive`
            if self.adaptive is None:
                message = f"rule {self.name!r}: max_delay: {max_delay:g} is not a delay, {_DELAY_EXPECTED}"
                raise ConfigError(message, ("max_delay",))
            return
        unable = next((limit for limit in self.every_limit if limit.count and not ALGORITHMS[limit.algorithm].CAN_WAIT), None)
        if unable is not None:
            able = ", ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.CAN_WAIT)
            yield "max_delay", f"has a {unable.algorithm}, which can't queue requests, expected {able}, or no max_delay"
        elif any(bucket.lease for bucket in self.buckets):
            yield "max_delay", "has a lease, which admits requests without a delay, expected no lease, or no max_delay"
        elif self.per == "message":
            yield "max_delay", "counts messages, which cannot wait, expected no max_delay"
        elif self.shadow:
            yield "max_delay", "is in shadow mode, which never delays requests, expected no max_delay"
        elif (longest := min([bucket.longest_wait_us for bucket in self.buckets], default=self.max_wait_us)) < self.max_wait_us:
            expected = f"a max_delay of at most {longest / 1_000_000:g} s, the longest queue that it supports"
            yield "max_delay", f"has a limit that stores each queued request, expected {expected}"


def without_slots(rule: Rule) -> Rule | None:
    """Return a rule without its limits on requests in flight, other than 0; None if no limit remains."""
    places = [place for place, limit in enumerate(rule.limits) if limit.period or not limit.count]
    if len(places) == len(rule.limits) and not rule.concurrency:
        return rule
    limits = tuple([rule.limits[place] for place in places])
    left = rule.model_copy(update={"limits": limits, "concurrency": 0 if rule.concurrency == 0 else None})
    own_costs = rule.own_costs
    left._own_costs = {new: own_costs[place] for new, place in enumerate(places) if place in own_costs}  # type: ignore[misc]  # noqa: SLF001
    return left if left.has_counts else None


def unreplaced(rules: Sequence[Rule], decorators: Sequence[Rule] = ()) -> list[Rule]:
    """Return the rules that no other rule replaces. Of rules that replace each other, the first stays."""
    left = [*decorators, *rules]
    listed, applying = set(map(id, rules)), set[int]()

    def is_replaced(rule: Rule, others: Iterable[Rule]) -> bool:
        return any(other.supersedes(rule, is_decorator=id(rule) not in listed) for other in others)

    def is_mutual(rule: Rule) -> bool:
        return is_replaced(rule, [other for other in left if is_replaced(other, [rule])])

    while left:
        free = [rule for rule in left if not is_replaced(rule, left)] or [*filter(is_mutual, left), *left][:1]
        applying.update(map(id, free))
        left = [rule for rule in left if id(rule) not in applying and not is_replaced(rule, free)]
    return [rule for rule in (*rules, *decorators) if id(rule) in applying]


def _without_callables(name: str, fields: dict[str, Any]) -> tuple[dict[str, Any], LimitsBy | None]:
    limits = fields.get("limits")
    found = [limit for limit in limits if gives_limits(limit)] if isinstance(limits, list | tuple) else []
    if not found:
        return fields, None
    if len(found) > 1:
        raise ConfigError(f"rule {name!r}: limits: {len(found)} callables, expected one, which may return a list", ("limits",))
    try:
        check_takes_request(found[0])
    except ConfigError as error:
        raise ConfigError.at(("limits",), error.reason, f"rule {name!r}") from error
    return {**fields, "limits": [limit for limit in fields["limits"] if limit is not found[0]]}, found[0]


def _without_costs(name: str, fields: dict[str, Any]) -> tuple[dict[str, Any], Mapping[int, Cost]]:
    limits = fields.get("limits")
    if not isinstance(limits, list | tuple):
        return fields, {}
    costs: dict[int, Cost] = {}
    bare = []
    for place, value in enumerate(limits):
        limit, cost = own_cost(value)
        bare.append(limit)
        if cost is not NO_COST:
            try:
                costs[place] = _cost_or_callable(cost)
            except (ConfigError, TypeError, ValueError) as error:
                raise ConfigError.at(("limits", place), str(error), f"rule {name!r}") from error
    return ({**fields, "limits": bare}, costs) if costs else (fields, {})


DEFAULTS = {name: field.default for name, field in Rule.model_fields.items()}


class RuleSet:
    """Rules by tier, and the callers of these tiers. Raises `ConfigError` if they contradict each other.

    Rules without a tier belong to ``default``, which applies to all requests. Another tier extends it, and replaces rules of
    the same name.
    """

    def __init__(self, rules: Iterable[Rule], callers: Iterable[KnownCaller] = (), tiers: Iterable[str] = ()) -> None:
        own: dict[str, dict[str, Rule]] = {tier: {} for tier in (DEFAULT_TIER, *tiers)}
        listed = list(rules)
        mistakes = []
        for place, rule in enumerate(listed):
            if not isinstance(rule, Rule):
                raise ConfigError.at(("rules", place), f"{rule!r:.80} is not a Rule, expected rules; load_rules reads files")
            tier = rule.tier or DEFAULT_TIER
            of_tier = own.setdefault(tier, {})
            if rule.name in of_tier:
                message = f"rule {rule.name!r} is duplicated in tier {tier!r}, expected different names"
                mistakes.append(ConfigError.at(("rules", place, "name"), message))
            of_tier.setdefault(rule.name, rule)
        default = own[DEFAULT_TIER]
        self.tiers: dict[str, tuple[Rule, ...]] = {
            tier: tuple({**default, **of_tier}.values()) for tier, of_tier in own.items()
        }
        self.listed_callers: tuple[KnownCaller, ...] = tuple(callers)
        known = self.listed_callers
        mistakes += islice(_wrongly_replaced(listed), MOST_MISTAKES)
        mistakes += islice(_wrong_limits(known, self.tiers), MOST_MISTAKES)
        try:
            self.callers: Callers = Callers(known)
        except ConfigError as error:
            mistakes.append(error)
        if mistakes:
            raise ConfigError.first_of(mistakes)
        for rule in listed:
            vars(rule)["rule_set"] = self
        self.source = ""
        self.files_digest = b""

    def detach(self) -> None:
        """Break reference cycles, so that reference counting frees the set."""
        for of_tier in self.tiers.values():
            for rule in of_tier:
                vars(rule).pop("rule_set", None)

    def __repr__(self) -> str:
        return f"RuleSet({', '.join(f'{tier}: {len(rules)} rules' for tier, rules in self.tiers.items())})"


def _wrongly_replaced(rules: Sequence[Rule]) -> Iterator[ConfigError]:
    names = {rule.name for rule in rules}
    exempt = {rule.name for rule in rules if rule.exempt}
    for place, rule in enumerate(rules):
        for number, name in enumerate(rule.replaces):
            message = None
            if name in exempt:
                message = f"rule {name!r} is exempt, so nothing can replace it, expected exclude on that rule"
            elif name != EVERY and name not in names:
                message = f"there is no rule {name!r}, {expected_of(name, [EVERY, *sorted(names - {rule.name})])}"
            if message is not None:
                yield ConfigError.at(("rules", place, "replaces", number), message)


def _wrong_limits(callers: Sequence[KnownCaller], tiers: Mapping[str, Sequence[Rule]]) -> Iterator[ConfigError]:
    for place, caller in enumerate(callers):
        rules = {rule.name: rule for rule in tiers.get(caller.tier or DEFAULT_TIER, tiers[DEFAULT_TIER]) if rule.has_limits}
        for name, limits in caller.limits.items():
            field = "callers", place, "limits", name
            if name not in rules:
                message = f"caller {caller.id!r}: there is no rule {name!r} with limits, {expected_of(name, sorted(rules))}"
                yield ConfigError.at(field, message)
                continue
            try:
                rules[name].having_limits(limits)
            except ConfigError as error:
                yield ConfigError.at(field, f"caller {caller.id!r}: {error}")
