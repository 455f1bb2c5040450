"""Turns the parts of a composite key into the digest that names a bucket.

Values are encoded with name and length, so that no value can imitate another part or a separator. Lines of a header are
stripped and joined by commas. An empty header counts as missing. The client's address, under a reserved name, replaces a
missing part: a client gains no bucket by omitting one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from limitgate.gate.planning.identity import NoIdError, Subject, user_id
from limitgate.http.body import pointer
from limitgate.http.client_ip import grouped
from limitgate.http.request import LONGEST_VALUE, value_too_long
from limitgate.rules.options import check_part


class Value(NamedTuple):
    """A key part from the application."""

    name: str
    text: str | None
    is_inventable: bool = False
    """True if clients may invent values."""


_SHORT = 200
"""Characters; longer values become digests."""


class Key:
    """A composite key of the rule ``owner``. Raises `ConfigError` for an unknown part.

    ``pattern`` replaces ``path`` for an unknown route. ``secret`` keys the digest (BLAKE2b, RFC 7693, 128 bits).
    ``inventable`` returns True for parts that clients can invent.
    """

    __slots__ = ("_hash", "_inventable", "_labels", "_parts", "may_be_shared")

    def __init__(
        self,
        names: Sequence[str],
        owner: str,
        pattern: str = "",
        secret: bytes = b"",
        inventable: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._labels = [check_part(name) for name in names]
        self.may_be_shared: bool = any("path" in labels or "global" in labels for labels in self._labels)
        parts = [[(label, inventable(label)) for label in labels] for labels in self._labels]
        self._inventable = [part for part in parts if any(made_up for _, made_up in part)]
        self._parts = [_part(labels, pattern) for labels in self._labels]
        self._hash = hashlib.blake2b(_field("owner", owner).encode(), digest_size=16, key=secret)

    def text(self, subject: Subject) -> str:
        text = ""
        for part in self._parts:
            text += part(subject)
        return text

    def named(self, subject: Subject, values: Sequence[Value] = ()) -> list[tuple[str, str]]:
        """Return the parts that tell the bucket from others; none if everybody shares it."""
        found: dict[str, str] = {}
        for labels in self._labels:
            # Stop at the first value, as the key does, because others may be slow.
            for label in labels if "path" in labels else (*labels, "ip"):
                if value := part_of(subject, label):
                    found |= {label: value} if label != "global" else {}
                    break
        for name, text, _ in values:
            label, value = (name.rpartition(".")[2], text) if text else ("ip", subject.address())
            found |= {label: value} if value else {}
        return list(found.items())

    @property
    def is_inventable(self) -> bool:
        return bool(self._inventable)

    def is_invented(self, subject: Subject) -> bool:
        return not subject.is_real and any(_is_made_up(part, subject) for part in self._inventable)

    def digest(self, text: str) -> str:
        digest = self._hash.copy()
        digest.update(_bytes(text))
        return digest.hexdigest()

    def prepared(self, subject: Subject, prefix: str) -> PreparedKey:
        parts = list(zip(self._labels, self._parts))
        digest = self._hash.copy()
        while parts and _is_settled(parts[0][0], subject):
            digest.update(_bytes(parts.pop(0)[1](subject)))
        tail = ""
        while parts and _is_settled(parts[-1][0], subject):
            tail = parts.pop()[1](subject) + tail
        left = [_always(part(subject)) if _is_settled(labels, subject) else part for labels, part in parts]
        return PreparedKey(prefix, digest, [labels for labels, _ in parts], left, tail, route=subject.route)


class PreparedKey:
    """A key with everything except the client's parts."""

    __slots__ = ("_route", "_text", "digest", "is_by_address", "prefix", "tail")

    def __init__(
        self,
        prefix: str,
        digest: Any,
        labels: Sequence[Sequence[str]],
        parts: Sequence[Callable[[Subject], str]],
        tail: str,
        *,
        route: str | None,
    ) -> None:
        self.is_by_address: bool = [tuple(each) for each in labels] == [("ip",)]
        self.prefix: str = prefix
        self.digest: Any = digest
        self.tail: bytes = _bytes(tail)
        self._text = parts[0] if len(parts) == 1 else lambda subject: "".join([part(subject) for part in parts])
        self._route = route

    def of(self, subject: Subject) -> str:
        # Parts such as `api_key,path` use the route.
        subject.route = self._route
        text = self._text  # A local name, because it isn't a method.
        digest = self.digest.copy()
        digest.update(text(subject).encode("utf-8", "surrogatepass") + self.tail)
        return self.prefix + digest.hexdigest()  # type: ignore[no-any-return]


