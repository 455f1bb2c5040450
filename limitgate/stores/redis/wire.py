"""Encodes calls of scripts in limitgate/lua/, and decodes replies. Uses hiredis if installed."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from itertools import islice
from typing import Any, Final, NamedTuple

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from limitgate.algorithms import NUMBERS, script
from limitgate.algorithms.base import Amount, State
from limitgate.errors import StoreError
from limitgate.limits.bucket import Bucket
from limitgate.limits.plan import Charge, Plan, Verb, is_joined, read, with_bans
from limitgate.limits.template import (
    OF_ANY,
    AnyAnswer,
    AnyPlan,
    PlainRefund,
    PlainSpend,
    PlanTemplate,
    RefundTemplate,
    ScriptVariant,
)
from limitgate.stores.base import INDEX_SECONDS, ConfigRequest, FleetRequest, StoredConfig, StoredFleet
from limitgate.stores.redis.plain import Script, encoded_once, packed as packed_plain, packed_refunds, words_of

try:
    from hiredis import ProtocolError, PushNotification, Reader, pack_command
# hiredis before 3.2 cannot distinguish push messages from replies.
except ImportError:
    from limitgate.stores.redis.python_resp import (  # type: ignore[assignment]
        ProtocolError,
        PushNotification,
        Reader,
        pack_command,
    )

__all__ = ["ProtocolError", "PushNotification", "Reader", "error_of", "pack_command"]

_KINDS: Mapping[str, Callable[[Any], RedisError]] = {
    "ASK": AskError,
    "CLUSTERDOWN": ClusterDownError,
    "ERR": ResponseError,
    "LOADING": BusyLoadingError,
    "MASTERDOWN": MasterDownError,
    "MOVED": MovedError,
    "NOAUTH": AuthenticationError,
    "NOPERM": NoPermissionError,
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
    "TRYAGAIN": TryAgainError,
    "WRONGPASS": AuthenticationError,
}
"""Kinds of errors that redis-py's parser lacks before 7.2."""


_OF_COMMAND = re.compile(r"@user_script: ?\d+: -([A-Z]+ .*)", re.DOTALL)
"""A command's error in a script, which Redis 6.2 wraps."""


def error_of(text: str) -> RedisError:
    if of_command := _OF_COMMAND.search(text):
        text = of_command[1]
    code, _, message = text.partition(" ")
    kind = _KINDS.get(code)
    return ResponseError(text) if kind is None else kind(message)


SPEND: Final = Script.of(script())
CONFIG: Final = Script.of((files("limitgate") / "lua" / "config.lua").read_text("utf-8"))
FLEET: Final = Script.of((files("limitgate") / "lua" / "fleet.lua").read_text("utf-8"))

KeptRequest = ConfigRequest | FleetRequest
Kept = StoredConfig | StoredFleet

UNSENDABLE = (ValueError, struct.error)
"""Invalid Unicode in a key, or too many buckets."""

NO_PLAN: Final = Plan.peek(())
"""Stands for the plan in configuration calls."""

_ASKING: Final = pack_command(("ASKING",))
_STORED = re.compile(rb"(\d{1,15}) (.*)", re.DOTALL)
_MORE = struct.Struct("<dddd")


