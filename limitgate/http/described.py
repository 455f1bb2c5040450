"""Requests that no server has sent: what is known of them is given."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from limitgate.http.request import Query, Request


class DescribedRequest(Request):
    """A request known by its parts: the path decoded, ``headers`` by lower-case name, ``peer`` who sent it, its ``user``."""

    comes_straight = True

    def __init__(
        self, method: str, path: str, peer: str | None = None, headers: Mapping[str, str] | None = None, user: object = None
    ) -> None:
        self.sent_method = method
        self.method = "GET" if method == "HEAD" else method
        self.sent = path
        self.peer = peer
        self._described = headers
        self._user = user

    @classmethod
    def of_client(cls, client: str | None, method: str, headers: Mapping[str, str], user: object) -> DescribedRequest:
        """Describe a request of a client, behind whatever proxies, whose path does not matter."""
        request = cls(method, "/", None, headers, user)
        request._client = client
        return request

    @cached_property
    def query(self) -> Query:
        """Nothing: rules in files do not look at the query."""
        return Query("")

    @property
    def user(self) -> Any:
        """The user, None if nobody is known."""
        return self._user

    def _read_headers(self) -> dict[str, str]:
        return dict(self._described or ())