def keys_of_client(prepared: Iterable[PreparedKey], client: str | None, ipv6_prefix: int) -> list[str]:
    """Return the keys for a client, as with the part ``ip``; None without an address."""
    # IPv4 addresses need no `grouped`.
    raw = client.encode() if client is not None and len(client) <= 15 and client.isascii() else b""
    if raw.replace(b".", b"0").isdigit():
        field = _IPV4_HEADS[len(raw)] + raw + b","
    else:
        address = None if client is None else grouped(client, ipv6_prefix)
        field = _bytes(_field("ip", address) if address else "nobody,")
    keys = []
    for key in prepared:
        digest = key.digest.copy()
        digest.update(field)
        if key.tail:
            digest.update(key.tail)
        keys.append(key.prefix + digest.hexdigest())
    return keys


_IPV4_HEADS = [b"ip:%d:" % length for length in range(16)]
"""Start of an encoded IPv4 address, by its length."""


_SETTLED = frozenset({"method", "tier", "global"})


def _is_settled(labels: Sequence[str], subject: Subject) -> bool:
    first = labels[0]
    return first in _SETTLED or (first == "path" and (bool(subject.route) or len(labels) == 1))


def _always(text: str) -> Callable[[Subject], str]:
    return lambda _: text


def overflow(source: str | None) -> str:
    return _field("overflow nobody" if source is None else "overflow", source or "")


def value_of(value: object, name: str) -> Value:
    return Value(name, text_of(value, name), isinstance(value, str | int | UUID | tuple))


def text_of(value: object, name: str) -> str | None:
    """Return None for a missing part, see `user_id`. Raises `TypeError` without an id."""
    try:
        return user_id(value)
    except NoIdError as error:
        raise TypeError(f"key part {name} returned {error}") from None


def given(values: Sequence[Value], subject: Subject) -> str:
    return "".join([_field(f"given {name}", text) if text else _absent(subject) for name, text, _ in values])


def _part(labels: Sequence[str], pattern: str) -> Callable[[Subject], str]:
    readers = [(label, _reader(label)) for label in labels]
    own_pattern = _field("pattern", pattern) if "path" in labels else None

    def contribution(subject: Subject) -> str:
        fields = subject.fields
        for label, read in readers:
            field = fields.get(label)
            if field is None:
                value = read(subject)
                field = fields[label] = _field(label, value) if value else ""
            if field:
                return field
        if own_pattern is not None:
            return own_pattern
        return _absent(subject)

    return contribution


def _absent(subject: Subject) -> str:
    address = subject.address()
    return "nobody," if address is None else _field("absent", address)


def _is_made_up(labels: Sequence[tuple[str, bool]], subject: Subject) -> bool:
    return next((made_up for label, made_up in labels if part_of(subject, label)), False)


def _field(label: str, value: str) -> str:
    if len(value) > _SHORT:
        label, value = f"{label} digest", hashlib.blake2b(_bytes(value), digest_size=16).hexdigest()
    return f"{label}:{len(value)}:{value},"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def part_of(subject: Subject, label: str) -> str | None:
    return _reader(label)(subject)


def _reader(label: str) -> Callable[[Subject], str | None]:
    if label.startswith("header:"):
        name = label.removeprefix("header:")
        return lambda subject: subject.request.opened_headers().identity(name)
    if label.startswith("json:"):
        tokens = pointer(label.removeprefix("json:"))
        return lambda subject: subject.request.json_text(tokens)
    return _READERS[label]


def _host(subject: Subject) -> str:
    """Return the first host, normalized (RFC 9110 section 4.2.3).

    Drops everything after the first colon, as frameworks do.
    """
    host = subject.request.opened_headers().start("host", LONGEST_VALUE + 1).strip()
    bracket = host.find("]") + 1 if host.startswith("[") else 0
    host = host[:bracket] or host.partition(":")[0].partition(",")[0]
    if len(host) > LONGEST_VALUE:
        raise value_too_long()
    return host.lower().strip().removesuffix(".")


def _user(subject: Subject) -> str | None:
    user = subject.user
    try:
        return user_id(user)
    except NoIdError:
        subject.report_no_id(user)
        return None


_READERS: dict[str, Callable[[Subject], str | None]] = {
    "path": lambda subject: subject.route,
    "ip": Subject.address,
    "api_key": lambda subject: subject.api_key(),
    "method": lambda subject: subject.request.method_class,
    "host": _host,
    "user": _user,
    "caller": lambda subject: subject.caller.id if subject.caller else None,
    "tier": lambda subject: subject.tier,
    "global": lambda _: "all",
}
