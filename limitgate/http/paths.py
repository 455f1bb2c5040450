"""Normalization and matching of request paths.

Servers disagree about equivalent paths, so a path has several interpretations, from cleaned to as sent. A pattern applies if it
matches one of them. A path beyond `LONG` is cut to what patterns can distinguish. If that takes too long, the path matches all
patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import unquote

from limitgate.errors import ConfigError
from limitgate.messages.text import shortened

T = TypeVar("T")

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]")
"""Control characters, and the replacement for invalid UTF-8. Bottle drops the latter."""
_UNTIDY = re.compile(rf"{_CONTROLS.pattern}|;|/(?:[/.]|\Z)")
_STRIPPED = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0), 0xFFFD])
_NO_SEGMENTS = ("", ".")
_SLASHES = re.compile("/+")
_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}", re.ASCII)
_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_FOREIGN = re.compile(
    rf":(?P<colon>{_NAME})(?:\(.*\))?\??|<(?:(?P<type>[^<>]*):)?(?P<bracket>{_NAME})>|\{{(?P<brace>{_NAME}):(?P<convertor>[^{{}}]*)\}}",
    re.ASCII,
)
"""Express or Rails ``:id``, Flask or Django ``<int:id>``, Starlette ``{id:int}``."""
_ESCAPE = re.compile("%[0-9A-Fa-f]{2}")
_EXPECTED = "expected for example '/login', '/items/{id}' or '/api/**'"

LONG, LONGEST = 512, 16_384
"""Characters to interpret completely (0.7 µs each), and to read."""
_PADDING = 64
"""Segments to strip, and characters per segment."""
_HIDDEN_BYTES = bytes([*range(0x20), *range(0x7F, 0x100)])
_SCHEME_BYTES = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-"
_SPACE = "".join(map(chr, range(0x21)))

ANY = "{}"
REST = "**"
"""The end of a pattern: zero or more segments."""


def interpretations(path: str, root: str = "") -> tuple[str, ...]:
    """Return the interpretations of a path below ``root``, the cleaned one first.

    Cleaning strips control characters, invalid UTF-8 and ``;parameters``, merges slashes, resolves dot segments (RFC 3986
    section 5.2.4) and drops a trailing slash. ``root`` is removed before or after cleaning. Text before the first slash, which
    may be a mount point or part of a URL, is optional.
    """
    if _is_tidy(path, root):
        return (below(path, root) or "/",)
    rest = below(path, root)
    found = _forms(rest)
    if root and rest is path:
        found.insert(0, _below_mount(found[0], root))
        _, inside, behind = path.partition(root)  # as Litestar does; Quart also ignores segment borders
        found += interpretations("/" + behind) if inside else ()
    if rest and not rest.startswith("/"):
        _, slash, behind = rest.partition("/")
        found += interpretations(slash + behind) if slash else ["/"]
        found += interpretations(_path_of_url(rest), root)
    return tuple(dict.fromkeys(found))


def _forms(path: str) -> list[str]:
    shown = _shown(path)
    sent = path.split("/")
    without_controls = [show or segment for show, segment in zip(shown.split("/"), sent) if segment]
    return [_joined(_cleaned(shown)), _joined(without_controls), _joined([segment for segment in sent if segment])]


def first_interpretation(path: str, root: str = "") -> str:
    """Return the cleaned path. Beyond `LONG` characters, it stays as sent."""
    rest = below(path, root)
    if len(path) + len(root) <= LONG:
        if _is_tidy(path, root):
            return rest or "/"
        cleaned = _joined(_cleaned(_shown(rest)))
        return _below_mount(cleaned, root) if root and rest is path else cleaned
    start = _end_of_slashes(path, len(path) - len(rest))
    end = max(start, path.rfind("/", start, start + LONG))
    behind = _end_of_slashes(path, end)
    cleaned = _joined(_cleaned(_shown(path[start:end])))
    return cleaned if behind == len(path) else f"{cleaned.removesuffix('/')}/{path[behind:]}"


class Reach(NamedTuple):
    """What patterns can distinguish."""

    depth: int
    length: int

    @classmethod
    def of(cls, patterns: Iterable[Sequence[str]]) -> Reach:
        patterns = list(patterns)
        longest = max((len(segment) for pattern in patterns for segment in pattern), default=0)
        return cls(max(map(len, patterns), default=0), max(2, longest))

    def interpretations(self, path: str, root: str = "") -> tuple[str, ...] | None:
        """Return paths that match the same patterns as all `interpretations`. None matches all patterns."""
        if len(path) + len(root) <= LONG:
            return interpretations(path, root)
        if len(path) + len(root) > LONGEST or _may_climb(path) or _may_climb(root):
            return None
        try:
            return tuple(dict.fromkeys(self._of_long(path, root)))
        except _TangledError:
            return None

    def _of_long(self, path: str, root: str) -> list[str]:
        rest = below(path, root)
        found = self.forms(rest)
        if root and rest is path:
            found.append(self._below_mount(path, root))
            _, inside, behind = path.partition(root)
            found += self.forms(behind) if inside else ()
        if rest and not rest.startswith("/"):
            found += self.forms(rest.partition("/")[2])
            found += self._of_long(_path_of_url(rest), root)
        return found

    def _below_mount(self, path: str, root: str) -> str:
        mount = self._replace(depth=_PADDING).forms(root)[0]
        depth = mount.count("/")
        if depth > _PADDING:
            raise _TangledError
        return below(self._replace(depth=self.depth + depth).forms(path)[0], mount) or "/"

    def forms(self, path: str) -> list[str]:
        pieces, is_whole = self._split(path)
        sent = [piece for piece in pieces if piece][: self.depth + 1]
        if len(sent) <= self.depth and not is_whole:
            raise _TangledError
        shown = [self._shown(piece) or piece for piece in sent]
        return [_joined(form) for form in (self._cleaned(pieces, is_whole=is_whole), self._short(shown), self._short(sent))]

    def _cleaned(self, pieces: Sequence[str], *, is_whole: bool) -> list[str]:
        found = []
        for piece in pieces:
            segment = self._shown(piece, ";")
            if segment == "..":
                raise _TangledError
            if segment not in ("", "."):
                found.append(segment)
                if len(found) > self.depth:
                    return self._short(found)
        if not is_whole:
            raise _TangledError
        return self._short(found)

    def _split(self, path: str) -> tuple[list[str], bool]:
        most = self.depth + _PADDING
        pieces = _without_slashes(path).split("/", most)
        return pieces[:most], len(pieces) <= most or not _without_slashes(pieces[most])

    def _shown(self, piece: str, end: str = "/") -> str:
        window = self.length + _PADDING
        text = piece[:window].partition(end)[0]
        shown = _shown(text)
        if len(shown) <= self.length and len(text) == window < len(piece):
            raise _TangledError
        return shown

    def _short(self, found: list[str]) -> list[str]:
        return [segment[: self.length + 1] for segment in found]


class _TangledError(Exception):
    """The path can't be interpreted in bounded time."""


