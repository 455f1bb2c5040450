"""The bucket that a request falls into: the parts of a composite key, and the digest they become.

Every part's value is taken down with its name and length, so no value can pass for another part's or spell a separator. A
part that is absent is replaced by the client's address under a name of its own: leaving something out neither opens a
fresh bucket nor joins strangers in one, and never equals a value that merely spells the address.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from limitgate.gate.planning.identity import Subject
from limitgate.gate.planning.user_ids import NoIdError, user_id
from limitgate.http.client_ip import grouped
from limitgate.http.request import LONGEST_VALUE, value_too_long
from limitgate.rules.options import check_part


class Value(NamedTuple):
    """A part of a key that the application works out by itself."""

    name: str
    text: str | None
    """None if it is absent."""
    is_inventable: bool = False
    """True if a client may have made it up, as far as anybody can tell."""


_SHORT = 200
"""Characters that a value may have to be taken down as it is."""


class Key:
    """A composite key, compiled for the rule ``owner``. Raises `ConfigError` for a part that is unknown.

    ``names`` are the parts as written, ``pattern`` is what stands for ``path`` where the framework's route is not known,
    ``secret`` keys the digest (BLAKE2b, RFC 7693, 128 bits), and ``inventable`` says of a part's label whether clients may
    make up its values.
    """

    __slots__ = ("_hash", "_inventable", "_labels", "_parts")

    def __init__(
        self,
        names: Sequence[str],
        owner: str,
        pattern: str = "",
        secret: bytes = b"",
        inventable: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._labels = [check_part(name) for name in names]
        parts = [[(label, inventable(label)) for label in labels] for labels in self._labels]
        self._inventable = [part for part in parts if any(made_up for _, made_up in part)]
        self._parts = [_part(labels, pattern) for labels in self._labels]
        self._hash = hashlib.blake2b(_field("owner", owner).encode(), digest_size=16, key=secret)

    def text(self, subject: Subject) -> str:
        """Text that tells this subject's bucket from the others of this key; short, however much a client sends."""
        text = ""
        for part in self._parts:
            text += part(subject)
        return text

    def named(self, subject: Subject) -> list[tuple[str, str]]:
        """Labels and values of the parts that tell who a subject is, for people; the address for one that is absent."""
        found = {}
        for labels in self._labels:
            values = [(label, part_of(subject, label)) for label in labels if label != "global"]
            present = next((value for value in values if value[1]), ("ip", subject.address()) if values else None)
            if present is not None and present[1]:
                found[present[0]] = present[1]
        return list(found.items())

    @property
    def is_inventable(self) -> bool:
        """True if there are parts whose values clients may make up."""
        return bool(self._inventable)

    def is_invented(self, subject: Subject) -> bool:
        """True if one of these parts counts for this subject, so that its bucket may be one that the client made up."""
        return not subject.is_real and any(_is_made_up(part, subject) for part in self._inventable)

    def digest(self, text: str) -> str:
        """The 32 hex digits that name the bucket of ``text``."""
        digest = self._hash.copy()
        digest.update(_bytes(text))
        return digest.hexdigest()

    def prepared(self, subject: Subject, prefix: str) -> PreparedKey:
        """Digest whatever is the same for all requests of this subject's tier, method and route."""
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
    """Key of which only what the client contributes is left to be digested."""

    __slots__ = ("_parts", "_route", "digest", "is_by_address", "prefix", "tail")

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
        self.is_by_address = [tuple(each) for each in labels] == [("ip",)]
        """True if the client contributes its address and nothing else."""
        self.prefix = prefix
        self.digest = digest
        """That of all fields before the client's."""
        self.tail = _bytes(tail)
        """Fields behind the client's."""
        self._parts = parts
        self._route = route

    def of(self, subject: Subject) -> str:
        """Key of a subject of the same tier and method, at the route that it was prepared for."""
        subject.route = self._route  # which stands where an API key before it is absent
        text = ""
        for part in self._parts:
            text += part(subject)
        digest = self.digest.copy()
        digest.update(_bytes(text) + self.tail)
        return self.prefix + digest.hexdigest()  # type: ignore[no-any-return]


def keys_of_client(prepared: Iterable[PreparedKey], client: str | None, ipv6_prefix: int) -> list[str]:
    """Keys to which a client contributes its address alone, as part ``ip`` does it: IPv4 address, IPv6 network, or nobody."""
    if client is not None and len(client) < len(_IPV4_HEADS) and client.isascii() and client.replace(".", "0").isdecimal():
        field = _IPV4_HEADS[len(client)] + client.encode() + b","  # `grouped` would leave it as it is
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
"""Beginnings of fields as `_field` makes them, for addresses of so many characters: almost every request comes by here."""