@cache
def _doubles(size: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{size}d").pack


# Redis' clock, unreadable values, clock steps, out of memory.
_HEAD = 4
_JOINED = 2
"""See `is_joined`."""


class Answers(NamedTuple):
    readings: list[AnyAnswer]
    unreadable: int
    clock_steps: int
    unwritten: bool
    """True if Redis was out of memory, and nothing was charged."""


class Call:
    """Plans, or a configuration request with `NO_PLAN`."""

    __slots__ = ("asking", "config", "hops", "in_full", "is_granted", "is_repeated", "plans", "requested", "sent", "shape")

    def __init__(self, plans: Sequence[AnyPlan], shape: ScriptVariant | None = None, config: KeptRequest | None = None) -> None:
        self.config = config
        self.plans: Sequence[AnyPlan] = plans
        self.requested: Sequence[AnyPlan] = plans
        """Plans without leases."""
        self.shape: ScriptVariant | None = shape
        self.sent: float = 0.0
        self.in_full: bool = False
        """True if the script's text must be sent, because Redis didn't know its hash."""
        self.asking: bool = False
        """True if the node is importing the slot (ASK in the Redis Cluster specification)."""
        self.hops: int = 0
        self.is_repeated: bool = False
        self.is_granted: bool = False
        """True if no reply to ASKING is due."""

    @property
    def first(self) -> AnyPlan | KeptRequest:
        """The plan or request whose key identifies the cluster node."""
        return self.plans[0] if self.config is None else self.config

    @property
    def is_wanted(self) -> bool:
        return True

    @property
    def gives_back(self) -> bool:
        """True if parts must not be resent, see `repeated`."""
        return any(plan.has_adjustments for plan in self.requested)

    def follow(self, other: Call) -> None:
        """Continue a call that was split. ASKING isn't copied, because an importing node would create a bucket."""
        self.config, self.sent, self.in_full, self.hops = other.config, other.sent, other.in_full, other.hops

    def repeated(self) -> Call:
        """Return the call to resend, without refunds."""
        again = Call([plan for plan in self.requested if not plan.has_adjustments], self.shape)
        again.follow(self)
        again.asking, again.is_repeated = self.asking, True
        return again

    def packed(self) -> bytes:
        if self.shape is not None and self.shape is not OF_ANY:
            plain: Any = self.plans
            words = words_of(self.shape, self.in_full)
            packed = packed_refunds(words, self.shape, plain) if self.shape.gives_back else packed_plain(words, plain)
        else:
            script, asked = (SPEND, arguments(self.plans)) if self.config is None else _kept_arguments(self.config)
            packed = pack_command((*script.words(self.in_full), *asked))  # type: ignore[arg-type]
        return _ASKING + packed if self.asking else packed


def arguments(plans: Sequence[AnyPlan]) -> list[str | bytes]:
    """Return the number of keys, the keys, and distinct charges.

    There are no integers, because hiredis crashes if a signal handler raises while it packs them.
    """
    keys: list[str | bytes] = [""]
    distinct: dict[bytes, int] = {}
    which = []
    for plan in plans:
        packed_charges: Sequence[bytes]
        if isinstance(plan, PlainSpend):
            keys += plan.keys
            packed_charges = _packed_plain(plan.template)
            if plan.template.has_slots:
                packed_charges = _packed_slots(plan, packed_charges)
        elif isinstance(plan, PlainRefund):
            keys += plan.keys
            packed_charges = _packed_refund(plan)
        else:
            keys += [charge.key for charge in plan.charges]
            packed_charges = _packed_charges(plan)
        which += [distinct.setdefault(packed, len(distinct) + 1) for packed in packed_charges]
    keys[0] = str(len(which))
    return [*keys, struct.pack(f"<{len(which)}H", *which), *distinct]


@encoded_once
def _packed_plain(template: PlanTemplate) -> Sequence[bytes]:
    return _packed_charges(Plan.spend(template.charges))


def _packed_slots(plan: PlainSpend, packed_charges: Sequence[bytes]) -> list[bytes]:
    more = _MORE.pack(0, 0, plan.slot, 0)
    each = zip(packed_charges, plan.template.charges)
    return [packed + more if charge.bucket.has_slots else packed for packed, charge in each]


@encoded_once
def _packed_refunds(template: RefundTemplate) -> Sequence[bytes]:
    last = len(template.parts) - 1
    return [
        _packed(charge.bucket, 0, 0, ("adjust", False, place == last), 0) for place, (charge, *_) in enumerate(template.parts)
    ]


def _packed_refund(plan: PlainRefund) -> list[bytes]:
    template, as_of = plan.template, plan.spent.now
    each = zip(_packed_refunds(template), template.parts, plan.amounts())
    return [packed + _packed_more(charge.bucket, 0, as_of, 0, 0, *amounts) for packed, (charge, *_), amounts in each]


def _packed_charges(plan: Plan) -> Sequence[bytes]:
    found, last, spends = [], len(plan.charges) - 1, plan.verb == "spend"
    for place, charge in enumerate(plan.charges):
        is_joined_on = spends and place > 0 and is_joined(plan.charges[place - 1], charge)
        how = plan.verb, _JOINED if is_joined_on else int(charge.enforced), place == last
        packed = _packed(charge.bucket, charge.cost, charge.max_wait_us, how, _date(charge.bucket))
        if plan.verb == "ban":
            packed += _MORE.pack(plan.ban_us, 0, 0, 0)
        elif charge.adjustment is not None or charge.slot or charge.max_wait_us:
            packed += _more(charge)
        found.append(packed)
    return found


def config_arguments(request: ConfigRequest) -> list[str | bytes]:
    """Return one key, then the text, its version, and milliseconds to live."""
    key, text, version, lasts = request
    if text is None:
        return ["1", key]
    if lasts is None:
        return ["1", key, text, *([] if version is None else [str(version)])]
    return ["1", key, text, "" if version is None else str(version), str(max(1, round(lasts * 1000)))]


def _kept_arguments(request: KeptRequest) -> tuple[Script, list[str | bytes]]:
    if isinstance(request, ConfigRequest):
        return CONFIG, config_arguments(request)
    return FLEET, fleet_arguments(request)


def fleet_arguments(request: FleetRequest) -> list[str | bytes]:
    """Return the keys, then the snapshot to write."""
    key, member, snapshot, seconds, renews = request
    if member is None:
        return ["1", key]
    lives = [str(round(each * 1000)) for each in (seconds, INDEX_SECONDS)]
    return ["2", key, f"{key}:{member}", member, snapshot, *lives, "1" if renews else "0"]


def kept(request: KeptRequest, reply: object) -> Kept:
    return stored_config(reply) if isinstance(request, ConfigRequest) else stored_fleet(reply)


def stored_fleet(reply: object) -> StoredFleet:
    match reply:
        case [int(now), int(processes), *rest]:
            snapshots = [each for each in rest if isinstance(each, bytes)]
            if len(snapshots) == len(rest):
                return StoredFleet(now, processes, snapshots)
    raise StoreError(f"unexpected reply of {type(reply).__name__} from the script, expected snapshots", "reply")


def stored_config(reply: object) -> StoredConfig:
    if reply is None:
        return StoredConfig(0, None)
    if not isinstance(reply, bytes):
        raise StoreError(f"unexpected reply of {type(reply).__name__} from the script, expected text", "reply")
    match = _STORED.fullmatch(reply)
    return StoredConfig(int(match[1]), match[2].decode(errors="replace")) if match else StoredConfig(0, "")


def answers(plans: Sequence[AnyPlan], reply: object) -> Answers:
    facts = sum(map(_facts, plans))
    if not isinstance(reply, list) or len(reply) < _HEAD + facts or set(map(type, reply)) != {int}:
        raise StoreError(f"unexpected reply of {type(reply).__name__} from the script", "reply")
    bans = _bans(plans, reply[_HEAD + facts :]) if len(reply) > _HEAD + facts else {}
    readings: list[AnyAnswer] = []
    at = _HEAD
    for number, plan in enumerate(plans):
        if isinstance(plan, PlainRefund):
            plan.now = reply[0]
            readings.append(plan)
            at += plan.template.facts
            continue
        if isinstance(plan, PlainSpend) and number not in bans and _note(plan, reply, at):
            readings.append(plan)
            at += plan.template.facts
            continue
        charges: Sequence[Charge] = plan.charges
        states: list[Sequence[State]] = []
        for charge in charges:
            bucket = charge.bucket
            states.append(bucket.algorithm.decode_state(reply[at : at + bucket.facts], bucket))
            at += bucket.facts
        if number in bans:
            charges, states = with_bans(charges, states, bans[number])
        readings.append(read(charges, reply[0], states))
    return Answers(readings, reply[1], reply[2], bool(reply[3]))


def _facts(plan: AnyPlan) -> int:
    return sum([charge.bucket.facts for charge in plan.charges]) if isinstance(plan, Plan) else plan.template.facts


def _note(plan: PlainSpend, reply: Sequence[int], at: int) -> bool:
    template = plan.template
    states: list[State] = []
    for bucket, *_ in template.buckets:
        states += bucket.algorithm.decode_state(reply[at : at + bucket.facts], bucket)
        at += bucket.facts
    admitted, all_fit = template.fits(states)
    if (template.may_wait and not all_fit) or any(reply[at : at + template.bans]):
        return False
    if template.has_slots and _has_slot_already(plan, states):
        return False
    plan.now, plan.states, plan.admitted = reply[0], states, admitted
    return True


def _has_slot_already(plan: PlainSpend, states: Sequence[State]) -> bool:
    each, slot = iter(states), plan.slot
    for bucket, *_ in plan.template.buckets:
        for state in islice(each, len(bucket.ids)):
            if bucket.has_slots and state.places(slot):
                return True
    return False


def _bans(plans: Sequence[AnyPlan], numbers: Sequence[int]) -> dict[int, dict[int, int]]:
    places = [(number, place) for number, plan in enumerate(plans) for place in range(len(plan.charges))]
    bans: dict[int, dict[int, int]] = {}
    try:
        for at, left_us in zip(numbers[::2], numbers[1::2], strict=True):
            number, place = places[at - 1]
            bans.setdefault(number, {})[place] = left_us
    except (ValueError, IndexError) as error:
        raise StoreError("unexpected number of values from the script", "reply") from error
    return bans


@lru_cache(maxsize=4096)
def _packed(bucket: Bucket, cost: int, ahead: int, how: tuple[Verb, int, bool], date: int) -> bytes:
    (verb, binding, last), algorithm = how, bucket.algorithm
    charge = [struct.pack("<s4BH", verb.encode(), NUMBERS[algorithm], binding, cost > 0, last, len(bucket.ids))]
    for limit, window in zip(bucket.limits, bucket.ids, strict=True):
        numbers = algorithm.encode_charge(limit, window, cost, ahead, date)
        charge.append(struct.pack(f"<{len(numbers)}d", *numbers))
    return b"".join(charge)


def _date(bucket: Bucket) -> int:
    return bucket.algorithm.date(bucket.limits[0]) if bucket.is_dated else 0


def _more(charge: Charge) -> bytes:
    lease = charge.adjustment
    if lease is None:
        return _MORE.pack(0, 0, charge.slot, charge.max_wait_us)
    return _packed_more(charge.bucket, lease.most, lease.as_of, charge.slot, charge.max_wait_us, lease.back, lease.grace)


def _packed_more(  # noqa: PLR0917 - keywords are slower
    bucket: Bucket, most: int, as_of: int, slot: int, max_wait_us: int, back: Sequence[Amount], grace: Sequence[int]
) -> bytes:
    numbers: list[float] = [most, as_of, slot, max_wait_us]
    for limit, back_of_window, grace_of_window in zip(bucket.limits, back, grace, strict=True):
        numbers += bucket.algorithm.encode_adjustment(limit, back_of_window, grace_of_window)
    return _doubles(len(numbers))(*numbers)