def _without_slashes(path: str) -> str:
    return path[_end_of_slashes(path, 0) :]


def _end_of_slashes(path: str, start: int) -> int:
    return start if (match := _SLASHES.match(path, start)) is None else match.end()


def _may_climb(path: str) -> bool:
    visible = b"/" + path.encode("utf-8", "surrogatepass").translate(None, _HIDDEN_BYTES)
    return b"/.." in visible and (visible.endswith(b"/..") or any(b"/.." + end in visible for end in (b"/", b";", b"?", b"#")))


def segments(pattern: str) -> tuple[str, ...]:
    """Split a pattern; `ANY` is a placeholder, `REST` is ``**``. Raises `ConfigError`."""
    if not pattern.startswith("/"):
        raise ConfigError(f"path {pattern!r:.80} does not begin with '/', {_EXPECTED}")
    parts = pattern.removesuffix("/").split("/")[1:]
    found = []
    for place, part in enumerate(parts):
        if part == REST and place == len(parts) - 1:
            found.append(REST)
        elif _PLACEHOLDER.fullmatch(part):
            found.append(ANY)
        elif _FOREIGN.fullmatch(part) or _ESCAPE.search(part):
            raise ConfigError(
                f"path {pattern!r:.80} has the segment {part!r:.80} that no request can match, {_expected_instead_of(parts)}"
            )
        elif part in ("", ".", "..") or re.search(r"[{}*;?#]|<.*>|[\ud800-\udfff]", part) or _CONTROLS.search(part):
            raise ConfigError(f"path {pattern!r:.80} has the segment {part!r:.80} that no request can match, {_EXPECTED}")
        else:
            found.append(part)
    return tuple(found)