_SETTLED = frozenset({"method", "tier", "global"})
"""Parts that are the same for all requests of a tier and method."""


def _is_settled(labels: Sequence[str], subject: Subject) -> bool:
    """True if a part is the same for all requests of this subject's tier, method and route."""
    first = labels[0]
    return first in _SETTLED or (first == "path" and (bool(subject.route) or len(labels) == 1))


def _always(text: str) -> Callable[[Subject], str]:
    """A function that gives the text of a part that is the same for all subjects; those of a prepared key know no route."""
    return lambda _: text


def overflow(source: str | None) -> str:
    """Text of the bucket for requests of a source that has opened too many buckets; no key's text is the same."""
    return _field("overflow nobody" if source is None else "overflow", source or "")


def value_of(value: object, name: str) -> Value:
    """Part ``name`` of a key, as the application gave it. Raises `TypeError` as `text_of` does.

    Text, a number, a UUID or a tuple may be no more than what the client has sent. An object is somebody that the application
    knows.
    """
    return Value(name, text_of(value, name), isinstance(value, str | int | UUID | tuple))


def text_of(value: object, name: str) -> str | None:
    """Text of a value that the application gave as part ``name`` of a key; None if it is absent, see `user_id`.

    Raises `TypeError` for a value without an id.
    """
    try:
        return user_id(value)
    except NoIdError as error:
        raise TypeError(f"key part {name} gave {error}") from None


def given(values: Sequence[Value], subject: Subject) -> str:
    """Text of further parts of a key; the client's address for one that is absent, as for any other."""
    return "".join([_field(f"given {name}", text) if text else _absent(subject) for name, text, _ in values])


def _part(labels: Sequence[str], pattern: str) -> Callable[[Subject], str]:
    """A function that reads one part: its first alternative that is present, else the client's address."""
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
    """Text in place of a part that is absent."""
    address = subject.address()
    return "nobody," if address is None else _field("absent", address)


def _is_made_up(labels: Sequence[tuple[str, bool]], subject: Subject) -> bool:
    """True if the first alternative that is present is one whose value clients may make up."""
    return next((made_up for label, made_up in labels if part_of(subject, label)), False)


def _field(label: str, value: str) -> str:
    """A value with its name and length; in place of a long one its digest, under a name that no part can have."""
    if len(value) > _SHORT:
        label, value = f"{label} digest", hashlib.blake2b(_bytes(value), digest_size=16).hexdigest()
    return f"{label}:{len(value)}:{value},"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def part_of(subject: Subject, label: str) -> str | None:
    """Value that a subject has for an alternative of a key's part; empty or None if it is absent."""
    return _reader(label)(subject)


def _reader(label: str) -> Callable[[Subject], str | None]:
    if label.startswith("header:"):
        name = label.removeprefix("header:")
        return lambda subject: subject.request.opened_headers().identity(name)
    return _READERS[label]


def _host(subject: Subject) -> str:
    """The host without port, spelled one way (RFC 9110 section 4.2.3); of several the first, as the frameworks read it.

    Frameworks look no further than the first colon, so what is no port behind it makes no other host.
    """
    host = subject.request.opened_headers().start("host", LONGEST_VALUE + 1).strip()
    bracket = host.find("]") + 1 if host.startswith("[") else 0
    host = host[:bracket] or host.partition(":")[0].partition(",")[0]
    if len(host) > LONGEST_VALUE:
        raise value_too_long()
    return host.lower().strip().removesuffix(".")


def _user(subject: Subject) -> str | None:
    """The id of the application's user; None if there is none, or an anonymous one, or if the user has no id."""
    user = subject.user
    try:
        return user_id(user)
    except NoIdError:
        subject.report_no_id(user)
        return None


_READERS: dict[str, Callable[[Subject], str | None]] = {
    "path": lambda subject: subject.route,
    "ip": Subject.address,
    "api_key": lambda subject: subject.api_key,
    "method": lambda subject: subject.request.method_class,
    "host": _host,
    "user": _user,
    "caller": lambda subject: subject.caller.id if subject.caller else None,
    "tier": lambda subject: subject.tier,
    "global": lambda _: "all",
}
