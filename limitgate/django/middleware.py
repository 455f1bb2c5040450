"""Django middleware that lets the gate decide about each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from inspect import isawaitable
from os import SEEK_END
from typing import Any, cast

from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpResponse, RawPostDataException, UnreadablePostError
from django.utils.functional import LazyObject, empty

from limitgate.errors import ConfigError
from limitgate.exchange.base import EXCHANGE, OUTCOME, Exchange, admission_around
from limitgate.exchange.in_flight import watch_upload, watched
from limitgate.gate.admission import Admission
from limitgate.gate.gate import Gate
from limitgate.gate.lifecycle.build import GateOptions, build_gate
from limitgate.gate.load import end_undecided, show_shed
from limitgate.gate.nesting import overall_decision, response_fields
from limitgate.http.body import FORMS, incomplete, too_large
from limitgate.http.rate_fields import raw
from limitgate.http.request import Environ, Headers, Query, Request, Scope, UserWanted, WSGIHeaders
from limitgate.http.response import Refusal
from limitgate.llm.metering import ResponseMeter
from limitgate.messages.text import expected_of
from limitgate.routes.django import DjangoRoutes
from limitgate.rules import decorators
from limitgate.rules.decorators import EVERYTHING, decided_marks
from limitgate.rules.options import check_refuses
from limitgate.rules.settings import PREFIX, Settings
from limitgate.stores import open_store, open_sync_store


class LimitGateMiddleware:
    """``MIDDLEWARE = [..., "limitgate.django.LimitGateMiddleware"]`` with ``LIMITGATE = {"RULES": "config/", ...}``.

    Options are those of `Settings`, in upper or lower case; the defaults are ``LIMITGATE_*`` environment variables.
    ``on_denied`` is a view. Supports sync and async mode. Raises `ConfigError` for invalid options or rules.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        self._awaits = iscoroutinefunction(get_response)
        self._routes = DjangoRoutes()
        chosen = options()
        if self._awaits:
            markcoroutinefunction(self)
        built = build_gate(self._routes, open_store if self._awaits else open_sync_store, **chosen)
        self.gate: Gate | None = built.gate
        # On an event loop, the first request connects.
        if built.required_prefix is not None or not self._awaits:
            built.ask_store()
        check_refuses(built.on_denied, "request")
        self._deny = None if built.on_denied is None else _adapted(built.on_denied, awaits=self._awaits)

    def __call__(self, request: Any) -> Any:
        """Return the response to a request, in async mode an awaitable."""
        if self._awaits:
            return self._acall(request)
        exchange = None
        if self.gate:
            asked = self._gate_request(request)
            exchange = DjangoExchange(self.gate, self.gate.check(asked, admission_around(_place_of(request))), asked)
        refused = self._refused(exchange, request)
        if exchange is not None and refused is not None:
            exchange.open_admission().end()
            return _completed(refused, exchange)
        marks = exchange.marks if exchange else EVERYTHING
        token = decided_marks.set(marks) if marks or decorators.notes_none else None
        try:
            response = self.get_response(request)
        except BaseException:  # Django converts other errors to a 500.
            if exchange is not None:
                exchange.end()
            raise
        finally:
            if token is not None:
                decided_marks.reset(token)
        if exchange is None or exchange.completes(response):
            return response
        _begun(exchange.open_admission(), response)
        if response.streaming:
            exchange.settle()
            _when_closed(response, exchange.end)
        else:
            exchange.end()
        return _completed(response, exchange)

    def process_exception(self, request: Any, exception: Exception) -> None:
        """Record a disconnect that caused the view's error."""
        exchange: Exchange | None = _place_of(request).get(EXCHANGE)
        if exchange is not None and isinstance(exception, UnreadablePostError):
            exchange.open_admission().client_left = True

    async def _acall(self, request: Any) -> Any:
        exchange = await _adecide(self.gate, self._gate_request(request)) if self.gate else None
        refused = self._refused(exchange, request)
        if exchange is not None and refused is not None:
            refused = await refused if isawaitable(refused) else refused
            exchange.open_admission().end()
            return _completed(refused, exchange)
        marks = exchange.marks if exchange else EVERYTHING
        token = decided_marks.set(marks) if marks or decorators.notes_none else None
        try:
            response = await self.get_response(request)
        except GeneratorExit:  # The event loop is gone, so awaiting is impossible.
            raise
        # Django converts other errors to a 500; this is mostly a disconnect.
        except BaseException:
            if exchange is not None:
                await exchange.ashutdown()
            raise
        finally:
            if token is not None:
                decided_marks.reset(token)
        if exchange is None or exchange.completes(response):
            return response
        _begun(exchange.open_admission(), response)
        if response.streaming:
            await exchange.asettle()
            _when_closed(response, partial(_end_of_loop, exchange))
        else:
            await exchange.ashutdown()
        return _completed(response, exchange)

    def _refused(self, exchange: DjangoExchange | None, request: Any) -> Any:
        _leave(exchange, request)
        refusal = None if exchange is None else exchange.refusal
        if refusal is None:
            return None
        if self._deny is not None and refusal.status == 429:
            return self._deny(request)
        body = b"" if request.method == "HEAD" else refusal.body
        return HttpResponse(body, status=refusal.status, headers=dict(refusal.fields))

    def _gate_request(self, request: Any) -> DjangoRequest:
        urlconf = getattr(request, "urlconf", None)
        if urlconf is not None:
            self._routes.note(urlconf)
        return DjangoRequest(request, awaits=self._awaits)


