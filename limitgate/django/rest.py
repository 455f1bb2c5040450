"""A throttle for Django REST framework: limits that know whom the framework has authenticated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, iscoroutinefunction, signature
from typing import Any, ClassVar, cast

from asgiref.sync import async_to_sync

from limitgate.extras import extra

with extra("rest", "rest_framework"):
    from rest_framework.exceptions import APIException
    from rest_framework.throttling import BaseThrottle

from limitgate.django.request import DjangoRequest
from limitgate.errors import ConfigError
from limitgate.exchange.base import EXCHANGE, Exchange
from limitgate.keys import value_of
from limitgate.limits.decision import Decision
from limitgate.limits.limit import Limit
from limitgate.rules.decorators import place_named, without_a_gate
from limitgate.rules.options import ThrottleOptions
from limitgate.rules.rule import Rule
from limitgate.stores import SyncStore

_NOT_THERE = object()
_USER = "user"
_OPTIONS = ("limits", "key", "name", *ThrottleOptions.__annotations__)
"""Attributes that a class derived from `Throttle` may set."""


class Unavailable(APIException):  # type: ignore[misc]  # REST framework is not typed
    """The 503 of ``on_error: closed``."""

    status_code = 503
    default_detail = "The rate limit cannot be checked at the moment. Try again shortly."
    default_code = "temporary_reduced_capacity"
    wait = 1
    """``Retry-After``, which REST framework sends, in seconds."""


class Throttle(BaseThrottle):  # type: ignore[misc]  # REST framework is not typed
    """A throttle to derive from: ``class Burst(Throttle): limits = ("10/minute", "100/day")``.

    Goes into ``throttle_classes`` or ``DEFAULT_THROTTLE_CLASSES`` like any other, and needs `LimitGateMiddleware` around the
    views, with whose rules it is charged together or not at all. Further options of a `Rule` are attributes, such as ``cost``
    or ``shadow``, see `ThrottleOptions`. The part ``user`` of its key is whom REST framework has authenticated. All views that
    have the throttle share its limits, unless the key has the part ``path``. Refused requests are answered by REST framework.
    Raises `ConfigError` like `Rule` where the class is defined.
    """

    limits: ClassVar[Sequence[Limit | str] | Callable[..., Any]] = ()
    """Limits such as ``10/minute``, or a function or method ``limits(request)`` that gives them.

    A class without any is only one to derive others from.
    """
    key: ClassVar[Iterable[str]] = (_USER,)
    """Parts that tell buckets apart; somebody who is not authenticated counts by address."""
    name: ClassVar[str | None] = None
    """The rule's name, that of the class if not given."""
    rule: ClassVar[Rule | None] = None
    """The rule that all this makes."""

    _decision: Decision | None = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name, value in vars(cls).items():
            if not (name.startswith("_") or name in _OPTIONS or callable(value) or hasattr(value, "__get__")):
                raise ConfigError(f"{cls.__qualname__}: unknown attribute {name!r}, expected some of {', '.join(_OPTIONS)}")
        if isinstance(cls.limits, str) or isinstance(cls.key, str):
            raise ConfigError(f"{cls.__qualname__}: limits or key is text, expected a tuple such as ('10/minute',)")
        if cls.limits:
            cls._asks_user = _USER in cls.key
            given = {name: _unbound(cls, getattr(cls, name)) for name in _OPTIONS[3:] if hasattr(cls, name)}
            options = cast("ThrottleOptions", given)
            limits = _unbound(cls, cls.limits)
            key = [part for part in cls.key if part != _USER] or ["global"]
            name = cls.__dict__.get("name") or place_named(cls.__module__, cls.__qualname__)
            rule = Rule(name, *((limits,) if callable(limits) else limits), key=key, **options)
            cls.rule = rule.placed((_USER,) if cls._asks_user else ())

    def allow_request(self, request: Any, view: Any) -> bool:
        """True if a request of REST framework's may pass. Raises `Unavailable` where ``on_error`` says closed."""
        if self.rule is None:
            raise TypeError(f"{type(self).__name__} has no limits, expected for example limits = ('10/minute',)")
        django = request._request  # noqa: SLF001 - the only way to it there is
        exchange: Exchange | object | None = getattr(django, "scope", django.META).get(EXCHANGE, _NOT_THERE)
        if exchange is _NOT_THERE:
            without_a_gate(self.rule)
        if not isinstance(exchange, Exchange):
            return True
        gate_request = exchange.admission.request
        if isinstance(gate_request, DjangoRequest):
            gate_request.note_user(request.user)
        values = [value_of(request.user, _USER)] if self._asks_user else []
        has_to_await = not isinstance(exchange.gate.store, SyncStore) or iscoroutinefunction(self.rule.limits_by)
        further = async_to_sync(exchange.afurther) if gate_request.awaits and has_to_await else exchange.further
        self._decision = django.limitgate = further([(self.rule, values)])
        refusal = exchange.admission.refusal
        if refusal is not None and refusal.status != 429:
            raise Unavailable
        return refusal is None

    def wait(self) -> float | None:
        """Seconds until the request would pass; None if waiting does not help."""
        wait = self._decision.retry_after if self._decision else 0.0
        return None if math.isinf(wait) else wait


def _unbound(throttle: type[Throttle], value: Any) -> Any:
    """An attribute of a throttle; of a method, which has ``self`` besides the request, a function of the request alone."""
    if not callable(value):
        return value
    required = [each for each in signature(value).parameters.values() if each.default is Parameter.empty]
    return (lambda request: value(throttle(), request)) if len(required) > 1 else value