def _expected_instead_of(parts: Iterable[str]) -> str:
    meant = "/" + "/".join([_meant(part) for part in parts])
    with suppress(ConfigError):
        if not _ESCAPE.search(meant) and segments(meant):
            return f"expected {shortened(repr(meant))}"
    return _EXPECTED


def _meant(part: str) -> str:
    foreign = _FOREIGN.fullmatch(part)
    if foreign is None:
        return unquote(part)
    is_rest = "path" in foreign.group("type", "convertor")
    return REST if is_rest else f"{{{foreign['colon'] or foreign['bracket'] or foreign['brace']}}}"


def beyond(mounts: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Return further paths for routers that match mounts by prefix."""
    found = [(mount, path.removeprefix(mount)) for mount in mounts for path in paths if path.startswith(mount)]
    return [f"{mount}/{rest}" for mount, rest in found if rest and not rest.startswith("/")]


def with_empty_segments(path: str, root: str = "") -> list[str]:
    """Return further paths for routers whose placeholders match empty segments."""
    return [f"/{each.lstrip('/')}" for each in dict.fromkeys((below(path, root), path)) if "//" in each or each.endswith("/")]


def covers(pattern: Sequence[str], other: Sequence[str]) -> bool:
    """True if ``pattern`` matches all of ``other``."""
    for place, segment in enumerate(pattern):
        if segment == REST:
            return True
        if place == len(other) or other[place] == REST or segment not in (ANY, other[place]):
            return False
    return len(pattern) == len(other)


def meet(pattern: Sequence[str], other: Sequence[str]) -> tuple[str, ...] | None:
    """Return the intersection of two patterns, None if empty."""
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
    """Maps patterns to values. The time of a lookup depends on the path, not on the number of patterns.

    A node has literal children, a placeholder child, and values of patterns that end here or in `REST`.
    """

    __slots__ = ("any", "children", "depth", "here", "rest")

    def __init__(self) -> None:
        self.children: dict[str, PathIndex[T]] = {}
        self.any: PathIndex[T] | None = None
        self.here: list[T] = []
        self.rest: list[T] = []
        self.depth: int = 0
        """Segments of the deepest pattern."""

    def add(self, pattern: tuple[str, ...], value: T) -> None:
        node = self
        self.depth = max(self.depth, len(pattern))
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
        nodes, found = [self], []
        if path != "/":
            for segment in path.split("/", self.depth + 1)[1:]:
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


def _shown(path: str) -> str:
    return path if path.isprintable() and "\ufffd" not in path else path.translate(_STRIPPED)


def _cleaned(shown: str) -> list[str]:
    segments = shown.split("/")
    if ";" in shown:
        segments = [segment.partition(";")[0] for segment in segments]
    if ".." not in segments:
        return [segment for segment in segments if segment not in _NO_SEGMENTS]
    found: list[str] = []
    for segment in segments:
        if segment == "..":
            del found[-1:]
        elif segment not in _NO_SEGMENTS:
            found.append(segment)
    return found


def _joined(found: list[str]) -> str:
    return "/" + "/".join(found)


def below(path: str, root: str) -> str:
    """Return the path below a mount point. Other paths stay unchanged, as in Starlette."""
    return path[len(root) :] if root and _is_below(path, root) else path


def _is_tidy(path: str, root: str) -> bool:
    if not path.startswith("/") or (path != "/" and _UNTIDY.search(path)):
        return False
    return not root or _is_below(path, root)


def _below_mount(cleaned: str, root: str) -> str:
    return below(cleaned, _joined(_cleaned(_shown(root)))) or "/"


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root) and (len(path) == len(root) or path[len(root)] == "/")


def _path_of_url(text: str) -> str:
    """Return the path of an absolute URL (RFC 9112 section 3.2.2), as Quart does. The host doesn't matter."""
    text = text.lstrip(_SPACE).replace("\t", "").replace("\r", "").replace("\n", "")
    scheme, colon, behind = text.partition(":")
    if colon and scheme[:1].isalpha() and scheme.isascii() and not scheme.encode().translate(None, _SCHEME_BYTES):
        text = behind
    if text.startswith("//"):
        ends = [at for at in (text.find(mark, 2) for mark in "/?#") if at >= 0]
        text = text[min(ends, default=len(text)) :]
    path = text.partition("#")[0].partition("?")[0]
    return path if path.startswith("/") else f"/{path}"