class DjangoExchange(Exchange):
    """One Django request."""

    def __init__(self, gate: Gate, admission: Admission, request: DjangoRequest) -> None:
        self.stand_between(gate, admission)
        self.awaits: bool = request.awaits
        if admission.is_shed:
            show_shed(admission)
        if admission.is_plain:  # The fast path.
            _place_of(request.django)[OUTCOME] = "admitted"
        else:
            self.show_outcome()
        permits, django = admission.permits, request.django
        if permits is not None and not request.awaits:
            watch_upload(django.META, permits)
            if hasattr(django, "_stream"):  # The view reads it.
                django._stream = watched(django._stream, permits, django.META)  # noqa: SLF001

    @property
    def refusal(self) -> Refusal | None:
        """The response to send instead of the application's."""
        return None if self._admission.is_plain else self._admission.refusal

    def completes(self, response: Any) -> bool:
        """Add rate fields and end the request. Return False if more work remains."""
        admission = self._admission
        if not admission.is_plain or admission.permits is not None or response.streaming or admission.has_news:
            return False
        admission.begun(response.status_code)
        headers = response.headers
        for name, value in admission.fields:
            headers[name] = value
        # True if a running thread has just reported a cost.
        if admission.end():
            settle = self.gate.refunds.settle_soon if self.awaits else self.gate.refunds.settle
            settle(admission)
        return True


async def _adecide(gate: Gate, request: DjangoRequest) -> DjangoExchange:
    """Decide about a request. Django cancels it if the client leaves."""
    admission = await gate.acheck(request, admission_around(_place_of(request.django)))
    exchange = DjangoExchange(gate, admission, request)
    try:
        await exchange.await_turn()
    except BaseException:
        end_undecided(admission)
        raise
    return exchange


def _place_of(request: Any) -> dict[str, Any]:
    place: dict[str, Any] = getattr(request, "scope", request.META)
    return place


def _adapted(view: Callable[[Any], Any], *, awaits: bool) -> Callable[[Any], Any]:
    if awaits and iscoroutinefunction(view):

        async def aview(request: Any) -> Any:
            response = await view(request)
            return response if getattr(response, "is_rendered", True) else await sync_to_async(response.render)()

        return aview
    called = async_to_sync(view) if iscoroutinefunction(view) else view

    def rendering(request: Any) -> Any:
        response = called(request)
        return response if getattr(response, "is_rendered", True) else response.render()

    return sync_to_async(rendering) if awaits else rendering


def _leave(exchange: Exchange | None, request: Any) -> None:
    """Copy the scope, because outer code may share it."""
    outer = None if exchange else admission_around(_place_of(request))
    if outer is not None:  # The gate is enabled.
        request.limitgate = overall_decision(outer)
        return
    request.limitgate = exchange.decision if exchange else None
    left = {"limitgate": request.limitgate, EXCHANGE: exchange}
    if hasattr(request, "scope"):
        request.scope = {**request.scope, **left}
    else:
        request.META.update(left)


def _begun(admission: Admission, response: Any) -> None:
    admission.begun(response.status_code)
    if admission.meter is not None:
        _read_along(admission.meter, response)
    if admission.permits is not None:
        admission.permits.starts(response.status_code, raw(response.items()))
        admission.permits.end("untaught" if response.streaming else None)


def _read_along(meter: ResponseMeter, response: Any) -> None:
    meter.starts(response.status_code, response.get("content-type", ""), response.get("content-encoding", ""))
    if response.streaming:
        read = meter.aalong if response.is_async else meter.along
        response.streaming_content = read(response.streaming_content)
    else:
        meter.feed(response.content)
        meter.over()


