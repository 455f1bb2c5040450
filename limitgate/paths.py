"""Paths and path patterns: what a request's path is matched as, and which patterns match it.

Servers and frameworks disagree about which spellings of a path are one resource, so a path has several readings: cleaned
of everything that some framework ignores, and nearly as sent. A pattern that matches any reading applies, so neither a
framework that tidies more than we do nor one that tidies less lets a request slip past.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from limitgate.errors import ConfigError

T = TypeVar("T")

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]")
"""Control characters, and what stands for bytes that are no UTF-8, which Bottle leaves out."""
_UNTIDY = re.compile(rf"{_CONTROLS.pattern}|;|/(?:[/.]|\Z)")
_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}", re.ASCII)
_EXPECTED = "expected for example '/login', '/items/{id}' or '/api/**'"

ANY = "{}"
"""A pattern's segment that stands for any one segment."""
REST = "**"
"""A pattern's last segment that stands for any number of segments, none included."""


def readings(path: str, root: str = "") -> tuple[str, ...]:
    """The path below ``root`` as it is to be matched: cleaned first, then as sent but for empty segments where that differs.

    Cleaning strips control characters, what was no UTF-8, and ``;parameters``, merges slashes, resolves dot segments (RFC 3986
    section 5.2.4) and drops a trailing slash. Where the mount point itself is spelled in an untidy way, it is looked for both
    ways; where it stands elsewhere in the path, what is behind it is read, too. What stands before the first slash may be a
    mount point to a dispatcher, or the path an absolute URL, so such a path is read without that, too.
    """
    if path.startswith("/") and (path == "/" or not _UNTIDY.search(path)):
        if not root:
            return (path,)
        if _is_below(path, root):
            return (path[len(root) :] or "/",)
    rest = below(path, root)
    sent = [segment for segment in rest.split("/") if segment]
    found = [_joined(_cleaned(rest)), _joined([_CONTROLS.sub("", segment) or segment for segment in sent]), _joined(sent)]
    if root and rest is path:
        found.insert(0, below(_joined(_cleaned(path)), _joined(_cleaned(root))) or "/")
        _, inside, behind = path.partition(root)  # as Litestar takes the mount point off; Quart does not mind where it ends
        found += readings("/" + behind) if inside else ()
    if rest and not rest.startswith("/"):
        _, slash, behind = rest.partition("/")
        found += readings(slash + behind) if slash else ["/"]
        found += readings(_path_of_url(rest), root)
    return tuple(dict.fromkeys(found))


def segments(pattern: str) -> tuple[str, ...]:
    """A rule's pattern as segments, `ANY` for a placeholder, `REST` for the end of a prefix. Raises `ConfigError`."""
    if not pattern.startswith("/"):
        raise ConfigError(f"path {pattern!r} does not begin with '/', {_EXPECTED}")
    parts = pattern.removesuffix("/").split("/")[1:]
    found = []
    for place, part in enumerate(parts):
        if part == REST and place == len(parts) - 1:
            found.append(REST)
        elif _PLACEHOLDER.fullmatch(part):
            found.append(ANY)
        elif "<" in part and ">" in part:
            raise ConfigError(f"path {pattern!r} has the segment {part!r}, expected {{name}} where any segment may stand")
        elif part in ("", ".", "..") or re.search(r"[{}*;?#]", part) or _CONTROLS.search(part):
            raise ConfigError(f"path {pattern!r} has the segment {part!r} that no request can match, {_EXPECTED}")
        else:
            found.append(part)
    return tuple(found)


def covers(pattern: Sequence[str], other: Sequence[str]) -> bool:
    """Whether a pattern of `segments` matches every path that another one matches."""
    for place, segment in enumerate(pattern):
        if segment == REST:
            return True
        if place == len(other) or other[place] == REST or segment not in (ANY, other[place]):
            return False
    return len(pattern) == len(other)


def meet(pattern: Sequence[str], other: Sequence[str]) -> tuple[str, ...] | None:
    """The pattern of those paths that two patterns of `segments` both match; None if there are none."""
    found: list[str] = []
    for place, segment in enumerate(pattern):
        if segment == REST:
            return (*found, *other[place:])
        if place == len(other):
            return None
        if other[place] == REST:
            return (*found, *pattern[place:])
        if segment not in (ANY, other[place]) and other[place] != ANY:
            return None
        found.append(other[place] if segment == ANY else segment)
    return tuple(found) if other[len(pattern) :] in ((), (REST,)) else None


class PathIndex(Generic[T]):
    """Values by pattern, found by path in a time that depends on the path's length, not on how many patterns there are.

    A tree over segments: each node has its literal children, one child for a placeholder, the values of the patterns that
    end here and of those that go on with anything.
    """

    __slots__ = ("any", "children", "here", "rest")

    def __init__(self) -> None:
        self.children: dict[str, PathIndex[T]] = {}
        self.any: PathIndex[T] | None = None
        self.here: list[T] = []
        self.rest: list[T] = []

    def add(self, pattern: tuple[str, ...], value: T) -> None:
        """Put ``value`` under a pattern of `segments`."""
        node = self
        for segment in pattern:
            if segment == REST:
                node.rest.append(value)
                return
            if segment == ANY:
                if node.any is None:
                    node.any = PathIndex()
                node = node.any
            else:
                node = node.children.setdefault(segment, PathIndex())
        node.here.append(value)

    def find(self, path: str) -> list[T]:
        """The values whose patterns match ``path``, in no particular order."""
        nodes, found = [self], []
        if path != "/":
            for segment in path.split("/")[1:]:
                if not nodes:
                    break
                below = []
                for node in nodes:
                    found += node.rest
                    child = node.children.get(segment)
                    if child is not None:
                        below.append(child)
                    if node.any is not None:
                        below.append(node.any)
                nodes = below
        for node in nodes:
            found += node.rest + node.here
        return found


def _cleaned(path: str) -> list[str]:
    found: list[str] = []
    for part in _CONTROLS.sub("", path).split("/"):
        segment = part.partition(";")[0]
        if segment == "..":
            if found:
                found.pop()
        elif segment not in ("", "."):
            found.append(segment)
    return found


def _joined(found: list[str]) -> str:
    return "/" + "/".join(found)


def below(path: str, root: str) -> str:
    """The path below a mount point, as Starlette reads it: unchanged where it is not below."""
    return path[len(root) :] if root and _is_below(path, root) else path


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root) and (len(path) == len(root) or path[len(root)] == "/")


def _path_of_url(text: str) -> str:
    """The path of an absolute URL, which a request may be made to (RFC 9112 section 3.2.2) and which Quart takes apart."""
    try:
        path = urlsplit(text).path
    except ValueError:
        return "/"
    return path if path.startswith("/") else "/"
