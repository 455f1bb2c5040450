"""The door in Django: how a request comes in and how its answer goes out. What the answer is, the gate says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from inspect import isawaitable
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http import HttpResponse, UnreadablePostError

from limitgate.django.options import options
from limitgate.django.request import DjangoRequest, UserWanted
from limitgate.exchange.wsgi import end, settle
from limitgate.gate.admission import ADMISSION, Admission, admission_around
from limitgate.gate.build import build_gate
from limitgate.gate.gate import Gate, Identify
from limitgate.http.response import Refusal
from limitgate.routes.django import DjangoRoutes
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import EVERYTHING, seen_by_gate
from limitgate.rules.settings import Settings
from limitgate.stores import open_store, open_sync_store


class LimitGateMiddleware:
    """``MIDDLEWARE = [..., "limitgate.django.LimitGateMiddleware"]`` with ``LIMITGATE = {"RULES": "config/", ...}``.

    Options are those of `Settings`, in upper or lower case; unset ones come from ``LIMITGATE_*``. ``on_denied`` is a view.
    Works in threads or on an event loop, as Django asks it to. Raises `ConfigError` for a mistake in the options or the rules.
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
            if (identify := Settings(**chosen).identify) is not None:
                chosen["identify"] = _asked_once(identify)
        front = build_gate(self._routes, open_store if self._awaits else open_sync_store, **chosen)
        self.gate = front.gate
        self._deny = None if front.on_denied is None else _adapted(front.on_denied, awaits=self._awaits)

    def __call__(self, request: Any) -> Any:
        """The response to a request; on an event loop, an awaitable of it."""
        if self._awaits:
            return self._acall(request)
        admission = self.gate.check(self._seen(request)) if self.gate else None
        _leave(admission, request)
        if admission is not None and admission.refusal is not None:
            deny = self._deny if admission.refusal.status == 429 else None
            refused = deny(request) if deny else _refusing(admission.refusal, request)
            admission.end()
            return _completed(refused, admission)
        token = seen_by_gate.set(admission.seen if admission else EVERYTHING)
        try:
            response = self.get_response(request)
        except BaseException:  # Django makes a 500 of everything else
            if admission is not None:
                end(admission)
            raise
        finally:
            seen_by_gate.reset(token)
        if admission is not None:
            admission.begun(response.status_code)
            if response.streaming:
                settle(admission)
                _when_closed(response, partial(end, admission))
            else:
                end(admission)
        return _completed(response, admission)

    def process_exception(self, request: Any, exception: Exception) -> None:
        """A view has raised an error, for Django to answer; maybe only because the client went away while it sent."""
        admission: Admission | None = getattr(request, "scope", request.META).get(ADMISSION)
        if admission is not None and isinstance(exception, UnreadablePostError):
            admission.client_left = True

    async def _acall(self, request: Any) -> Any:
        admission = await _weighed(self.gate, self._seen(request)) if self.gate else None
        _leave(admission, request)
        if admission is not None and admission.refusal is not None:
            deny = self._deny if admission.refusal.status == 429 else None
            refused = await deny(request) if deny else _refusing(admission.refusal, request)
            admission.end()
            return _completed(refused, admission)
        token = seen_by_gate.set(admission.seen if admission else EVERYTHING)
        try:
            response = await self.get_response(request)
        except GeneratorExit:  # the event loop is gone, and nothing can be awaited any more
            raise
        except BaseException:  # Django makes a 500 of everything else; mostly the client has left
            if admission is not None:
                await _aend(admission)
            raise
        finally:
            seen_by_gate.reset(token)
        if admission is not None:
            admission.begun(response.status_code)
            if response.streaming:
                if admission.may_need_refund:
                    await admission.gate.asettle(admission)
                _when_closed(response, partial(_end_of_loop, admission))
            else:
                await _aend(admission)
        return _completed(response, admission)

    def _seen(self, request: Any) -> DjangoRequest:
        """The request as the gate sees it."""
        self._routes.note(getattr(request, "urlconf", None))
        return DjangoRequest(request, awaits=self._awaits)


async def _weighed(gate: Gate, request: DjangoRequest) -> Admission:
    """What becomes of a request. That it takes the user shows when a key asks, before anything is charged; then once more.

    Once its turn has come: Django itself cancels a request whose client leaves meanwhile.
    """
    try:
        admission = await gate.acheck(request)
    except UserWanted:
        await request.find_user()
        admission = await gate.acheck(request)
    if admission.booking is not None:
        await gate.await_booking(admission)
    return admission


def _asked_once(identify: Identify) -> Identify:
    """``identify``, which need not find the same caller twice when the gate is asked anew."""

    async def remembered(request: Any) -> Caller | None:
        if request.identified is None:
            found = identify(request)
            request.identified = (await found if isawaitable(found) else found,)
        caller: Caller | None = request.identified[0]
        return caller

    return remembered


def _adapted(view: Callable[[Any], Any], *, awaits: bool) -> Callable[[Any], Any]:
    """A view as it can be called here, whichever kind it is. What it leaves to be rendered is rendered."""
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


def _leave(admission: Admission | None, request: Any) -> None:
    """Put the decision where a view finds it. The scope may be shared with whatever stands around Django, so it is copied."""
    around = None if admission else admission_around(getattr(request, "scope", request.META))
    if around is not None:  # by a gate that is not switched off
        request.limitgate = around.told
        return
    request.limitgate = admission.told if admission else None
    left = {"limitgate": request.limitgate, ADMISSION: admission}
    if hasattr(request, "scope"):
        request.scope = {**request.scope, **left}
    else:
        request.META.update(left)


async def _aend(admission: Admission) -> None:
    if admission.end():
        await admission.gate.asettle(admission)


def _end_of_loop(admission: Admission) -> None:
    """End a visit to a gate of an event loop, out of a thread of that loop's or in the midst of it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        async_to_sync(_aend)(admission)
    else:
        if admission.end():
            admission.gate.settle_soon(admission)


def _when_closed(response: Any, end: Callable[[], None]) -> None:
    """Have something done when Django closes a response, after it was sent or the client has left."""
    close = response.close

    def close_and_end() -> None:
        try:
            close()
        finally:
            vars(response).pop("close", None)  # nothing of it is to lead back to it
            end()

    response.close = close_and_end


def _refusing(refusal: Refusal, request: Any) -> Any:
    body = b"" if request.method == "HEAD" else refusal.body
    return HttpResponse(body, status=refusal.status, headers=dict(refusal.fields))


def _completed(response: Any, admission: Admission | None) -> Any:
    """A response with its rate fields, a refusal with its ``Retry-After`` unless it has one."""
    if admission is not None:
        for name, value in admission.rate_fields:
            response[name] = value
        for name, value in admission.refusal.waiting if admission.refusal else ():
            response.setdefault(name, value)
    return response