def _end_of_loop(exchange: Exchange) -> None:
    """The response may be closed in another thread, or during shutdown."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        async_to_sync(exchange.ashutdown)()
    else:
        if exchange.open_admission().end():
            exchange.gate.refunds.settle_soon(exchange.open_admission())


def _when_closed(response: Any, end: Callable[[], None]) -> None:
    close = response.close

    def close_and_end() -> None:
        try:
            close()
        finally:
            vars(response).pop("close", None)  # Avoid a reference cycle.
            end()

    response.close = close_and_end


def _completed(response: Any, exchange: Exchange) -> Any:
    admission = exchange.open_admission()
    refusal = admission.refusal
    for name, value in response_fields(admission) if refusal is None else (*refusal.waiting, *response_fields(admission)):
        if refusal is None or name not in response:
            response[name] = value
    return response


DjangoOptions = GateOptions[Any, Any, Any]


def options() -> DjangoOptions:
    """Return the options in ``settings.LIMITGATE``. Raises `ConfigError`, also for settings such as ``LIMITGATE_RULES``."""
    mapping = getattr(settings, "LIMITGATE", None)
    if mapping is None:
        for option in map(str.upper, Settings.model_fields):
            if getattr(settings, f"{PREFIX}{option}", None) is not None:
                raise ConfigError(
                    f"settings have {PREFIX}{option}, which has no effect, expected LIMITGATE = {{{option!r}: ...}}"
                )
        return {}
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"LIMITGATE is a {type(mapping).__name__}, expected a dict of options")
    chosen: dict[str, object] = {}
    for name, value in mapping.items():
        option = str(name).lower()
        if option not in Settings.model_fields:
            expected = expected_of(option, sorted(Settings.model_fields))
            raise ConfigError(f"LIMITGATE: unknown option {name!r:.80}, {expected}, in upper or lower case")
        if option in chosen:
            raise ConfigError(f"LIMITGATE: option {option!r} is set twice, expected it in upper or in lower case")
        chosen[option] = value
    return cast("DjangoOptions", chosen)


class DjangoRequest(Request):
    """A Django request. ``awaits`` is True on an event loop, where loading the user must not block."""

    django: Any
    _user: tuple[Any] | None = None

    def __init__(self, django: Any, *, awaits: bool = False) -> None:
        self.django = django
        self.scope: Scope | None = getattr(django, "scope", None)
        self.environ: Environ | None = django.META if self.scope is None else None
        self.sent_method = (django.method or "GET").upper()
        self.sent: str = django.path_info
        self.peer: str | None = django.META.get("REMOTE_ADDR") or None
        self.is_outermost: bool = not (self.passed_a_gate or self.has_too_many_lines)
        self.awaits = awaits

    @cached_property
    def query(self) -> Query:
        """The query string."""
        return Query(self.django.META.get("QUERY_STRING", ""))

    @property
    def user(self) -> Any:
        """``request.user``, or the server's user. Raises `UserWanted` if only `find_user` can load the user."""
        if self._user is not None:
            return self._user[0]
        user = getattr(self.django, "user", None)
        if user is None:
            return self.django.META.get("REMOTE_USER") or (self.scope or {}).get("user")
        if self.awaits and isinstance(user, LazyObject) and user.__dict__.get("_wrapped") is empty:
            raise UserWanted
        return user

    def note_user(self, user: Any) -> None:
        """Set the user that the application authenticated."""
        self._user = (user,)

    async def find_user(self) -> None:
        """Load the user, with ``auser`` if that is Django's, otherwise in a thread."""
        user, auser = getattr(self.django, "user", None), getattr(self.django, "auser", None)
        if self._user is not None or not isinstance(user, LazyObject):
            return
        if auser is not None and _module_of(auser) == _module_of(user.__dict__.get("_setupfunc")):
            user = await auser()
        else:
            await sync_to_async(bool)(user)
        self._user = (user,)

    @property
    def reads_here(self) -> bool:
        """Return True, because Django has already read an ASGI body."""
        return True

    def _read_body_here(self, most: int) -> bytes:
        django = self.django
        try:
            if self.scope is not None and not hasattr(django, "_body") and _size_of(django) > most:
                raise too_large(most)
            data: bytes = django.body
        except RequestDataTooBig:
            raise too_large(most) from None
        except RawPostDataException:
            # Django has parsed a form. Then the view cannot read the body either.
            if django.content_type in FORMS:
                return b""
            raise
        except UnreadablePostError as error:
            raise incomplete() from error
        if len(data) > most:
            raise too_large(most)
        return data

    def find_user_here(self) -> None:
        """`find_user` in a thread that may block."""
        user = getattr(self.django, "user", None)
        if self._user is None and isinstance(user, LazyObject):
            bool(user)
            self._user = (user,)

    def _open_headers(self) -> Headers:
        return WSGIHeaders(self.django.META)


def _size_of(django: Any) -> int:
    stream = django._stream  # noqa: SLF001 - there is no public way
    if django._read_started or not stream.seekable():  # noqa: SLF001
        return 0
    size: int = stream.seek(0, SEEK_END)
    stream.seek(0)
    return size


def _module_of(function: Any) -> Any:
    """``auser`` is a partial since Django 5.0."""
    return getattr(getattr(function, "func", function), "__module__", None)
