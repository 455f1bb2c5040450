"""A Django request as seen by the gate: the path that Django routes by, for any kind of server."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from asgiref.sync import sync_to_async
from django.utils.functional import LazyObject, empty

from limitgate.http.request import Headers, Query, Request, UserWanted, WSGIHeaders


class DjangoRequest(Request):
    """A request based on a `django.http.HttpRequest`, as left by the middleware before this one.

    ``awaits`` is True on an event loop, where loading the user must not block.
    """

    django: Any
    _user: tuple[Any] | None = None

    def __init__(self, django: Any, *, awaits: bool = False) -> None:
        self.django = django
        self.scope = getattr(django, "scope", None)
        self.environ = django.META if self.scope is None else None
        self.sent_method = (django.method or "GET").upper()
        self.method = "GET" if self.sent_method == "HEAD" else self.sent_method
        self.sent = django.path_info
        self.peer = django.META.get("REMOTE_ADDR") or None
        self.is_outermost = not (self.passed_a_gate or self.has_too_many_lines)
        self.awaits = awaits

    @cached_property
    def query(self) -> Query:
        """The query string."""
        return Query(self.django.META.get("QUERY_STRING", ""))

    @property
    def user(self) -> Any:
        """``request.user``; by default the user given by the server.

        Raises `UserWanted` if `find_user` has to be awaited first.
        """
        if self._user is not None:
            return self._user[0]
        user = getattr(self.django, "user", None)
        if user is None:
            return self.django.META.get("REMOTE_USER") or (self.scope or {}).get("user")
        if self.awaits and isinstance(user, LazyObject) and user.__dict__.get("_wrapped") is empty:
            raise UserWanted
        return user

    def note_user(self, user: Any) -> None:
        """Set `user` to the user that the application authenticated."""
        self._user = (user,)

    async def find_user(self) -> None:
        """Load the user for `user`, with ``auser`` if it belongs to ``user``, otherwise in a thread."""
        user, auser = getattr(self.django, "user", None), getattr(self.django, "auser", None)
        if self._user is not None or not isinstance(user, LazyObject):
            return
        if auser is not None and _module_of(auser) == _module_of(user.__dict__.get("_setupfunc")):
            user = await auser()
        else:
            await sync_to_async(bool)(user)
        self._user = (user,)

    def find_user_here(self) -> None:
        """`find_user` in a thread that may block."""
        user = getattr(self.django, "user", None)
        if self._user is None and isinstance(user, LazyObject):
            bool(user)
            self._user = (user,)

    def _open_headers(self) -> Headers:
        return WSGIHeaders(self.django.META)


def _module_of(function: Any) -> Any:
    """Return the module of a function, or of a partial's function: ``auser`` is a partial since Django 5.0."""
    return getattr(getattr(function, "func", function), "__module__", None)
