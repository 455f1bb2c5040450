"""Throttles for Django REST framework: limits by the user that the framework authenticated."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, ClassVar, cast

from asgiref.sync import async_to_sync

from limitgate.messages.text import extra

with extra("rest", "rest_framework"):
    from django.core.exceptions import ImproperlyConfigured
    from rest_framework.exceptions import APIException
    from rest_framework.settings import api_settings
    from rest_framework.throttling import BaseThrottle

from limitgate.django.middleware import DjangoRequest
from limitgate.errors import ConfigError, HeadersTooLargeError
from limitgate.exchange.base import EXCHANGE, Exchange
from limitgate.gate.planning.identity import NoIdError, user_id
from limitgate.http.response import UNREAD_BODY, Refusal
from limitgate.keys import text_of, value_of
from limitgate.limits.decision import Decision
from limitgate.limits.limit import Limit
from limitgate.messages.text import expected_of
from limitgate.process.callables import is_async
from limitgate.rules.decorators import EVERYTHING, place_named, without_a_gate
from limitgate.rules.options import ThrottleOptions
from limitgate.rules.rule import Rule
from limitgate.stores import SyncStore

_NOT_THERE = object()
_USER = "user"
_OPTIONS = ("limits", "key", "name", *ThrottleOptions.__annotations__)
_RATES_OPTIONS = ("scope", "rate", "THROTTLE_RATES", "scope_attr", "cache_format", *_OPTIONS[1:])
_IS_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Unavailable(APIException):  # type: ignore[misc]  # REST framework is not typed
    """The 503 of ``on_error: closed``."""

    status_code = 503
    default_detail: str = "The rate limit cannot be checked at the moment. Try again shortly."
    default_code = "temporary_reduced_capacity"
    wait = 1


class HeadersTooLarge(APIException):  # type: ignore[misc]  # as above
    """The 431 for a header that is too long for a throttle's key."""

    status_code = 431
    default_code = "request_header_fields_too_large"


class BodyUnread(APIException):  # type: ignore[misc]  # as above
    """The 400, 408, 411 or 413 for a body that can't be read for a throttle."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.detail, refusal.reason.lower().replace(" ", "_"))
        self.status_code: int = refusal.status


class Throttle(BaseThrottle):  # type: ignore[misc]  # REST framework is not typed
    """Base class of throttles: ``class Burst(Throttle): limits = ("10/minute", "100/day")``.

    Use it in ``throttle_classes`` or ``DEFAULT_THROTTLE_CLASSES``, with `LimitGateMiddleware`. It is charged atomically with
    the rules of the middleware. Other options of a `Rule` are attributes, see `ThrottleOptions`. The key part ``user`` is REST
    framework's user. Views with the same throttle share its limits, unless the key has ``path``. Raises `ConfigError` like
    `Rule`.
    """

    limits: ClassVar[Sequence[Limit | str] | Callable[..., Any]] = ()
    """Limits such as ``10/minute``, or a function ``limits(request)``. Without limits, the class is abstract."""
    key: ClassVar[Iterable[str]] = (_USER,)
    """Key parts; an anonymous user counts by address."""
    name: ClassVar[str | None] = None
    """The rule's name; by default that of the class."""
    rule: ClassVar[Rule | None] = None

    _attributes: ClassVar[Sequence[str]] = _OPTIONS
    _decision: Decision | None = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name, value in vars(cls).items():
            if not (name.startswith("_") or name in cls._attributes or callable(value) or hasattr(value, "__get__")):
                raise ConfigError(f"{cls.__qualname__}: unknown attribute {name!r}, {expected_of(name, cls._attributes)}")
        if isinstance(cls.limits, str) or isinstance(cls.key, str):
            raise ConfigError(f"{cls.__qualname__}: limits or key is text, expected a tuple such as ('10/minute',)")
        if cls.limits:
            limits = _unbound(cls, cls.limits)
            name = cls.__dict__.get("name") or place_named(cls.__module__, cls.__qualname__)
            cls.rule = cls._rule(name, (limits,) if callable(limits) else limits)

    @classmethod
    def _rule(cls, name: str, limits: Iterable[Any]) -> Rule:
        given = {option: _unbound(cls, getattr(cls, option)) for option in _OPTIONS[3:] if hasattr(cls, option)}
        key = [part for part in cls.key if part != _USER] or ["global"]
        rule = Rule(name, *limits, key=key, **cast("ThrottleOptions", given))
        return rule.placed((_USER,) if _USER in cls.key else ())

    def allow_request(self, request: Any, view: Any) -> bool:
        """Return True to admit a request.

        Raises `Unavailable` with ``on_error: closed``, `HeadersTooLarge` and `BodyUnread`.
        """
        if self.rule is None:
            raise TypeError(f"{type(self).__name__} has no limits, expected for example limits = ('10/minute',)")
        exchange = _exchange_of(request, self.rule)
        return exchange is None or self._allows(request, exchange, self.rule, request.user)

    def _allows(self, request: Any, exchange: Exchange, rule: Rule, user: object) -> bool:
        django = request._request  # noqa: SLF001 - there is no public way
        gate_request = exchange.open_admission().request
        if isinstance(gate_request, DjangoRequest):
            gate_request.note_user(request.user)
        values = [value_of(user, _USER)] if rule.given_parts else []
        has_to_await = not isinstance(exchange.gate.store, SyncStore) or is_async(rule.limits_by)
        further = async_to_sync(exchange.afurther) if gate_request.awaits and has_to_await else exchange.further
        self._decision = django.limitgate = further([(rule, values)])
        refusal = exchange.open_admission().refusal
        if refusal is not None and refusal.status == HeadersTooLarge.status_code:
            raise HeadersTooLarge(refusal.detail)
        if refusal is not None and refusal.status in UNREAD_BODY:
            raise BodyUnread(refusal)
        if refusal is not None and refusal.status != 429:
            raise Unavailable
        return refusal is None

    def wait(self) -> float | None:
        """Return the seconds until the request would pass; None if it never does."""
        wait = self._decision.retry_after if self._decision else 0.0
        return None if math.isinf(wait) else wait


class _SettingsRates:
    """Rates read at each use, so that tests can override settings."""

    def __get__(self, throttle: object, owner: type | None = None) -> Mapping[str, Any]:
        rates: Mapping[str, Any] = api_settings.DEFAULT_THROTTLE_RATES
        return rates


class _RateRule:
    """The rule of the class's scope; None without a limit, or if only the view has a scope."""

    def __get__(self, throttle: SimpleRateThrottle | None, owner: type[SimpleRateThrottle]) -> Rule | None:
        throttle = throttle or owner()
        rate = throttle.rate
        if rate is None:
            return None
        rates = tuple(rate) if isinstance(rate, list | tuple) else (rate,)
        if not all(isinstance(each, str | Limit) for each in rates):
            raise ConfigError(f"{owner.__name__}: the rate is {rate!r:.80}, expected for example '100/day'")
        kind: Any = owner
        return _rule_of_rates(kind, throttle.scope, rates)


class SimpleRateThrottle(Throttle):
    """A throttle with the rate of its ``scope`` in ``DEFAULT_THROTTLE_RATES``, or with its own ``rate``.

    A rate is a limit such as ``5/m``, a list of limits, or None for no limit. Override `get_cache_key` to change the key.
    Throttles of one scope share buckets. Options are those of `Throttle`, except ``limits``. Raises `ImproperlyConfigured`
    without a scope or rate, `ConfigError` for an invalid rate.
    """

    scope: str | None = None
    rate: Any = None
    """Overrides the settings."""
    THROTTLE_RATES: ClassVar[Any] = _SettingsRates()
    cache_format: str = "throttle_%(scope)s_%(ident)s"
    rule: ClassVar[Any] = _RateRule()

    _attributes = _RATES_OPTIONS

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.limits:
            raise ConfigError(f"{cls.__qualname__} has limits, but takes them from a rate, expected rate or scope")

    def __init__(self) -> None:
        if not self.rate:
            self.rate = self.get_rate()

    def get_rate(self) -> Any:
        """Return the rate of the scope. Raises `ImproperlyConfigured` if there is none."""
        if not self.scope:
            raise ImproperlyConfigured(f"{type(self).__name__} has neither a scope nor a rate, expected one of them")
        try:
            return self.THROTTLE_RATES[self.scope]
        except KeyError:
            message = f"DEFAULT_THROTTLE_RATES has no rate for the scope {self.scope!r} of {type(self).__name__}"
            raise ImproperlyConfigured(f"{message}, expected one such as '100/day', or None for no limit") from None

    def get_ident(self, request: Any) -> str:
        """Return the client's address or network, respecting ``trusted_proxies``."""
        exchange = _exchange_of(request, None)
        if exchange is None:
            return ""
        admission = exchange.open_admission()
        return admission.rules.planner.address(admission.request) or ""

    def get_cache_key(self, request: Any, view: Any) -> str | None:
        """Return text that identifies the client; None: no limit."""
        ident = text_of(request.user, _USER) or self.get_ident(request)
        return self.cache_format % {"scope": self.scope, "ident": ident}

    def allow_request(self, request: Any, view: Any) -> bool:
        """Return True to admit a request, see `Throttle.allow_request`."""
        rule: Rule | None = self.rule
        if rule is None:
            return True
        exchange = _exchange_of(request, rule)
        if exchange is None or exchange.open_admission().marks is EVERYTHING:
            return True
        if self.get_cache_key.__module__ == __name__:  # `get_cache_key` isn't overridden.
            return not self._throttles(request) or self._allows(request, exchange, rule, request.user)
        try:
            key = self.get_cache_key(request, view)
        # A rule that counts by address raises this again.
        except HeadersTooLargeError:
            return self._allows(request, exchange, rule, None)
        return key is None or self._allows(request, exchange, rule, key)

    def _throttles(self, request: Any) -> bool:
        return True


class AnonRateThrottle(SimpleRateThrottle):
    """Limits anonymous clients, by address, at the rate of the scope ``anon``."""

    scope: str = "anon"

    def get_cache_key(self, request: Any, view: Any) -> str | None:
        """Return the key of `SimpleRateThrottle`; None for authenticated users."""
        return super().get_cache_key(request, view) if self._throttles(request) else None

    def _throttles(self, request: Any) -> bool:
        try:
            return user_id(request.user) is None
        except NoIdError:
            return False


class UserRateThrottle(SimpleRateThrottle):
    """Limits each user at the rate of the scope ``user``; anonymous users count by address."""

    scope: str = "user"


class ScopedRateThrottle(SimpleRateThrottle):
    """Limits each user at the rate of the view's ``throttle_scope``; views without one aren't limited."""

    scope_attr: ClassVar[str] = "throttle_scope"

    def __init__(self) -> None:
        """Leave the rate to the view."""

    def allow_request(self, request: Any, view: Any) -> bool:
        """Return True to admit a request, see `Throttle.allow_request`."""
        self.scope: str | None = getattr(view, self.scope_attr, None)
        if not self.scope:
            return True
        self.rate: Any = self.get_rate()
        return super().allow_request(request, view)


def rules_of_view(view: type, given: Mapping[str, Any]) -> list[Rule]:
    """Return the rules of a view class's throttles; ``given`` overrides attributes of the class."""
    own = getattr(view, "get_throttles", None)
    if getattr(own, "__module__", None) != "rest_framework.views":
        return []
    throttles = given.get("throttle_classes", getattr(view, "throttle_classes", ()))
    rules = [_rule_for(view, throttle, given) for throttle in throttles if isinstance(throttle, type)]
    return [rule for rule in rules if rule is not None]


def _rule_for(view: type, throttle: type, given: Mapping[str, Any]) -> Rule | None:
    if not issubclass(throttle, Throttle):
        return None
    with suppress(ImproperlyConfigured, ConfigError):
        if not issubclass(throttle, ScopedRateThrottle):
            return throttle.rule
        scoped = throttle()
        scoped.scope = given.get(scoped.scope_attr, getattr(view, scoped.scope_attr, None))
        if scoped.scope:
            scoped.rate = scoped.get_rate()
            rule: Rule | None = scoped.rule
            return rule
    return None


@lru_cache(maxsize=1024)
def _rule_of_rates(throttle: Any, scope: str | None, rates: tuple[Limit | str, ...]) -> Rule:
    name = throttle.__dict__.get("name") or scope
    if name is None or not _IS_NAME.fullmatch(name):
        digits = hashlib.sha256((name or f"{throttle.__module__}.{throttle.__qualname__}").encode()).hexdigest()[:6]
        name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', name or throttle.__qualname__)[:40]}-{digits}"
    rule: Rule = throttle._rule(name, rates)  # noqa: SLF001 - one of ours
    return rule


def _exchange_of(request: Any, rule: Rule | None) -> Exchange | None:
    django = request._request  # noqa: SLF001 - there is no public way
    exchange: Exchange | object | None = getattr(django, "scope", django.META).get(EXCHANGE, _NOT_THERE)
    if exchange is _NOT_THERE and rule is not None:
        without_a_gate(rule)
    return exchange if isinstance(exchange, Exchange) else None


def _unbound(throttle: type[Throttle], value: Any) -> Any:
    """Turn a method into a function of the request."""
    if not callable(value):
        return value
    required = [each for each in signature(value).parameters.values() if each.default is Parameter.empty]
    return (lambda request: value(throttle(), request)) if len(required) > 1 else value
